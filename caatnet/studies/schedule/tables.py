"""Prints tables of one schedule."""

from collections.abc import Mapping
from typing import Any

from caatnet.show import tables
from caatnet.show.tables import size_text


def show(result: Mapping[str, Any]) -> None:
  """Prints times and the busiest links.

  Args:
    result: What `caatnet.studies.schedule.study.run` returned.
  """
  tables.table(
    f"{result['collective']} by {result['algorithm']} on {result['topology']}"
    f", {size_text(result['size_bytes'])}\n{result['num_rounds']} rounds, "
    f"{result['num_transfers']} transfers; links send "
    f"{result['mean_utilisation']:.1%} of the time (predicted, not measured)",
    ["model", "us"],
    [
      ["events: starts when its chunk is there", f"{result['events_us']:,.3f}"],
      ["events, a barrier after each round", f"{result['barrier_us']:,.3f}"],
      ["lockstep: alpha-beta, cut-through", f"{result['lockstep_us']:,.3f}"],
      ["lower bound of events", f"{result['lower_bound_us']:,.3f}"],
    ],
  )
  links = result["links"]
  tables.table(
    f"the {min(8, len(links))} busiest of {len(links)} links",
    ["link", "bytes", "busy", "waiting us", "longest queue"],
    [
      [
        f"{x['source']} -> {x['destination']}", f"{x['bytes']:,}",
        f"{x['utilisation']:.1%}", f"{x['waiting_us']:,.1f}",
        str(x["longest_queue"]),
      ]
      for x in links[:8]
    ],
  )
