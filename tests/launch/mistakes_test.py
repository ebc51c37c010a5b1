"""Errors of users: one line on stderr, exit code 2, no traceback."""

import re

import pytest

from caatnet import commands

TINY = "--config=configs/caatnet/tiny.py:test"
STREAMING = "--config=configs/diloco/streaming.py:test"
SWARM = "--config=configs/elastic/diloco.py:diloco,test"
EMPTY = "--workdir={tmp}/empty"  # a run without a checkpoint
UTILISATION = "--config=configs/diloco/utilisation.py"
KERNELS = "--config=configs/benchmark/kernels.py"
SCHEDULER = "--config=configs/benchmark/serving.py:test"

# Detected before jax is imported: quick.
FLAGS = [
  ("train", [], "--config is required"),
  ("train", ["--confg=x"], "did you mean --config?"),
  ("train", [TINY, "stray"], "unexpected argument 'stray'"),
  ("train", ["--config=configs/caatnet/tini.py"],
   "no such file; did you mean configs/caatnet/tiny.py?"),
  ("train", ["--config=configs/caatnet/tiny.py:huge"],
   "the sizes are demo and test"),
  ("train", ["--config=configs/caatnet/base.py:arg"], "positional argument"),
  ("train", ["--config=configs/__init__.py"], "must define get_config"),
  ("train", ["--config=LICENSE"], "--config=LICENSE: "),
  ("train", [TINY, "--config.model.widht=64"],
   "did you mean --config.model.width?"),
  ("train", [TINY, "--config.snyc.p=1"], "did you mean --config.sync.p?"),
  ("train", [TINY, "--config.model.width=wide"],
   "config.model.width='wide' must be an integer from 1 to"),
  ("train", [TINY, "--config.sync.p=half"],
   "config.sync.p='half' must lie in [0, 1]"),
  ("train", [TINY, "--config.model.qk_norm=7"],
   "config.model.qk_norm='7' must be True or False"),
  ("train", ["--config.sync.p=1"], "needs --config=PATH"),
  ("train", [TINY, "--mesh=tensor"], "'tensor' is not AXIS:DEVICES"),
  ("train", [TINY, "--mesh=tensor:2,tensor:4"], "'tensor' twice"),
  ("train", [TINY, "--profile=5"], "--profile=5 is not FIRST:LAST"),
  ("train", [TINY, "--cpu_devices=0"], "--cpu_devices=0"),
  ("train", [TINY, "--process_id=0"], "must be given together"),
  ("train", ["--config={tmp}/exits.py"], "exits.py, line 2: SystemExit: 0"),
  ("train", ["--config={tmp}/divides.py"], "line 2: ZeroDivisionError: "),
  ("train", [TINY, "--json"], "--json has no effect on train (--help lists"),
  ("train", [TINY, "--stp=3"], "unknown flag --stp (--help lists them)"),
  ("evaluate", [], "--workdir is required"),
  ("serve", [], "--workdir is required"),
  ("measure", ["links"], "--output is required"),
  ("measure", ["memory"], "--output is required"),
  ("serve", ["--workdir=x", "--port=70000"], "--port=70000"),
  ("evaluate", [TINY], "--config has no effect on evaluate"),
  ("evaluate", ["--config.sync.p=1"], "only config.inference, config.par"),
  ("evaluate", ["--workdir=x", "--config.inference.batch=2"],
   "--config has no effect on evaluate without --tasks"),
  ("evaluate", ["--workdir=x", "--limit=2"],
   "--limit has no effect on evaluate without --tasks"),
  ("evaluate", ["--workdir=x", "--tasks=arc_easy", "--plot=x.png"],
   "--plot=x.png has no effect with --tasks"),
  ("evaluate", ["--workdir=x", "--tasks=,a"], "--tasks=,a has an empty item"),
  ("train", [TINY, "--workdir="], "--workdir= is empty"),
  ("sweep", [TINY, "--seeds="], "--seeds= has an empty item"),
  ("sweep", [TINY, "--seeds=0,,1"], "--seeds=0,,1 has an empty item"),
  ("sweep", [TINY, "--seeds=a,b"], "--seeds=a,b: 'a' is not an integer"),
  ("measure", ["memory", "--output=x", "--file="], "--file= is empty"),
  ("evaluate", ["--workdir=x", "--tasks=a.yaml"], "--tasks=a.yaml: no such fi"),
  ("evaluate", ["--workdir=x", "--tasks=a", "--limit=nan"],
   "--limit=nan must be above 0"),
  ("compile", [TINY, "-workdir", "x"], "--workdir has no effect on compile"),
  ("simulate", [UTILISATION, "--mesh=tensor:2"], "--mesh has no effect on sim"),
  ("simulate", [UTILISATION, "--report=x.pdf"], "=x.pdf: must end in .html or"),
  ("benchmark", [KERNELS, "--nojson"], "--json has no effect on benchmark"),
  ("sweep", ["--grid=sync.p=1"], "--config is required"),
  ("compile", [TINY], "--target is required"),
  ("simulate", [], "--config is required"),
  ("simulate", [UTILISATION, "--config.recommend.lnk=wifi_6"],
   "did you mean --config.recommend.link?"),
]
# Detected when the config is built.
VALUES = [
  ("train", [TINY, "--mesh=tensor:3"], "use one of [1, 2, 4, 8]"),
  ("train", [TINY, "--mesh=tensor:8", "--cpu_devices=2"],
   "--mesh: the mesh needs 8 devices, but this machine has 2"),
  ("train", [TINY, "--mesh=pipeline:2"], "the axes are worker, data, tensor"),
  ("train", [TINY, "--config.parallel.tensor=0"],
   "config.parallel.tensor=0 must be an integer from 1 to"),
  ("train", [TINY, "--config.sync.p=1.5"], "p=1.5 must lie in [0, 1]"),
  ("train", [TINY, "--config.sync.p_mlp=(.5,.5,.5)"],
   "config.sync.p_mlp=(0.5, 0.5, 0.5) has 3 values"),
  ("train", [TINY, "--config.model.num_heads=5",
             "--config.model.num_kv_heads=5"],
   "num_heads=5 does not divide config.model.width=32"),
  ("train", [TINY, "--config.model.num_kv_heads=2"],
   "config.model.num_kv_heads=2 would be padded to 8"),
  ("train", [TINY, "--config.sync.private_scale=sqrt"],
   "must be one of 'none', 'init', 'forward'"),
  ("train", [TINY, "--config.model.dtype=float8"], "config.model.dtype"),
  ("train", [TINY, "--config.model.attention=cudnn"],
   "config.model.attention='cudnn' needs a GPU"),
  ("train", [TINY, "--config.model.remat=all"], "'none', 'full', 'reduced'"),
  ("train", [TINY, "--config.data.batch_size=6",
             "--config.train.accumulation=4"], "must be a multiple of"),
  ("train", [TINY, "--config.optimizer.warmup_steps=99"],
   "config.optimizer.warmup_steps=99 must lie in"),
  ("train", [TINY, "--config.outer.algorithm=dilocco"],
   "config.outer.algorithm='dilocco' must be one of 'data_parallel'"),
  ("train", [STREAMING, "--config.outer.sync_every=0"],
   "config.outer.sync_every=0 must be an integer from 1 to"),
  ("train", [STREAMING, "--config.outer.sync_every=2"],
   "config.outer.sync_every=2 is less than the 3 fragments"),
  ("train", [STREAMING, "--config.outer.overlap=(30,)"],
   "must lie in [0, config.outer.sync_every=30)"),
  ("train", [STREAMING, "--config.outer.overlap=(1,2,3)"],
   "one for each of the 2 workers"),
  ("train", [STREAMING, "--config.outer.overlap=(0,1)"],
   "all zero or all positive"),
  ("train", [STREAMING, "--config.outer.fragment_layers=3"],
   "config.outer.fragment_layers=3 must divide the 2 layers of 'blocks'"),
  ("train", [STREAMING, "--config.outer.pieces=2"],
   "config.outer.pieces=2 must be at least 1 and at most"),
  ("train", [STREAMING, "--config.outer.keep=2.0"],
   "config.outer.keep=2.0 must lie in [0, 1]"),
  ("train", [STREAMING, "--config.outer.codec=int3"], "'int3'"),
  ("train", [STREAMING, "--config.outer.optimizer=lion"],
   "config.outer.optimizer='lion' must be one of"),
  ("train", [STREAMING, "--config.parallel.worker=3"],
   "must be a multiple of config.parallel.worker"),
  ("train", [STREAMING, "--config.outer.block=4",
             "--config.outer.algorithm=noloco"],
   "configs/diloco/streaming.py has no key config.outer.block"),
  ("train", [TINY, "--config.parallel.device_order=(8.5,)"],
   "config.parallel.device_order=8.5 must be an integer from 0 to"),
  ("compile", [TINY, "--target=cpu:1",
               "--config.parallel.xla_options=xla_fast=true"],
   "INVALID_ARGUMENT: No such compile option: "),
  ("train", ["--config={tmp}/none.py"], "config.sync=None must be a section"),
  ("train", ["--config=configs/diloco/fedavg.py:test",
             "--config.outer.clients=9"],
   "config.outer.clients=9 must lie in"),
  ("train", ["--config=configs/diloco/sparseloco.py:test",
             "--config.outer.top_k=6"],
   "config.outer.top_k=6 must be a multiple of 4"),
  ("train", [TINY, "--config.train.num_steps=0"],
   "config.train.num_steps=0 must be an integer from 1 to"),
  ("train", [TINY, "--config.optimizer.clip_norm=-1"],
   "config.optimizer.clip_norm=-1.0 must be at least 0 and finite"),
  ("train", [TINY, "--config.optimizer.eps=nan"],
   "config.optimizer.eps=nan must be positive and finite"),
  ("benchmark", [KERNELS, "--config.benchmark.rounds=0"],
   "config.benchmark.rounds=0 must be an integer from 1 to"),
  ("train", [TINY, "--config.data.path=/nowhere", "--workdir={tmp}/run"],
   "/nowhere"),
  ("train", [TINY, "--config.data.seq_len=9999999", "--workdir={tmp}/run"],
   "config.data.seq_len=9999999"),
  ("train", [UTILISATION], "config.study has no effect on a training run; for "
   "this config there is python -m launch.simulate"),
  ("train", ["--config=configs/caatnet/sweep.py:test"],
   "config.sweep has no effect on a training run; for this config there is "
   "python -m launch.sweep"),
  ("train", [TINY, "--workdir={tmp}/other"], "use another --workdir"),
  ("train", [SWARM], "config.elastic has no effect without --elastic=HOST:PO"),
  ("train", [SWARM, "--elastic=7000"], "--elastic=7000 is not HOST:PORT"),
  ("train", [SWARM, "--elastic=localhost:0"], "with a port from 1 to 65535"),
  ("train", [SWARM, "--elastic=localhost:1", "--workdir={tmp}/run"],
   "--elastic=localhost:1: no coordinator there"),
  ("train", [SWARM, "--elastic=[::1]:1", "--workdir={tmp}/run"],
   "--elastic=[::1]:1: no coordinator there"),
  ("train", [SWARM, "--elastic=localhost:0"], "with a port from 1 to 65535"),
  ("train", [SWARM, "--elastic=::1:7000"], "is not HOST:PORT, as in"),
  ("train", [SWARM, "--config.elastic.order=tree"],
   "config.elastic.order='tree' must be one of 'direct', 'ring'"),
  ("evaluate", ["--workdir={tmp}"], "holds no run"),
  ("evaluate", ["--workdir={tmp}/empty"], "no checkpoint in"),
  ("generate", [EMPTY, "--prompt=a"], "no checkpoint in"),
  ("generate", [EMPTY], "--prompt=TEXT or --prompt_file=PATH is required"),
  ("generate", [EMPTY, "--prompt=a", "--top_p=0"],
   "--top_p=0.0 must lie in (0, 1]"),
  ("generate", [EMPTY, "--prompt=a", "--temprature=1"],
   "did you mean --temperature?"),
  ("generate", [EMPTY, "--prompt=a", "--chat"], "so it has no chat template"),
  ("generate", [EMPTY, "--prompt=a", "--config.sync.p=0.5"],
   "only config.inference, config.parallel.data, config.model.max"),
  ("generate", [EMPTY, "--prompt=a", "--config.inference.bach=3"],
   "did you mean inference.batch?"),
  ("generate", [EMPTY, "--prompt=a", "--config.inference.pages=3"],
   "config.inference.context=1024 must be at most"),
  ("serve", [EMPTY, "--port=0"], "no checkpoint in"),
  ("serve", [EMPTY, "--port=0", "--config.serving.policy=lottery"],
   "config.serving.policy='lottery' must be one of first_come"),
  ("serve", [EMPTY, "--port=0", "--config.serving.polcy=vtc"],
   "did you mean serving.policy?"),
  ("serve", [EMPTY, "--port=0", "--config.serving.queue=-1"],
   "config.serving.queue=-1 must be an integer from 0 to"),
  ("serve", [EMPTY, "--port=0", "--api_key_file=/nowhere"],
   "--api_key_file=/nowhere: "),
  ("serve", [EMPTY, "--host=no.such.host.invalid"],
   "--host=no.such.host.invalid: "),
  ("replay", ["--url=http://127.0.0.1:9"], "--url=http://127.0.0.1:9: "),
  ("replay", ["--compare=vtc"], "--compare and --workdir go together"),
  ("replay", ["--workdir={tmp}"], "--compare and --workdir go together"),
  ("replay", ["--workdir={tmp}", "--compare=vtc", "--url=http://a"], "--url"),
  ("replay", ["--workdir={tmp}", "--compare=vtc,"], "'' must be one of fi"),
  ("replay", ["--max_tokens=0"], "max_tokens"),
  ("replay", ["--think_s=nan"], "think_s=nan must"),
  ("serve", ["--workdir={tmp}"], "holds no run (config.json); launch.tr"),
  ("train", [TINY, "--config.data.tokenizer=configs"],
   "config.data.tokenizer='configs' has no tokenizer.json"),
  ("tokenizer", [TINY, "--output={tmp}/tokenizer"],
   "config.model.vocab_size=256 must be at least 257"),
  ("tokenizer", [TINY, "--vocab_size=300"], "--output is required"),
  ("tokenizer", ["--config=configs/images/tiny.py"],
   "config.data.name='images' must be one of text"),
  ("sweep", [TINY, "--grid=sync.p"], "is not key=value,value"),
  ("sweep", [TINY, "--grid=sync.q=1"], "did you mean sync.p?"),
  ("sweep", [TINY, "--seeds=one"], "'one'"),
  ("compile", [TINY, "--target=v5p"], "must have the form tpu:GENER"),
  ("compile", [TINY, "--target=tpu:v9:2x2"], "use one of v4, v5e, v5p, v6e,"),
  ("compile", [TINY, "--target=tpu:v5p:big"], "the topology 'big' must have"),
  ("compile", [TINY, "--target=tpu:v5e:2x2x2"], "its slices have 2 dims"),
  ("compile", [TINY, "--target=gpu:h300:1x8"],
   "use one of a100, a100-pcie, h100, h200, b200"),
  ("compile", [TINY, "--target=gpu:a100-pcie:2x8"], "supports at most 1"),
  ("compile", [TINY, "--target=cpu:8", "--phase=decode", "--step=1"],
   "--step has no effect on --phase=decode"),
  ("compile", [TINY, "--target=cpu:8", "--phase=decoding"],
   "value should be one of <train|prefill|decode>"),
  ("compile", [TINY, "--target=gpu:h100:1x9"], "at most 8 GPUs per node"),
  ("compile", [TINY, "--target=cpu:2", "--mesh=tensor:8"],
   "--mesh: the mesh needs 8 devices, but this machine has 2"),
  ("compile", [TINY, "--target=cpu:8", "--compare=config.sync.q=1"],
   "did you mean sync.p?"),
  ("simulate", [UTILISATION, "--config.recommend.bits=(4,)",
                "--config.recommend.bits=(2,)"],
   "config.recommend.bits is given twice: (4,) and (2,)"),
  ("simulate", [TINY], "config.study=None must be one of alignment"),
  ("simulate", [UTILISATION, "--config.study=x"],
   "config.study='x' must be one of alignment"),
  ("simulate", [UTILISATION, "--config.recommend.link=wifi_7"],
   "did you mean wifi_6?"),
  ("simulate", [UTILISATION, "--config.recommend.target=1.0"],
   "config.recommend.target=1.0 must lie in (0, 1)"),
  ("simulate", ["--config=configs/serving/fastswitch.py",
                "--config.hardware.pages=3"],
   "config.hardware.pages=3 are too few for any of the requests"),
  ("benchmark", [SCHEDULER, "--config.benchmark.pages.vtc=5"],
   "config.benchmark.pages.vtc=5 must be at least 90"),
  ("benchmark", [SCHEDULER, "--config.benchmark.policies=()"],
   "config.benchmark.policies=() must be a non-empty tuple"),
  ("simulate", [UTILISATION, "--config.recommend.sync_every=(0.5,)"],
   "config.recommend.sync_every=0.5 must be an integer"),
]

# Flags of files that scripts write. Each line has a mistake that its script
# finds when the work begins.
WRITTEN = [
  ("benchmark", [SCHEDULER, "--config.benchmark.policies=('x',)"], "output"),
  ("compile", [TINY, "--target=v5p"], "report"),
  ("docs.demo", ["--mesh=tensor:3"], "output"),
  ("evaluate", ["--workdir={tmp}"], "plot"),
  ("federate", ["--config=configs/federated/tiny.py", "--client=0"], "plot"),
  ("graph", [TINY], "output"),
  ("measure", ["links"], "output"),
  ("measure", ["memory", "--sizes=big"], "output"),
  ("place", [TINY], "output"),
  ("plan", [TINY], "plot"),
  ("replay", ["--trace=/nowhere"], "output"),
  ("sends", ["{tmp}"], "trace"),
  ("sends", ["{tmp}"], "chakra"),
  ("sends", ["{tmp}"], "calibrate"),
  ("simulate", [TINY], "export"),
  ("simulate", [TINY], "html"),
  ("tokenizer", ["--config=configs/images/tiny.py"], "output"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  """Folders of another run and of one without a checkpoint; invalid configs."""
  from configs.caatnet import tiny

  tmp = tmp_path_factory.mktemp("mistakes")
  config = tiny.get_config("test")
  for name, p in (("other", 0.125), ("empty", 1.0)):
    config.sync.p = p
    (tmp / name).mkdir()
    (tmp / name / "config.json").write_text(config.to_json())
  for name, line in (
    ("exits", "raise SystemExit(0)"), ("divides", "1 / 0"),
    ("none", "from configs.caatnet import tiny\n  config = tiny.get_config()\n"
     "  config.sync = None\n  return config"),
  ):
    (tmp / f"{name}.py").write_text(f"def get_config():\n  {line}\n")
  return tmp


@pytest.mark.parametrize(("script", "args", "message"), FLAGS + VALUES)
def test_error_is_one_line_with_exit_code_2(
  script, args, message, folders, launch
):
  args = [a.replace("{tmp}", str(folders)) for a in args]
  _assert_one_line(launch(script, *args), message)


@pytest.mark.parametrize(("script", "args", "flag"), WRITTEN)
def test_path_is_checked_before_the_work(script, args, flag, folders, launch):
  """The parent is a file."""
  args = [a.replace("{tmp}", str(folders)) for a in args]
  path = f"--{flag}={folders}/divides.py/x.html"
  _assert_one_line(
    launch(script, *args, path), f"{path} cannot be written: "
  )


def test_paths_are_those_of_files_or_of_folders(folders, launch):
  ended = launch("simulate", TINY, f"--output={folders}")
  _assert_one_line(ended, f"{folders} cannot be written: it is not a file")
  ended = launch("simulate", TINY, "--output=/dev/null")
  _assert_one_line(ended, "/dev/null cannot be written: it is not a file")
  ended = launch("tokenizer", TINY, f"--output={folders}/divides.py")
  _assert_one_line(ended, "cannot be written: it is not a folder")
  key = f"config.benchmark.results={folders}"
  ended = launch("benchmark", "--config=configs/benchmark/programs.py",
                 f"--{key}")
  _assert_one_line(ended, f"{key} cannot be written: it is not a file")


def _assert_one_line(ended, message):
  errors = [
    line
    for line in ended.stderr.splitlines()
    if line and not line.startswith(("WARNING", "I0", "W0"))
  ]
  assert ended.returncode == 2, ended.stderr
  assert len(errors) == 1, ended.stderr
  assert errors[0].startswith("error: ")
  assert message in errors[0]


def test_debug_shows_the_traceback(launch):
  ended = launch("train", TINY, "--config.sync.p=2.0", "--debug")
  assert ended.returncode == 1
  assert "Traceback" in ended.stderr


@pytest.mark.parametrize("script", [
  "train", "evaluate", "sweep", "docs.demo", "benchmark", "compile", "simulate",
  "generate", "tokenizer", "serve", "replay", "sends",
])
def test_help_names_command_and_flags(script, launch):
  """The help of a shared flag names no other command."""
  ended = launch(script, "--help")
  assert ended.returncode == 0
  module = script if "." in script else f"launch.{script}"
  assert f"python -m {module}" in ended.stdout
  assert "--debug" in ended.stdout
  assert "--logtostderr" not in ended.stdout
  texts = ended.stdout.partition("\nflags:")[2]
  assert not re.search(rf"\b({'|'.join(commands.scripts())}): ", texts)
  assert ("--config" in texts) == (script not in ("replay", "sends"))
  assert ("--mesh" in texts) == (
    script not in ("benchmark", "simulate", "tokenizer", "replay", "sends")
  )


def test_data_that_is_not_text_is_named(tmp_path, launch):
  (tmp_path / "data.txt").write_bytes(b"\x00\xff\x00\xff" * 4000)
  ended = launch(
    "train", TINY, f"--config.data.path={tmp_path / 'data.txt'}",
    f"--workdir={tmp_path / 'run'}",
  )
  _assert_one_line(ended, "data.txt")
