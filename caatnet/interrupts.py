"""Handling of SIGINT (Ctrl-C) and SIGTERM: one line, exit code 128 + signal.

At Ctrl-C, Python raises ``KeyboardInterrupt`` wherever the main thread is. In a
callback, such as jax's at each garbage collection, the exception is discarded.
While XLA compiles a program, the exception is delayed, and XLA may crash when
the interpreter then exits. Here a signal ends the process directly. Only within
`interruptible` does it raise ``KeyboardInterrupt``, so that context managers
end child processes and remove temporary files; at a second signal, or after
`GRACE_S` seconds, the process ends without this cleanup. A run that saves its
state (`caatnet.train.stop`) and a server install their own handlers.
"""

from collections.abc import Iterator
import contextlib
import os
import select
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn

# Maximum seconds from a signal to the end of the process, for the cleanup.
GRACE_S = 3.0
# Seconds that a handler has to end the process at a second signal.
_SECOND_SIGNAL_S = 0.2
# Seconds until an exception that a callback has discarded is raised again.
_RERAISE_DELAY_S = 0.01
# Seconds for the last output to be written.
_FLUSH_S = 1.0

_EXIT_MESSAGES = {
  signal.SIGINT: b"interrupted\n", signal.SIGTERM: b"terminated\n"
}

_raises_on_signal = False  # whether a signal raises KeyboardInterrupt
_received = 0  # first signal that `_on_signal` has handled; 0 before


def install() -> None:
  """Installs `_on_signal` for both signals, unless the process ignores them."""
  for number in _EXIT_MESSAGES:
    if signal.getsignal(number) != signal.SIG_IGN:
      signal.signal(number, _on_signal)


def ignore() -> None:
  """Ignores both signals: called after the work, before the process exits."""
  for number in _EXIT_MESSAGES:
    signal.signal(number, signal.SIG_IGN)


def install_with_watchdog() -> None:
  """Installs the handlers, and a thread that ends the process if they are late.

  They are late during long calls of compiled libraries, since Python runs a
  handler in the main thread after such a call has returned.
  """
  install()
  outlet, inlet = os.pipe()
  os.set_blocking(inlet, False)
  signal.set_wakeup_fd(inlet, warn_on_full_buffer=False)
  # A forked process has no such thread, and must not write to this pipe.
  os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
  signal.signal(signal.SIGALRM, _raise_again)
  sys.unraisablehook = _on_discarded
  threading.Thread(target=_run_watchdog, args=(outlet,), daemon=True).start()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
  """Context manager in which the first signal raises ``KeyboardInterrupt``.

  After a signal the context always ends with ``KeyboardInterrupt``, even if its
  body ends normally or raises another error.
  """
  global _raises_on_signal
  _raises_on_signal = True
  try:
    yield
  except BaseException as error:
    # Libraries replace KeyboardInterrupt by errors of their own.
    if _received and not isinstance(error, KeyboardInterrupt):
      raise KeyboardInterrupt from error
    raise
  finally:
    _raises_on_signal = False
  if _received:
    raise KeyboardInterrupt


def end_process(number: int = 0) -> NoReturn:
  """Ends the process with one line on stderr, and without cleaning up.

  Args:
    number: The signal; 0 for the one that was received.
  """
  number = number or _received or signal.SIGINT
  try:
    show_cursor()
    os.write(2, _EXIT_MESSAGES[number])
    # The module may be in the middle of its import.
    module = sys.modules.get("multiprocessing")
    for child in getattr(module, "active_children", list)():
      child.terminate()
    # In a thread: a write to a full pipe without a reader would never return.
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(_FLUSH_S)
  finally:
    os._exit(128 + number)


def show_cursor() -> None:
  """Shows the terminal's cursor, which progress bars hide."""
  for stream in (1, 2):
    if os.isatty(stream):
      os.write(stream, b"\x1b[?25h")


def _flush() -> None:
  with contextlib.suppress(OSError, ValueError):
    sys.stdout.flush()


def _on_signal(number: int, frame: FrameType | None) -> None:
  global _received
  if _received or not _raises_on_signal:
    end_process(number)
  _received = number
  raise KeyboardInterrupt


def _raise_again(number: int, frame: FrameType | None) -> None:
  if _raises_on_signal:
    raise KeyboardInterrupt


def _on_discarded(discarded: Any) -> None:
  """Raises a ``KeyboardInterrupt`` again that Python has discarded."""
  if not _received:
    sys.__unraisablehook__(discarded)
  elif discarded.exc_type is KeyboardInterrupt:
    signal.setitimer(signal.ITIMER_REAL, _RERAISE_DELAY_S)


def _run_watchdog(outlet: int) -> None:
  """Ends the process after a signal if the main thread takes too long.

  The limits are `GRACE_S` after the first and 0.2 s after the second signal.
  ``outlet`` is a pipe from which the numbers of received signals are read.
  """
  number, count, limit = 0, 0, None
  while True:
    left = None if limit is None else max(0.0, limit - time.monotonic())
    if not select.select([outlet], [], [], left)[0]:
      end_process(number)
    arrived = os.read(outlet, 1)[0]
    if arrived in _EXIT_MESSAGES:
      number, count = arrived, count + 1
      if count > 1:  # independent of the handler
        limit = time.monotonic() + _SECOND_SIGNAL_S
      elif signal.getsignal(number) == _on_signal:
        limit = time.monotonic() + GRACE_S
