"""Metrics of a server in Prometheus' format."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import (
  CollectorRegistry,
  Counter,
  Histogram,
  generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from caatnet.serving.requests import FINAL_STATES, Request, State

# Upper bounds in seconds, each 1.5 to 2.5 times the one before.
_TTFT_BUCKETS_S = (
  .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 25, 60, 120
)
_TBT_BUCKETS_S = (.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10)
_LATENCY_BUCKETS_S = (.05, .1, .25, .5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)


class Metrics:
  """Counters of requests and tokens, and latency histograms.

  Histograms have fixed buckets, so that memory does not grow with the load.
  """

  def __init__(self, page_bytes: int, state_bytes: int = 0) -> None:
    """Starts at zero.

    Args:
      page_bytes: Bytes of a page over all layers and ranks.
      state_bytes: Bytes of a recurrent state over all layers and ranks.
    """
    self._bytes = {"pages": page_bytes, "states": state_bytes}
    self._registry = CollectorRegistry()
    self._ttft = self._histogram(
      "ttft_seconds", "From a request's arrival to its first token",
      _TTFT_BUCKETS_S
    )
    self._tbt = self._histogram(
      "tbt_seconds", "Between two tokens of a request", _TBT_BUCKETS_S
    )
    self._latency = self._histogram(
      "request_seconds", "From the arrival of a request that has finished to "
      "its last token", _LATENCY_BUCKETS_S,
    )
    self._prompt = self._counter("prompt_tokens", "Tokens of prompts")
    self._drawn = self._counter("drawn_tokens", "Tokens that were drawn")
    self._cached = self._counter(
      "cached_prompt_tokens", "Tokens of prompts that were in the cache"
    )
    self._ends = self._counter(
      "requests", "Ended sequences by final state", ("end",)
    )
    for state in FINAL_STATES:
      self._ends.labels(state.value)
    self._answers = self._counter(
      "http_responses", "HTTP responses by status code", ("status",)
    )

  def _counter(
    self, name: str, what: str, labels: tuple[str, ...] = ()
  ) -> Counter:
    """Registers a counter with the help text `what`."""
    return Counter(f"caatnet_{name}", what, labels, registry=self._registry)

  def _histogram(
    self, name: str, what: str, buckets: tuple[float, ...]
  ) -> Histogram:
    """Registers a histogram; `buckets` are upper bounds, `what` its help."""
    return Histogram(
      f"caatnet_{name}", what, buckets=buckets, registry=self._registry
    )

  def token(
    self, request: Request, time_s: float, before_s: float | None
  ) -> None:
    """Records a token, its time and that of the previous token, in seconds."""
    self._drawn.inc()
    # The first token counts for TTFT and the prompt, later ones for TBT.
    if before_s is not None:
      self._tbt.observe(time_s - before_s)
      return
    self._ttft.observe(time_s - request.arrival_s)
    self._prompt.inc(len(request.prompt))
    self._cached.inc(request.num_hits)

  def ended(self, request: Request, state: State) -> None:
    """Records the end of a sequence."""
    self._ends.labels(state.value).inc()
    if state is State.FINISHED and request.end_s is not None:
      self._latency.observe(request.end_s - request.arrival_s)

  def answered(self, status: int) -> None:
    """Records an HTTP response."""
    self._answers.labels(str(status)).inc()

  def text(self, state: dict[str, Any]) -> bytes:
    """Returns all metrics in Prometheus' text format.

    Args:
      state: Snapshot of the server (`caatnet.serving.server.snapshot`).
    """
    # Gauges are rebuilt from the snapshot at each scrape.
    now = CollectorRegistry()
    now.register(_SnapshotCollector(state, self._bytes))
    return generate_latest(self._registry) + generate_latest(now)


class _SnapshotCollector(Collector):
  """Prometheus collector of gauges and counters from one snapshot."""

  def __init__(self, state: dict[str, Any], sizes: dict[str, int]) -> None:
    self._state, self._sizes = state, sizes

  def collect(self) -> Iterator[Any]:
    state = self._state
    for name, what, key in (
      ("sequences", "Sequences that have not ended", "requests"),
      ("pages", "Pages of the cache", "pages"),
    ):
      gauge = GaugeMetricFamily(f"caatnet_{name}", what, labels=("state",))
      for label, value in state[key].items():
        gauge.add_metric((label,), value)
      yield gauge
    gauge = GaugeMetricFamily(
      "caatnet_host_pages_used", "Pages of the host that hold copies"
    )
    gauge.add_metric((), state["host_pages"]["used"])
    yield gauge
    copies = state["copies"]
    for name, what, values in (
      ("copied_bytes", "Bytes copied, by direction",
       {kind: sum(found[of] * size for of, size in self._sizes.items())
        for kind, found in copies.items()}),
      ("copied_runs", "Runs of pages copied, by direction",
       {k: v["runs"] for k, v in copies.items()}),
      ("preemptions", "Preemptions by kind", state["preemptions"]),
      ("prefix_pages", "Pages of prompts looked up in the cache",
       {k: state["prefixes"][k] for k in ("hits", "misses")}),
    ):
      counter = CounterMetricFamily(f"caatnet_{name}", what, labels=("kind",))
      for label, value in values.items():
        counter.add_metric((label,), value)
      yield counter
    if state["experts"] is not None:
      yield from _of_experts(state["experts"])
    for name, what in (
      ("steps", "Steps of the model"),
      ("stalls", "Times that a sequence was left out of a step for a copy"),
    ):
      counter = CounterMetricFamily(f"caatnet_{name}", what)
      counter.add_metric((), state[name])
      yield counter


def _of_experts(state: dict[str, Any]) -> Iterator[Any]:
  """Yields the metrics of experts and of their weight slots."""
  for name, what in (
    ("hits", "Requests whose expert was in a slot"),
    ("misses", "Requests for which their expert was loaded"),
    ("loads", "Completed loads of weights to a slot"),
    ("failures", "Failed loads"),
    ("bytes", "Bytes of weights that were copied to slots"),
    ("files", "Loads that read the file"),
    ("exposed_s", "Seconds in which a load ran and no step was computed"),
  ):
    label = name.replace("exposed_s", "exposed_seconds")
    counter = CounterMetricFamily(
      f"caatnet_expert_{label}", what, labels=("expert",)
    )
    for expert, counters in state["counters"].items():
      counter.add_metric((expert,), counters[name])
    yield counter
  gauge = GaugeMetricFamily(
    "caatnet_expert_slots", "Slots of weights", labels=("state",)
  )
  states = [slot["state"] for slot in state["slots"]]
  for label in ("empty", "loading", "ready"):
    gauge.add_metric((label,), states.count(label))
  yield gauge
  gauge = GaugeMetricFamily(
    "caatnet_host_experts", "Experts whose weights are in host memory"
  )
  gauge.add_metric((), len(state["host"]))
  yield gauge
  gauge = GaugeMetricFamily(
    "caatnet_expert_load_seconds", "Median seconds of recent loads"
  )
  gauge.add_metric((), state["load_s"])
  yield gauge
