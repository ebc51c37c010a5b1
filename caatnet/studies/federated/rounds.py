"""Predicted rounds by link, number of clients and model size.

Compute times come from the config and do not depend on the model, so its size
changes communication only. Compute times and, without a shared cell, the rates
of clients are quantiles of normal distributions.
"""

from collections.abc import Mapping, Sequence
import statistics
from typing import Any

import numpy as np

from caatnet.federated import events, predict, simulate
from caatnet.federated.server import Rules
from parallel.plans.hardware import client_links as records
from parallel.plans.hardware.client_links import Link

PHASES = ("t_d", "t_v", "t_tr", "t_te", "t_u")


def make_server_rules(clients: int, **changes: Any) -> Rules:
  """Returns server rules for rounds in which all clients take part."""
  return Rules(**{
    "clients": clients, "per_round": clients, "rounds": 2, "digest": "",
    "seed": 0, "sampling": "uniform", "weights": "equal", "stragglers": "wait",
    "deadline_s": 60.0, "reconnect_s": 10.0, "patience": 0, "min_gain": 0.0,
    **changes,
  })


def client_compute_times(config: Mapping[str, Any], clients: int) -> list[
  dict[str, float]
]:
  """Returns the compute times of each client, in seconds.

  The clients' rates ascend; compute times are shuffled, so that they are
  independent of the rates.

  Args:
    config: Config like configs/federated/links.py, as nested dicts.
    clients: Number of clients.
  """
  factors = records.normal_rate_factors(clients, config["compute_spread"])
  order = np.random.RandomState(config["seed"]).permutation(clients)
  return [
    {
      "t_a": config["aggregation_s"],
      "t_v": factors[place] * config["validation_s"],
      "t_tr": factors[place] * config["training_s"],
      "t_te": factors[place] * config["test_s"],
    }
    for place in order.tolist()
  ]


def predict_rounds(config: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns a `predict_round` for each link, number of clients and model size.

  Args:
    config: Config like configs/federated/links.py, as nested dicts.

  Raises:
    ValueError: A link is unknown.
  """
  return [
    predict_round(config, name, clients, 4 * parameters)
    for name in config["links"] for parameters in config["parameters"]
    for clients in config["clients"]
  ]


def predict_round(
  config: Mapping[str, Any], name: str, clients: int, model_bytes: int
) -> dict[str, Any]:
  """Returns the times of a round, and what limits its slowest client.

  Args:
    config: Config like configs/federated/links.py, as nested dicts.
    name: Name of a link.
    clients: Number of clients.
    model_bytes: Bytes of a model, and of an update.

  Returns:
    Seconds of each phase, as medians over clients; "round_s", the aggregation
    plus the slowest client's time; "straggler_s", that time minus the median
    client's; "parts", the seconds by cause; "share_down", "share_compute" and
    "share_up", mean fractions of "round_s".
  """
  links = records.assign_links((name,), clients)
  times = client_compute_times(config, clients)
  run = predict.simulate_run(
    make_server_rules(clients), links,
    predict.MessageSizes(model_bytes, model_bytes), times, config["fixed_s"],
  )
  rows = last_round(run)
  totals = [sum(each[name] for name in PHASES) for each in rows]
  slowest = rows[int(np.argmax(totals))]
  medians = {
    name: statistics.median(each[name] for each in rows) for name in PHASES
  }
  round_s = config["aggregation_s"] + max(totals)
  parts = _seconds_by_cause(
    config, slowest, links[slowest["client"]], model_bytes
  )
  return {
    "link": name, "clients": clients, "model_bytes": model_bytes, **medians,
    "t_a": config["aggregation_s"], "round_s": round_s,
    "share_down": statistics.mean(r["t_d"] for r in rows) / round_s,
    "share_compute": statistics.mean(
      r["t_v"] + r["t_tr"] + r["t_te"] for r in rows
    ) / round_s,
    "share_up": statistics.mean(r["t_u"] for r in rows) / round_s,
    "straggler_s": max(totals) - statistics.median(totals),
    "parts": parts, "limited_by": max(parts, key=parts.__getitem__),
  }


def round_end_events(run: simulate.Simulation) -> list[events.RoundEnded]:
  """Returns the events at which the rounds of a simulation ended."""
  return [e for _, e in run.effects if isinstance(e, events.RoundEnded)]


def last_round(run: simulate.Simulation) -> Sequence[Mapping[str, Any]]:
  """Returns the records of a simulation's last round, one per client."""
  last = max(each["round"] for each in run.rows)
  return [each for each in run.rows if each["round"] == last]


def _seconds_by_cause(
  config: Mapping[str, Any], slowest: Mapping[str, Any], link: Link,
  model_bytes: int,
) -> dict[str, float]:
  """Returns the seconds of a round by cause, for its slowest client.

  `slowest` is the client's record of the simulated round, `link` its link.
  Causes are compute, bytes at the client's own rate, other clients of its cell,
  round trips (slow start), fixed times of messages, and aggregation.
  """
  # Times of the same transfers if the client were alone in its cell.
  (alone,) = predict.predict(
    make_server_rules(1), [link],
    predict.MessageSizes(model_bytes, model_bytes), {},
    config["fixed_s"], rounds=1,
  )
  fixed_s = 2 * config["fixed_s"]
  rate_s = (
    alone["bytes_down"] / link.down + alone["bytes_up"] / link.up
  ) / predict.DATA_SHARE
  alone_s = alone["t_d"] + alone["t_u"]
  return {
    "compute": slowest["t_v"] + slowest["t_tr"] + slowest["t_te"],
    "rate of the client": rate_s,
    "sharing the cell": slowest["t_d"] + slowest["t_u"] - alone_s,
    "round trips": alone_s - rate_s - fixed_s,
    "fixed times": fixed_s,
    "aggregation": config["aggregation_s"],
  }
