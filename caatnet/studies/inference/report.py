"""Report of the study of prefill and decode."""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

from parallel.base import plot
from parallel.base.report import Column, Report, Table, keyed, span

Rows = Sequence[Mapping[str, Any]]


def report(result: Mapping[str, Any]) -> Report:
  """Returns steps, savings of policies, sources of constants, and curves."""
  parts = []
  for model in result["models"]:
    rows = [row for row in result["rows"] if row["model"] == model]
    parts += [_steps(model, rows, result), _saved(model, rows)]
  machines = Table(
    "machines: rates, and the time of the smallest all-reduce",
    [
      Column("name", "machine"), Column("peak_tflops", "TFLOP/s", "g"),
      Column("memory_gb", "GB", ".0f"), Column("memory_gb_s", "GB/s", "g"),
      Column("links_gb_s", "links GB/s", ".0f"),
      Column("smallest_all_reduce_us", "us",
             functools.partial(span, form="{:.0f}".format)),
      "mark", Column("source", "source of the us"),
    ],
    result["machines"],
  )
  return Report(
    "Prefill and decode with partial synchronisation",
    [*parts, _helps(result), layers(result), machines],
    (lambda: _figure(result)) if any(
      curve["sequences"] for curve in result["curves"]
    ) else None,  # there is no policy but p = 1, or no cache fits
  )


def _percent(value: float) -> str:
  return f"{value + 0.0:.0%}".replace("-0%", "0%")


def _steps(model: str, rows: Rows, result: Mapping[str, Any]) -> Table:
  """Returns the terms of a step with full synchronisation."""
  rows = [row for row in rows if row["policy"] == rows[0]["policy"]]
  factor, ms = result["compute_factor"], "{:.2f}".format
  return Table(
    f"{model}, {rows[0]['policy']}: ms of a step with sequences of "
    f"{result['context']} positions (prefill: one of {result['prompt']})\n"
    "bounds, not a measurement: compute by the roofline of products, weights "
    "and cache" + f", times {factor:g}" * (factor != 1)
    + f";\n{rows[0]['num_collectives']} all-reduces by their bytes alone; with "
    "latency. Nothing overlaps",
    [
      Column("", "machine, step", "{machine}, {step}"),
      Column("", "GB: weights + cache",
             "{weights_gb:.1f} + {cache_gb:.1f}{too_much}"),
      Column("compute_ms", "compute", ".2f"), Column("sent_mb", "MB", ",.1f"),
      Column("", "all-reduces", "{links_ms:.2f}; {collectives}"),
      Column("", "step", "{without_ms:.2f}; {with_latency}"),
    ],
    [
      row | {
        "too_much": "" if row["fits"] else ", too much",
        "collectives": span(row["collectives_ms"], ms),
        "with_latency": span(row["with_ms"], ms),
      }
      for row in rows
    ],
  )


def _saved(model: str, rows: Rows) -> Table:
  """Returns the fraction of a step that each policy but p=1 saves."""
  lines: dict[str, dict[str, str]] = {}
  others = [row for row in rows if row["policy"] != "p=1"]
  for row in others:
    name = f"{row['machine']}, {row['step']}"
    lines.setdefault(name, {"name": name})[row["policy"]] = (
      f"{_percent(row['saved_without'])}; "
      f"{span(sorted(row['saved_with']), _percent)}"
    )
  return Table(
    f"{model}: the part of a step that is saved against p=1\n"
    "by bytes alone; with latency",
    [Column("name", "machine, step"),
     *keyed(dict.fromkeys(row["policy"] for row in others))],
    list(lines.values()),
  )


def _helps(result: Mapping[str, Any]) -> Table:
  """Returns the least number of sequences for which a policy is worthwhile."""

  def count(value: int | None) -> str:
    return "never" if value is None else str(value)

  lines: dict[str, dict[str, Any]] = {}
  for h in result["helps"]:
    name = f"{h['model']}, {h['machine']}"
    line = lines.setdefault(name, {"name": name, "fit": h["most_sequences"]})
    line[h["policy"]] = (
      f"{count(h['without'])}; {span(h['with'], count, ' or ')}"
    )
  return Table(
    f"decode, {result['context']} positions: from how many sequences on "
    f"{result['threshold']:.0%} of a step are saved, of those that fit\n"
    "by bytes alone; with the least or the greatest latency",
    [Column("name", "model, machine"), Column("fit", "fit", ","),
     *keyed(dict.fromkeys(h["policy"] for h in result["helps"]))],
    list(lines.values()),
  )


def layers(result: Mapping[str, Any]) -> Table:
  """Returns measured layers of Llama-2-70B and the roofline's."""
  us = ",.0f"
  return Table(
    "us of a layer of Llama-2-70B without attention's core and all-reduces: "
    f"measured, and by the roofline\n({result['layers_source']})",
    [
      Column("", "GPU, ranks", "{gpu}, {num_ranks}"),
      Column("tokens", "tokens", ","), Column("products_us", "products", us),
      Column("others_us", "the rest", us),
      Column("roofline_us", "roofline of products", us),
      Column("products", "products / roofline", ".2f"),
      Column("layer", "layer / roofline", ".2f"),
    ],
    [
      r | {
        "products": r["products_us"] / r["roofline_us"],
        "layer": (r["products_us"] + r["others_us"]) / r["roofline_us"],
      }
      for r in result["layers"]
    ],
  )


def _figure(result: Mapping[str, Any]) -> plot.Figure:
  """Returns the savings of policies in decoding, by the number of sequences.

  A band extends from the least latency to the greatest; dashed lines have no
  latency.
  """
  curves = [c for c in result["curves"] if c["sequences"]]
  models, policies, machines = (
    list(dict.fromkeys(c[key] for c in curves))
    for key in ("model", "policy", "machine")
  )
  marks: dict[tuple[str, str], list[Any]] = {
    (model, policy): [] for model in models for policy in policies
  }
  for curve in curves:
    colour = f"C{machines.index(curve['machine'])}"
    low, high = zip(*(s["saved_with"] for s in curve["saved"]), strict=True)
    x = curve["sequences"]
    marks[curve["model"], curve["policy"]] += [
      plot.Band(x, low, high, colour),
      plot.Line(x, low, curve["machine"], colour=colour, width=1),
      plot.Line(x, high, colour=colour, width=1),
      plot.Line(x, [s["saved_without"] for s in curve["saved"]], "", "--",
                colour=colour, width=1),
    ]
  marks[models[-1], policies[-1]].append(
    plot.Line((), (), "bytes alone, no latency", "--", colour="gray")
  )
  return plot.Figure(
    [
      plot.Panel(
        of, policy if model == models[0] else "",
        plot.Axis("sequences that decode", "log2"),
        f"{model}: part of a step that is saved", grid=True,
      )
      for (model, policy), of in marks.items()
    ],
    (1.4 + 2.7 * len(policies), 1.2 + 2.6 * len(models)), len(policies),
    legend="outside lower center", legend_columns=3, share_x="all",
    share_y="all",
  )
