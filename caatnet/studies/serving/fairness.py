"""Cost of fairness between clients whose demand exceeds a server's capacity.

Service is measured by virtual token counters (VTC, Sheng et al., OSDI 2024): a
prompt token counts w_p = 1, unless it is found in the cache, and a generated
token w_q = 2. Two clients are compared over windows in which both have queued
requests. VTC bounds their difference in service by 2 max(w_p L, w_q M), with L
tokens in the longest prompt and M tokens in the fullest batch.
"""

from collections.abc import Mapping, Sequence
import itertools
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from caatnet.serving.requests import Request
from caatnet.serving.scheduler.policies.registry import POLICIES
from caatnet.serving.traces import Arrival
from caatnet.studies.serving import server, tails
from parallel.base.checks import known

INPUT_COST, OUTPUT_COST = 1.0, 2.0
# Number of points of the curves of service over time.
_POINTS = 200

# Number of a request -> name and priority of its client.
ClientByRequest = dict[int, tuple[str, float]]


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Serves the same clients with each policy.

  Args:
    config: Config like configs/serving/fairness.py, as nested dicts.

  Returns:
    Plain data: "bound", and in "rows" for each policy its throughput, the
    largest difference of service, Jain's index, and each client's latency
    percentiles.

  Raises:
    ValueError: A policy or machine is unknown, fewer than two clients are
      backlogged, or no request of a client fits into the cache.
  """
  compared = [n for n, part in config["clients"].items() if part["backlogged"]]
  if len(compared) < 2:
    raise ValueError(
      "config.clients must have at least two clients with backlogged=True, "
      f"which are compared, but has {', '.join(compared) or 'none'}"
    )
  for name in config["policies"]:
    known("config.policies: ", name, POLICIES)
  machine = server.machine(config["model"], config["hardware"])
  arrivals, clients = draw_arrivals(config["clients"], config["seed"])
  # M: the fullest batch is limited by the cache or by the slots.
  longest = max(a.prompt + a.output for a in arrivals)
  batch = min(machine.tokens, config["limits"]["slots"] * longest)
  rows = []
  for name in track(
    config["policies"], "simulating", transient=True,
    console=Console(stderr=True),
  ):
    outcome = server.serve(
      machine, config["arm"], arrivals, config["limits"], {"kind": "none"},
      name, clients,
    )
    _check_served(outcome, config["clients"], machine)
    rows.append(
      {"policy": name, **_summarise_outcome(outcome, config["clients"])}
    )
  return {
    "clients": {k: dict(v) for k, v in config["clients"].items()},
    "limits": dict(config["limits"]), "pages": machine.pages,
    "hardware": dict(config["hardware"]),
    "bound": 2 * max(
      INPUT_COST * max(a.prompt for a in arrivals), OUTPUT_COST * batch
    ),
    "batch": batch,
    "rows": rows,
  }


def draw_arrivals(
  sections: Mapping[str, Mapping[str, Any]], seed: int
) -> tuple[list[Arrival], ClientByRequest]:
  """Draws the clients' requests.

  Lengths are uniform between half and three halves of the mean. All prompts of
  a client begin with the same tokens, whose number is "shared".

  Args:
    sections: Client name -> its section of ``config.clients``.
    seed: Seed of the random generator.

  Returns:
    Requests in the order of arrival, and the client of each of them.
  """
  rng = np.random.default_rng(seed)
  drawn: list[tuple[float, str, int, int]] = []
  for name, part in sections.items():
    count, rate = part["requests"], part["rate"]
    times = rng.exponential(1 / rate, count).cumsum() if rate else [0.0] * count
    own = [
      np.maximum(1, rng.uniform(0.5, 1.5, count) * part[key]).astype(int)
      for key in ("prompt", "output")
    ]
    drawn += [
      (float(t), name, int(n), int(m))
      for t, n, m in zip(times, *own, strict=True)
    ]
  # Requests with equal arrival times alternate between clients.
  order = sorted(
    rng.permutation(len(drawn)).tolist(), key=lambda i: drawn[i][0]
  )
  arrivals, clients = [], {}
  names = list(sections)
  for number, (time_s, name, prompt, output) in enumerate(
    drawn[i] for i in order
  ):
    size = sections[name]["shared"]
    # Equal block numbers stand for equal tokens: the first block is the
    # client's common prefix, the others are unique.
    blocks = (names.index(name),) + tuple(
      len(names) + number * 1000 + i for i in range(-(-prompt // size))
    )
    arrivals.append(Arrival(
      number, time_s, size + prompt, output, blocks=blocks, block_size=size
    ))
    clients[number] = name, float(sections[name]["priority"])
  return arrivals, clients


def _check_served(
  outcome: server.Outcome, sections: Mapping[str, Mapping[str, Any]],
  machine: server.Machine,
) -> None:
  """Raises ValueError if all requests of a client have been rejected."""
  for name in sections.keys() - {r.client for r in outcome.served}:
    sizes = " ".join(
      f"config.clients.{name}.{key}={sections[name][key]}"
      for key in ("shared", "prompt", "output")
    )
    raise ValueError(
      f"{sizes}: each request must fit into the {machine.tokens} tokens of the "
      f"cache; raise config.hardware.pages={machine.pages}"
    )


def _summarise_outcome(
  outcome: server.Outcome, sections: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
  by: dict[str, list[Request]] = {name: [] for name in sections}
  for request in outcome.served:
    by[str(request.client)].append(request)
  greedy = [name for name, part in sections.items() if part["backlogged"]]
  lines = {name: queue_length_curve(by[name]) for name in greedy}
  services = {name: service_curve(by[name]) for name in by}
  pairs = list(itertools.combinations(greedy, 2))
  both = {
    pair: max_service_difference(
      *(services[n] for n in pair), *(lines[n] for n in pair)
    )
    for pair in pairs
  }
  # Curves end as soon as the queue of one of the compared clients is empty.
  end = min(max(r.scheduled_s for r in by[n]) for n in greedy)
  grid = np.linspace(0, end, _POINTS)
  curves = {name: evaluate_curve(services[name], grid).tolist() for name in by}
  got = np.array([curves[name][-1] for name in greedy])  # service until `end`
  drawn = sum(len(r.tokens) for r in outcome.served)
  return {
    "throughput": drawn / outcome.seconds,
    "busy": outcome.busy_s / outcome.seconds,
    "found": sum(r.num_hits for r in outcome.served),
    "largest": max(both.values()),
    "pair": list(max(both, key=lambda pair: both[pair])),
    "jain": tails.jain(got),
    "grid": grid.tolist(),
    "service": curves,
    "ttft": {
      n: tails.summary([np.array([r.ttft_s]) for r in v])
      for n, v in by.items()
    },
    "tbt": {n: tails.summary([r.gaps_s for r in v]) for n, v in by.items()},
    "all_ttft": tails.summary([np.array([r.ttft_s]) for r in outcome.served]),
    "all_tbt": tails.summary([r.gaps_s for r in outcome.served]),
  }


# Step function: ascending times in seconds, and the value from each time on.
Curve = tuple[np.ndarray, np.ndarray]


def service_curve(requests: Sequence[Request]) -> Curve:
  """Returns a client's service up to each time, in weighted tokens."""
  events = [
    (r.scheduled_s, INPUT_COST * (len(r.prompt) - r.num_hits))
    for r in requests
  ]
  events += [(t, OUTPUT_COST) for r in requests for t in r.token_times]
  return _summed(events)


def queue_length_curve(requests: Sequence[Request]) -> Curve:
  """Returns a client's number of queued requests after each time."""
  events = [(r.arrival_s, 1.0) for r in requests]
  return _summed(events + [(r.scheduled_s, -1.0) for r in requests])


def _summed(events: Sequence[tuple[float | None, float]]) -> Curve:
  times, amounts = np.array(sorted(events), float).T
  # Keeps the value after the last of several events at one time.
  last = np.append(times[1:] != times[:-1], True)
  return times[last], amounts.cumsum()[last]


def evaluate_curve(curve: Curve, times: np.ndarray) -> np.ndarray:
  """Returns the values of a step function at times; 0 before its first step."""
  # Index 0 is the zero that is prepended below, before the first step.
  places = np.searchsorted(curve[0], times, side="right")
  return np.concatenate([[0.0], curve[1]])[places]


def max_service_difference(
  first: Curve, second: Curve, line_1: Curve, line_2: Curve
) -> float:
  """Returns the largest difference in service while both clients have a queue.

  Over a window, the services of the clients differ by the change of first -
  second. So the largest difference over windows in an interval in which both
  queue lengths (line_1, line_2) are positive is the range of first - second.
  """
  times = np.unique(np.concatenate([c[0] for c in (first, second, line_1,
                                                   line_2)]))
  ahead = evaluate_curve(first, times) - evaluate_curve(second, times)
  backlogged = (evaluate_curve(line_1, times) > 0) & (
    evaluate_curve(line_2, times) > 0
  )
  largest = 0.0
  # Starts and ends of the intervals with a common backlog, alternating.
  edges = np.flatnonzero(np.diff(np.r_[0, backlogged.astype(int), 0]))
  for start, stop in edges.reshape(-1, 2).tolist():
    part = ahead[start:stop]
    largest = max(largest, float(part.max() - part.min()))
  return largest
