"""State of a swarm as shown on a terminal and in a file."""

import contextlib
import io
import math
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
from rich.console import Console

from caatnet.show import swarms
from caatnet.show.swarms import Screen
from parallel.peers.membership import messages as m
from parallel.peers.membership.coordinator import CoordinatorState, Phase
from parallel.peers.membership.journal import Journal
from parallel.peers.membership.service import CoordinatorService
from parallel.peers.swarm import Swarm
from tests.caatnet.show import terminal
from tests.parallel.peers.worlds import SECURITY


def _step(exchange, state, part):
  return {"x": state["x"] + exchange.mean(part)}


@pytest.fixture
def known(tmp_path):
  """Service that does not serve, so that a test can set its state."""
  with CoordinatorService(
    ("127.0.0.1", 0), SECURITY, Journal(tmp_path / "journal"),
    say=lambda line: None,
  ) as made:
    yield made


@pytest.fixture
def there(known):
  threading.Thread(target=known.serve, daemon=True).start()
  return known


def _seen(screen, there):
  console = Console(file=io.StringIO(), width=150)
  console.print(screen.view(there))
  return console.file.getvalue()


def test_peers_are_shown_with_state_and_loss(there):
  screen = Screen()
  assert "waits for 1 more peer" in _seen(screen, there)
  start = {"x": np.zeros(30, np.float32)}
  with Swarm(there.address, SECURITY, start) as swarm:
    for loss in (2.5, math.nan, 0.125):
      swarm.give(np.ones(30, np.float32), _step, loss=loss)
    end = time.monotonic() + 10
    while "loss 0.1250" not in (text := _seen(screen, there)):
      assert time.monotonic() < end, text
      time.sleep(0.01)
    assert re.search(r"epoch 1, round 3, .* 1 members, .* sent", text)
    rows = [line.split() for line in text.splitlines()]
    (row,) = [row for row in rows if row[:1] == [swarm.me]]
    assert (row[1], row[-1]) == ("computes", "0.1250")
  end = time.monotonic() + 10
  while "waits for a peer that has revision 3" not in _seen(screen, there):
    assert time.monotonic() < end
    time.sleep(0.01)
  assert re.search(rf"{swarm.me} +is waited for", _seen(screen, there))


def _at(monkeypatch, now_s):
  """Sets the clock of the view."""
  clock = types.SimpleNamespace(monotonic=lambda: now_s)
  monkeypatch.setattr(swarms, "time", clock)


def _view(screen, there):
  """Returns the parts of the first line, and the rows of peers by id."""
  head, *rest = filter(str.strip, _seen(screen, there).splitlines())
  rows = [re.split(r"  +", line.strip()) for line in rest]
  return head.strip().split(", "), {row[0]: row[1:] for row in rows}


def _running(epoch, revision, *members):
  record = m.Record(epoch, members, revision)
  return CoordinatorState(record, Phase.OPEN, ready=frozenset(members[:1]))


def test_each_peer_has_a_row_with_its_last_report(known):
  known.state = _running(3, 12_345, "a", "b", "c")
  known._reports |= {
    "a": m.Report(12_344, 999, 1.5), "b": m.Report(7, 1_234_567, None)
  }
  known._channels["c"] = types.SimpleNamespace(
    last_received=time.monotonic() - 1000.04
  )
  head, rows = _view(Screen(), known)
  assert head == ["epoch 3", "round 12,345", "0 a minute", "3 members",
                  "1 MB sent", "loss 1.5000"]
  silent = rows["c"].pop(1)
  assert 1000 <= float(silent) < 2000
  assert rows == {
    "peer": ["is at", "heard, s ago", "round", "sent", "loss"],
    "a": ["is ready", "no connection", "12,344", "999 B", "1.5000"],
    "b": ["computes", "no connection", "7", "1 MB", "-"],
    "c": ["computes", "-", "-", "-"],
    **{key: row for key, row in rows.items() if key.startswith("waits for")},
  }
  known._reports["c"] = m.Report(9, 10**9, 0.25)
  head, _ = _view(Screen(), known)
  assert head[4:] == ["1 GB sent", "loss 0.8750"]
  known._reports.clear()
  head, _ = _view(Screen(), known)
  assert head[4:] == ["0 B sent"]
  # A peer that has not joined yet has a row, and is no member.
  known.state = known.state._replace(pending=(("d", 0),))
  head, rows = _view(Screen(), known)
  assert head[3] == "3 members"
  assert {*"abcd"} <= set(rows)


def test_rate_is_that_of_the_last_minute(known, monkeypatch):
  """Counts rounds since the first view in it, over one second at least."""
  screen = Screen()
  for now_s, revision, rate in (
    (1000.0, 10, 0), (1000.5, 11, 60), (1010.0, 30, 120), (1030.0, 40, 60),
    (1059.9, 40, 30), (1060.0, 40, 29 / 59.5 * 60),
    (1069.9, 70, 40 / 59.9 * 60), (1200.0, 90, 0),
  ):
    known.state = _running(1, revision, "a")
    _at(monkeypatch, now_s)
    head, _ = _view(screen, known)
    assert head[1:3] == [f"round {revision}", f"{rate:.0f} a minute"]


@pytest.mark.parametrize(("count", "text"), [
  (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"),
  (10**6, "1 MB"), (2_600_000, "3 MB"), (10**9, "1 GB"), (10**12, "1.0 TB"),
  (1_234_560_000_000_000, "1,234.6 TB"),
])
def test_bytes_have_decimal_units(count, text):
  assert swarms._format_bytes(count) == text


def test_screen_on_a_terminal_is_live(known, monkeypatch):
  """The table is drawn below the lines, and once more at the end."""
  known.state = _running(3, 7, "peer-a")
  out = terminal.attach(monkeypatch, "stdout")
  with Screen() as screen:
    screen.say("[bold]1 line[/bold]")
    assert out.getvalue() == "[bold]1 line[/bold]\n"
    screen.follow(known)
    host, port = known.address
    assert f"coordinator at {host}:{port}\n" in out.text
    screen.say("[bold]2 lines[/bold]")
    assert "[bold]2 lines[/bold]\n" in out.getvalue()  # no colours
    assert "peer-a" in out.text
    known.state = _running(4, 7, "peer-b")
  assert "peer-b" in out.text.rpartition("epoch 4")[2]
  assert out.getvalue().endswith("\x1b[?25h")  # the cursor is back
  size = len(out.getvalue())
  screen.say("3")
  assert "epoch" not in out.text[size:]


def test_screen_without_a_terminal_is_a_log(known, capsys):
  with Screen() as screen:
    screen.say("[bold]1[/bold]")
    screen.follow(known)
    screen.say("[bold]2[/bold] " * 20)  # is not wrapped
  host, port = known.address
  assert capsys.readouterr().out == (
    f"[bold]1[/bold]\ncoordinator at {host}:{port}\n"
    + "[bold]2[/bold] " * 20 + "\n"
  )


def test_each_line_of_a_log_is_visible_at_once(monkeypatch):
  raw = io.BytesIO()
  monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw))
  Screen().say("1")
  assert raw.getvalue() == b"1\n"


def test_coordinator_shows_a_table_on_a_terminal_until_it_is_stopped(tmp_path):
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  reading, writing = pty.openpty()
  process = subprocess.Popen(
    [sys.executable, "-m", "launch.coordinator", f"--port={port}",
     "--host=127.0.0.1", f"--journal={tmp_path}/journal"],
    env={**os.environ, "ELASTIC_TOKEN": SECURITY.token.decode(),
         "TERM": "xterm", "COLUMNS": "150", "LINES": "40"}, stdout=writing,
  )
  os.close(writing)
  said = b""
  while not all(x in said for x in (b"waits for 1 more peer", b"is at")):
    said += os.read(reading, 4096)
  process.send_signal(signal.SIGTERM)
  with contextlib.suppress(OSError):  # the terminal is closed
    while more := os.read(reading, 4096):
      said += more
  os.close(reading)
  assert process.wait(10) == 0
  assert b"\x1b[" in said
  assert b"Traceback" not in said
