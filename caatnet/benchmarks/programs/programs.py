"""Compiled steps of a model for several targets, with and without kernels.

Each row has the fingerprint of its lowered program. So lowering suffices to
check a row against the current code, which takes seconds (`find_row`).
"""

from collections.abc import Iterable, Mapping
import itertools
import pathlib
from typing import Any

from caatnet.benchmarks.harness import setup, timing
from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.inspection import study
from caatnet.show import results, tables
from caatnet.train.experiment import Experiment
from parallel.ledger import fingerprint, targets

# Keys that identify a program in a row.
PROGRAM_KEYS = ("target", "overrides", "kernels")


def run(config: Any) -> dict[str, Any]:
  """Compiles all programs, prints a table and returns it as plain data.

  Args:
    config: Config like configs/benchmark/programs.py.
  """
  benchmark = config.benchmark
  path = pathlib.Path(benchmark.results) if benchmark.results else None
  rows: dict[tuple[str, ...], dict[str, Any]] = {}
  if benchmark.keep and path is not None:
    try:
      rows = {
        tuple(
          row[key] for key in PROGRAM_KEYS
        ): row for row in results.rows(path)
      }
    except (KeyError, TypeError) as error:
      raise ValueError(
        f"{path} has a row without the keys target, overrides and kernels"
      ) from error
  names = [
    (*program, kernels) for program, kernels in itertools.product(
      benchmark.programs, benchmark.kernels
    )
  ]
  result = {"rows": []}
  for name in timing.progress(names, "compiling"):
    program = dict(zip(PROGRAM_KEYS, name, strict=True))
    experiment, target = build(config, program)
    row = find_row(rows.values(), identity(experiment, target))
    row = row or analyse_program(experiment, target)
    rows[name] = program | {
      k: v for k, v in row.items() if k not in PROGRAM_KEYS
    }
    result["rows"] = [rows[name] for name in names if name in rows]
    if path is not None:
      results.write(path, result)
  _print(result["rows"])
  return result


def build(
  config: Any, program: Mapping[str, str]
) -> tuple[Experiment, targets.Target]:
  """Builds the experiment of a row on the devices of its target."""
  target = targets.resolve(program["target"])
  config = override(
    setup.without_benchmark(config),
    f"{program['overrides']} kernels={program['kernels']}"
  )
  return experiments.build(config, None, list(target.devices)), target


def identity(
  experiment: Experiment, target: targets.Target
) -> dict[str, Any]:
  """Lowers a program; returns the keys and values that its row must have.

  Two targets may compile the same lowered program.
  """
  return {
    "target": target.name,
    "fingerprint": fingerprint.fingerprint(study.lower(experiment)),
    "versions": fingerprint.versions(target.devices[0].platform),
  }


def find_row(
  rows: Iterable[Mapping[str, Any]], same: Mapping[str, Any]
) -> Mapping[str, Any] | None:
  """Returns the row of a program with the `identity` ``same``, or None."""
  return next((row for row in rows if same.items() <= row.items()), None)


def analyse_program(
  experiment: Experiment, target: targets.Target
) -> dict[str, Any]:
  """Compiles a program; returns the part of its analysis that a row stores."""
  analysis = study.analyse(experiment, target)
  row = {key: analysis[key] for key in ("device", "fingerprint", "versions")}
  row["temporary_bytes"] = analysis["memory"]["temporaries"]
  return row | {
    key: analysis[key] for key in ("roofline", "overlap") if key in analysis
  }


def _print(rows: list[dict[str, Any]]) -> None:
  tables.print_table(
    "bounds on a step, not run: GB of main memory moved; seconds with all "
    "overlapped, as scheduled, with nothing overlapped",
    "{target} {overrides}=program | kernels | "
    "roofline.memory_bytes/1e9:,.1f=GB | "
    "roofline.step_if_all_overlaps:.3f=all | "
    "roofline.step_as_scheduled:.3f=as scheduled | "
    "roofline.step_if_none_overlaps:.3f=none",
    [row for row in rows if "roofline" in row],
  )
