"""Benchmark harness: alternation, processes, namespaces and configs."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from caatnet.benchmarks.harness import namespaces, processes, setup, timing
from configs.benchmark import train_step
from tests.caatnet.benchmarks import unavailable

ROOT = pathlib.Path(__file__).parents[3]


class Echo:
  """Peer that returns its name, or exits."""

  def __init__(self, me):
    print("a library prints something", flush=True)
    self._me = me

  def name(self):
    print("and again")
    return self._me, os.getpid()

  def compute(self, seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
      pass

  def leave(self, who):
    if who == self._me:
      os._exit(7)


KIND = f"{Echo.__module__}:Echo"
if "." not in Echo.__module__:  # pytest may import this file without packages
  KIND = "tests.caatnet.benchmarks.harness_test:Echo"


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
  assert timing.seconds_after_one(lambda: calls.append(0)) >= 0
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
  assert timing.load() == 1.5


def test_ratios_are_taken_within_rounds():
  """A machine that becomes ten times slower changes no ratio."""
  first = [1.0, 1.0, 10.0, 10.0, 10.0]
  found = timing.summary([2 * x for x in first[:3]] + [30.0, 30.0], first)
  assert found == {
    "median_s": 20, "min_s": 2, "max_s": 30, "relative": 2,
  }
  assert "relative" not in timing.summary(first)
  assert timing.range_text([3.0, 1.0, 2.5], ".1f") == "2.5 (1.0 to 3.0)"


def _alive(pid):
  try:
    state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1]
  except FileNotFoundError:
    return False
  return state.split()[0] != "Z"


def _gone(pids, within_s=20):
  end = time.monotonic() + within_s
  while any(map(_alive, pids)) and time.monotonic() < end:
    time.sleep(0.01)
  return not any(map(_alive, pids))


def test_peers_answer_in_order_despite_their_output(capfd):
  """Output of libraries is this process' stderr, unless it is discarded."""
  with processes.Peers(KIND, [("x",), ("y",), ("z",)]) as peers:
    done = peers.do("name")
    start = time.monotonic()
    work = peers.do("compute", lambda i: {"seconds": 0.01 * (i + 1)})
    passed = time.monotonic() - start
  assert capfd.readouterr().err.count("a library prints something\n") == 3
  assert [name for name, _ in done.found] == ["x", "y", "z"]
  assert 0.03 <= work.seconds <= passed
  assert 0.06 <= work.cpu_s <= 3 * passed
  assert all(p.popen.returncode is not None for p in peers.processes)


def test_all_peers_are_ended_when_one_dies():
  with (
    pytest.raises(RuntimeError, match=r"peer 1 has .* code 7 at 'leave'"),
    processes.Peers(KIND, [("x",), ("y",)]) as peers,
  ):
    peers.do("leave", lambda _: {"who": "y"})
  assert all(p.popen.returncode is not None for p in peers.processes)


def test_no_peer_is_left_when_another_cannot_start(monkeypatch):
  started = []
  start = processes.Process.__init__

  def noted(self, *args, **options):
    start(self, *args, **options)
    started.append(self.popen.pid)

  monkeypatch.setattr(processes.Process, "__init__", noted)
  with pytest.raises(FileNotFoundError):
    processes.Peers(KIND, [("x",), ("y",)], [[], ["/no/such/program"]])
  assert len(started) == 1
  assert not _alive(started[0])


@pytest.mark.parametrize(("how", "send"), [
  (signal.SIGINT, os.kill), (signal.SIGINT, os.killpg),  # as a terminal
  (signal.SIGKILL, os.kill),
])
def test_peers_end_with_an_interrupted_or_killed_parent(how, send):
  script = (
    "import signal\n"
    "from caatnet.benchmarks.harness import processes\n"
    # Background jobs of a shell script inherit that SIGINT is ignored.
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    f"with processes.Peers({KIND!r}, [('x',), ('y',)]) as peers:\n"
    "  print(*(p for _, p in peers.do('name').found), flush=True)\n"
    "  peers.processes[0].answer()\n"  # waits for ever
  )
  with subprocess.Popen(
    [sys.executable, "-c", script], cwd=ROOT, text=True,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
  ) as parent:
    pids = parent.stdout.readline().split()
    assert len(pids) == 2
    assert all(map(_alive, pids))
    send(parent.pid, how)
    errors = parent.stderr.read()
  assert _gone(pids)
  # Of the parent, but not of the peers.
  assert errors.count("Traceback") == (how == signal.SIGINT), errors


@pytest.mark.filterwarnings("error")  # from threads
def test_lines_are_handed_over_until_the_process_is_killed(capfd):
  """Drops an incomplete last line."""
  code = (
    "import sys; print('an error', file=sys.stderr, flush=True)\n"
    "print('{\"a\": 1}'); print('{\"b\"', end='', flush=True); input()"
  )
  found = []
  with processes.Process(
    [sys.executable, "-uc", code], on_line=found.append
  ) as process:
    while not found:
      time.sleep(0.01)
  assert found == [{"a": 1}]
  assert process.killed
  assert "an error\n" in capfd.readouterr().err


def test_error_of_a_script_names_the_key_and_the_last_line():
  def ask(code, program=sys.executable, limit_s=None):
    return processes.ask_script(
      [program, "-c", code], {"n": 2}, limit_s=limit_s
    )

  assert ask(
    "import json; print('noise'); print(json.loads(input())['n'] + 1)"
  ) == 3
  with pytest.raises(ValueError, match=r"benchmark\.python=.*: KeyError: 'x'"):
    ask("raise KeyError('x')")
  with pytest.raises(ValueError, match=r"python=.* ended with code 3"):
    ask("raise SystemExit(3)")
  with pytest.raises(ValueError, match=r"python='/no/python' cannot be run"):
    ask("", "/no/python")
  with pytest.raises(ValueError, match=r"python=.* end within 0\.2 seconds$"):
    ask("import time; time.sleep(60)", limit_s=0.2)
  for text in ("", "print('x')"):
    with pytest.raises(ValueError, match=r"python=.* line is not JSON: 'x?'$"):
      ask(text)


def test_shared_keeps_order_and_alone_uses_another_process():
  assert list(processes.shared(abs, [-3, 2, -1], 2)) == [3, 2, 1]
  assert processes.alone(os.getpid) != os.getpid()


def _namespaces():
  listed = subprocess.run(
    ["ip", "netns", "list"], capture_output=True, text=True, check=True
  ).stdout
  return re.findall(r"shaped\d+n\d+", listed)


@pytest.fixture
def root():
  """Skips the test if this user cannot shape links."""
  try:
    with namespaces.shaped(np.full((2, 2), 1e6)):
      pass
  except ValueError as error:
    unavailable.skip(error)


def _own():
  return [n for n in _namespaces() if n.startswith(f"shaped{os.getpid()}n")]


def _meet_and_fail(make):
  with make() as (hosts, prefixes):
    assert len(_own()) >= len(hosts)
    with processes.Peers(
      "caatnet.benchmarks.planner.link_peer:Peer",
      list(enumerate(hosts)), prefixes,
    ) as peers:
      addresses = peers.do("address").found
      assert [host for host, _ in addresses] == list(hosts)
      members = {str(i): address for i, address in enumerate(addresses)}
      peers.do("measure", lambda _: {"members": members, "sizes": [1, 2]})
    raise ZeroDivisionError


@pytest.mark.parametrize("make", [
  lambda: namespaces.shaped(np.full((3, 3), 1e7)),
  lambda: namespaces.long_link(100, 0), lambda: namespaces.long_link(100, 10),
], ids=["rates", "a rate", "a rate and a delay"])
def test_namespaces_are_removed_after_an_error(root, make):
  with pytest.raises(ZeroDivisionError):
    _meet_and_fail(make)
  assert not _own()


def test_partially_made_namespaces_are_removed(root, monkeypatch, tmp_path):
  (tmp_path / "ip").symlink_to(shutil.which("ip"))  # without tc
  monkeypatch.setenv("PATH", str(tmp_path))
  with (
    pytest.raises(ValueError, match="cannot be shaped here: there is no 'tc'"),
    namespaces.shaped(np.full((2, 2), 1e6)),
  ):
    pass
  assert not _own()


def test_namespaces_of_a_killed_process_are_removed(root):
  with subprocess.Popen(
    [sys.executable, "-c", "import time\nimport numpy as np\n"
     "from caatnet.benchmarks.harness import namespaces\n"
     "with namespaces.shaped(np.full((2, 2), 1e6)):\n"
     "  print('made', flush=True)\n"
     "  time.sleep(100)\n"],
    cwd=ROOT, text=True, stdout=subprocess.PIPE,
  ) as other:
    assert other.stdout.readline()
    left = f"shaped{other.pid}n0"
    assert left in _namespaces()
    other.kill()
  end = time.monotonic() + 10
  while left in _namespaces() and time.monotonic() < end:
    time.sleep(0.05)
  assert left not in _namespaces()


def test_config_without_benchmark_is_a_copy():
  config = train_step.get_config("test")
  assert "benchmark" not in setup.without_benchmark(config)
  assert config.benchmark.name == "train_step"
  batch = setup.token_batch(config)
  assert batch.shape == (config.data.batch_size, config.data.seq_len + 1)


@pytest.mark.parametrize(("mbit", "rtt_ms", "mtu", "burst_kb", "latency_ms"), [
  (100, 0, 1500, 64, 50), (101, 0, 9000, 64, 50), (100, 10, 1500, 64, 60),
  (1000, 0, 9000, 250, 50),
])
def test_long_link_has_packets_and_queues_for_its_rate(
  root, mbit, rtt_ms, mtu, burst_kb, latency_ms
):
  """Bursts of a tick of the kernel, and 50 ms more than the round trip."""
  with namespaces.long_link(mbit, rtt_ms) as (hosts, prefixes):
    for prefix, host in zip(prefixes, hosts, strict=True):
      def said(*command, prefix=prefix):
        return subprocess.run(
          [*prefix, *command, "dev", "shaped0"], capture_output=True, text=True,
          check=True,
        ).stdout

      assert f" mtu {mtu} " in said("ip", "link", "show")
      assert f"inet {host}/24" in said("ip", "address", "show")
      queue = said("tc", "qdisc", "show")
      assert re.search(
        rf"tbf .*rate {mbit}Mbit burst {burst_kb}Kb lat {latency_ms}ms",
        queue.replace("1Gbit", "1000Mbit").replace(".0ms", "ms"),
      ), queue


def test_progress_bar_leaves_nothing_behind(capsys):
  assert list(timing.progress(iter("ab"), "letters", 2)) == ["a", "b"]
  printed = capsys.readouterr()
  assert (printed.out, printed.err.strip()) == ("", "")
