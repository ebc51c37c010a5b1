"""Encoding of averaged arrays (deltas), and an operation on their mean.

Both are arguments of `parallel.quantize.coded_mean`. In shapes, N is the number
of ranks that are averaged, and B are the dims that codec blocks do not cross.
"""

import dataclasses
from typing import Any, Literal, Protocol

import jax

from parallel.kernels.codec import api, reference
from parallel.kernels.codec.reference import Codec, Encoded, OuterOptions
from parallel.kernels.selection import Implementation

# Allowed values of `Wire.codec`, `Wire.route` and `Wire.dtype`.
CODECS = ("none", *reference.NAMES)


_ROUTES = ("all_gather", "all_to_all")


_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Wire:
  """Encoding of deltas for transmission, and the collective that averages them.

  Attributes:
    codec: "int8", "int4", "e3m0" or "fp8"; or "none" for an all-reduce in
      ``dtype``.
    block: Number of elements that share a scale; even.
    route: Collective that sends encoded deltas: "all_gather" (each delta is
      rounded once) or "all_to_all" (means of slices are rounded, too).
    stochastic: Whether the codec uses unbiased stochastic rounding instead of
      rounding to the nearest representable number.
    dtype: "float32" or "bfloat16", dtype of the all-reduce of codec "none". In
      bfloat16, partial sums are rounded too, in an order chosen by the backend.
    implementation: Implementations of the codec in order of preference
      (`parallel.kernels.selection`); all produce the same bits.

  Raises:
    ValueError: A name is unknown, or an option does not apply to the codec.

  Example:
    >>> wire = Wire(codec="int4", block=256)
    >>> wire.block_codec.payload_bytes(1024), wire.block_codec.num_scales(1024)
    (512, 4)
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
    # An all-reduce has no codes to round, and ``route`` is for encoded deltas.
    if self.codec == "none" and (self.stochastic or self.route != _ROUTES[0]):
      raise ValueError(
        f"wire codec='none' is an all-reduce, so stochastic={self.stochastic} "
        f"and route={self.route!r} need another codec: one of "
        f"{', '.join(reference.NAMES)}"
      )
    # Decoded values are always summed in float32.
    if self.codec != "none" and self.dtype != "float32":
      raise ValueError(
        f"wire dtype={self.dtype!r} has no effect with codec={self.codec!r}, "
        "which sums in float32; it is for codec='none'"
      )
    _ = self.block_codec  # the constructor of Codec rejects odd blocks

  @property
  def block_codec(self) -> Codec | None:
    """Codec of the deltas; None for an all-reduce, which encodes nothing."""
    if self.codec == "none":
      return None
    return Codec(self.codec, self.block, self.stochastic)


class Epilogue(Protocol):
  """Operation on a mean, fused with the decoding of the mean if possible.

  Both methods return the result of the operation. `of_encoded` is called after
  an all-gather, by which each device receives all encoded rows; `of_mean` is
  called after an all-to-all or an all-reduce.
  """

  def of_mean(self, mean: jax.Array) -> Any:
    """Computes the result from a decoded mean, float32 ``[*B, ...]``.

    B are the dims that codec blocks do not cross.
    """
    ...

  def of_encoded(
    self,
    encoded: Encoded,
    shape: tuple[int, ...],
    codec: Codec,
    weights: jax.Array | None,
    implementation: Implementation,
  ) -> Any:
    """Computes the result from all encoded rows, in the pass that decodes them.

    Args:
      encoded: Payloads and scales ``[N, *rows, ...]`` of the arrays of all N
        ranks, where ``*rows`` are all dims of an array but the last.
      shape: Shape of one rank's array, and of the arrays of the result.
      codec: Codec of ``encoded``.
      weights: Weights of the ranks, ``[N]``; None for equal weights.
      implementation: Implementations of the codec in order of preference.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Identity:
  """Epilogue that returns the mean unchanged."""

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
  """Epilogue that takes a Nesterov step; returns new parameters and momentum.

  Attributes:
    params: Parameters of the outer optimizer, float32 ``[*B, ...]``.
    momentum: Momentum of the outer optimizer, float32 ``[*B, ...]``.
    outer: Learning rate and decay of the momentum.
  """

  params: jax.Array
  momentum: jax.Array
  outer: OuterOptions

  def of_mean(self, mean: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The mean is decoded already, so no kernel is needed.
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
    # Rows have the shape that was encoded, which may differ from [*B, ...].
    return api.nesterov(
      encoded, self.params.reshape(shape), self.momentum.reshape(shape), codec,
      self.outer, weights, implementation=implementation,
    )


# Defaults of `coded_mean`: an all-reduce in float32, whose mean is returned.
FLOAT32 = Wire()
IDENTITY = Identity()
