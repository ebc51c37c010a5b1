"""Signals end a command at every moment, with one line and 128 + signal."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# In short intervals: a signal just before a call of `sleep` does not end it.
PAUSE = "for _ in range(9000): time.sleep(0.01)\n"
WAIT = f"import time\nprint('here', flush=True)\n{PAUSE}"
SCRIPT = f"""
import gc, hashlib, signal, time
from caatnet import interrupts
interrupts.GRACE_S = 0.2

def pause():
  {PAUSE}
def wait():
  print("here", flush=True)
  pause()

def wait_in_callback():
  def callback(*_):
    gc.callbacks.clear()
    wait()
  gc.callbacks.append(callback)
  gc.collect()
  pause()

def discard():
  try:
    wait()
  except KeyboardInterrupt:
    pass

def replace():
  try:
    wait()
  except KeyboardInterrupt:
    raise RuntimeError

def wait_twice():
  try:
    wait()
  finally:
    wait()

def wait_in_library():  # handlers are executed only before it
  print("here", flush=True)
  hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

def stop_never():
  def stop(number, _):
    signal.signal(number, lambda *_: None)
    print("here", flush=True)
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, stop)
  wait()

interrupts.install_with_watchdog()
try:
  with interrupts.interruptible():
    BODY()
except KeyboardInterrupt:
  print("cleaned up")
  interrupts.end_process()
"""
LINES = {signal.SIGINT: "interrupted\n", signal.SIGTERM: "terminated\n"}


@pytest.fixture(autouse=True)
def _interrupts_are_not_ignored():
  """Processes inherit this from a shell that runs tests in the background."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


def ended(command, number, folder=ROOT, num_signals=1):
  """Sends a signal at each line "here"; returns code, stdout and stderr."""
  with subprocess.Popen(
    [sys.executable, *command], text=True, cwd=ROOT,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    env=os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"},
  ) as process:
    for _ in range(num_signals):
      assert process.stdout.readline() == "here\n"
      process.send_signal(number)
    out, error = process.communicate(timeout=60)
  return process.returncode, out, error


@pytest.mark.parametrize("number", LINES)
@pytest.mark.parametrize(("body", "outs", "num_signals"), [
  ("wait", ["cleaned up\n"], 1),
  ("wait_in_callback", ["cleaned up\n"], 1),
  ("discard", ["cleaned up\n"], 1),
  ("replace", ["cleaned up\n"], 1),
  ("wait_twice", [""], 2),
  ("wait_in_library", ["", "cleaned up\n"], 1),
  ("stop_never", [""], 2),  # a second signal, of any handler
])
def test_signal_ends_a_script(number, body, outs, num_signals):
  code, out, error = ended(
    ["-c", SCRIPT.replace("BODY", body)], number, num_signals=num_signals
  )
  assert (code, error) == (128 + number, LINES[number])
  assert out in outs


@pytest.mark.parametrize(("command", "number"), [
  ("launch.train", signal.SIGTERM), ("launch.compile", signal.SIGINT),
  ("caatnet coordinator", signal.SIGTERM),
])
def test_signal_ends_imports(command, number, tmp_path):
  (tmp_path / "absl.py").write_text(WAIT)  # an import that takes long
  assert ended(["-m", *command.split()], number, tmp_path) == (
    128 + number, "", LINES[number]
  )


def test_signal_ends_a_command_that_reads_its_config(tmp_path):
  (tmp_path / "slow.py").write_text(WAIT)
  command = ["-m", "launch.simulate", f"--config={tmp_path / 'slow.py'}"]
  assert ended(command, signal.SIGINT) == (130, "", "interrupted\n")


def test_ignored_signal_stays_ignored():
  script = (
    "signal.signal(2, signal.SIG_IGN)\ninterrupts.install_with_watchdog()\n"
  )
  ended = subprocess.run(
    [sys.executable, "-c", "import signal; from caatnet import interrupts\n"
     f"{script}signal.raise_signal(2)"], cwd=ROOT, check=False,
  )
  assert ended.returncode == 0
