"""Graceful stop by signals: a run finishes its step and saves."""

from collections.abc import Iterator
import contextlib
import os
import signal

import jax
from jax.experimental import multihost_utils

from caatnet import interrupts


class Stop:
  """Stop request of any process of the run.

  Attributes:
    signalled: Whether this process has received a signal.
    exit_code: Exit code after the signal by shell convention, 128 + its number;
      0 without a signal.
    asked: Number of times that this process asked the others whether to stop.
  """

  def __init__(self) -> None:
    self.signalled, self.exit_code = False, 0
    self.asked = 0

  def requested(self) -> bool:
    """Returns whether to stop, with the same result per step on all processes.

    Processes that stopped at different steps would deadlock in a collective.
    They agree on a step through jax's coordination service, without devices,
    which delays the stop by a few steps.
    """
    if jax.process_count() == 1:
      return self.signalled
    self.asked += 1
    return multihost_utils.reached_preemption_sync_point(self.asked)


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
  """Context manager in which SIGTERM or SIGINT requests a graceful stop.

  A second signal kills the process.
  """
  stop = Stop()

  def on_signal(number, frame):
    # The default handler is restored, so that a second signal kills. This
    # leaves no time to restore the terminal.
    interrupts.show_cursor()
    stop.signalled, stop.exit_code = True, 128 + number
    signal.signal(number, signal.SIG_DFL)
    if several:
      os.kill(os.getpid(), signal.SIGTERM)

  # With several processes, jax installs its own handler of SIGTERM.
  several = jax.process_count() > 1
  numbers = [signal.SIGINT] + [signal.SIGTERM] * (not several)
  try:
    previous = {number: signal.signal(number, on_signal) for number in numbers}
  except ValueError:  # not the main thread, for example in a notebook
    previous = {}
  try:
    yield stop
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)
