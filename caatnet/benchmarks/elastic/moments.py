"""Comparison of initial inner-optimizer moments for joining workers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from caatnet.benchmarks.harness import setup
from caatnet.config import experiments
from caatnet.show import tables
from caatnet.train.evaluate import make_evaluate, put_batch
from caatnet.train.experiment import Experiment
from caatnet.train.state import restarted

_WAYS = ("no newcomer", "zero", "donor")


def run(config: Any) -> dict[str, Any]:
  """Trains each way for all seeds, prints a table, returns it as plain data.

  Args:
    config: Config like configs/elastic/moments.py.
  """
  rows = []
  for seed in config.benchmark.seeds:
    run_config = setup.without_benchmark(config)
    run_config.seed = seed
    experiment = experiments.build(run_config)
    losses = {
      way: _trained(experiment, way, config.benchmark.replaced)
      for way in _WAYS
    }
    print(f"seed {seed}: {losses}", flush=True)
    rows.append({"seed": seed, **losses})
  _show(rows, config.parallel.worker, config.benchmark.replaced)
  return {"benchmark": "moments", "rows": rows}


def _show(rows: list[dict[str, Any]], workers: int, replaced: int) -> None:
  tables.table(
    f"validation loss, of {workers} workers {replaced} is replaced after each "
    "round",
    ["seed", *_WAYS, "zero against no newcomer", "donor against zero"],
    [
      [str(r["seed"]), *(f"{r[way]:.4f}" for way in _WAYS),
       f"{r['zero'] / r[_WAYS[0]] - 1:+.2%}",
       f"{r['donor'] / r['zero'] - 1:+.2%}"]
      for r in rows
    ],
  )


def _trained(experiment: Experiment, way: str, replaced: int) -> float:
  """Returns the loss after training with workers replaced after each round."""
  program, outer = experiment.program, experiment.outer
  workers = program.layout.worker.size
  dataset = experiment.data.load(experiment.seed)
  rng = np.random.default_rng(experiment.seed)
  state, steps = experiment.init_state(), {}
  replace = jax.jit(functools.partial(_replaced, experiment, way))
  for step in range(experiment.train.num_steps):
    plan = outer.plan(step)
    if plan.variant not in steps:
      steps[plan.variant] = experiment.lower_step(plan).compile(
        program.layout.compiler_options()
      )
    state, _ = steps[plan.variant](
      state, put_batch(program.layout, next(dataset.batches)),
      jax.tree.map(np.int32, plan.numbers),
    )
    if outer.is_border(step + 1):  # end of a round
      gone = rng.permutation(workers)[:replaced]
      donors = (gone + 1) % workers  # int32 [replaced]
      state = state._replace(
        opt_state=replace(state.opt_state, state.params, gone, donors)
      )
  params = experiment.make_export()(state.params, state.outer)
  evaluate = make_evaluate(program, experiment.data.batch_size)
  return evaluate(params, dataset.validation).loss


def _replaced(
  experiment: Experiment, way: str, opt_state: Any, params: Any,
  gone: jax.Array, donors: jax.Array,
) -> Any:
  """Returns the inner optimizers' states ``[workers, ...]`` with new workers.

  Args:
    experiment: The experiment.
    way: Initialisation of the moments, one of ``_WAYS``.
    opt_state: ``[workers, ...]``.
    params: ``[workers, ...]``.
    gone: int32 ``[replaced]``: workers that are replaced.
    donors: int32 ``[replaced]``: workers whose moments are copied.
  """
  if way == "donor":
    return jax.tree.map(lambda x: x.at[gone].set(x[donors]), opt_state)
  workers = jax.tree.leaves(params)[0].shape[0]
  # [workers]: 1 restarts the moments, 0 keeps them (no replacement).
  came = jnp.zeros(workers).at[gone].set(float(way == "zero"))
  return restarted(
    experiment.program, experiment.optimizer, opt_state, params,
    {"just_left_out": came},
  )
