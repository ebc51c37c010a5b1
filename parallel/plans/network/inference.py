"""Bounds on the time of a prefill or decode step under tensor parallelism.

The time of an operation on a device follows the roofline model: the larger of
its matrix products at the peak rate and its bytes at the full memory bandwidth.
The bytes are weights, and cached keys and values. Activations, norms and
sampling take no time in this model, so the compute time is a lower bound; a
study compares it with measured layers.

The collectives are the all-reduces of the embedding and of the row-parallel
projections. Their time is given twice: from their bytes over the links alone,
and including latency (`parallel.plans.hardware.collective_times`). Each
all-reduce depends on the product before it, and the product after it depends on
its result. With a single batch nothing overlaps, unless the product of a
projection is split.

Example:
  >>> from parallel.plans.network import inference
  >>> box = inference.machine("gpu:h200:1x8")
  >>> box.num_ranks, box.rate / 1e9  # GB/s per GPU
  (8, 450.0)
  >>> round(box.wire_seconds(16 * 8192 * 2) * 1e6, 2)  # us, 16 tokens in bf16
  1.02
"""

import collections
from collections.abc import Sequence
import dataclasses
import math
import re
from typing import NamedTuple

from parallel.base.checks import at_least, fraction, known
from parallel.plans.hardware import collective_times
from parallel.plans.hardware.clusters import CLUSTERS
from parallel.plans.hardware.collective_times import AllReduceTimes, Span
from parallel.plans.hardware.devices import DEVICES, Device
from parallel.plans.hardware.slices import SLICE_RULES
from parallel.plans.workload import Transformer


class ModelStep(NamedTuple):
  """Batch of one prefill or decode step.

  Attributes:
    sequences: Number of sequences.
    tokens: Number of new tokens per sequence: 1 for decoding, the length of the
      prompt for prefill.
    context: Number of positions that the last token attends to, its own
      included.
  """

  sequences: int
  tokens: int
  context: int


class Operation(NamedTuple):
  """Work of one device for an operation of a step.

  Attributes:
    name: Name of the operation.
    count: Number of executions per step: one per layer, or one.
    flops: FLOPs of matrix products per execution.
    bytes: Bytes read from main memory per execution.
  """

  name: str
  count: int
  flops: float
  bytes: float

  def seconds(self, device: Device, dtype: str) -> float:
    """Returns the time of one execution by the roofline model.

    Args:
      device: Device that executes the operation.
      dtype: Dtype of the products.
    """
    return max(
      self.flops / device.peak(dtype), self.bytes / device.memory_bandwidth
    )


@dataclasses.dataclass(frozen=True)
class Machine:
  """Devices that form the ranks of one tensor axis.

  Attributes:
    name: Name as in `launch.compile`, such as gpu:h200:1x8.
    device: Type of the devices.
    num_ranks: Number of devices.
    rate: Aggregate bytes per second that a device sends over its links.
    times: All-reduce times including latency.
  """

  name: str
  device: Device
  num_ranks: int
  rate: float
  times: AllReduceTimes

  def wire_seconds(self, size_bytes: float) -> float:
    """Returns the time of a ring all-reduce's bytes, without latency."""
    n = self.num_ranks
    return 2 * (n - 1) / n * size_bytes / self.rate

  def all_reduce(self, size_bytes: float) -> Span:
    """Returns an all-reduce's time with latency; at least `wire_seconds`."""
    wire = self.wire_seconds(size_bytes)
    return Span(*(max(wire, s) for s in self.times.all_reduce(size_bytes)))


def machine(name: str) -> Machine:
  """Returns the devices that a name describes.

  Args:
    name: gpu:NAME:1xGPUS for GPUs of one node, or tpu:GENERATION:TOPOLOGY.

  Raises:
    ValueError: The devices do not exist, or the times of their collectives are
      unknown.
  """
  gpu = re.fullmatch(r"gpu:([\w-]+):1x([1-9]\d*)", name)
  tpu = re.fullmatch(r"tpu:(\w+):([1-9]\d*(?:x[1-9]\d*)+)", name)
  if gpu:
    known(f"{name!r}: gpu ", gpu[1], CLUSTERS)
    node, count = CLUSTERS[gpu[1]].levels[0], int(gpu[2])
    if not 2 <= count <= node.size:
      raise ValueError(
        f"{name!r}: the number of GPUs must be from 2 to {node.size}, the GPUs "
        "of a node"
      )
    rate = node.link.bandwidth * node.links_per_device
    times = collective_times.times_between_gpus(node.link, count)
    return Machine(name, CLUSTERS[gpu[1]].device, count, rate, times)
  if tpu:
    known(f"{name!r}: generation ", tpu[1], SLICE_RULES)
    shape = [int(size) for size in tpu[2].split("x")]
    refusal = SLICE_RULES[tpu[1]].refusal(shape)
    if refusal:
      raise ValueError(f"{name!r}: this slice does not exist: {refusal}")
    device = DEVICES[tpu[1]]
    times = collective_times.on_torus(tpu[1], device.link, shape, shape)
    return Machine(name, device, math.prod(shape), times.rate, times)
  raise ValueError(
    f"{name!r} must be gpu:NAME:1xGPUS as in gpu:h200:1x8, or "
    "tpu:GENERATION:TOPOLOGY as in tpu:v5p:2x2x2"
  )


def operations(
  model: Transformer, step: ModelStep, num_ranks: int
) -> list[Operation]:
  """Returns the operations of one device, which hosts one rank, in a step.

  Matrices are sharded over ranks. If there are at least twice as many ranks as
  key/value heads, these heads and their cache are replicated. Otherwise a rank
  has all query heads of its key/value heads; some ranks may have only padding.

  Args:
    model: Sizes of the model.
    step: Batch of the step.
    num_ranks: Number of tensor ranks.
  """
  width, size = model.width, model.item_bytes
  # Sizes per rank, rounded up: the slowest rank determines the time.
  kv_heads = math.ceil(model.num_kv_heads / num_ranks)
  heads = math.ceil(model.num_heads / num_ranks)
  if num_ranks < 2 * model.num_kv_heads:
    heads = kv_heads * model.num_heads // model.num_kv_heads
  ffn = math.ceil(model.ffn_width / num_ranks)
  vocab = math.ceil(model.vocab_size / num_ranks)
  tokens = step.sequences * step.tokens
  head = model.head_width

  def product(name, count, rows, weights):  # [rows, k] x [k, n], weights = k n
    return Operation(name, count, 2 * rows * weights, weights * size)

  # Causal attention: the last new token attends to the whole context, the one
  # before it to one position less, and so on.
  pairs = tokens * (2 * step.context - step.tokens + 1) // 2
  layers = model.num_layers
  return [
    product("qkv", layers, tokens, width * (heads + 2 * kv_heads) * head),
    # FLOPs: scores and weighted sum, 2 each per pair and channel. Keys and
    # values are read once for all new tokens of a sequence.
    Operation(
      "attention", layers, 4 * pairs * heads * head,
      step.sequences * step.context * 2 * kv_heads * head * size,
    ),
    product("out", layers, tokens, heads * head * width),
    product("gate and up", layers, tokens, 2 * width * ffn),
    product("down", layers, tokens, ffn * width),
    # Logits of the last token of each sequence only.
    product("head", 1, step.sequences, width * vocab),
  ]


def memory_bytes(
  model: Transformer, step: ModelStep, num_ranks: int
) -> dict[str, float]:
  """Returns the bytes of "weights" and "cache" on one device.

  Args:
    model: Sizes of the model.
    step: Batch of the step.
    num_ranks: Number of tensor ranks.
  """
  found = {"weights": 0.0, "cache": 0.0}
  for operation in operations(model, step, num_ranks):
    part = "cache" if operation.name == "attention" else "weights"
    found[part] += operation.count * operation.bytes
  vocab = math.ceil(model.vocab_size / num_ranks)
  found["weights"] += vocab * model.width * model.item_bytes  # the embedding
  return found


def all_reduce_bytes(
  model: Transformer, step: ModelStep, shares: Sequence[float]
) -> list[int]:
  """Returns the operand bytes of each all-reduce of a step, in order.

  Args:
    model: Sizes of the model.
    step: Batch of the step.
    shares: Fraction p of the channels that each row-parallel projection sums
      over ranks: attention and MLP of the first layer, then of the second, and
      so on.

  Raises:
    ValueError: The number of shares is not two per layer, or a share is not a
      fraction.
  """
  if len(shares) != 2 * model.num_layers:
    raise ValueError(
      f"{len(shares)} shares are given; there must be one for each of the "
      f"{2 * model.num_layers} row-parallel projections in {model.num_layers} "
      "layers"
    )
  for share in shares:
    fraction("p", share)
  row = step.sequences * step.tokens * model.item_bytes
  # The embedding sums all channels.
  channels = [model.width, *(int(share * model.width) for share in shares)]
  return [row * k for k in channels if k]


@dataclasses.dataclass(frozen=True)
class StepTimeBounds:
  """Times of a step in seconds, by component.

  Attributes:
    compute: Time of products, weights and cache by the roofline model.
    wire: Time of the all-reduces' bytes on the links, without latency.
    collectives: Time of the all-reduces including latency.
    num_collectives: Number of all-reduces.
    sent_bytes: Total operand bytes of the all-reduces.
  """

  compute: float
  wire: float
  collectives: Span
  num_collectives: int
  sent_bytes: int

  @property
  def without_latency(self) -> float:
    """Step time without overlap and without latency of collectives."""
    return self.compute + self.wire

  @property
  def with_latency(self) -> Span:
    """Step time without overlap, including the collectives' latency."""
    return Span(*(self.compute + seconds for seconds in self.collectives))

  @property
  def overlapped(self) -> Span:
    """Step time if all collectives run concurrently with compute."""
    return Span(*(max(self.compute, seconds) for seconds in self.collectives))


def step_time_bounds(
  model: Transformer, step: ModelStep, machine: Machine, shares: Sequence[float]
) -> StepTimeBounds:
  """Returns bounds on the time of a step.

  Args:
    model: Sizes of the model.
    step: Batch of the step.
    machine: Devices; each is one tensor rank.
    shares: Fraction of the channels that each row-parallel projection sums, as
      for `all_reduce_bytes`.

  Raises:
    ValueError: A number is out of range, or the time of a collective of this
      size is unknown.
  """
  for name, value in step._asdict().items():
    at_least(name, value)
  if step.tokens > step.context:
    raise ValueError(
      f"context={step.context} must be at least {step.tokens}, the number of "
      "new tokens"
    )
  sent = all_reduce_bytes(model, step, shares)
  # Most messages have equal sizes: compute each size once.
  spans = [
    machine.all_reduce(size).stretched(count, count)
    for size, count in collections.Counter(sent).items()
  ]
  return StepTimeBounds(
    compute=sum(
      o.count * o.seconds(machine.device, model.dtype)
      for o in operations(model, step, machine.num_ranks)
    ),
    wire=sum(map(machine.wire_seconds, sent)),
    collectives=Span(*map(sum, zip(*spans, strict=True))),
    num_collectives=len(sent),
    sent_bytes=sum(sent),
  )
