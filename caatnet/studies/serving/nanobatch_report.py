"""Report of the study of nano-batches."""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

from parallel.base import plot
from parallel.base.report import Column, Report, Table

Row = Mapping[str, Any]

_NONE = {"default": "none"}
_STEP = (Column("machine", "machine"), Column("tokens", "tokens", ","))


def report(result: Row) -> Report:
  """Returns tables of plans and of NanoFlow's figures, and a figure."""
  return Report(
    "Nano-batches",
    [
      *(_curves(result) if result["curves"] else ()),
      *(_joint(result) if result["joint"] else ()),
      *_published(result),
    ],
    functools.partial(_figure, result) if result["joint"] else None,
  )


def _curves(result: Row) -> list[Table | str]:
  """Returns plans by machine and tokens, and the break-even."""
  plans = result["plan_s"]
  shown = [
    row for row in result["curves"]
    if row["end"] == "least"
    and row["interference"] == result["curves"][0]["interference"]
  ]
  return [
    f"{result['model']}: predicted steps of at most {result['decodes']} "
    f"decodes with {result['context']:,} positions, other tokens are prompts;\n"
    "profiles of A100 and H100, roofline at "
    f"{result['utilisation']:.0%} of the peak for others; times of reductions: "
    "least and greatest\nplausible ones; interference: slowdown of device and "
    f"network while both are busy.\n{plans['count']:,} plans of "
    f"{plans['considered']:,} candidates took {plans['sum']:.0f} s of "
    f"processor time, the slowest {plans['worst']:.2f} s",
    Table(
      "least tokens from which on nano-batches gain more than "
      f"{result['threshold']:.0%}, and the largest gain",
      [
        Column("machine", "machine"), Column("end", "reductions"),
        Column("interference", "interference", "g"),
        Column("tokens", "tokens", ",", default="never"),
        Column("gain", "largest gain", ".2f"),
      ],
      result["break_even"],
    ),
    Table(
      "plans: least times of reductions, interference "
      f"{shown[0]['interference']:g}; optimum at peak rates",
      [
        *_STEP, Column("text", "pieces"), Column("algorithm", "reduction"),
        Column("step_s", "step\n(ms)", ".2f", unit=1e-3),
        Column("gain", "relative to\none batch", ".3f"),
        Column("rate", "tokens/s\nper device", ",.0f"),
        Column("optimum_rate", "optimum", ",.0f"),
        Column("of_optimum", "share of\noptimum", ".0%"),
      ],
      shown,
    ),
  ]


def _joint(result: Row) -> list[Table | str]:
  """Returns nano-batches together with p and bits."""
  return [
    Table(
      "nano-batches, p and bits of a reduced number: throughput, relative to "
      "one batch with p = 1 and 16 bits\nleast times of reductions, "
      f"interference {result['joint_interference']:g}; fewer than 16 bits "
      "are predicted only: the executor does not send them",
      [
        *_STEP, Column("bits", "bits"), Column("p", "p", "g"),
        Column("text", "pieces"), Column("algorithm", "reduction"),
        Column("single", "one batch", ".2f"),
        Column("nano", "by pieces", ".2f"), Column("both", "both", ".2f"),
      ],
      result["joint"],
    ),
    Table(
      "largest p at which nano-batches stop paying (gain of at most "
      f"{result['threshold']:.0%}, there and below)",
      [*_STEP, Column("bits", "bits"),
       Column("p", "p", "g", default="always pay")],
      result["stops"],
    ),
  ]


def _published(result: Row) -> list[Table | str]:
  """Returns NanoFlow's figures."""
  return [*_throughputs(result), *_pipelines(result), _copies(result)]


def _throughputs(result: Row) -> list[Table]:
  """Returns the optimum, published throughputs, and their parts."""
  best = result["speedups"]
  return [
    Table(
      "NanoFlow: optimum of Llama 2 70B, rate / (2 parameters), tokens/s per "
      "A100",
      [
        Column("name", "rate"), Column("rate", "TFLOP/s", ".1f", unit=1e12),
        Column("parameters", "parameters", ",.0f"),
        Column("peak_share", "of the peak", ".1%"),
        Column("tokens", "optimum", ",.0f"),
      ],
      result["optimum"],
    ),
    Table(
      "published throughputs of NanoFlow: of its optimum, and relative to "
      "other systems (mean over the traces: "
      f"{best['mean']['trtllm']:.2f} of TensorRT-LLM)",
      [
        Column("workload", "workload"),
        Column("optimal", "of optimum", ".1%"),
        Column("vllm", "vLLM", ".2f"), Column("fastgen", "FastGen", ".2f"),
        Column("trtllm", "TensorRT-LLM", ".2f"),
      ],
      best["rows"],
    ),
    Table(
      "ablation (1024 in, 512 out), predicted without interference, and the "
      "interference that gives the published gains (fitted)",
      [
        Column("end", "reductions"),
        Column("split", "splitting\nalone", "+.1%"),
        Column("network", "network\noverlaps", ".2f"),
        Column("memory", "and\nmemory", ".2f"),
        Column("network_interference", "fitted to\n1.07", ".2f", **_NONE),
        Column("memory_interference", "fitted to\n1.17", ".2f", **_NONE),
      ],
      result["ablation"],
    ),
    Table(
      "workloads, tokens/s per A100: predicted without overlap, with ideal "
      "overlap, and with the\ninterference fitted to 1.17 on 1024 in, 512 out",
      [
        Column("workload", "workload"), Column("end", "reductions"),
        Column("decodes", "decodes", ","),
        Column("sequential", "sequential", ",.0f"),
        Column("ideal", "ideal", ",.0f"), Column("fitted", "fitted", ",.0f"),
        Column("published", "published", ",.0f"),
        Column("error", "error", "+.1%"),
        Column("optimum", "optimum\nat peak", ",.0f"),
        Column("bound_by", "bound by"),
      ],
      result["workloads"],
    ),
  ]


def _pipelines(result: Row) -> list[Table]:
  """Returns published pipelines, and our plans for the same steps."""
  return [
    Table(
      "published pipelines by one model, throughput of one batch = 1; fitted: "
      "the interferences above",
      [
        Column("model", "model"), Column("end", "reductions"),
        Column("published", "pieces"), Column("network", "network", ".2f"),
        Column("memory", "and\nmemory", ".2f"),
        Column("network_fitted", "network,\nfitted", ".2f"),
        Column("memory_fitted", "both,\nfitted", ".2f"),
        Column("optimal", "both, fitted,\nof optimum", ".0%"),
      ],
      result["pipelines"],
    ),
    Table(
      "our plans for the same steps, which overlap the network only",
      [
        Column("model", "model"), Column("end", "reductions"),
        Column("ours", "ideal"), Column("ours_gain", "gain", ".2f"),
        Column("ours_fitted", "fitted"),
        Column("ours_fitted_gain", "fitted\ngain", ".2f"),
      ],
      result["pipelines"],
    ),
  ]


def _copies(result: Row) -> str:
  """Describes the copies of finished caches to host memory."""
  off = result["offload"]
  return (
    f"copies of finished caches: {off['token_bytes']:,} B per token, "
    f"{off['rate'] / 1e9:.2f} GB/s at the published throughput and "
    f"{off['optimum_rate'] / 1e9:.2f} GB/s at the optimum;\nif none were "
    f"hidden they would take {off['exposed'][0]:.1%} to "
    f"{off['exposed'][1]:.1%} of a step, and {off['cost']:.1%} at "
    f"{off['cost_rate'] / 1e9:.1f} GB/s per GPU;\n{off['gain']} times fewer "
    "computed tokens follow from conversations of "
    f"{off['turns']:.1f} equal turns"
  )


def _figure(result: Row) -> plot.Figure:
  """Returns gains by tokens, and throughputs by p."""
  gains = [
    plot.Panel(
      [
        plot.Line(
          [row["tokens"] for row in rows],
          [row["gain"] for row in rows], machine, marker=".",
        )
        for machine in dict.fromkeys(r["machine"] for r in result["curves"])
        if (rows := _chosen(
          result["curves"], machine=machine, interference=interference,
          end="least",
        ))
      ],
      f"interference {interference:g}",
      plot.Axis("tokens of a step", "log2"),
      "throughput of one batch = 1", "upper left" if i == 0 else "", True,
    )
    for i, interference in enumerate(dict.fromkeys(
      r["interference"] for r in result["curves"]
    ))
  ]
  tokens = max(row["tokens"] for row in result["joint"])
  machines = list(dict.fromkeys(row["machine"] for row in result["joint"]))
  joint = [
    plot.Panel(
      [
        plot.Line(
          [row["p"] for row in rows], [row[key] for row in rows],
          f"{bits} bits, {name}", style, colour=f"C{i}",
        )
        for i, bits in enumerate(dict.fromkeys(
          r["bits"] for r in result["joint"]
        ))
        for key, style, name in (
          ("single", "--", "one batch"), ("both", "-", "nano-batches")
        )
        if (rows := _chosen(
          result["joint"], machine=machine, tokens=tokens, bits=bits
        ))
      ],
      f"{machine}, {tokens:,} tokens", "p", "p = 1, 16 bits, one batch = 1",
      grid=True,
      # One legend for all: most of the last panel's left corner is empty.
      legend="lower left" if machine == machines[-1] else "",
    )
    for machine in machines
  ]
  columns = max(len(gains), len(joint))
  return plot.Figure(
    [*gains, *joint], (3.8 * columns, 7.0), columns,
  )


def _chosen(rows: Sequence[Row], **fields: Any) -> list[Row]:
  """Returns rows with given fields."""
  return [
    row for row in rows
    if all(row[key] == value for key, value in fields.items())
  ]
