"""Properties of the timing of nano-operations."""

import itertools

import numpy as np
import pytest

from parallel.plans.nanobatches import nanobatch_timing
from parallel.plans.nanobatches.nanobatch_timing import NanoOperation


def cut(rng, tokens):
  """Random consecutive ranges of tokens."""
  cuts = sorted({0, tokens, *rng.integers(1, tokens, 3).tolist()})
  return list(itertools.pairwise(cuts))


def chain(rng, tokens, carried=True):
  """A layer of three kinds of operations, each in its own pieces."""
  return [
    NanoOperation(
      kind, resource, start, stop, rng.uniform(0.1, 1), (parent,), first
    )
    for kind, resource, parent, first in (
      ("qkv", "compute", "mlp", carried), ("sum", "network", "qkv", False),
      ("mlp", "memory", "sum", False),
    )
    for start, stop in cut(rng, tokens)
  ]


@pytest.mark.parametrize("seed", range(20))
def test_dependencies_are_overlaps_of_sets_of_tokens(seed):
  made = chain(np.random.default_rng(seed), 12)
  found = nanobatch_timing.dependencies(made)
  for o, parents in zip(made, found, strict=True):
    wanted = [
      i - len(made) * o.carried for i, other in enumerate(made)
      if other.kind in o.parents
      and set(range(o.start, o.stop)) & set(range(other.start, other.stop))
    ]
    assert parents == wanted != []


def ticks(made, layers):
  """Time without interference: the recurrence of ready times."""
  ends, busy = {}, dict.fromkeys(nanobatch_timing.RESOURCES, 0.0)
  count = len(made)
  needs = nanobatch_timing.dependencies(made)
  for layer in range(layers):
    for i, o in enumerate(made):
      ready = max(
        (ends.get(layer * count + n, 0.0) for n in needs[i]), default=0.0
      )
      begin = max(ready, busy[o.resource])
      ends[layer * count + i] = busy[o.resource] = begin + o.seconds
  return max(ends.values())


@pytest.mark.parametrize("seed", range(20))
def test_independent_resources_take_the_longest_path(seed):
  made = chain(np.random.default_rng(seed), 12)
  for layers in (1, 3):
    assert nanobatch_timing.step_seconds(made, layers) == pytest.approx(
      ticks(made, layers)
    )


@pytest.mark.parametrize("seed", range(10))
def test_interference_lies_between_ideal_and_sequential(seed):
  made = chain(np.random.default_rng(seed), 12)
  times = [
    nanobatch_timing.step_seconds(made, 3, i) for i in (0, 0.2, 0.6, 1)
  ]
  assert times == sorted(times)
  whole = nanobatch_timing.sequential_seconds(made, 3)
  assert whole == pytest.approx(3 * sum(o.seconds for o in made))
  # At 1 two busy resources together do the work of one.
  assert times[-1] == pytest.approx(whole)


def test_rate_falls_with_each_busy_resource():
  made = [
    NanoOperation(r, r, 0, 1, 1.0) for r in nanobatch_timing.RESOURCES
  ]
  for count, seconds in ((1, 1.0), (2, 1.5), (3, 2.0)):
    assert nanobatch_timing.step_seconds(
      made[:count], 1, 0.5
    ) == pytest.approx(seconds)


def test_dropped_and_duplicated_ranges_are_rejected():
  made = [
    NanoOperation("qkv", "compute", a, b, 1.0) for a, b in ((0, 4), (4, 9))
  ]
  nanobatch_timing.check(made, 9)
  for wrong, message in (
    (made[:1], "qkv: tokens .4, 9. are missing"),
    (made[1:], "qkv: tokens .0, 4. are missing"),
    (made * 2, "qkv: tokens .0, 4. are in two ranges"),
    ([*made, NanoOperation("qkv", "compute", 8, 9, 1.0)],
     "qkv: tokens .8, 9. are in two ranges"),
  ):
    with pytest.raises(ValueError, match=message):
      nanobatch_timing.check(wrong, 9)


@pytest.mark.parametrize(("call", "message"), [
  (lambda: NanoOperation("a", "disk", 0, 1, 1.0), "resource='disk'"),
  (lambda: NanoOperation("a", "memory", 1, 1, 1.0), "the token range .1, 1"),
  (lambda: NanoOperation("a", "memory", 0, 1, -1.0), "a: seconds=-1"),
  (lambda: NanoOperation("a", "memory", 0, 1, float("nan")), "a: seconds=nan"),
  (lambda: NanoOperation("a", "memory", 0, 1, float("inf")), "a: seconds=inf"),
  (lambda: nanobatch_timing.step_seconds([], 1, 2.0), "interference=2"),
  (lambda: nanobatch_timing.step_seconds(
    [NanoOperation("a", "memory", 0, 1, 1.0)], 0,
  ), "num_layers=0"),
  (lambda: nanobatch_timing.step_seconds(
    [NanoOperation("a", "compute", 0, 1, 1.0, ("b",)),
     NanoOperation("b", "compute", 0, 1, 1.0)], 1,
  ), "wait for each other"),
])
def test_invalid_arguments_are_one_line(call, message):
  with pytest.raises(ValueError, match=message) as error:
    call()
  assert "\n" not in str(error.value)
