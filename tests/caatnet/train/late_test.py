"""Updates of a late worker: each reaches the shared state exactly once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from caatnet.train.elastic.single_process import Programs
from caatnet.train.elastic.worker import ELASTIC_PREFIX, RoundContribution
from parallel.outer.apart import LoopbackCollectives
from tests.caatnet.train.outer_loops_test import PLAIN, UNROUNDED
from tests.caatnet.train.swarm_test import Worker, coordinator, make


def revisions(worker):
  """Records the shared state by round when the worker gives its parts."""
  give, found = worker.swarm.give, {}

  def noted(part, *more):
    found[part.round] = worker.swarm.state
    return give(part, *more)

  worker.swarm.give = noted
  return found


@pytest.mark.rotated
@pytest.mark.parametrize("keep", [0.0, 0.25])
@pytest.mark.parametrize("pieces", [1, 2])
def test_sent_pieces_of_a_late_worker_are_merged_and_the_rest_waits(
  tmp_path, pieces, keep
):
  """Makes the worker late while one of three fragments is in flight."""
  programs = Programs(make(
    "streaming",
    "outer.sync_every=6 outer.fragment_layers=1 outer.overlap=(4,) "
    f"outer.pieces={pieces} outer.keep={keep} {UNROUNDED}", 1,
  ))
  loop = programs.experiment.outer
  numbers = {programs.event(n).step: n for n in range(20)}
  said, later = 10, 11 + pieces  # step of the second piece, if there is one
  with coordinator(tmp_path, 1) as place:
    worker = Worker(programs, place).until(said)
    before = jax.tree.map(np.array, worker.peer.state)
    part = RoundContribution(
      numbers[said], {"params": before.params, "outer": before.outer}
    )
    shared = revisions(worker)
    worker.until(later + 1).peer.finish_round()
    common = shared[numbers[later]]
    found = worker.peer._adapt_late_args(numbers[later], {
      key: x for key, x in common.items() if not key.startswith(ELASTIC_PREFIX)
    }, part)
    worker.swarm.__exit__()

  def sides(params, outer, number):
    fragment = loop.fragments.place(number)
    own = loop.fragments.take(params, *fragment, 1)
    common = loop.fragments.take(outer["params"], *fragment, 0)
    return [np.concatenate([x.ravel() for x in jax.tree.leaves(tree)])
            for tree in (own, common)]

  for number in range(3):
    old, common = sides(before.params, before.outer, number)
    new, moved = sides(found["params"], found["outer"], number)
    expected = old + moved - common
    if loop.times.sent(8) == number:  # arrives after update 12
      assert abs(moved - common).max() > 1e-3
      expected = keep * old + (1 - keep) * moved
    np.testing.assert_allclose(new, expected, atol=1e-6)
  sending = found["outer"]["workers"].get("sending", {})
  assert bool(sending) == (pieces > 1)
  for x in jax.tree.leaves(sending):  # no piece of this has been sent
    assert not x.any()


@pytest.mark.parametrize("hook", ["begin", "finish"])
def test_dc_s3gd_sends_a_late_update_at_the_next_begin(
  tmp_path, hook
):
  """Covers `finish`, which sends norms only and keeps the update."""
  programs = Programs(make("dc_s3gd", PLAIN, 1))
  with coordinator(tmp_path, 1) as place:
    worker = Worker(programs, place).until(3)
    state = jax.tree.map(jnp.copy, worker.peer.state)
    args, unsaid = {}, state.outer["workers"]["update"]
    if hook == "finish":  # `begin` has already sent that update
      unsaid = jax.tree.map(lambda x: jnp.full_like(x, 0.5), unsaid)
      args = {"updates": unsaid}
    part = RoundContribution(
      6 + (hook == "finish"),
      {"params": state.params, "outer": state.outer} | args,
    )
    assert programs.event(part.round).hook == hook
    shared = revisions(worker)
    worker.until(5)

    class Later(LoopbackCollectives):
      round = 9

    assert programs.event(Later.round).hook == "finish"
    worker.peer._combine(Later(), shared[Later.round], part)
    told = worker.peer._outcome[1]["outer"]["workers"]["update"]
    for x, y in zip(
      jax.tree.leaves(told), jax.tree.leaves(unsaid), strict=True
    ):
      assert y.any()
      np.testing.assert_allclose(x, y, atol=1e-6)
    worker.swarm.__exit__()
