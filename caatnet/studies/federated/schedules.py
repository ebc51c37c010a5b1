"""Scheduled uplinks against sharing: ends of rounds, and updates by a deadline.

A few clients with ready times, sizes and limits (`caatnet.federated.uplinks`),
and whole rounds of the simulator, in which the server lets few clients receive
and send at a time.
"""

from collections.abc import Mapping
import statistics
from typing import Any

from caatnet.federated import predict, uplinks
from caatnet.federated.uplinks import Uplink
from caatnet.studies.federated import rounds
from parallel.plans.hardware import client_links as records


def cases(config: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns ends of sharing, of the best order of groups, and of the optimum.

  Args:
    config: Config like configs/federated/links.py, as nested dicts. The
      prediction is for the published model in the cell ``config.cell``.

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
  """Returns simulated rounds by the number of clients that transfer at once.

  Round trips, slow start and the messages that grant an uplink are included.

  Returns:
    Rows by policy for stragglers: "wait", or "drop" at a deadline, at which
    sharing completes few uplinks; "downlinks" and "uplinks" are clients at
    once, 0 for all.
  """
  num = max(config["clients"])
  links = records.of_clients((config["cell"],), num)
  size = 4 * config["published_parameters"]
  found = []
  for stragglers in ("wait", "drop"):
    for downlinks, uplinks_ in config["at_once"]:
      run = predict.simulated(
        rounds.rules(
          num, stragglers=stragglers, deadline_s=_deadline_s(config, num),
          rounds=4, downlinks_at_once=downlinks, uplinks_at_once=uplinks_,
        ), links, predict.Bytes(size, size), rounds.compute(config, num),
        config["fixed_s"],
      )
      # In the first round the server has no compute times yet.
      end = rounds.ended(run)[-1]
      rows = [row for row in run.rows if row["round"] == end.round]
      found.append({
        "stragglers": stragglers, "downlinks": downlinks, "uplinks": uplinks_,
        "round_s": end.duration_s, "merged": len(end.merged),
        "t_u": statistics.mean(row["t_u"] for row in rows) if rows else None,
      })
  return found


def _deadline_s(config: Mapping[str, Any], clients: int) -> float:
  """Returns ``config.deadline`` of the time of a round with sharing."""
  size = 4 * config["published_parameters"]
  usual = rounds.row(config, config["cell"], clients, size)
  return config["deadline"] * usual["round_s"]
