"""Rotary position embedding of queries and keys.

Source: Su et al., "RoFormer", arXiv 2104.09864.
"""

from collections.abc import Sequence
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class LinearScaling:
  """Linear interpolation of positions: all frequencies are divided by a factor.

  Source: Chen et al., "Position Interpolation", arXiv 2306.15595.

  Attributes:
    factor: Extended context length, divided by the original one.
  """

  factor: float

  def __post_init__(self) -> None:
    _check("linear", "a finite factor >= 1", 1 <= self.factor < math.inf)

  def __call__(self, frequencies: np.ndarray) -> np.ndarray:
    """Returns the scaled frequencies, in radians per position."""
    return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
  """Frequency scaling of Llama 3.1: only long wavelengths are stretched.

  A wavelength with more than ``high`` periods in the original context is
  unchanged. One with less than ``low`` periods is multiplied by the factor. In
  between, frequencies are interpolated.

  Source: `apply_scaling` in the published code of Llama 3.1
  (github.com/meta-llama/llama-models, models/llama3/model.py).

  Attributes:
    factor: Extended context length, divided by the original one.
    low: Periods in the original context below which a wavelength is stretched
      by the whole factor.
    high: Periods in the original context above which it is unchanged.
    context: Positions of the original context.

  Example:
    >>> scaling = Llama3Scaling(factor=8, low=1, high=4, context=8192)
    >>> periods = np.array([0.5, 2.5, 8.0])
    >>> frequencies = 2 * np.pi * periods / scaling.context
    >>> (scaling(frequencies) / frequencies).round(4).tolist()
    [0.125, 0.5625, 1.0]
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
    """Returns the scaled frequencies, in radians per position."""
    periods = self.context * frequencies / (2 * math.pi)
    stays = np.clip((periods - self.low) / (self.high - self.low), 0, 1)
    return frequencies * (stays + (1 - stays) / self.factor)


Scaling = LinearScaling | Llama3Scaling

# The names that configs and published checkpoints use.
_SCALINGS = {"linear": LinearScaling, "llama3": Llama3Scaling}


def parse_scaling(values: Sequence[str | float]) -> Scaling | None:
  """Parses the config key ``rope_scaling``.

  Args:
    values: ``()``, ``("linear", factor)`` or ``("llama3", factor, low, high,
      context)``.

  Returns:
    The scaling; None for an empty sequence.

  Raises:
    ValueError: If the name is unknown, or the numbers are invalid.
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
  """Rotates queries or keys by angles proportional to their positions.

  Channel i of the first half of a head is paired with channel i of the second.

  Args:
    x: ``[B, T, heads, head width]``; the head width is even.
    base: Determines the longest wavelength, about ``2 pi base`` positions.
    scaling: Scaling of the frequencies for longer contexts, or None.
    positions: int ``[B, T]``; None for 0 to T - 1.

  Returns:
    An array with the shape and dtype of x; angles are computed in float32.
  """
  half = x.shape[-1] // 2
  if scaling is None:
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
  else:  # constants of the program, so numpy computes them in float64
    frequency = jnp.asarray(
      scaling(base ** (-np.arange(half) / half)), jnp.float32
    )
  if positions is None:
    position = jnp.arange(x.shape[1], dtype=jnp.float32)
    angle = (position[:, None] * frequency[None])[None, :, None, :]
  else:
    position = positions.astype(jnp.float32)[:, :, None, None]
    angle = position * frequency[None, None, None]
  # The angles are [1 or B, T, 1, half].
  cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
  first, second = x[..., :half], x[..., half:]
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
