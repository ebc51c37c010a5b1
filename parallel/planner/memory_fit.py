"""Factors of the planner's memory, fitted to what a compiler says.

How many copies of gradients and of cast weights a compiler keeps alive at a
time, and what of a layer, is in no formula. So causes that are not exact have
factors, fitted by least squares of relative errors; few programs leave them
near 1. An estimate has an upper bound: it times the largest ratio that the fit
has seen, and a margin.
"""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np
from scipy import optimize

from parallel.planner.memory import memory
from parallel.planner.model import Transformer
from parallel.planner.space import Configuration

# How strongly factors are drawn to 1.
_RIDGE = 0.01


def terms(
  configuration: Configuration, model: Transformer, batch_size: int
) -> dict[str, float]:
  """Returns the bytes of each cause that a compiler sees, as formulas have it.

  "stored" is exact: parameters and moments between steps. "cast" are a step's
  weights in the activations' dtype. "many" and "stages" are further copies of
  gradients: of several microbatches, and of a pipeline's scan. "layers" is what
  layers keep if nothing is computed again, and "streams" what they keep if it
  is. The others are those of `parallel.planner.memory.Memory`.
  """
  c, m = configuration, memory(configuration, model, batch_size)
  stored = 0.0 if c.offload else 1.5 * m.optimizer
  cast = m.weights - stored / 3 if c.scheme != "ddp" else m.weights / 2
  again = c.remat != "none"
  return {
    "stored": stored,
    "gradients": m.gradients,
    "cast": cast,
    "many": m.gradients * (c.microbatches > 1),
    "stages": m.gradients * (c.stages > 1),
    "kept": m.kept,
    "streams": m.activations * again,
    "layers": m.activations * (not again),
    "gathered": m.gathered,
    "logits": m.logits,
  }


@dataclasses.dataclass(frozen=True)
class Fit:
  """How often a compiler has each cause, and how far an estimate may be off.

  Attributes:
    factors: Cause -> factor; 1 for those that are not named.
    upper: The upper bound of what a compiler shows is its estimate times this.
    source: What was fitted to what.
  """

  factors: Mapping[str, float]
  upper: float
  source: str = ""

  def estimate(self, found: Mapping[str, float]) -> float:
    """Returns the bytes that a compiler is expected to show.

    Args:
      found: What `terms` returned.
    """
    return sum(
      self.factors.get(cause, 1.0) * size for cause, size in found.items()
    )

  def bound(self, found: Mapping[str, float]) -> float:
    """Returns the upper bound of it."""
    return self.upper * self.estimate(found)


def fit(
  programs: Sequence[tuple[Mapping[str, float], float]], margin: float = 0.02
) -> Fit:
  """Fits factors, which are not negative, to what a compiler says.

  The upper bound holds for all programs that are fitted, with a margin.

  Args:
    programs: What `terms` returned, and the bytes that the compiler has in all.
    margin: What is added to the largest ratio.
  """
  causes = [cause for cause in programs[0][0] if cause != "stored"]
  totals = np.array([total for _, total in programs])
  exact = np.array([found["stored"] for found, _ in programs])
  rows = np.array([[found[c] for c in causes] for found, _ in programs])
  towards = np.sqrt(_RIDGE) * np.eye(len(causes))
  factors, _ = optimize.nnls(
    np.concatenate([rows / totals[:, None], towards]),
    np.concatenate([1 - exact / totals, towards.sum(0)]),
  )
  ratios = totals / (exact + rows @ factors)
  return Fit(
    dict(zip(causes, factors.tolist(), strict=True)),
    float(max(1.0, ratios.max())) + margin,
  )


# The formulas as they are.
PRIOR = Fit({}, 1.5, "nothing")
