"""Signals that stop a run."""

import signal
import threading

import pytest

from caatnet.train.stop import stop_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_requests_a_stop_and_the_second_ends(number):
  before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
  with stop_signals() as stop:
    assert (stop.requested(), stop.exit_code) == (False, 0)
    signal.raise_signal(number)
    assert (stop.requested(), stop.exit_code) == (True, 128 + number)
    assert signal.getsignal(number) == signal.SIG_DFL
  assert {n: signal.getsignal(n) for n in before} == before


def test_signals_are_left_alone_outside_of_the_main_thread():
  found = []

  def run():
    with stop_signals() as stop:
      found.append(stop.requested())

  before = signal.getsignal(signal.SIGINT)
  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  assert found == [False]
  assert signal.getsignal(signal.SIGINT) == before
