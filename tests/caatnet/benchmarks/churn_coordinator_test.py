"""Coordinator of a swarm with faults: its phases and its output by time."""

import time

import pytest

from caatnet.benchmarks.elastic import churn_coordinator
from parallel.peers.membership.coordinator import Phase


@pytest.fixture
def coordinator(tmp_path):
  made = churn_coordinator.Coordinator(tmp_path, {}, 1.0)
  yield made
  made.end()


def test_phase_is_that_of_the_last_entry_before_a_time(coordinator):
  coordinator._phases += [(10.0, Phase.FORMING), (20.0, Phase.OPEN)]
  found = [coordinator.phase(t) for t in (-1, 9, 10, 11, 20, 20.5)]
  assert found == [
    Phase.ASSEMBLING, Phase.ASSEMBLING, Phase.ASSEMBLING, Phase.FORMING,
    Phase.FORMING, Phase.OPEN,
  ]
  assert coordinator.phase() == Phase.OPEN


def test_output_between_two_times_has_a_margin_of_a_second(coordinator):
  noon = time.mktime((2026, 11, 28, 12, 0, 0, 0, 0, -1))
  coordinator.output.write_text("".join(
    f"12:00:{second:02} {second}{'x' * 300}\n" for second in range(10)
  ))
  found = coordinator.lines(noon + 3, noon + 5)
  assert [line[:10] for line in found] == [
    f"12:00:{second:02} {second}" for second in range(2, 7)
  ]
  assert {len(line) for line in found} == {201}  # with their ends


def test_entries_are_read_as_they_are_written_and_partial_ones_are_not(
  coordinator, tmp_path
):
  """The coordinator's thread does not follow the file of this test."""
  log, times = tmp_path / "other.jsonl", []
  coordinator._log = log
  with log.open("a") as file:
    file.write('{"time": 1.5}\n\nno JSON\n{"time": ')
  entries = coordinator._entries(times)
  assert next(entries) == {"time": 1.5}
  with log.open("a") as file:
    file.write("2.5}\n")
  assert next(entries) == {"time": 2.5}
  assert times == [1.5, 2.5]
  coordinator._ended.set()
  assert list(entries) == []
