"""Scheduled uplinks against sharing: ends of rounds, and updates by a deadline.

A few clients with ready times, sizes and limits (`caatnet.federated.uplinks`),
and whole rounds of the simulator, in which the cell serves uplinks in the order
in which they begin.
"""

from collections.abc import Mapping
import itertools
import statistics
from typing import Any

from caatnet.federated import links as records
from caatnet.federated import predict, sampling, uplinks
from caatnet.federated.uplinks import Uplink
from caatnet.studies.federated import rounds
from parallel.network import fluid

_DISCIPLINES = {"shared": fluid.max_min, "in order": fluid.in_order}


def cases(config: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns ends of sharing, of the best order of groups, and of the optimum.

  Args:
    config: Config like configs/federated/links.py, as nested dicts. The cell
      and the model are those of ``config.cell`` and the published model.

  Returns:
    Rows by spread of ready times (of the time that all uplinks take) and by
    limit (the largest rate of every second client, as a share of the cell).
    "by_deadline": updates that are complete when ``config.deadline`` of the
    time of sharing has passed.
  """
  capacity = predict.DATA_SHARE * records.link(config["cell"]).up
  size, num = 4 * config["published_parameters"], config["scheduled_clients"]
  found = []
  for apart in config["apart"]:
    for limit in config["limits"]:
      each = [
        Uplink(
          apart * k * size / capacity, size, limit * capacity if k % 2 else
          capacity,
        )
        for k in range(num)
      ]
      shared = uplinks.shared_s(each, capacity)
      best, groups = uplinks.best_groups(each, capacity)
      deadline_s = config["deadline"] * max(shared)
      serial = uplinks.grouped_s(each, capacity, [[k] for k in range(num)])
      found.append({
        "apart": apart, "limit": limit, "shared_s": max(shared),
        "order_s": best, "groups": [list(group) for group in groups],
        "earliest_s": uplinks.earliest(each, capacity).end_s,
        "mean_shared_s": statistics.mean(shared),
        "mean_serial_s": statistics.mean(serial),
        "by_deadline": {
          "shared": sum(end <= deadline_s for end in shared),
          "serial": sum(end <= deadline_s for end in serial),
          "most": len(uplinks.most_updates(each, capacity, deadline_s)),
        },
      })
  return found


def simulated(config: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns simulated rounds with shared and with ordered transfers.

  Ordered transfers leave later ones what they do not use; the downlink of the
  client that computes longest is the first. Round trips and slow
  start are included. Messages that grant an uplink are not: a real schedule
  adds half a round trip for each.

  Returns:
    Rows by policy for stragglers: "wait", or "drop" at a deadline, at which
    sharing completes few uplinks.
  """
  num = max(config["clients"])
  links = records.of_clients((config["cell"],), num)
  size = 4 * config["published_parameters"]
  # The order of downlinks is that of the sample: the longest compute first.
  times = rounds.compute(config, num)
  longest = sorted(times, key=lambda each: -each["t_tr"])
  sampled = sampling.sample(
    dict.fromkeys(range(num), 1.0), num, "uniform", seed=0, round=0
  )
  for client, each in zip(sampled, longest, strict=True):
    times[client] = each
  found = []
  for stragglers in ("wait", "drop"):
    for (down_name, down), (up_name, up) in itertools.product(
      _DISCIPLINES.items(), repeat=2
    ):
      run = predict.simulated(
        rounds.rules(
          num, stragglers=stragglers, deadline_s=_deadline_s(config, num),
          rounds=1,
        ), links, predict.Bytes(size, size), times, config["fixed_s"],
        down=down, up=up,
      )
      ends = rounds.ended(run)
      found.append({
        "stragglers": stragglers, "downlinks": down_name,
        "uplinks": up_name,
        "round_s": ends[0].duration_s, "merged": len(ends[0].merged),
        "mean_u": statistics.mean(row["t_u"] for row in run.rows)
        if run.rows else None,
      })
  return found


def _deadline_s(config: Mapping[str, Any], clients: int) -> float:
  """Returns ``config.deadline`` of a round with sharing, without t_a."""
  size = 4 * config["published_parameters"]
  usual = rounds.row(config, config["cell"], clients, size)
  return config["deadline"] * (usual["round_s"] - config["aggregation_s"])
