"""Pairs of a pipeline's options: results, and times by another algorithm."""

import itertools

import numpy as np
import pytest

from parallel.plans.pipeline import builders, simulate
from parallel.plans.pipeline.builders import PipelineSize
from parallel.plans.pipeline.pipeline_schedule import ActionKind
from tests import pairwise
from tests.parallel.pipeline import run_test


def refused(row):
  """Whether a schedule has no such size."""
  try:
    builders.build(
      row["name"], row["stages"], row["microbatches"], row["chunks"]
    )
  except ValueError:
    return True
  return row["chunks"] > 1 and not builders.BUILDERS[row["name"]].chunked


RUNS = pairwise.rows(
  {
    "name": ("1f1b", "interleaved_1f1b", "zb_h1", "gpipe"),
    "stages": (4, 2), "microbatches": (4, 8), "chunks": (1, 2),
    "lanes": (1, 2), "ranks": (1, 2), "keeps": (True, False),
  },
  refused,
)
TIMES = pairwise.rows(
  {
    "name": ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "looped",
             "zb_h1", "zb_h2"),
    "stages": (1, 3, 4), "microbatches": (4, 12), "chunks": (1, 3),
    "busy_s": (0.0, 0.3, 4.0), "latency_s": (0.0, 0.7),
    "overlap": (True, False), "factors": (False, True),
  },
  refused,
)


@pytest.mark.rotated
@pytest.mark.parametrize("row", RUNS, ids=pairwise.label)
def test_options_together_equal_a_single_program(row):
  run_test.check_stages_equal_a_single_program((
    row["name"], row["stages"], row["microbatches"], row["chunks"],
    row["stages"] // row["lanes"], row["ranks"], row["keeps"],
  ))


def times_by_relaxation(schedule, work, hops):
  """Returns the earliest start of each action, a dict by (tick, stage).

  All constraints are applied again and again until they hold: no order of the
  actions on different stages is assumed, only the order on a stage.
  """
  seconds, stages = work.by_kind(), schedule.num_stages
  actions, order = {}, []  # (kind, part, microbatch) of each action
  for stage in range(stages):
    for tick, action in schedule.actions(stage):
      actions[tick, stage] = (
        action.kind, action.chunk * stages + stage, action.microbatch
      )
    order.append(sorted(x for x in actions if x[1] == stage))
  made = {value: key for key, value in actions.items()}

  def maker(at):
    """Returns the action whose result an action waits for, or None."""
    kind, part, m = actions[at]
    if kind == ActionKind.FORWARD:
      return made.get((kind, part - 1, m))
    if kind == ActionKind.WEIGHT or part == schedule.num_parts - 1:
      return None
    return made.get((kind, part + 1, m))

  sends = {maker(x) for x in actions if maker(x) and maker(x)[1] != x[1]}
  if stages == 1:
    sends = set()

  def link(at):
    ahead = actions[at][0] == ActionKind.FORWARD
    return at[1], ahead, (hops.forward_s if ahead else hops.backward_s)[at[1]]

  start = dict.fromkeys(actions, 0.0)
  leave = dict.fromkeys(sends, 0.0)
  changed = True
  while changed:
    changed = False
    for stage in range(stages):
      for before, at in zip([None, *order[stage]], order[stage], strict=False):
        least = start[at]
        if before is not None:
          least = max(least, start[before] + seconds[actions[before][:2]])
          if not hops.overlap and before in sends:
            least = max(least, leave[before] + link(before)[2])
        if (source := maker(at)) is not None:
          there = start[source] + seconds[actions[source][:2]]
          if source in sends:
            there = leave[source] + link(source)[2] + hops.latency_s
          least = max(least, there)
        changed |= least > start[at]
        start[at] = least
      for ahead in (True, False):
        on_link = [
          x for x in order[stage] if x in sends and link(x)[1] == ahead
        ]
        for before, at in zip([None, *on_link], on_link, strict=False):
          least = start[at] + seconds[actions[at][:2]]
          if before is not None:
            least = max(least, leave[before] + link(before)[2])
          changed |= least > leave[at]
          leave[at] = max(leave[at], least)
  finish = max(start[x] + seconds[actions[x][:2]] for x in actions)
  return start, finish, sends


@pytest.mark.parametrize("row", TIMES, ids=pairwise.label)
def test_times_are_the_earliest_that_all_constraints_permit(row):
  size = PipelineSize(row["stages"], row["microbatches"], row["chunks"])
  schedule = builders.build(row["name"], *size)
  factors = (1.0, 1.6, 0.7, 1.2)[: size.stages] if row["factors"] else ()
  work = simulate.even_part_times(size, 1.0, 0.9, 0.6, factors)
  hops = simulate.even_stage_links(
    size.stages, row["busy_s"], row["latency_s"], overlap=row["overlap"]
  )
  found = simulate.events(schedule, work, hops)
  start, finish_s, sends = times_by_relaxation(schedule, work, hops)
  assert found.finish_s == pytest.approx(finish_s)
  for at, seconds in start.items():
    assert found.start_s[at] == pytest.approx(seconds)
  assert {tuple(x) for x in np.argwhere(~np.isnan(found.leave_s))} == sends
  if row["overlap"] and not row["latency_s"]:
    (many_s,) = simulate.batched_finish_s(
      schedule, work.by_kind()[..., None],
      *(np.array(x)[:, None] for x in (hops.forward_s, hops.backward_s)),
    )
    assert many_s == pytest.approx(finish_s)
  # In lockstep, a tick lasts as long as its longest action and longest message.
  hop_s, total = row["busy_s"] + row["latency_s"], 0.0
  for _, here in itertools.groupby(sorted(start), key=lambda x: x[0]):
    here = list(here)
    total += max(found.end_s[x] - found.start_s[x] for x in here)
    total += hop_s * any(x in sends for x in here)
  assert simulate.lockstep_s(schedule, work, hops) == pytest.approx(total)
