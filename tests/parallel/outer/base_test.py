"""Plans of outer loops, and the state between their hooks."""

import dataclasses

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from parallel.axes import Axis, make_mesh
from parallel.outer.base import OuterLoop, Plan
from parallel.outer.data_parallel import DataParallel
from parallel.outer.dc_s3gd import DCS3GD
from parallel.outer.diloco import DiLoCo
from parallel.outer.eager import Eager
from parallel.outer.fragments import Fragments, fragments
from parallel.outer.noloco import NoLoCo
from parallel.outer.optimizers import Optax
from parallel.outer.sparseloco import SparseLoCo
from parallel.outer.streaming import Streaming
from tests.parallel.outer.small_run import (
  BLOCK_DIMS,
  LAYERS,
  WORKER,
  M,
  draw,
  each,
  exchange,
)

OUTER = Optax(optax.sgd(1.0))
ONE = Axis("worker", 1)


def streaming(
  sync_every, layers, overlap, keep=0.0, pieces=1, worker=WORKER
):
  return Streaming(
    worker, sync_every, OUTER, exchange(worker=worker),
    fragments({"blocks": LAYERS}, layers, strided=True), overlap, keep, pieces,
  )


# Name: the loop, its steps per round and its period.
LOOPS = {
  "nothing": (OuterLoop(WORKER), 1, 1),
  "ddp": (DataParallel(WORKER), 1, 1),
  "dc_s3gd": (DCS3GD(WORKER, exchange(), 0.3), 1, 1),
  "diloco": (DiLoCo(WORKER, 3, OUTER, exchange()), 3, 3),
  "eager": (Eager(WORKER, 3, OUTER, exchange()), 3, 3),
  "noloco": (NoLoCo(WORKER, 3, 0.7, 0.5, 0.3), 3, 3),
  "sparseloco": (SparseLoCo(WORKER, 3, 0.7, BLOCK_DIMS, 0.8, 6, 4), 3, 3),
  "whole": (streaming(3, 0, (2,)), 3, 3),
  "at once": (streaming(6, 3, (0,)), 6, 6),
  # Sends alternate between two slots; three per round, then six.
  "two slots": (streaming(8, 2, (3,)), 8, 16),
  "two slots, even": (streaming(10, 3, (4, 5, 4)), 10, 10),
  # Five slots for six fragments of layers, without a pause between rounds.
  "five slots": (streaming(7, 1, (5,)), 7, 35),
}


@pytest.mark.parametrize("name", [name for name in LOOPS if name != "noloco"])
def test_variants_repeat_with_the_period_and_not_before(name):
  loop, every, period = LOOPS[name]
  assert loop.period == period
  assert loop.steady_round == range(2 * period, 3 * period)
  steady = [loop.plan(step).variant for step in range(2 * period, 4 * period)]
  assert steady[:period] == steady[period:]
  for shorter in range(every, period, every):
    assert steady[shorter : shorter + period] != steady[:period]
  if every > 1:  # nothing is exchanged in the first round, except at its end
    first = {loop.plan(step).variant for step in range(every - 1)}
    assert len(first) == 1


@pytest.mark.parametrize(
  ("ends", "period", "message"),
  [
    # Rounds of 3, 6, 9, ... steps, and of 3 steps with one exception.
    (lambda s: s in (2, 8, 17, 29, 44), 3, "steps 8 and 11"),
    (lambda s: s % 3 == 2 and s != 9002, 3, "steps 8999 and 9002"),
    (lambda s: s % 30 == 29, 1, "steps 28 and 29"),
    (lambda s: s % 6 == 5, 9, "steps 20 and 29"),
  ],
)
def test_plans_that_do_not_repeat_with_the_period_are_refused(
  ends, period, message
):
  class Other(OuterLoop):
    def plan(self, step):
      return Plan(ends(step))

  Other.period = period
  with pytest.raises(ValueError, match=f"Other: period={period}, .*{message} "):
    _ = Other(WORKER).steady_round


@pytest.mark.parametrize("name", [
  name for name, (loop, *_) in LOOPS.items() if isinstance(loop, Streaming)
])
def test_slot_is_free_when_a_fragment_is_sent(name):
  """A mean stays in its slot until the first workers receive it."""
  loop, every, period = LOOPS[name]
  waiting, received = {}, 0
  for plan in map(loop.plan, range(2 * period + every)):
    send, numbers = plan.variant.send, plan.numbers.send
    if send:
      assert (send.kind, send.slot) not in waiting
      waiting[send.kind, send.slot] = numbers.place, numbers.exchange
    for receive, numbers in zip(
      plan.variant.receives, plan.numbers.receives, strict=True
    ):
      if receive.first and max(loop.overlap):
        found = waiting.pop((receive.kind, receive.slot))
        assert found == (numbers.place, numbers.exchange)
      received += receive.first
  slots = loop.init(draw(0)).get("arriving", {}).get("blocks", {})
  assert len(slots) == (loop.slots if loop.fragments.layers else 0)
  assert received >= loop.fragments.num_layer_fragments + 1


@pytest.mark.parametrize("name", ["two slots", "five slots"])
def test_bytes_of_a_period_are_those_of_all_its_rounds(name):
  loop, every, period = LOOPS[name]
  one = dataclasses.replace(loop, overlap=(1,))  # in one slot
  assert one.period == every < period
  sent = one.sent_bytes(draw(0))
  assert sent
  assert loop.sent_bytes(draw(0)) == {
    dtype: size * period // every for dtype, size in sent.items()
  }


@pytest.mark.parametrize("name", LOOPS)
def test_loops_differ_in_what_workers_have_in_common(name):
  loop = LOOPS[name][0]
  assert loop.averages == (name != "noloco")
  assert loop.equal == (name == "ddp")
  assert loop.plain_alone == (name != "sparseloco")
  counted = () if name in ("nothing", "ddp") else ("delta_norm", "left_out")
  metrics = loop.metrics(loop.init(draw(0)))
  assert sorted(metrics) == sorted(counted)
  for value in metrics.values():
    np.testing.assert_array_equal(value, np.zeros(M))


@pytest.mark.parametrize(
  ("name", "steps"), [("dc_s3gd", range(2)), ("whole", range(3, 6))]
)
def test_hooks_do_not_change_their_arguments(name, steps):
  """These two states have entries between `begin` and `finish` only."""
  loop = LOOPS[name][0]
  params, state = each(lambda x: np.stack([x] * M), draw(0)), loop.init(draw(0))
  specs = {key: P("worker") if key == "workers" else P() for key in state}
  entries = set()

  def run(params, state):
    for plan in map(loop.plan, steps):
      given = dict(state)
      begun = loop.begin(params, state, plan)
      between = dict(begun)
      entries.update(between)
      params, after = loop.finish(params, params, begun, plan)
      assert (given, between) == (state, begun)
      assert given.keys() == after.keys()
      state = after
    return params, state

  jax.eval_shape(jax.shard_map(
    run, mesh=make_mesh({"worker": WORKER}), in_specs=(P("worker"), specs),
    out_specs=(P("worker"), specs),
  ), params, state)
  between = {"dc_s3gd": "mean", "whole": "mask_here"}[name]
  assert entries - state.keys() == {between}


@pytest.mark.parametrize(("arguments", "message"), [
  ((6, 3, (1, 2)), r"overlap=\(1, 2\) must have one value, or one for each o"),
  ((6, 3, (6,)), r"overlap=\(6,\) must lie in \[0, sync_every=6\)"),
  ((6, 3, (-1,)), r"overlap=\(-1,\) must lie in"),
  ((6, 3, (0, 1, 1)), r"overlap=\(0, 1, 1\) must be all zero or all positive"),
  ((6, 3, (2,), 0.0, 0), "pieces=0 must be at least 1 and at most"),
  ((6, 3, (1,), 0.0, 2), r"pieces=2 .* at most overlap=\(1,\) and the 2 steps"),
  ((6, 3, (5,), 0.0, 3), r"pieces=3 .* at most overlap=\(5,\) and the 2 steps"),
  ((6, 3, (0,), 0.0, 2), "pieces=2 must"),
  ((6, 3, (1,), 1.5), "keep=1.5 must lie in"),
  ((6, 1, (1,)), "sync_every=6 is less than the 7 fragments"),
])
def test_invalid_streams_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    streaming(*arguments)


@pytest.mark.parametrize("arguments", [
  (6, 3, (5,)), (6, 3, (0,)), (6, 3, (5, 1, 2)), (6, 3, (2,), 1.0, 2),
  (7, 1, (1,)),
])
def test_streams_at_the_limits_are_taken(arguments):
  assert streaming(*arguments).times.sync_every == arguments[0]


def test_streams_are_whole_and_applied_at_once_by_default():
  loop = streaming(6, 3, (0,), 0.0, 1)
  assert loop == Streaming(WORKER, 6, OUTER, loop.exchange, loop.fragments)
  assert loop.fragments == Fragments((("blocks", LAYERS),), 3, strided=True)


@pytest.mark.parametrize(("chunk", "top_k", "valid"), [
  (4, 4, True), (65536, 64, True), (65536, 65536, True), (8, 4, True),
  (3, 4, False), (4, 8, False), (65537, 64, False), (64, 0, False),
  (64, 6, False), (64, -4, False),
])
def test_sparse_deltas_keep_whole_bytes_of_a_chunk(chunk, top_k, valid):
  def loop():
    return SparseLoCo(WORKER, 2, 0.7, BLOCK_DIMS, 0.8, chunk, top_k)

  if valid:
    assert loop().top_k == top_k
  else:
    message = rf"top_k={top_k} must be a multiple of 4 in \[4, chunk={chunk}\]"
    with pytest.raises(ValueError, match=message):
      loop()
