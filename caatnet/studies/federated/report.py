"""Report of the study of federated rounds over links."""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

from caatnet.studies.federated import figures
from parallel.base import plot
from parallel.base.report import Column, Report, Table, yes_no

Row = Mapping[str, Any]

_MBIT = 1e6 / 8


def report(result: Row) -> Report:
  """Returns tables of rounds, of the testbed and of schedules, and a figure."""
  return Report(
    "Federated rounds over links",
    [
      *(_rounds(result) if result["rounds"] else ()),
      *_published(result),
      *(_schedules(result) if result["schedules"] else ()),
      *(_variants(result) if result["variants"] else ()),
    ],
    functools.partial(_figure, result),
  )


def _mbit(value: float) -> str:
  """Formats bytes per second as Mbit/s."""
  return f"{value / _MBIT:,.3g}"


def _rounds(result: Row) -> list[Table | str]:
  """Returns the links, and rounds by link, model and clients."""
  compute_s = sum(
    result[key] for key in ("training_s", "validation_s", "test_s")
  )
  return [
    Table(
      "links, Mbit/s and ms; shared by all clients: a radio cell",
      [
        Column("name", "link"), Column("down", "down", _mbit),
        Column("up", "up", _mbit),
        Column("rtt_s", "round trip", "g", unit=1e-3),
        Column("spread", "spread", ".0%"), Column("shared", "shared", yes_no),
        Column("source", "source"),
      ],
      result["links"],
    ),
    Table(
      f"predicted rounds, seconds: compute {compute_s:g} s (spread "
      f"{result['compute_spread']:.0%}), aggregation "
      f"{result['aggregation_s']:g} s and {result['fixed_s']:g} s per message "
      "(assumed);\nmodels and updates in float32; medians of clients, shares "
      "are means; straggler: slowest minus median client",
      [
        Column("link", "link"),
        Column("model_bytes", "model\nMB", ",.2f", unit=1e6),
        Column("clients", "clients"), Column("round_s", "round", ",.2f"),
        Column("t_d", "t_d", ",.2f"), Column("t_u", "t_u", ",.2f"),
        Column("share_down", "downlink", ".0%"),
        Column("share_compute", "compute", ".0%"),
        Column("share_up", "uplink", ".0%"),
        Column("straggler_s", "straggler", ",.2f"),
        Column("limited_by", "slowest client\nlimited by"),
      ],
      result["rounds"],
    ),
  ]


def _published(result: Row) -> list[Table | str]:
  """Returns what the links give for the testbed's figures, and the region."""
  return [
    Table(
      f"uplinks of {result['published_clients']} clients, "
      f"{result['published_parameters']:,} parameters in float32; published "
      f"(arXiv 2504.04678): {figures.OVER_ETHERNET} and {figures.OVER_WIFI} "
      f"times, {figures.UPLINK_SHARE:.0%} of a round\ncompute: time that gives "
      "this share (fitted)",
      [
        Column("link", "link"), Column("t_u", "uplink\n(s)", ",.2f"),
        Column("over_ethernet", "of\nEthernet", ",.1f"),
        Column("over_wifi", "of\nWiFi", ",.1f"),
        Column("share_up", "of a\nround", ".1%"),
        Column("straggler_s", "straggler\n(s)", ",.2f"),
        Column("ethernet_straggler_s", "with\nEthernet", ",.2f"),
        Column("rate", "Mbit/s\nper client", _mbit),
        Column("compute_s", "compute\n(s)", ",.1f"),
      ],
      result["ratios"],
    ),
    Table(
      "fixed time of a message and rate of a client on 5G that give both "
      "published ratios (fitted), by the rate of WiFi",
      [
        Column("wifi", "WiFi\nMbit/s", _mbit),
        Column("fixed_s", "fixed time\n(s)", ".3f"),
        Column("rate", "5G, Mbit/s\nper client", _mbit),
        Column("uplink_s", "uplink\n(s)", ",.1f"),
        Column("round_s", "round at the\npublished share (s)", ",.1f"),
      ],
      result["region"]["points"],
    ),
    f"one client is the slowest in {result['consistent']:.0%} of "
    f"{result['trial_rounds']} rounds (our definition) in "
    f"{figures.CONSISTENT:.0%} of trials, as published, if times deviate "
    "between clients by "
    + ", ".join(
      f"{'?' if row['ratio'] is None else format(row['ratio'], '.1f')} "
      f"({row['clients']} clients)"
      for row in result["fitted_ratios"]
    ) + " times as much as between rounds (fitted)",
  ]


def _schedules(result: Row) -> list[Table | str]:
  """Returns scheduled transfers against sharing."""
  return [
    Table(
      f"uplinks in the cell {result['cell']}: end in seconds by sharing, by "
      "the best priorities of groups and of all schedules;\nready: time "
      "between clients, in uplinks that have the cell alone; limit: largest "
      "rate of every second client, of the cell;\ncomplete: updates by "
      f"{result['deadline']:.0%} of the time of sharing: by sharing, in order, "
      "at most",
      [
        Column("apart", "ready", "g"), Column("limit", "limit", "g"),
        Column("shared_s", "shared", ".3f"), Column("order_s", "groups", ".3f"),
        Column("earliest_s", "earliest", ".3f"),
        Column("mean_shared_s", "mean end,\nshared", ".3f"),
        Column("mean_serial_s", "mean end,\nin order", ".3f"),
        Column("", "complete", "{by_deadline[shared]}, {by_deadline[serial]}, "
               "{by_deadline[most]}"),
      ],
      result["schedules"],
    ),
    Table(
      f"{result['most_clients']} clients in the cell {result['cell']}, "
      "simulated with slow start and messages, by the clients that receive and "
      "send at once (0: all);\ndrop: without the updates that miss "
      f"{result['deadline']:.0%} of the time of a round with sharing",
      [
        Column("stragglers", "stragglers"),
        Column("downlinks", "downlinks\nat once"),
        Column("uplinks", "uplinks\nat once"),
        Column("round_s", "round\n(s)", ".2f"),
        Column("merged", "updates"),
        Column("t_u", "mean t_u\n(s)", ".2f", default="-"),
      ],
      result["ordered"],
    ),
  ]


def _variants(result: Row) -> list[Table | str]:
  """Returns coded, late and streamed updates."""
  return [
    Table(
      f"{result['most_clients']} clients in the cell {result['cell']}, "
      f"one of which computes {result['slow']:g} times as long; predicted "
      "times and MB per client and round;\nrelative: time of a round with "
      "float32 that waits = 1; streamed under the compute: not in "
      "launch.federate",
      [
        Column("variant", "variant"), Column("stragglers", "stragglers"),
        Column("bytes_up", "MB up", ",.3f", unit=1e6),
        Column("bytes_down", "MB down", ",.3f", unit=1e6),
        Column("round_s", "round\n(s)", ".2f"),
        Column("relative", "relative", ".2f"),
        Column("merged", "updates\nper round", ".1f"),
      ],
      result["variants"],
    ),
  ]


def _figure(result: Row) -> plot.Figure:
  """Returns shares of phases, and the region of the published ratios."""
  panels = [_region(result)]
  if result["rounds"]:
    panels.insert(0, _shares(result))
  return plot.Figure(panels, (6.5 * len(panels), 5.2), len(panels))


def _shares(result: Row) -> plot.Panel:
  """Returns the phases of a round by link, for the testbed's model."""
  sizes = {row["model_bytes"] for row in result["rounds"]}
  size = min(sizes, key=lambda s: abs(s - 4 * result["published_parameters"]))
  clients = max(row["clients"] for row in result["rounds"])
  rows = [
    row for row in result["rounds"]
    if row["model_bytes"] == size and row["clients"] == clients
  ]
  return plot.Panel(
    plot.stacked({
      name: [row[key] for row in rows] for name, key in (
        ("downlink", "share_down"), ("compute", "share_compute"),
        ("uplink", "share_up"),
      )
    }),
    f"{clients} clients, {size / 1e6:.2f} MB",
    "mean share of a round",
    plot.Axis(ticks=[(i, row["link"]) for i, row in enumerate(rows)]),
    "below",
  )


def _texts(links: Sequence[Row]) -> list[str]:
  """Returns the text of each link; links of about equal rates share one."""
  texts, last = [""] * len(links), -1
  for i in sorted(range(len(links)), key=lambda i: links[i]["rate"]):
    name = links[i]["link"].removeprefix("5g-")
    if last >= 0 and links[i]["rate"] < 1.1 * links[last]["rate"]:
      texts[last] += f", {name}"
    else:
      texts[i], last = name, i
  return texts


def _region(result: Row) -> plot.Panel:
  """Returns fixed times and rates that give the published ratios."""
  found = result["region"]
  points, rates = found["points"], [r / _MBIT for r in found["rates"]]
  inside = [i for i, low in enumerate(found["low"]) if low is not None]
  wifi = result["wifi"]
  ours = result["ratios"]
  return plot.Panel(
    [
      plot.Band(
        [rates[i] for i in inside],
        [max(1e-3, found["low"][i]) for i in inside],
        [found["high"][i] for i in inside], "C0",
      ),
      plot.Line(
        [p["rate"] / _MBIT for p in points], [p["fixed_s"] for p in points],
        f"both ratios, WiFi {min(wifi):g} to {max(wifi):g} Mbit/s (fitted)",
        marker="o", colour="C1",
      ),
      plot.Line(
        [row["rate"] / _MBIT for row in ours],
        [result["fixed_s"]] * len(ours), "our links, and our fixed time", "",
        marker="x", colour="black", texts=plot.Texts(
          _texts(ours), offset=(0, 6), align=("center", "bottom"),
          rotation=90.0,
        ),
      ),
    ],
    f"uplinks of 5G: {figures.OVER_ETHERNET} times Ethernet, "
    f"{figures.OVER_WIFI} times WiFi, within {result['tolerance']:.0%}",
    plot.Axis("rate of a client on 5G, Mbit/s", "log", plain=True),
    plot.Axis("fixed time of a message, s", "log"), "upper right", True,
  )
