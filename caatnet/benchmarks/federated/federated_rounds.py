"""Predicted and measured rounds of federated runs over emulated links."""

from collections.abc import Mapping, Sequence
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
from typing import Any

import ml_collections

from caatnet import commands
from caatnet.benchmarks.federated import emulation
from caatnet.benchmarks.harness import processes, timing
from caatnet.benchmarks.harness.kept import Kept
from caatnet.config import federated
from caatnet.federated import links, predict
from caatnet.federated.links import Link
from caatnet.federated.service import METRICS
from caatnet.show import render
from caatnet.show.report import Column, Table
from caatnet.train import files, records

PHASES = ("t_a", "t_d", "t_v", "t_tr", "t_te", "t_u")
_COMPUTE = ("t_v", "t_tr", "t_te")
# Links of this machine: a round trip is shorter than a fixed time.
_LOOPBACK = Link("loopback", 1e10, 1e10, 0.0, 0.0, 0.0, 0.0, False, "assumed")

Rows = list[dict[str, Any]]


def run(config: Any) -> dict[str, Any]:
  """Measures, predicts, prints tables, and returns them as plain data.

  Compute times come from a run without emulated links, with the same model and
  clients, which is made before the measured ones. It also gives the time of a
  message before its first byte, from which that of the other models is
  interpolated. No measurement on emulated links enters a prediction.

  Args:
    config: Config like configs/benchmark/federated.py.
  """
  # Programs that all clients compile, each with a part of a processor.
  with tempfile.TemporaryDirectory() as programs:
    return _run(config, {
      "JAX_COMPILATION_CACHE_DIR": programs,
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    })


def _run(config: Any, environment: Mapping[str, str]) -> dict[str, Any]:
  """Measures and predicts all cases; see `run`."""
  options, kept = config.benchmark, Kept(config, measured={})
  measured = kept.found["measured"]
  cases = list(itertools.product(options.models, options.clients))
  references = [
    *itertools.product(options.fitted, options.clients), *cases
  ]
  # A reference is followed by its cases, since the machine's speed may drift.
  for model, num in references:
    interfaces = options.interfaces if (model, num) in cases else ()
    for name in ("", *interfaces):
      case = _name(model, num, name)
      if case not in measured:
        links_of_all = (name,) if name else ()
        found = _measured(options, environment, model, num, links_of_all)
        measured[case] = found | {"load": timing.load()}
        kept.save()
        render.show(*_emulated(found), _line(case, found["rows"]))
  alone = {key: measured[_name(*key)] for key in references}
  fixed = {
    (model, num): predict.fit_fixed(
      found["rows"], _predicted(found, [_LOOPBACK] * num, found, 0.0)
    ) for (model, num), found in alone.items()
  }
  rows = [
    _row(options, measured[_name(model, num, name)], alone, fixed,
         (model, num, name))
    for (model, num), name in itertools.product(cases, options.interfaces)
  ]
  render.show(*tables(rows, options.least_share))
  return {
    "rows": rows,
    "alone": {
      _name(*key): _medians(found["rows"]) for key, found in alone.items()
    },
    "fixed_s": [
      {"model": model, "clients": num, "seconds": seconds}
      for (model, num), seconds in fixed.items()
    ],
  }


def _row(
  options: Any, found: Mapping[str, Any],
  alone: Mapping[tuple[str, int], Mapping[str, Any]],
  fixed: Mapping[tuple[str, int], float], case: tuple[str, int, str],
) -> dict[str, Any]:
  """Returns a case's measurement, and its prediction by the other runs."""
  model, num, name = case
  size = found["rows"][0]["payload_up"]
  fixed_s = interpolated(size, {
    run["rows"][0]["payload_up"]: fixed[other, clients]
    for (other, clients), run in alone.items()
    if clients == num and other != model
  })
  return {
    "model": model.rpartition(":")[2], "config": model, "clients": num,
    "interface": name, "fixed_s": fixed_s, "links": found["links"],
    "load": found["load"], "payload_up": size,
    **compared(found["rows"], _predicted(
      found, links.of_clients((name,), num), alone[model, num], fixed_s
    ), options.least_share),
  }


def interpolated(size: int, fixed: Mapping[int, float]) -> float:
  """Returns the fixed time of a message of a size, at least 0 seconds.

  Bytes are encoded and encrypted before the first one is sent, so it is a
  linear function of the size, fitted on the others.

  Args:
    size: Bytes.
    fixed: Seconds of messages of other sizes; one is a constant, none is 0.

  Example:
    >>> interpolated(2, {1: 0.5, 5: 1.5})
    0.75
  """
  if len(fixed) < 2:
    return sum(fixed.values())
  line = statistics.linear_regression(list(fixed), list(fixed.values()))
  return max(0.0, line.intercept + line.slope * size)


def _name(model: str, num: int, interface: str = "") -> str:
  """Returns the name of a case; without an interface, of its reference."""
  return f"{model}, {num} clients, {interface or 'no links'}"


def _emulated(found: Mapping[str, Any]) -> list[str | Table]:
  """Returns shaped and measured values of a run's links and quotas."""
  record = found["links"]
  return emulation.parts(record["means"], record["clients"]) if record else []


def compared(
  measured: Rows, predicted: Rows, least_share: float
) -> dict[str, Any]:
  """Returns the medians of phases and rounds, and their relative errors.

  Args:
    measured: Rows of clients and rounds.
    predicted: Predicted rows of the same clients and rounds.
    least_share: Share of the measured round from which a phase counts.

  Returns:
    "measured" and "predicted", with seconds by phase and "total", and "errors",
    with the total and the phases that count.
  """
  found, expected = _medians(measured), _medians(predicted)
  counts = [
    name for name in found if found[name] >= least_share * found["total"]
  ]
  return {
    "measured": found, "predicted": expected,
    "errors": {name: expected[name] / found[name] - 1 for name in counts},
  }


def _medians(rows: Rows) -> dict[str, float]:
  """Returns the median of each phase, and that of the rounds' times.

  A round takes t_a and the largest sum of a client.
  """
  totals: dict[int, float] = {}
  for row in rows:
    seconds = sum(row[name] for name in PHASES)
    totals[row["round"]] = max(totals.get(row["round"], 0.0), seconds)
  return {
    name: statistics.median(row[name] for row in rows) for name in PHASES
  } | {"total": statistics.median(totals.values())}


def _measured(
  options: Any, environment: Mapping[str, str], model: str, num: int,
  names: Sequence[str],
) -> dict[str, Any]:
  """Runs launch.federate; returns its rows, its config and emulated links.

  Raises:
    ValueError: It has failed.
  """
  with tempfile.TemporaryDirectory() as folder:
    keys = {
      "clients": num, "per_round": num, "rounds": options.rounds,
      "local_steps": options.local_steps, "cpu_quota": options.cpu_quota,
      **({"links": repr(tuple(names))} if names else {}),
    }
    done = subprocess.run([*processes.with_parent("TERM"), *commands.spawned(
      "federate", f"--config={model}", f"--workdir={folder}",
      *(f"--config.federated.{key}={value}" for key, value in keys.items()),
    )], capture_output=True, text=True, check=False,
      env=os.environ | environment)
    if done.returncode:
      lines = (done.stderr or done.stdout).strip().splitlines()
      why = lines[-1] if lines else f"it ended with code {done.returncode}"
      raise ValueError(f"launch.federate --config={model}: {why}")
    path = pathlib.Path(folder)
    rounds = list(map(json.loads, (path / METRICS).read_text().splitlines()))
    emulated = path / emulation.RECORD
    return {
      "rows": [
        row | {"t_a": each["t_a"]} for each in rounds for row in each["clients"]
      ],
      "config": records.read_config(files.folder(folder)),
      "links": json.loads(emulated.read_text()) if emulated.exists() else None,
    }


def _predicted(
  found: Mapping[str, Any], of_clients: Sequence[Link],
  alone: Mapping[str, Any], fixed_s: float,
) -> Rows:
  """Returns the rows of a run's prediction.

  Args:
    found: The run.
    of_clients: Link of each client.
    alone: Run with the compute times.
    fixed_s: Fixed time of a message.
  """
  config = ml_collections.ConfigDict(found["config"])
  federation = federated.build(config)
  size = 4 * federation.vectors.num
  # Each client's times in each round: clients that end at different times do
  # not share a cell all the time.
  compute: dict[int, list[dict[str, float]]] = {}
  aggregation_s = _medians(alone["rows"])["t_a"]
  for row in sorted(alone["rows"], key=lambda row: row["round"]):
    compute.setdefault(row["client"], []).append(
      {name: row[name] for name in _COMPUTE} | {"t_a": aggregation_s}
    )
  return predict.predict(
    federation.rules, of_clients, predict.Bytes(size, size),
    [compute[client] for client in sorted(compute)], fixed_s,
  )


def _line(name: str, rows: Rows) -> str:
  """Returns the medians of a run: of its phases, and of its rounds."""
  found = _medians(rows)
  return f"{name}: round {found['total']:.3f} s (" + ", ".join(
    f"{phase} {found[phase]:.3f}" for phase in PHASES
  ) + ")"


def tables(rows: Sequence[dict[str, Any]], least_share: float) -> list[Table]:
  """Returns a table of rounds and one of phases."""
  case = ["model", "clients", "interface"]

  def both(name: str) -> Column:
    return Column("", f"{name}, s", "".join((
      "{measured[", name, "]:.3f}: {predicted[", name, "]:.3f}"
    )))

  return [
    Table(
      "measured and predicted medians; a round takes t_a and the largest sum "
      "of a client", [*case, *map(both, (*PHASES, "total"))], rows,
    ),
    Table(
      f"errors of predictions, of phases above {least_share:.0%} of a round",
      [*case, *(
        Column(name, name, "+.1%", default="-") for name in (*PHASES, "total")
      ), Column("worst", "worst", ".1%")],
      [
        {key: row[key] for key in case} | row["errors"] | {
          "worst": max(map(abs, row["errors"].values()))
        } for row in rows
      ],
    ),
  ]
