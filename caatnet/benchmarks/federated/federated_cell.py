"""Time and bytes to a target accuracy in a radio cell: which updates are sent.

Clients train really; the clock and the cell are simulated
(`caatnet.federated.rehearsal`), so that slow clients and a slow cell take no
time here, and times and bytes do not depend on the load of this machine.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import pathlib
import re
import statistics
from typing import Any

import jax
import ml_collections
import numpy as np

from caatnet.benchmarks.harness.kept import Kept
from caatnet.config import federated
from caatnet.config.override import override
from caatnet.federated import links, splits
from caatnet.federated.local import LocalTrainer
from caatnet.federated.rehearsal import rehearse, rehearse_streamed
from caatnet.show import drawing, plot, render
from caatnet.show.report import Column, Table
from caatnet.train.evaluate import make_evaluate

_KEYS = ("time_s", "bytes_up", "bytes_down")
# Shorter names of variants than their overrides, as patterns.
_NAMES = (
  (r"uplink=(\w+) downlink=\1", r"\1 both ways"),
  (r"uplink=(\w+)", r"\1 up"), (r"downlink=(\w+)", r"\1 down"),
  (r"downlinks_at_once=(\d+) uplinks_at_once=\1", r"\1 transfers at once"),
  (r"stragglers=drop deadline_s=(\S+)", r"deadline \1 s"),
  (r"stragglers=(\w+)", r"\1"), (r"compensation=(\S+)", r"compensated by \1"),
)


def run(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Rehearses all variants and seeds; returns plain data.

  Args:
    config: Config like configs/benchmark/federated_cell.py.

  Raises:
    ValueError: The file of ``config.benchmark.results`` has other runs, or
      matplotlib is missing for ``config.benchmark.plot``.
  """
  options = config.benchmark
  if options.plot:
    drawing.pyplot()  # fails before the work if matplotlib is missing
  base = ml_collections.ConfigDict(config)
  with base.unlocked():
    del base.benchmark
  kept = Kept(config, runs=[])
  runs = kept.found["runs"]
  done = {(run["variant"], run["seed"]) for run in runs}
  for seed in options.seeds:
    missing = [v for v in _variants(options) if (v[0], seed) not in done]
    if not missing:
      continue
    plain = override(base, f"seed={seed}")
    trainers, measures = _shared(federated.build(plain))
    for name, changes, rehearsal in missing:
      changed = override(
        plain, " ".join(f"federated.{change}" for change in changes.split())
      )
      found = rehearsal(
        federated.build(changed), trainers, _compute(options, len(trainers)),
        options.fixed_s, measures,
      )
      runs.append({
        "variant": name, "changes": changes, "seed": seed, "rounds": found,
      })
      kept.save()
      last = found[-1]
      render.show(
        f"{name}, seed {seed}: accuracy {last['accuracy']:.1%}, loss "
        f"{last['loss']:.3f} after {last['time_s']:.0f} s"
      )
  rows = [
    _row(name, [r["rounds"] for r in runs if r["variant"] == name], options)
    for name in dict.fromkeys(r["variant"] for r in runs)
  ]
  render.show(table(rows, options.target))
  if options.plot:
    drawing.write(
      figure(rows, runs, options.target), pathlib.Path(options.plot)
    )
  return {"rows": rows, "runs": runs}


def _variants(
  options: Any
) -> list[tuple[str, str, Callable[..., list[dict[str, Any]]]]]:
  """Returns name, overrides and rehearsal of each variant."""
  num = options.fragments
  streams = functools.partial(rehearse_streamed, fragments=num)
  return [
    *((_named(changes), changes, rehearse) for changes in options.variants),
    *((f"{_named(changes)}, {num} fragments streamed", changes, streams)
      for changes in options.streamed),
  ]


def _named(changes: str) -> str:
  """Returns a name of overrides."""
  for pattern, text in _NAMES:
    changes = re.sub(rf"{pattern}(?= |$)", f"{text},", changes)
  return changes.rstrip(",") or "float32"


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
    next((row for row in rounds if row["accuracy"] >= options.target), None)
    for rounds in runs
  ]
  found = {
    "variant": name, "reached": sum(row is not None for row in reached),
    "seeds": len(runs),
    **{
      key: statistics.median(rounds[-1][key] for rounds in runs)
      for key in ("loss", "accuracy")
    },
    "round_s": statistics.median(
      rounds[-1]["time_s"] / len(rounds) for rounds in runs
    ),
  }
  if None not in reached:
    for key in ("round", *_KEYS):
      values = [row[key] + (key == "round") for row in reached]
      found[key] = statistics.median(values)
      found[f"{key}_range"] = [min(values), max(values)]
  return found


def table(rows: Sequence[Mapping[str, Any]], target: float) -> Table:
  """Returns the table of variants."""
  return Table(
    f"to a validation accuracy of {target:.0%}: medians over seeds, simulated "
    "seconds and MB of all clients",
    [
      Column("variant", "variant"),
      Column("", "reached", "{reached} of {seeds}"),
      Column("round", "rounds", "g", default="-"),
      Column("time_s", "seconds", ",.0f", default="-"),
      Column("bytes_up", "MB up", ",.1f", unit=1e6, default="-"),
      Column("bytes_down", "MB down", ",.1f", unit=1e6, default="-"),
      Column("round_s", "mean round\n(s)", ".1f"),
      Column("accuracy", "last\naccuracy", ".1%"),
      Column("loss", "last loss", ".3f"),
    ],
    rows,
  )


def figure(
  rows: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]],
  target: float,
) -> plot.Figure:
  """Returns accuracy over time, and time and bytes to the target.

  Args:
    rows, runs: Results of `run`.
    target: Target accuracy.
  """
  curves, points = [plot.Rule(target, text=f"{target:.0%}")], []
  for i, row in enumerate(rows):
    mine = [run["rounds"] for run in runs if run["variant"] == row["variant"]]
    style = {
      "label": row["variant"], "colour": f"C{i % 10}",
      "marker": "os^Dv"[i % 5], "size": 4.0,
    }
    curves.append(plot.Line(
      *([statistics.median(each[key] for each in found)
         for found in zip(*mine, strict=True)]
        for key in ("time_s", "accuracy")), **style,
    ))
    if "time_s" in row:
      low, high = row["time_s_range"]
      points.append(plot.Line(
        [(row["bytes_up"] + row["bytes_down"]) / 1e6], [row["time_s"]],
        **style | {"size": 7.0}, errors=([low], [high]),
      ))
  return plot.Figure(
    [
      plot.Panel(curves, "after each round: median of seeds",
                 "simulated seconds", "validation accuracy"),
      plot.Panel(
        points, f"variants that reach {target:.0%} with every seed",
        "MB of all clients, up and down", "simulated seconds", grid=True,
      ),
    ], (12.0, 4.6), 2, legend="outside right upper",
  )
