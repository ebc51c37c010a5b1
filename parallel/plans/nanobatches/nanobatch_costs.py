"""Times of a layer's operations: profiles of GPUs, or the roofline model.

``nanobatch_profiles.csv`` has measured times of a layer of Llama-2-70B by its
number of tokens: products and other operations except attention. The time of
attention follows the roofline model. A decode reads its cached keys and values;
for prompt chunks only FLOPs count. Each nano-batch reads the weights again. The
times of products contain this: with few tokens, a product takes as long as the
read of its weights.

Times of reductions are from `parallel.plans.hardware.collective_times`:
measured for H100s and derived for others. "one_shot" gathers the products of
all ranks and adds them locally. Its time is that of the smallest all-reduce
plus that of the gathered bytes. If a reduction sends fewer bits than the
activations have, its kernel encodes and decodes each number, and reads and
writes both formats once at the memory bandwidth (an assumption).
"""

from collections.abc import Iterable, Mapping, Sequence
import csv
import dataclasses
import functools
import pathlib

import numpy as np

from parallel.base.checks import at_least, fraction, known
from parallel.plans.hardware.devices import Device
from parallel.plans.nanobatches.nanobatch import Costs, Reduction
from parallel.plans.network import inference
from parallel.plans.network.inference import Machine, ModelStep
from parallel.plans.workload import Transformer

SOURCE = (
  "microsoft/vidur (MIT licence), data/profiling/compute/*/meta-llama/"
  "Llama-2-70b-hf/mlp.csv, medians"
)
# The profiled model.
PROFILED_MODEL = "llama-2-70b"
LLAMA_2_70B = Transformer(32_000, 8192, 80, 64, 8, 28672)
_PROFILES_PATH = pathlib.Path(__file__).with_name("nanobatch_profiles.csv")
_MATMULS = ("qkv", "out", "up", "down")
# Operations of the attention block, without attention itself, and of the MLP.
ATTENTION_OPERATIONS, MLP_OPERATIONS = ("qkv", "out", "attention_rest"), (
  "up", "down", "mlp_rest"
)
_EXPERT_MATMULS = (
  "gate and up", "down"
)  # operations of `inference.operations`
TIME_RANGE_ENDS = ("least", "greatest")
ALGORITHMS = ("all_reduce", "one_shot")


@dataclasses.dataclass(frozen=True)
class TokenMix:
  """Tokens of a step: decodes first, then prompt chunks.

  Attributes:
    decodes: Number of decoding sequences.
    context: Mean number of positions that a decode attends to.
    prefills: Number of prompt tokens.
    prefill_context: Mean number of positions that a prompt token attends to.
  """

  decodes: int
  context: float = 0.0
  prefills: int = 0
  prefill_context: float = 0.0

  @property
  def tokens(self) -> int:
    """Number of tokens of the step."""
    return self.decodes + self.prefills


@dataclasses.dataclass(frozen=True)
class Profile:
  """Measured times of a layer's operations on one device.

  Attributes:
    name: Name in error messages.
    tokens: Numbers of tokens that were measured, ascending from 1, ``[n]``.
    seconds: Operation -> its time for each of them, ``[n]``.

  Raises:
    ValueError: A time is missing or not positive, or the numbers of tokens do
      not ascend from 1.
  """

  name: str
  tokens: np.ndarray
  seconds: Mapping[str, np.ndarray]

  def __post_init__(self) -> None:
    if not len(self.tokens) or self.tokens[0] != 1:
      raise ValueError(f"{self.name}: the first row must be for 1 token")
    if (np.diff(self.tokens) <= 0).any():
      raise ValueError(
        f"{self.name}: the numbers of tokens must ascend from row to row"
      )
    for part in (*ATTENTION_OPERATIONS, *MLP_OPERATIONS):
      if part not in self.seconds:
        raise ValueError(f"{self.name}: times of {part!r} are missing")
      times = self.seconds[part]
      bad = ~((times > 0) & np.isfinite(times))
      if bad.any():
        at = int(bad.argmax())
        raise ValueError(
          f"{self.name}: {part} of {self.tokens[at]} tokens takes "
          f"{times[at]:g} s, which must be positive"
        )

  def times(self, part: str, max_tokens: int) -> np.ndarray:
    """Returns the seconds of operation ``part``, ``[max_tokens + 1]``.

    Entry n is the time of n tokens, interpolated between measured numbers.

    Raises:
      ValueError: The profile ends before ``max_tokens``.
    """
    if max_tokens > self.tokens[-1]:
      raise ValueError(
        f"{self.name}: no times were measured for {max_tokens} tokens; the "
        f"number of tokens must be at most {self.tokens[-1]}"
      )
    found = np.interp(
      np.arange(max_tokens + 1), self.tokens, self.seconds[part]
    )
    found[0] = 0
    return found


def read(path: pathlib.Path = _PROFILES_PATH) -> dict[tuple[str, int], Profile]:
  """Returns the profiles in a CSV file: (GPU, number of ranks) -> profile.

  Args:
    path: File with the columns gpu, num_ranks, tokens and, in microseconds, one
      for each operation; lines that begin with # are comments.

  Raises:
    ValueError: A cell is empty, or a profile is invalid.
  """
  rows: dict[tuple[str, int], list[dict[str, str]]] = {}
  with path.open(newline="") as file:
    for row in csv.DictReader(x for x in file if not x.startswith("#")):
      for name, cell in row.items():
        if not cell:
          raise ValueError(
            f"{path.name}: the row of {row['gpu']} with {row['tokens']} tokens "
            f"has no value of {name}"
          )
      rows.setdefault((row["gpu"], int(row["num_ranks"])), []).append(row)
  return {
    key: Profile(
      f"profile of {key[1]} x {key[0]}",
      np.array([int(row["tokens"]) for row in found]),
      {
        part: np.array([float(row[part]) for row in found]) * 1e-6
        for part in (*ATTENTION_OPERATIONS, *MLP_OPERATIONS) if part in found[0]
      },
    )
    for key, found in rows.items()
  }


@functools.cache
def profiles() -> dict[tuple[str, int], Profile]:
  """Returns the profiles in ``nanobatch_profiles.csv``; see `read`."""
  return read()


def _one_token_operations(
  model: Transformer, num_ranks: int
) -> dict[str, inference.Operation]:
  """Returns the operations of one token that attends to one position.

  They are those of one of ``num_ranks`` tensor ranks.
  """
  made = inference.operations(model, ModelStep(1, 1, 1), num_ranks)
  return {o.name: o for o in made}


def roofline(
  model: Transformer, device: Device, num_ranks: int, max_tokens: int,
  utilisation: float = 1.0, experts: tuple[int, int] = (1, 1),
) -> Profile:
  """Returns a profile by the roofline model; norms take no time in it.

  Args:
    model: Sizes of the model.
    device: Type of the devices.
    num_ranks: Number of tensor ranks.
    max_tokens: Largest number of tokens.
    utilisation: Fraction of the peak rate that large products reach.
    experts: Number of experts of an MLP, and of those that a token uses.
  """
  fraction("utilisation", utilisation)
  tokens = np.arange(1, max_tokens + 1)
  number, top = experts
  parts = {}
  for o in _one_token_operations(model, num_ranks).values():
    name = {"gate and up": "up"}.get(o.name, o.name)
    if name not in _MATMULS:
      continue
    flops, size = o.flops * tokens, np.full(len(tokens), o.bytes)
    if o.name in _EXPERT_MATMULS:
      flops, size = flops * top, size * np.minimum(number, top * tokens)
    parts[name] = np.maximum(
      flops / (utilisation * device.peak(model.dtype)),
      size / device.memory_bandwidth,
    )
  # A profile has no zero times; these are too small to matter.
  rest = np.full(len(tokens), np.finfo(float).tiny)
  return Profile(
    f"roofline of {num_ranks} x {device.name}", tokens,
    parts | {"attention_rest": rest, "mlp_rest": rest},
  )


def cumulative_attention_s(
  model: Transformer, device: Device, num_ranks: int, mix: TokenMix,
  utilisation: float = 1.0,
) -> np.ndarray:
  """Returns the cumulative time of attention in a layer, ``[tokens + 1]``.

  Entry n is the time of the step's first n tokens. Each decode reads its own
  cache; the tokens of a prompt chunk share one, so only their FLOPs count.

  Args:
    model: Sizes of the model.
    device: Type of the devices.
    num_ranks: Number of tensor ranks.
    mix: Tokens of the step.
    utilisation: Fraction of the peak rate that products reach.
  """
  one = _one_token_operations(
    model, num_ranks
  )["attention"]  # attends to one position
  flop_s = one.flops / (utilisation * device.peak(model.dtype))
  byte_s = one.bytes / device.memory_bandwidth
  each = np.concatenate([
    np.full(mix.decodes, max(flop_s, byte_s) * mix.context),
    np.full(mix.prefills, flop_s * mix.prefill_context),
  ])
  return np.concatenate([[0.0], each.cumsum()])


def reduction_choices(
  p: Iterable[float] = (1.0,), bits: Iterable[int] = (16,),
  algorithms: Sequence[str] = ALGORITHMS,
) -> list[Reduction]:
  """Returns a reduction for each combination of algorithm, p and bits."""
  for name in algorithms:
    known("algorithm=", name, ALGORITHMS)
  return [
    Reduction(name, share, width)
    for share in p for width in bits for name in algorithms
  ]


def reduction_times(
  machine: Machine, model: Transformer, reduction: Reduction, max_tokens: int,
  end: str = "least",
) -> np.ndarray:
  """Returns seconds of a reduction of n tokens, float64 ``[max_tokens + 1]``.

  Args:
    machine: Devices of the tensor axis.
    model: Sizes of the model.
    reduction: Algorithm, fraction of the channels, and bits.
    max_tokens: Largest number of tokens.
    end: "least" or "greatest" plausible time.

  Raises:
    ValueError: An argument is unknown or out of range.
  """
  known("end=", end, TIME_RANGE_ENDS)
  fraction("p", reduction.p)
  at_least("bits", reduction.bits)
  channels = int(reduction.p * model.width)
  if not channels:
    return np.zeros(max_tokens + 1)
  coding_s = 0.0  # per channel of a token
  if reduction.bits < 8 * model.item_bytes:
    coding_s = (
      2 * (model.item_bytes + reduction.bits / 8)
      / machine.device.memory_bandwidth
    )
  smallest = getattr(machine.all_reduce(1), end)

  def seconds(size: float) -> float:
    if reduction.algorithm == "one_shot":
      return smallest + (machine.num_ranks - 1) * size / machine.rate
    return getattr(machine.all_reduce(size), end)

  sizes = np.arange(max_tokens + 1) * channels * reduction.bits / 8
  # Computed for at most 64 numbers of tokens, interpolated for all others.
  at = np.unique(np.geomspace(1, max_tokens, 64).astype(int))
  times = np.interp(
    np.arange(max_tokens + 1), at, [seconds(sizes[n]) for n in at]
  )
  times += np.arange(max_tokens + 1) * channels * coding_s
  times[0] = 0
  return times


@dataclasses.dataclass(frozen=True)
class PeakRateTimes:
  """Times of a step at the peak rates of the hardware, in seconds.

  Attributes:
    compute: Time of the FLOPs of products and attention.
    memory: Time to read weights and cached keys and values once.
    network: Time of the reductions' bytes on the links.
  """

  compute: float
  memory: float
  network: float

  @property
  def seconds(self) -> float:
    """Largest of the three: the time if they overlap fully."""
    return max(self.compute, self.memory, self.network)


def peak_rate_times(
  model: Transformer, machine: Machine, mix: TokenMix,
  experts: tuple[int, int] = (1, 1),
) -> PeakRateTimes:
  """Returns lower bounds on the time of a step with any schedule.

  Source: NanoFlow, arXiv 2408.12757, section 3.

  Args:
    model: Sizes of the model.
    machine: Devices of the tensor axis.
    mix: Tokens of the step.
    experts: Number of experts of an MLP, and of those that a token uses.
  """
  device, (number, top) = machine.device, experts
  cached = mix.decodes * mix.context  # positions
  pairs = cached + mix.prefills * mix.prefill_context
  flops = size = 0.0
  for o in _one_token_operations(model, machine.num_ranks).values():
    if o.name == "attention":
      flops += o.count * o.flops * pairs
      size += o.count * o.bytes * cached
      continue
    rows = max(mix.decodes, 1) if o.name == "head" else mix.tokens
    used, held = (top, number) if o.name in _EXPERT_MATMULS else (1, 1)
    flops += o.count * o.flops * rows * used
    size += o.count * o.bytes * min(held, used * rows)
  # Two reductions per layer and that of the embedding.
  sums = (2 * model.num_layers + 1) * mix.tokens * model.width
  network = (
    machine.wire_seconds(sums * model.item_bytes)
    if machine.num_ranks > 1 else 0.0
  )
  return PeakRateTimes(
    flops / device.peak(model.dtype),
    size / device.memory_bandwidth, network,
  )


def layer_costs(
  name: str, model: Transformer, profile: Profile, machine: Machine,
  mix: TokenMix,
  reductions: Iterable[Reduction] = (Reduction(),), end: str = "least",
  utilisation: float = 1.0,
) -> Costs:
  """Returns the costs of a step for `nanobatch.plan`.

  Args:
    name: Name of the model; a plan refuses to run another one.
    model: Sizes of the model.
    profile: Times of products and norms on one device of the machine.
    machine: Devices of the tensor axis.
    mix: Tokens of the step.
    reductions: All-reduces that the plan may choose from.
    end: "least" or "greatest" plausible time of reductions.
    utilisation: Fraction of the peak rate that attention and head reach.
  """
  tokens = mix.tokens
  head = _one_token_operations(model, machine.num_ranks)["head"]
  whole = Reduction(bits=8 * model.item_bytes)
  full = reduction_times(machine, model, whole, tokens, end)
  return Costs(
    name, model.num_layers,
    attention=sum(profile.times(part, tokens) for part in ATTENTION_OPERATIONS),
    mlp=sum(profile.times(part, tokens) for part in MLP_OPERATIONS),
    reductions={
      r: reduction_times(machine, model, r, tokens, end) for r in reductions
    },
    attend=cumulative_attention_s(
      model, machine.device, machine.num_ranks, mix, utilisation
    ),
    # The embedding's reduction and the head's product.
    fixed_s=float(full[-1]) + max(
      max(mix.decodes, 1) * head.flops
      / (utilisation * machine.device.peak(model.dtype)),
      head.bytes / machine.device.memory_bandwidth,
    ),
    optimum_s=peak_rate_times(model, machine, mix).seconds,
  )


def profile_of(
  machine: Machine, model: Transformer, max_tokens: int,
  utilisation: float = 1.0,
) -> Profile:
  """Returns the measured profile of a machine, or else one by the roofline.

  Args:
    machine: Devices of the tensor axis.
    model: Sizes of the model; only Llama-2-70B was measured.
    max_tokens: Largest number of tokens.
    utilisation: Fraction of the peak rate that products reach by the roofline.
  """
  # Links do not affect compute: "a100-pcie" has the profile of "a100".
  key = machine.device.name.removesuffix("-pcie"), machine.num_ranks
  if model == LLAMA_2_70B and key in profiles():
    return profiles()[key]
  return roofline(
    model, machine.device, machine.num_ranks, max_tokens, utilisation
  )
