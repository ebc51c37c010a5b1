"""Comparison of pipeline schedules: cost in ticks and memory, and time."""

from collections.abc import Mapping
import contextlib
import pathlib
from typing import Any

from parallel.base import checks, files
from parallel.base.naming import prefix_error_keys
from parallel.plans.network import perfetto_trace, trace
from parallel.plans.pipeline import cost, simulate
from parallel.plans.pipeline.builders import (
  BUILDERS,
  PipelineSize,
  build,
  num_chunks_for,
)
from parallel.plans.pipeline.check import check
from parallel.plans.pipeline.pipeline_schedule import PipelineSchedule
from parallel.plans.topology.text import parse_quantity

# Limit on busy and idle ticks, summed over stages, which takes about a minute.
MAX_TICKS = 2**22


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Builds, verifies and simulates pipeline schedules.

  Args:
    config: Config like configs/pipeline/schedules.py, as nested dicts.

  Returns:
    Plain data. "rows" has the counts of each pipeline schedule (see
    `parallel.plans.pipeline.cost.Cost`) and seconds of a step. "skipped" has
    the schedules that do not support the size, and the reasons.

  Raises:
    ValueError: No schedule supports the size, or a number or name is invalid.
  """
  for name in config["schedules"]:
    checks.known("config.schedules: ", name, BUILDERS)
  rows, skipped = [], []
  for name in config["schedules"]:
    try:
      table = build_schedule(config, name)
    except ValueError as error:
      skipped.append({"schedule": name, "why": str(error)})
      continue
    rows.append(_evaluate_schedule(config, name, table))
  if not rows:
    raise ValueError(skipped[0]["why"])
  return {
    "study": "pipeline", "rows": rows, "skipped": skipped,
    "config": dict(config),
  }


def _evaluate_schedule(
  config: Mapping[str, Any], name: str, table: PipelineSchedule
) -> dict[str, Any]:
  """Computes cost and time of one pipeline schedule."""
  found = cost.cost(table)
  timeline = simulate_schedule(config, table)
  work, hops = _part_times(config, table), _hops(config, table)
  alone = simulate.even_stage_links(table.num_stages)  # sending takes no time
  closed_s = None
  if not config["work"]["factors"]:  # closed forms assume equal stages
    with contextlib.suppress(ValueError):  # not all schedules have one
      closed_s = cost.step_s(
        table.name, _size(table), *_action_seconds(config, table)
      )
  return {
    "schedule": name,
    "built": table.name,
    "chunks": table.num_chunks,
    "ticks": found.ticks,
    "bubble": found.bubble,
    "own_bubble": found.own_bubble,
    "stored": list(found.stored),
    "stored_bytes": found.stored_bytes(config["activation_bytes"])
    // table.num_chunks,
    "inputs": list(found.inputs),
    "cotangents": list(found.cotangents),
    "sent_bytes": found.sent_bytes(config["boundary_bytes"]),
    "closed_s": closed_s,
    "without_hops_s": simulate.events(table, work, alone).finish_s,
    "events_s": timeline.finish_s,
    "events_bubble": timeline.bubble,
    "lockstep_s": simulate.lockstep_s(table, work, hops),
  }


def build_schedule(config: Mapping[str, Any], name: str) -> PipelineSchedule:
  """Builds a pipeline schedule for the size of a config, and verifies it.

  If a schedule does not support ``config.pipeline.chunks``, it is built with
  the only number of chunks that it supports, one or two.

  Args:
    config: Config as nested dicts.
    name: Key of `parallel.plans.pipeline.builders.BUILDERS`.

  Raises:
    ValueError: The builder does not support the size, or the step is too large.
  """
  section = config["pipeline"]
  with prefix_error_keys(
    "config.pipeline", ("schedule", "stages", "microbatches", "chunks")
  ):
    checks.known("schedule=", name, BUILDERS)
    size = PipelineSize(
      section["stages"], section["microbatches"],
      num_chunks_for(name, section["chunks"]),
    )
    # Upper bound: forward and two halves of the backward per chunk and
    # microbatch, plus filling and draining.
    ticks = 3 * size.chunks * (size.microbatches + size.stages)
    if size.stages * ticks > MAX_TICKS:
      raise ValueError(
        f"microbatches={size.microbatches} on stages={size.stages} with "
        f"chunks={size.chunks} exceed {MAX_TICKS:,} ticks, summed over stages"
      )
    table = build(name, *size)
  check(table)
  return table


def simulate_schedule(
  config: Mapping[str, Any], table: PipelineSchedule
) -> simulate.Timeline:
  """Returns the timeline of a pipeline schedule, simulated by events.

  Raises:
    ValueError: A number or a kind of link is invalid; the message names its
      key.
  """
  return simulate.events(
    table, _part_times(config, table), _hops(config, table)
  )


def _size(table: PipelineSchedule) -> PipelineSize:
  return PipelineSize(
    table.num_stages, table.num_microbatches, table.num_chunks
  )


def _action_seconds(
  config: Mapping[str, Any], table: PipelineSchedule
) -> tuple[float, float, float]:
  """Returns seconds of a stage's forward and of the halves of its backward.

  With recomputation, a backward begins with another forward; if it is split
  into two actions, each of them does.
  """
  section = config["work"]
  forward_s = section["forward_s"]
  again_s = forward_s if section["recompute"] else 0.0
  return (
    forward_s, section["input_s"] + again_s,
    section["weight_s"] + (again_s if table.splits else 0.0),
  )


def _part_times(
  config: Mapping[str, Any], table: PipelineSchedule
) -> simulate.PartTimes:
  section = config["work"]
  with prefix_error_keys("config.work", section):
    return simulate.even_part_times(
      _size(table), *(section[f"{key}_s"] for key in (
        "forward", "input", "weight"
      )), section["factors"], table.parts,
      again_s=section["forward_s"] if section["recompute"] else 0.0,
    )


def _hops(
  config: Mapping[str, Any], table: PipelineSchedule
) -> simulate.StageLinks:
  """Returns the links between stages, as ``config.link`` describes them."""
  section = config["link"]
  with prefix_error_keys("config.link", section):
    bandwidth, latency_s = (
      parse_quantity(key, section[key]) for key in ("bandwidth", "latency_s")
    )
    checks.positive("bandwidth", bandwidth)
    return simulate.even_stage_links(
      # Stages, seconds that a message occupies a link, and latency.
      table.num_stages, config["boundary_bytes"] / bandwidth, latency_s,
      overlap=section["overlap"],
    )


def export(config: Mapping[str, Any], path: pathlib.Path) -> None:
  """Writes a pipeline schedule's timeline for https://ui.perfetto.dev.

  Args:
    config: Config as nested dicts.
    path: File to write, which ends in .perfetto-trace.

  Raises:
    ValueError: The file has another suffix, the pipeline schedule does not
      support the size, or perfetto is not installed.
  """
  if path.suffix != perfetto_trace.SUFFIX:
    raise ValueError(f"--export={path} must end in {perfetto_trace.SUFFIX}")
  table = build_schedule(config, config["pipeline"]["schedule"])
  name = (
    f"{table.name}, {table.num_stages} stages, {table.num_microbatches} "
    "microbatches"
  )
  rows, bars = trace.action_bars(simulate_schedule(config, table))
  with files.atomic_file(path) as temporary:
    perfetto_trace.write(bars, temporary, name, rows)
