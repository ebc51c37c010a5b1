"""Times of steps with a partitioned state against XLA's own partitioning."""

from typing import Any

import jax

from caatnet.benchmarks.harness import setup, timing
from caatnet.benchmarks.training.train_step import (
  our_runner,
  plain_runner,
  timed_in_turns,
)
from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.show import tables
from caatnet.train.records import environment


def run(config: Any) -> dict[str, Any]:
  """Measures, prints a table, and returns it as plain data.

  Args:
    config: Config like configs/benchmark/zero.py.
  """
  options = config.benchmark
  base, tokens = setup.without_benchmark(config), setup.token_batch(config)
  runners = {}
  for label, overrides in options.variants:
    experiment = experiments.build(override(base, overrides))
    if not label.startswith("automatic"):
      runners[label] = our_runner(experiment, tokens).step
    else:
      devices = experiment.program.layout.mesh.devices.ravel()
      mesh = jax.make_mesh(
        devices.shape, ("data",), (jax.sharding.AxisType.Auto,),
        devices=devices,
      )
      runners[label] = plain_runner(experiment, tokens, mesh).step
  seconds = timed_in_turns(runners, options.rounds)
  first = seconds[options.variants[0][0]]
  rows = [
    {"variant": label} | timing.summary(times, first)
    for label, times in seconds.items()
  ]
  tables.table(
    f"training step, {experiment.program.model.num_params / 1e6:.1f}M "
    f"parameters, {tokens[:, 1:].size} tokens, "
    f"{experiment.program.layout.mesh.size} devices",
    ["variant", "median s", "range s", "x first"],
    [
      [r["variant"], f"{r['median_s']:.3f}",
       f"{r['min_s']:.3f} to {r['max_s']:.3f}", f"{r['relative']:.3f}"]
      for r in rows
    ],
  )
  facts = environment(experiment.program.layout.mesh)
  return {"environment": facts, "rows": rows}
