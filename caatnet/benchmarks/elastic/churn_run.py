"""Swarm with faults: its processes, and the injected events.

Workers of `Churn` have no model (`churn_peer`), those of `churn_training` do.
"""

from collections import Counter
import itertools
import math
import pathlib
import random
import secrets
import signal
import threading
import time
from typing import Any

from rich.progress import Progress

from caatnet.benchmarks.elastic import churn_peer
from caatnet.benchmarks.elastic.churn_coordinator import Coordinator
from parallel.peers.emulation import processes
from parallel.peers.membership.coordinator import Phase

# Kind of event -> its description in the table.
EVENT_KINDS = {
  "kill": "killed",
  "stop, long": "stopped for longer than it may be silent",
  "stop, short": "slow",
  "back": "killed, and another one in its place at once",
  "coordinator": "the coordinator is killed, and comes back",
  "cut": "a connection is cut",
  "half-open": "a connection drops all bytes without an error at either end",
  "bits": "a bit of the state that a worker has is wrong",
  "last holder": "all are killed; a new run from a checkpoint, and a worker "
                 "without one",
  "join": "another worker, whose run has not begun",
  "ahead": "another worker, whose run is ahead, and which is refused",
}
# Phase of the coordinator -> the column that counts events in it.
_COLUMN_OF_PHASE = {
  Phase.ASSEMBLING: "members form", Phase.FORMING: "members form",
  Phase.OPEN: "between rounds", Phase.RUNNING: "in an exchange",
}
PHASE_COLUMNS = ("between rounds", "in an exchange", "members form")
MIN_UNDISTURBED_WORKERS = 2  # minimum number of workers that no event affects
# maximum number of workers beyond config.benchmark.workers
MAX_EXTRA_WORKERS = 2
_MAX_PHASE_WAIT_S = 5.0  # maximum wait for the phase of a column


class Worker(processes.Process):
  """Process of a worker.

  Attributes:
    stopped: Whether events spare it: it is paused, unreachable or refused.
  """

  stopped = False


class Churn:
  """Run of a coordinator and workers under injected events.

  Attributes:
    kinds: Kinds of events that are drawn.
  """

  kinds = tuple(EVENT_KINDS)

  def __init__(self, folder: pathlib.Path, config: Any, seed: int) -> None:
    """Starts a coordinator.

    Args:
      folder: Folder for all files that the run writes.
      config: Config like configs/elastic/churn.py.
      seed: Seed of the events.
    """
    self._folder, self._options, self._seed = folder, config.benchmark, seed
    self._environment = processes.ONE_THREAD | {
      "ELASTIC_TOKEN": secrets.token_hex(32)
    }
    self._coordinator = self._make_coordinator()
    self._port = self._coordinator.port
    self._lock = threading.Lock()
    self._seen: dict[int, dict[str, Any]] = {}
    self._problem = ""
    self._commits: list[float] = []  # times at which newer revisions were seen
    self._events: list[tuple[float, str]] = []
    self._workers: list[Worker] = []
    self._run = 0  # number of complete restarts
    self._dropped: list[str] = []  # reports of contributions not counted
    self._refused = 0  # number of refused workers, whose run is ahead
    self._least = 0  # revision of the checkpoint that the newest run began with
    self._start_coordinator()

  def run(self, progress: Progress) -> dict[str, Any]:
    """Injects events until `goal`; returns the run's results (`_outcome`)."""
    seed, options = self._seed, self._options
    rng = random.Random(seed)
    for _ in range(options.workers):
      self._join()
    # Events begin after the first committed rounds.
    self._until(lambda: len(self._seen) > 1)
    self._commits = [time.monotonic()]
    self._begun = time.monotonic()
    bar = progress.add_task(f"seed {seed}", total=self.goal)
    while self.done < self.goal:
      self._pause(rng.expovariate(1 / options.gap_s))
      self._happen(rng)
      progress.update(
        bar, completed=self.done,
        description=f"seed {seed}, round {self.newest_revision:,}: "
        f"{self._events[-1][1] if self._events else ''}",
      )
    self._finish()
    return self._outcome()

  @property
  def newest_revision(self) -> int:
    """Newest revision of the shared state that any worker has reported."""
    return max(self._seen, default=0)

  @property
  def goal(self) -> float:
    """Value of `done` at which events end."""
    return self._options.minutes * 60 or self._options.events

  @property
  def done(self) -> float:
    """Number of events so far; with ``minutes``, seconds since the start."""
    if self._options.minutes:
      return time.monotonic() - self._begun
    return len(self._events)

  def _finish(self) -> None:
    """Waits for one more round of all workers, then ends them."""
    self._until(
      lambda: not any(worker.stopped for worker in self._live_workers())
    )
    reached = self.newest_revision
    self._until(lambda: self.newest_revision > reached)
    for worker in self._live_workers():
      worker.write("end")
      self._until(lambda w=worker: w.popen.poll() is not None)

  def end(self) -> None:
    """Ends all processes."""
    for worker in self._workers:
      worker.kill()
    self._coordinator.end()

  def _start_coordinator(self) -> None:
    # A new run continues even if some of its first workers are killed.
    self._coordinator.start(
      self._run, MIN_UNDISTURBED_WORKERS if self._run else self._options.workers
    )

  def _make_coordinator(self) -> Coordinator:
    return Coordinator(
      self._folder, self._environment, self._options.silence_s
    )

  def _join(self, word: str = "new") -> None:
    self._workers.append(
      Worker(
        self._worker_command(word), environment=self._environment,
        on_line=self._compare,
      )
    )

  def _worker_command(self, word: str) -> list[str]:
    """Returns a worker's command; for the word see `churn_peer`."""
    options = self._options
    return processes.module_command(
      "caatnet.benchmarks.elastic.churn_peer", self._port, options.parameters,
      options.samples, options.pause_s, self._folder, word,
    )

  def _compare(self, line: dict[str, Any]) -> None:
    """Handles a line of JSON that a worker printed.

    Records a problem if workers' results differ.
    """
    with self._lock:
      if "dropped" in line:
        self._dropped += line["dropped"]
        return
      if "refused" in line:
        self._refused += 1
        return
      if line["revision"] <= self._least:
        self._problem = f"rounds up to {self._least} are lost: {line}"
      # All workers must report the same digest and samples for a revision. A
      # loss is computed later and may differ, after a bit was flipped.
      there = self._seen.setdefault(line["revision"], line)
      if there is line and line["revision"] == self.newest_revision:
        self._commits.append(time.monotonic())
      elif any(there[key] != line[key] for key in ("digest", "samples")):
        self._problem = f"workers differ: {line} and {there}"

  def _raise_on_failure(self) -> None:
    """Raises an error if a worker or the coordinator has failed."""
    if self._problem:
      raise RuntimeError(self._problem)
    if self._commits:
      without_s = time.monotonic() - self._commits[-1]
      if without_s > self._options.limit_s:
        said = self._coordinator.output.read_text()[-2000:]
        raise RuntimeError(
          f"no round for {without_s:.0f} s after {self._events[-5:]}: {said}"
        )
    for worker in self._workers:
      code = worker.popen.poll()
      if code and not worker.killed:
        raise RuntimeError(f"a worker has ended with code {code}")

  def _until(self, condition: Any) -> None:
    while not condition():
      self._raise_on_failure()
      time.sleep(0.005)

  def _wait(self, seconds: float) -> None:
    end = time.monotonic() + seconds
    self._until(lambda: time.monotonic() > end)

  def _pause(self, seconds: float) -> None:
    """Waits without events for some time."""
    self._wait(seconds)

  def _live_workers(self) -> list[Worker]:
    return [
      w for w in self._workers if not w.killed and w.popen.poll() is None
    ]

  def _happen(self, rng: random.Random) -> None:
    """Injects an event of the kind and phase with the fewest events so far."""
    count = Counter(self._classified_events())
    cells = [(kind, when) for kind in self.kinds for when in PHASE_COLUMNS]
    least = min(count[cell] for cell in cells)
    kind, when = rng.choice([c for c in cells if count[c] == least])
    if when == "members form":  # requires an event that changes membership
      there = len(self._live_workers())
      self._cause(
        "join" if there < self._options.workers + MAX_EXTRA_WORKERS else "kill",
        rng
      )
    end = time.monotonic() + _MAX_PHASE_WAIT_S
    self._until(
      lambda: self._phase_column() == when or time.monotonic() > end
    )
    # A random offset within the phase.
    time.sleep(rng.uniform(0, 0.02))
    if self.done < self.goal:
      self._cause(kind, rng)

  def _cause(self, kind: str, rng: random.Random) -> None:
    """Injects an event, or another one if there are too few workers."""
    most = self._options.workers + MAX_EXTRA_WORKERS
    there = self._live_workers()
    awake = [w for w in there if not w.stopped]
    if kind == "join" and len(there) >= most:
      kind = "kill"
    # Too few workers would remain.
    if kind in (
      "kill", "stop, long", "stop, short"
    ) and len(awake) <= MIN_UNDISTURBED_WORKERS:
      kind = "join" if len(there) < most else "cut"
    # Before its first round, a new run would adopt the more advanced one.
    if kind == "ahead" and (not self._seen or len(there) >= most):
      kind = "cut"
    self._record(kind)
    if kind == "join":
      self._join()
    elif kind == "ahead":
      self._join("ahead")
      self._workers[-1].stopped = True  # not a member
    elif kind == "coordinator":
      self._coordinator.kill()
      self._wait(rng.uniform(0, 1))
      self._start_coordinator()
    elif kind in ("kill", "back"):
      rng.choice(awake).kill()
      if kind == "back":
        self._join()
    elif kind == "last holder":
      self._begin_again(rng.randrange(self._options.workers))
    elif kind in ("cut", "half-open", "bits"):
      rng.choice(awake).write(kind)
    else:
      # Stops shorter than the silence limit are tolerated; longer ones drop the
      # worker from the group.
      factor = rng.uniform(0.1, 0.5) if "short" in kind else 1.5
      self._stop(rng.choice(awake), factor * self._options.silence_s)

  def _record(self, kind: str) -> None:
    self._events.append((time.time(), kind))

  def _begin_again(self, new: int | None = None) -> None:
    """Kills all processes; starts a new run from the last checkpoint.

    Args:
      new: Number of the worker that joins without a checkpoint; None for none.
        The coordinator waits for two workers, so one has the checkpoint.
    """
    for worker in self._live_workers():
      worker.kill()
    self._coordinator.kill()
    self._run += 1
    self._seen.clear()  # rounds after the checkpoint are repeated
    kept = self._folder.glob("*.checkpoint")
    self._least = max((int(path.stem) for path in kept), default=0)
    self._start_coordinator()
    for number in range(self._options.workers):
      self._join("new" if number == new else "checkpoint")

  def _stop(self, worker: Worker, seconds: float) -> None:
    """Stops a worker for some time, while other events continue."""
    worker.popen.send_signal(signal.SIGSTOP)
    worker.stopped = True

    def go_on() -> None:
      worker.stopped = False
      if not worker.killed:
        worker.popen.send_signal(signal.SIGCONT)

    threading.Timer(seconds, go_on).start()

  def _phase_column(self, moment: float = math.inf) -> str:
    """Returns the table's column for the coordinator's phase at a time."""
    return _COLUMN_OF_PHASE[self._coordinator.phase(moment)]

  def _classified_events(self) -> list[tuple[str, str]]:
    """Returns the kind and the column (`_phase_column`) of each event."""
    return [(kind, self._phase_column(moment)) for moment, kind in self._events]

  def _outcome(self) -> dict[str, Any]:
    states = self._coordinator.states()
    last = self.newest_revision
    if states[-1].record.revision < last:
      raise RuntimeError(f"round {last} is not in the coordinator's log")
    samples = self._seen[last]["samples"]
    pauses = self._longest_gaps()
    longest = pauses[0]
    return {
      "events": self._classified_events(), "rounds": last,
      "epochs": sum(
        b.record.epoch > a.record.epoch for a, b in itertools.pairwise(states)
      ),
      "pauses": [
        (stop - start, [
          kind for moment, kind in self._events if start - 1 <= moment <= stop
        ])
        for start, stop in pauses
      ],
      "dropped": len(self._dropped), "refused": self._refused,
      "longest_s": longest[1] - longest[0],
      "said": self._coordinator.lines(*longest),
      "samples": samples, "loss": self._loss(),
      "calm_loss": self._loss_without_events(samples),
    }

  def _longest_gaps(self) -> list[tuple[float, float]]:
    """Returns start and end of the five longest times without a swarm round."""
    offset = time.time() - time.monotonic()
    # Commits are recorded in monotonic time, events in `time.time`.
    pauses = itertools.pairwise(moment + offset for moment in self._commits)
    return sorted(pauses, key=lambda pause: pause[0] - pause[1])[:5]

  def _loss(self) -> float:
    """Returns the final loss."""
    return self._seen[self.newest_revision]["loss"]

  def _loss_without_events(self, samples: int) -> float:
    """Returns the loss after ``samples`` samples of a run without events."""
    state = churn_peer.initial_state(self._options.parameters)
    theta = state["theta"]
    each = self._options.workers * self._options.samples
    for first in range(0, samples - each + 1, each):
      mean = churn_peer.gradient(theta, ((first, first + each),))
      theta = theta - churn_peer.LEARNING_RATE * mean
    return churn_peer.loss(theta)
