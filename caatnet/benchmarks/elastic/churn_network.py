"""Swarm with faults in which peers cannot reach each other for some time.

The coordinator and each worker are in network namespaces with one link for each
pair, whose round trips are random. In addition to the events of `Churn`, ports
are closed and packets of one direction are dropped. The next event waits for a
committed round, so that a time without rounds is caused by one event and by
disturbances that still last.
"""

import contextlib
import pathlib
import random
import threading
import time
from typing import Any

import numpy as np

from caatnet.benchmarks.elastic.churn_coordinator import Coordinator
from caatnet.benchmarks.elastic.churn_run import (
  EVENT_KINDS,
  MAX_EXTRA_WORKERS,
  MIN_UNDISTURBED_WORKERS,
  Churn,
  Worker,
)
from parallel.peers.emulation import namespaces, processes

# Kind of event -> its description in the table.
REACHABILITY_EVENTS = {
  "closed port": "another worker, whose port is closed at first",
  "loopback": "another worker, which listens at 127.0.0.1 only",
  "port closes": "other workers cannot connect to a worker any longer",
  "no dials": "a worker cannot connect to other workers any longer",
  "one way": "packets from one worker to another are dropped",
}
_LINK_BYTES_PER_S = 125e6  # bytes per second of all links: only delays matter


class Network(Churn):
  """Run of `Churn` in network namespaces; the coordinator is in namespace 0."""

  kinds = (*EVENT_KINDS, *REACHABILITY_EVENTS)

  def __init__(self, folder: pathlib.Path, config: Any, seed: int) -> None:
    """Starts namespaces and a coordinator; arguments as for `Churn`."""
    self._stack = contextlib.ExitStack()
    options = config.benchmark
    count = 1 + options.workers + MAX_EXTRA_WORKERS
    rng = np.random.default_rng(seed)
    # Half of a round trip in each direction.
    delays = rng.uniform(*options.rtt_ms, (count, count)) / 2000
    delays = np.triu(delays, 1) + np.triu(delays, 1).T
    self._mesh = self._stack.enter_context(
      namespaces.mesh(np.full((count, count), _LINK_BYTES_PER_S), delays)
    )
    self._nodes: dict[int, Worker] = {}  # node -> its newest worker
    self._caused = 0.0  # time of the last event, `time.monotonic`
    self._loopback = False  # whether the next worker listens at 127.0.0.1
    # Node -> links (source, target) that an event of this node disturbs.
    self._dropped_for: dict[int, list[tuple[int, int]]] = {}
    self._lifted = threading.Event()  # set at the end: timers do nothing then
    super().__init__(folder, config, seed)

  def end(self) -> None:
    """Ends all processes, and deletes the namespaces."""
    self._lifted.set()
    super().end()
    self._stack.close()

  def _pause(self, seconds: float) -> None:
    super()._pause(seconds)
    self._until(lambda: self._commits[-1] > self._caused)

  def _make_coordinator(self) -> Coordinator:
    return Coordinator(
      self._folder, self._environment, self._options.silence_s,
      self._mesh.hosts[0], self._mesh.prefixes[0],
    )

  def _free(self) -> int:
    """Returns the number of a network namespace without a live worker."""
    alive = {id(worker) for worker in self._live_workers()}
    return next(
      node for node in range(1, len(self._mesh.hosts))
      if id(self._nodes.get(node)) not in alive
    )

  def _worker_command(self, word: str) -> list[str]:
    node = self._free()
    options, mesh = self._options, self._mesh
    return [*mesh.prefixes[node], *processes.module_command(
      "caatnet.benchmarks.elastic.churn_peer", self._port, options.parameters,
      options.samples, options.pause_s, self._folder, word, mesh.hosts[0],
      "127.0.0.1" if self._loopback else mesh.hosts[node],
    )]

  def _join(self, word: str = "new") -> None:
    node = self._free()
    self._restore(node)  # ends an event of the node's former worker
    super()._join(word)
    self._nodes[node] = self._workers[-1]

  def _restore(self, node: int) -> None:
    for link in self._dropped_for.pop(node, ()):
      self._mesh.restore(*link)

  def _cause(self, kind: str, rng: random.Random) -> None:
    """Injects an event; its worker has `Worker.stopped` while it lasts."""
    self._caused = time.monotonic()
    if kind not in REACHABILITY_EVENTS:
      super()._cause(kind, rng)
      return
    joins = kind in ("closed port", "loopback")
    if joins and len(
      self._live_workers()
    ) >= self._options.workers + MAX_EXTRA_WORKERS:
      super()._cause("kill", rng)
      return
    awake = [w for w in self._live_workers() if not w.stopped]
    # At least MIN_UNDISTURBED_WORKERS remain undisturbed.
    if not joins and len(awake) <= MIN_UNDISTURBED_WORKERS:
      super()._cause("join", rng)
      return
    self._record(kind)
    seconds = rng.uniform(*self._options.lasts_s)
    if joins:
      node = self._free()
    else:
      worker = rng.choice(awake)
      node = next(n for n, w in self._nodes.items() if w is worker)
    others = [n for n in range(1, len(self._mesh.hosts)) if n != node]
    if kind == "one way":
      links, what = [(node, rng.choice(others))], "all"
    elif kind == "no dials":
      links, what = [(node, other) for other in others], "dials"
    else:
      links, what = [(other, node) for other in others], "dials"
    if joins:
      self._loopback = kind == "loopback"
      self._join()
      self._loopback = False
      worker = self._workers[-1]
    if kind != "loopback":
      self._dropped_for[node] = links
      for link in links:
        self._mesh.restore(*link)  # ends an event of the link's other end
        self._mesh.drop(*link, what)
    worker.stopped = True
    if not joins:
      worker.write("cut")  # so that members connect again

    def restore() -> None:
      if self._lifted.is_set():
        return
      if kind == "loopback":
        worker.kill()
      elif self._nodes[node] is worker:
        self._restore(node)
      worker.stopped = False

    threading.Timer(seconds, restore).start()
