"""Report of the study of serving."""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

from caatnet.studies.serving import composition_report, nanobatch_report, tails
from parallel.base import labels, plot
from parallel.base.report import Column, Report, Table

Row = Mapping[str, Any]
Parts = list[Table | str]

_PERCENTILES = ("50", "95", "99", "99.9")


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
  return [
    Table(
      f"{result['num_requests']} requests: simulated, and in the log "
      f"{result['log']} (s)\nno constant is fitted to the log; linear "
      f"percentiles; {counts['steps']:,} steps, {counts['preemptions']} "
      f"preemptions,\n{counts['found_pages']:,} pages found, "
      f"{counts['shared_pages']:,} of them when a request was first admitted",
      "name | ours_s:.4f=simulated | log_s:.4f=log | error:+.2% | "
      "missed",
      result["rows"],
    ),
    Table(
      "errors if one thing is changed (%)", "changed | errors.*/0.01:+.1f",
      result["sensitivity"],
    ),
    _log_assumptions(result["assumptions"]),
    f"source of log and operations: {result['source']}",
  ]


def _log_assumptions(given: Row) -> str:
  """Returns a text with the assumptions of a log's simulation, `given`."""
  lines = [
    f"{given['model']} on {given['ranks']} GPU(s); {given['pages']:,} pages, "
    f"{given['slots']} slots, {given['tokens']:,} tokens of a step; attention "
    f"of unequal contexts at {given['skew']:g} between mean and largest",
  ]
  if sums := given["all_reduces"]:
    lines.append(
      f"{sums['per_layer']} ring all-reduces of a layer at "
      f"{sums['bandwidth'] / 1e9:g} GB/s and {sums['latency_s'] * 1e6:g} us"
    )
  lines.append(
    f"common prefixes of prompts: {given['prefixes']} (a log has no prompts; "
    "its prefixes.csv may have their prefixes: config.prefixes)"
  )
  return "\n".join(lines)


def _latencies(
  title: str, names: Sequence[str], measures: Sequence[str], rows: Sequence[Row]
) -> Table:
  """Returns a table of percentiles of measures, from `tails.summary`.

  Args:
    title: Title of the table.
    names: Its first columns.
    measures: Keys of the rows that have a `tails.summary`, such as "ttft".
    rows: Rows of the table.
  """
  return Table(
    f"{title} (s), with its 95% bootstrap interval over requests; "
    + "; ".join(
      f"n = {labels.find(rows[0], m)['n']:,}: P99.9 rests on "
      f"{labels.find(rows[0], m)['n'] / 1000:.1f} samples" for m in measures
    ),
    [*names, *(
      Column(
        measure, f"{_name(measure)} P{p}",
        functools.partial(tails.format_percentile, percentile=p), default="-",
      )
      for measure in measures for p in _PERCENTILES
    )],
    rows,
  )


def _name(measure: str) -> str:
  """Returns "TTFT" or "TBT" for a key such as "all_ttft" or "tbt.short"."""
  return measure.split(".")[0].removeprefix("all_").upper()


def _fastswitch(result: Row) -> Parts:
  """Returns assumptions, and tables of each setting's latencies and copies."""
  machine = result["machine"]
  parts: Parts = [_assumptions(machine)]
  for kind in dict.fromkeys(row["kind"] for row in result["sessions"]):
    rows = [row for row in result["sessions"] if row["kind"] == kind]
    parts += _setting(f"sessions, {kind} priorities", rows)
  parts.append(Table(
    "loads: capacity of recomputation, requests per s: 90% of the requests "
    "over the time in which these end if all are there at once and no "
    "priority changes",
    "trace | requests | left_out=larger than the cache, left out | "
    "own_rate:.2f | capacity:.3f", result["loads"],
  ))
  traces = dict.fromkeys((r["trace"], r["load"]) for r in result["traces"])
  for trace, load in traces:
    parts += _setting(f"{trace} at {load:g} of the capacity", [
      r for r in result["traces"] if (r["trace"], r["load"]) == (trace, load)
    ])
  seeds = result["seeds"]
  parts.append(Table(
    "the cost model and the mechanisms it chooses from: P99 (s), Poisson "
    "arrivals; worse than the better\none by more than half the bootstrap "
    f"interval: {sum(r['beyond'] for r in seeds)} of {len(seeds)}",
    "load | seed | measure | recompute:.3f | reuse:.3f=swap | cost:.3f | "
    "worse:+.3f=worse by | width:.3f=half interval | beyond | "
    "{cheaper} of {able}=cheaper chosen | swapped", seeds,
  ))
  if result["shares"]:
    parts.append(_latencies(
      f"p with {machine['ranks']} tensor ranks on {machine['ranks_device']}, "
      f"{machine['trace']} at {machine['shares_rate']:g} requests per s, first "
      "come, first served", ("p", "throughput:.0f=tokens/s"), ("ttft", "tbt"),
      result["shares"],
    ))
  return parts


def _assumptions(machine: Row) -> str:
  """Returns a text with the assumptions of a simulation of preemption."""
  return (
    f"simulated: Llama-3.1-8B in bfloat16 on {machine['device']}, "
    f"{machine['pages']:,} pages of {machine['page_size']} tokens "
    f"({machine['page_bytes']:,} bytes), {machine['host_pages']:,} on the "
    "host\nassumed: roofline with "
    f"{machine['utilisation']:g} of peak FLOP/s and "
    f"{machine['memory_fraction']:g} of the memory's bandwidth; copies at "
    f"{machine['copy_rate'] / 1e9:g} GB/s each way and "
    f"{machine['copy_call_s'] * 1e6:g} us for each copy of a contiguous range, "
    f"{machine['ranges_per_run']} ranges for a run of pages (the cache is "
    "[layer, key or value, page]); copies do not slow steps; no time between "
    f"steps\n{machine['num_sessions']:,} sessions, {machine['rate']:g} turns "
    f"per s, {machine['think_s']:g} s between turns on average, priorities of "
    f"{machine['levels']} levels, updated at {machine['frequency']:g} of the "
    f"steps; groups grow by {machine['growth']} pages; a step waits for copies "
    f"up to {machine['wait_s'] * 1e3:g} ms"
  )


def _setting(title: str, rows: Sequence[Row]) -> Parts:
  return [
    *(_latencies(f"{title}: {measure.upper()}", ["arm"], [measure], rows)
      for measure in ("ttft", "tbt")),
    Table(
      f"{title}: tokens/s, and copies to and from the host",
      "arm | throughput:.1f=tokens/s | ranges=copies | "
      "single_ranges=of single pages | calls | bytes | "
      "run_length:.1f=pages of a run | padding:.1%=empty of held | "
      "large_free:.0%=free in groups >= 32 | stalled:.1% | "
      "preemptions=preempted | swapped", rows,
    ),
  ]


def _fairness(result: Row) -> Parts:
  """Returns tables of each policy's service to clients, and of latencies."""
  base = result["rows"][0]
  return [
    Table(
      f"service of clients that wait; {result['limits']['slots']} requests run "
      f"at a time; VTC's bound is\n{result['bound']:,.0f} = 2 x 2 x "
      f"{result['batch']:,} tokens of the fullest batch; gain: of tokens/s "
      f"over {base['policy']}",
      "policy | largest:,.0f=largest difference | of_bound:.2f=of the bound | "
      "pair=between | jain:.3f | throughput:.1f=tokens/s | gain:+.1% | "
      "found=tokens found",
      [
        r | {"gain": r["throughput"] / base["throughput"] - 1,
             "of_bound": r["largest"] / result["bound"]}
        for r in result["rows"]
      ],
    ),
    *(
      _latencies(f"{name}: {m.upper()}", ["policy"], [measure], result["rows"])
      for name in ("all clients", *result["clients"]) for m in ("ttft", "tbt")
      for measure in [f"all_{m}" if name == "all clients" else f"{m}.{name}"]
    ),
  ]


def _log_figure(result: Row) -> plot.Figure:
  """Plots running requests, waiting requests and used pages over time.

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
  """Plots tails of TTFT and TBT, copies and bytes, of the conversations."""
  kind = result["sessions"][0]["kind"]
  rows = [row for row in result["sessions"] if row["kind"] == kind]
  panels = [
    panel for name in ("TTFT", "TBT") for panel in plot.lines(
      [
        {"arm": row["arm"], "x": x, "above": above} for row in rows
        for x, above in zip(
          row[name.lower()]["curve"], result["above"], strict=False
        )
      ],
      f"x={name} (s)", "above=share of samples above", by="arm", log="xy",
      title=f"{name}, {kind} priorities", marker="",
    )
  ]
  for label, key in (("copies", "ranges"), ("GB", "bytes/1e9")):
    panels += plot.stacked_bar_panels(
      [row for row in rows if row["ranges"]], "arm", {label: key}, label=label,
    )
  return plot.figure(panels, columns=2)


def _fairness_figure(result: Row) -> plot.Figure:
  """Plots each client's service over time, one panel per policy."""
  panels = plot.lines(
    [
      row | {"client": name, "s": x, "tokens": y} for row in result["rows"]
      for name, curve in row["service"].items()
      for x, y in zip(row["grid"], curve, strict=True)
    ],
    "s", "tokens/1e3=service (1,000 tokens read)", by="client",
    each="policy largest", marker="",
  )
  return plot.figure(
    panels, "service until a client's line is empty; in titles the largest "
    f"difference, bound of VTC {result['bound']:,.0f}", share_y="all",
  )
