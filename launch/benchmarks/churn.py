"""Workers that are killed, stopped, cut off and join while they train."""

from collections import Counter
import json
import os
import pathlib
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np
from rich.progress import Progress

from caatnet.show import tables
from launch.benchmarks import churn_peer
from parallel.elastic import history
from parallel.elastic.coordinator import Phase

KINDS = (
  "kill", "stop, short", "stop, long", "join", "coordinator", "cut"
)
# What a coordinator waits for when something happens.
_WHEN = {
  Phase.ASSEMBLING: "members form", Phase.FORMING: "members form",
  Phase.OPEN: "between rounds", Phase.RUNNING: "in an exchange",
}
_COLUMNS = ("between rounds", "in an exchange", "members form")
_FEWEST = 2  # workers that are left alone


def run(config: Any) -> dict[str, Any]:
  """Runs all seeds, prints tables, and returns them as plain data.

  Args:
    config: A config like configs/elastic/churn.py.

  Raises:
    RuntimeError: Digests differ, nothing is committed for too long, or a
      worker fails.
  """
  options = config.benchmark
  runs = []
  for seed in options.seeds:
    with tempfile.TemporaryDirectory() as folder, Progress(
      transient=True
    ) as progress:
      churn = _Churn(pathlib.Path(folder), options)
      try:
        runs.append({"seed": seed, **churn.run(seed, progress)})
      finally:
        churn.end()
  happened = Counter(
    (kind, when) for r in runs for kind, when in r["events"]
  )
  tables.table(
    f"events among {options.workers} workers, by what the coordinator was at",
    ["event", *_COLUMNS],
    [
      [kind, *(str(happened[kind, when]) for when in _COLUMNS)]
      for kind in KINDS
    ],
  )
  tables.table(
    "what came of it",
    ["seed", "events", "rounds", "epochs", "longest without, s", "samples",
     "loss", "without events", "difference"],
    [
      [str(r["seed"]), str(len(r["events"])), f"{r['rounds']:,}",
       f"{r['epochs']:,}", f"{r['longest_s']:.1f}", f"{r['samples']:,}",
       f"{r['loss']:.5f}", f"{r['calm_loss']:.5f}",
       f"{r['loss'] / r['calm_loss'] - 1:+.2%}"]
      for r in runs
    ],
  )
  print("Digests were equal on all workers after every round, and the logs "
        "replay to the same decisions.")
  return {"benchmark": "churn", "runs": runs}


class _Worker:
  """A worker's process; `revisions` has what it has printed."""

  def __init__(self, arguments: list[str], environment: dict[str, str],
               heard: Any) -> None:
    self.process = subprocess.Popen(
      arguments, env=environment, text=True, stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
    )
    self.stopped = self.killed = False
    self._reader = threading.Thread(
      target=self._read, args=(heard,), daemon=True
    )
    self._reader.start()

  def _read(self, heard: Any) -> None:
    for line in self.process.stdout:
      if line.endswith("}\n"):  # else it was killed while it wrote
        heard(json.loads(line))

  def tell(self, word: str) -> None:
    """Writes a line to its stdin."""
    self.process.stdin.write(word + "\n")
    self.process.stdin.flush()

  def kill(self) -> None:
    """Ends it at once."""
    self.killed = True
    self.process.kill()
    self.process.wait()
    self._reader.join()


class _Churn:
  """A run: a coordinator, workers, and what happens to them."""

  def __init__(self, folder: pathlib.Path, options: Any) -> None:
    self._folder, self._options = folder, options
    with socket.create_server(("127.0.0.1", 0)) as free:
      self._port = free.getsockname()[1]
    self._environment = {
      **os.environ, "ELASTIC_TOKEN": secrets.token_hex(32),
      # Workers share this machine's cores.
      "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }
    self._lock = threading.Lock()
    self._seen: dict[int, dict[str, Any]] = {}
    self._problem, self._longest_s = "", 0.0
    self._last = time.monotonic()
    self._workers: list[_Worker] = []
    self._coordinate()

  def run(self, seed: int, progress: Progress) -> dict[str, Any]:
    """Lets events happen; returns what came of it."""
    rng = random.Random(seed)
    for _ in range(self._options.workers):
      self._join()
    self._until(lambda: len(self._seen) > 1)
    self._last, self._longest_s = time.monotonic(), 0.0
    bar = progress.add_task(f"seed {seed}", total=self._options.events)
    events = []
    for _ in range(self._options.events):
      self._wait(rng.expovariate(1 / self._options.gap_s))
      events.append((time.time(), self._happen(rng)))
      progress.update(
        bar, advance=1,
        description=f"seed {seed}, round {max(self._seen):,}: {events[-1][1]}",
      )
    self._wait(2 * self._options.silence_s)
    reached = max(self._seen)
    self._until(lambda: max(self._seen) > reached)
    self._leave()
    return self._outcome(events)

  def end(self) -> None:
    """Ends all processes."""
    for worker in self._workers:
      worker.kill()
    self._coordinator.kill()
    self._coordinator.wait()

  def _coordinate(self) -> None:
    with open(self._folder / "coordinator.txt", "ab") as lines:
      self._coordinator = subprocess.Popen(
        [sys.executable, "-m", "launch.coordinator", f"--port={self._port}",
         "--host=127.0.0.1", f"--journal={self._folder}/journal",
         f"--silence_s={self._options.silence_s}", "--recover_s=5",
         f"--least={self._options.workers}"],
        env=self._environment, stdout=lines, stderr=lines,
      )

  def _join(self) -> None:
    options = self._options
    self._workers.append(_Worker(
      [sys.executable, "-m", "launch.benchmarks.churn_peer", str(self._port),
       str(options.parameters), str(options.samples)],
      self._environment, self._heard,
    ))

  def _heard(self, line: dict[str, Any]) -> None:
    """Takes a worker's line, and compares it with the others'."""
    del line["counted"]
    with self._lock:
      there = self._seen.setdefault(line["revision"], line)
      if there is line and line["revision"] == max(self._seen):
        now = time.monotonic()
        self._longest_s = max(self._longest_s, now - self._last)
        self._last = now
      elif there != line:
        self._problem = f"workers differ: {line} and {there}"

  def _look(self) -> None:
    """Fails if something is wrong."""
    if self._problem:
      raise RuntimeError(self._problem)
    without_s = time.monotonic() - self._last
    if without_s > self._options.limit_s:
      said = (self._folder / "coordinator.txt").read_text()[-2000:]
      raise RuntimeError(f"no round for {without_s:.0f} s: {said}")
    for worker in self._workers:
      code = worker.process.poll()
      if code and not worker.killed:
        raise RuntimeError(f"a worker has ended with code {code}")

  def _until(self, condition: Any) -> None:
    while not condition():
      self._look()
      time.sleep(0.02)

  def _wait(self, seconds: float) -> None:
    end = time.monotonic() + seconds
    self._until(lambda: time.monotonic() > end)

  def _happen(self, rng: random.Random) -> str:
    """Lets one event happen; returns its kind."""
    kind = rng.choice(KINDS)
    there = [w for w in self._workers if not w.killed]
    awake = [w for w in there if not w.stopped]
    if kind == "join" and len(there) >= self._options.workers:
      kind = "kill"
    if kind in ("kill", "stop, short", "stop, long") and len(awake) <= _FEWEST:
      kind = "join" if len(there) < self._options.workers else "cut"
    if kind == "join":
      self._join()
    elif kind == "coordinator":
      self._coordinator.kill()
      self._coordinator.wait()
      self._wait(rng.uniform(0, 1))
      self._coordinate()
    elif kind == "kill":
      rng.choice(awake).kill()
    elif kind == "cut":
      rng.choice(awake).tell("cut")
    else:
      factor = rng.uniform(0.1, 0.5) if "short" in kind else 1.5
      self._stop(rng.choice(awake), factor * self._options.silence_s)
    return kind

  def _stop(self, worker: _Worker, seconds: float) -> None:
    """Stops a worker for some time, while other events happen."""
    worker.process.send_signal(signal.SIGSTOP)
    worker.stopped = True

    def go_on() -> None:
      worker.stopped = False
      if not worker.killed:
        worker.process.send_signal(signal.SIGCONT)

    threading.Timer(seconds, go_on).start()

  def _leave(self) -> None:
    """Lets all workers leave, one after the other."""
    for worker in self._workers:
      if not worker.killed:
        worker.tell("end")
        self._until(lambda w=worker: w.process.poll() is not None)

  def _outcome(self, events: list[tuple[float, str]]) -> dict[str, Any]:
    lines = list(history.read(f"{self._folder}/journal.log.jsonl"))
    states = list(history.replay(lines))
    last = max(self._seen)
    if states[-1].record.revision < last:
      raise RuntimeError(f"round {last} is not in the coordinator's log")
    times = [line["time"] for line in lines]
    phases = [
      states[max(0, int(np.searchsorted(times, moment)) - 1)].phase
      for moment, _ in events
    ]
    samples = self._seen[last]["samples"]
    return {
      "events": [
        (kind, _WHEN[phase])
        for (_, kind), phase in zip(events, phases, strict=True)
      ],
      "rounds": last, "epochs": states[-1].record.epoch,
      "longest_s": self._longest_s, "samples": samples,
      "loss": self._seen[last]["loss"], "calm_loss": self._calm(samples),
    }

  def _calm(self, samples: int) -> float:
    """Returns the loss after as many samples without events."""
    state = churn_peer.start(self._options.parameters)
    theta = state["theta"]
    each = self._options.workers * self._options.samples
    for first in range(0, samples - each + 1, each):
      mean = churn_peer.gradient(theta, ((first, first + each),))
      theta = theta - churn_peer.RATE * mean
    return churn_peer.loss(theta)
