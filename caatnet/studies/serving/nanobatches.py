"""Study of nano-batches: break-even, and combination with smaller reductions.

`parallel.plans.nanobatches.nanobatch` plans a step of decodes and prompt tokens
for each machine, number of tokens and interference (slowdown by overlap). The
break-even is the smallest number of tokens from which on all steps gain more
than a threshold. The joint table combines nano-batches with the fraction p of
reduced channels and with the bits of a reduced number. NanoFlow's figures are
in `caatnet.studies.serving.nanobatch_figures`.
"""

from collections.abc import Iterable, Mapping, Sequence
import itertools
import time
from typing import Any

from rich.console import Console
from rich.progress import track

from caatnet.studies.serving import nanobatch_figures
from caatnet.studies.serving.nanobatch_pipelines import format_sizes
from parallel.plans.nanobatches import nanobatch, nanobatch_costs
from parallel.plans.nanobatches.nanobatch import NanobatchPlan, Reduction
from parallel.plans.nanobatches.nanobatch_costs import (
  LLAMA_2_70B,
  PROFILED_MODEL,
  TokenMix,
)
from parallel.plans.network import inference
from parallel.plans.network.inference import Machine

_BASELINE_P_BITS = (1.0, 16)  # p and bits of the baseline


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Computes curves, the joint table and the paper's figures.

  Args:
    config: Config like configs/serving/nanobatches.py, as nested dicts.

  Returns:
    Plain data: "curves" (a step on a machine), "break_even", "joint"
    (throughputs by p and bits), "stops" (largest fraction p of reduced channels
    at which nano-batches do not gain), "plan_s" (processor seconds of all
    plans), and the figures of the paper.

  Raises:
    ValueError: A machine is unknown, or a number is out of its range.
  """
  planner = _Planner(config)
  curves = [
    row for name, end in _track_product(
      config["machines"], nanobatch_costs.TIME_RANGE_ENDS
    )
    for row in _curve(planner, _machine("machines", name), end, config)
  ]
  joint = [
    row for name, tokens in _track_product(
      config["joint_machines"], config["joint_tokens"]
    )
    for row in _joint(
      planner, _machine("joint_machines", name), tokens, config
    )
  ]
  return {
    "curves": curves, "break_even": _break_even(curves, config["threshold"]),
    "joint": joint,
    "stops": _largest_p_without_gain(joint, config["threshold"]), "plan_s": {
      "count": len(planner.seconds), "worst": max(planner.seconds, default=0.0),
      "sum": sum(planner.seconds), "considered": planner.considered,
    },
    **nanobatch_figures.run(config),
    "context": config["context"], "decodes": config["decodes"],
    "threshold": config["threshold"],
    "joint_interference": config["joint_interference"],
    "utilisation": config["utilisation"], "model": PROFILED_MODEL,
    "times_source": nanobatch_costs.SOURCE,
  }


def _track_product(*values: Sequence[Any]) -> Iterable[tuple[Any, ...]]:
  """Iterates over all combinations of values with a progress bar."""
  return track(
    [*itertools.product(*values)], "planning", transient=True,
    console=Console(stderr=True),
  )


class _Planner:
  """Planner of steps that records its own processor time."""

  def __init__(self, config: Mapping[str, Any]) -> None:
    self._config = config
    self.seconds: list[float] = []
    self.considered = 0

  def __call__(
    self, key: str, machine: Machine, tokens: int, end: str,
    interference: float, reductions: Sequence[Reduction],
  ) -> NanobatchPlan:
    """Returns the plan of a step.

    Args:
      key: Config key that has the number of tokens.
      machine: Devices of the tensor axis.
      tokens: Number of tokens.
      end: "least" or "greatest" plausible time of reductions.
      interference: Slowdown while device and network are busy.
      reductions: Candidate reductions, of which the plan chooses one.

    Raises:
      ValueError: The profile has no steps with this number of tokens.
    """
    utilisation = self._config["utilisation"]
    try:
      costs = nanobatch_costs.layer_costs(
        PROFILED_MODEL, LLAMA_2_70B, nanobatch_costs.profile_of(
          machine, LLAMA_2_70B, tokens, utilisation
        ), machine, mix(tokens, self._config), reductions, end, utilisation,
      )
    except ValueError as error:
      raise ValueError(f"config.{key} has {tokens}: {error}") from error
    start = time.process_time()
    found = nanobatch.plan(
      costs, tokens, max_pieces=self._config["max_pieces"],
      interference=interference,
    )
    self.seconds.append(time.process_time() - start)
    self.considered += found.considered
    return found


def mix(tokens: int, config: Mapping[str, Any]) -> TokenMix:
  """Returns a step: up to ``config.decodes`` tokens decode, others prefill."""
  decodes, context = min(tokens, config["decodes"]), config["context"]
  # Prompts are as long as a decode's context, so the mean is half of it.
  return TokenMix(decodes, context, tokens - decodes, context / 2)


def _machine(key: str, name: str) -> Machine:
  """Returns the machine `name`, an entry of the config key `key`."""
  try:
    return inference.machine(name)
  except ValueError as error:
    raise ValueError(f"config.{key}: {error}") from error


def _curve(
  planner: _Planner, machine: Machine, end: str, config: Mapping[str, Any]
) -> Iterable[dict[str, Any]]:
  """Yields a machine's plans by interference and number of tokens.

  `end` selects the "least" or "greatest" plausible time of reductions.
  """
  for interference, tokens in itertools.product(
    config["interference"], sorted(config["tokens"])
  ):
    plan = planner(
      "tokens", machine, tokens, end, interference,
      nanobatch_costs.reduction_choices()
    )
    rate = tokens / machine.num_ranks
    yield {
      "machine": machine.name, "end": end, "interference": interference,
      "tokens": tokens, "sizes": list(plan.sizes), "text": format_sizes(plan),
      "algorithm": plan.reduction.algorithm, "gain": plan.gain,
      "step_s": plan.step_s, "single_s": plan.single_s,
      "rate": rate / plan.step_s,
      "optimum_rate": rate / plan.optimum_s,
      "of_optimum": plan.optimum_s / plan.step_s,
    }


def _break_even(
  curves: Sequence[Mapping[str, Any]], threshold: float
) -> list[dict[str, Any]]:
  """Returns the fewest tokens from which on all steps gain, or None.

  A row has it for each machine, end ("least" or "greatest") and interference.

  Args:
    curves: Rows of `_curve`, with ascending numbers of tokens.
    threshold: Gain that a step must exceed.
  """
  keys = ("machine", "end", "interference")
  groups: dict[tuple, list[Mapping[str, Any]]] = {}
  for row in curves:
    groups.setdefault(tuple(row[key] for key in keys), []).append(row)
  found = []
  for group, rows in groups.items():
    pays = list(itertools.takewhile(
      lambda row: row["gain"] > 1 + threshold, reversed(rows)
    ))
    found.append({
      **dict(zip(keys, group, strict=True)),
      "tokens": pays[-1]["tokens"] if pays else None,
      "gain": max(row["gain"] for row in rows),
    })
  return found


def _joint(
  planner: _Planner, machine: Machine, tokens: int, config: Mapping[str, Any]
) -> Iterable[dict[str, Any]]:
  """Yields throughputs by bits and fraction p of reduced channels.

  They are relative to one batch that reduces all channels with 16 bits.
  """

  def planned(p: float, bits: int) -> NanobatchPlan:
    return planner(
      "joint_tokens", machine, tokens, "least", config["joint_interference"],
      nanobatch_costs.reduction_choices((p,), (bits,)),
    )

  base = planned(*_BASELINE_P_BITS).single_s
  for bits, p in itertools.product(
    config["bits"], sorted(config["p"], reverse=True)
  ):
    plan = planned(p, bits)
    yield {
      "machine": machine.name, "tokens": tokens, "bits": bits, "p": p,
      "sizes": list(plan.sizes), "text": format_sizes(plan),
      "algorithm": plan.reduction.algorithm, "single": base / plan.single_s,
      "nano": plan.gain, "both": base / plan.step_s,
    }


def _largest_p_without_gain(
  joint: Sequence[Mapping[str, Any]], threshold: float
) -> list[dict[str, Any]]:
  """Returns the largest p such that no step with it or a smaller p gains.

  p is the fraction of reduced channels; a row has it for each machine, number
  of tokens and bits.

  Args:
    joint: Rows of `_joint`, with descending p.
    threshold: Gain that a step must exceed.
  """
  keys = ("machine", "tokens", "bits")
  groups: dict[tuple, list[Mapping[str, Any]]] = {}
  for row in joint:
    groups.setdefault(tuple(row[key] for key in keys), []).append(row)
  found = []
  for group, rows in groups.items():
    ends = list(itertools.takewhile(
      lambda row: row["nano"] <= 1 + threshold, reversed(rows)
    ))
    found.append({
      **dict(zip(keys, group, strict=True)),
      "p": ends[-1]["p"] if ends else None,
    })
  return found
