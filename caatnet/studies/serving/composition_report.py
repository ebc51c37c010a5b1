"""Report of the study of compositions of experts."""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

from parallel.base import plot
from parallel.base.report import Column, Report, Table, yes_no

Row = Mapping[str, Any]

_HIDDEN = 0.95  # share of load time in which steps run
_MISSES = (
  Column("misses", "misses", ","),
  Column("above_least", "above\nBelady", ".1%"),
)
_TIMES = (
  Column("exposed_s", "exposed\n(s)", ".2f"), Column("hidden", "hidden", ".1%"),
  Column("ttft_p50_s", "TTFT\nP50 (s)", ".3f"),
  Column("ttft_p99_s", "TTFT\nP99 (s)", ".3f"),
  Column("latency_p99_s", "latency\nP99 (s)", ".2f"),
)


def report(result: Row) -> Report:
  """Returns tables of simulations and of the paper's figures, and a figure."""
  simulated = any(
    result[part] for part in ("streams", "slots", "load", "front")
  )
  return Report(
    "Compositions of experts",
    [*(_simulated(result) if simulated else ()), *_published(result)],
    functools.partial(_figure, result)
    if result["load"] or result["front"] else None,
  )


def _simulated(result: Row) -> list[Table | str]:
  """Returns the tables of simulations."""
  experts, stream = result["experts"], result["stream"]
  return [
    f"simulated: {experts['number']} experts of "
    f"{result['expert_bytes'] / 1e9:.2f} GB on one {result['device']}, "
    f"{experts['slots']} in slots,\nothers {experts['copy_rate'] / 1e9:g} GB/s "
    f"away; roofline times of steps; loads do not slow steps down;\n"
    f"{stream['requests']} requests (a fifth for long responses) of "
    f"{stream['prompt']} tokens, Zipf exponent {stream['exponent']:g};\n"
    "hidden: share of the load time in which steps ran; above Belady: misses "
    "over the\nfewest possible for the order in which requests were served",
    Table(
      f"orders of requests, {stream['rate']:g} requests/s, "
      f"{stream['output']} tokens",
      ["stream", "eviction", Column("hits", "hits", ","), *_MISSES, *_TIMES],
      result["streams"],
    ),
    Table(
      "numbers of slots, Zipf",
      [Column("num_slots", "slots"), "eviction", Column("hits", "hits", ","),
       *_MISSES, *_TIMES],
      result["slots"],
    ),
    Table(
      "exposed switching over load: loads begin on demand, ahead while others "
      "decode,\nor ahead with steps that begin when the first layers have "
      "arrived",
      [Column("batch", "arrive\ntogether"), Column("output", "tokens"),
       Column("way", "loads"), Column("rate", "requests\nper s", "g"),
       Column("busy", "busy", ".0%"), *_MISSES, *_TIMES],
      result["load"],
    ),
    _hidden(result["load"]),
    Table(
      "fairness and switching: waiting that outweighs a switch, and deadlines",
      [Column("patience", "patience", "g"),
       Column("deadline_s", "deadline\n(s)", "g"),
       Column("loads", "loads", ","),
       Column("ttft_worst_s", "worst\nTTFT (s)", ".2f"),
       Column("jain", "Jain", ".3f"), *_TIMES,
       Column("best", "on the\nfront", yes_no)],
      result["front"],
    ),
  ]


def _hidden(rows: Sequence[Row]) -> Table:
  """Returns the table of the loads from which on switches are hidden."""
  found, ways = [], dict.fromkeys(row["way"] for row in rows)
  for batch, output in dict.fromkeys((r["batch"], r["output"]) for r in rows):
    line = {"batch": batch, "output": output}
    for way in ways:
      chosen = _chosen(rows, way, batch, output)
      rates = [row["rate"] for row in chosen if row["hidden"] >= _HIDDEN]
      line[way] = min(rates, default=None)
    found.append(line)
  return Table(
    f"lowest of the scanned requests per second with {_HIDDEN:.0%} of the load "
    "time hidden",
    [Column("batch", "arrive\ntogether"), Column("output", "tokens"),
     *(Column(way, way, "g", default="none") for way in ways)],
    found,
  )


def _published(result: Row) -> list[Table | str]:
  """Returns the figures of the paper's machines."""
  one = result["one_node"]
  return [
    Table(
      "nodes: a switch over the rate that the paper counts, and with each "
      "device copying its shard",
      ["node", Column("switch_s", "switch\n(ms)", ".1f", unit=1e-3),
       Column("slower", "of\nSN40L", ".2f"),
       Column("spread_s", "shards\n(ms)", ".1f", unit=1e-3),
       Column("spread_slower", "shards, of\nSN40L", ".2f"),
       Column("resident", "on\ndevices"), Column("held", "in host\nmemory"),
       Column("machines", f"machines\nfor {one['models']:,}"),
       Column("most_machines", f"machines\nfor {result['max_experts']:,}")],
      result["nodes"],
    ),
    Table(
      "a whole request with a miss, relative to SN40L, by its execution time "
      "(equal on both)",
      ["node", Column("exec_s", "execution\n(ms)", "g", unit=1e-3),
       Column("ratio", "ratio", ".2f")],
      result["whole"],
    ),
    Table(
      "execution time on SN40L that gives the published ratio",
      ["node", Column("published", "published", "g"),
       Column("execution", "execution,\nof SN40L", "g"),
       Column("spread", "shards", yes_no),
       Column("exec_s", "execution\n(ms)", ".1f", unit=1e-3, default="none")],
      result["solved"],
    ),
    Table(
      "gain of a fused decode step by the time of an unfused operator's launch",
      [Column("call_s", "launch\n(us)", ".2f", unit=1e-6),
       Column("gain", "gain", ".2f"),
       Column("published", "published", yes_no, default="no")],
      result["fusion"],
    ),
    f"one SN40L node: {one['models']} models (router included) have "
    f"{one['parameters'] / 1e12:.3f} trillion parameters,\n"
    f"{one['bytes'] / 1e12:.2f} of {one['node_bytes'] / 1e12:.2f} TB; "
    f"{one['held']} models fit",
  ]


def _figure(result: Row) -> plot.Figure:
  """Returns exposed switching over load, and the front."""
  rows = result["load"]
  shapes = dict.fromkeys((row["batch"], row["output"]) for row in rows)
  panels = [
    plot.Panel(
      [
        plot.Line(
          [row["rate"] for row in chosen],
          [100 * (1 - row["hidden"]) for row in chosen], way, marker="o",
        )
        for way in dict.fromkeys(row["way"] for row in rows)
        if (chosen := _chosen(rows, way, batch, output))
      ],
      f"batch {batch}, {output} tokens",
      plot.Axis("requests per second", "log", plain=True),
      plot.Axis("exposed part of loads (%)", limits=(0, 105)), grid=True,
    )
    for batch, output in shapes
  ]
  front = sorted(result["front"], key=lambda row: row["loads"])
  if front:
    panels.append(plot.Panel(
      [
        plot.Line(
          [row["loads"] for row in front if row["best"] == best],
          [row["ttft_worst_s"] for row in front if row["best"] == best],
          "front" if best else "other settings", "-" if best else "", "s",
          colour="C3" if best else "0.6",
        )
        for best in (True, False)
      ],
      "fairness and switching", "loads", "worst TTFT (s)", grid=True,
    ))
  return plot.Figure(
    panels, (4 * len(panels), 3.8), len(panels), legend="outside lower center",
    legend_columns=5,
  )


def _chosen(
  rows: Sequence[Row], way: str, batch: int, output: int
) -> list[Row]:
  """Returns the rows of a line."""
  return [
    row for row in rows
    if (row["way"], row["batch"], row["output"]) == (way, batch, output)
  ]
