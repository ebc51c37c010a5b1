"""Fault injection: workers are killed, stopped, cut off and join."""

from collections import Counter
import pathlib
import tempfile
from typing import Any

from rich.progress import Progress

from caatnet.benchmarks.elastic.churn_network import (
  REACHABILITY_EVENTS,
  Network,
)
from caatnet.benchmarks.elastic.churn_run import (
  EVENT_KINDS,
  PHASE_COLUMNS,
  Churn,
)
from caatnet.benchmarks.elastic.churn_training import Training
from caatnet.show import tables


def run(config: Any) -> dict[str, Any]:
  """Runs all seeds, prints tables, and returns them as plain data.

  Args:
    config: Config like configs/elastic/churn.py.

  Raises:
    RuntimeError: Workers' digests differ, a worker fails, or no round ends
      within ``config.benchmark.limit_s``.
  """
  options = config.benchmark
  runs = []
  for seed in options.seeds:
    with tempfile.TemporaryDirectory() as folder, Progress(
      transient=True
    ) as progress:
      make = Training if "model" in config else Churn
      if options.network:
        make = Network
      churn = make(pathlib.Path(folder), config, seed)
      try:
        runs.append({"seed": seed, **churn.run(progress)})
        print(f"seed {seed}:", {
          key: runs[-1][key] for key in (
            "rounds", "longest_s", "dropped", "loss", "calm_loss"
          )
        }, flush=True)
      finally:
        churn.end()
  _show(runs, options)
  return {"benchmark": "churn", "runs": runs}


def _show(runs: list[dict[str, Any]], options: Any) -> None:
  happened = Counter(
    (kind, when) for r in runs for kind, when in r["events"]
  )
  tables.print_table(
    f"events among {options.workers} workers, by phase of the coordinator",
    ["event", *PHASE_COLUMNS, "description"],
    [
      [kind, *(str(happened[kind, when]) for when in PHASE_COLUMNS), what]
      for kind, what in {**EVENT_KINDS, **REACHABILITY_EVENTS}.items()
      if kind in EVENT_KINDS or options.network
    ],
  )
  tables.print_table(
    "results of each run",
    "seed | events | rounds | epochs | longest_s=longest without | refused | "
    "samples | loss:.5f | calm_loss:.5f=without events | difference:+.2%",
    [
      r | {"events": len(r["events"]),
           "difference": r["loss"] / r["calm_loss"] - 1} for r in runs
    ],
  )
  tables.print_table(
    "the longest times without a round, and the events during them and shortly "
    "before",
    ["seed", "s", "events"],
    [
      [str(r["seed"]), f"{seconds:.1f}", ", ".join(what)]
      for r in runs for seconds, what in r["pauses"]
    ],
  )
  for r in runs:
    print(f"the coordinator's output in the longest, seed {r['seed']}:")
    print("".join(r["said"]))
  print("Digests were equal on all workers after every round, and the logs "
        "replay to the same decisions.")


