"""Rounds over sockets: in threads, and in processes that are killed."""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest

from caatnet.federated import client as client_module
from caatnet.federated import events, messages, server, service, snapshot
from parallel.peers.transport import frames
from parallel.peers.transport.handshake import Security
from tests.caatnet.federated import process

IDS = range(3)


def expected(rules):
  """Returns the final state of the same run without sockets."""
  state = server.initial_state(process.PARAMS, process.numeric.Plain())

  def step(message):
    nonlocal state
    state, _ = server.step(state, message, 0.0, rules, process.numeric.Plain())

  for client in IDS:
    step(events.Hello(client, client + 1, digest="0a"))
  while not state.finished:
    for client in state.sampled:
      trained = process.Trainer(client).train(
        state.published, state.round, lambda: False
      )
      step(events.Update(
        client, state.round, state.revision, trained.params - state.published
      ))
  return state


def until_refused(client):
  """Runs a faulty client, which dials for minutes after the server's end."""
  with contextlib.suppress(ValueError):
    client.run()


def in_threads(workdir, rules, **trainers):
  """Runs server and clients in threads; returns the service and its lines."""
  lines = []
  with process.service(0, workdir, rules, say=lines.append) as service:
    clients = [
      process.client(
        k, service.address, trainer=trainers.get(f"client_{k}"),
        say=lines.append,
      ) for k in IDS
    ]
    threads = [threading.Thread(target=c.run, daemon=True) for c in clients]
    for thread in threads:
      thread.start()
    service.serve()
    for thread in threads:
      thread.join(10.0)
      assert not thread.is_alive()
  return service, lines


@pytest.fixture
def steps(monkeypatch):
  """Messages and effects of the core, in order."""
  found, step = [], server.step

  def record(state, message, *others):
    state, effects = step(state, message, *others)
    found.extend([message, *effects])
    return state, effects

  monkeypatch.setattr(server, "step", record)
  return found


def test_one_client_at_a_time_receives_and_sends_over_sockets(tmp_path, steps):
  rules = process.rules(
    per_round=3, rounds=3, downlinks_at_once=1, uplinks_at_once=1
  )
  in_threads(tmp_path, rules)
  begun = events.Train, events.Resend
  ended = events.ModelReceived, events.Update
  for begin, end in zip(begun, ended, strict=True):
    kinds = [type(e) for e in steps if isinstance(e, (begin, end))]
    assert kinds == [begin, end] * 9
  ready = [e.client for e in steps if isinstance(e, events.UpdateReady)]
  sent = [e for e in steps if isinstance(e, events.Update)]
  assert [e.client for e in sent] == ready
  assert all(e.busy_s > 0 for e in sent)


def test_model_that_a_client_has_already_is_delivered_at_once(tmp_path, steps):
  """A client trains on after a lost connection; others do not wait for it."""
  rules = process.rules(
    clients=1, per_round=1, rounds=1, downlinks_at_once=1
  )
  with process.service(0, tmp_path, rules, say=print) as service:
    client = process.client(0, service.address, 0.15, say=print)
    threading.Thread(target=client.run, daemon=True).start()

    def check():
      if any(isinstance(e, events.ModelReceived) for e in steps) and not cut:
        cut.append(client._channel.close("cut by the test"))

    cut = []
    service.serve(check)
  kinds = [
    type(e) for e in steps
    if isinstance(e, (events.Train, events.ModelReceived, events.Update))
  ]
  assert kinds == [events.Train, events.ModelReceived] * 2 + [events.Update]


def test_long_wait_is_printed_once(tmp_path, monkeypatch):
  monkeypatch.setattr(service, "_REPORT_AFTER_S", 0.1)
  lines = []
  with process.service(0, tmp_path, process.rules(), say=lines.append) as made:
    lines.clear()  # its address
    for _ in range(2):
      made._report()
    assert lines == []
    time.sleep(0.11)
    for _ in range(2):
      made._report()
    assert lines == [server.describe_wait(made.state, process.rules())]


def test_bytes_of_lost_connections_add_up(tmp_path):
  with process.service(0, tmp_path, process.rules(), say=print) as made:
    for count in (1, 2):
      made._channels[2] = types.SimpleNamespace(
        sent_bytes=30, received_bytes=7
      )
      made._lose(2)
      assert made._counted == {2: (30 * count, 7 * count)}
    assert made._channels == {}


def test_ended_clients_do_not_connect_again(tmp_path):
  before = {*threading.enumerate()}
  in_threads(tmp_path, process.rules(rounds=1))
  left = [
    thread for thread in {*threading.enumerate()} - before
    if "_stay_connected" in thread.name
  ]
  for thread in left:  # may wait before an attempt
    thread.join(5.0)
    assert not thread.is_alive()


@pytest.mark.parametrize("at_once", [0, 1])
def test_rounds_over_sockets_equal_the_core(tmp_path, at_once):
  rules = process.rules(downlinks_at_once=at_once, uplinks_at_once=at_once)
  service, lines = in_threads(tmp_path, rules)
  np.testing.assert_array_equal(
    service.state.params, expected(process.rules()).params
  )
  records = [
    json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()
  ]
  assert [r["round"] for r in records] == list(range(6))
  for record in records:
    assert [row["client"] for row in record["clients"]] == record["sampled"]
    for row in record["clients"]:
      # Both models in float32, headers of 14 frames, and other messages.
      assert row["payload_up"] == process.PARAMS.nbytes
      for name in ("bytes_up", "bytes_down"):
        assert 0 < row[name] - process.PARAMS.nbytes < 4000, row
      assert min(row["t_d"], row["t_u"], row["t_tr"]) >= 0
    assert record["slowest_s"] <= record["duration_s"]
    assert record["slowest_s"] == max(
      sum(row[name] for name in ("t_d", "t_v", "t_tr", "t_te", "t_u"))
      for row in record["clients"]
    )
  assert any("round 5: revision 6 from 2 updates" in x for x in lines)
  # Between machines, whose clocks differ, only the sum of both ways is known.
  service._clocks[1] = "another boot"
  result = messages.Result(
    5, 5, (8,), None, 0, None, None, 0.0, 0.0, 0.0, busy_s=0.25, sent_s=0.0
  )
  arrived_s = service._sent[1] + 1.0
  row = service._make_client_row(
    1, messages.ReceivedMessage(result, (b"8 bytes.",), arrived_s)
  )
  assert row["t_d + t_u"] == pytest.approx(0.75)
  assert not {"t_d", "t_u"} & row.keys()
  if messages.clock_id():
    service._clocks[1] = messages.clock_id()
    result = messages.Result(
      5, 5, (8,), 0.5, 7, 0.25, 0.75, 1.0, 2.0, 3.0, busy_s=9.0, sent_s=10.0
    )
    row = service._make_client_row(
      1, messages.ReceivedMessage(result, (b"8 bytes.",), 10.5)
    )
    assert row == {
      "round": 5, "client": 1, "t_tr": 1.0, "t_te": 2.0, "t_v": 3.0,
      "payload_up": 8, "loss": 0.5, "test_loss": 0.25, "t_d": 0.75, "t_u": 0.5,
    }
  service._record(events.RoundEnded(
    7, 6, (0, 1, 2), ((1, 7, 1.0),), (0, 2), (), 1.25, 3.0, True
  ))
  assert lines[-1] == (
    "round 7: revision 6 from 1 updates, without 0, 2, loss 1.2500 before it, "
    "3.00 s"
  )
  # The same folder does nothing more, and holds nothing of killed servers.
  (tmp_path / ".server.1_ab.npz").touch()
  with process.service(0, tmp_path, rules, say=lines.append) as again:
    assert again.serve().finished == "6 rounds have ended"
  assert sorted(x.name for x in tmp_path.iterdir()) == [
    "metrics.jsonl", "server.npz"
  ]


def test_straggler_follows_differences_that_it_does_not_answer(tmp_path):
  """Client 2 misses most deadlines, and has the published bits."""
  rules = process.rules(
    per_round=3, stragglers="drop", deadline_s=0.4, rounds=8
  )
  arithmetic, lines = process.Halves(), []
  with process.service(
    0, tmp_path, rules, arithmetic, say=lines.append
  ) as service:
    clients = [
      process.client(
        k, service.address, 0.3 * (k == 2), coded=True, say=lines.append
      ) for k in IDS
    ]
    threads = [threading.Thread(target=c.run, daemon=True) for c in clients]
    for thread in threads:
      thread.start()
    service.serve()
    for thread in threads:
      thread.join(10.0)
      assert not thread.is_alive()
  assert clients[2].revision > 2
  assert not any("needs the whole model" in line for line in lines)
  for client in clients:
    np.testing.assert_array_equal(
      client._params, arithmetic.published[client.revision]
    )
  # Differences from another revision: the client requests the whole model.
  work = messages.Work(9, 9, clients[0].revision - 1, (2,), 0.0, False)
  assert not clients[0]._receive_model(work, (b"ab",))
  assert clients[0].revision is None


class Gated(process.Trainer):
  """Waits before it trains; keeps the rounds that it trained for."""

  def __init__(self, client, gate):
    super().__init__(client)
    self.rounds, self._gate = [], gate

  def train(self, params, round, stops):
    self.rounds.append(round)
    assert self._gate.wait(30)
    return super().train(params, round, stops)


class Deaf(Gated):
  """Does not look at messages while it trains."""

  def train(self, params, round, stops):
    return super().train(params, round, lambda: False)


def test_update_is_sent_once_by_a_connection(tmp_path, steps):
  """The server sends the work again while the update is on its way."""
  gate, cut = threading.Event(), []
  rules = process.rules(clients=1, per_round=1, rounds=2)
  with process.service(0, tmp_path, rules, say=print) as service:
    client = process.client(
      0, service.address, trainer=Deaf(0, gate), say=print
    )
    threading.Thread(target=client.run, daemon=True).start()

    def check():
      delivered = sum(isinstance(e, events.ModelReceived) for e in steps)
      if delivered and not cut:
        cut.append(client._channel.close("cut by the test"))
      if delivered == 2:
        gate.set()

    service.serve(check)
  updates = [e.round for e in steps if isinstance(e, events.Update)]
  assert updates == [0, 1]
  assert service.state.counts == {}


class Down(Exception):
  """The server ends."""


def test_client_that_computes_receives_the_next_model(tmp_path, steps):
  """A client that misses each deadline is sent each model, which it reports."""
  gate = threading.Event()
  rules = process.rules(
    clients=1, per_round=1, rounds=3, stragglers="drop", deadline_s=0.2,
    downlinks_at_once=1,
  )
  with process.service(0, tmp_path, rules, say=print) as service:
    client = process.client(
      0, service.address, trainer=Gated(0, gate), say=print
    )
    threading.Thread(target=client.run, daemon=True).start()
    service.serve()
    gate.set()
  delivered = [e.round for e in steps if isinstance(e, events.ModelReceived)]
  assert delivered == [0, 1, 2]


@pytest.mark.parametrize("at_once", [0, 1])
def test_restarted_server_receives_retained_updates(tmp_path, at_once):
  rules = process.rules(
    per_round=3, rounds=2, downlinks_at_once=at_once, uplinks_at_once=at_once
  )
  opened, gate = threading.Event(), threading.Event()
  opened.set()
  trainers = [Gated(k, gate if k == 2 else opened) for k in IDS]
  lines = []

  def check():
    if len(first.state.received) == 2:
      raise Down

  with process.service(0, tmp_path, rules, say=lines.append) as first:
    threads = [
      threading.Thread(target=process.client(
        k, first.address, trainer=trainers[k], say=lines.append
      ).run, daemon=True) for k in IDS
    ]
    for thread in threads:
      thread.start()
    with pytest.raises(Down):
      first.serve(check)
  gate.set()
  port = first.address[1]
  with process.service(port, tmp_path, rules, say=lines.append) as second:
    second.serve()
  for thread in threads:
    thread.join(10.0)
    assert not thread.is_alive()
  # No client has trained twice for a round.
  assert [sorted(t.rounds) for t in trainers] == [[0, 1]] * 3
  np.testing.assert_array_equal(
    second.state.params, expected(process.rules(per_round=3, rounds=2)).params
  )


class Endless(process.Trainer):
  """Trains until it is stopped, or for a long time."""

  def train(self, params, round, stops):
    end = time.monotonic() + 10
    while not (stopped := stops()) and time.monotonic() < end:
      time.sleep(0.02)
    self.stopped = stopped


def test_client_without_a_server_stops_to_train(tmp_path, steps):
  def check():
    if any(isinstance(e, events.ModelReceived) for e in steps):
      raise Down

  rules, trainer = process.rules(clients=1, per_round=1), Endless(0)
  with process.service(0, tmp_path, rules, say=print) as service:
    client = process.client(
      0, service.address, trainer=trainer, alone_s=0.3, say=print
    )
    with concurrent.futures.ThreadPoolExecutor() as pool:
      ended = pool.submit(client.run)
      with pytest.raises(Down):
        service.serve(check)
      service.close()
      with pytest.raises(ValueError, match=r"no server at .* for 0\.3 s"):
        ended.result(30)
  assert trainer.stopped


class Poison(process.Trainer):
  """Returns NaN in round 1, and a huge update in round 3."""

  def train(self, params, round, stops):
    found = super().train(params, round, stops)
    scale = {1: np.nan, 3: np.float32(1e30)}.get(round, np.float32(1))
    return found._replace(params=found.params * scale)


def test_poisoned_updates_are_refused_and_named(tmp_path):
  rules = process.rules(per_round=3, rounds=5)
  client = Poison(1)
  client.examples = 99
  service, lines = in_threads(tmp_path, rules, client_1=client)
  assert any("client 1 reports 99 examples, 96.1% of" in x for x in lines)
  assert dict(service.state.counts) == {"not finite": 1, "an outlier": 1}
  assert "update of client 1 in round 1 refused: not finite" in lines
  assert np.isfinite(service.state.params).all()


@pytest.mark.parametrize(
  ("client", "message"),
  [
    (lambda at: process.client(7, at), "ids are 0 to 2"),
    (lambda at: process.client(0, at, trainer=Other(0)), "another model"),
    (lambda at: process.client(0, ("127.0.0.1", 1), alone_s=0.1), "no server"),
  ],
)
def test_refused_client_ends_with_one_line(
  tmp_path, monkeypatch, client, message
):
  monkeypatch.setattr(service, "_REPORT_AFTER_S", 0.0)
  lines = []
  with process.service(0, tmp_path, process.rules(), say=lines.append) as made:
    thread = threading.Thread(target=made.serve, daemon=True)
    thread.start()
    with pytest.raises(ValueError, match=message) as caught:
      client(made.address).run()
    assert "\n" not in str(caught.value)
    end = time.monotonic() + 10
    # Before the first round, the server waits for it, and says why.
    while message == "another model" and not any(
      x.endswith(f": 0 of 3 there; refused: {caught.value}") for x in lines
    ):
      assert time.monotonic() < end, lines
      time.sleep(0.01)


@pytest.mark.parametrize(("line", "message"), [
  (b"[1]", r"line 2: .* must be an object"),
  (b'{"round": "a", "t_a": 0.5, "clients": []}', 'line 2: round="a" must'),
  (b'{"round": 1, "t_a": 0.5}', "line 2: clients is missing"),
  (b'{"round": 1, "t_a": 0.5, "clients": [1]}', r"line 2: clients\[0\]=1 must"),
  (b"\xff", "'utf-8' codec"),
])
def test_damaged_metrics_are_named(tmp_path, line, message):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(
    b'{"round": 0, "t_a": 0.5, "clients": [{"client": 1}]}\n' + line + b"\n{"
  )
  with pytest.raises(
    ValueError, match=f"{path} is damaged: {message}"
  ) as found:
    process.service(0, tmp_path, process.rules())
  assert "\n" not in str(found.value)


def test_metrics_of_rounds_that_run_again_are_removed(tmp_path):
  rules, path = process.rules(), tmp_path / "metrics.jsonl"
  state = server.initial_state(process.PARAMS, process.numeric.Plain())
  snapshot.write(
    tmp_path / "server.npz", dataclasses.replace(state, round=1), rules
  )
  lines = [
    f'{{"round": {r}, "t_a": 0.25, "clients": [{{"client": {r}}}]}}\n'
    for r in range(2)
  ]
  path.write_text("".join(lines) + '{"round": 1, "t_')
  with process.service(0, tmp_path, rules, say=str) as found:
    assert found.rows == [{"client": 0, "t_a": 0.25}]
  assert path.read_text() == lines[0]


class Other(process.Trainer):
  digest = "0b"


def test_id_belongs_to_its_process_while_that_is_connected(tmp_path):
  lines = []
  with process.service(
    0, tmp_path, process.rules(), silence_s=1.0, say=lines.append
  ) as service:
    threading.Thread(target=service.serve, daemon=True).start()

    def start():
      found = process.client(0, service.address, say=lines.append)

      def run():
        try:
          found.run()
        except ValueError as error:
          lines.append(str(error))

      threading.Thread(target=run, daemon=True).start()
      return found

    def reach(condition):
      end = time.monotonic() + 10.0
      while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

    first = start()
    reach(lambda: 0 in service._channels)
    channel = service._channels[0]
    start()
    reach(lambda: "client 0 is connected from another process" in lines)
    # The connected client keeps its connection, and can replace it.
    assert service._channels[0] is channel
    first._channel.close("cut by the test")
    reach(lambda: service._channels.get(0, channel) is not channel)
    # A silent one, such as a half-open connection, can be replaced by any.
    channel = service._channels[0]
    start()
    service._channels[0].last_received -= 0.7
    reach(lambda: service._channels.get(0, channel) is not channel)
    service._channels[0].send(messages.End("done", True))


class WithoutVector(process.Client):
  """Sends its first update without a vector."""

  def _send(self, result, data):
    messages.send(
      self._channel, result if result.round else result._replace(sizes=()),
      (data,) if result.round else (),
    )


def test_update_without_its_vector_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(process, "Client", WithoutVector)
  service, _ = in_threads(tmp_path, process.rules(rounds=2))
  assert dict(service.state.counts) == {"of another size": 2}
  assert service.state.revision == 1


def raw(data, closes):
  """Returns a function that sends bytes instead of an update."""
  def send(channel, result, update):
    channel._sock.sendall(data)
    if closes:
      channel.close("broken off")

  return send


def stalls(channel, result, data):
  """Sends the first part of an update, and keep-alives."""
  messages.send(channel, result, (data[:9],))


def begins_again(channel, result, data):
  stalls(channel, result, data)
  messages.send(channel, result, (data,))


def connects_as_another(channel, result, data):
  channel.send(
    messages.ClientHello(0, 1, None, "0a", None, messages.clock_id())
  )


FRAME = frames.Header(frames.Kind.MESSAGE, 1000).pack() + b"truncated"
FAULTS = {
  "announces too much": lambda channel, result, data: channel.send(
    result._replace(sizes=(10**12,))
  ),
  "no frame": raw(b"GET / HTTP/1.1" * 9, False),
  "truncated frame": raw(FRAME, False),
  "broken off": raw(FRAME, True),
  "stalls": stalls, "begins again": begins_again,
  "connects as another": connects_as_another,
  "error of the reader": lambda channel, result, data: messages.send(
    channel, result._replace(round=Reader.FAILS), (data,)
  ),
  "of the future": lambda channel, result, data: messages.send(
    channel, result._replace(round=result.round + 1), (data,)
  ),
  "silent when asked": lambda channel, result, data: None,
  "confirms no model": None,  # see `Reader`
}
SILENT = (
  "stalls", "truncated frame", "silent when asked", "confirms no model"
)


class Reader(messages.Assembler):
  """Has an unexpected error at an update, or takes no model."""

  FAILS = 987

  def take(self, message):
    if isinstance(message, messages.Result) and message.round == self.FAILS:
      raise KeyError(message.round)
    if threading.current_thread().name == "confirms no model" and isinstance(
      message, (messages.Work, messages.Part)
    ):
      return ()
    return super().take(message)


@pytest.mark.parametrize(
  ("at_once", "fault"), [(i % 2, fault) for i, fault in enumerate(FAULTS)]
)
def test_faults_of_transport_end_with_the_round(
  tmp_path, monkeypatch, at_once, fault
):
  monkeypatch.setattr(client_module, "_AGAIN_S", 0.01)
  monkeypatch.setattr(server, "_MAX_LOST", 2)
  monkeypatch.setattr(messages, "Assembler", Reader)

  class Faulty(process.Client):
    def _converse(self):
      threading.current_thread().name = fault
      super()._converse()

    def _send(self, result, data):
      FAULTS[fault](self._channel, result, data)

  rules = process.rules(
    per_round=3, rounds=1, uplinks_at_once=at_once,
    downlinks_at_once=1 - at_once,
  )
  lines = []
  with process.service(
    0, tmp_path, rules, say=lines.append,
    silence_s=0.5 if fault in SILENT else 10.0,
  ) as service:
    clients = [process.client(k, service.address, say=str) for k in (0, 2)]
    monkeypatch.setattr(process, "Client", Faulty)
    clients.append(process.client(1, service.address, say=str))
    for client in clients:
      threading.Thread(
        target=until_refused, args=(client,), daemon=True
      ).start()
    service.serve()
  assert service.state.finished == "1 rounds have ended"
  assert service.state.revision == 1
  assert len(service._assemblers) <= 3  # those of ended connections are freed
  reason = fault if fault == "of the future" else "interrupted too often"
  assert dict(service.state.counts) == {reason: 1}
  assert sum(f"refused: {reason}" in line for line in lines) == 1


class Broken(process.Client):
  """Has an unexpected error in the thread of its connection."""

  def _converse(self):
    raise KeyError("a name")


def test_client_ends_after_an_unexpected_error_of_a_thread(monkeypatch):
  monkeypatch.setattr(process, "Client", Broken)
  with pytest.raises(ValueError, match="the connection ended by KeyError: 'a"):
    process.client(0, ("127.0.0.1", 1)).run()


class Failing(process.Trainer):
  def train(self, params, round, stops):
    raise OverflowError("größer")


def test_any_error_of_a_client_is_printed_by_the_server(tmp_path):
  rules = process.rules(clients=1, per_round=1, rounds=1, reconnect_s=0.1)
  lines = []
  with process.service(0, tmp_path, rules, say=lines.append) as service:
    client = process.client(0, service.address, trainer=Failing(0))

    def check():
      if any("it has failed" in line for line in lines):
        raise Down

    with concurrent.futures.ThreadPoolExecutor() as pool:
      ended = pool.submit(client.run)
      with pytest.raises(Down):
        service.serve(check)
      service.close()
      with pytest.raises(OverflowError, match="größer"):
        ended.result(30)
  assert r"gr\\xf6\\xdfer" in lines[-1]


def test_stranger_is_refused(tmp_path):
  with process.service(0, tmp_path, process.rules(), say=print) as service:
    threading.Thread(target=service.serve, daemon=True).start()
    lines = []
    stranger = process.client(0, service.address, alone_s=2.5, say=lines.append)
    stranger._security = Security(b"some other token")
    with pytest.raises(ValueError, match="another token"):
      stranger.run()
    # Printed when the first attempt fails, and not at each of the next ones.
    (line,) = lines
    assert "tries again: federated ended the handshake: it has another" in line
    assert not service.state.members


def free_port():
  with socket.create_server(("127.0.0.1", 0)) as server_socket:
    return server_socket.getsockname()[1]


def spawn(*arguments):
  return subprocess.Popen(
    [sys.executable, "-m", "tests.caatnet.federated.process",
     *map(str, arguments)],
    env=os.environ | {"OMP_NUM_THREADS": "1"},
  )


def test_killed_and_stopped_processes_change_no_bit(tmp_path):
  """Kills the server and a client, and stops another client."""
  rules, port = process.rules(), free_port()

  def start(client):
    return spawn("client", port, client, 0.05)

  def reach(round):
    path, end = tmp_path / "server.npz", time.monotonic() + 30
    while time.monotonic() < end:
      state = snapshot.read(path, rules)
      if state is not None and state.round >= round:
        return
      time.sleep(0.02)
    raise TimeoutError(f"round {round}")

  served, clients = spawn("server", port, tmp_path), [start(k) for k in IDS]
  try:
    reach(1)
    served.kill()
    served.wait()
    served = spawn("server", port, tmp_path)
    clients[0].kill()
    clients[0].wait()
    clients[1].send_signal(signal.SIGSTOP)
    time.sleep(2.5)  # longer than the server's silence_s
    clients[1].send_signal(signal.SIGCONT)
    clients[0] = start(0)
    assert served.wait(60) == 0
    for client in clients:
      assert client.wait(30) == 0
  finally:
    for one in (served, *clients):
      one.kill()
      one.wait()
  np.testing.assert_array_equal(
    snapshot.read(tmp_path / "server.npz", rules).params,
    expected(rules).params,
  )
