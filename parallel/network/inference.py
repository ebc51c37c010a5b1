"""Time of a prefill or decode step under tensor parallelism: bounds.

On a device an operation takes the longer of its products at the peak rate and
its bytes at full memory bandwidth (a roofline). Bytes are those of weights and
of keys and values in the cache. Activations, norms and sampling take no time
here, so this is a bound from below: a study compares it with measured layers.

Collectives are the all-reduces of the embedding and of the row doors. Their
time is told twice: by their bytes over the links alone, and as they take with
latency (`parallel.hardware.collective_times`). Each of them waits for the
product before it, and the product after it waits for the result. So where one
batch is computed nothing overlaps, unless a door's own product is cut.
"""

import collections
from collections.abc import Sequence
import dataclasses
import math
import re
from typing import NamedTuple

from parallel.checks import at_least, fraction, known
from parallel.hardware import collective_times
from parallel.hardware.clusters import CLUSTERS
from parallel.hardware.collective_times import Span, Times
from parallel.hardware.devices import DEVICES, Device
from parallel.hardware.slices import SLICES
from parallel.workload import Transformer


class Step(NamedTuple):
  """What one step works on.

  Attributes:
    sequences: How many sequences there are.
    tokens: New tokens of each: 1 decodes, a whole prompt prefills.
    context: Positions that its last token sees, its own among them.
  """

  sequences: int
  tokens: int
  context: int


class Operation(NamedTuple):
  """What one device does in an operation, in one step.

  Attributes:
    name: The operation.
    count: How often it runs, once per layer or once.
    flops: FLOPs of products each time.
    bytes: Bytes of main memory each time.
  """

  name: str
  count: int
  flops: float
  bytes: float

  def seconds(self, device: Device, dtype: str) -> float:
    """Returns the time of one run by the roofline of a device."""
    return max(
      self.flops / device.peak(dtype), self.bytes / device.memory_bandwidth
    )


@dataclasses.dataclass(frozen=True)
class Machine:
  """Devices that are the ranks of one tensor axis.

  Attributes:
    name: As `launch.compile` takes it, such as gpu:h200:1x8.
    device: One of them.
    num_ranks: How many there are.
    rate: Bytes per second that a device sends over its links at once.
    times: How long all-reduces take, latency included.
  """

  name: str
  device: Device
  num_ranks: int
  rate: float
  times: Times

  def wire_seconds(self, size_bytes: float) -> float:
    """Returns the time of a ring's bytes at the rate of the links."""
    n = self.num_ranks
    return 2 * (n - 1) / n * size_bytes / self.rate

  def all_reduce(self, size_bytes: float) -> Span:
    """Returns the time with latency, never less than that of the bytes."""
    wire = self.wire_seconds(size_bytes)
    return Span(*(max(wire, s) for s in self.times.all_reduce(size_bytes)))


def machine(name: str) -> Machine:
  """Returns the devices that a name stands for.

  Args:
    name: gpu:NAME:1xGPUS, devices of one node, or tpu:GENERATION:TOPOLOGY.

  Raises:
    ValueError: There are no such devices, or nothing is known of the time of
      their collectives.
  """
  gpu = re.fullmatch(r"gpu:([\w-]+):1x([1-9]\d*)", name)
  tpu = re.fullmatch(r"tpu:(\w+):([1-9]\d*(?:x[1-9]\d*)+)", name)
  if gpu:
    known(f"{name!r}: gpu ", gpu[1], CLUSTERS)
    node, count = CLUSTERS[gpu[1]].levels[0], int(gpu[2])
    if not 2 <= count <= node.size:
      raise ValueError(f"{name!r}: a node has 2 to {node.size} GPUs")
    rate = node.link.bandwidth * node.links_per_device
    times = collective_times.between(node.link, count)
    return Machine(name, CLUSTERS[gpu[1]].device, count, rate, times)
  if tpu:
    known(f"{name!r}: generation ", tpu[1], SLICES)
    shape = [int(size) for size in tpu[2].split("x")]
    refusal = SLICES[tpu[1]].refusal(shape)
    if refusal:
      raise ValueError(f"{name!r}: there is no such slice: {refusal}")
    device = DEVICES[tpu[1]]
    times = collective_times.on_torus(tpu[1], device.link, shape, shape)
    return Machine(name, device, math.prod(shape), times.rate, times)
  raise ValueError(
    f"{name!r} must be gpu:NAME:1xGPUS as in gpu:h200:1x8, or "
    "tpu:GENERATION:TOPOLOGY as in tpu:v5p:2x2x2"
  )


def operations(
  model: Transformer, step: Step, num_ranks: int
) -> list[Operation]:
  """Returns what one device, which is one rank, computes in a step.

  Matrices are cut over ranks. Of key/value heads a rank has one at least, so
  more ranks than these repeat them, and their part of the cache.

  Args:
    model: The sizes.
    step: What the step works on.
    num_ranks: Tensor ranks.
  """
  width, size = model.width, model.item_bytes
  kv_heads = math.ceil(model.num_kv_heads / num_ranks)
  heads = max(
    math.ceil(model.num_heads / num_ranks),
    kv_heads * model.num_heads // max(model.num_kv_heads, num_ranks),
  )
  ffn = math.ceil(model.ffn_width / num_ranks)
  vocab = math.ceil(model.vocab_size / num_ranks)
  tokens = step.sequences * step.tokens
  head = model.head_width

  def product(name, count, rows, weights):
    return Operation(name, count, 2 * rows * weights, weights * size)

  # Of the new tokens the last one sees the whole context, the one before it a
  # position less, and so on.
  pairs = step.sequences * sum(
    range(step.context - step.tokens + 1, step.context + 1)
  )
  layers = model.num_layers
  return [
    product("qkv", layers, tokens, width * (heads + 2 * kv_heads) * head),
    # Keys and values are read once for all new tokens of a sequence.
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
  model: Transformer, step: Step, num_ranks: int
) -> dict[str, float]:
  """Returns the bytes of weights and of the cache on one device."""
  found = {"weights": 0.0, "cache": 0.0}
  for operation in operations(model, step, num_ranks):
    part = "cache" if operation.name == "attention" else "weights"
    found[part] += operation.count * operation.bytes
  vocab = math.ceil(model.vocab_size / num_ranks)
  found["weights"] += vocab * model.width * model.item_bytes  # the embedding
  return found


def messages(
  model: Transformer, step: Step, shares: Sequence[float]
) -> list[int]:
  """Returns the operand bytes of each all-reduce of a step, in order.

  Args:
    model: The sizes.
    step: What the step works on.
    shares: The part of the channels that each row door sums over ranks,
      attention's and the MLP's of the first layer, then of the next.

  Raises:
    ValueError: There is not one share for each door, or one is no fraction.
  """
  if len(shares) != 2 * model.num_layers:
    raise ValueError(
      f"{len(shares)} shares for the {2 * model.num_layers} row doors of "
      f"{model.num_layers} layers"
    )
  for share in shares:
    fraction("p", share)
  row = step.sequences * step.tokens * model.item_bytes
  channels = [model.width, *(int(share * model.width) for share in shares)]
  return [row * k for k in channels if k]


@dataclasses.dataclass(frozen=True)
class Bounds:
  """The time of a step, in seconds.

  Attributes:
    compute: Products, weights and cache by the roofline.
    wire: All-reduces by their bytes over the links.
    collectives: All-reduces with latency.
    num_collectives: How many there are.
    sent_bytes: Operand bytes of all of them.
  """

  compute: float
  wire: float
  collectives: Span
  num_collectives: int
  sent_bytes: int

  @property
  def without_latency(self) -> float:
    """The step if nothing overlaps and collectives had no latency."""
    return self.compute + self.wire

  @property
  def with_latency(self) -> Span:
    """The step if nothing overlaps."""
    return Span(*(self.compute + seconds for seconds in self.collectives))

  @property
  def overlapped(self) -> Span:
    """The step if all collectives run beside compute."""
    return Span(*(max(self.compute, seconds) for seconds in self.collectives))


def bounds(
  model: Transformer, step: Step, machine: Machine, shares: Sequence[float]
) -> Bounds:
  """Returns bounds of the time of a step.

  Args:
    model: The sizes.
    step: What the step works on.
    machine: The devices; each is one tensor rank.
    shares: The part of the channels that each row door shares (`messages`).

  Raises:
    ValueError: A number is out of its range, or the time of a collective of
      this size is not known.
  """
  for name, value in step._asdict().items():
    at_least(name, value)
  if step.tokens > step.context:
    raise ValueError(
      f"context={step.context} must hold the {step.tokens} new tokens"
    )
  sent = messages(model, step, shares)
  spans = [
    machine.all_reduce(size).stretched(count, count)
    for size, count in collections.Counter(sent).items()
  ]
  return Bounds(
    compute=sum(
      o.count * o.seconds(machine.device, model.dtype)
      for o in operations(model, step, machine.num_ranks)
    ),
    wire=sum(map(machine.wire_seconds, sent)),
    collectives=Span(*map(sum, zip(*spans, strict=True))),
    num_collectives=len(sent),
    sent_bytes=sum(sent),
  )
