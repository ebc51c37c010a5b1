"""Benchmark harness: alternation, scripts of other Pythons, and configs."""

import os
import sys
import time

import pytest

from caatnet.benchmarks.harness import scripts, setup, timing
from configs.benchmark import train_step


def test_runners_alternate_and_warm_up_is_discarded():
  calls = []

  def measure(key):
    calls.append(key)
    return len(calls)

  found = timing.in_turns(
    {key: lambda key=key: measure(key) for key in "abc"}, 2
  )
  assert calls == list("abc") * 3
  assert found == {"a": [4, 7], "b": [5, 8], "c": [6, 9]}
  assert timing.in_turns({0: lambda: measure(0)}, 2, warm_up=0) == {
    0: [10, 11]
  }


def test_runner_is_called_once_before_it_is_timed():
  calls = []
  assert timing.seconds_when_warm(lambda: calls.append(0)) >= 0
  assert len(calls) == 2


def test_times_are_of_a_clock_or_of_a_processor(monkeypatch):
  start = time.perf_counter()
  assert timing.seconds(lambda: time.sleep(0.02)) >= 0.02
  used = time.process_time()
  result, cpu_s = timing.cpu_seconds(lambda: sum(range(10**5)) and 5)
  assert result == 5
  assert 0 < cpu_s <= time.process_time() - used
  assert timing.seconds(lambda: None) < time.perf_counter() - start
  monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 2.5, 3.5))
  assert timing.load_average() == 1.5


def test_ratios_are_taken_within_rounds():
  """A machine that becomes ten times slower changes no ratio."""
  first = [1.0, 1.0, 10.0, 10.0, 10.0]
  found = timing.summary([2 * x for x in first[:3]] + [30.0, 30.0], first)
  assert found == {
    "median_s": 20, "min_s": 2, "max_s": 30, "relative": 2,
  }
  assert "relative" not in timing.summary(first)
  assert timing.range_text([3.0, 1.0, 2.5], ".1f") == "2.5 (1.0 to 3.0)"


def test_error_of_a_script_names_the_key_and_the_last_line():
  def ask(code, program=sys.executable, limit_s=None):
    return scripts.ask_script(
      [program, "-c", code], {"n": 2}, limit_s=limit_s
    )

  assert ask(
    "import json; print('noise'); print(json.loads(input())['n'] + 1)"
  ) == 3
  with pytest.raises(ValueError, match=r"\.python_path=.*: KeyError: 'x'"):
    ask("raise KeyError('x')")
  with pytest.raises(ValueError, match=r"path=.* ended with code 3"):
    ask("raise SystemExit(3)")
  with pytest.raises(ValueError, match=r"path='/no/python' cannot be run"):
    ask("", "/no/python")
  with pytest.raises(ValueError, match=r"path=.* end within its time limit of"):
    ask("import time; time.sleep(60)", limit_s=0.2)
  for text in ("", "print('x')"):
    with pytest.raises(ValueError, match=r"last line that .*path=.* must be"):
      ask(text)


def test_shared_keeps_order_and_alone_uses_another_process():
  assert list(scripts.map_in_processes(abs, [-3, 2, -1], 2)) == [3, 2, 1]
  assert scripts.call_in_process(os.getpid) != os.getpid()


def test_config_without_benchmark_is_a_copy():
  config = train_step.get_config("test")
  assert "benchmark" not in setup.without_benchmark(config)
  assert config.benchmark.name == "train_step"
  batch = setup.token_batch(config)
  assert batch.shape == (config.data.batch_size, config.data.seq_len + 1)


def test_progress_bar_leaves_nothing_behind(capsys):
  assert list(timing.progress(iter("ab"), "letters", 2)) == ["a", "b"]
  printed = capsys.readouterr()
  assert (printed.out, printed.err.strip()) == ("", "")
