"""Report of the study of nano-batches."""

from collections.abc import Mapping
import functools
from typing import Any

from parallel.base import plot
from parallel.base.report import Report, Table

Row = Mapping[str, Any]


def report(result: Row) -> Report:
  """Returns tables of plans and of NanoFlow's figures, and a figure."""
  return Report(
    "Nano-batches",
    [
      *(_curves(result) if result["curves"] else ()), *_joint(result),
      *_published(result),
    ],
    functools.partial(_figure, result) if result["joint"] else None,
  )


def _curves(result: Row) -> list[Table | str]:
  """Returns tables of plans by machine and tokens, and of break-even points."""
  plans, first = result["plan_s"], result["curves"][0]["interference"]
  return [
    f"{result['model']}: predicted steps of at most {result['decodes']} "
    f"decodes with {result['context']:,} positions, other tokens are prompts;\n"
    f"profiles of A100 and H100 ({result['times_source']}), roofline at "
    f"{result['utilisation']:.0%} of the peak for others; times of reductions: "
    "least and greatest\nplausible ones; interference: slowdown of device and "
    f"network while both are busy.\n{plans['count']:,} plans of "
    f"{plans['considered']:,} candidates took {plans['sum']:.0f} s of "
    f"processor time, the slowest {plans['worst']:.2f} s",
    Table(
      "least tokens from which on nano-batches gain more than "
      f"{result['threshold']:.0%} (-: never), and the largest gain",
      "machine | end=reductions | interference:g | tokens | "
      "gain:.2f=largest gain", result["break_even"],
    ),
    Table(
      f"plans: least times of reductions, interference {first:g}; optimum at "
      "peak rates; rates in tokens/s per device",
      "machine | tokens | text=pieces | algorithm=reduction | step_s | "
      "gain:.3f=relative to one batch | rate:,.0f | optimum_rate:,.0f | "
      "of_optimum:.0%=share of optimum",
      [
        row for row in result["curves"]
        if (row["end"], row["interference"]) == ("least", first)
      ],
    ),
  ]


def _joint(result: Row) -> list[Table]:
  """Returns tables of nano-batches with partial and low-bit reductions."""
  return [
    Table(
      "nano-batches, p and bits of a reduced number: throughput, relative to "
      "one batch with p = 1 and 16 bits\nleast times of reductions, "
      f"interference {result['joint_interference']:g}; fewer than 16 bits "
      "are predicted only: the executor does not send them",
      "machine | tokens | bits | p:g | text=pieces | algorithm=reduction | "
      "single:.2f=one batch | nano:.2f=by pieces | both:.2f", result["joint"],
    ),
    Table(
      "largest p at which nano-batches stop paying (gain of at most "
      f"{result['threshold']:.0%}, there and below); -: always pay",
      "machine | tokens | bits | p:g", result["stops"],
    ),
  ]


def _published(result: Row) -> list[Table | str]:
  """Returns tables of NanoFlow's published figures and their predictions."""
  best = result["speedups"]
  return [
    Table(
      "NanoFlow: optimum of Llama 2 70B, rate / (2 parameters), tokens/s per "
      "A100",
      "name=rate | rate/1e12:.1f=TFLOP/s | parameters:,.0f | "
      "peak_share=of the peak | tokens:,.0f=optimum", result["optimum"],
    ),
    Table(
      "published throughputs of NanoFlow: of its optimum, and relative to "
      "other systems (mean over the traces: "
      f"{best['mean']['trtllm']:.2f} of TensorRT-LLM)",
      "workload | optimal:.1%=of optimum | vllm:.2f=vLLM | "
      "fastgen:.2f=FastGen | trtllm:.2f=TensorRT-LLM", best["rows"],
    ),
    Table(
      "ablation (1024 in, 512 out), predicted without interference, and the "
      "interference that gives the published gains (fitted); -: none",
      "end=reductions | split:+.1%=splitting alone | "
      "network:.2f=network overlaps | memory:.2f=and memory | "
      "network_interference:.2f=fitted to 1.07 | "
      "memory_interference:.2f=fitted to 1.17", result["ablation"],
    ),
    Table(
      "workloads, tokens/s per A100: predicted without overlap, with ideal "
      "overlap, and with the\ninterference fitted to 1.17 on 1024 in, 512 out",
      "workload | end=reductions | decodes | sequential:,.0f | ideal:,.0f | "
      "fitted:,.0f | published:,.0f | error:+.1% | "
      "optimum:,.0f=optimum at peak | bound_by", result["workloads"],
    ),
    Table(
      "published pipelines by one model, throughput of one batch = 1; fitted: "
      "the interferences above",
      "model | end=reductions | published=pieces | network:.2f | "
      "memory:.2f=and memory | network_fitted:.2f | "
      "memory_fitted:.2f=both, fitted | optimal:.0%=both, fitted, of optimum",
      result["pipelines"],
    ),
    Table(
      "our plans for the same steps, which overlap the network only",
      "model | end=reductions | ours=ideal | ours_gain:.2f=gain | "
      "ours_fitted=fitted | ours_fitted_gain:.2f=fitted gain",
      result["pipelines"],
    ),
    _offload(result["offload"]),
  ]


def _offload(off: Row) -> str:
  """Returns a text with the rates of copies of finished caches to the host."""
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
  """Plots gains by number of tokens, and throughputs by reduced fraction p."""
  tokens = max(row["tokens"] for row in result["joint"])
  return plot.figure([
    *plot.lines(
      [row for row in result["curves"] if row["end"] == "least"],
      "tokens=tokens of a step", "gain=throughput of one batch = 1",
      by="machine", each="interference", log="x", title="interference",
    ),
    *plot.lines(
      [row for row in result["joint"] if row["tokens"] == tokens],
      "p", "both=nano-batches", "single=one batch", by="bits", each="machine",
      label="p = 1, 16 bits, one batch = 1", title=f"{tokens:,} tokens, bits",
    ),
  ])
