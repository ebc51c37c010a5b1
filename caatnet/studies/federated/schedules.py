"""Comparison of scheduled uplinks with uplinks that share a cell.

`compare_schedules` schedules uplinks of a few clients with ready times and
maximum rates (`caatnet.federated.uplinks`). `simulate_rounds` simulates whole
rounds in which the server lets a limited number of clients receive and send at
the same time.
"""

from collections.abc import Mapping
import statistics
from typing import Any

from caatnet.federated import predict, uplinks
from caatnet.federated.uplinks import Uplink
from caatnet.studies.federated import rounds
from parallel.plans.hardware import client_links as records


def compare_schedules(config: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Compares end times of uplinks: shared, with best priorities, and optimal.

  Args:
    config: Config like configs/federated/links.py, as nested dicts. The
      prediction is for the published model in the cell ``config.cell``.

  Returns:
    A row for each pair of ``config.apart`` (intervals between the times at
    which updates are ready) and ``config.limits`` (maximum rates of every
    second client), with the seconds until all uplinks end. "by_deadline" has
    the number of uplinks that end within a fraction ``config.deadline`` of the
    time with sharing.
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
      shared = uplinks.fair_sharing_ends_s(each, capacity)
      best, groups = uplinks.best_groups(each, capacity)
      deadline_s = config["deadline"] * max(shared)
      serial = uplinks.group_priority_ends_s(
        each, capacity, [[k] for k in range(num)]
      )
      found.append({
        "apart": apart, "limit": limit, "shared_s": max(shared),
        "order_s": best, "groups": [list(group) for group in groups],
        "earliest_s": uplinks.earliest_schedule(each, capacity).end_s,
        "mean_shared_s": statistics.mean(shared),
        "mean_serial_s": statistics.mean(serial),
        "by_deadline": {
          "shared": sum(end <= deadline_s for end in shared),
          "serial": sum(end <= deadline_s for end in serial),
          "most": len(
            uplinks.select_on_time_clients(each, capacity, deadline_s)
          ),
        },
      })
  return found


def simulate_rounds(config: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns simulated rounds by the number of concurrent transfers.

  Round trips, slow start and the messages that grant an uplink are included.

  Returns:
    Rows by policy for stragglers: "wait", or "drop" at a deadline by which few
    uplinks are complete with sharing. "downlinks" and "uplinks" are the largest
    numbers of clients that receive and send at the same time, 0 for all.
  """
  num = max(config["clients"])
  links = records.assign_links((config["cell"],), num)
  size = 4 * config["published_parameters"]
  found = []
  for stragglers in ("wait", "drop"):
    for downlinks, uplinks_ in config["at_once"]:
      run = predict.simulate_run(
        rounds.make_server_rules(
          num, stragglers=stragglers, deadline_s=_deadline_s(config, num),
          rounds=4, downlinks_at_once=downlinks, uplinks_at_once=uplinks_
        ),
        links,
        predict.MessageSizes(size, size),
        rounds.client_compute_times(config, num),
        config["fixed_s"],
      )
      # Uses the last round, since the server orders clients by the compute
      # times of earlier rounds.
      end = rounds.round_end_events(run)[-1]
      rows = [row for row in run.rows if row["round"] == end.round]
      found.append({
        "stragglers": stragglers, "downlinks": downlinks, "uplinks": uplinks_,
        "round_s": end.duration_s, "merged": len(end.merged),
        "t_u": statistics.mean(row["t_u"] for row in rows) if rows else None,
      })
  return found


def _deadline_s(config: Mapping[str, Any], clients: int) -> float:
  """Returns ``config.deadline`` times a round's seconds in a shared cell."""
  size = 4 * config["published_parameters"]
  usual = rounds.predict_round(config, config["cell"], clients, size)
  return config["deadline"] * usual["round_s"]
