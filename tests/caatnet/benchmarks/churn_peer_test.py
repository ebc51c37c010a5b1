"""Worker of the swarm with faults: its arithmetic, checkpoints and commands."""

import io
import pickle
import socket
import sys
import types

import numpy as np
import pytest

from caatnet.benchmarks.elastic import churn_peer


def test_gradient_is_the_mean_over_samples_in_any_spans():
  theta = churn_peer.initial_state(50)["theta"] + np.float32(0.5)
  parts = [churn_peer.gradient(theta, ((i, i + 1),)) for i in range(6)]
  found = churn_peer.gradient(theta, ((0, 2), (2, 3), (3, 6)))
  assert found.dtype == np.float32
  np.testing.assert_allclose(found, np.mean(parts, 0), rtol=1e-5, atol=1e-6)
  # Noise of many samples has the mean zero.
  theta = np.zeros(2000, np.float32)
  mean = churn_peer.gradient(theta, ((0, 20),)).mean()
  assert mean == pytest.approx(-churn_peer.TARGET, abs=0.05)


def test_loss_is_that_of_a_noisy_sample():
  """Half of the squared distance and of the variance, which is 1."""
  target = np.full(10, churn_peer.TARGET)
  assert churn_peer.loss(target) == 0.5
  assert churn_peer.loss(target + 2) == 0.5 + 2**2 / 2


def test_step_is_that_of_the_mean_and_counts_all_samples():
  exchange = types.SimpleNamespace(
    gather=lambda x: [x.tobytes(), np.array([5], np.int64).tobytes()],
    mean=lambda value: value / 2,
  )
  state = churn_peer.initial_state(3)
  found = churn_peer.combine(exchange, state, (np.ones(3, np.float32), 2))
  np.testing.assert_allclose(found["theta"], -churn_peer.LEARNING_RATE / 2)
  assert found["samples"].tolist() == [7]
  assert state["theta"].tolist() == [0, 0, 0]


def test_newest_three_checkpoints_are_kept(tmp_path):
  for revision in (2, 9, 10, 8, 10):
    churn_peer._write_checkpoint(tmp_path, revision, {"revision": revision})
  names = sorted(path.name for path in tmp_path.iterdir())
  assert names == [f"{revision:09}.checkpoint" for revision in (8, 9, 10)]
  for path in tmp_path.iterdir():
    revision, state = pickle.loads(path.read_bytes())
    assert int(path.stem) == revision == state["revision"]


def test_one_bit_of_one_element_is_flipped():
  x = np.arange(1, 6, dtype=np.float32)
  expected = x.view(np.uint32) ^ np.uint32([0, 0, 1, 0, 0])
  churn_peer.flip_bit(x.ctypes.data, 2)
  assert x.view(np.uint32).tolist() == expected.tolist()


@pytest.mark.parametrize(("lines", "spoilt"), [
  ("bits\nbits\nend\nbits\n", 2), ("end\n", 0), ("", 0), ("bits\n", 1),
])
def test_commands_are_executed_until_the_end(monkeypatch, lines, spoilt):
  monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
  calls = []
  churn_peer.run_stdin_commands(
    lambda: calls.append("spoil"), lambda: calls.append("end")
  )
  assert calls == ["spoil"] * spoilt + ["end"]


def test_connected_sockets_are_found_and_broken():
  with socket.create_server(("127.0.0.1", 0)) as server:
    near = socket.create_connection(server.getsockname())
    far, _ = server.accept()
    with near, far:
      found = churn_peer._connections()
      ends = [(x.getsockname(), x.getpeername()) for x in found]
      # Both ends, and not the socket that listens.
      for end in (near, far):
        assert (end.getsockname(), end.getpeername()) in ends
      churn_peer._cut(found[ends.index(
        (near.getsockname(), near.getpeername())
      )])
      assert far.recv(1) == b""
      for x in found:
        x.close()


def test_deaf_end_receives_nothing_more():
  with socket.create_server(("127.0.0.1", 0)) as server:
    near = socket.create_connection(server.getsockname())
    far, _ = server.accept()
    with near, far:
      far.settimeout(0.2)
      near.sendall(b"a")
      assert far.recv(1) == b"a"
      churn_peer.drop_received_packets(far)
      near.sendall(b"b")
      with pytest.raises(TimeoutError):
        far.recv(1)
