"""Peak memory of a device in a step, by cause, in closed form.

All stages run one program, so buffers have the size of those of the largest
stage. No formula predicts how many copies of gradients and weights, and which
activations of a layer, a compiler keeps alive at a time. Inexact terms thus
have factors, which are fitted to the compiler's memory reports (`fit_factors`),
separately for pipelines, whose scan over ticks makes other copies. The upper
bound is the estimate times the largest ratio of report and estimate in the fit.
Memory that the compiler does not report (of the runtime, of collectives, and
lost by fragmentation) is a constant, `MARGIN_BYTES`, and is not fitted.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import NamedTuple

import numpy as np
from scipy import optimize

from parallel.plans.pipeline import builders, cost
from parallel.plans.pipeline.pipeline_schedule import PipelineSchedule
from parallel.plans.planner import outer
from parallel.plans.planner.device_state import parameters, partition
from parallel.plans.planner.space import Configuration
from parallel.plans.workload import TrainingStep, Transformer
from parallel.plans.zero import cost as zero_cost

# Ridge penalty that pulls fitted factors towards 1.
_RIDGE = 0.01
EXACT_TERMS = ("stored", "saved", "deltas")  # exact terms, whose factor is 1
MARGIN_BYTES = 3e9
MARGIN_SOURCE = (
  "assumption: CUDA's context and the allocator's fragments about 1 GB, and "
  "NCCL's buffers of 4 MiB per channel and peer (NCCL_BUFFSIZE, NCCL's "
  "documentation) for three axes"
)


@dataclasses.dataclass(frozen=True)
class Fit:
  """Fitted factors of the memory `terms`, and an error bound.

  Attributes:
    factors: Term -> factor; 1 for missing terms.
    upper: Largest ratio of the compiler's bytes to the estimate, plus a margin.
    source: Programs and compiler to which the factors were fitted.
  """

  factors: Mapping[str, float]
  upper: float
  source: str = ""

  def estimate(self, found: Mapping[str, float]) -> float:
    """Returns the estimated bytes of a program; ``found`` are its `terms`."""
    return sum(self.factors.get(key, 1.0) * x for key, x in found.items())

  def bound(self, found: Mapping[str, float]) -> float:
    """Returns an upper bound of a program's bytes; ``found``: its `terms`."""
    return self.upper * self.estimate(found)


@dataclasses.dataclass(frozen=True)
class PlatformFits:
  """Fitted memory factors for the compiler of one platform.

  Attributes:
    alone: Fit of steps without pipeline stages.
    stages: Fit of steps with pipeline stages.
  """

  alone: Fit
  stages: Fit

  def of(self, c: Configuration) -> Fit:
    """Returns the fit that applies to a configuration."""
    return self.stages if c.stages > 1 else self.alone


# The formulas alone, without copies that a compiler makes.
UNFITTED = Fit(dict.fromkeys(
  ("cast", "many", "stages", "single", "mlp", "norms"), 0.0
), 1.0)
# Fits by the platform of the devices.
FITS = {
  "tpu": PlatformFits(
    Fit(
      {
        "weights": 2.54, "cast": 0.36, "gradients": 1.37, "many": 1.68,
        "stages": 0.94, "single": 1.0, "kept": 0.22, "streams": 1.52,
        "layers": 1.33, "norms": 0.73, "gathered": 1.6, "logits": 0.26,
        "mlp": 1.33,
      },
      1.49,
      "fitted to 82 training steps compiled for v5p:2x2x2 "
      "(results/planner_memory_v5p.json)",
    ),
    Fit(
      {
        "weights": 2.77, "cast": 0.59, "gradients": 0.73, "many": 1.65,
        "stages": 1.65, "single": 0.48, "kept": 1.81, "streams": 1.2,
        "layers": 1.03, "norms": 0.92, "gathered": 0.44, "logits": 0.19,
        "mlp": 1.03,
      },
      1.18,
      "fitted to 54 pipelines compiled for v5p:2x2x2 "
      "(results/planner_memory_v5p.json, "
      "results/planner_memory_answers_v5p.json)",
    ),
  ),
  "gpu": PlatformFits(
    Fit(
      {
        "weights": 1.35, "cast": 0.6, "gradients": 0.57, "many": 1.05,
        "stages": 0.13, "single": 1.0, "kept": 0.0, "streams": 0.9,
        "layers": 1.22, "norms": 0.01, "gathered": 0.67, "logits": 0.23,
        "mlp": 1.22,
      },
      1.28,
      "fitted to 100 training steps compiled for gpu:h200:1x8 "
      "(results/planner_memory_h200.json)",
    ),
    Fit(
      {
        "weights": 1.23, "cast": 0.58, "gradients": 0.27, "many": 0.8,
        "stages": 0.8, "single": 0.26, "kept": 1.1, "streams": 0.61,
        "layers": 1.07, "norms": 0.04, "gathered": 0.46, "logits": 0.17,
        "mlp": 1.07,
      },
      1.09,
      "fitted to 109 pipelines compiled for gpu:h200:1x8 "
      "(results/planner_memory_h200.json, "
      "results/planner_memory_answers_h200.json)",
    ),
  ),
}


@dataclasses.dataclass(frozen=True)
class PeakMemory:
  """Peak bytes of a device in a step, by cause.

  Attributes:
    weights: float32 weights, and the step's copies of them in fewer bits.
    gradients: float32 sums of gradients, with all copies of them.
    optimizer: float32 moments; 0 if they are on the host.
    kept: Inputs and cotangents of parts that the pipeline schedule stores.
    activations: Residuals that one part saves for its backward, and those that
      the pipeline schedule stores.
    gathered: Whole layers in the dtype of activations, with their gradients.
    logits: Logits of one microbatch, with their gradients.
    buffers: ``MARGIN_BYTES`` plus the difference of upper bound and estimate.
    outer: State of an outer loop, and its exchange buffers.
  """

  weights: float
  gradients: float
  optimizer: float
  kept: float
  activations: float
  gathered: float
  logits: float
  buffers: float
  outer: float = 0.0

  @property
  def total(self) -> float:
    """Bytes of all causes together."""
    return sum(vars(self).values())

  @property
  def binding(self) -> str:
    """Name of the cause with the most bytes."""
    return max(dataclasses.asdict(self).items(), key=lambda item: item[1])[0]


@functools.lru_cache(maxsize=1024)
def cached_schedule(name: str, stages: int, microbatches: int, chunks: int) -> (
  tuple[PipelineSchedule, cost.Cost]
):
  """Returns `builders.build` of these arguments and its cost; both cached."""
  found = builders.build(name, stages, microbatches, chunks)
  return found, cost.cost(found)


@functools.lru_cache(maxsize=4096)
def _state_memory(
  c: Configuration, model: Transformer, moments: int
) -> tuple[zero_cost.StateMemory, float]:
  """Returns a device's bytes of training state, and the fraction of layers.

  The rest belongs to embedding, head and last norm.

  The result is cached, since many configurations have the same state.
  """
  found = parameters(c, model, moments)
  *stacks, embedding, head, gain = found
  of_layers = sum(each.size * each.count for each in stacks)
  others = embedding.size + head.size + gain.size
  return (
    zero_cost.memory(partition(c), found), of_layers / (of_layers + others)
  )


def terms(configuration: Configuration, step: TrainingStep) -> dict[str, float]:
  """Returns the terms, in bytes, of an estimate of a compiler's memory report.

      stored    parameters and moments between steps (exact)
      weights   weights of the step, if a partition gathers or casts them
      cast      the compiler's copy of stored weights in the activations' dtype
      many      further copies of gradients with several microbatches
      stages    further copies of gradients in a pipeline's scan
      single    replaces "many" and "stages" if each part is one layer
      layers    residuals of a part; with rematerialization, of one layer
      streams   saved inputs of layers, with rematerialization
      mlp       further residuals of layers with a partition
      saved     residuals that forwards of a pipeline schedule save (exact)
      deltas    values between the two halves of a split backward (exact)
      norms     float32 copies of the residual stream, in addition to "layers",
                "saved" and "deltas", if no kernels compute the norms

  In a pipeline, only gradients of stacked layers, of which the scan takes
  slices, are copied, not those of embedding and head. For "gradients", "kept",
  "gathered" and "logits" see the fields of `PeakMemory`.

  Args:
    configuration: The configuration, one that `space.violated_constraint`
      accepts.
    step: The training step.
  """
  c, model = configuration, step.model
  examples = c.examples(step.batch_size)
  # Fields that do not affect the state are reset, for more cache hits.
  state, stacked = _state_memory(dataclasses.replace(
    c, microbatches=1, schedule="", route="", remat="", offload=False
  ), model, step.moments)
  boundary = step.boundary_bytes(examples)
  kept, saved, halves = 0.0, 0, 0
  if c.stages > 1:
    built, counted = cached_schedule(
      c.schedule, c.stages, c.microbatches, c.chunks
    )
    # Buffer slots of inputs and cotangents, with one unread slot for each, two
    # values in flight (three in a V schedule), and two that enter the pipeline
    # (`parallel.pipeline.run`).
    places = max(counted.inputs) + max(counted.cotangents) + 7 - built.is_loop
    kept = places * boundary
    if c.keep == "residuals":
      saved, halves = max(counted.stored), max(counted.deltas)
  layer = sum(model.matrices) / c.tensor  # elements of a layer on a device
  # A layer in the dtype of activations, and its float32 gradient before the
  # reduction.
  gathered = layer * (model.item_bytes + 4)
  # The vocabulary is sharded over stages and tensor ranks.
  logits = examples * step.seq_len * model.vocab_size / (c.stages * c.tensor)
  layer = _layer_bytes(c, step, examples)
  layers = model.layers_per_part(c.stages * c.chunks)
  # Bytes of the gradients that the compiler copies.
  copied = state.gradients * (stacked if c.stages > 1 else 1)
  single = c.stages > 1 and layers == 1
  # Inputs of layers, and with "reduced" also the all-reduced outputs of their
  # two row-parallel projections.
  streams = {"none": 0, "full": 1, "reduced": 3}[c.remat] * layers * boundary
  all_saved = c.remat == "none"
  return {
    "stored": state.stored - state.moments * c.offload,
    "weights": state.weights + state.secondary,
    "cast": (state.stored - state.moments) * model.item_bytes / 4
            * (c.scheme == "ddp"),
    "gradients": state.gradients,
    "many": copied * (c.microbatches > 1 and not single),
    "stages": copied * (c.stages > 1 and not single),
    "single": copied * single,
    "kept": kept,
    "streams": streams,
    "layers": layer.residuals * (layers if all_saved else 1),
    "mlp": layer.mlp * (layers if all_saved else 1),
    "saved": saved * (
      (layer.residuals + layer.mlp) * layers if all_saved else streams
    ),
    "deltas": layer.deltas * layers * halves,
    "norms": layers * (
      layer.norms * (1 + saved) * all_saved + layer.norm_deltas * halves
    ),
    "gathered": gathered,
    "logits": 2 * 4 * logits,
  }


def memory(
  configuration: Configuration, step: TrainingStep, fit: Fit
) -> PeakMemory:
  """Returns an upper bound of a device's bytes in a step, by cause.

  ``fit`` has the fitted factors of the `terms`, whose arguments the others are.
  """
  found = terms(configuration, step)
  x = {key: fit.factors.get(key, 1.0) * size for key, size in found.items()}
  # The moments have the size of the weights; offloading leaves the weights.
  parameters = x["stored"] / (1 if configuration.offload else 1 + step.moments)
  return PeakMemory(
    weights=parameters + x["weights"] + x["cast"],
    gradients=sum(x[key] for key in ("gradients", "many", "stages", "single")),
    optimizer=x["stored"] - parameters,
    kept=x["kept"],
    activations=sum(
      x[key] for key in ("streams", "layers", "mlp", "saved", "deltas", "norms")
    ),
    gathered=x["gathered"],
    logits=x["logits"],
    buffers=MARGIN_BYTES + fit.bound(found) - fit.estimate(found),
    outer=outer.memory_bytes(configuration, step.model, sum(
      x[key] for key in (
        "kept", "saved", "deltas", "norms", "streams", "layers", "mlp",
        "gathered", "logits",
      )
    )),
  )


class _LayerBytes(NamedTuple):
  """Bytes that a layer saves for its backward, on a device.

  Attributes:
    residuals: Values that the forward computes.
    mlp: Further residuals if a partition shards the training state.
    deltas: Cotangents that one half of a split backward saves for the other.
    norms: Additional residuals if no kernel computes the norms.
    norm_deltas: Additional deltas if no kernel computes the norms.
  """

  residuals: float
  mlp: float
  deltas: float
  norms: float
  norm_deltas: float


def _layer_bytes(
  c: Configuration, step: TrainingStep, examples: int
) -> _LayerBytes:
  """Returns the bytes that the forward of one layer saves on a device.

  It runs on ``examples`` examples.
  """
  model, item = step.model, step.model.item_bytes
  tokens = examples * step.seq_len
  ffn = tokens * model.ffn_width / c.tensor
  queries = model.num_heads + 2 * model.num_kv_heads  # and keys and values
  # Without a kernel, both norms save, instead of inputs in the activations'
  # dtype, float32 copies of inputs, normalised inputs and products with the
  # gain. A partition recomputes the inputs' copies.
  copies = 6 if c.scheme == "ddp" else 4
  stream = tokens * model.width
  kernel = c.route == "one_shot"  # it reduces, adds and normalises
  return _LayerBytes(
    step.saved_activation_bytes(examples, c.tensor),
    # With a partition, `jax.checkpoint` (`parallel.zero.gathered`) saves all
    # steps of the activation function: six arrays of the MLP's width, not 3.
    # XLA merges equal ones in a loop over layers, not in a pipeline's buffers.
    3 * ffn * item * (c.scheme != "ddp" and c.stages > 1),
    # Cotangents of both norms' inputs, of queries, keys, values, gate and up.
    item * (2 * stream + 2 * ffn
            + tokens * queries * model.head_width / c.tensor),
    0.0 if kernel else stream * (4 * copies - 2 * item),
    0.0 if kernel else stream * 2 * 4,
  )


def fit_factors(
  programs: Sequence[tuple[Mapping[str, float], float]], margin: float = 0.02
) -> Fit:
  """Fits nonnegative factors of `terms` by least squares of relative errors.

  A ridge term keeps the factors near 1 if there are few programs. Terms in
  ``EXACT_TERMS`` have a factor of 1, and "mlp" has that of "layers", since both
  are residuals. The upper bound holds for all fitted programs, with a margin.

  Args:
    programs: For each program the result of `terms`, and the compiler's bytes.
    margin: Value added to the largest ratio of report and estimate.

  Example:
    A compiler that keeps two copies of the gradients, in ten programs.

    >>> many = [({"stored": 12.0, "gradients": g}, 12 + 2 * g)
    ...         for g in np.linspace(1.0, 10.0, 10)]
    >>> fit = fit_factors(many)
    >>> round(fit.factors["gradients"], 1)
    2.0
  """
  keys = [key for key in programs[0][0] if key not in (*EXACT_TERMS, "mlp")]
  totals = np.array([total for _, total in programs])
  exact = np.array([
    sum(found.get(key, 0.0) for key in EXACT_TERMS) for found, _ in programs
  ])
  rows = np.array([
    [found[key] + found.get("mlp", 0.0) * (key == "layers") for key in keys]
    for found, _ in programs
  ])
  # Ridge penalty: one row sqrt(_RIDGE) * (factor - 1) per term.
  towards = np.sqrt(_RIDGE) * np.eye(len(keys))
  # Relative errors: each row is divided by its program's total.
  factors, _ = optimize.nnls(
    np.concatenate([rows / totals[:, None], towards]),
    np.concatenate([1 - exact / totals, towards.sum(0)]),
  )
  ratios = totals / (exact + rows @ factors)
  found = dict(zip(keys, factors.tolist(), strict=True))
  if "mlp" in programs[0][0]:
    found["mlp"] = found["layers"]
  return Fit(found, float(max(1.0, ratios.max())) + margin)
