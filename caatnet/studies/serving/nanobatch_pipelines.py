"""Pipelines that NanoFlow's search found, all timed by the same model.

Sizes are from efeslab/Nanoflow (Apache-2.0), ``pipeline/config_all``; the order
of operations is from ``pipeline/src/pipeline.cu`` and, for one GPU, from
``pipeline/src/pipeline_local.cu``. Attention has four nano-batches and the rest
of a layer two. In the first nano-batch, all-gathers before and after the output
projection replace the all-reduce, with the same number of bytes.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from parallel.plans.hardware.devices import Device
from parallel.plans.nanobatches import nanobatch_costs, nanobatch_timing
from parallel.plans.nanobatches.nanobatch import Costs, NanobatchPlan, Reduction
from parallel.plans.nanobatches.nanobatch_costs import TokenMix
from parallel.plans.nanobatches.nanobatch_timing import NanoOperation
from parallel.plans.network import inference
from parallel.plans.network.inference import Machine
from parallel.plans.workload import Transformer

SOURCE = "efeslab/Nanoflow (Apache-2.0), pipeline/config_all"


@dataclasses.dataclass(frozen=True)
class PublishedPipeline:
  """Sizes of a published pipeline.

  Attributes:
    model: Sizes of the model.
    gpus: Number of A100s.
    tokens: Tokens of a step.
    first: Tokens of the first of the two nano-batches of a layer.
    attention: Tokens of attention's nano-batches within each of these two.
    experts: Number of experts of an MLP, and number that a token uses.
  """

  model: Transformer
  gpus: int
  tokens: int
  first: int
  attention: tuple[tuple[int, ...], tuple[int, ...]]
  experts: tuple[int, int] = (1, 1)

  @property
  def active_parameters(self) -> int:
    """Parameters that a token uses."""
    width = self.model.ffn_width * self.experts[1]
    return dataclasses.replace(self.model, ffn_width=width).num_params

  @property
  def machine(self) -> Machine | None:
    """Machine of the GPUs that form the tensor axis; None for a single GPU."""
    if self.gpus == 1:
      return None
    return inference.machine(f"gpu:a100:1x{self.gpus}")


_QUARTERS = ((256, 384), (768, 640))
PIPELINES = {
  "llama-2-70b": PublishedPipeline(
    nanobatch_costs.LLAMA_2_70B, 8, 2048, 640, _QUARTERS
  ),
  "llama-3-8b": PublishedPipeline(
    Transformer(128_256, 4096, 32, 32, 8, 14336), 1, 1024, 384,
    ((384,), (640,)),
  ),
  "qwen2-72b": PublishedPipeline(
    Transformer(152_064, 8192, 80, 64, 8, 29568, qkv_bias=True), 8, 2048, 640,
    _QUARTERS,
  ),
  "mixtral-8x7b": PublishedPipeline(
    Transformer(32_000, 4096, 32, 32, 8, 14336), 8, 4096, 2048,
    ((1024, 1024), (1024, 1024)), experts=(8, 2),
  ),
}


@dataclasses.dataclass(frozen=True)
class LayerTimes:
  """Times of a layer's operations on ranges of tokens, in seconds.

  Attributes:
    parts: Operation of a layer -> time by number of tokens, float
      ``[tokens + 1]``.
    attend: Time of attention of the first n tokens, float ``[tokens + 1]``.
    sums: Time of an all-reduce by tokens, ``[tokens + 1]``; None for one GPU.
    num_layers: Number of layers.
  """

  parts: dict[str, np.ndarray]
  attend: np.ndarray
  sums: np.ndarray | None
  num_layers: int

  def seconds(self, kind: str, start: int, stop: int) -> float:
    """Returns the seconds of operation `kind` on tokens ``[start, stop)``."""
    if kind == "attend":
      return float(self.attend[stop] - self.attend[start])
    if kind in ("sum_1", "sum_2"):
      assert self.sums is not None
      return float(self.sums[stop - start])
    rest = {"qkv": "attention_rest", "up": "mlp_rest"}.get(kind)
    count = stop - start
    return float(
      self.parts[kind][count] + (self.parts[rest][count] if rest else 0)
    )


def layer_times(
  pipeline: PublishedPipeline, mix: TokenMix, profile: nanobatch_costs.Profile,
  device: Device, end: str = "least",
) -> LayerTimes:
  """Returns the times of a pipeline's operations.

  Args:
    pipeline: Sizes of the model and number of devices.
    mix: Tokens of the step.
    profile: Times of products and norms.
    device: Device whose peak rates give the time of attention.
    end: "least" or "greatest" plausible time of reductions.
  """
  tokens, machine = mix.tokens, pipeline.machine
  return LayerTimes(
    {
      part: profile.times(part, tokens)
      for part in (
        *nanobatch_costs.ATTENTION_OPERATIONS, *nanobatch_costs.MLP_OPERATIONS
      )
    },
    nanobatch_costs.cumulative_attention_s(
      pipeline.model, device, pipeline.gpus, mix
    ),
    None if machine is None else nanobatch_costs.reduction_times(
      machine, pipeline.model, Reduction(), tokens, end
    ),
    pipeline.model.num_layers,
  )


def operations(
  pipeline: PublishedPipeline, times: LayerTimes, memory: bool = True
) -> list[NanoOperation]:
  """Returns a layer's operations, in the order in which resources run them.

  Args:
    pipeline: Sizes.
    times: Times of its operations.
    memory: Whether attention overlaps with products instead of alternating.

  Raises:
    ValueError: The ranges of an operation overlap or do not have all tokens.
  """
  made = _operations(pipeline, times, memory)
  # Only the first nano-batch is gathered.
  nanobatch_timing.check(
    [o for o in made if o.kind != "gather"], pipeline.tokens
  )
  return made


def _operations(
  pipeline: PublishedPipeline, times: LayerTimes, memory: bool
) -> list[NanoOperation]:
  """Returns the unchecked operations of a layer; arguments as `operations`."""
  halves = _ranges((pipeline.first, pipeline.tokens - pipeline.first))
  parts = _ranges([n for half in pipeline.attention for n in half])
  first = [r for r in parts if r[1] <= pipeline.first]
  second = parts[len(first):]
  of_attention = "memory" if memory else "compute"

  def make(kind, resource, ranges, parents, carried=False, share=1.0):
    return [
      NanoOperation(
        kind, resource, start, stop, share * times.seconds(
          "sum_1" if kind == "gather" else kind, start, stop
        ), parents, carried,
      )
      for start, stop in ranges
    ]

  if pipeline.gpus == 1:
    # The nano-batches run with an offset of half a layer: the products of one
    # overlap with the attention of the other, which belongs to the next layer.
    return [
      o
      for half, own in zip(halves, (first, second), strict=True)
      for kind, ranges, parents in (
        ("out", [half], ("attend",)), ("up", [half], ("out",)),
        ("down", [half], ("up",)), ("qkv", own, ("down",)),
      )
      for o in make(kind, "compute", ranges, parents, kind == "out")
    ] + make("attend", of_attention, parts, ("qkv",))
  return [
    *make("qkv", "compute", parts, ("sum_2",), carried=True),
    *make("attend", of_attention, parts, ("qkv",)),
    # Two all-gathers send the bytes of an all-reduce.
    *make("gather", "network", halves[:1], ("attend",), share=0.5),
    *make("out", "compute", halves[:1], ("gather",)),
    *make("sum_1", "network", halves[:1], ("out",), share=0.5),
    *make("out", "compute", halves[1:], ("attend",)),
    *make("sum_1", "network", halves[1:], ("out",)),
    *make("up", "compute", halves[:1], ("sum_1",)),
    *make("down", "compute", halves[:1], ("up",)),
    *make("sum_2", "network", halves[:1], ("down",)),
    *make("up", "compute", halves[1:], ("sum_1",)),
    *make("down", "compute", halves[1:], ("up",)),
    *make("sum_2", "network", second, ("down",)),
  ]


def sequential(times: LayerTimes, sizes: Sequence[int]) -> list[NanoOperation]:
  """Returns the operations of batches of ``sizes`` tokens, without overlap."""
  kinds = ["qkv", "attend", "out", "sum_1", "up", "down", "sum_2"]
  if times.sums is None:
    kinds = [kind for kind in kinds if not kind.startswith("sum")]
  return [
    NanoOperation(
      kind, "compute", start, stop, times.seconds(kind, start, stop)
    )
    for start, stop in _ranges(sizes) for kind in kinds
  ]


def costs(name: str, pipeline: PublishedPipeline, times: LayerTimes) -> Costs:
  """Returns the costs of a pipeline's layer, as `nanobatch.plan` takes them."""
  parts = times.parts
  none = np.zeros(pipeline.tokens + 1)
  return Costs(
    name, times.num_layers,
    sum(parts[part] for part in nanobatch_costs.ATTENTION_OPERATIONS),
    sum(parts[part] for part in nanobatch_costs.MLP_OPERATIONS),
    {Reduction(): none if times.sums is None else times.sums},
    times.attend,
  )


def format_sizes(plan: NanobatchPlan) -> str:
  """Formats the sizes of a plan's nano-batches, as in "640 + 1,408"."""
  return " + ".join(f"{size:,}" for size in plan.sizes)


def _ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
  """Returns consecutive (start, stop) ranges of lengths ``sizes``."""
  ends = np.cumsum(sizes).tolist()
  return [
    (end - size, end) for size, end in zip(sizes, ends, strict=True)
  ]
