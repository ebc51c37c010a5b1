"""Report of the study of serving."""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

from caatnet.studies.serving import composition_report, nanobatch_report, tails
from parallel.base import plot
from parallel.base.report import Column, Report, Table, yes_no

Row = Mapping[str, Any]
Parts = list[Table | str]


def report(result: Mapping[str, Any]) -> Report:
  """Returns the report of a subject of the study: tables and figure."""
  if result["subject"] == "composition":
    return composition_report.report(result)
  if result["subject"] == "nanobatches":
    return nanobatch_report.report(result)
  title, parts, figure = {
    "vllm_log": ("Serving, and the log of vLLM", _vllm_log, _log_figure),
    "fastswitch": ("Preemption in serving", _fastswitch, _switching_figure),
    "fairness": ("Fairness of serving", _fairness, _fairness_figure),
  }[result["subject"]]
  return Report(title, parts(result), functools.partial(figure, result))


def _vllm_log(result: Row) -> Parts:
  """Returns the comparison of a simulated run with the log of a real one."""
  counts = result["counts"]
  parts: Parts = [Table(
    f"{result['num_requests']} requests: simulated, and in the log "
    f"{result['log']} (s)\nno constant is fitted to the log; linear "
    f"percentiles; {counts['steps']:,} steps, {counts['preemptions']} "
    f"preemptions,\n{counts['found_pages']:,} pages found, "
    f"{counts['shared_pages']:,} of them when a request was first admitted",
    [
      Column("name", ""), Column("ours_s", "simulated", ".4f"),
      Column("log_s", "log", ".4f"), Column("error", "error", "+.2%"),
      Column("suspected", "suspected rule"),
    ],
    result["rows"],
  )]
  if result["sensitivity"]:
    parts.append(Table(
      "errors if one thing is changed (%)",
      ["changed", *(
        Column(r["name"], r["name"].replace(" ", "\n"), "+.1f", unit=0.01)
        for r in result["rows"]
      )],
      [row | row["errors"] for row in result["sensitivity"]],
    ))
  return [
    *parts, _log_assumptions(result["assumptions"]),
    f"source of log and operations: {result['source']}",
  ]


def _log_assumptions(given: Row) -> str:
  """Returns what a simulation of a log depends on."""
  text = (
    f"{given['model']} on {given['ranks']} GPU(s); {given['pages']:,} pages, "
    f"{given['slots']} slots, {given['tokens']:,} tokens of a step; attention "
    f"of unequal contexts at {given['skew']:g} between mean and largest"
  )
  source = given["prefixes"]
  text += "\ncommon prefixes of prompts: " + {
    "none": "none; a log has no prompts (config.prefixes)",
    "published": "the log's prefixes.csv",
  }.get(source, source)
  sums = given["all_reduces"]
  if sums:
    text += (
      f"\n{sums['per_layer']} ring all-reduces of a layer at "
      f"{sums['bandwidth'] / 1e9:g} GB/s and {sums['latency_s'] * 1e6:g} us"
    )
  return text


def _fastswitch(result: Row) -> Parts:
  """Returns assumptions, and each setting's latency percentiles and copies."""
  parts: Parts = [_assumptions(result["machine"])]
  for kind in dict.fromkeys(row["kind"] for row in result["sessions"]):
    rows = [row for row in result["sessions"] if row["kind"] == kind]
    parts += _setting(f"sessions, {kind} priorities", rows)
  for load in result["loads"]:
    parts.append(
      f"{load['trace']}: {load['requests']:,} requests, {load['left_out']} "
      f"larger than the cache left out; own rate {load['own_rate']:.2f} per s, "
      f"capacity of recomputation {load['capacity']:.3f} per s (90% of the "
      "requests over the time in which these end if all are there at once and "
      "no priority changes)"
    )
    ours = [r for r in result["traces"] if r["trace"] == load["trace"]]
    for share in dict.fromkeys(row["load"] for row in ours):
      rows = [row for row in ours if row["load"] == share]
      parts += _setting(f"{load['trace']} at {share:g} of the capacity", rows)
  parts.append(_seeds(result["seeds"]))
  if result["shares"]:
    parts.append(_shares(result["shares"], result["machine"]))
  return parts


def _assumptions(machine: Row) -> str:
  return (
    f"simulated: Llama-3.1-8B in bfloat16 on {machine['device']}, "
    f"{machine['pages']:,} pages of {machine['page_size']} tokens "
    f"({machine['page_bytes']:,} bytes), {machine['host_pages']:,} on the "
    "host\nassumed: roofline with "
    f"{machine['utilisation']:g} of peak FLOP/s and "
    f"{machine['memory_fraction']:g} of the memory's bandwidth; copies at "
    f"{machine['copy_rate'] / 1e9:g} GB/s each way and "
    f"{machine['copy_call_s'] * 1e6:g} us for each contiguous range, "
    f"{machine['ranges_per_run']} ranges for a run of pages (the cache is "
    "[layer, key or value, page]); copies do not slow steps; no time between "
    f"steps\n{machine['num_sessions']:,} sessions, {machine['rate']:g} turns "
    f"per s, {machine['think_s']:g} s between turns on average, priorities of "
    f"{machine['levels']} levels, updated at {machine['frequency']:g} of the "
    f"steps; groups grow by {machine['growth']} pages; a step waits for copies "
    f"up to {machine['wait_s'] * 1e3:g} ms"
  )


def _setting(title: str, rows: Sequence[Row]) -> Parts:
  parts: Parts = []
  for name, measure in (("TTFT", "ttft"), ("TBT", "tbt")):
    count = rows[0][measure]["n"]
    parts.append(Table(
      f"{title}: {name} (s), 95% bootstrap interval over requests; "
      f"n = {count:,}: P99.9 rests on {count / 1000:.1f} samples",
      [Column("arm", ""), *(
        Column(measure, f"P{p}", functools.partial(tails.text, percentile=p))
        for p in ("50", "95", "99", "99.9")
      ), Column("throughput", "tokens/s", ".1f")],
      rows,
    ))
  blocks = next((r["ranges"] for r in rows if r["arm"] == "blocks"), 0)
  parts.append(Table(
    f"{title}: copies to and from the host; a copy is a contiguous byte range",
    [
      Column("arm", ""), Column("ranges", "copies", ","),
      Column("than_blocks", "fewer than\nblocks"),
      Column("than_pages", "than own\npages"), Column("calls", "calls", ","),
      Column("bytes", "GB", ".1f", unit=1e9),
      Column("run_length", "pages\nof a run", ".1f"),
      Column("padding", "empty\nof held", ".1%"),
      Column("large_free", "free in\ngroups >= 32", ".0%"),
      Column("stalled", "stalled", ".1%"),
      Column("preemptions", "preempted", ","),
      Column("swapped", "swapped", ","),
    ],
    [
      r | {
        "than_blocks": _fewer(r["ranges"], blocks),
        "than_pages": _fewer(r["ranges"], r["single_ranges"]),
      }
      for r in rows
    ],
  ))
  return parts


def _fewer(count: int, than: int) -> str:
  return f"{1 - count / than:.1%}" if count and than else "-"


def _seeds(rows: Sequence[Row]) -> Table:
  return Table(
    "the cost model and the mechanisms it chooses from: P99 (s), Poisson "
    "arrivals; "
    "worse than the better\none by more than half the bootstrap interval: "
    f"{sum(r['beyond'] for r in rows)} of {len(rows)}",
    [
      Column("load", "load", "g"), "seed",
      Column("measure", "", str.upper),
      Column("recompute", "recompute", ".3f"), Column("reuse", "swap", ".3f"),
      Column("cost", "cost", ".3f"), Column("worse", "worse by", "+.3f"),
      Column("width", "half interval", ".3f"),
      Column("beyond", "beyond", yes_no),
      Column("", "cheaper chosen", "{cheaper} of {able}"),
      "swapped",
    ],
    rows,
  )


def _shares(rows: Sequence[Row], machine: Row) -> Table:
  return Table(
    f"p with {machine['ranks']} tensor ranks on {machine['ranks_device']}, "
    f"{machine['trace']} at {machine['shares_rate']:g} requests per s, first "
    "come, first served (s)",
    [Column("p", "p", "g"), *(
      Column(m, f"{m.upper()} P{q}",
             functools.partial(tails.number, percentile=q, form=".4f"))
      for m in ("ttft", "tbt") for q in ("50", "99")
    ), Column("throughput", "tokens/s", ".0f")],
    rows,
  )


def _fairness(result: Row) -> Parts:
  """Returns each policy's service to clients, and its cost."""
  base = result["rows"][0]
  tail = [
    Column(f"all_{measure}", f"{measure.upper()} P{q}",
           functools.partial(tails.number, percentile=q, form=form))
    for measure, q, form in (
      ("ttft", "50", ".2f"), ("ttft", "99", ".2f"), ("tbt", "99", ".3f")
    )
  ]
  parts: Parts = [Table(
    f"service of clients that wait; {result['limits']['slots']} requests run "
    f"at a time; VTC's bound is\n{result['bound']:,.0f} = 2 x 2 x "
    f"{result['batch']:,} tokens of the fullest batch",
    [
      "policy",
      Column("largest", "largest\ndifference", ",.0f"),
      Column("largest", "of the\nbound", ".2f", unit=result["bound"]),
      Column("pair", "between", "\n".join), Column("jain", "Jain", ".3f"),
      Column("throughput", "tokens/s", ".1f"),
      Column("gain", f"against\n{base['policy']}", "+.1%"),
      Column("found", "tokens\nfound", ","), *tail,
    ],
    [r | {"gain": r["throughput"] / base["throughput"] - 1}
     for r in result["rows"]],
  )]
  for name in result["clients"]:
    parts.append(Table(
      f"{name}: latencies (s), 95% bootstrap interval over requests; n = "
      f"{base['ttft'][name]['n']:,} requests, {base['tbt'][name]['n']:,} gaps",
      ["policy", *(
        Column(m, f"{m.upper()} P{p}",
               lambda of, name=name, p=p: tails.text(of[name], p))
        for m, ps in (("ttft", ("50", "99")), ("tbt", ("50", "99", "99.9")))
        for p in ps
      )],
      result["rows"],
    ))
  return parts


def _log_figure(result: Row) -> plot.Figure:
  """Returns running and waiting requests and the cache over time.

  The log's series starts up to a quarter of a second before the first request.
  """
  ours, log = list(zip(*result["series"], strict=True)), result["log_series"]
  return plot.Figure([
    plot.Panel(
      [
        plot.Line(log["t"], log[name], "vLLM's log", colour="C1", width=2),
        plot.Line(ours[0], ours[column], "simulated", colour="C0", width=0.8,
                  steps="post"),
      ],
      "", "s", label, grid=True,
    )
    for column, (label, name) in enumerate((
      ("running requests", "running"), ("waiting requests", "waiting"),
      ("used pages (%)", "kv_cache_pct"),
    ), 1)
  ], (8, 7), share_x="all", legend="outside upper center", legend_columns=2)


def _switching_figure(result: Row) -> plot.Figure:
  """Returns tails of both latencies, copies and bytes, of the first setting."""
  kind = result["sessions"][0]["kind"]
  rows = [row for row in result["sessions"] if row["kind"] == kind]
  panels = [
    plot.Panel(
      [plot.Line(row[name.lower()]["curve"], result["above"], row["arm"])
       for row in rows if row[name.lower()]["n"]],
      f"{name}, {kind} priorities", plot.Axis(f"{name} (s)", "log"),
      plot.Axis("share of samples above", "log", (1e-4, 1)), grid=True,
    )
    for name in ("TTFT", "TBT")
  ]
  copied = [row for row in rows if row["ranges"]]
  for label, key, unit, form in (
    ("copies (contiguous byte ranges)", "ranges", 1, ",.0f"),
    ("GB", "bytes", 1e9, ",.1f"),
  ):
    values = [row[key] / unit for row in copied]
    panels.append(plot.Panel(
      [plot.Bars(
        range(len(copied)), values, texts=[f"{v:{form}}" for v in values],
        colour=[f"C{rows.index(row)}" for row in copied],
      )],
      x=plot.Axis(label, limits=(0, 1.35 * max(values, default=1))),
      y=plot.Axis(ticks=[(i, row["arm"]) for i, row in enumerate(copied)],
                  reverse=True),
    ))
  return plot.Figure(panels, (10, 7), 2, legend="outside right upper")


def _fairness_figure(result: Row) -> plot.Figure:
  """Returns each client's service over time, one panel per policy."""
  rows = result["rows"]
  return plot.Figure(
    [
      plot.Panel(
        [plot.Line(row["grid"], [y / 1e3 for y in curve], name)
         for name, curve in row["service"].items()],
        f"{row['policy']}: {row['largest'] / 1e3:.0f}k", "s",
        "service (1,000 tokens read)", grid=True,
      )
      for row in rows
    ],
    (3 * len(rows), 3.4), len(rows),
    "service until a client's line is empty; in titles the largest difference, "
    f"bound of VTC {result['bound'] / 1e3:.0f}k", "outside right upper",
    share_y="all",
  )
