"""Predictions of NanoFlow's published figures, from other measured profiles.

NanoFlow's optimum is peak rate / (2 parameters), in input and output tokens per
second. The time of a step is predicted from Vidur's profile of an A100, for the
pipeline that NanoFlow's search found; attention runs at the peak rates of an
A100. The interference (slowdown by overlap) is fitted to the published gains of
one workload and used to predict the others. The loss by splitting is predicted.

A step of a workload has input and output tokens in their long-run ratio.
Published figures are in tokens per second and GPU, from NanoFlow (Zhu et al.,
OSDI 2025, arXiv 2408.12757) and its repository.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple

from caatnet.studies.serving import nanobatch_pipelines as pipelines
from caatnet.studies.serving.nanobatch_pipelines import PublishedPipeline
from parallel.plans.hardware.devices import A100
from parallel.plans.nanobatches import (
  nanobatch,
  nanobatch_costs,
  nanobatch_timing,
)
from parallel.plans.nanobatches.nanobatch_costs import PeakRateTimes, TokenMix
from parallel.plans.network import inference
from parallel.plans.network.inference import ModelStep

PARAMETERS = 70e9  # the paper's round number
PUBLISHED_OPTIMUM = 1857.0  # tokens per second and GPU
QUOTED_RATE = 280e12  # FLOP/s that the paper states with the optimum
# Published gains if collectives overlap, and if attention overlaps, too.
NETWORK_GAIN, MEMORY_GAIN = 1.07, 1.17
# Bytes/s of copies over PCI Express 4 x16: the raw rate, and an assumed one.
COPY_RATES = (32e9, 25e9)
# Published cost of offloading (share of a step), and factor of saved compute.
OFFLOAD_COST, OFFLOAD_GAIN = 0.030, 3.02


class Workload(NamedTuple):
  """Lengths of a workload's requests, and its published throughputs.

  Attributes:
    input, output: Mean tokens of prompt and response.
    context: Mean positions that a decode attends to.
    prefill_context: Mean positions that a prompt token attends to.
    vllm, fastgen, trtllm, nanoflow: Published tokens per second and GPU.
    source: Source of the lengths.
  """

  input: float
  output: float
  context: float
  prefill_context: float
  vllm: float
  fastgen: float
  trtllm: float
  nanoflow: float
  source: str


def _constant_lengths(size: int, response: int, *published: float) -> Workload:
  """Returns a workload whose prompts and responses have constant lengths."""
  return Workload(
    size, response, size + (response + 1) / 2, (size + 1) / 2, *published,
    "constant lengths",
  )


_MOMENTS = "moments of efeslab/Nanoflow (Apache-2.0), datasets/traces/{}.csv"
# Prompts are cut so that prompt and response have at most 4,096 positions.
WORKLOADS = {
  "512 in, 512 out": _constant_lengths(512, 512, 494, 490, 735, 1286),
  "1024 in, 512 out": _constant_lengths(1024, 512, 552, 513, 817, 1263),
  "512 in, 1024 out": _constant_lengths(512, 1024, 410, 372, 636, 1212),
  "Splitwise": Workload(
    1140.3, 211.1, 1220.5, 1064.1, 484, 548, 831, 1259,
    _MOMENTS.format("splitwise") + ", Azure's conversations of 2023",
  ),
  "LMSYS": Workload(
    92.2, 207.4, 302.1, 192.0, 251, 293, 560, 1247, _MOMENTS.format("lmsys"),
  ),
  "ShareGPT": Workload(
    274.8, 322.9, 547.2, 853.2, 255, 335, 639, 1272,
    _MOMENTS.format("sharegpt"),
  ),
}
FITTED_ON = "1024 in, 512 out"
TRACES = ("Splitwise", "LMSYS", "ShareGPT")


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Computes the figures.

  Args:
    config: Config like configs/serving/nanobatches.py, as nested dicts.

  Returns:
    Plain data: "optimum", "speedups", "ablation" (with the least and with the
    greatest times of reductions), "workloads", "pipelines", "offload".
  """
  ablation = [_ablation(end) for end in nanobatch_costs.TIME_RANGE_ENDS]
  return {
    "optimum": optimum_candidates(),
    "speedups": speedups(),
    "ablation": ablation,
    "workloads": [
      row for found in ablation for row in _workloads(found)
    ],
    "pipelines": [
      _pipeline_gains(name, end, config["utilisation"], ablation)
      for name in pipelines.PIPELINES for end in nanobatch_costs.TIME_RANGE_ENDS
    ],
    "offload": offload_rates(),
  }


def optimum_candidates() -> list[dict[str, Any]]:
  """Returns peak rates that may explain NanoFlow's published optimum."""
  model = pipelines.PIPELINES["llama-2-70b"].model
  published = PUBLISHED_OPTIMUM
  return [
    {
      "name": name, "rate": rate, "parameters": parameters,
      "tokens": rate / (2 * parameters), "peak_share": rate / A100.peak(
        model.dtype
      ),
    }
    for name, rate, parameters in (
      ("rate that gives the optimum", 2 * PARAMETERS * published, PARAMETERS),
      ("with exact parameters", 2 * model.num_params * published,
       float(model.num_params)),
      ("rate quoted with it", QUOTED_RATE, PARAMETERS),
      ("peak of the datasheet", A100.peak(model.dtype), PARAMETERS),
    )
  ]


def speedups() -> dict[str, Any]:
  """Returns published speed-ups of NanoFlow over other systems, by workload."""
  rows = [
    {
      "workload": name, "optimal": w.nanoflow / PUBLISHED_OPTIMUM,
      "vllm": w.nanoflow / w.vllm, "fastgen": w.nanoflow / w.fastgen,
      "trtllm": w.nanoflow / w.trtllm,
    }
    for name, w in WORKLOADS.items()
  ]
  traces = [row for row in rows if row["workload"] in TRACES]
  return {
    "rows": rows,
    "mean": {
      system: sum(row[system] for row in traces) / len(traces)
      for system in ("vllm", "fastgen", "trtllm")
    },
    "least": min(row["optimal"] for row in rows),
    "most": max(row["optimal"] for row in rows),
  }


def mix(workload: Workload, tokens: int) -> TokenMix:
  """Returns a step with prompt and output tokens in the workload's ratio."""
  decodes = round(
    tokens * workload.output / (workload.input + workload.output)
  )
  return TokenMix(
    decodes, workload.context, tokens - decodes, workload.prefill_context
  )


def fit_interference(
  seconds: Callable[[float], float], target: float
) -> float | None:
  """Returns the interference in [0, 1] that gives a time; None if none does.

  Args:
    seconds: Increasing function from an interference to a time in seconds.
    target: Time in seconds.
  """
  low, high = 0.0, 1.0
  if not seconds(low) <= target <= seconds(high):
    return None
  while high - low > 1e-4:
    middle = (low + high) / 2
    low, high = (
      (middle, high) if seconds(middle) < target else (low, middle)
    )
  return (low + high) / 2


@dataclasses.dataclass(frozen=True)
class _PipelineTimer:
  """Step times of a published pipeline, with and without overlap."""

  pipeline: PublishedPipeline
  layer: pipelines.LayerTimes

  def overlapped(self, interference: float, memory: bool) -> float:
    made = pipelines.operations(self.pipeline, self.layer, memory)
    return nanobatch_timing.step_seconds(
      made, self.layer.num_layers, interference
    )

  def sequential(self, *sizes: int) -> float:
    made = pipelines.sequential(self.layer, sizes)
    return nanobatch_timing.sequential_seconds(made, self.layer.num_layers)


def _make_pipeline_timer(workload: Workload, end: str) -> _PipelineTimer:
  """Returns a timer of the published LLaMA-2-70B pipeline on a workload.

  `end` selects the "least" or "greatest" plausible time of reductions.
  """
  pipeline = pipelines.PIPELINES["llama-2-70b"]
  profile = nanobatch_costs.profiles()["a100", pipeline.gpus]
  return _PipelineTimer(pipeline, pipelines.layer_times(
    pipeline, mix(workload, pipeline.tokens), profile, A100, end
  ))


def _ablation(end: str) -> dict[str, Any]:
  """Returns the gains in NanoFlow's ablation, and the fitted interferences.

  `end` selects the "least" or "greatest" plausible time of reductions.
  """
  timed = _make_pipeline_timer(WORKLOADS[FITTED_ON], end)
  tokens = timed.pipeline.tokens
  whole = timed.sequential(tokens)
  # The published ablation runs two equal halves.
  halves = timed.sequential(tokens // 2, tokens // 2)
  return {
    "end": end, "workload": FITTED_ON, "step_s": whole,
    "split": whole / halves - 1,
    "network": whole / timed.overlapped(0, memory=False),
    "memory": whole / timed.overlapped(0, memory=True),
    "network_interference": fit_interference(
      lambda i: timed.overlapped(i, memory=False), whole / NETWORK_GAIN
    ),
    "memory_interference": fit_interference(
      lambda i: timed.overlapped(i, memory=True), whole / MEMORY_GAIN
    ),
  }


def _workloads(ablation: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns all workloads' throughputs with no, ideal and fitted overlap.

  `ablation` is a result of `_ablation`, with the fitted interference.
  """
  rows = []
  for name, workload in WORKLOADS.items():
    timed = _make_pipeline_timer(workload, ablation["end"])
    pipeline = timed.pipeline
    rate = pipeline.tokens / pipeline.gpus
    assert pipeline.machine is not None
    best = nanobatch_costs.peak_rate_times(
      pipeline.model, pipeline.machine, mix(workload, pipeline.tokens)
    )
    found = {
      "sequential": timed.sequential(pipeline.tokens),
      "ideal": timed.overlapped(0, memory=True),
      "fitted": timed.overlapped(
        ablation["memory_interference"], memory=True
      ),
    }
    rows.append({
      "workload": name, "end": ablation["end"],
      "decodes": mix(workload, pipeline.tokens).decodes,
      "published": workload.nanoflow,
      **{key: rate / seconds for key, seconds in found.items()},
      "error": rate / found["fitted"] / workload.nanoflow - 1,
      "optimum": rate / best.seconds, "bound_by": bound_by(best),
      "source": workload.source,
    })
  return rows


def bound_by(best: PeakRateTimes) -> str:
  """Returns the resource with the longest time: compute, memory or network."""
  times = dataclasses.asdict(best)
  return max(times, key=times.__getitem__)


def _pipeline_gains(
  name: str, end: str, utilisation: float, ablation: list[dict[str, Any]]
) -> dict[str, Any]:
  """Returns predicted gains of a published pipeline and `nanobatch.plan`'s.

  Args:
    name: Key of `pipelines.PIPELINES`.
    end: "least" or "greatest" plausible time of reductions.
    utilisation: Fraction of the peak that products without a profile reach.
    ablation: Results of `_ablation`, of which the one for `end` is used.
  """
  pipeline = pipelines.PIPELINES[name]
  profile = nanobatch_costs.roofline(
    pipeline.model, A100, pipeline.gpus, pipeline.tokens, utilisation,
    pipeline.experts,
  )
  if name == nanobatch_costs.PROFILED_MODEL:
    profile = nanobatch_costs.profiles()["a100", pipeline.gpus]
  timed = _PipelineTimer(pipeline, pipelines.layer_times(
    pipeline, mix(WORKLOADS[FITTED_ON], pipeline.tokens), profile, A100, end
  ))
  (fit,) = (row for row in ablation if row["end"] == end)
  costs = pipelines.costs(name, pipeline, timed.layer)
  whole = timed.sequential(pipeline.tokens)
  interference = fit["network_interference"]
  ideal = nanobatch.plan(costs, pipeline.tokens)
  slowed = nanobatch.plan(costs, pipeline.tokens, interference=interference)
  memory_s = timed.overlapped(fit["memory_interference"], memory=True)
  throughput = pipeline.tokens / pipeline.gpus / memory_s
  # Tokens per second and GPU at the FLOP/s of the published optimum.
  optimal = PUBLISHED_OPTIMUM * PARAMETERS / pipeline.active_parameters
  return {
    "model": name, "end": end, "tokens": pipeline.tokens,
    "gpus": pipeline.gpus,
    "published": f"{pipeline.first:,} + {pipeline.tokens - pipeline.first:,}",
    "times": profile.name,
    "network": whole / timed.overlapped(0, memory=False),
    "memory": whole / timed.overlapped(0, memory=True),
    "network_fitted": whole / timed.overlapped(interference, memory=False),
    "memory_fitted": whole / memory_s,
    "throughput": throughput, "optimal": throughput / optimal,
    "ours": pipelines.format_sizes(ideal), "ours_gain": ideal.gain,
    "ours_fitted": pipelines.format_sizes(slowed),
    "ours_fitted_gain": slowed.gain,
  }


def offload_rates() -> dict[str, Any]:
  """Returns rates of copies of finished caches to the host, and their time.

  Every token's keys and values are copied to the host once. Times are fractions
  of a step.
  """
  pipeline = pipelines.PIPELINES["llama-2-70b"]
  model, gpus = pipeline.model, pipeline.gpus
  token = inference.memory_bytes(model, ModelStep(1, 1, 1), 1)["cache"]
  published = WORKLOADS[FITTED_ON].nanoflow
  step_s = pipeline.tokens / (published * gpus)
  size = token * pipeline.tokens / gpus  # of a step, on each GPU
  return {
    "token_bytes": round(token),
    "rate": published * gpus * token,
    "optimum_rate": PUBLISHED_OPTIMUM * gpus * token,
    "step_s": step_s,
    "exposed": [size / rate / step_s for rate in COPY_RATES],
    "cost": OFFLOAD_COST,
    # Bytes per second of a GPU, if copies were not hidden at all.
    "cost_rate": size / (OFFLOAD_COST * step_s),
    # A conversation of T equal turns computes (T + 1) / 2 times its tokens.
    "gain": OFFLOAD_GAIN, "turns": 2 * OFFLOAD_GAIN - 1,
  }
