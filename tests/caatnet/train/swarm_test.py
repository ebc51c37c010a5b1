"""Workers of a swarm and workers of a mesh axis train to equal bits.

The peers are threads of this process, connected by sockets. The model is
linear, since the loops use a model only through the protocol.
"""

import contextlib
import dataclasses
import os
import threading
import time
import types

from etils import epath
import jax
from jax.experimental import io_callback
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from caatnet.schema.train import Elastic
from caatnet.train import loop
from caatnet.train.elastic import membership, swarm_loop
from caatnet.train.elastic.single_process import Programs
from caatnet.train.elastic.worker import (
  RoundContribution,
  StepJump,
  SwarmWorker,
)
from caatnet.train.records import read_metrics
from parallel.axes import Axis
from parallel.outer.apart import LoopbackCollectives
from parallel.outer.joining import elastic_adapter
from parallel.peers.membership import journal, service
from parallel.peers.membership.coordinator import Rules
from parallel.peers.membership.messages import Waiting
from parallel.peers.settings import PeerSettings
from parallel.peers.timeouts import AdmissionTimeout
from tests.caatnet.train import swarm_bits
from tests.caatnet.train.outer_loops_test import PLAIN, make_linear
from tests.parallel.peers.worlds import PATIENCE_S, SECURITY, together

CASES = {
  "diloco": ("diloco", PLAIN, 2, 8),
  "streaming, 3 workers": (
    "streaming", "outer.overlap=(2,) outer.pieces=1 outer.fragment_layers=1", 3,
    10,
  ),
  "dc_s3gd": ("dc_s3gd", PLAIN, 2, 4),
  "eager, 3 workers": ("eager", PLAIN, 3, 10),
  "data_parallel, 3 workers": ("data_parallel", "", 3, 4),
}


# With it a worker differs from the shared trajectory by its newest part.
_SGD = "outer.optimizer=sgd outer.momentum=0.0 outer.learning_rate=1.0"


def make(algorithm, overrides, workers):
  made = make_linear(  # no peer joins after the last round
    algorithm, overrides, workers=workers, batch_size=2 * workers,
    num_steps=1000,
  )
  if workers > 1:
    return made
  return dataclasses.replace(made, outer=elastic_adapter(made.outer).elastic())


@pytest.mark.rotated
@pytest.mark.parametrize("case", CASES)
def test_swarm_without_churn_has_the_bits_of_a_mesh(case, same_bits):
  algorithm, overrides, workers, steps = CASES[case]
  found = swarm_bits.compare(
    Programs(make(algorithm, overrides, 1), same_bits),
    make(algorithm, overrides, workers), steps,
  )
  assert found.elements > 100
  assert found.unequal == 0, found


def test_signed_zeros_have_different_bits():
  zero = np.zeros(2, np.float32)
  assert swarm_bits.bits(zero).tolist() == [0, 0]
  assert (swarm_bits.bits(zero) != swarm_bits.bits(-zero)).all()


@contextlib.contextmanager
def coordinator(folder, least, **rules):
  with journal.Journal(folder / "journal") as kept:
    there = service.CoordinatorService(
      ("127.0.0.1", 0), SECURITY, kept, rules=Rules(least, **rules),
      timing=service.Timing(silence_s=60, grace_s=0.1), say=lambda _: None,
    )
    thread = threading.Thread(target=there.serve, daemon=True)
    thread.start()
    try:
      yield swarm_loop.Endpoint(there.address, SECURITY)
    finally:
      there.close()
      thread.join(PATIENCE_S)


class Worker:
  """Peer in a thread of the test that records its samples in order."""

  def __init__(self, programs, place):
    self.programs, self.numbers = programs, []
    experiment = programs.experiment
    read = swarm_loop.make_batch_reader(
      experiment, experiment.data.load(experiment.seed)
    )

    def noted(numbers):
      self.numbers += numbers
      return read(numbers)

    state = experiment.init_state()
    self.swarm = swarm_loop.make_swarm(
      place, programs, swarm_loop.build_shared_state(programs, state)
    ).__enter__()
    give, self.given = self.swarm.give, []

    def weighed(part, combine, weight):
      self.given.append(weight)
      return give(part, combine, weight)

    self.swarm.give = weighed
    self.peer = SwarmWorker(programs, self.swarm, state, noted)

  def until(self, step):
    """Advances to a step; returns itself."""
    while self.peer.step < step:
      with contextlib.suppress(StepJump):
        self.peer.advance()
    return self

  def shared(self):
    return self.programs.shared(self.peer.state._asdict())


@pytest.mark.parametrize("algorithm", ["diloco", "eager", "data_parallel"])
def test_joining_worker_starts_from_the_shared_state_without_duplicates(
  tmp_path, algorithm
):
  overrides = "" if algorithm == "data_parallel" else PLAIN
  programs = Programs(make(algorithm, overrides, 1))
  with coordinator(tmp_path, 2) as place:
    first, second = together([lambda: Worker(programs, place)] * 2)
    together([lambda w=w: w.until(6) for w in (first, second)])
    second.swarm.__exit__()  # as if killed between rounds
    came = []

    def come():
      worker = Worker(programs, place)
      came.append((worker, jax.tree.map(np.array, worker.peer.state)))
      worker.until(int(came[0][1].step) + 9)

    coming = threading.Thread(target=come, daemon=True)
    coming.start()
    while not came:
      first.until(first.peer.step + 3)  # the worker joins after some round
    (third, began), = came
    start = int(began.step)
    first.until(start + 9)
    coming.join(PATIENCE_S)
    if algorithm == "data_parallel":
      assert all(x.any() for x in jax.tree.leaves(began.opt_state))
    else:
      assert start % 3 == 0
      np.testing.assert_array_equal(
        began.params["w"][0], began.outer["params"]["w"]
      )
      for x in jax.tree.leaves(began.opt_state):  # counts of schedules, moments
        np.testing.assert_array_equal(x, start if x.dtype == np.int32 else 0)
    if algorithm == "eager":
      own = began.outer["workers"]
      np.testing.assert_array_equal(own["params"]["w"], began.params["w"])
      assert not any(x.any() for x in jax.tree.leaves(own["delta"]))
    for name, array in first.shared().items():
      assert np.isfinite(array).all()
      np.testing.assert_array_equal(array, third.shared()[name], name)
    if algorithm == "diloco":  # the examples of three steps
      assert {*first.given, *second.given, *third.given} == {6.0}
    used = first.numbers + second.numbers + third.numbers
    assert len(used) == len(set(used)) == 2 * (start + 9 + 6 + 9)
    for worker in (first, third):
      worker.swarm.__exit__()


def test_programs_of_two_threads_run_in_one_order_on_all_devices():
  """Rounds and steps launch collectives in two threads, without a lock.

  Devices with different orders would wait for one another for ever.
  """
  seen = {i: [] for i in range(4)}

  def note(device, *launch):
    seen[int(device)].append(tuple(map(int, launch)))
    return np.float32(0)

  def run(x, thread, number):
    zero = io_callback(
      note, jax.ShapeDtypeStruct((), jnp.float32), jax.lax.axis_index("d"),
      thread, number,
    )
    return jax.lax.psum(x + zero, "d")

  program = jax.jit(jax.shard_map(
    run, mesh=jax.make_mesh((4,), ("d",), devices=jax.devices()[:4]),
    in_specs=P(), out_specs=P(), check_vma=False,
  ))

  def launch(thread):
    for number in range(100):
      out = program(
        np.float32(1), np.int32(thread), np.int32(number)
      )
      if number % 8 == 7:
        out.block_until_ready()
    out.block_until_ready()

  assert together([lambda: launch(0), lambda: launch(1)]) == [None, None]
  assert len(seen[0]) == 200
  assert seen[0] == seen[1] == seen[2] == seen[3]


def test_late_part_is_shifted_by_the_updates_of_the_others(tmp_path):
  programs = Programs(make("local_sgd", PLAIN, 1))
  with coordinator(tmp_path, 1) as place:
    worker = Worker(programs, place)
    early = jax.tree.map(jnp.copy, worker.peer.state)
    worker.until(3)  # round 0 has ended
    trained = jax.tree.map(lambda x: x + 0.5, early.params)
    part = RoundContribution(0, {
      "params": trained, "outer": early.outer,
      "updates": jax.tree.map(jnp.zeros_like, trained),
    })

    class Later(LoopbackCollectives):
      round = 1

    shared = worker.swarm.state
    made = worker.peer._combine(Later(), shared, part)
    for name in ("params/w", "params/b"):
      np.testing.assert_allclose(made[name], shared[name] + 0.5, rtol=1e-5)
    worker.swarm.__exit__()


@pytest.mark.parametrize(("by", "told"), [(0.5, 0.5), (np.inf, 0.0)])
def test_dc_s3gd_late_update_replaces_the_previous_one(tmp_path, by, told):
  """The previous update is already part of a mean."""
  programs = Programs(make("dc_s3gd", PLAIN, 1))
  with coordinator(tmp_path, 1) as place:
    worker = Worker(programs, place).until(3)
    state = jax.tree.map(jnp.copy, worker.peer.state)
    assert any(x.any() for x in jax.tree.leaves(state.outer["workers"]))
    part = RoundContribution(3, {
      "params": state.params, "outer": state.outer,
      "updates": jax.tree.map(lambda x: jnp.full_like(x, by), state.params),
    })
    event = programs.event(part.round)
    assert event.hook == "finish"
    worker.until(5)

    class Later(LoopbackCollectives):
      round = 6

    made = worker.peer._combine(Later(), worker.swarm.state, part)
    for name in ("mean/w", "mean/b"):
      np.testing.assert_allclose(made[name], told, atol=1e-6)
    worker.swarm.__exit__()


def test_late_gradient_is_applied_to_the_current_parameters(tmp_path):
  programs = Programs(make("data_parallel", "", 1))
  with coordinator(tmp_path, 1) as place:
    worker = Worker(programs, place)

    def args():
      state = jax.tree.map(jnp.copy, worker.peer.state)
      return {
        "params": state.params, "opt_state": state.opt_state, "outer": {},
        "loss": jnp.zeros(1), "grads": jax.tree.map(jnp.ones_like, state.params)
      }

    part, now = RoundContribution(0, args()), worker.until(2) and args()

    class Later(LoopbackCollectives):
      round = 2

    made = worker.peer._combine(Later(), worker.swarm.state, part)
    plan = programs.experiment.outer.plan(2)
    there = programs.shared(
      programs.hook("gradients", plan, LoopbackCollectives(), **now)
    )
    for name, x in there.items():
      np.testing.assert_array_equal(made[name], x, name)
    worker.swarm.__exit__()


@pytest.mark.parametrize("hook", ["begin", "finish"])
def test_late_eager_worker_differs_by_its_newest_part_only(tmp_path, hook):
  """The worker subtracts from means exactly its part that is in them."""
  programs = Programs(make("eager", f"{PLAIN} {_SGD}", 1))
  ended, lags = threading.Event(), []
  with coordinator(tmp_path, 2, quorum=1) as place:
    quick, slow = together([lambda: Worker(programs, place)] * 2)
    give = slow.swarm.give

    def given(part, combine, weight):
      if not lags and part.round > 2:
        time.sleep(0.5 if programs.event(part.round).hook == hook else 0)
      give(part, combine, weight)
      lags.extend([1] * (slow.swarm.revision - 1 > part.round))

    slow.swarm.give = given

    def go_on():
      last = 300
      while quick.peer.step < last:
        quick.until(quick.peer.step + 1)
        time.sleep(0.02)  # yields the core to the other
        if lags:
          last = min(last, quick.peer.step + 6)
      ended.set()

    def follow():
      while not ended.is_set():
        slow.until(slow.peer.step + 1)
        if slow.peer.idle and slow.peer.step % 3 == 0:
          outer = slow.peer.state.outer
          own = outer["workers"]
          for name in ("w", "b"):
            np.testing.assert_allclose(
              own["params"][name][0],
              outer["params"][name]
              - own["share"][0] * own["delta"][name][0],
              atol=1e-6,
            )

    assert together([go_on, follow]) == [None, None]
    assert lags
    for worker in (quick, slow):
      worker.swarm.__exit__()


@pytest.mark.parametrize(("algorithm", "overrides", "problem"), [
  ("noloco", "", "in pairs instead of averaging"),
  ("eager", "", r"share no parameters.*add a section config\.el"),
  ("local_sgd", "outer.codec=bfloat16", "a sum of bfloat16 is not supported"),
  ("diloco", "outer.codec=int8 outer.block=16 outer.route=all_to_all",
   "an all-to-all over the axis 'worker'"),
])
def test_algorithms_that_cannot_run_in_a_swarm_are_refused(
  algorithm, overrides, problem
):
  with pytest.raises(ValueError, match=problem):
    Programs(make_linear(algorithm, overrides, 1, batch_size=2))


def test_part_is_weighted_by_its_examples(tmp_path):
  """The first part of a joining worker only ends a step, with weight zero."""
  algorithm, overrides, _, _ = CASES["dc_s3gd"]
  programs = Programs(make(algorithm, overrides, 1))
  with coordinator(tmp_path, 1) as place:
    first = Worker(programs, place).until(8)
    came = []

    def come():
      worker = Worker(programs, place)
      came.append((worker, worker.peer.step + 8))
      worker.until(came[0][1])

    def go_on():
      while not came:
        first.until(first.peer.step + 1)
        time.sleep(0.02)  # yields the core to the joining worker
      first.until(came[0][1])

    together([come, go_on])
    second = came[0][0]
    assert second.given == sorted(second.given)
    assert second.given[0] < second.given[-1] == 2
    for worker in (first, second):
      worker.swarm.__exit__()


def test_stopped_worker_has_saved_the_round_in_flight(
  tmp_path, monkeypatch
):
  algorithm, overrides, _, _ = CASES["streaming, 3 workers"]
  made = make_linear(
    algorithm, overrides, 1, batch_size=2, num_steps=40, checkpoint_every=4,
    eval_every=40,
  )
  runs = []
  monkeypatch.setattr(
    loop.Stop, "requested", lambda _: runs and not runs[-1].peer.idle
  )
  with coordinator(tmp_path, 1) as place:
    found = swarm_loop.train(
      made, tmp_path / "run", place, quiet=True, on_commit=runs.append
    )
  assert not found.finished
  assert found.step > 4
  (*_, last) = sorted(map(int, os.listdir(tmp_path / "run" / "checkpoints")))
  assert last == found.step
  assert (tmp_path / "run" / "swarm" / f"{last}.npz").exists()


def test_worker_that_joins_after_the_last_round_ends_with_a_message(
  tmp_path, capsys
):
  made = make_linear("diloco", PLAIN, 1, batch_size=2, num_steps=6)
  with coordinator(tmp_path, 1) as place:
    assert swarm_loop.train(
      made, tmp_path / "run", place, quiet=True
    ).finished
    assert not swarm_loop.train(
      made, tmp_path / "late", place, Elastic(alone_s=1.0)
    ).finished
  assert "the swarm has completed all 2 rounds" in capsys.readouterr().out


def test_wait_for_a_lost_revision_ends():
  said = []
  timeout = AdmissionTimeout(PeerSettings(alone_s=0.05), said.append)
  lost = Waiting(7, True, "waits for a peer that has revision 7")
  assert timeout.update(lost) is None
  time.sleep(0.06)
  assert timeout.update(lost._replace(lost=False)) is None  # such a peer exists
  assert timeout.update(lost) is None
  time.sleep(0.06)
  assert "holds revision 7" in str(timeout.update(lost))
  assert said == [f"the coordinator {lost.text}"]


def test_process_of_a_swarm_has_one_worker():
  with pytest.raises(ValueError, match=r"config\.parallel\.worker=2 must be 1"):
    Programs(make("diloco", PLAIN, 2))


def test_worker_on_other_devices_is_refused(tmp_path):
  """Other programs give other last bits, so that each vote would fail."""
  def made(devices):
    return make_linear(
      "diloco", PLAIN, 1, batch_size=2, num_steps=9,
      levels=(Axis("data", 2, devices),),
    )

  with coordinator(tmp_path, 1) as place:
    worker, refused = Worker(Programs(made(1)), place), threading.Event()

    def go_on():
      while not refused.is_set():  # a worker joins after a round
        worker.until(worker.peer.step + 3)
        time.sleep(0.02)

    def come():
      try:
        swarm_loop.train(made(2), tmp_path / "other", place, quiet=True)
      finally:
        refused.set()

    _, error = together([go_on, come])
    assert "2 ranks = 1 lanes x 2 devices" in str(error)
    worker.swarm.__exit__()


def test_swarm_of_another_config_is_refused_and_a_stopped_one_resumes(
  tmp_path
):
  def made(steps, **config):  # without the keys that may differ
    changed = make_linear(
      "diloco", PLAIN, workers=1, batch_size=2, num_steps=steps,
      checkpoint_every=3, eval_every=steps,
    )
    return dataclasses.replace(changed, config={"name": "toy", **config})

  with coordinator(tmp_path, 1) as place:
    assert swarm_loop.train(
      made(6), tmp_path / "run", place, quiet=True
    ).step == 6
  # The coordinator has lost its journal: the checkpoint defines the round.
  (tmp_path / "journal").unlink()
  with coordinator(tmp_path, 1) as place:
    worker = Worker(Programs(made(6, seed=1)), place)
    _, error = together([
      lambda: worker.until(9),  # the other joins after a round
      lambda: swarm_loop.train(
        made(12), tmp_path / "other", place, quiet=True
      ),
    ])
    assert "have another config" in str(error)
    worker.swarm.__exit__()
  (tmp_path / "journal").unlink()
  with coordinator(tmp_path, 1) as place:
    assert swarm_loop.train(
      made(12), tmp_path / "run", place, quiet=True
    ).step == 12
  steps = [r["step"] for r in read_metrics(tmp_path / "run") if "loss" in r]
  assert steps == list(range(1, 13))


def test_run_ahead_of_the_swarm_or_made_without_one_is_refused(tmp_path):
  """Each would lose its steps, without a change in its folder."""
  def made(steps):
    return make_linear(
      "diloco", PLAIN, 1, batch_size=2, num_steps=steps, checkpoint_every=3,
      eval_every=steps,
    )

  def files(name):
    folder = tmp_path / name
    kept = [*(folder / "checkpoints").rglob("*"), folder / "metrics.jsonl"]
    return {path: path.is_file() and path.read_bytes() for path in kept}

  with coordinator(tmp_path, 1) as place:
    swarm_loop.train(made(12), tmp_path / "ahead", place, quiet=True)
  loop.train(made(6), tmp_path / "plain", quiet=True)
  before = files("ahead"), files("plain")
  (tmp_path / "journal").unlink()
  with coordinator(tmp_path, 1) as place:
    worker = Worker(Programs(made(900)), place).until(3)
    for name, problem in (
      ("ahead", "ahead, step 12: the run of this peer is at round 4, .*"
       "discard [23] rounds. To continue this run, start"),
      ("plain", "plain has a run of 6 steps that were not made in a swarm"),
    ):
      with pytest.raises(ValueError, match=problem):
        swarm_loop.train(made(15), tmp_path / name, place, quiet=True)
    worker.until(6).swarm.__exit__()
  assert (files("ahead"), files("plain")) == before


def test_options_of_a_worker_are_settings_of_its_peer(tmp_path):
  """Each differs from its default."""
  programs = Programs(make_linear("diloco", PLAIN, 1, num_steps=6))
  options = Elastic(
    order="ring", measured=True, alone_s=7.0, num_connections=3, checksums=True,
  )
  with coordinator(tmp_path, 1) as place:
    state = programs.experiment.init_state()
    with swarm_loop.make_swarm(
      place, programs, swarm_loop.build_shared_state(programs, state),
      options=options,
    ) as swarm:
      found = swarm._agent._settings
  assert (found.measured, found.alone_s, found.num_connections,
          found.checked) == (True, 7.0, 3, True)
  assert found.rounds == programs.num_rounds(6)
  # Rounds of three steps end in steps 2, 5 and 8.
  steps = [programs.event(number).step for number in range(3)]
  for num_steps in range(1, steps[-1] + 1):
    assert programs.num_rounds(num_steps) == sum(s < num_steps for s in steps)


def test_measured_bandwidths_need_the_order_of_a_ring():
  options = Elastic(order="direct", measured=True)
  with pytest.raises(ValueError, match="set order to 'ring'"):
    swarm_loop.make_swarm(None, None, {}, options=options)


def test_shared_states_are_kept_as_long_as_their_checkpoints(tmp_path):
  folder = epath.Path(tmp_path)
  kept = {
    step: {"x": np.arange(step), "b": b"ab" * step, "none": b""}
    for step in (3, 6, 9)
  }
  for step, state in kept.items():
    swarm_loop._write_shared_state(folder, step, 10 * step, state)
  for step, state in kept.items():
    revision, found = swarm_loop._read_shared_state(folder, step)
    assert (revision, {*found}) == (10 * step, {*state})
    np.testing.assert_array_equal(found["x"], state["x"])
    assert (found["b"], found["none"]) == (state["b"], b"")
  assert swarm_loop._read_shared_state(folder, 4) is None
  swarm_loop._delete_old_states(folder, [])
  swarm_loop._delete_old_states(folder, [9, 6])
  path = tmp_path / "swarm" / "6.npz"
  assert sorted(path.parent.iterdir()) == [path, path.with_name("9.npz")]
  arrays = dict(np.load(path))
  np.savez(path, **{k: x for k, x in arrays.items() if k != "x"})
  with pytest.raises(ValueError, match="it has 2 arrays, expected 3"):
    swarm_loop._read_shared_state(folder, 6)
  np.savez(path, **arrays | {"revision": np.array(7)})  # of an older run
  assert swarm_loop._read_shared_state(folder, 6)[0] == 7


@pytest.mark.parametrize(("step", "before", "text"), [
  (None, 2, ""), (6, 3, ""), (7, 3, ""),
  (6, 1, "1 -> 3 at step 6: worker 1, 2 starts from the outer parameters; me"),
  (9, 5, "5 -> 3 at step 9: worker 3, 4 leaves, and its unsent updates are"),
])
def test_change_of_the_number_of_workers_names_those_that_change(
  step, before, text
):
  experiment = make("diloco", PLAIN, 3)
  kept = types.SimpleNamespace(
    latest_step=lambda: step, num_workers=lambda step: before
  )
  found = membership.check(experiment, kept)
  assert (found == "") == (text == "")
  assert found.startswith(text)
  kept.latest_step, kept.num_workers = lambda: 7, lambda step: 2
  with pytest.raises(ValueError, match=(
    r"config\.parallel\.worker=3: the checkpoint of step 7 has 2 workers and .*"
    r"continue with 2 and --config\.train\.checkpoint_every=9 to step 9,"
  )):
    membership.check(experiment, kept)


def test_workers_may_differ_in_some_sections_of_their_configs():
  made = make("diloco", PLAIN, 1)
  programs, state = Programs(made), made.init_state()

  def shared(**config):
    programs.experiment = dataclasses.replace(made, config=config)
    found = swarm_loop.build_shared_state(programs, state)
    return found["elastic/config"], found["elastic/program"]

  usual = {
    key: {"x": 1} for key in
    ("name", "train", "inference", "elastic", "kernels", "data", "outer")
  }
  first, program = shared(**usual)
  assert jax.__version__.encode() in program
  assert shared(**dict(reversed(usual.items()))) == (first, program)
  for key in usual:
    same = shared(**usual | {key: {"x": 2}})[0] == first
    assert same == (key not in ("data", "outer")), key
