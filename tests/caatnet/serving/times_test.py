"""Cost models of steps and copies, and the simulated executor's timeline."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from caatnet.serving.engine.executor import Chunk, Copy, EngineStep, WeightLoad
from caatnet.serving.engine.simulator import (
  NO_COPIES,
  CopyTimes,
  SimulatedCosts,
  Simulator,
)
from caatnet.serving.engine.times import (
  AllReduces,
  AttentionTimes,
  Profile,
  Roofline,
)
from caatnet.serving.requests import Request
from caatnet.serving.scheduler.limits import Limits
from parallel.plans.hardware.devices import H100
from parallel.plans.network import inference
from parallel.plans.workload import Transformer


def multilinear(length, before, decodes, context):
  return (1 + 2 * length) * (3 + before) * (1 + decodes) + context


AXES = ((2, 4, 10), (0, 8, 20), (1, 3), (16, 64))


def test_attention_interpolates_linearly_between_measurements():
  """Outside the grid, the time at its edge counts."""
  whole = AttentionTimes({
    point: multilinear(*point) for point in itertools.product(*AXES)
  })
  for point in ((2, 0, 1, 16), (10, 20, 3, 64), (3, 4, 2, 40),
                (9.5, 19, 1, 17), (4, 1, 1.5, 64)):
    assert whole.time(*point) == pytest.approx(multilinear(*point))
  assert whole.time(99, 21, 4, 65) == multilinear(10, 20, 3, 64)
  assert whole.time(1, 0, 0.5, 1) == multilinear(2, 0, 1, 16)
  # Before a chunk, 0 positions is a grid point.
  alone = AttentionTimes({(2, 0, 0, 0): 1.0, (2, 8, 0, 0): 3.0})
  assert alone.time(2, 2, 0, 0) == pytest.approx(1.5)


@pytest.mark.parametrize("axis", range(4))
def test_axis_with_one_measurement_is_constant(axis):
  """Also if it is the only one of an absent chunk or batch, 0."""
  for only in (0, 8):
    low, high = ([2, 2, 2, 2], [4, 4, 4, 4])
    low[axis] = high[axis] = only
    found = AttentionTimes({tuple(low): 1.0, tuple(high): 3.0})
    values = {
      found.time(*(value if n == axis else 4 for n in range(4)))
      for value in (8, 9, 99)
    }
    assert values == {3.0}


def test_missing_measurements_are_left_out_of_the_mean():
  found = AttentionTimes({(2, 8, 0, 0): 1.0, (4, 16, 0, 0): 5.0})
  # Two of the four neighbours, with weights 3/8 and 1/8.
  assert found.time(2.5, 12, 0, 0) == pytest.approx((3 * 1 + 1 * 5) / 4)
  assert found.time(0, 8, 0, 0) == 0  # no neighbour was measured


def profile(**changes):
  return Profile(**{
    "num_layers": 3,
    "per_layer": [(np.array([0, 100]), np.array([1.0, 2.0])),
                  (np.array([0, 10]), np.array([0.0, 1.0]))],
    "once": [(np.array([0, 100]), np.array([5.0, 7.0]))],
    "per_sequence": [(np.array([0, 10]), np.array([0.0, 40.0]))],
    "attention": AttentionTimes({
      (0, 0, 2, 30): 0.25, (6, 0, 0, 0): 0.5, (4, 20, 0, 0): 1.5,
      (10, 0, 2, 30): 3.0, (10, 0, 0, 0): 1.0, (10, 20, 2, 30): 7.0,
      (10, 20, 0, 0): 4.0,
    }), **changes,
  })


def test_profile_is_the_sum_of_its_operations():
  """A step of 2 decodes, of a chunk, and of both."""
  contexts = np.array([20, 40])
  # Tokens, sequences, and attention of a layer.
  for decodes, chunks, tokens, sequences, attention in (
    (contexts, [], 2, 2, 0.25), (contexts[:0], [(0, 6)], 6, 1, 0.5),
    (contexts[:0], [(0, 6), (20, 4)], 10, 2, 2.0),
  ):
    layer = 1 + tokens / 100 + tokens / 10 + attention
    expected = 3 * layer + 5 + tokens / 50 + 4 * sequences
    assert profile().step_s(decodes, chunks) == pytest.approx(expected)
    assert profile(scale=2.0).step_s(decodes, chunks) == pytest.approx(
      2 * expected
    )


def test_decodes_with_chunks_add_their_time_in_one_chunk_of_equal_pairs():
  """Chunks of 6 and 4 tokens, the second after 20 positions."""
  contexts = np.array([20, 40])
  made = profile()
  # 6 * 3 + 4 * 22 pairs; one chunk of 10 tokens has as many after 5.6.
  before = (6 * 3 + 4 * 22) / 10 - 5
  time = made.attention.time
  extra = time(10, before, 2, 30) - time(10, before, 0, 0)
  assert extra == pytest.approx(2 + before / 20)
  layer = 1 + 0.12 + 1.0 + (2.0 + extra)
  assert made.step_s(contexts, [(0, 6), (20, 4)]) == pytest.approx(
    3 * layer + 5 + 12 / 50 + 4 * 4
  )


MODEL = Transformer(32000, 512, 4, 8, 8, 1376)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_reduces_send_each_part_around_a_ring_twice(ranks):
  """All but one of the hops of a ring, for reduction and for gathering."""
  made = AllReduces(ranks, 24, bandwidth=16.0, latency_s=0.5, per_layer=3)
  hop_s = 0.5 + 10 * 24 / ranks / 16
  assert made.layer_s(10) == pytest.approx(3 * 2 * (ranks - 1) * hop_s)


@pytest.mark.parametrize("machine", [None, "gpu:h100:1x8"])
def test_roofline_counts_positions_of_decodes_and_chunks(machine):
  """A chunk of n tokens is n decodes of ascending contexts, read once."""
  made = Roofline(MODEL, H100, machine and inference.machine(machine))
  one = made.step_s(np.array([7]), [])
  # The same tokens, sequences and positions.
  assert made.step_s(np.array([], int), [(6, 1)]) == pytest.approx(one)
  mixed = made.step_s(np.array([7, 9]), [(6, 1)])
  assert mixed == pytest.approx(made.step_s(np.array([7, 7, 9]), []))
  # Twice the utilisation halves the time of a step that computes.
  many = [(0, 100_000)]
  seconds = Roofline(MODEL, H100).step_s(np.array([], int), many)
  half = Roofline(MODEL, H100, utilisation=0.5).step_s(np.array([], int), many)
  assert half == pytest.approx(2 * seconds, rel=1e-3)
  # Two operations per weight and token, and four per channel and pair.
  weights = 4 * (4 * 512**2 + 3 * 512 * 1376)
  num = 2 * weights * 100_000 + 4 * 4 * 512 * 100_000**2 / 2
  assert seconds == pytest.approx(num / H100.peak(MODEL.dtype), rel=0.01)


def test_attention_of_a_chunk_is_causal():
  """Compares with pairs counted one by one, for a device that only computes."""
  fast = dataclasses.replace(H100, memory_bandwidth=math.inf)
  made = Roofline(MODEL, fast)
  none = np.array([], int)
  first = made.step_s(none, [(0, 3)])
  second = made.step_s(none, [(5, 3)])
  one = made.step_s(np.array([1, 1, 1]), [])
  two = made.step_s(np.array([2, 1, 1]), [])
  pair = two - one
  # Two chunks need logits twice, and have 4 pairs instead of 6.
  head = made.step_s(none, [(0, 2), (0, 1)]) - first + 2 * pair
  assert first - one == pytest.approx(3 * pair - 2 * head)
  assert second - first == pytest.approx(3 * 5 * pair)


COPIES = CopyTimes(100, 4, 0.5, 10.0, 20.0, 50.0)


def test_copies_take_time_per_range_and_byte():
  for kind, rate in (("out", 10), ("in", 20), ("within", 50)):
    assert COPIES.seconds(kind, 2, 3) == 2 * 4 * 0.5 + 300 / rate
    single = dataclasses.replace(COPIES, single=True)
    assert single.seconds(kind, 2, 3) == 3 * 4 * 0.5 + 300 / rate
    assert NO_COPIES.seconds(kind, 2, 3) == 0


class Times:
  """Steps take 1 s, 0.25 s per decode and 0.5 s per token of a chunk."""

  def step_s(self, contexts, chunks):
    return 1 + len(contexts) / 4 + sum(
      n / 2 + start / 1000 for start, n in chunks
    )


def test_cost_of_a_prefill_is_that_of_its_parts():
  costs = SimulatedCosts(Times(), COPIES, most=8)
  assert costs.prefill_s(4, 20) == pytest.approx(
    20 / 2 + (4 + 12 + 20) / 1000
  )
  assert costs.prefill_s(4, 8) == pytest.approx(4.004)
  assert costs.prefill_s(4, 0) == 0
  assert costs.copy_s("in", 2, 3) == COPIES.seconds("in", 2, 3)


def test_default_step_is_that_of_the_default_limits():
  """Otherwise estimates split a prompt into other chunks than steps do."""
  assert Simulator(Times()).costs.most == Limits().tokens


def step(number=0, positions=(), chunks=(), after=()):
  decodes = [Request(i, [1], 9) for i in range(len(positions))]
  drawing = np.arange(len(decodes) + sum(c.draws for c in chunks))
  return EngineStep(
    number, decodes, np.arange(len(decodes)), np.array(positions, int),
    tuple(chunks), np.zeros((1, 1), np.int32), after, drawing,
    np.zeros_like(drawing),
  )


def test_parts_of_a_step():
  requests = [Request(i, range(10 * i, 10 * i + 6), 3) for i in (7, 8)]
  first, second = (
    Chunk(r, 2, 3, draws) for r, draws in zip(requests, (False, True),
                                              strict=True)
  )
  made = step(positions=(4, 5), chunks=(first, second))
  assert first.tokens.tolist() == [72, 73, 74]
  assert made.num_tokens == 2 + 3 + 3
  assert [r.number for r in made.drawn] == [0, 1, 8]
  assert [made.request(i) for i in range(3)] == made.drawn


@pytest.mark.parametrize(("source", "target", "runs"), [
  ([], [], []), ([3], [5], [1]), ([3, 4, 5], [7, 8, 9], [3]),
  ([3, 4, 5], [7, 8, 8], [2, 1]), ([3, 4, 6, 7], [7, 8, 9, 10], [2, 2]),
  ([3, 2], [2, 1], [1, 1]), ([1, 2], [3, 5], [1, 1]),
])
def test_runs_are_contiguous_on_both_sides(source, target, runs):
  assert Copy(0, "out", source, target, None).runs == runs


def times_of(events):
  return [(e.time_s, e.copy.number if e.copy else "step") for e in events]


def test_steps_wait_for_each_other_and_for_their_copies():
  simulator = Simulator(Times(), COPIES)
  simulator.submit(step(positions=(3, 4)))  # 0 to 1.5 s
  simulator.copy(Copy(0, "in", [0], [1], None))  # 0 to 7 s
  simulator.copy(Copy(1, "out", [0, 1], [0, 1], None))  # 1.5 to 23.5 s
  simulator.copy(Copy(2, "in", [5], [6], None, (0, 1)))  # 7 to 21 s
  simulator.copy(Copy(3, "within", [5], [6], None))  # 1.5 to 5.5 s
  simulator.submit(step(1, (3,)))  # 1.5 to 2.75 s
  simulator.submit(step(2, (3,), after=(0, 3)))  # 7 to 8.25 s
  assert simulator.busy_s == 1.5 + 2 * 1.25
  found = []
  while len(found) < 7:
    found += times_of(simulator.wait(math.inf))
    assert simulator.now() == found[-1][0]
  assert found == [
    (1.5, "step"), (2.75, "step"), (5.5, 3), (7.0, 0), (8.25, "step"),
    (21.0, 2), (23.5, 1),
  ]


def test_clock_advances_to_events_or_to_the_given_time():
  """Simultaneous events are returned together, in the order of submission."""
  simulator = Simulator(Times(), COPIES, delay=lambda copy: copy.number)
  assert simulator.wait(3.0) == []
  assert simulator.now() == 3
  assert simulator.wait(2.0) == []
  assert simulator.now() == 3  # never back
  simulator.submit(step(positions=(0,)))  # 3 to 4.25 s
  assert simulator.wait(4.2) == []
  assert simulator.now() == 4.2
  assert times_of(simulator.wait(4.25)) == [(4.25, "step")]
  simulator.copy(Copy(2, "in", [0], [1], None))  # 7 s, and 2 s of delay
  simulator.copy(Copy(0, "within", [0] * 4, [1, 3, 5, 7], None))  # 16 s
  assert times_of(simulator.wait(math.inf)) == [(4.25 + 9, 2)]
  assert times_of(simulator.wait(math.inf)) == [(4.25 + 16, 0)]
  still = Simulator(Times(), NO_COPIES)
  for number in range(3):
    still.copy(Copy(number, "in", [0], [1], None))
  assert times_of(still.wait(math.inf)) == [(0, 0), (0, 1), (0, 2)]


def test_tokens_are_drawn_for_their_positions():
  """A decode at position t gives token t + 1, as does a chunk that ends it."""
  drawn = []
  simulator = Simulator(
    Times(), draw=lambda request, at: drawn.append((request.number, at))
    or 10 * request.number + at,
  )
  asked = [Request(i, range(8), 3) for i in (5, 6)]
  simulator.submit(step(positions=(3, 9), chunks=(
    Chunk(asked[0], 2, 4, draws=False), Chunk(asked[1], 2, 6, draws=True)
  )))
  (event,) = simulator.wait(math.inf)
  assert list(event.tokens) == [4, 20, 68]
  assert drawn == [(0, 4), (1, 10), (6, 8)]
  simulator = Simulator(Times())
  simulator.submit(step(positions=(3, 9)))
  (event,) = simulator.wait(math.inf)
  assert list(event.tokens) == [0, 0]


def reached(begin, work_s, spans, rate):
  """Returns when work ends that is slower while a step runs."""
  edges = sorted({begin, *(x for span in spans for x in span if x > begin)})
  for start, stop in itertools.pairwise([*edges, math.inf]):
    busy = any(first <= start < last for first, last in spans)
    if work_s <= (stop - start) * (speed := rate if busy else 1.0):
      return start + work_s / speed
    work_s -= (stop - start) * speed
  raise AssertionError


@pytest.mark.parametrize("rate", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("seed", range(8))
def test_steps_slow_loads_which_follow_one_another(seed, rate):
  """Loads are exposed while they run and no step does."""
  rng = np.random.default_rng(seed)
  works = [(w, w * u) for w, u in rng.uniform(0.2, 1.0, (6, 2)) * (3, 1)]
  simulator = Simulator(
    Times(), load_s=lambda load: works[load.slot], load_rate=rate
  )
  spans, asked, found, free = [], [], {}, 0.0

  def wait(until_s):
    for event in simulator.wait(until_s):
      if event.load is not None:
        found[event.load.slot] = event.time_s

  while len(asked) < len(works) or len(found) < len(works) or not spans[-1:]:
    now = simulator.now()
    if len(asked) < len(works) and rng.random() < 0.5:
      simulator.load(WeightLoad(str(len(asked)), len(asked)))
      asked.append(now)
    elif rng.random() < 0.6:
      made = step(len(spans), (3,) * int(rng.integers(1, 4)))
      simulator.submit(made)
      begin = max(now, free)
      free = begin + Times().step_s(made.positions + 1, [])
      spans.append((begin, free))
    wait(simulator.now() + float(rng.choice([0.0, 0.3, 2.0])))
  last = simulator.now() + 50
  while simulator.now() < last:
    wait(last)
  simulator.submit(step(99, (3,)))  # counts what was exposed until now
  end = exposed_s = 0.0
  for number, (at, (work_s, begin_s)) in enumerate(
    zip(asked, works, strict=True)
  ):
    begin = max(at, end)
    end = reached(begin, work_s, spans, rate)
    assert found[number] == pytest.approx(reached(begin, begin_s, spans, rate))
    exposed_s += end - begin - sum(
      max(0.0, min(end, last) - max(begin, first)) for first, last in spans
    )
  assert simulator.exposed_s == pytest.approx(exposed_s)
  assert simulator.loaded_s == pytest.approx(sum(w for w, _ in works))


def test_executor_may_wait_for_the_first_step():
  """A copy or load that ends before it is returned with it."""
  for first in (False, True):
    simulator = Simulator(
      Times(), steps_first=first, load_s=lambda load: (0.5, 0.5)
    )
    simulator.load(WeightLoad("a", 0))
    simulator.submit(step(positions=(3,)))  # 0 to 1.25 s
    kinds = [event.step is None for event in simulator.wait(math.inf)]
    assert kinds == ([True, False] if first else [True])
    assert simulator.now() == (1.25 if first else 0.5)
