"""What goes over the wire of a coded mean, and what becomes of that mean.

`parallel.quantize` takes both.
"""

import dataclasses
from typing import Any, Literal, Protocol

import jax

from parallel.kernels.codec import api, reference
from parallel.kernels.codec.reference import Codec, Encoded, OuterStep
from parallel.kernels.selection import Implementation

CODECS = ("none", *reference.NAMES)


_ROUTES = ("all_gather", "all_to_all")


_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Wire:
  """How workers send their deltas to each other.

  Attributes:
    codec: "int8", "int4", "e3m0" or "fp8"; or "none", which is an all-reduce in
      ``dtype``.
    block: The number of elements that share a scale; even.
    route: How coded deltas travel: "all_gather" (each is rounded once) or
      "all_to_all" (their means are rounded again).
    stochastic: Whether a codec rounds at random, without bias, instead of to
      the nearest number.
    dtype: "float32" or "bfloat16", the dtype in which codec "none" sends. The
      sums of devices are then rounded to it too, in an order that the backend
      chooses.
    implementation: Implementations of the codec in order of preference, as
      `parallel.kernels.selection` has them; all send the same bits.
  """

  codec: str = "none"
  block: int = 256
  route: Literal["all_gather", "all_to_all"] = "all_gather"
  stochastic: bool = False
  dtype: Literal["float32", "bfloat16"] = "float32"
  implementation: tuple[str, ...] = ("reference",)

  def __post_init__(self) -> None:
    for field, allowed in (
      ("codec", CODECS), ("route", _ROUTES), ("dtype", _DTYPES)
    ):
      value = getattr(self, field)
      if value not in allowed:
        raise ValueError(
          f"wire {field}={value!r} is unknown; use one of "
          f"{', '.join(allowed)}"
        )
    if self.codec == "none" and (self.stochastic or self.route != _ROUTES[0]):
      raise ValueError(
        f"wire codec='none' is an all-reduce; stochastic="
        f"{self.stochastic} and route={self.route!r} need one of "
        f"{', '.join(reference.NAMES)}"
      )
    if self.codec != "none" and self.dtype != "float32":
      raise ValueError(
        f"wire dtype={self.dtype!r} is for codec='none'; {self.codec!r} "
        "sums in float32"
      )
    _ = self.block_codec  # its constructor refuses odd blocks

  @property
  def block_codec(self) -> Codec | None:
    """The codec; None for an all-reduce."""
    if self.codec == "none":
      return None
    return Codec(self.codec, self.block, self.stochastic)


class Use(Protocol):
  """What becomes of a mean, computed where the mean is decoded if possible.

  Both methods return the same. Which is called depends on the route: only an
  all-gather leaves all encoded rows on each device.
  """

  def of_mean(self, mean: jax.Array) -> Any:
    """Computes the result from a decoded mean ``[*B, ...]``."""
    ...

  def of_encoded(
    self,
    encoded: Encoded,
    shape: tuple[int, ...],
    codec: Codec,
    weights: jax.Array | None,
    implementation: Implementation,
  ) -> Any:
    """Computes the result from all encoded rows, in the pass that decodes.

    Args:
      encoded: Payloads and scales ``[N, *rows, ...]`` of all N ranks.
      shape: The shape of one rank's rows, which the result's arrays have too.
      codec: The codec of the rows.
      weights: The ranks' weights ``[N]``; None for equal ones.
      implementation: Implementations of the codec in order of preference.
    """
    ...


@dataclasses.dataclass(frozen=True)
class MeanItself:
  """The mean itself is the result."""

  def of_mean(self, mean: jax.Array) -> jax.Array:
    return mean

  def of_encoded(
    self,
    encoded: Encoded,
    shape: tuple[int, ...],
    codec: Codec,
    weights: jax.Array | None,
    implementation: Implementation,
  ) -> jax.Array:
    return api.mean(
      encoded, shape[-1], codec, weights, implementation=implementation
    )


@dataclasses.dataclass(frozen=True)
class NesterovStep:
  """An outer Nesterov step; the results are new parameters and momentum.

  Attributes:
    params: The outer parameters, float32 ``[*B, ...]``.
    momentum: The outer momentum, float32 ``[*B, ...]``.
    outer: Learning rate and decay of the momentum.
  """

  params: jax.Array
  momentum: jax.Array
  outer: OuterStep

  def of_mean(self, mean: jax.Array) -> tuple[jax.Array, jax.Array]:
    return reference.nesterov_step(
      mean, self.params, self.momentum, self.outer
    )

  def of_encoded(
    self,
    encoded: Encoded,
    shape: tuple[int, ...],
    codec: Codec,
    weights: jax.Array | None,
    implementation: Implementation,
  ) -> tuple[jax.Array, jax.Array]:
    return api.nesterov(
      encoded, self.params.reshape(shape), self.momentum.reshape(shape), codec,
      self.outer, weights, implementation=implementation,
    )


# The defaults: an all-reduce in float32, of which the mean is the result.
FLOAT32 = Wire()
MEAN_ITSELF = MeanItself()
