"""Report of the study of prefill and decode."""

from collections.abc import Mapping
from typing import Any

from parallel.base import plot
from parallel.base.report import Report, Table, pivot


def report(result: Mapping[str, Any]) -> Report:
  """Returns tables of step times, savings and constants, and a figure."""
  curves = [c for c in result["curves"] if c["sequences"]]
  savings = pivot(
    (r | {"saved": [r["saved_without"], *sorted(r["saved_with"])]}
     for r in result["rows"] if r["policy"] != "p=1"),
    ["model", "machine", "step"], "policy", "saved",
  )
  helps = pivot(
    (h | {"least": [h["without"], *h["with"]]} for h in result["helps"]),
    ["model", "machine"], "policy", "least",
  )
  return Report("Prefill and decode with partial synchronisation", [
    *(_steps(result, model) for model in result["models"]),
    Table(
      "the part of a step that is saved against p=1, by bytes alone; with "
      "latency, the smaller and the greater",
      "model | machine | step | of.*:z.0%", savings,
    ),
    Table(
      f"decode, {result['context']} positions: from how many sequences on "
      f"{result['threshold']:.0%} of a step are saved, of those that fit; -: "
      "never\nby bytes alone; with the least latency; with the greatest",
      "model | machine | most_sequences=fit | of.*:,", helps,
    ),
    layers(result),
    Table(
      "machines: rates, and the least and the greatest time of the smallest "
      "all-reduce",
      "name=machine | peak_tflops:g=TFLOP/s | memory_gb:.0f=GB | "
      "memory_gb_s:,.0f=GB/s | links_gb_s:.0f | "
      "smallest_all_reduce_us:.0f=us | mark | source=source of the us",
      result["machines"],
    ),
  ], (lambda: _figure(curves)) if curves else None)


def _steps(result: Mapping[str, Any], model: str) -> Table:
  """Returns a table of a model's step times under the config's first policy."""
  rows = [row for row in result["rows"] if row["model"] == model]
  rows = [row for row in rows if row["policy"] == rows[0]["policy"]]
  factor = result["compute_factor"]
  return Table(
    f"{model}, {rows[0]['policy']}: ms of a step with sequences of "
    f"{result['context']} positions (prefill: one of {result['prompt']})\n"
    "bounds, not a measurement: compute by the roofline of products, weights "
    "and cache" + f", times {factor:g}" * (factor != 1)
    + f";\n{rows[0]['num_collectives']} all-reduces by their bytes alone; with "
    "the least and the greatest latency. Nothing overlaps",
    "{machine}, {step}=machine, step | "
    "{weights_gb:.1f} + {cache_gb:.1f}=GB: weights + cache | fits | "
    "compute_ms:.2f=compute | sent_mb:,.1f=MB | links_ms:.2f=all-reduces | "
    "collectives_ms:.2f=with latency | without_ms:.2f=step | "
    "with_ms:.2f=step with latency",
    rows,
  )


def layers(result: Mapping[str, Any]) -> Table:
  """Returns measured times of layers of Llama-2-70B, and the roofline's."""
  return Table(
    "us of a layer of Llama-2-70B without attention's core and all-reduces: "
    f"measured, and by the roofline\n({result['layers_source']})",
    "{gpu}, {num_ranks}=GPU, ranks | tokens | products_us:,.0f=products | "
    "others_us:,.0f=the rest | roofline_us:,.0f=roofline of products | "
    "products:.2f=products / roofline | layer:.2f=layer / roofline",
    [
      r | {
        "products": r["products_us"] / r["roofline_us"],
        "layer": (r["products_us"] + r["others_us"]) / r["roofline_us"],
      }
      for r in result["layers"]
    ],
  )


def _figure(curves: list[Mapping[str, Any]]) -> plot.Figure:
  """Returns the savings of policies in decoding, by the number of sequences."""
  panels = plot.lines(
    [
      curve | {"n": n, "without": saved["saved_without"]}
      | dict(zip(("one", "other"), saved["saved_with"], strict=True))
      for curve in curves
      for n, saved in zip(curve["sequences"], curve["saved"], strict=True)
    ],
    "n=sequences that decode", "one=least latency", "other=greatest latency",
    "without=bytes alone", by="machine", each="model policy", log="x",
    label="part of a step that is saved", marker="", legend="",
  )
  return plot.figure(
    panels, "", len({curve["policy"] for curve in curves}),
    legend="outside lower center", legend_columns=3, share_y="all",
  )
