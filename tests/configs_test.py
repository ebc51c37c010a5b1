"""Properties of every config; sizes of the paper's models."""

import importlib
import pathlib

import pytest

from caatnet.config import experiments
from caatnet.config.override import override, take_sweep
from caatnet.models.lm.communication import tensor_reductions
from caatnet.schema import tree
from caatnet.studies import registry
from parallel.ledger import ledger
from parallel.plans.topology import text

ROOT = pathlib.Path(__file__).parents[1]
NAMES = sorted(
  ".".join(path.relative_to(ROOT).with_suffix("").parts)
  for path in (ROOT / "configs").glob("*/*.py")
  if path.stem != "__init__"
)
# Parameters in 1e9, with embedding and head of 32,000 tokens; width; fraction
# of the highest learning rate at the last step: 130m ends before its schedule,
# at step 30,010.
PAPER = {
  "130m": (0.134, 768, 0.993), "1b": (1.123, 2048, 0.1), "7b": (6.74, 4096, 0.1)
}


@pytest.mark.rotated
@pytest.mark.parametrize("name", NAMES)
def test_config_builds(name):
  config = importlib.import_module(name).get_config()
  if "study" in config:  # a study of launch.simulate: no training run
    if name.startswith(
      ("configs.collectives", "configs.federated", "configs.planner",
       "configs.serving")
    ):
      config = importlib.import_module(name).get_config("test")
    assert registry.find(config).run(config.to_dict())
    return
  if "graph" in config:  # a graph of launch.graph
    tree.check(config)
    return
  if "experts" in config:  # a server of experts; no training run
    tree.check(config)
    return
  take_sweep(config)
  if "benchmark" in config:
    with config.unlocked():
      del config.benchmark
    if "model" not in config:  # the benchmark times no training step
      return
  if "federated" in config:  # this is the run of a client
    if config.federated.numpy_client:
      tree.check(config)
      return
    with config.unlocked():
      del config.federated
  if "kinds" in config:  # a composition; this is the base's run
    with config.unlocked():
      del config.kinds
  experiment = experiments.build(config)
  # A benchmark of one device has one rank, as have a worker of a swarm, a long
  # sequence on one device, and a small expert.
  one = name in (
    "configs.benchmark.decoding", "configs.benchmark.graphs",
    "configs.benchmark.peers", "configs.benchmark.server",
    "configs.elastic.diloco", "configs.experts.kinds",
    "configs.federated.cell", "configs.federated.tiny",
    "configs.memory.7b_long",
  )
  sizes = (1,) if one else (2, 4, 8)
  assert experiment.program.layout.mesh.devices.size in sizes


def test_default_folders_differ():
  """Each run's folder is named after its config."""
  templates = {"configs.caatnet.base", "configs.diloco.base"}
  configs = [
    importlib.import_module(name).get_config()
    for name in sorted(set(NAMES) - templates)
  ]
  names = [c.name for c in configs if "study" not in c]
  assert len(set(names)) == len(names), names


@pytest.mark.parametrize("name", PAPER)
def test_sent_bytes_of_the_published_models_equal_the_formula(name):
  """Lowers the whole model without running it: 7B does not fit a laptop."""
  config = importlib.import_module(f"configs.caatnet.{name}").get_config()
  experiment = experiments.build(override(config, "sync.p=0.5"))
  model = experiment.program.model.config
  billions, width, final = PAPER[name]
  rate = experiment.learning_rate(config.train.num_steps - 1)
  assert rate / config.optimizer.learning_rate == pytest.approx(final, 1e-3)
  assert abs(model.num_params / 1e9 - billions) < 0.01
  lowered = experiment.lower_step()
  entries = ledger.collectives(lowered, experiment.program.layout.mesh)
  projections = [c for c in entries if c.where.startswith("blocks")]
  assert {c.shape[-1] for c in projections} == {width // 2}
  expected = tensor_reductions(
    model,
    data_lanes=experiment.program.layout.data[0].lanes,
    batch_size=config.data.batch_size
    // (config.parallel.data * config.train.accumulation),
    seq_len=config.data.seq_len,
    accumulation=config.train.accumulation,
  )
  for phase, dtype in (("forward", "bfloat16"), ("backward", "float32")):
    assert sum(
      c.elements * c.count
      for c in ledger.select(entries, axis="tensor", phase=phase, dtype=dtype)
    ) == sum(
      count * _size(reduction.shape)
      for reduction, count in expected.items()
      if (reduction.phase, reduction.dtype) == (phase, dtype)
    )


def _size(shape):
  size = 1
  for dim in shape:
    size *= dim
  return size


def get(name, *size):
  return importlib.import_module(f"configs.{name}").get_config(*size)


@pytest.mark.parametrize(("name", "size", "billions"), [
  ("zero.20b", (), 20.3), ("inference.70b", (), 69.0),
  ("memory.12b_32k", ("12b",), 12.2), ("memory.12b_32k", ("7b",), 6.74),
  ("memory.7b_long", (), 6.74), ("benchmark.programs", ("7b",), 6.74),
  ("planner.gpt_11b", ("train",), 11.1),
  ("benchmark.train_step", ("270m",), 0.271),
  ("benchmark.peers", ("135m",), 0.135), ("caatnet.tiny", (), 0.00087),
  ("experts.kinds", ("study",), 0.00087),
  ("experts.kinds", ("small",), 0.00013),
])
def test_models_have_the_parameters_of_their_documentation(
  name, size, billions
):
  model = get(name, *size).model
  head = model.head_width or model.width // model.num_heads
  layer = 3 * model.ffn_width + 2 * head * (
    model.num_heads + model.num_kv_heads
  )
  count = model.width * (model.num_layers * layer + 2 * model.vocab_size)
  assert count / 1e9 == pytest.approx(billions, rel=5e-3, abs=5e-6)


@pytest.mark.parametrize(("name", "size", "runs", "steps", "tokens"), [
  ("caatnet.sweep", "study", 39, 160, 2048),
  ("zero.sweep", "study", 18, 300, 1024),
  ("diloco.sweep", "study", 54, 600, 1024),
  ("diloco.sweep", "long", 6, 3000, 2048),
  ("diloco.rounding", "study", 12, 300, 1024),
])
def test_sweeps_have_the_runs_of_their_documentation(
  name, size, runs, steps, tokens
):
  config = get(name, size)
  points = config.sweep.points
  assert len(set(points)) * len(set(config.sweep.seeds)) == runs
  assert config.train.num_steps == config.train.eval_every == steps
  assert config.data.seq_len * config.data.batch_size == tokens
  assert steps % config.train.checkpoint_every == 0


def test_runs_from_a_dense_model_differ_in_one_property():
  parts = ("dense", "half", "half_unscaled", "full", "half_drawn", "full_drawn")
  found = {p: get("caatnet.from_dense", f"{p},2").to_dict() for p in parts}
  names = {part: config.pop("name") for part, config in found.items()}
  assert len({*names.values()}) == 6
  for part in ("half", "half_unscaled", "full"):
    assert found[part]["train"].pop("init_from") == f"runs/{names['dense']}"
    found[part]["train"]["init_from"] = ""
  assert found["dense"] == found["full"]
  found["half_unscaled"]["sync"]["private_scale"] = "forward"
  assert found["half_unscaled"] == found["half"]
  steps = [found[part]["train"]["num_steps"] for part in parts]
  assert steps == [80, 80, 80, 80, 160, 160]
  p = [found[part]["sync"]["p"] for part in parts]
  assert p == [1, 0.5, 0.5, 1, 0.5, 1]
  assert {config["seed"] for config in found.values()} == {2}


def test_topologies_have_the_ranks_of_their_size():
  for size, ranks in (("small", (16,) * 4 + (64,) * 4), ("large", (256,) * 4)):
    found = get("collectives.multitree", size).topologies
    assert tuple(text.parse(name).num_ranks for name in found) == ranks
