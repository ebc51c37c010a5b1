"""Membership of a worker of several processes, here of one process."""

import socket
import threading
import types

import numpy as np
import pytest

from caatnet.train.elastic import multi_process
from caatnet.train.elastic.multi_process import ReplicatedSwarm
from parallel.peers.membership import ids
from parallel.peers.membership.journal import Journal
from parallel.peers.membership.service import CoordinatorService
from parallel.peers.settings import PeerSettings
from parallel.peers.swarm import Swarm
from parallel.peers.timeouts import PeerHalted, RunFinished
from parallel.peers.transport.handshake import Security
from parallel.peers.transport.transfers import LinksLost

SECURITY = Security(b"a token that all peers have")


@pytest.fixture
def there(tmp_path):
  with (
    Journal(tmp_path / "journal") as journal,
    CoordinatorService(("127.0.0.1", 0), SECURITY, journal, say=str) as service,
  ):
    threading.Thread(target=service.serve, daemon=True).start()
    yield service


@pytest.fixture(autouse=True)
def _often(monkeypatch):
  monkeypatch.setattr(multi_process, "_EVENT_S", 0.05)


def member(there, **settings):
  state = {"x": np.zeros(3, np.float32)}
  return Swarm(
    there.address, SECURITY, state, settings=PeerSettings(**settings)
  )


def combine(exchange, state, part):
  assert exchange.gather(b"here") == [b"here"] * len(exchange.contributors)
  weight = np.float32(exchange.weights[exchange.rank])
  return {"x": state["x"] + (exchange.round + 1) * exchange.sum(weight * part)}


def test_membership_has_the_attributes_of_its_swarm(there):
  swarm = member(there, samples=5)
  together = ReplicatedSwarm(swarm)
  assert (together.revision, together.digest) == (0, swarm.digest)
  assert (together.samples, together.counted) == ((), False)
  with together:
    assert not together.counted
    for number, expected in ((1, 2.0), (2, 6.0)):
      assert len(together.samples) == 1
      assert together.samples == swarm.samples
      state = together.give(np.ones(3, np.float32), combine, 2.0)
      assert state["x"].tolist() == [expected] * 3
      assert state.keys() == together.state.keys() == swarm.state.keys()
      assert together.counted
      assert together.revision == swarm.revision == number
      assert together.checkpoint[0] == swarm.checkpoint[0]
      assert together.checkpoint[1].keys() == swarm.checkpoint[1].keys()
      assert together.digest == swarm.digest
      assert together.members == (together.me,) == (swarm.me,)
  with pytest.raises(ConnectionRefusedError):
    socket.create_connection(ids.address(swarm.me), 60)


def test_end_of_a_swarm_ends_the_membership(there):
  swarm = member(there, rounds=1)
  with ReplicatedSwarm(swarm) as together:
    swarm._agent._settings = PeerSettings(alone_s=0.3)
    together.give(np.ones(3, np.float32), combine)
    late = ReplicatedSwarm(member(there, rounds=1))
    with pytest.raises(RunFinished, match="all 1 rounds"), late:
      pass
    there.close()
    with pytest.raises(PeerHalted, match="no coordinator"):
      together.give(np.ones(3, np.float32), combine)
    assert together.revision == 1


@pytest.mark.parametrize(("error", "raised"), [
  (LinksLost("p1", "it is gone"), LinksLost),
  (ValueError("it is gone"), ValueError),
  (FileNotFoundError("it is gone"), RuntimeError),
])
def test_error_of_an_exchange_is_raised_on_all_processes(error, raised):
  def failing(*_):
    raise error

  exchange = multi_process._Exchange(types.SimpleNamespace(
    round=3, contributors=("p0", "p1"), rank=1, weights=(1.0, 2.0),
    sum=failing, gather=failing,
  ))
  assert (exchange.round, exchange.contributors) == (3, ("p0", "p1"))
  assert (exchange.rank, exchange.weights) == (1, (1.0, 2.0))
  for call in (exchange.sum, exchange.gather):
    with pytest.raises(raised, match="it is gone") as caught:
      call(np.ones(2, np.float32))
    assert type(caught.value) is raised
    assert caught.value is not error  # it is made from the broadcast


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 70_000])
def test_values_of_any_size_are_broadcast(size):
  assert multi_process._broadcast(b"x" * size) == b"x" * size


def test_a_byte_that_changes_on_the_way_is_an_error(monkeypatch):
  def changed(x):
    return x if x.dtype != np.uint8 else x ^ (np.arange(x.size) == 9)

  monkeypatch.setattr(multi_process.multihost_utils, "broadcast_one_to_all",
                      changed)
  with pytest.raises(ValueError, match="bytes of process 0 arrived with anoth"):
    multi_process._broadcast(b"x" * 100)
