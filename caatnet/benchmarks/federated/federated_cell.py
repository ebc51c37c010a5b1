"""Time and bytes to a target loss in a radio cell: which updates are sent.

Clients train really; the clock and the cell are simulated
(`caatnet.federated.rehearsal`), so that slow clients and a slow cell take no
time here.
"""

from collections.abc import Callable, Mapping, Sequence
import statistics
from typing import Any

import jax
import ml_collections
import numpy as np

from caatnet.config import federated
from caatnet.config.override import override
from caatnet.federated import links, splits
from caatnet.federated.local import LocalTrainer
from caatnet.federated.rehearsal import rehearse
from caatnet.show import render
from caatnet.show.report import Column, Table
from caatnet.train.evaluate import make_evaluate

_KEYS = ("time_s", "bytes_up", "bytes_down")


def run(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Rehearses all variants and seeds; returns plain data.

  Args:
    config: Config like configs/benchmark/federated_cell.py.
  """
  options = config.benchmark
  base = ml_collections.ConfigDict(config)
  with base.unlocked():
    del base.benchmark
  runs = []
  for seed in options.seeds:
    plain = override(base, f"seed={seed}")
    trainers, measures = _shared(federated.build(plain))
    for name in options.variants:
      changed = override(
        plain, " ".join(f"federated.{change}" for change in name.split())
      )
      found = rehearse(
        federated.build(changed), trainers, _compute(options, len(trainers)),
        options.fixed_s, measures,
      )
      runs.append({"variant": name, "seed": seed, "rounds": found})
      last = found[-1]
      render.show(
        f"{name or 'float32'}, seed {seed}: loss {last['loss']:.3f} after "
        f"{last['time_s']:.0f} s"
      )
  rows = [
    _row(name, [r["rounds"] for r in runs if r["variant"] == name], options)
    for name in options.variants
  ]
  render.show(table(rows, options.target))
  return {"rows": rows, "runs": runs}


def _shared(
  federation: federated.Federation,
) -> tuple[list[LocalTrainer], Callable[[np.ndarray], Mapping[str, float]]]:
  """Returns the trainers of a seed, with one set of programs, and measures."""
  some, experiment = federation.section, federation.experiment
  # Losses of clients have no effect here, and take time.
  first = LocalTrainer(
    experiment, _examples(federation, 0), 0, some.local_steps, some.proximal,
    validate=False, test=False,
  )
  data = experiment.data
  dataset = data.load(experiment.seed)
  evaluate = make_evaluate(experiment.program, data.batch_size)
  tree = jax.jit(federation.vectors.tree)

  def measures(params: np.ndarray) -> Mapping[str, float]:
    return dataset.measures(evaluate(tree(params), dataset.validation).means)

  return [
    first.for_client(_examples(federation, k), k) for k in range(some.clients)
  ], measures


def _examples(
  federation: federated.Federation, client: int
) -> splits.Examples:
  """Returns the examples of a client."""
  some, experiment = federation.section, federation.experiment
  return splits.of_client(
    experiment.data, some.split, client, some.clients, some.alpha,
    experiment.seed,
  )


def _compute(options: Any, clients: int) -> list[dict[str, float]]:
  """Returns the compute times of clients; the last one is slow."""
  factors = links.spread_factors(clients, options.compute_spread)
  factors[-1] *= options.slow
  return [{"t_tr": options.compute_s * factor} for factor in factors]


def _row(
  name: str, runs: Sequence[Sequence[Mapping[str, Any]]], options: Any
) -> dict[str, Any]:
  """Returns medians over seeds, at the first round that reaches the target."""
  reached = [
    next((row for row in rounds if row["loss"] <= options.target), None)
    for rounds in runs
  ]
  found = {
    "variant": name, "reached": sum(row is not None for row in reached),
    "seeds": len(runs),
    "loss": statistics.median(rounds[-1]["loss"] for rounds in runs),
    "round_s": statistics.median(
      rounds[-1]["time_s"] / len(rounds) for rounds in runs
    ),
  }
  if None not in reached:
    for key in ("round", *_KEYS):
      values = [row[key] for row in reached]
      found[key] = statistics.median(values)
      found[f"{key}_range"] = [min(values), max(values)]
    found["round"] += 1
  return found


def table(rows: Sequence[Mapping[str, Any]], target: float) -> Table:
  """Returns the table of variants."""
  return Table(
    f"to a validation loss of {target:g}: medians over seeds, simulated "
    "seconds and MB of all clients",
    [
      Column("variant", "variant", lambda name: name or "float32"),
      Column("", "reached", "{reached} of {seeds}"),
      Column("round", "rounds", "g", default="-"),
      Column("time_s", "seconds", ",.0f", default="-"),
      Column("bytes_up", "MB up", ",.1f", unit=1e6, default="-"),
      Column("bytes_down", "MB down", ",.1f", unit=1e6, default="-"),
      Column("round_s", "mean round\n(s)", ".1f"),
      Column("loss", "last loss", ".3f"),
    ],
    rows,
  )
