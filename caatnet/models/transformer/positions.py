"""Rotary positions: by which angles queries and keys are turned.

Source: Su et al., "RoFormer", arXiv 2104.09864.
"""

from collections.abc import Sequence
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Linear:
  """Positions are divided by a factor, so that longer contexts fit.

  Source: Chen et al., "Position Interpolation", arXiv 2306.15595.

  Attributes:
    factor: By how much longer the context becomes.
  """

  factor: float

  def __post_init__(self) -> None:
    _check("linear", "a finite factor >= 1", 1 <= self.factor < math.inf)

  def __call__(self, frequencies: np.ndarray) -> np.ndarray:
    """Returns the frequencies that are used in place of the given ones."""
    return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3:
  """Only long wavelengths are stretched, as in Llama 3.1.

  A wavelength that fits more than ``high`` times into the original context
  stays, one that fits less than ``low`` times is multiplied by the factor, and
  between the two the frequency is interpolated.

  Source: `apply_scaling` in the published code of Llama 3.1
  (github.com/meta-llama/llama-models, models/llama3/model.py).

  Attributes:
    factor: By how much longer the context becomes.
    low: Periods in the original context, up to which a wavelength is stretched.
    high: Periods in the original context, from which on a wavelength stays.
    context: The positions of the original context.
  """

  factor: float
  low: float
  high: float
  context: int

  def __post_init__(self) -> None:
    _check(
      "llama3",
      "finite numbers, factor >= 1, 0 < low < high and context >= 1",
      1 <= self.factor < math.inf and 0 < self.low < self.high < math.inf
      and 1 <= self.context < math.inf,
    )

  def __call__(self, frequencies: np.ndarray) -> np.ndarray:
    """Returns the frequencies that are used in place of the given ones."""
    periods = self.context * frequencies / (2 * math.pi)
    stays = np.clip((periods - self.low) / (self.high - self.low), 0, 1)
    return frequencies * (stays + (1 - stays) / self.factor)


Scaling = Linear | Llama3

# The names that configs and published checkpoints use.
_SCALINGS = {"linear": Linear, "llama3": Llama3}


def parse_scaling(values: Sequence[str | float]) -> Scaling | None:
  """Reads ``("linear", factor)`` or ``("llama3", factor, low, high, context)``.

  Raises:
    ValueError: The name is unknown, or its numbers do not fit.
  """
  if not values:
    return None
  name, *numbers = values
  kind = _SCALINGS.get(name)
  fields = [] if kind is None else [f.name for f in dataclasses.fields(kind)]
  if kind is None or len(numbers) != len(fields):
    forms = (
      f"({', '.join([repr(n), *(f.name for f in dataclasses.fields(k))])})"
      for n, k in _SCALINGS.items()
    )
    raise ValueError(
      f"rope_scaling={tuple(values)!r} must be () or one of {'; '.join(forms)}"
    )
  if not all(type(number) in (int, float) for number in numbers):
    raise ValueError(f"rope_scaling={tuple(values)!r} must have numbers")
  try:
    return kind(*numbers)
  except ValueError as error:
    raise ValueError(f"rope_scaling={tuple(values)!r}: {error}") from error


def _check(name: str, condition: str, holds: bool) -> None:
  if not holds:
    raise ValueError(f"{name!r} needs {condition}")


def rotate(
  x: jax.Array,
  base: float,
  scaling: Scaling | None = None,
  positions: jax.Array | None = None,
) -> jax.Array:
  """Rotates queries or keys by their positions.

  Channel i of the first half of a head is paired with channel i of the second.

  Args:
    x: ``[B, T, heads, head width]``; the head width is even.
    base: Sets the longest wavelength, about ``2 pi base`` positions.
    scaling: How frequencies are changed for longer contexts; None leaves them.
    positions: int ``[B, T]``; None for 0 to T - 1.

  Returns:
    An array like x; angles are computed in float32.
  """
  half = x.shape[-1] // 2
  if scaling is None:
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
  else:  # known when the program is made, hence in float64
    frequency = jnp.asarray(
      scaling(base ** (-np.arange(half) / half)), jnp.float32
    )
  if positions is None:
    position = jnp.arange(x.shape[1], dtype=jnp.float32)
    angle = (position[:, None] * frequency)[None, :, None, :]
  else:
    angle = positions.astype(jnp.float32)[:, :, None, None] * frequency
  # The angles are [1 or B, T, 1, half].
  cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
  first, second = x[..., :half], x[..., half:]
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
