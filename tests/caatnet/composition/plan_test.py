"""Runs of a composition and experts of its library, without training."""

import math

from etils import epath

from caatnet.composition import training
from caatnet.schema import tree
from configs.experts import kinds as config_file

NAMES, STEPS, EXPERT_STEPS, EVERY = ("python", "c", "text"), 9, 8, 4
FOLDER = epath.Path("/sweep")


def planned(seed=3, baselines=True):
  """Returns the config of the base, section ``kinds``, and the runs by name."""
  config = config_file.get_config("test")
  config.train.num_steps, config.train.checkpoint_every = STEPS, EVERY
  config.kinds.expert_steps, config.kinds.baselines = EXPERT_STEPS, baselines
  options = tree.parse_section("kinds", config.kinds)
  with config.unlocked():
    del config.kinds
  runs = training.plan_runs(config, options, NAMES, FOLDER, seed)
  return config, options, {run.name: run for run in runs}


def test_baselines_have_the_tokens_or_the_size_of_a_composition():
  config, options, runs = planned()
  assert list(runs) == ["base", *NAMES, "union", "same"]
  assert list(planned(baselines=False)[2]) == ["base", *NAMES]
  steps = {name: run.config.train.num_steps for name, run in runs.items()}
  assert steps == {
    "base": STEPS, **dict.fromkeys(NAMES, EXPERT_STEPS),
    "union": 3 * EXPERT_STEPS, "same": STEPS + EXPERT_STEPS,
  }
  model, same = config.model, runs["same"].config.model
  # One row of weights per feature, and biases.
  router = (options.buckets + 1) * len(NAMES)
  channel = 3 * model.width * model.num_layers
  added = same.ffn_width - model.ffn_width
  assert router <= added * channel < router + channel


def test_experts_begin_with_the_base_and_read_their_kind():
  config, options, runs = planned()
  base = FOLDER / "runs" / "base_seed3"
  for name, run in runs.items():
    assert (run.seed, run.config.seed, run.config.name) == (3, 3, name)
    assert run.folder == FOLDER / "runs" / f"{name}_seed3"
    corpus = name if name in NAMES else "union"
    data = run.config.data
    assert data.path == str(FOLDER / "text" / f"{corpus}.train.jsonl")
    assert data.validation_path.endswith(f"/{corpus}.validation.jsonl")
    start, rate = config.train.init_from, config.optimizer.learning_rate
    if name not in ("base", "same"):
      start, rate = str(base), options.learning_rate
    assert run.config.train.init_from == start
    assert run.config.optimizer.learning_rate == rate
    # The last checkpoint is that of the end.
    train = run.config.train
    assert train.keep_checkpoints == train.num_steps // EVERY + 1
    assert train.keep_checkpoints >= math.ceil(train.num_steps / EVERY)


def test_library_prefers_final_experts_of_the_first_seed():
  runs = {seed: list(planned(seed)[2].values()) for seed in (3, 4)}
  found = [
    (name, one.seed, step, origin)
    for name, one, step, origin in training._experts(runs, 3)
  ]
  assert found[:3] == [(name, 3, EXPERT_STEPS, "fine-tuned") for name in NAMES]
  assert found[3:9] == [
    ("union-step24", 3, 24, "checkpoint"), ("base-seed4", 4, STEPS, "seed"),
    *((f"{name}-seed4", 4, EXPERT_STEPS, "seed") for name in NAMES),
    ("union-seed4", 4, 24, "seed"),
  ]
  steps = {"base": (4, 8), **dict.fromkeys(NAMES, (4,)),
           "union": (4, 8, 12, 16, 20)}
  assert found[9:] == [
    (f"{name}-seed{seed}-step{step}", seed, step, "checkpoint")
    for seed in (3, 4) for name, of_run in steps.items() for step in of_run
  ]
