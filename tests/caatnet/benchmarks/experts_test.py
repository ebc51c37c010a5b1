"""Benchmark of experts: requests, latencies and memory limits."""

import subprocess
import sys
import types

import numpy as np
import pytest

from caatnet.benchmarks.harness import memory_limits
from caatnet.benchmarks.serving import experts
from caatnet.serving.experts import Library
from caatnet.serving.server.client import Outcome
from configs.benchmark import experts as config_of


@pytest.fixture
def library(tmp_path):
  made = Library.create(tmp_path / "experts")
  for number in range(5):
    name = f"e{number}"
    made.add(name, {"w": np.full(3, number, np.float32)}, kind=name)
  return made


def test_streams_have_their_orders_and_rate(library):
  config = config_of.get_config("test")
  config.benchmark.seconds = 100.0
  words = experts._vocabularies(5, 0)
  given = config, library, experts._router(library, words), words
  for kind in ("zipf", "uniform", "bursty", "cyclic"):
    found = experts._questions(*given, kind)
    assert len(found) == 800
    assert 80 < found[-1].time_s < 120
    assert {q.body["max_tokens"] for q in found} == {5}
    assert all(len(q.body["prompt"]) == 9 for q in found)
    again = experts._questions(*given, kind)
    assert [q.body for q in again] == [q.body for q in found]
  # One expert more than there are slots, in turn.
  names = [q.body["model"] for q in found]
  assert names == [f"e{i % 3}" for i in range(800)]


def test_router_finds_the_vocabulary_of_a_prompt():
  """For as many experts as the benchmark has, and prompts as long."""
  config = config_of.get_config().benchmark
  words = experts._vocabularies(config.number, config.seed)
  names = tuple(f"e{i}" for i in range(config.number))
  router = experts._router(types.SimpleNamespace(names=names), words)
  rng = np.random.default_rng(1)
  for number in range(config.number):
    drawn = b" ".join(rng.choice(words[number], config.prompt))
    assert router.kind(drawn[: config.prompt]) == names[number]


def test_library_whose_experts_have_no_kinds_is_refused(library):
  experts._check_kinds(library)
  library.add("e5", {"w": np.zeros(3, np.float32)})
  with pytest.raises(ValueError, match=r"'e5' has the kind ''.*delete"):
    experts._check_kinds(library)


def test_latencies_count_from_the_time_of_sending():
  good = [Outcome(1.0, [1.5, 2.0], 2), Outcome(3.0, [3.25, 4.0], 2)]
  found = experts._summary([*good, Outcome(0.0, error="500: x")])
  assert found["requests"] == 3
  assert found["errors"] == ["500: x"]
  assert found["ttft_p50_s"] == 0.375
  assert found["latency_p50_s"] == 1.0


def test_processes_of_a_group_have_a_memory_limit():
  with memory_limits.limited(0) as none:
    assert none.limit_bytes == 0
  with memory_limits.limited(64 << 20) as group:
    if not group.limit_bytes:
      pytest.skip("needs root and cgroups of version 1")
    assert group.limit_bytes == 64 << 20
    for size, killed in ((16 << 20, False), (256 << 20, True)):
      with subprocess.Popen(
        [sys.executable, "-c", f"input(); bytearray(b'x' * {size})"],
        stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
      ) as process:
        group.add(process.pid)
        process.communicate(b"\n")
      assert (process.returncode == -9) == killed
    assert 16 << 20 < group.peak_bytes() <= 64 << 20


def test_linked_expert_is_a_library(library, tmp_path):
  (library.path / "config.json").write_text("{}")
  experts._link(library, "e3", tmp_path / "one")
  one = Library(tmp_path / "one")
  assert one.names == ("e3",)
  assert one.read("e3").load()["w"].tolist() == [3, 3, 3]


@pytest.mark.parametrize("key", ["streams", "evictions"])
def test_benchmark_of_nothing_is_refused(key):
  config = config_of.get_config("test")
  config.benchmark[key] = ()
  with pytest.raises(ValueError, match=rf"{key}=\(\) must have one or more"):
    experts.run(config)


def test_stream_has_a_largest_number_of_requests():
  config = config_of.get_config("test")
  config.benchmark.rate = 1e30
  with pytest.raises(ValueError, match=r"^config\.benchmark\.rate=1e\+30 for"):
    experts.run(config)


@pytest.mark.parametrize("key", ["prompt", "tokens"])
def test_request_that_exceeds_the_context_is_refused(key):
  config = config_of.get_config("test")
  config.benchmark[key] = config.inference.context
  with pytest.raises(ValueError, match=r"exceed config\.inference\.context="):
    experts.run(config)
