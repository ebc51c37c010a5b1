"""Signals that stop a run: it finishes its step and saves."""

from collections.abc import Iterator
import contextlib
import os
import signal

import jax
from jax.experimental import multihost_utils


class Stop:
  """Knows whether a signal asked any process to stop.

  Attributes:
    signalled: Whether one came to this process.
    exit_code: What shells expect of a process that it has ended; 0 if none
      came.
    asked: How often processes have asked each other.
  """

  def __init__(self) -> None:
    self.signalled, self.exit_code = False, 0
    self.asked = 0

  def requested(self) -> bool:
    """Returns whether to stop, in the same step on all processes.

    Processes that stopped at different steps would wait for each other in a
    collective. They agree through jax's coordination service, beside the
    devices; a stop is a few steps late.
    """
    if jax.process_count() == 1:
      return self.signalled
    self.asked += 1
    return multihost_utils.reached_preemption_sync_point(self.asked)


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
  """Lets SIGTERM and Ctrl-C finish the step and save; a second one kills."""
  stop = Stop()

  def on_signal(number, frame):
    # The default handler from now on: a second signal kills.
    stop.signalled, stop.exit_code = True, 128 + number
    signal.signal(number, signal.SIG_DFL)
    if several:
      os.kill(os.getpid(), signal.SIGTERM)

  # With several processes it is jax that waits for SIGTERM.
  several = jax.process_count() > 1
  numbers = [signal.SIGINT] + [signal.SIGTERM] * (not several)
  try:
    previous = {number: signal.signal(number, on_signal) for number in numbers}
  except ValueError:  # not the main thread, e.g. in a notebook's kernel
    previous = {}
  try:
    yield stop
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)
