"""Placement problem: the tensors of a training step and their accesses.

A step has three phases, forward, backward and update, one after the other. In
each of them, transfers run concurrently with the device's compute. Memory is
largest at two instants, the end of the forward (all activations, no gradients)
and the end of the backward (all gradients, no activations), so that activations
and gradients can use the same bytes.

A `StatePart` has one or several execution modes: the optimizer on the CPU or on
the device, activations saved or recomputed. Each `ExecutionMode` (a *way* to
run the part) has its own tensors. A placement divides each part over its modes,
and each tensor over the memory tiers.

Example:
  >>> from parallel.plans import placement
  >>> from parallel.plans.hardware.devices import H100
  >>> from parallel.plans.hardware.tiers import HOSTS
  >>> from parallel.plans.placement import problem
  >>> from parallel.plans.workload import Transformer
  >>> llama = Transformer(
  ...   vocab_size=32000, width=4096, num_layers=32, num_heads=32,
  ...   num_kv_heads=32, ffn_width=11008,
  ... )
  >>> step = problem.training_step(
  ...   llama, batch_size=1, seq_len=16384, device=H100, host=HOSTS["two-cxl"]
  ... )
  >>> cost = placement.cost(step, placement.place(step, "optimum"))
  >>> cost.fits, {p: round(s, 2) for p, s in cost.seconds.items()}
  (True, {'forward': 0.58, 'backward': 1.16, 'update': 0.2})
"""

from collections.abc import Mapping
import dataclasses
from typing import Literal

from parallel.base import checks
from parallel.plans.hardware.devices import Device
from parallel.plans.hardware.tiers import Host
from parallel.plans.workload import Transformer

Phase = Literal["forward", "backward", "update"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "update")
Instant = Literal["end of forward", "end of backward"]
INSTANTS: tuple[Instant, ...] = ("end of forward", "end of backward")
# Name of the device's own memory among the tiers of a placement.
DEVICE = "device"


@dataclasses.dataclass(frozen=True)
class TensorAccess:
  """Access to all bytes of a tensor, once per step.

  Attributes:
    phase: Phase of the step.
    by: "device" (by DMA if the tensor is on the host) or "cpu".
    read, written: Bytes read and written per byte of the tensor.
  """

  phase: Phase
  by: Literal["device", "cpu"]
  read: float = 0.0
  written: float = 0.0


@dataclasses.dataclass(frozen=True)
class Tensor:
  """Tensor of a step.

  Attributes:
    name: Name, unique within its execution mode.
    size_bytes: Bytes if its execution mode runs the whole state part.
    held: Instants of a step at which it is in memory.
    uses: Its accesses.
    on: Memory that it can be in: "device", "host", or "any" for both; "dram"
      for the host's DRAM, where XLA allocates it.
  """

  name: str
  size_bytes: float
  held: tuple[Instant, ...]
  uses: tuple[TensorAccess, ...] = ()
  on: Literal["device", "host", "dram", "any"] = "any"

  @property
  def cpu_bytes_per_byte(self) -> float:
    """Bytes that the CPU reads and writes per byte of the tensor."""
    return sum(u.read + u.written for u in self.uses if u.by == "cpu")


@dataclasses.dataclass(frozen=True)
class ExecutionMode:
  """One way to run the part of a step that a `StatePart` belongs to.

  Attributes:
    name: Name.
    tensors: Tensors that it needs.
    seconds: Phase of the step -> seconds of compute in addition to
      `Problem.seconds`, if the whole part runs in this mode.
  """

  name: str
  tensors: tuple[Tensor, ...]
  seconds: Mapping[Phase, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StatePart:
  """Part of the training state whose bytes are placed.

  Attributes:
    name: Name.
    ways: Execution modes; a placement divides the part among them.
    units: Number of equal units of the part, such as layers, that
      `optimum.place` does not divide if ``whole``; other policies ignore it.
  """

  name: str
  ways: tuple[ExecutionMode, ...]
  units: int


@dataclasses.dataclass(frozen=True)
class Problem:
  """Placement problem of one training step on one device and its host.

  Attributes:
    host: Tiers and links of the host.
    device: The device.
    device_bytes: Bytes of the device's memory that may be used.
    reserved: Instant of a step -> bytes of the device's memory that no tensor
      may use.
    seconds: Phase of a step -> seconds of the device's compute.
    parts: Parts of the training state.
    content: Name of the content of ``reserved``, for figures.
  """

  host: Host
  device: Device
  device_bytes: float
  reserved: Mapping[Instant, float]
  seconds: Mapping[Phase, float]
  parts: tuple[StatePart, ...]
  content: str = "logits, working memory"

  def tensors(self) -> list[tuple[StatePart, ExecutionMode, Tensor]]:
    """Returns (state part, execution mode, tensor) of all tensors."""
    return [
      (part, way, tensor)
      for part in self.parts for way in part.ways for tensor in way.tensors
    ]

  def tiers_of(self, tensor: Tensor) -> list[str]:
    """Returns the names of the memory tiers that a tensor can be on."""
    host = [tier.name for tier in self.host.tiers]
    dram = [tier.name for tier in self.host.tiers if tier.kind == "dram"]
    return {
      "device": [DEVICE], "host": host, "dram": dram or host[:1],
      "any": [DEVICE, *host],
    }[tensor.on]


def training_step(
  model: Transformer,
  *,
  batch_size: int,
  seq_len: int,
  device: Device,
  host: Host,
  utilisation: float = 0.5,
  fill: float = 0.9,
) -> Problem:
  """Returns the problem of a step in mixed precision on one device.

  A parameter has a weight and a gradient in the activations' dtype, and a
  master weight and two moments of AdamW in float32. With the optimizer on the
  CPU, the device sends gradients and receives new weights. Weights that are on
  the host are sent to the device twice per step, for the forward and the
  backward.

  Args:
    model: Sizes of the model.
    batch_size: Sequences of a step.
    seq_len: Positions of a sequence.
    device: The device.
    host: The host.
    utilisation: Fraction of the device's peak that compute reaches, assumed.
    fill: Fraction of the device's memory that may be used, assumed.
  """
  checks.at_least("batch_size", batch_size)
  checks.at_least("seq_len", seq_len)
  for name, share in (("utilisation", utilisation), ("fill", fill)):
    checks.fraction(name, share)
    checks.positive(name, share)
  tokens = batch_size * seq_len
  rate = utilisation * device.peak(model.dtype)
  layers_s = model.num_layers * model.layer_flops(tokens, seq_len) / rate
  forward_s = layers_s + model.head_flops(tokens) / rate
  layer_bytes = model.layer_params * model.item_bytes
  saved = model.saved_activation_bytes(tokens, tensor=1)  # of one layer
  # Logits and their gradient in float32; the activations of the layer that
  # runs, with their gradients; two layers of weights, one used, one arriving.
  logits = 2 * 4 * tokens * model.vocab_size
  working = 2 * saved + 2 * layer_bytes
  return Problem(
    host=host, device=device, device_bytes=fill * device.memory_bytes,
    reserved={
      "end of forward": max(logits, working),
      "end of backward": working + layer_bytes,
    },
    seconds={"forward": forward_s, "backward": 2 * forward_s, "update": 0.0},
    parts=(
      _parameters(model),
      _activations(model, saved, model.residual_stream_bytes(tokens), layers_s),
    ),
  )


def _parameters(model: Transformer) -> StatePart:
  """Returns the state part with weights, gradients and optimizer state."""
  size = model.num_params * model.item_bytes
  always = INSTANTS
  read_twice = (
    TensorAccess("forward", "device", read=1),
    TensorAccess("backward", "device", read=1)
  )
  ways = []
  for by in ("cpu", "device"):
    for weights_on in ("device", "host"):
      # A CPU writes new weights where the device reads them: either to their
      # tier, or into a staging buffer whose content is sent to the device.
      write = TensorAccess(
        "update", "device" if weights_on == "device" else by, written=1
      )
      weights = Tensor(
        "weights", size, always, (*read_twice, write), weights_on
      )
      gradients = Tensor(
        "gradients", size, ("end of backward",),
        (
          TensorAccess("backward", "device", written=1),
          TensorAccess("update", by, read=1)
        ),
        "host" if by == "cpu" else "any",
      )
      state = tuple(
        Tensor(
          name, 4 * model.num_params, always,
          (TensorAccess("update", by, read=1, written=1),),
          "host" if by == "cpu" else "any",
        )
        for name in ("master weights", "first moments", "second moments")
      )
      staging = (
        (Tensor("staged weights", size, (),
                (TensorAccess("update", "cpu", written=1),
                 TensorAccess("update", "device", read=1)), "host"),)
        if (by, weights_on) == ("cpu", "device") else ()
      )
      ways.append(ExecutionMode(
        f"updated by the {by}, weights on the {weights_on}",
        (weights, gradients, *state, *staging),
      ))
  return StatePart("parameters", tuple(ways), model.num_layers)


def _activations(
  model: Transformer, saved: float, stream: float, layers_s: float
) -> StatePart:
  """Returns the state part with all layers' activations: saved or recomputed.

  Args:
    model: Sizes of the model.
    saved: Bytes of all activations of a layer.
    stream: Bytes of the input of a layer.
    layers_s: Seconds of the forward of all layers.
  """
  uses = (
    TensorAccess("forward", "device", written=1),
    TensorAccess("backward", "device", read=1)
  )
  held = ("end of forward",)
  count = model.num_layers
  return StatePart(
    "activations",
    (
      ExecutionMode(
        "saved", (Tensor("activations", count * saved, held, uses),)
      ),
      ExecutionMode(
        "recomputed", (Tensor("layer inputs", count * stream, held, uses),),
        {"backward": layers_s},
      ),
    ),
    count,
  )
