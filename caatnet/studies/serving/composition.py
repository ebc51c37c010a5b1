"""Simulation of a server that switches between the experts of a composition.

One device serves many experts of equal sizes; the weights of some are in weight
slots on the device. The simulation runs the server's own scheduler, policy
`experts` and slots. Steps are timed by a roofline model, loads of weights by
their bytes over a rate. Loads do not slow steps down.

A load is *exposed* while it is in progress and no step is. The misses are
compared with the fewest possible (Belady) for the order of served requests.
`caatnet.studies.serving.composition_figures` has the figures of the paper
(SN40L and Composition of Experts, arXiv 2405.07518).
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import Pages
from caatnet.serving.engine.engine import Engine, replay
from caatnet.serving.engine.executor import WeightLoad
from caatnet.serving.engine.simulator import Simulator
from caatnet.serving.requests import Request
from caatnet.serving.scheduler.limits import Limits
from caatnet.serving.scheduler.policies.experts import ExpertsPolicy
from caatnet.serving.scheduler.scheduler import Scheduler
from caatnet.studies.serving import composition_figures, server, tails
from parallel.plans.network import inference
from parallel.plans.placement.slots import Slots, misses
from parallel.plans.workload import Transformer

# Name -> (largest number of loads that start before a request needs them,
# whether a step begins before the expert's last layers have arrived).
LOAD_MODES = {
  "on demand": (0, False), "ahead": (1, False), "layer-wise": (1, True),
}
# A stream whose responses have at least this many tokens has a fifth of the
# requests.
_LONG_RESPONSE_TOKENS, _LONG_REQUEST_DIVISOR = 100, 5


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Simulates a server for several streams, slots, loads and patiences.

  Args:
    config: Config like configs/serving/composition.py, as nested dicts.

  Returns:
    Plain data: lists of results of `simulate`: "streams" (orders of requests),
    "slots" (numbers of weight slots), "load" (request rates) and "front" (the
    trade-off of fairness and switching); and the result of
    `composition_figures.run`.

  Raises:
    ValueError: A stream or policy is unknown, or the slots do not fit.
  """
  cells: dict[str, list[dict[str, Any]]] = {
    "streams": [
      {"stream": kind, "eviction": eviction}
      for kind in config["streams"] for eviction in config["evictions"]
    ],
    "slots": [
      {"num_slots": number, "eviction": eviction}
      for number in config["slots"] for eviction in config["evictions"]
    ],
    "load": [
      {"way": way, "batch": batch, "output": output, "rate": rate}
      for batch in config["batches"] for output in config["outputs"]
      for way in LOAD_MODES for rate in config["rates"]
    ],
    "front": [
      {"patience": patience, "deadline_s": deadline_s,
       "rate": config["front_rate"], "output": config["front_output"]}
      for deadline_s in config["deadlines"] for patience in config["patiences"]
    ],
  }
  found = {
    part: [
      simulate(config, **cell) for cell in track(
        rows, f"simulating {part}", transient=True,
        console=Console(stderr=True),
      )
    ]
    for part, rows in cells.items()
  }
  mark_front(found["front"])
  size = expert_bytes(config["model"])
  return {
    **found,
    **composition_figures.run(
      config["published"], config["model"]["num_layers"]
    ),
    "expert_bytes": size, "experts": dict(config["experts"]),
    "stream": dict(config["stream"]), "device": config["hardware"]["device"],
  }


def expert_bytes(model: Mapping[str, Any]) -> float:
  """Returns the bytes of an expert's weights."""
  one = inference.ModelStep(1, 1, 1)
  return inference.memory_bytes(Transformer(**model), one, 1)["weights"]


def machine(config: Mapping[str, Any], num_slots: int) -> server.Machine:
  """Returns a machine whose cache fills the memory that weight slots leave.

  Raises:
    ValueError: The device is unknown, or the slots leave no room for a
      sequence.
  """
  hardware = dict(config["hardware"])
  if not hardware["pages"]:
    rest = (num_slots - 1) * expert_bytes(config["model"])
    # `server.machine` subtracts the weights of the remaining slot.
    memory_bytes = server.device_of(hardware).memory_bytes
    hardware["memory_share"] -= rest / memory_bytes
  try:
    return server.machine(config["model"], hardware)
  except ValueError as error:
    raise ValueError(
      f"{error}; config.experts.slots or config.slots has {num_slots} slots"
    ) from error


def zipf(
  rng: np.random.Generator, count: int, config: Mapping[str, Any]
) -> np.ndarray:
  """Returns numbers of experts from Zipf's distribution, int ``[count]``."""
  number = config["experts"]["number"]
  with np.errstate(over="ignore"):  # a power that overflows is a weight of 0
    weights = 1 / np.arange(1.0, number + 1) ** config["stream"]["exponent"]
  return rng.choice(number, count, p=weights / weights.sum())


def _uniform(
  rng: np.random.Generator, count: int, config: Mapping[str, Any]
) -> np.ndarray:
  return rng.integers(config["experts"]["number"], size=count)


def _bursty(
  rng: np.random.Generator, count: int, config: Mapping[str, Any]
) -> np.ndarray:
  lengths = rng.geometric(1 / config["stream"]["burst"], count)
  return np.repeat(zipf(rng, count, config), lengths)[:count]


def _cyclic(
  rng: np.random.Generator, count: int, config: Mapping[str, Any]
) -> np.ndarray:
  del rng
  return np.arange(count) % (config["experts"]["slots"] + 1)


# Name -> function that draws the expert of each request.
EXPERT_ORDERS = {
  "zipf": zipf, "uniform": _uniform, "bursty": _bursty, "cyclic": _cyclic,
}


def requests(
  config: Mapping[str, Any], kind: str, rate: float, batch: int, output: int
) -> list[Request]:
  """Returns the requests of a stream, whose prompts share no prefix.

  Groups of ``batch`` requests arrive as a Poisson process, ``rate`` requests
  per second. ``kind`` is a key of `EXPERT_ORDERS`, ``output`` the tokens of a
  response.
  """
  given = config["stream"]
  rng = np.random.default_rng(given["seed"])
  fewer = _LONG_REQUEST_DIVISOR if output >= _LONG_RESPONSE_TOKENS else 1
  count = max(1, given["requests"] // fewer)
  experts = EXPERT_ORDERS[kind](rng, count, config)
  batch = min(batch, count)
  groups = -(-count // batch)
  times = rng.exponential(batch / rate, groups).cumsum().repeat(batch)[:count]
  prompts = rng.integers(2**31 - 1, size=(count, given["prompt"]))
  return [
    Request(
      i, prompts[i], output, expert=expert_name(experts[i]),
      arrival_s=float(times[i]),
    )
    for i in range(count)
  ]


def expert_name(number: int) -> str:
  """Returns the key of an expert."""
  return f"expert_{number}"


class RecordingSlots(Slots):
  """Weight slots that record the order in which requests were served."""

  def __init__(self, num_slots: int, eviction: str) -> None:
    super().__init__(num_slots, eviction)
    self.order: list[str] = []

  def touch(self, slot: int) -> None:
    """Records the expert in a weight slot and counts a request for it."""
    self.order.append(self.expert(slot))
    super().touch(slot)


class LoadTimeModel:
  """Model of load times: experts come from host memory, or else from files."""

  def __init__(
    self, given: Mapping[str, Any], size: float, num_layers: int,
    step_s: float, layerwise: bool,
  ) -> None:
    """Fills the host memory with the experts that have the lowest numbers.

    Args:
      given: Section ``config.experts``.
      size: Bytes of an expert.
      num_layers: Number of layers, which arrive in order.
      step_s: Seconds of the shortest step.
      layerwise: Whether a step begins before the last layer has arrived.
    """
    room = min(given["host_experts"], given["number"])
    self._host = Slots(room, "lru")
    for number in range(room):
      self._read(expert_name(number))
    self._rates = given["copy_rate"], given["file_rate"]
    self._size, self._num_layers, self._step_s = size, num_layers, step_s
    self._layerwise = layerwise

  def load_s(self, load: WeightLoad) -> tuple[float, float]:
    """Returns the seconds of a load, and the seconds until a step may begin."""
    slot, rate = self._host.find(load.expert), self._rates[0]
    if slot is None:
      slot, rate = self._read(load.expert), min(self._rates)
    self._host.touch(slot)
    seconds = self._size / rate
    if not self._layerwise:
      return seconds, seconds
    # Layer l of L arrives at (l + 1) seconds / L and is read l step_s / L after
    # the step began. So the first or the last layer limits the start.
    first = 1 / self._num_layers
    return seconds, max(first * seconds, seconds - (1 - first) * self._step_s)


  def _read(self, expert: str) -> int:
    """Reads an expert from its file; returns its slot in host memory."""
    slot = self._host.reserve(expert)
    assert slot is not None  # none is in use
    self._host.loaded(slot)
    return slot


@dataclasses.dataclass(frozen=True)
class SweepPoint:
  """Parameters that the simulations of this study vary.

  Attributes:
    stream: Order of the experts, a key of `EXPERT_ORDERS`.
    eviction: Eviction policy of weight slots, a key of `EVICTIONS`.
    num_slots: Number of weight slots on the device.
    way: Start of loads, on demand or ahead, a key of `LOAD_MODES`.
    rate: Arrivals per second.
    batch: Requests that arrive at the same time.
    output: Tokens of a response.
    patience, deadline_s: Arguments of the policy `ExpertsPolicy`.
  """

  stream: str
  eviction: str
  num_slots: int
  way: str
  rate: float
  batch: int
  output: int
  patience: float
  deadline_s: float


def simulate(config: Mapping[str, Any], **varied: Any) -> dict[str, Any]:
  """Simulates a server that serves one stream of requests.

  Args:
    config: Config like configs/serving/composition.py, as nested dicts.
    **varied: Fields of a `SweepPoint`. Other fields have the config's values or
      the defaults "zipf", "lookahead" and "ahead".

  Returns:
    The fields of the point, and: "hits", "misses", "loads" and their "bytes";
    "least", the misses of Belady's policy for the served order, and
    "above_least", the relative excess; seconds of loads ("load_s"), of exposed
    loads ("exposed_s") and in total ("seconds"); "hidden" and "busy", the
    fractions of "load_s" and "seconds" in which steps ran; times to the first
    token (TTFT) and latencies in s; "jain", Jain's index of experts' TTFTs.

  Raises:
    ValueError: See `machine`; or the cache can hold no request.
  """
  given, usual = config["experts"], config["stream"]
  case = SweepPoint(**({
    "stream": "zipf", "eviction": "lookahead", "num_slots": given["slots"],
    "way": "ahead", "rate": usual["rate"], "batch": usual["batch"],
    "output": usual["output"], "patience": given["patience"],
    "deadline_s": given["deadline_s"],
  } | varied))
  host, (prefetch, layerwise) = machine(
    config, case.num_slots
  ), LOAD_MODES[case.way]
  size = expert_bytes(config["model"])
  tiers = LoadTimeModel(
    given, size, config["model"]["num_layers"],
    host.steps.step_s(np.ones(1), []), layerwise,
  )
  slots = RecordingSlots(case.num_slots, case.eviction)
  policy = ExpertsPolicy(
    slots, size / given["copy_rate"], case.deadline_s, prefetch, case.patience
  )
  limits = config["limits"]
  simulator = Simulator(
    host.steps, host.copies, most=limits["tokens"], load_s=tiers.load_s
  )
  pages = Pages(host.pages, host.page_size)
  scheduler = Scheduler(
    Limits(slots=limits["slots"], tokens=limits["tokens"]), policy, pages,
    HostCache(0, host.page_size, reserve=False), simulator.costs,
  )
  served = requests(config, case.stream, case.rate, case.batch, case.output)
  replay(Engine(scheduler, simulator, limits["steps_ahead"]), served)
  pages.check()
  if not slots.order:
    raise ValueError(
      f"no request of {case.output} new tokens fits into "
      f"{host.tokens} tokens of cache; config.stream.prompt="
      f"{config['stream']['prompt']}, and new tokens are those of "
      "config.stream.output, config.outputs or config.front_output"
    )
  seconds = simulator.now() - served[0].arrival_s
  counts, load_s = slots.counts, simulator.loaded_s
  least = misses(slots.order, case.num_slots, "belady")
  return dataclasses.asdict(case) | {
    "requests": len(served), "hits": counts.hits,
    "misses": counts.misses, "loads": counts.loads,
    "least": least, "above_least": counts.misses / least - 1,
    "bytes": counts.loads * size, "exposed_s": simulator.exposed_s,
    "load_s": load_s, "hidden": max(0.0, 1 - simulator.exposed_s / load_s),
    "seconds": seconds, "busy": simulator.busy_s / seconds,
    **_latency_statistics(served),
  }


def _latency_statistics(served: list[Request]) -> dict[str, float]:
  """Returns percentiles of latencies in seconds, and fairness of experts."""
  ttft = np.array([request.ttft_s for request in served])
  whole = np.array([request.end_s - request.arrival_s for request in served])
  names = [request.expert for request in served]
  _, which = np.unique(names, return_inverse=True)
  means = np.bincount(which, ttft) / np.bincount(which)
  return {
    "ttft_p50_s": float(np.percentile(ttft, 50)),
    "ttft_p99_s": float(np.percentile(ttft, 99)),
    "ttft_worst_s": float(ttft.max()),
    "latency_p50_s": float(np.percentile(whole, 50)),
    "latency_p99_s": float(np.percentile(whole, 99)),
    "jain": tails.jain(means),
  }


def mark_front(rows: list[dict[str, Any]]) -> None:
  """Sets "best" of each row: whether it is Pareto-optimal.

  The criteria are the number of weight loads and the worst TTFT.
  """
  for row in rows:
    row["best"] = not any(
      other["loads"] <= row["loads"]
      and other["ttft_worst_s"] <= row["ttft_worst_s"]
      and (other["loads"], other["ttft_worst_s"])
      != (row["loads"], row["ttft_worst_s"])
      for other in rows
    )
