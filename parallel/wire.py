"""What goes over the wire of a coded mean, and what becomes of that mean."""

import dataclasses
from typing import Any, Literal, Protocol

import jax

from parallel.kernels.codec import api, reference
from parallel.kernels.codec.reference import Codec, Encoded
from parallel.kernels.selection import Implementation

CODECS = ("none", *reference.NAMES)


_ROUTES = ("all_gather", "all_to_all")


_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Wire:
  """How workers tell each other their deltas.

  Attributes:
    codec: "none" (an all-reduce in ``dtype``), "int8", "int4", "e3m0", "fp8".
    block: Elements that share a scale; even.
    route: "all_gather" (one rounding) or "all_to_all" (two); of a codec.
    stochastic: Unbiased random rounding instead of nearest; of a codec.
    dtype: "float32" or "bfloat16", the operands of codec "none". Devices'
      sums are then rounded to it too, in an order that the backend chooses.
    implementation: Of the codec, in order of preference; all send the same
      bits. See `parallel.kernels.selection`.
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
    _ = self.block_codec  # refuses wrong blocks

  @property
  def block_codec(self) -> Codec | None:
    """The codec itself; None for "none"."""
    if self.codec == "none":
      return None
    return Codec(self.codec, self.block, self.stochastic)


class Use(Protocol):
  """What becomes of a mean where it is decoded."""

  def of_mean(self, mean: jax.Array) -> Any:
    """The result, from a mean ``[*B, ...]`` that is there already."""
    ...

  def of_encoded(
    self,
    encoded: Encoded,
    shape: tuple[int, ...],
    codec: Codec,
    weights: jax.Array | None,
    implementation: Implementation,
  ) -> Any:
    """The result, from everyone's encoded rows, in the pass that decodes.

    Args:
      encoded: Payloads and scales ``[N, *rows, ...]`` of all ranks.
      shape: The shape of one rank's rows; the result has it.
      codec: What they were encoded with.
      weights: ``[N]``, or None for equal ones.
      implementation: Kernels in order of preference.
    """
    ...


@dataclasses.dataclass(frozen=True)
class MeanItself:
  """The mean is the result."""

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
  """The results are new parameters and momentum: an outer Nesterov step.

  Attributes:
    params: float32 ``[*B, ...]``.
    momentum: float32 ``[*B, ...]``.
    learning_rate: Of the step.
    decay: Of the momentum.
  """

  params: jax.Array
  momentum: jax.Array
  learning_rate: float
  decay: float

  def of_mean(self, mean: jax.Array) -> tuple[jax.Array, jax.Array]:
    return reference.nesterov_step(
      mean, self.params, self.momentum, self.learning_rate, self.decay
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
      learning_rate=self.learning_rate, decay=self.decay, weights=weights,
      implementation=implementation,
    )


# An all-reduce in float32.
FLOAT32 = Wire()
MEAN_ITSELF = MeanItself()
