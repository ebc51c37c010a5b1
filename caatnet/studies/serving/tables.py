"""Prints tables of the study of serving."""

from collections.abc import Mapping, Sequence
from typing import Any

from caatnet.show import tables
from caatnet.studies.serving import tails

Row = Mapping[str, Any]


def show(result: Mapping[str, Any]) -> None:
  """Prints what a subject of the study has found.

  Args:
    result: What `caatnet.studies.serving.study.run` returned.
  """
  _SHOW[result["subject"]](result)


def _vllm_log(result: Mapping[str, Any]) -> None:
  """Prints a simulated run beside the log of a real one."""
  counts = result["counts"]
  tables.table(
    f"{result['num_requests']} requests: simulated, and in the log of vLLM "
    "0.19.0 on an RTX 4090 (s)\nno constant is fitted to the log; linear "
    f"percentiles; {counts['steps']:,} steps, {counts['preemptions']} "
    f"preemptions,\n{counts['found_pages']:,} pages found, "
    f"{counts['shared_pages']:,} of them when a request was first admitted",
    ["", "simulated", "log", "error", "suspected rule"],
    [
      [r["name"], f"{r['ours_s']:.4f}", f"{r['log_s']:.4f}",
       f"{r['error']:+.2%}", r["suspected"]]
      for r in result["rows"]
    ],
  )
  if result["sensitivity"]:
    names = [r["name"] for r in result["rows"]]
    tables.table(
      "errors if one thing is changed (%)",
      ["changed", *(name.replace(" ", "\n") for name in names)],
      [
        [row["changed"], *(f"{100 * row['errors'][n]:+.1f}" for n in names)]
        for row in result["sensitivity"]
      ],
    )
  print(f"source of log and operations: {result['source']}")


def _fastswitch(result: Mapping[str, Any]) -> None:
  """Prints what was assumed, and each setting's tails and copies."""
  _assumptions(result["machine"])
  for kind in dict.fromkeys(row["kind"] for row in result["sessions"]):
    rows = [row for row in result["sessions"] if row["kind"] == kind]
    _setting(f"sessions, {kind} priorities", rows)
  for load in result["loads"]:
    print(
      f"{load['trace']}: {load['requests']:,} requests, {load['left_out']} "
      f"larger than the cache left out; own rate {load['own_rate']:.2f} per s, "
      f"capacity of recomputation {load['capacity']:.3f} per s (90% of the "
      "requests over the time in which these end if all are there at once and "
      "no priority changes)"
    )
    ours = [r for r in result["traces"] if r["trace"] == load["trace"]]
    for share in dict.fromkeys(row["load"] for row in ours):
      rows = [row for row in ours if row["load"] == share]
      _setting(f"{load['trace']} at {share:g} of the capacity", rows)
  _seeds(result["seeds"])
  _shares(result["shares"], result["machine"])


def _assumptions(machine: Row) -> None:
  print(
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


def _setting(title: str, rows: Sequence[Row]) -> None:
  for name, measure in (("TTFT", "ttft"), ("TBT", "tbt")):
    rests = rows[0][measure]["n"] / 1000
    tables.table(
      f"{title}: {name} (s), 95% bootstrap interval over requests; "
      f"n = {rows[0][measure]['n']:,}: P99.9 rests on {rests:.1f} samples",
      ["", "P50", "P95", "P99", "P99.9", "tokens/s"],
      [
        [r["arm"], *(tails.text(r[measure], p) for p in (
          "50", "95", "99", "99.9"
        )), f"{r['throughput']:.1f}"]
        for r in rows
      ],
    )
  blocks = next((r["ranges"] for r in rows if r["arm"] == "blocks"), 0)
  tables.table(
    f"{title}: copies to and from the host; a copy is a contiguous byte range",
    ["", "copies", "fewer than\nblocks", "than own\npages", "calls", "GB",
     "pages\nof a run", "empty\nof held", "free in\ngroups >= 32",
     "stalled", "preempted", "swapped"],
    [
      [r["arm"], f"{r['ranges']:,}", _fewer(r["ranges"], blocks),
       _fewer(r["ranges"], r["single_ranges"]), f"{r['calls']:,}",
       f"{r['bytes'] / 1e9:.1f}", f"{r['run_length']:.1f}",
       f"{r['padding']:.1%}", f"{r['large_free']:.0%}", f"{r['stalled']:.1%}",
       f"{r['preemptions']:,}", f"{r['swapped']:,}"]
      for r in rows
    ],
  )


def _fewer(count: int, than: int) -> str:
  return f"{1 - count / than:.1%}" if count and than else "-"


def _seeds(rows: Sequence[Row]) -> None:
  tables.table(
    "the cost model beside what it chooses from: P99 (s), Poisson arrivals; "
    "worse than the better\none by more than half the bootstrap interval: "
    f"{sum(r['beyond'] for r in rows)} of {len(rows)}",
    ["load", "seed", "", "recompute", "swap", "cost", "worse by",
     "half interval", "beyond", "cheaper chosen", "swapped"],
    [
      [f"{r['load']:g}", str(r["seed"]), r["measure"].upper(),
       *(f"{r[arm]:.3f}" for arm in ("recompute", "reuse", "cost")),
       f"{r['worse']:+.3f}", f"{r['width']:.3f}",
       "yes" if r["beyond"] else "no", f"{r['cheaper']} of {r['able']}",
       str(r["swapped"])]
      for r in rows
    ],
  )


def _shares(rows: Sequence[Row], machine: Row) -> None:
  if not rows:
    return
  tables.table(
    f"p with {machine['ranks']} tensor ranks on {machine['ranks_device']}, "
    f"{machine['trace']} at {machine['shares_rate']:g} requests per s, first "
    "come, first served (s)",
    ["p", "TTFT P50", "TTFT P99", "TBT P50", "TBT P99", "tokens/s"],
    [
      [f"{r['p']:g}", *(
        f"{r[m][q][0]:.4f}" for m in ("ttft", "tbt") for q in ("50", "99")
      ), f"{r['throughput']:.0f}"]
      for r in rows
    ],
  )


def _fairness(result: Mapping[str, Any]) -> None:
  """Prints what each policy gives to clients, and what that costs."""
  base = result["rows"][0]
  tables.table(
    f"service of clients that wait; {result['limits']['slots']} requests run "
    f"at a time; VTC's bound is\n{result['bound']:,.0f} = 2 x 2 x "
    f"{result['batch']:,} tokens of the fullest batch",
    ["policy", "largest\ndifference", "of the\nbound", "between", "Jain",
     "tokens/s", f"against\n{base['policy']}", "tokens\nfound", "TTFT P50",
     "TTFT P99", "TBT P99"],
    [
      [r["policy"], f"{r['largest']:,.0f}",
       f"{r['largest'] / result['bound']:.2f}", "\n".join(r["pair"]),
       f"{r['jain']:.3f}", f"{r['throughput']:.1f}",
       f"{r['throughput'] / base['throughput'] - 1:+.1%}", f"{r['found']:,}",
       f"{r['all_ttft']['50'][0]:.2f}", f"{r['all_ttft']['99'][0]:.2f}",
       f"{r['all_tbt']['99'][0]:.3f}"]
      for r in result["rows"]
    ],
  )
  for name in result["clients"]:
    tables.table(
      f"{name}: latencies (s), 95% bootstrap interval over requests; n = "
      f"{base['ttft'][name]['n']:,} requests, {base['tbt'][name]['n']:,} gaps",
      ["policy", "TTFT P50", "TTFT P99", "TBT P50", "TBT P99", "TBT P99.9"],
      [
        [r["policy"], *(tails.text(r["ttft"][name], p) for p in ("50", "99")),
         *(tails.text(r["tbt"][name], p) for p in ("50", "99", "99.9"))]
        for r in result["rows"]
      ],
    )


_SHOW = {
  "fairness": _fairness, "fastswitch": _fastswitch, "vllm_log": _vllm_log
}
