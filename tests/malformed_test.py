"""Malformed files of every format: each is one line of error.

`FORMATS` lists formats with a valid example and their reader. Each example is
corrupted in all ways of `tests/corruption.py`. A reader either accepts the file
or raises an error of a user with one line.
"""

from collections.abc import Callable
import dataclasses
import gzip
import io
import json
import pathlib
import re
import shutil

from etils import epath
import numpy as np
import pytest

from caatnet.config import memory
from caatnet.config.override import override
from caatnet.data import images, kinds, sources, tokenizers
from caatnet.data.graphs import csr, loaders
from caatnet.federated import server, snapshot
from caatnet.inference import prompts
from caatnet.interop import tensors
from caatnet.interop.source import open_published_model
from caatnet.schema import tree
from caatnet.schema.memory import Memory
from caatnet.serving import router, traces
from caatnet.serving.experts import Library
from caatnet.show import results
from caatnet.studies.datacentre import study as datacentre
from caatnet.studies.flows import study as flows
from caatnet.studies.flows.keys import Flows
from caatnet.studies.partitions import study as partitions
from caatnet.studies.planner import study as planner
from caatnet.studies.schedule import study as schedule
from caatnet.studies.schedule.keys import Schedule
from caatnet.studies.serving import vllm_logs
from caatnet.train import records, sweep
from caatnet.train import tokenizer as run_tokenizer
from caatnet.train.elastic import swarm_loop
from configs.caatnet import tiny
from launch import options
from parallel.ledger import compiler_options, reading
from parallel.peers.membership.journal import Journal
from parallel.peers.transport import handshake
from parallel.plans.hardware import client_links as federated_links
from parallel.plans.hardware import cluster_files, cluster_imports, tiers
from parallel.plans.hardware.devices import DEVICES
from parallel.plans.hardware.links import PCIE_4
from parallel.plans.network import inference
from parallel.plans.planner.space import Configuration
from parallel.plans.schedules import builders
from parallel.plans.schedules.msccl import exporter
from parallel.plans.topology import builders as topologies
from parallel.plans.topology import files as topology_files
from parallel.plans.topology import text as topology_text
from parallel.plans.zero.partition import parse_levels
from tests import claims_test
from tests.caatnet.data.small_tokenizers import bpe_files, llama_files
from tests.caatnet.federated import numeric
from tests.corruption import BINARY, TEXT, corrupted

FAMILIES = pathlib.Path(__file__).parent / "fixtures" / "families"
MODEL = FAMILIES / "llama_3"
LOG = vllm_logs._FOLDER / "rtxpro6000_llama31_8b"


@dataclasses.dataclass(frozen=True)
class Format:
  """Format of a file.

  Attributes:
    file: Path of the file to corrupt, in a folder; may be a pattern.
    make: Writes a valid example of this and all other files to a folder.
    read: Reads the folder.
    binary: Whether the file is no text.
  """

  file: str
  make: Callable[[pathlib.Path], None]
  read: Callable[[pathlib.Path], object]
  binary: bool = False


def texts(**files: str) -> Callable[[pathlib.Path], None]:
  """Returns a function that writes text files; ``__`` stands for a dot."""
  def make(folder: pathlib.Path) -> None:
    for name, text in files.items():
      (folder / name.replace("__", ".")).write_text(text)

  return make


def copies(
  source: pathlib.Path, lines: int | None = None
) -> Callable[[pathlib.Path], None]:
  """Returns a function that copies files, or their first lines, unpacked."""
  def make(folder: pathlib.Path) -> None:
    for path in source.iterdir():
      if path.suffix == ".gz":
        found = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
        (folder / path.stem).write_bytes(b"".join(found[:lines]))
      elif path.is_file():
        shutil.copy(path, folder)

  return make


def saved(**arrays: np.ndarray) -> bytes:
  file = io.BytesIO()
  np.savez(file, **arrays)
  return file.getvalue()


A100 = cluster_files.cluster("a100:1")
CLUSTER = cluster_files.to_json(A100)
CLUSTER_OF_OTHER_DEVICES = cluster_files.to_json(dataclasses.replace(
  A100, device=dataclasses.replace(A100.device, name="other")
))
TOPOLOGY = json.dumps({
  "name": "pair", "num_ranks": 2, "num_switches": 1, "links": [
    {"source": a, "destination": b, "bandwidth": 5e10, "latency_s": 5e-7,
     "both_ways": True} for a, b in ((0, 2), (1, 2))
  ],
})
FEDERATED_LINK = json.dumps(
  dataclasses.asdict(federated_links.LINKS["wifi"])
)
MSCCL = exporter.export_xml(builders.build("ring", topologies.ring(3)))
TOPO = """
        GPU0  GPU1  GPU2  CPU Affinity
GPU0     X    NV12  SYS   0-31
GPU1    NV12   X    PHB   0-31
GPU2    SYS   PHB    X    0-31
"""
NCCL = """# nThread 1 nGpus 1 minBytes 8 maxBytes 64
#  Rank  0 Group  0 Pid  1 on  host device  0 [0x07] NVIDIA A100
#  Rank  1 Group  0 Pid  2 on  host device  1 [0x0b] NVIDIA A100
#       size   count  type  redop  root  time  algbw  busbw #wrong time algbw
           8       2  float  none    -1  12.5   0.00   0.00      0  12.3  0.00
          16       4  float  none    -1  12.9   0.00   0.00      0  12.4  0.00
     1048576  262144  float  none    -1  90.0  11.65  11.65      0  90.1 11.60
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,374,44
2023-11-16 18:17:04.0319569,396,109
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
"""
MOONCAKE = "".join(
  json.dumps({"timestamp": t, "input_length": 513, "output_length": 12,
              "hash_ids": [0, t]}) + "\n"
  for t in range(3)
)
PROGRAM = json.dumps({"step": {
  "mesh": {"data": 2, "tensor": 2}, "collectives": [{
    "kind": "all_reduce", "axes": ["data"], "bytes": 4096, "count": 2,
    "phase": "forward", "where": "step",
  }],
}})
TEXTS = "".join(
  json.dumps({"text": f"document {i} " + "a" * i}) + "\n" for i in range(40)
)
NPZ = saved(
  edge_index=np.array([[0, 1, 2], [1, 2, 0]]),
  features=np.ones((3, 2), np.float32), labels=np.array([0, 1, -1]),
)
PLACEMENT = json.dumps({"policies": [{
  "policy": "latency_first", "host_optimizer": {
    "gradients": {"0": 0.5, "/mnt/disk": 0.5}, "first moments": {"0": 1.0},
  },
}]})
CORPORA = json.dumps({
  "kinds": ["c", "perl"], "left_out": [], "options": {"size_bytes": 1000},
  "files": {"c.train.jsonl": "0" * 64},
})
HLO = (
  pathlib.Path(__file__).parent / "parallel" / "ledger" / "scheduled.hlo.txt"
).read_text()
METRICS = '{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.25}\n'


def make_run(folder: pathlib.Path) -> None:
  config = json.loads(tiny.get_config("test").to_json_best_effort())
  records.write_config(epath.Path(folder), config)
  records.write_json(epath.Path(folder / "environment.json"), {
    "data": {"name": "a", "sha256": "0" * 64}, "python": "3.11.7",
  })
  (folder / "metrics.jsonl").write_text(METRICS)


def read_run(folder: pathlib.Path) -> None:
  tree.check(records.read_config(epath.Path(folder)))
  records.check_data(epath.Path(folder), "0" * 64)
  records.read_metrics(folder)


def make_model(folder: pathlib.Path) -> None:
  copies(MODEL)(folder)
  for name, text in bpe_files(260).items():
    (folder / name).write_text(text)


def make_export(folder: pathlib.Path) -> None:
  make_model(folder)
  found, _ = tensors.find(folder)
  tensors.write_checksums(folder, {
    name: tensors._crc(tensors.read(x, name)) for name, x in found.items()
  })


def make_tokenizer(folder: pathlib.Path) -> None:
  for name, text in llama_files().items():
    (folder / name).write_text(text)
  (folder / "generation_config.json").write_text('{"eos_token_id": [2]}')
  (folder / "config.json").write_text('{"eos_token_id": 2}')


def make_run_tokenizer(folder: pathlib.Path) -> None:
  made = tokenizers.LibraryTokenizer("small", llama_files(), "small")
  run_tokenizer.copy_to_run(epath.Path(folder), made)
  make_run(folder)


def make_graph(folder: pathlib.Path) -> None:
  (folder / "graph.npz").write_bytes(NPZ)
  loaders.npz(folder / "graph", path=str(folder / "graph.npz"),
              undirected=False)


def make_edges(folder: pathlib.Path) -> None:
  (folder / "edges.txt").write_text("# u v\n0 1\n1 2\n2,0\n")
  np.save(folder / "features.npy", np.ones((3, 2), np.float32))
  np.save(folder / "labels.npy", np.array([0, 1, 1]))


def make_ogb(folder: pathlib.Path) -> None:
  for name, text in {
    "raw/edge.csv": "0,1\n1,2\n", "raw/node-feat.csv": "1,2\n3,4\n5,6\n",
    "raw/node-label.csv": "0\n1\n1\n", "split/time/train.csv": "0\n",
    "split/time/valid.csv": "1\n", "split/time/test.csv": "2\n",
  }.items():
    path = folder / f"{name}.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()))


def make_images(folder: pathlib.Path) -> None:
  (folder / "a.npz").write_bytes(saved(
    images=np.random.default_rng(0).random((40, 4, 4)),
    labels=np.arange(40) % 4,
  ))


def read_images(folder: pathlib.Path) -> None:
  data = images.ImageData(
    path=str(folder / "a.npz"), batch_size=4, shape=(4, 4, 1), num_classes=4,
  )
  data.load(0)


def make_profile(folder: pathlib.Path) -> None:
  copies(LOG / "profile")(folder)
  rows = (folder / "attention.csv").read_text().splitlines(keepends=True)
  (folder / "attention.csv").write_text("".join(rows[:500]))


def read_profile(folder: pathlib.Path) -> None:
  vllm_logs.read_profile(folder, vllm_logs.MODELS["meta-llama/Llama-3.1-8B"])


def read_log(folder: pathlib.Path) -> None:
  vllm_logs.prompts(vllm_logs.load(str(folder)), "published")


def read_schedule(folder: pathlib.Path) -> None:
  config = tree.defaults(Schedule).to_dict()
  schedule.build_from_config(config | {
    "msccl": str(folder / "a.xml"), "topology": "ring:3"
  })


def read_program(folder: pathlib.Path) -> None:
  config = tree.defaults(Flows).to_dict()
  flows._program_times(
    config | {"program": str(folder / "a.json")},
    flows._fabric(config, "leaf_spine:2x2x2"),
  )


def make_journal(folder: pathlib.Path) -> None:
  with Journal(folder / "journal") as journal:
    journal.append(journal.record)


def read_journal(folder: pathlib.Path) -> None:
  Journal(folder / "journal").close()


def make_library(folder: pathlib.Path) -> None:
  library = Library.create(folder)
  library.add("base", {"w": np.ones((2, 3), np.float32)}, origin="base")
  router.Router(
    ("a", "b"), np.zeros((8, 2), np.float32), np.zeros(2, np.float32)
  ).write(folder)


def read_library(folder: pathlib.Path) -> None:
  library = Library(folder)
  for name in library.names:
    library.read(name).load()
  router.Router.read(folder)


def make_federated(folder: pathlib.Path) -> None:
  snapshot.write(
    folder / "server.npz",
    server.initial_state(numeric.PARAMS, numeric.Plain()), numeric.rules(),
  )


def make_swarm(folder: pathlib.Path) -> None:
  swarm_loop._write_shared_state(
    epath.Path(folder), 1, 1, {"a": np.ones(3), "b": b"c"}
  )


def one(name: str, text: str, read: Callable[[pathlib.Path], object]) -> Format:
  """Returns the format of a single text file."""
  return Format(
    name, texts(**{name.replace(".", "__"): text}),
    lambda folder: read(folder / name),
  )


def into(load: Callable, **options):
  """Returns a reader by a loader of graphs, whose paths are in the folder."""
  def read(folder: pathlib.Path) -> None:
    paths = {k: str(folder / v) if isinstance(v, str) else v
             for k, v in options.items()}
    load(folder / "graph", **paths)

  return read


FORMATS = {
  "cluster": one("a.json", CLUSTER, cluster_files.read),
  "cluster of other devices": one(
    "a.json", CLUSTER_OF_OTHER_DEVICES, cluster_files.read
  ),
  "topology": one("a.json", TOPOLOGY, topology_files.from_file),
  "federated link": one("a.json", FEDERATED_LINK, lambda path: (
    federated_links.assign_links([str(path)], 2)
  )),
  "msccl": Format("a.xml", texts(a__xml=MSCCL), read_schedule),
  "topo": one("a.txt", TOPO, lambda path: cluster_imports.from_topo(
    path.read_text(), DEVICES["a100"], PCIE_4)),
  "nccl": one("a.txt", NCCL, lambda path: cluster_imports.from_nccl(
    {path.name: path.read_text()}, DEVICES["a100"])),
  "azure": one("a.csv", AZURE, traces.load),
  "burst": one("a.csv", BURST, traces.load),
  "mooncake": one("a.jsonl", MOONCAKE, traces.load),
  **{
    f"log/{name}": Format(name, copies(LOG, 50), read_log)
    for name in ("requests.jsonl", "timeseries.csv", "config.json",
                 "meta.json", "prefixes.csv")
  },
  **{
    f"profile/{name}": Format(name, make_profile, read_profile)
    for name in ("dense.csv", "attention.csv", "per_sequence.csv", "meta.yaml")
  },
  "program": Format("a.json", texts(a__json=PROGRAM), read_program),
  "prompts": one("a.jsonl", '{"prompt": "a b"}\n{"prompt": "c"}\n',
                 lambda path: prompts.read([], str(path))),
  **{
    f"model/{name}": Format(
      name, make_model, lambda folder: open_published_model(folder, 1),
      binary=name.endswith("safetensors"),
    )
    for name in ("config.json", "tokenizer.json", "generation_config.json",
                 "model-00001-of-00002.safetensors",
                 "model.safetensors.index.json")
  },
  "export": Format(
    tensors.CHECKSUMS_FILE, make_export,
    lambda folder: open_published_model(folder, 1)),
  **{
    f"tokenizer/{name}": Format(
      name, make_tokenizer, lambda folder: tokenizers.load(str(folder))
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json",
                 "generation_config.json")
  },
  **{
    f"run/{name}": Format(name, make_run, read_run)
    for name in ("config.json", "environment.json", "metrics.jsonl")
  },
  **{
    f"run/tokenizer/{name}": Format(
      f"tokenizer/{name}", make_run_tokenizer, run_tokenizer.load
    ) for name in ("tokenizer.json", "identity.json")
  },
  "text": one("a.txt", "a b c\n" * 50, lambda path: sources._read_path(
    "config.data.path", str(path))),
  "documents": one("a.jsonl", TEXTS, lambda path: sources.load_documents(
    str(path), 50)),
  "images": Format("a.npz", make_images, read_images, binary=True),
  "edges": Format("edges.txt", make_edges, into(
    loaders.edge_list, path="edges.txt", features="features.npy",
    labels="labels.npy", undirected=False)),
  "features": Format("features.npy", make_edges, into(
    loaders.edge_list, path="edges.txt", features="features.npy",
    labels="labels.npy", undirected=False), binary=True),
  "npz": Format("graph.npz", lambda folder: (folder / "graph.npz").write_bytes(
    NPZ), into(loaders.npz, path="graph.npz", undirected=True), binary=True),
  "ogb": Format("raw/edge.csv.gz", make_ogb, into(
    loaders.ogb, path="", undirected=False), binary=True),
  "graph/meta.json": Format("graph/meta.json", make_graph,
                            lambda folder: csr.open_graph(folder / "graph")),
  "graph/indices.npy": Format(
    "graph/indices.npy", make_graph,
    lambda folder: csr.open_graph(folder / "graph"), binary=True),
  "sweep": one("a.csv", "point,loss\na,2.5\n", lambda path: sweep.read_csv(
    epath.Path(path))),
  "journal": Format("journal", make_journal, read_journal),
  "tiers": one("a.json", tiers.to_json(tiers.HOSTS["two-cxl"]), tiers.read),
  "placement": one("a.json", PLACEMENT, lambda path: memory._placement(
    Memory(optimizer="host", placement=str(path)))),
  "experts": Format("experts.json", make_library, read_library),
  "expert": Format("base-*.safetensors", make_library, read_library, True),
  "router": Format(router.FILE, make_library, read_library, binary=True),
  "corpora": one("a.json", CORPORA, lambda path: kinds.read_manifest(
    epath.Path(path))),
  "hlo": one("a.txt", HLO, reading.read),
  "dump": Format(
    "module_0001.jit_step.cpu_after_optimizations.txt",
    texts(module_0001__jit_step__cpu_after_optimizations__txt=HLO),
    reading.read_all),
  "result": one("a.json", '{"rows": [{"number": 1, "total": 2.5}]}',
                results.rows),
  "federated state": Format(
    "server.npz", make_federated,
    lambda folder: snapshot.read(folder / "server.npz", numeric.rules()),
    binary=True),
  "swarm state": Format(
    "swarm/1.npz", make_swarm,
    lambda folder: swarm_loop._read_shared_state(epath.Path(folder), 1),
    binary=True),
}
# Kinds of faults that every reader of a text must refuse, and readers of texts
# that have no structure, are free to ignore lines, or may be empty.
ALWAYS = {"empty", "not_utf8", "brackets"}
LENIENT = {"text", "sweep", "journal", "run/metrics.jsonl"}


TINY = "--config=configs/caatnet/tiny.py:test"
# A script, a valid flag without its value, and the value.
LINES = [
  ("train", "--config=", "configs/caatnet/tiny.py:test"),
  ("train", "--config.sync.p=", "0.5"),
  ("train", "--config.parallel.tensor=", "4"),
  ("train", "--config.optimizer.learning_rate=", "1e-3"),
  ("train", "--config.model.dtype=", "float32"),
  ("train", "--config.model.remat=", "none"),
  ("train", "--mesh=", "tensor:2"),
  ("train", "--cpu_devices=", "8"),
  ("train", "--profile=", "1:2"),
  ("train", "--config.train.num_steps=", "8"),
  ("train", "--config.seed=", "1"),
  ("simulate", "--config=", "configs/collectives/schedule.py"),
  ("sweep", "--grid=", "sync.p=1.0,0.5"),
  ("evaluate", "--step=", "3"),
  ("serve", "--port=", "8000"),
]
BAD_VALUES = ("", "x", "NaN", "1e999", "-3", "1" + "0" * 30, "[" * 10_000,
              "-" * 9000 + "1", "9" * 400, "9" * 5000, "\0", "\udcff", "0x",
              "1,", "{}", "{[]}", "²")


def build_schedule(text: str) -> None:
  name, chosen = builders.parse_builder(text)
  builders.build(name, topologies.torus((2, 2)), **chosen)


# Readers of texts in options and keys, and a valid text.
READERS = {
  "address": ("[::1]:7000", lambda text: handshake.parse_address("", text)),
  "bandwidths": ("node:100,gpu:3", lambda text: partitions._overrides(
    text, {"node": 1.0, "gpu": 1.0})),
  "cluster": ("a100:2,uneven=1", cluster_files.cluster),
  "grid": ("a=1,2 b=3", sweep.expand),
  "levels": ("node:2,gpu:4", lambda text: parse_levels(text, 8)),
  "machine": ("gpu:h100:1x8", inference.machine),
  "mesh": ("data:2,tensor:4", options.parse_mesh),
  "overrides": ("sync.p=0.5 seed=1", lambda text: override(
    tiny.get_config("test"), text)),
  "profile": ("10:13", options.parse_profile),
  "schedule": ("multitree,farthest_first=True,pieces=2", build_schedule),
  "sites": ("a:1e6", lambda text: datacentre._parse_sites([text])),
  "slice": ("tpu:v5p:2x2x2", inference.machine),
  "topology": ("torus:4x4,bandwidth=1e9,failed=0-1", topology_text.parse),
  "why_not": ("parallel.stage=2 zero.scheme=zero1", lambda text: (
    planner._parse_configuration(text, Configuration(1, 1, 1, 1)))),
  "xla_options": ("xla_a=1 xla_b=true", compiler_options.parse),
}


def failure(read: Callable[[], object]) -> str:
  """Returns the line that a script would print; "" if nothing is wrong."""
  try:
    read()
  except (*options._USER_ERRORS, OSError) as error:
    # Other OSErrors, and errors of several lines, are bugs.
    known = isinstance(error, options._USER_ERRORS) or error.filename
    if not known or isinstance(error, MemoryError) or "\n" in str(error):
      raise
    return options._one_line(error)
  return ""


@pytest.mark.parametrize("name", FORMATS)
def test_malformed_file_is_one_line(tmp_path, name):
  """At least five of these refuse: 200 inputs in all."""
  form = FORMATS[name]
  form.make(tmp_path)
  assert failure(lambda: form.read(tmp_path)) == ""
  (path,) = tmp_path.glob(form.file)
  data = path.read_bytes()
  refused = {}
  faults = [(kind, 0) for kind in (BINARY if form.binary else TEXT)]
  if form.binary:  # a byte of the header may be read in many ways
    faults += [("changed", seed) for seed in range(1, 6)]
  else:  # many numbers, and lines that refer to others
    faults += [
      (kind, seed) for kind in ("beyond_float64", "nul")
      for seed in range(1, 6)
    ]
  for kind, seed in faults:
    path.write_bytes(corrupted(data, kind, seed))
    message = failure(lambda: form.read(tmp_path))
    assert len(message) < 5000
    if message:
      refused[kind] = message
  if form.binary:
    assert {"truncated", "brackets"} <= {*refused}
  elif name not in LENIENT:
    assert {*refused} >= ALWAYS
  form_least = 2 if form.binary or name in LENIENT else 5
  assert len(refused) >= form_least, refused


# Files of one JSON object whose keys are all known, and no value is converted.
STRICT = (
  "cluster", "cluster of other devices", "topology", "federated link", "tiers"
)
# Type of a value -> JSON texts of other types, or of no number.
OTHER_TYPES = {
  bool: ("1", '"true"'),
  int: ("true", "NaN", "1e999", "{}"),
  float: ("true", "NaN", "1e999", "{}"),
  str: ("1", "true", "[1]"),
  list: ('"x"', "true", "null", "{}"),
  dict: ("3", "[]"),
}


def places(value, path=()):
  """Yields the path of values in plain data, of lists the last, and values."""
  yield path, value
  if isinstance(value, dict | list) and value:
    for key in value if isinstance(value, dict) else (len(value) - 1,):
      yield from places(value[key], (*path, key))


def replaced(value, path, new):
  """Returns plain data with a value replaced."""
  if not path:
    return new
  value = value.copy()
  value[path[0]] = replaced(value[path[0]], path[1:], new)
  return value


@pytest.mark.parametrize("name", STRICT)
def test_every_value_of_a_strict_file_has_its_type(tmp_path, name):
  """Errors name the innermost key; objects have no other keys."""
  form = FORMATS[name]
  form.make(tmp_path)
  path = tmp_path / form.file
  valid = json.loads(path.read_text())

  def refused(changed: str) -> str:
    path.write_text(changed)
    message = failure(lambda: form.read(tmp_path))
    assert str(path) in message, changed
    return message.replace(str(path), "")

  for place, value in places(valid):
    key = next((x for x in place[::-1] if isinstance(x, str)), "")
    texts_of_others = OTHER_TYPES.get(type(value), ())
    if type(value) in (int, float):
      texts_of_others += (f'"{value}"',)  # a valid number as text
    for text in texts_of_others:
      changed = json.dumps(replaced(valid, place, "VALUE"))
      assert key in refused(changed.replace('"VALUE"', text)), text
    if isinstance(value, dict) and key != "flops":  # its keys are dtypes
      changed = replaced(valid, place, value | {"unheard": 1})
      assert "'unheard' must be one of" in refused(json.dumps(changed))


@pytest.mark.parametrize(("script", "flag", "value"), LINES)
def test_malformed_flag_is_one_line(script, flag, value, monkeypatch):
  """Parses the flags and, for a sweep, its grid; runs nothing."""
  monkeypatch.chdir(pathlib.Path(__file__).parents[1])
  configs = {"train": [TINY], "evaluate": ["--workdir=x"],
             "serve": ["--workdir=x"], "simulate": [],
             "sweep": ["--config=configs/caatnet/sweep.py"]}
  others = [] if flag == "--config=" else configs[script]

  def parse(text: str) -> str:
    return failure(lambda: claims_test._parse(script, [*others, flag + text]))

  assert parse(value) == ""
  messages = {text: parse(text) for text in BAD_VALUES}
  refused = [text for text, message in messages.items() if message]
  assert len(refused) >= 5, messages
  assert all(len(message) < 5000 for message in messages.values())


@pytest.mark.parametrize("name", READERS)
def test_malformed_text_is_one_line(name):
  """A whole text is replaced, or one of its parts."""
  valid, read = READERS[name]
  assert failure(lambda: read(valid)) == ""
  parts = re.split(r"([,:=x+ -])", valid)
  wrong = [*BAD_VALUES, *(
    "".join([*parts[:i], value, *parts[i + 1:]])
    for i in range(0, len(parts), 2) for value in BAD_VALUES
  )]
  messages = [failure(lambda text=text: read(text)) for text in wrong]
  assert sum(map(bool, messages)) >= len(BAD_VALUES) / 2
  assert max(map(len, messages)) < 5000


def test_there_are_200_malformed_inputs():
  least = [
    2 if form.binary or name in LENIENT else 5
    for name, form in FORMATS.items()
  ]
  assert sum(least) + 5 * len(LINES) >= 200
