"""Report of the study of federated rounds over links."""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

from caatnet.studies.federated import figures
from parallel.base import labels, plot
from parallel.base.report import Report, Table

Row = Mapping[str, Any]

_MBIT = "125e3:,.3g"  # unit and format of bytes per second


def report(result: Row) -> Report:
  """Returns tables of rounds, of the testbed and of schedules, and a figure."""
  return Report(
    "Federated rounds over links",
    [*_rounds(result), *_published(result), *_radio_cell_tables(result)],
    functools.partial(_figure, result),
  )


def _rounds(result: Row) -> list[Table]:
  """Returns tables of the links, and of rounds by link, model and clients."""
  if not result["rounds"]:
    return []
  compute_s = sum(
    result[key] for key in ("training_s", "validation_s", "test_s")
  )
  return [
    Table(
      "links, Mbit/s; shared by all clients: a radio cell",
      f"name=link | down/{_MBIT} | up/{_MBIT} | rtt_s=round trip | "
      "spread:.0% | shared | source", result["links"],
    ),
    Table(
      f"predicted rounds, seconds: compute {compute_s:g} s (spread "
      f"{result['compute_spread']:.0%}), aggregation "
      f"{result['aggregation_s']:g} s and {result['fixed_s']:g} s per message "
      "(assumed);\nmodels and updates in float32; medians of clients, shares "
      "are means; straggler: slowest minus median client",
      "link | model_bytes | clients | round_s:,.2f | t_d:,.2f | t_u:,.2f | "
      "share_down:.0%=downlink | share_compute:.0%=compute | "
      "share_up:.0%=uplink | straggler_s:,.2f | "
      "limited_by=slowest client limited by", result["rounds"],
    ),
  ]


def _published(result: Row) -> list[Table | str]:
  """Returns tables of the testbed's published ratios: predictions and fits."""
  return [
    Table(
      f"uplinks of {result['published_clients']} clients, "
      f"{result['published_parameters']:,} parameters in float32; published "
      f"(arXiv 2504.04678): {figures.UPLINK_RATIO_ETHERNET} and "
      f"{figures.UPLINK_RATIO_WIFI} "
      f"times, {figures.UPLINK_SHARE:.0%} of a round\ncompute: time that gives "
      "this share (fitted)",
      "link | t_u:,.2f=uplink (s) | over_ethernet:,.1f=of Ethernet | "
      "over_wifi:,.1f=of WiFi | share_up:.1%=of a round | "
      "straggler_s:,.2f=straggler (s) | "
      "ethernet_straggler_s:,.2f=with Ethernet | "
      f"rate/{_MBIT}=Mbit/s per client | compute_s:,.1f=compute (s)",
      result["ratios"],
    ),
    Table(
      "fixed time of a message and rate of a client on 5G that give both "
      "published ratios (fitted), by the rate of WiFi",
      f"wifi/{_MBIT}=WiFi, Mbit/s | fixed_s=fixed time | "
      f"rate/{_MBIT}=5G, Mbit/s per client | uplink_s | "
      "round_s=round at the published share",
      result["region"]["points"],
    ),
    f"one client is the slowest in {result['consistent']:.0%} of "
    f"{result['trial_rounds']} rounds (our definition) in "
    f"{figures.CONSISTENT_TRIAL_SHARE:.0%} of trials, as published, if times "
    "deviate "
    "so many times as much between clients as between rounds (fitted): "
    + ", ".join(
      f"{labels.text(row['ratio'])} ({row['clients']} clients)"
      for row in result["fitted_ratios"]
    ),
  ]


def _radio_cell_tables(result: Row) -> list[Table]:
  """Returns tables of scheduled transfers, and of variants of updates."""
  clients = f"{result['most_clients']} clients in the cell {result['cell']}"
  return [
    Table(
      f"uplinks in the cell {result['cell']}: end in seconds by sharing, by "
      "the best priorities of groups and of all schedules;\nready: time "
      "between clients, in uplinks that have the cell alone; limit: largest "
      "rate of every second client, of the cell;\ncomplete: updates by "
      f"{result['deadline']:.0%} of the time of sharing: by sharing, in order, "
      "at most",
      "apart:g=ready | limit:g | shared_s:.3f | order_s:.3f=groups | "
      "earliest_s:.3f | mean_shared_s:.3f=mean end, shared | "
      "mean_serial_s:.3f=mean end, in order | {by_deadline[shared]}, "
      "{by_deadline[serial]}, {by_deadline[most]}=complete",
      result["schedules"],
    ),
    Table(
      f"{clients}, simulated with slow start and messages, by the clients that "
      "receive and send at once (0: all);\ndrop: without the updates that "
      f"miss {result['deadline']:.0%} of the time of a round with sharing",
      "stragglers | downlinks=downlinks at once | uplinks=uplinks at once | "
      "round_s:.2f=round (s) | merged=updates | t_u:.2f=mean t_u (s)",
      result["ordered"],
    ),
    Table(
      f"{clients}, one of which computes {result['slow']:g} times as long; "
      "predicted times and MB per client and round;\nrelative: time of a round "
      "with float32 that waits = 1; streamed under the compute: not in "
      "launch.federate",
      "variant | stragglers | bytes_up/1e6:,.3f=MB up | "
      "bytes_down/1e6:,.3f=MB down | round_s:.2f=round (s) | relative:.2f | "
      "merged:.1f=updates per round", result["variants"],
    ),
  ]


def _figure(result: Row) -> plot.Figure:
  """Plots each phase's fraction of a round, and fits to published ratios."""
  panels = [_region(result)]
  rows = result["rounds"]
  if rows:
    clients = max(row["clients"] for row in rows)
    # Shows the model whose size is nearest to that of the testbed's model.
    size = min(
      (row["model_bytes"] for row in rows),
      key=lambda s: abs(s - 4 * result["published_parameters"]),
    )
    panels += plot.stacked_bar_panels(
      [row for row in rows
       if (row["model_bytes"], row["clients"]) == (size, clients)],
      "link", {"downlink": "share_down", "compute": "share_compute",
               "uplink": "share_up"},
      label="mean share of a round",
      title=f"{clients} clients, {size / 1e6:.2f} MB",
    )
  return plot.figure(panels)


def _region(result: Row) -> plot.Panel:
  """Plots the fixed times and 5G rates that give the published ratios."""
  found = result["region"]
  (panel,) = plot.lines(
    found["points"], "rate/125e3=rate of a client on 5G, Mbit/s",
    "fixed_s=both ratios (fitted)", log="x",
    title=f"uplinks of 5G: {figures.UPLINK_RATIO_ETHERNET} times Ethernet, "
    f"{figures.UPLINK_RATIO_WIFI} times WiFi, within {result['tolerance']:.0%}",
  )
  inside = [i for i, low in enumerate(found["low"]) if low is not None]
  ours = result["ratios"]
  panel.marks.extend((
    plot.Band(
      [found["rates"][i] / 125e3 for i in inside],
      [max(1e-3, found["low"][i]) for i in inside],
      [found["high"][i] for i in inside], "C0",
    ),
    plot.Line(
      [row["rate"] / 125e3 for row in ours], [result["fixed_s"]] * len(ours),
      "our links, and our fixed time", "", "x", "black",
      texts=plot.Texts(
        [row["link"].removeprefix("5g-") for row in ours], offset=(0, 6),
        align=("center", "bottom"), rotation=90.0,
      ),
    ),
  ))
  return dataclasses.replace(
    panel, y=plot.Axis("fixed time of a message, s", "log")
  )
