"""Bytes of a device in a step, by cause, in closed form.

All stages run one program, so buffers are as large on each as on the fullest.
How many copies of gradients and weights a compiler keeps alive at a time, and
what of a layer, is in no formula: causes that are not exact have factors, which
are fitted to what a compiler says (`fitted`). An estimate
has an upper bound: it times the largest ratio that the fit has seen. What no
compiler shows (the runtime's own memory, buffers of collectives, fragments) is
a margin with a source, not a fit.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools

import numpy as np
from scipy import optimize

from parallel.pipeline import builders, cost
from parallel.pipeline.timetable import Timetable
from parallel.planner import outer
from parallel.planner.device_state import parameters, partition
from parallel.planner.space import Configuration
from parallel.workload import TrainingStep, Transformer
from parallel.zero import cost as zero_cost

# How strongly fitted factors are drawn to 1.
_RIDGE = 0.01
MARGIN_BYTES = 3e9
MARGIN_SOURCE = (
  "assumption: CUDA's context and the allocator's fragments about 1 GB, and "
  "NCCL's buffers of 4 MiB per channel and peer (NCCL_BUFFSIZE, NCCL's "
  "documentation) for three axes"
)


@dataclasses.dataclass(frozen=True)
class Fit:
  """How often a compiler has each of `terms`, and how far it may be off.

  Attributes:
    factors: Term -> factor; 1 for those that are not named.
    upper: The upper bound of what a compiler shows is its estimate times this.
    source: What was fitted to what.
  """

  factors: Mapping[str, float]
  upper: float
  source: str = ""

  def estimate(self, found: Mapping[str, float]) -> float:
    """Returns the bytes that a compiler is expected to show of `terms`."""
    return sum(self.factors.get(key, 1.0) * x for key, x in found.items())

  def bound(self, found: Mapping[str, float]) -> float:
    """Returns the upper bound of it."""
    return self.upper * self.estimate(found)


# The formulas without what a compiler copies.
PLAIN = Fit(dict.fromkeys(("cast", "many", "stages"), 0.0), 1.0)
# By the platform of devices.
FITS = {
  "tpu": Fit(
    {
      "weights": 2.6, "cast": 0.62, "gradients": 1.46, "many": 1.7,
      "stages": 1.02, "kept": 0.0, "streams": 1.36, "layers": 2.11,
      "gathered": 0.72, "logits": 0.23,
    },
    1.55,
    "fitted to 100 training steps compiled for v5p:2x2x2 "
    "(configs/benchmark/planner_memory.py, results/planner_memory_v5p.json)",
  ),
  "gpu": Fit(
    {
      "weights": 1.26, "cast": 0.16, "gradients": 0.58, "many": 1.14,
      "stages": 0.16, "kept": 0.32, "streams": 1.04, "layers": 1.35,
      "gathered": 0.99, "logits": 0.22,
    },
    1.30,
    "fitted to 100 training steps compiled for gpu:h200:1x8 "
    "(configs/benchmark/planner_memory.py, results/planner_memory_h200.json)",
  ),
}


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of a device by cause; their sum is the highest that a step needs.

  Attributes:
    weights: float32 weights, and those of a step in fewer bits.
    gradients: Sums of gradients, float32, in all copies.
    optimizer: Two moments, float32; 0 if they wait on the host.
    kept: Inputs and cotangents of parts that the timetable keeps.
    activations: What one part keeps for its own backward.
    gathered: Layers in the dtype of activations, whole, with their gradients.
    logits: Of one microbatch, with their gradients.
    buffers: The margin, and what the upper bound adds.
    outer: What an outer loop keeps, and holds while it sends.
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
    """All of it."""
    return sum(vars(self).values())

  @property
  def binding(self) -> str:
    """The largest cause."""
    return max(dataclasses.asdict(self).items(), key=lambda item: item[1])[0]


@functools.lru_cache(maxsize=1024)
def timetable(name: str, stages: int, microbatches: int, chunks: int) -> (
  tuple[Timetable, cost.Cost]
):
  """Builds a timetable and counts what it costs; many are asked for again."""
  found = builders.build(name, stages, microbatches, chunks)
  return found, cost.cost(found)


@functools.lru_cache(maxsize=4096)
def _state(c: Configuration, model: Transformer) -> zero_cost.Memory:
  """Returns the training state's bytes, which many configurations share."""
  return zero_cost.memory(partition(c), parameters(c, model))


def terms(configuration: Configuration, step: TrainingStep) -> dict[str, float]:
  """Returns bytes as formulas have them, of what a compiler sees.

  "stored" is exact: parameters and moments between steps. "weights" are those
  of a step where a partition makes them, "cast" what the compiler makes of the
  stored ones in the activations' dtype. "many" and "stages" are further copies
  of gradients: of several microbatches, and of a pipeline's scan. "layers" is
  what layers keep if nothing is computed again, and "streams" what they keep if
  it is. The others are those of `Memory`.

  Args:
    configuration: The configuration, one that `space.refusal` lets pass.
    step: The training step.
  """
  c, model = configuration, step.model
  examples = c.examples(step.batch_size)
  state = _state(dataclasses.replace(
    c, microbatches=1, timetable="", route="", remat="", offload=False
  ), model)
  boundary = step.boundary_bytes(examples)
  kept, copies = 0.0, 1
  if c.stages > 1:
    counted = timetable(c.timetable, c.stages, c.microbatches, c.chunks)[1]
    # Places of both buffers, one that nobody reads in each, what is on its way,
    # and what enters (`parallel.pipeline.run`).
    places = max(counted.inputs) + max(counted.cotangents) + 6
    kept = places * boundary
    if c.keep == "residuals":  # of what is stored, and one that nobody reads
      copies += max(counted.stored) + max(counted.deltas)
  layer = sum(model.matrices) / c.tensor
  # A layer in the dtype of activations, and its gradient before it is added up.
  gathered = layer * (model.item_bytes + 4)
  logits = examples * step.seq_len * model.vocab_size / (c.stages * c.tensor)
  activations = copies * _activations(c, step, examples)
  again = c.remat != "none"
  return {
    "stored": state.stored * (1 / 3 if c.offload else 1),
    "weights": state.weights + state.secondary,
    "cast": state.stored / 3 * model.item_bytes / 4 * (c.scheme == "ddp"),
    "gradients": state.gradients,
    "many": state.gradients * (c.microbatches > 1),
    "stages": state.gradients * (c.stages > 1),
    "kept": kept,
    "streams": activations * again,
    "layers": activations * (not again),
    "gathered": gathered,
    "logits": 2 * 4 * logits,
  }


def memory(
  configuration: Configuration, step: TrainingStep, fit: Fit
) -> Memory:
  """Returns the bytes of a device, an upper bound; as `terms`."""
  found = terms(configuration, step)
  x = {key: fit.factors.get(key, 1.0) * size for key, size in found.items()}
  parameters = x["stored"] / (1 if configuration.offload else 3)
  return Memory(
    weights=parameters + x["weights"] + x["cast"],
    gradients=x["gradients"] + x["many"] + x["stages"],
    optimizer=x["stored"] - parameters,
    kept=x["kept"],
    activations=x["streams"] + x["layers"],
    gathered=x["gathered"],
    logits=x["logits"],
    buffers=MARGIN_BYTES + fit.bound(found) - fit.estimate(found),
    outer=outer.memory_bytes(configuration, step.model, sum(
      x[key] for key in ("kept", "streams", "layers", "gathered", "logits")
    )),
  )


def _activations(
  c: Configuration, step: TrainingStep, examples: int
) -> float:
  """Returns what a part's backward reads of its forward.

  Without recomputation that is all of each layer; else a layer's input, of
  "reduced" also what its two doors have reduced, and all of one layer.
  """
  layers = step.model.layers_per_part(c.stages * c.chunks)
  layer = step.kept_bytes(examples, c.tensor)
  if c.remat == "none":
    return layers * layer
  streams = {"full": 1, "reduced": 3}[c.remat]
  return layers * streams * step.boundary_bytes(examples) + layer


def fitted(
  programs: Sequence[tuple[Mapping[str, float], float]], margin: float = 0.02
) -> Fit:
  """Fits factors, which are not negative, by least squares of relative errors.

  Few programs leave factors near 1, since a ridge term draws them there. The
  upper bound holds for all programs that are fitted, with a margin.

  Args:
    programs: Results of `terms`, and total bytes by the compiler.
    margin: Margin added to the largest ratio.
  """
  keys = [key for key in programs[0][0] if key != "stored"]
  totals = np.array([total for _, total in programs])
  exact = np.array([found["stored"] for found, _ in programs])
  rows = np.array([[found[key] for key in keys] for found, _ in programs])
  towards = np.sqrt(_RIDGE) * np.eye(len(keys))
  factors, _ = optimize.nnls(
    np.concatenate([rows / totals[:, None], towards]),
    np.concatenate([1 - exact / totals, towards.sum(0)]),
  )
  ratios = totals / (exact + rows @ factors)
  return Fit(
    dict(zip(keys, factors.tolist(), strict=True)),
    float(max(1.0, ratios.max())) + margin,
  )
