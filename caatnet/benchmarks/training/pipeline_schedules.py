"""Proofs of all pipeline schedules in their domains; times of a large proof."""

import collections
import functools
import itertools
from typing import Any

from caatnet.benchmarks.harness import processes, timing
from caatnet.show import tables
from parallel.pipeline import cost
from parallel.pipeline.builders import (
  BUILDERS,
  Size,
  build,
  chunks_of,
  taken,
)
from parallel.pipeline.check import check
from parallel.pipeline.pipeline_schedule import Kind, PipelineSchedule


def run(config: Any) -> dict[str, Any]:
  """Proves, prints a table, and returns it as plain data.

  Args:
    config: Config like configs/benchmark/pipeline_schedules.py.

  Raises:
    ValueError: A pipeline schedule is wrong, or deviates from its closed forms.
  """
  options = config.benchmark
  if len(options.timed) != 2:
    raise ValueError(
      f"config.benchmark.timed={options.timed} must be stages and microbatches"
    )
  stages, microbatches = options.timed
  jobs = list(itertools.product(
    BUILDERS, range(1, options.stages + 1), range(1, options.chunks + 1)
  ))
  work = functools.partial(_proven, most=options.microbatches)
  found = collections.Counter()
  for counts in timing.progress(
    processes.shared(work, jobs, options.processes), "proving", len(jobs)
  ):
    found.update(counts)
  rows = []
  for name in BUILDERS:
    table, build_s = timing.cpu_seconds(functools.partial(
      build, name, stages, microbatches, chunks_of(name, 1)
    ))
    _, check_s = timing.cpu_seconds(functools.partial(check, table))
    rows.append({
      "schedule": name, "proven": found[name, "proven"],
      "refused": found[name, "refused"], "actions": found[name, "actions"],
      "build_s": build_s, "check_s": check_s,
    })
  tables.table(
    f"schedules of 1 to {options.stages} stages, 1 to "
    f"{options.microbatches} microbatches, 1 to {options.chunks} chunks; and "
    f"seconds for {stages} stages, {microbatches} microbatches, the fewest "
    "chunks",
    ["schedule", "proven", "not in its domain", "actions", "build s",
     "check s"],
    [
      [r["schedule"], f"{r['proven']:,}", f"{r['refused']:,}",
       f"{r['actions']:,}", f"{r['build_s']:.3f}", f"{r['check_s']:.3f}"]
      for r in rows
    ],
  )
  return {"benchmark": "pipeline_schedules", "timed": [stages, microbatches],
          "rows": rows}


def _proven(
  job: tuple[str, int, int], most: int
) -> collections.Counter[tuple[str, str]]:
  """Proves all schedules of a builder, for given stages and chunks."""
  name, stages, chunks = job
  found = collections.Counter()
  for microbatches in range(1, most + 1):
    size = Size(stages, microbatches, chunks)
    try:
      taken(name, *size)
    except ValueError:
      found[name, "refused"] += 1
      continue
    table = build(name, *size)
    check(table)
    _compare(table, size)
    found[name, "proven"] += 1
    found[name, "actions"] += int((table.kinds > 0).sum())
  return found


def _compare(table: PipelineSchedule, size: Size) -> None:
  """Compares counts with closed forms.

  Raises:
    ValueError: They differ.
  """
  counted = cost.cost(table)
  sent = sum(counted.forward_sends + counted.backward_sends)
  pairs = {
    "stored": (counted.stored, table.limits),
    "sends": (sent, cost.num_sends(
      size, table.has_backward, v_shaped=not table.is_loop
    )),
  }
  try:
    # Durations in ticks: an action takes one tick. A split backward takes two,
    # one per half; an unsplit backward takes one.
    half = 1 if table.splits else 0.5
    seconds = (size.chunks, half * size.chunks, half * size.chunks)
    if not (table.splits and (table.kinds == Kind.BACKWARD).any()):
      pairs["ticks"] = (counted.ticks, cost.step_s(table.name, size, *seconds))
  except ValueError:
    pass  # no closed form
  for what, (counts, form) in pairs.items():
    if counts != form:
      raise ValueError(
        f"{table.name} of {size}: {what} {counts}, closed form {form}"
      )
