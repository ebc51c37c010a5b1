"""Outer loops whose workers join, leave, or are late for an exchange."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallel.axes import Axis
from parallel.outer.data_parallel import DataParallel
from parallel.outer.dc_s3gd import DCS3GD
from parallel.outer.diloco import DiLoCo
from parallel.outer.eager import Eager
from parallel.outer.joining import elastic_adapter, with_worker_axis
from tests.parallel.outer.base_test import LOOPS, ONE, OUTER, streaming
from tests.parallel.outer.small_run import WORKER, M, draw, each, exchange


@pytest.mark.parametrize("name", LOOPS)
def test_number_of_workers_changes_between_rounds_only(name):
  loop, every, _ = LOOPS[name]
  borders = [
    step
    for step in range(4 * every)
    if elastic_adapter(loop).is_round_boundary(step)
  ]
  assert borders == [0, every, 2 * every, 3 * every]


def test_state_is_free_until_an_exchange_is_applied():
  """Lists the steps of two rounds that read the state after `begin`."""
  for loop, steps, expected in (
    (DiLoCo(WORKER, 2, OUTER, exchange()), range(4), [0, 1, 2, 3]),
    (Eager(WORKER, 3, OUTER, exchange()), range(6), [2, 5]),
    # Sent at the starts of steps 6, 8, 10; applied one step later.
    (streaming(6, 3, (2,)), range(12), [7, 9, 11]),
    (streaming(6, 3, (1, 2, 2)), range(12), [6, 7, 8, 9, 10, 11]),
  ):
    assert [
      n for n in steps if elastic_adapter(loop).awaits(loop.plan(n))
    ] == expected


@pytest.mark.parametrize("name", LOOPS)
def test_loop_over_other_workers_differs_in_these_only(name):
  loop, axis = LOOPS[name][0], Axis("worker", 5, 5)
  if name == "two slots, even":
    loop = dataclasses.replace(loop, overlap=(4,))  # one value for any number
  weights = (1.0, 2.0, 3.0, 4.0, 5.0)
  other = with_worker_axis(loop, axis, weights)
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
  assert with_worker_axis(loop, WORKER) == loop


@pytest.mark.parametrize("name", LOOPS)
def test_elastic_loop_keeps_what_a_joining_worker_starts_from(name):
  """Common parameters, if a loop has outer ones; none are copied per worker."""
  loop = LOOPS[name][0]
  state = elastic_adapter(loop).elastic().init(draw(0))
  if name in ("nothing", "ddp", "noloco"):
    assert elastic_adapter(loop).elastic() is loop
    assert "params" not in state
  else:
    each(np.testing.assert_array_equal, state["params"], draw(0))
  assert set(loop.init(draw(0))) <= set(state)


def test_worker_that_joins_data_parallelism_copies_the_first_one():
  params = each(jnp.asarray, draw(0, M))
  new, state = elastic_adapter(DataParallel(WORKER)).joined(params, {}, 2)
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
  moved, shared = elastic_adapter(loop).late(params, old, new, hooks, (2, 5))
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
  moved, shared = elastic_adapter(loop).late(
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
  moved, shared = elastic_adapter(loop).late(
    params, old, new, ("begin", "begin"), steps
  )
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
  _, shared = elastic_adapter(loop).late(
    draw(1, 1), state, state, ("begin", "begin"), steps
  )
  for x in jax.tree.leaves(shared["workers"].pop("sending")):
    np.testing.assert_array_equal(x, kept)
  for key, part in shared["workers"].items():
    assert part is state["workers"][key]
