"""Prints tables of the study of prefill and decode."""

from collections.abc import Mapping, Sequence
from typing import Any

from caatnet.show import tables


def show(result: Mapping[str, Any]) -> None:
  """Prints steps, what policies save, and where the constants come from.

  Args:
    result: What `caatnet.studies.inference.study.run` returned.
  """
  for model in result["models"]:
    rows = [row for row in result["rows"] if row["model"] == model]
    _show_steps(model, rows, result)
    _show_saved(model, rows)
  _show_helps(result)
  show_layers(result)
  tables.table(
    "machines: rates, and the time of the smallest all-reduce",
    ["", "TFLOP/s", "GB", "GB/s", "links GB/s", "us", "", "source of the us"],
    [
      [m["name"], f"{m['peak_tflops']:g}", f"{m['memory_gb']:.0f}",
       f"{m['memory_gb_s']:g}", f"{m['links_gb_s']:.0f}",
       _span(m["smallest_all_reduce_us"], "{:.0f}"), m["mark"], m["source"]]
      for m in result["machines"]
    ],
  )


def _span(ends: Sequence[float], form: str) -> str:
  """Formats a least and a greatest value, once if they look the same."""
  return " to ".join(dict.fromkeys(form.format(end) for end in ends))


def _percent(value: float) -> str:
  return f"{value + 0.0:.0%}".replace("-0%", "0%")


def _percents(ends: Sequence[float]) -> str:
  return " to ".join(dict.fromkeys(_percent(end) for end in sorted(ends)))


def _show_steps(
  model: str, rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any]
) -> None:
  """Prints what a step is made of where all ranks share everything."""
  rows = [row for row in rows if row["policy"] == rows[0]["policy"]]
  factor = result["compute_factor"]
  tables.table(
    f"{model}, {rows[0]['policy']}: ms of a step with sequences of "
    f"{result['context']} positions (prefill: one of {result['prompt']})\n"
    "bounds, not a measurement: compute by the roofline of products, weights "
    "and cache" + f", times {factor:g}" * (factor != 1)
    + f";\n{rows[0]['num_collectives']} all-reduces by their bytes alone; with "
    "latency. Nothing overlaps",
    ["machine, step", "GB: weights + cache", "compute", "MB", "all-reduces",
     "step"],
    [
      [
        f"{r['machine']}, {r['step']}",
        f"{r['weights_gb']:.1f} + {r['cache_gb']:.1f}"
        + ", too much" * (not r["fits"]),
        f"{r['compute_ms']:.2f}",
        f"{r['sent_mb']:,.1f}",
        f"{r['links_ms']:.2f}; {_span(r['collectives_ms'], '{:.2f}')}",
        f"{r['without_ms']:.2f}; {_span(r['with_ms'], '{:.2f}')}",
      ]
      for r in rows
    ],
  )


def _show_saved(model: str, rows: Sequence[Mapping[str, Any]]) -> None:
  """Prints the part of a step that each policy saves."""
  names = list(dict.fromkeys(r["policy"] for r in rows))
  lines: dict[str, list[str]] = {}
  for row in rows:
    cells = lines.setdefault(f"{row['machine']}, {row['step']}", [])
    if row["policy"] != "p=1":
      cells.append(
        f"{_percent(row['saved_without'])}; {_percents(row['saved_with'])}"
      )
  tables.table(
    f"{model}: the part of a step that is saved against p=1\n"
    "by bytes alone; with latency",
    ["machine, step", *(name for name in names if name != "p=1")],
    [[name, *cells] for name, cells in lines.items()],
  )


def _show_helps(result: Mapping[str, Any]) -> None:
  """Prints from how many sequences on a policy is worth it."""

  def count(value: int | None) -> str:
    return "never" if value is None else str(value)

  lines: dict[str, list[str]] = {}
  for h in result["helps"]:
    name = f"{h['model']}, {h['machine']}"
    cells = lines.setdefault(name, [f"{h['most_sequences']:,}"])
    ends = " or ".join(dict.fromkeys(map(count, h["with"])))
    cells.append(f"{count(h['without'])}; {ends}")
  policies = dict.fromkeys(h["policy"] for h in result["helps"])
  tables.table(
    f"decode, {result['context']} positions: from how many sequences on "
    f"{result['threshold']:.0%} of a step are saved, of those that fit\n"
    "by bytes alone; with the least or the greatest latency",
    ["model, machine", "fit", *policies],
    [[name, *cells] for name, cells in lines.items()],
  )


def show_layers(result: Mapping[str, Any]) -> None:
  """Prints measured layers of Llama-2-70B beside the roofline's.

  Args:
    result: What `caatnet.studies.inference.study.run` returned.
  """
  tables.table(
    "us of a layer of Llama-2-70B without attention's core and all-reduces: "
    f"measured, and by the roofline\n({result['layers_source']})",
    ["GPU, ranks", "tokens", "products", "the rest", "roofline of products",
     "products / roofline", "layer / roofline"],
    [
      [f"{r['gpu']}, {r['num_ranks']}", f"{r['tokens']:,}",
       f"{r['products_us']:,.0f}", f"{r['others_us']:,.0f}",
       f"{r['roofline_us']:,.0f}",
       f"{r['products_us'] / r['roofline_us']:.2f}",
       f"{(r['products_us'] + r['others_us']) / r['roofline_us']:.2f}"]
      for r in result["layers"]
    ],
  )
