"""Plans of outer loops, and hooks that elastic membership calls."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
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


@pytest.mark.parametrize("name", LOOPS)
def test_number_of_workers_changes_between_rounds_only(name):
  loop, every, _ = LOOPS[name]
  borders = [step for step in range(4 * every) if loop.is_border(step)]
  assert borders == [0, every, 2 * every, 3 * every]


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
  with pytest.raises(ValueError, match=f"Other.*{message}.*period={period};"):
    _ = Other(WORKER).steady_round


def test_state_is_free_until_an_exchange_is_applied():
  """Lists the steps of two rounds that read the state after `begin`."""
  for loop, steps, expected in (
    (DiLoCo(WORKER, 2, OUTER, exchange()), range(4), [0, 1, 2, 3]),
    (Eager(WORKER, 3, OUTER, exchange()), range(6), [2, 5]),
    # Sent at the starts of steps 6, 8, 10; applied one step later.
    (streaming(6, 3, (2,)), range(12), [7, 9, 11]),
    (streaming(6, 3, (1, 2, 2)), range(12), [6, 7, 8, 9, 10, 11]),
  ):
    assert [n for n in steps if loop.awaits(loop.plan(n))] == expected


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


@pytest.mark.parametrize("name", LOOPS)
def test_loop_over_other_workers_differs_in_these_only(name):
  loop, axis = LOOPS[name][0], Axis("worker", 5, 5)
  if name == "two slots, even":
    loop = dataclasses.replace(loop, overlap=(4,))  # one value for any number
  weights = (1.0, 2.0, 3.0, 4.0, 5.0)
  other = loop.over(axis, weights)
  assert type(other) is type(loop)
  changed = {
    f.name for f in dataclasses.fields(loop)
    if getattr(other, f.name) != getattr(loop, f.name)
  }
  assert changed <= {"worker", "exchange", "weights"}
  assert other.worker == axis
  if hasattr(loop, "exchange"):
    assert other.exchange == dataclasses.replace(
      loop.exchange, worker=axis, weights=weights
    )
  assert getattr(other, "weights", weights) == weights
  assert loop.over(WORKER) == loop


@pytest.mark.parametrize("name", LOOPS)
def test_elastic_loop_keeps_what_a_joining_worker_starts_from(name):
  """Common parameters, if a loop has outer ones; none are copied per worker."""
  loop = LOOPS[name][0]
  state = loop.coming_and_going().init(draw(0))
  if name in ("nothing", "ddp", "noloco"):
    assert loop.coming_and_going() is loop
    assert "params" not in state
  else:
    each(np.testing.assert_array_equal, state["params"], draw(0))
  assert set(loop.init(draw(0))) <= set(state)


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


def test_worker_that_joins_data_parallelism_copies_the_first_one():
  params = each(jnp.asarray, draw(0, M))
  new, state = DataParallel(WORKER).joined(params, {}, 2)
  assert state == {}
  each(lambda x, y: np.testing.assert_array_equal(x[:2], y[:2]), new, params)
  each(lambda x, y: np.testing.assert_array_equal(x[2], y[0]), new, params)


def assert_close(ours, theirs):
  each(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), ours, theirs)


@pytest.mark.parametrize(
  "hooks", list(itertools.product(("begin", "finish"), repeat=2))
)
def test_late_worker_follows_the_common_parameters(hooks):
  """Its distance from them, what it has to contribute, does not change."""
  loop = DiLoCo(ONE, 3, OUTER, exchange(worker=ONE))
  params, old, new = draw(1, 1), {"params": draw(2)}, {"params": draw(3)}
  moved, shared = loop.late(params, old, new, hooks, (2, 5))
  assert_close(moved, each(
    lambda x, a, b: x - a + b, params, old["params"], new["params"]
  ))
  assert shared is new


@pytest.mark.parametrize("diverged", [False, True])
@pytest.mark.parametrize("hooks", [
  ("begin", "begin"), ("begin", "finish"), ("finish", "begin"),
  ("finish", "finish"),
])
def test_late_update_of_dc_s3gd_is_sent_once(hooks, diverged):
  """An update that was sent in time arrives with the common parameters."""
  loop = DCS3GD(ONE, exchange(worker=ONE), 0.3)
  start, now, sent, newest = draw(1), draw(2), draw(3, 1), draw(4, 1)
  if diverged:
    newest["head"][0, 3] = np.nan
  state = loop.init(start)
  state |= {"workers": state["workers"] | {"update": sent}}
  params = each(lambda w, u, v: w[None] + u + v, start, sent, newest)
  moved, shared = loop.late(
    params, state, state | {"params": now}, hooks, (4, 6)
  )
  update = shared["workers"]["update"]
  if hooks[0] == "begin":  # the stored update has not been sent
    assert_close(moved, each(lambda x, a, b: x - a + b, params, start, now))
    assert_close(update, sent)
  elif hooks[1] == "finish":
    assert_close(moved, each(lambda w, v: w[None] + v, now, newest))
    assert_close(update, sent)
  else:
    none = each(np.zeros_like, newest)
    assert_close(update, none if diverged else newest)
  each(np.testing.assert_array_equal, shared["params"], now)


@pytest.mark.parametrize(("tau", "steps", "merged"), [
  # Sent at the starts of steps 6, 8 and 10, and with a tau of 3 applied at the
  # ends of steps 8, 10 and 12.
  (3, (7, 8), []), (3, (7, 9), [0]), (3, (8, 8), []), (3, (8, 9), [0]),
  (3, (9, 10), []), (3, (9, 11), [1]), (3, (9, 20), [1]), (3, (10, 11), [1]),
  (3, (11, 12), []), (3, (11, 13), [2]), (3, (12, 20), [2]), (3, (5, 20), []),
  (5, (11, 13), [1]), (5, (11, 15), [1, 2]),
])
def test_late_worker_merges_fragments_that_it_has_sent(tau, steps, merged):
  """If they have arrived between its missed exchange and the later one."""
  loop = streaming(6, 3, (tau,), keep=0.25, worker=ONE)
  params, old, new = draw(1, 1), {"params": draw(2)}, {"params": draw(3)}
  moved, shared = loop.late(params, old, new, ("begin", "begin"), steps)
  assert shared is new
  expected = each(
    lambda x, a, b: x - a + b, params, old["params"], new["params"]
  )
  mixed = each(lambda x, b: 0.25 * x + 0.75 * b, params, new["params"])
  for fragment in merged:
    if fragment == 2:
      expected["head"] = mixed["head"]
    else:
      layers = slice(fragment, None, 2)
      expected["blocks"]["w"][:, layers] = mixed["blocks"]["w"][:, layers]
  assert_close(moved, expected)


@pytest.mark.parametrize(("steps", "kept"), [
  # Pieces of an exchange are sent in steps 9 to 11, then in steps 12 to 14.
  ((10, 11), True), ((11, 11), True), ((9, 9), False), ((9, 11), False),
  ((10, 13), False), ((11, 12), False),
])
def test_pieces_are_completed_only_of_an_exchange_that_has_begun(steps, kept):
  loop = streaming(9, 3, (3,), pieces=3, worker=ONE)
  state = loop.init(draw(0))
  sending = each(np.ones_like, jax.device_get(state["workers"]["sending"]))
  state |= {"workers": state["workers"] | {"sending": sending}}
  _, shared = loop.late(draw(1, 1), state, state, ("begin", "begin"), steps)
  for x in jax.tree.leaves(shared["workers"].pop("sending")):
    np.testing.assert_array_equal(x, kept)
  for key, part in shared["workers"].items():
    assert part is state["workers"][key]


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
