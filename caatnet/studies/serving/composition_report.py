"""Report of the study of compositions of experts."""

from collections.abc import Mapping
import functools
from typing import Any

from parallel.base import labels, plot
from parallel.base.report import Report, Table, pivot

Row = Mapping[str, Any]

_MIN_HIDDEN_SHARE = 0.95  # share of load time in which steps run
_TIME_COLUMNS = (
  "exposed_s | hidden:.1% | ttft_p50_s | ttft_p99_s | latency_p99_s"
)
_MISS_COLUMNS = f"misses | above_least:.1%=above Belady | {_TIME_COLUMNS}"


def report(result: Row) -> Report:
  """Returns tables of simulations and of published figures, and a figure."""
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
  # Sorted so that the lowest rate is last: the pivot below keeps the last row.
  hidden = sorted(
    (r | {"found": r["rate"] if r["hidden"] >= _MIN_HIDDEN_SHARE else None}
     for r in result["load"]),
    key=lambda r: (r["output"], r["batch"], r["found"] is not None, -r["rate"]),
  )
  return [
    f"simulated: {experts['number']} experts of "
    f"{labels.text(result['expert_bytes'], 'bytes')} on one "
    f"{result['device']}, {experts['slots']} in slots,\nothers "
    f"{experts['copy_rate'] / 1e9:g} GB/s away; roofline times of steps; loads "
    f"do not slow steps down;\n{stream['requests']} requests (a fifth for long "
    f"responses) of {stream['prompt']} tokens, Zipf exponent "
    f"{stream['exponent']:g};\nhidden: share of the load time in which steps "
    "ran; above Belady: misses over the\nfewest possible for the order in "
    "which requests were served",
    Table(
      f"orders of requests, {stream['rate']:g} requests/s, "
      f"{stream['output']} tokens",
      f"stream | eviction | hits | {_MISS_COLUMNS}",
      result["streams"],
    ),
    Table(
      "numbers of slots, Zipf",
      f"num_slots | eviction | hits | {_MISS_COLUMNS}",
      result["slots"],
    ),
    Table(
      "exposed switching over load: loads begin on demand, ahead while others "
      "decode,\nor ahead with steps that begin when the first layers have "
      "arrived",
      f"batch=arrive together | output=tokens | way=loads | "
      f"rate:g=requests per s | busy:.0% | {_MISS_COLUMNS}",
      result["load"],
    ),
    Table(
      "lowest of the scanned requests per second with "
      f"{_MIN_HIDDEN_SHARE:.0%} of the "
      "load time hidden; -: none",
      "batch=arrive together | output=tokens | of.*:g",
      pivot(hidden, ["batch", "output"], "way", "found"),
    ),
    Table(
      "fairness and switching: waiting that outweighs a switch, and deadlines",
      "patience:g | deadline_s | loads | ttft_worst_s=worst TTFT | jain:.3f | "
      f"{_TIME_COLUMNS} | best=on the front",
      result["front"],
    ),
  ]


def _published(result: Row) -> list[Table | str]:
  """Returns tables of the figures published for Samba-CoE's machines."""
  one = result["one_node"]
  return [
    Table(
      "nodes: a switch over the rate that the paper counts, and with each "
      "device copying its shard",
      "node | switch_s | slower:.2f=of SN40L | spread_s=shards | "
      "spread_slower:.2f=shards, of SN40L | resident=on devices | "
      f"held=in host memory | machines=machines for {one['models']:,} | "
      f"most_machines=machines for {result['max_experts']:,}",
      result["nodes"],
    ),
    Table(
      "a whole request with a miss, relative to SN40L, by its execution time "
      "(equal on both)", "node | exec_s=execution | ratio:.2f",
      result["whole"],
    ),
    Table(
      "execution time on SN40L that gives the published ratio; -: none",
      "node | published:g | execution:g=execution, of SN40L | spread=shards | "
      "exec_s=execution", result["solved"],
    ),
    Table(
      "gain of a fused decode step by the time of an unfused operator's launch",
      "call_s=launch | gain:.2f | published", result["fusion"],
    ),
    f"one SN40L node: {one['models']} models (router included) have "
    f"{one['parameters'] / 1e12:.3f} trillion parameters, "
    f"{one['bytes'] / 1e12:.2f} of {one['node_bytes'] / 1e12:.2f} TB; "
    f"{one['held']} models fit",
  ]


def _figure(result: Row) -> plot.Figure:
  """Plots the exposed part of loads by request rate, and the Pareto front."""
  panels = plot.lines(
    [row | {"exposed": 1 - row["hidden"]} for row in result["load"]],
    "rate=requests per second", "exposed/0.01=exposed part of loads (%)",
    by="way", each="batch output", log="x", title="batch, tokens",
  ) + plot.lines(
    sorted(result["front"], key=lambda row: row["loads"]), "loads",
    "ttft_worst_s=worst TTFT (s)", by="best", title="fairness and switching",
    joined=False,
  )
  return plot.figure(panels)
