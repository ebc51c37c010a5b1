"""`launch.plan` and `launch.measure links`, as users run them."""

import json
import re

import pytest

PLAN = "--config=configs/planner/gpt_11b.py:test"


def test_plan_is_written_and_drawn(launch, tmp_path):
  path, picture = tmp_path / "plan.json", tmp_path / "plan.png"
  document = tmp_path / "plan.html"
  ended = launch(
    "plan", PLAN, "--why_not=parallel.tensor=3", f"--output={path}",
    f"--plot={picture}", f"--report={document}",
  )
  assert ended.returncode == 0, ended.stderr
  assert "why not parallel.tensor=3? stage 1 x" in ended.stdout
  assert "the best as a run's flags: --config.parallel.stage=" in ended.stdout
  result = json.loads(path.read_text())
  best = result["best"][0]
  assert sum(best["latency"].values()) == pytest.approx(best["seconds"])
  assert sum(best["memory"].values()) == pytest.approx(best["bytes"])
  assert sorted(best["order"]) == list(range(8))
  assert picture.stat().st_size > 10_000
  page = document.read_text()
  assert f"<td>1. {best['configuration']}</td>" in page
  assert "data:image/png;base64," in page


def test_flags_of_a_change_train(launch, tmp_path):
  """Applies the printed flags of the plan, then those of the row."""
  pair = {
    "name": "pair", "source": "a test", "mark": "drawn", "device": "h100",
    "nodes": [2], "rows": "device", "bandwidth": [[None, 1e9], [1e9, None]],
    "latency_s": 1e-6,
  }
  (tmp_path / "pair.json").write_text(json.dumps(pair))
  ended = launch("plan", PLAN, f"--cluster={tmp_path / 'pair.json'}")
  assert ended.returncode == 0, ended.stderr
  assert "what would be faster, but trains another model" in ended.stdout
  lines = ended.stdout.splitlines()
  row = next(x for x in lines if "section of streaming, then" in x)
  number = re.search(r"flags of (\d+)\.", row)[1]
  start = "the best as" if number == "1" else f"{number}. as"
  base = next(x for x in lines if x.startswith(f"{start} a run's flags: "))
  flags = [
    part for line in (base, row) for part in line.split()
    if part.startswith("--config.")
  ]
  folder = tmp_path / "run"
  ended = launch(
    "train", "--config=configs/planner/gpt_11b.py:test_train,streaming",
    *flags, "--cpu_devices=2", "--config.data.validation_windows=16",
    f"--workdir={folder}",
  )
  assert ended.returncode == 0, ended.stderr
  config = json.loads((folder / "config.json").read_text())
  assert config["parallel"]["worker"] == 2
  assert config["outer"]["overlap"] == [1]
  steps = (folder / "metrics.jsonl").read_text().splitlines()
  assert json.loads(steps[-1])["step"] == 2


@pytest.mark.parametrize(("script", "args", "message"), [
  ("plan", ["--config=configs/caatnet/tiny.py"], "must be 'planner'; use"),
  ("plan", [PLAN, "--cluster={tmp}/no.json"], "No such file"),
  ("plan", [PLAN, "--cluster=a100"], "as in a100:2, or a path"),
  ("plan", [PLAN, "--cluster={tmp}/zero.json"], "zero.json: bandwidth[0][1]=0"),
  ("plan", [PLAN, "--why_not=parallel.stag=2"], "'parallel.stag' must be one"),
  ("plan", [PLAN, "--why_not=parallel.stage=two"], "'two' must be an integer"),
  ("plan", [PLAN, "--config.planner.utilisation=2"], "config.planner.utilis"),
  ("plan", [PLAN, "--config.planner.execution=fast"], "config.planner.execut"),
  ("plan", [PLAN, "--config.sync.p=0.5"], "plans are made for p = 1 only"),
  ("plan", [PLAN, "--config.planner.schedules=()"], "a non-empty tuple"),
  ("plan", [PLAN, "--config.planner.second.p=(1.0,)"],
   "config.planner.second.p=1"),
  ("plan", [PLAN, "--config.planner.second.overlap=30"],
   "config.planner.second.overlap=30 must be less than config.planner.second"),
  ("plan", ["--config=configs/planner/gpt_11b.py:train,diloko"],
   "the outer loops are data_parallel, local_sgd"),
  ("plan", [PLAN, "--config.planner.keeps=('all',)"],
   "config.planner.keeps='all' must be one of"),
  ("measure", ["links", "--output={tmp}/x.json"], "give one of --num_process"),
  ("measure", ["links", "--output={tmp}/x.json", "--num_processes=1"],
   "two processes or more"),
  ("measure", ["links", "--output={tmp}/x.json", "--topo=LICENSE"],
   "no rows of GPUs"),
  ("measure", ["links", "--output={tmp}/x.json", "--nccl=LICENSE"],
   "LICENSE: the text has no list of ranks"),
  ("measure", ["links", "--output={tmp}/x.json", "--sizes=8e6"],
   "--sizes has no effect on measure links"),
  ("measure", ["memory", "--output={tmp}/x.json", "--nodes=2"],
   "--nodes has no effect on measure memory"),
  ("measure", ["link", "--output={tmp}/x.json"], "one of <links|memory>"),
])
def test_invalid_arguments_are_named(launch, tmp_path, script, args, message):
  zero = {
    "name": "z", "source": "a test", "mark": "drawn", "device": "a100",
    "nodes": [2], "rows": "device", "bandwidth": [[None, 0], [1, None]],
    "latency_s": 0,
  }
  (tmp_path / "zero.json").write_text(json.dumps(zero))
  ended = launch(script, *(a.format(tmp=tmp_path) for a in args))
  assert ended.returncode == 2
  assert message in ended.stderr
  assert len(ended.stderr.strip().splitlines()) == 1
