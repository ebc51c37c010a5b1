"""Study of prefill and decode under tensor parallelism.

It bounds the time of steps on machines of eight devices: by bytes and matrix
products alone, and with the latency of collectives. It compares two ways to
synchronise less: tensor ranks sum a fraction p of the channels in all layers,
or all channels in every n-th layer. Nothing is compiled;
`launch.compile --phase=decode` compiles the same steps.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from caatnet.studies.inference import measured
from parallel.base import checks
from parallel.plans.network import inference
from parallel.plans.network.inference import Machine, ModelStep, StepTimeBounds
from parallel.plans.workload import Transformer

# Sizes of Llama 2, Touvron et al., arXiv 2307.09288, with their tokenizer's
# vocabulary; the first is also configs/caatnet/7b.py.
MODELS = {
  "7b": Transformer(32_000, 4096, 32, 32, 32, 11008),
  "70b": Transformer(32_000, 8192, 80, 64, 8, 28672),
}


# Largest number of sequences for which curves are computed.
_MAX_SEQUENCES = 1024


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Computes the study.

  Args:
    config: Config like configs/inference/decode.py, as nested dicts.

  Returns:
    Plain data: "rows" (a step of a model on a machine with a policy), "curves"
    (time that a policy saves in decoding, by number of sequences), "helps"
    (smallest number of sequences from which on a policy saves the threshold),
    "layers" (measured times), "machines" (constants and their sources). Times
    are in ms; those with latency are [least, greatest].

  Raises:
    ValueError: A model or machine is unknown, or a number is out of its range.
  """
  for name in config["models"]:
    checks.known("config.models: ", name, MODELS)
  try:
    machines = [inference.machine(name) for name in config["machines"]]
  except ValueError as error:
    raise ValueError(f"config.machines: {error}") from error
  rows, curves, helps = [], [], []
  for name in config["models"]:
    for machine in machines:
      rows += _compare_policies(name, machine, config)
      found = _curves(name, machine, config)
      curves += found
      helps += [_find_break_even(curve, config["threshold"]) for curve in found]
  return {
    "study": "inference",
    "context": config["context"],
    "prompt": config["prompt"],
    "threshold": config["threshold"],
    "compute_factor": config["compute_factor"],
    "models": {n: dataclasses.asdict(MODELS[n]) for n in config["models"]},
    "machines": [_constants(machine) for machine in machines],
    "rows": rows,
    "curves": curves,
    "helps": helps,
    "layers": measured.compare_with_roofline(MODELS["70b"]),
    "layers_source": measured.SOURCE,
  }


def policies(config: Mapping[str, Any]) -> dict[str, tuple[float, int]]:
  """Returns policies by name.

  A policy is (fraction p of channels that tensor ranks sum, interval in layers
  at which they do), as for `reduced_fractions`.
  """
  found = {f"p={p:g}": (p, 1) for p in config["p"]}
  return found | {f"1 in {n} layers": (1.0, n) for n in config["every"]}


def reduced_fractions(
  model: Transformer, policy: tuple[float, int]
) -> list[float]:
  """Returns the fraction of channels that each row-parallel projection reduces.

  Args:
    model: Sizes of the model.
    policy: (p, interval): every interval-th layer, beginning with the first,
      reduces the fraction p of its channels; the other layers reduce none.
  """
  p, every = policy
  layers = range(model.num_layers)
  # Two row-parallel projections per layer: attention and MLP.
  return [p if i % every == 0 else 0.0 for i in layers for _ in range(2)]


def saved(bounds: StepTimeBounds, base: StepTimeBounds) -> dict[str, Any]:
  """Returns the saved fractions of the time ``base``, also with latency."""
  with_latency = [
    1 - mine / theirs
    for mine, theirs in zip(
      bounds.with_latency, base.with_latency, strict=True
    )
  ]
  return {
    "saved_without": 1 - bounds.without_latency / base.without_latency,
    "saved_with": with_latency,
  }


def most_sequences(model: Transformer, machine: Machine, context: int) -> int:
  """Returns the largest number of sequences whose caches fit; 0 for none."""
  one = inference.memory_bytes(
    model, ModelStep(1, 1, context), machine.num_ranks
  )
  room = machine.device.memory_bytes - one["weights"]  # bytes per rank
  return max(0, int(room // one["cache"]))


def _compare_policies(
  name: str, machine: Machine, config: Mapping[str, Any]
) -> list[dict[str, Any]]:
  """Returns a row for each step and policy of model `name` on a machine."""
  model, context = MODELS[name], config["context"]
  factor = config["compute_factor"]
  steps = {f"decode {n}": ModelStep(n, 1, context) for n in config["batch"]}
  prompt = config["prompt"]
  if prompt:
    steps[f"prefill {prompt}"] = ModelStep(1, prompt, prompt)
  rows = []
  for label, step in steps.items():
    # Baseline: all channels of all layers are reduced.
    base = _step_time_bounds(model, step, machine, (1.0, 1), factor)
    memory = inference.memory_bytes(model, step, machine.num_ranks)
    for policy, value in policies(config).items():
      found = _step_time_bounds(model, step, machine, value, factor)
      rows.append({
        "model": name,
        "machine": machine.name,
        "step": label,
        "policy": policy,
        "weights_gb": memory["weights"] / 1e9,
        "cache_gb": memory["cache"] / 1e9,
        "fits": sum(memory.values()) <= machine.device.memory_bytes,
        "compute_ms": found.compute * 1e3,
        "num_collectives": found.num_collectives,
        "sent_mb": found.sent_bytes / 1e6,
        "links_ms": found.wire * 1e3,
        "collectives_ms": [s * 1e3 for s in found.collectives],
        "without_ms": found.without_latency * 1e3,
        "with_ms": [s * 1e3 for s in found.with_latency],
        "overlapped_ms": [s * 1e3 for s in found.overlapped],
        **saved(found, base),
      })
  return rows


def _curves(
  name: str, machine: Machine, config: Mapping[str, Any]
) -> list[dict[str, Any]]:
  """Returns the savings of each policy in decoding with model `name`.

  A policy has a list of savings (`saved`), one for each number of sequences.
  """
  model, context = MODELS[name], config["context"]
  most = most_sequences(model, machine, context)
  # Powers of two whose caches fit.
  counts = [2**i for i in range(min(most, _MAX_SEQUENCES).bit_length())]

  def decode(policy: tuple[float, int]) -> list[StepTimeBounds]:
    return [
      _step_time_bounds(
        model, ModelStep(n, 1, context), machine, policy,
        config["compute_factor"],
      )
      for n in counts
    ]

  bases = decode((1.0, 1))
  return [
    {
      "model": name,
      "machine": machine.name,
      "policy": policy,
      "most_sequences": most,
      "sequences": counts,
      "saved": list(map(saved, decode(value), bases)),
    }
    for policy, value in policies(config).items()
    if value != (1.0, 1)
  ]


def _find_break_even(
  curve: Mapping[str, Any], threshold: float
) -> dict[str, Any]:
  """Returns the fewest sequences from which on ``threshold`` is saved.

  `curve` is an entry of `_curves`; the result has a number without latency and
  two, for least and greatest latency, with it.
  """

  def first(values: Sequence[float]) -> int | None:
    # The savings must also hold for all larger numbers, despite later dips.
    place = len(values)  # searches backwards
    while place and values[place - 1] >= threshold:
      place -= 1
    return curve["sequences"][place] if place < len(values) else None

  ends = list(zip(*(s["saved_with"] for s in curve["saved"]), strict=True))
  return {
    **{k: curve[k] for k in ("model", "machine", "policy", "most_sequences")},
    "without": first([s["saved_without"] for s in curve["saved"]]),
    "with": [first(end) for end in ends] or [None, None],
  }


def _step_time_bounds(
  model: Transformer, step: ModelStep, machine: Machine,
  policy: tuple[float, int], compute_factor: float,
) -> StepTimeBounds:
  try:
    found = inference.step_time_bounds(
      model, step, machine, reduced_fractions(model, policy)
    )
  except ValueError as error:
    raise ValueError(
      f"config.machines={machine.name!r}, {step.sequences} sequences of "
      f"{step.tokens} new tokens (config.batch, config.prompt) and "
      f"config.context={step.context}: {error}"
    ) from error
  return dataclasses.replace(found, compute=compute_factor * found.compute)


def _constants(machine: Machine) -> dict[str, Any]:
  """Returns a machine's constants and their sources."""
  device = machine.device
  return {
    "name": machine.name,
    "num_ranks": machine.num_ranks,
    "peak_tflops": device.peak("bfloat16") / 1e12,
    "memory_gb": device.memory_bytes / 1e9,
    "memory_gb_s": device.memory_bandwidth / 1e9,
    "links_gb_s": machine.rate / 1e9,
    "smallest_all_reduce_us": [s * 1e6 for s in machine.all_reduce(1)],
    "mark": machine.times.mark,
    "source": machine.times.source,
    "device_source": device.source,
  }
