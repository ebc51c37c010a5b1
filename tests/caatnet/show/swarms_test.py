"""State of a swarm as shown on a terminal and in a file."""

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

import numpy as np
import pytest
from rich.console import Console

from caatnet.show.swarms import Screen
from parallel.elastic.membership.journal import Journal
from parallel.elastic.membership.service import Service
from parallel.elastic.swarm import Swarm
from tests.parallel.elastic.worlds import SECURITY


def _step(exchange, state, part):
  return {"x": state["x"] + exchange.mean(part)}


@pytest.fixture
def there(tmp_path):
  with Service(
    ("127.0.0.1", 0), SECURITY, Journal(tmp_path / "journal"),
    say=lambda line: None,
  ) as there:
    threading.Thread(target=there.serve, daemon=True).start()
    yield there


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


def _coordinator(folder, port, **streams):
  return subprocess.Popen(
    [sys.executable, "-m", "launch.coordinator", f"--port={port}",
     "--host=127.0.0.1", f"--journal={folder}/journal"],
    env={**os.environ, "ELASTIC_TOKEN": SECURITY.token.decode(),
         "TERM": "xterm", "COLUMNS": "150", "LINES": "40"}, **streams,
  )


@pytest.mark.parametrize("terminal", [True, False])
def test_coordinator_shows_a_table_on_a_terminal_and_lines_elsewhere(
  tmp_path, terminal
):
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  reading, writing = pty.openpty() if terminal else os.pipe()
  process = _coordinator(tmp_path, port, stdout=writing)
  os.close(writing)
  said, wanted = b"", (
    [b"waits for 1 more peer", b"peer", b"is at"] if terminal
    else [b"coordinator at", b"waits for 1 more peer"]
  )
  while not all(text in said for text in wanted):
    said += os.read(reading, 4096)
  process.send_signal(signal.SIGTERM)
  while True:
    try:
      more = os.read(reading, 4096)
    except OSError:  # the terminal is closed
      break
    if not more:
      break
    said += more
  os.close(reading)
  assert process.wait(10) == 0
  assert (b"\x1b[" in said) == terminal
  assert b"Traceback" not in said
