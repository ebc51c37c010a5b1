"""Block codecs for communication over slow links: the specification.

A vector is split into blocks of ``codec.block`` elements. A block is encoded as
one float32 scale and one code per element. A code represents a number of few
bits, and the element decodes to ``scale * number``:

  int8  integers -127 ... 127, two's complement
  int4  integers -7 ... 7, two's complement
  e3m0  sign bit, exponent e of three bits, no mantissa: e = 0 is zero,
        e = 1 ... 7 are the magnitudes 2^-6, 2^-5, ... 2^-1, 1. Rounding to the
        nearest of these shrinks Gaussian values by 3.5 % in blocks of 256
  fp8   float8_e4m3fn, -448 ... 448

The scale is the block's largest magnitude divided by the codec's largest
number, rounded up to 16 significant bits. A number has at most 7 significant
bits, so that every product ``scale * number`` is exact in float32. Therefore
fused multiply-adds do not change a sum of decoded values, and encoding is
idempotent: a decoded block is encoded to the same bits.

Zero has the code 0. The codes of -128, -8, negative zero and NaN are not used.
A block whose largest magnitude is below 2^-100 has the scale 0 and decodes to
zeros; a block with a magnitude of 2^126 or more is treated as infinite and
decodes to NaN.

The functions from `delta_with_residual` on operate on tiles of blocks. Kernels
call them too, so that all implementations produce the same bits.

Sources: E3M0 for outer gradients is from Streaming DiLoCo, arXiv 2501.18512,
section 2.3; scale and code of zero are additions. E4M3 is from arXiv
2209.05433.

Shape legend: n = elements; padded n = n rounded up to a multiple of the block;
blocks = padded n / block; M = encoded vectors that are summed (senders).
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from parallel.kernels import calls


@dataclasses.dataclass(frozen=True)
class _Format:
  """Number format of a codec.

  Attributes:
    bits: Width of a code in bits.
    top: Largest representable number.
    mantissa: Mantissa bits of a floating-point format; None for integers.
    exponent: Smallest exponent of a floating-point format. Numbers below
      2^exponent are evenly spaced down to zero.
  """

  bits: int
  top: float
  mantissa: int | None = None
  exponent: int = 0


_FORMATS = {
  "int8": _Format(8, 127.0),
  "int4": _Format(4, 7.0),
  "e3m0": _Format(4, 1.0, mantissa=0, exponent=-6),
  "fp8": _Format(8, 448.0, mantissa=3, exponent=-6),
}

NAMES = tuple(_FORMATS)


@dataclasses.dataclass(frozen=True)
class Codec:
  """Block codec: number format, block size and rounding.

  Attributes:
    name: "int8", "int4", "e3m0" or "fp8".
    block: Number of elements that share a scale; even.
    stochastic: Whether elements are rounded up or down at random, such that the
      expectation of the decoded value equals the encoded value. Otherwise they
      are rounded to the nearest number, ties to the even multiple of the local
      spacing (in e3m0, 1.5 * 2^k is rounded up and 2^-7 to zero).

  Raises:
    ValueError: The name is unknown, or the block is odd or less than 2.

  Example:
    >>> codec = Codec("e3m0", block=4)
    >>> f = jax.jit(lambda x: decode(encode(x, codec), 4, codec))
    >>> f(np.float32([1.0, -0.25, 0.2, 0.0])).tolist()
    [1.0, -0.25, 0.25, 0.0]
  """

  name: str
  block: int = 256
  stochastic: bool = False

  def __post_init__(self) -> None:
    if self.name not in _FORMATS:
      raise ValueError(
        f"codec {self.name!r} is unknown; use one of {', '.join(NAMES)}"
      )
    if self.block < 2 or self.block % 2:
      raise ValueError(
        f"codec block={self.block} (elements per scale) must be even and at "
        "least 2, since two 4-bit codes share a byte"
      )

  @property
  def bits(self) -> int:
    """Width of a code in bits."""
    return _FORMATS[self.name].bits

  def padded(self, n: int) -> int:
    """Returns ``n`` rounded up to whole blocks."""
    return -(-n // self.block) * self.block

  def payload_bytes(self, n: int) -> int:
    """Returns the bytes of the codes of ``n`` elements, including padding."""
    return self.padded(n) * self.bits // 8

  def num_scales(self, n: int) -> int:
    """Returns the number of float32 scales of ``n`` elements."""
    return self.padded(n) // self.block


class Encoded(NamedTuple):
  """Encoded array: codes and scales.

  Attributes:
    payload: Codes, uint8 ``[..., padded n * bits / 8]``. A byte of a 4-bit
      codec holds element i of a block in its low half and element
      i + block / 2 in its high half, so that a block is unpacked without moving
      elements between vector lanes.
    scales: float32 ``[..., blocks]``; NaN for a block that contains an infinity
      or a NaN.
  """

  payload: jax.Array
  scales: jax.Array


class OuterOptions(NamedTuple):
  """Hyperparameters of DiLoCo's outer optimizer.

  Attributes:
    learning_rate: Learning rate.
    decay: Decay of the momentum.
  """

  learning_rate: float
  decay: float


def max_error(codec: Codec) -> float:
  """Returns an upper bound of the relative error ``|decode(encode(x)) - x|``.

  The rounding error is at most half of the widest spacing between adjacent
  numbers: 0.5 / 127 (int8), 0.5 / 7 (int4), 1 / 4 (e3m0, between 1/2 and 1) and
  16 / 448 (fp8) of the largest number; twice that for stochastic rounding. The
  scale is rounded up by a relative error of at most 2^-15, which widens all
  spacings. 2^-22 is added for the arithmetic in float32.

  Returns:
    The bound as a fraction of the largest magnitude in the block. It holds for
    blocks that are not flushed to zero.

  Example:
    >>> round(max_error(Codec("e3m0")), 3)
    0.25
  """
  form = _FORMATS[codec.name]
  spacing = 1.0
  if form.mantissa is not None:
    # The spacing just below the largest number: in [256, 512] for fp8, and in
    # [1/2, 1] for e3m0, which has no number above 1.
    exponent = int(np.ceil(np.log2(form.top))) - 1
    spacing = 2.0 ** (exponent - form.mantissa)
  share = 1.0 if codec.stochastic else 0.5
  return share * spacing / form.top * (1 + 2.0**-15) + 2.0**-22


def encode(
  x: jax.Array, codec: Codec, key: jax.Array | None = None
) -> Encoded:
  """Implements `api.encode` in plain jnp. A block of zeros has the scale 0."""
  if codec.stochastic and key is None:
    raise ValueError(
      f"codec {codec} rounds stochastically, so it needs a random key; pass key"
    )
  blocks = in_blocks(x.astype(jnp.float32), codec.block)  # [..., blocks, block]
  draws = None
  if codec.stochastic:
    draws = jax.random.uniform(key, blocks.shape)  # [0, 1), per element
  scale = scale_of(max_magnitude(blocks), codec)  # [..., blocks, 1]
  codes = codes_of(blocks, scale, codec, draws)
  if codec.bits == 4:  # [..., blocks, block] -> [..., blocks, block / 2]
    low, high = jnp.split(codes, 2, axis=-1)
    codes = low | (high << 4)
  payload = codes.astype(jnp.uint8).reshape(
    *x.shape[:-1], codec.payload_bytes(x.shape[-1])
  )
  return Encoded(payload, scale[..., 0])


def decode(encoded: Encoded, n: int, codec: Codec) -> jax.Array:
  """Implements `api.decode` in plain jnp.

  All elements of a block that contained an infinity or a NaN decode to NaN, so
  that a diverged worker is detected.
  """
  payload, scales = encoded
  codes = payload.reshape(*scales.shape, codec.block * codec.bits // 8)
  codes = codes.astype(jnp.int32)  # [..., blocks, bytes of a block]
  if codec.bits == 4:
    codes = jnp.concatenate([codes & 15, codes >> 4], axis=-1)
  values = numbers_of(codes, codec) * scales[..., None]
  return values.reshape(*scales.shape[:-1], -1)[..., :n]


def encode_delta(
  anchor: jax.Array | None,
  params: jax.Array,
  codec: Codec,
  key: jax.Array | None = None,
  residual: jax.Array | None = None,
) -> tuple[Encoded, jax.Array | None]:
  """Implements `api.encode_delta` in plain jnp."""
  operands = [x for x in (anchor, params, residual) if x is not None]
  delta = delta_with_residual(operands, residual is not None)
  if residual is None:
    return encode(delta, codec, key), None
  encoded = encode(delta, codec, key)
  return encoded, delta - decode(encoded, delta.shape[-1], codec)


def mean(
  encoded: Encoded, n: int, codec: Codec, weights: jax.Array | None = None
) -> jax.Array:
  """Implements `api.mean` in plain jnp; vectors are added in order.

  The bits of the result do not depend on the split of a program over devices.
  """
  return mean_of(encoded, lambda part: decode(part, n, codec), weights)


def total(encoded: Encoded, n: int, codec: Codec) -> jax.Array:
  """Implements `api.total` in plain jnp."""
  return sum_of(encoded, lambda part: decode(part, n, codec))


def mean_of(
  encoded: Any,
  decode: Callable[[Any], jax.Array],
  weights: jax.Array | None = None,
) -> jax.Array:
  """Returns the float32 mean of M vectors in an arbitrary encoding.

  Args:
    encoded: A tuple of arrays ``[M, ...]``.
    decode: Function from one vector's arrays ``[...]`` to its float32 values.
    weights: float32 ``[M]``, not negative; None for equal weights.
  """
  if weights is None:
    divisor = np.float32(len(jax.tree.leaves(encoded)[0]))
  else:
    divisor = sum_in_order(weights)
  # XLA replaces a division by this product in some programs and not in others;
  # an explicit product has the same bits on any number of devices.
  return sum_of(encoded, decode, weights) * (1 / divisor)


def sum_of(
  encoded: Any,
  decode: Callable[[Any], jax.Array],
  weights: jax.Array | None = None,
) -> jax.Array:
  """Returns the float32 sum of M vectors in an arbitrary encoding.

  The sum is a loop over the vectors, so that the order of the additions is
  fixed and only one decoded vector is in memory at a time.

  Args:
    encoded: A tuple of arrays ``[M, ...]``.
    decode: Function from one vector's arrays ``[...]`` to its float32 values.
    weights: float32 ``[M]``, not negative; None for an unweighted sum.
  """

  def add(total, sender):
    part, weight = sender
    values = decode(part)
    if weight is not None:
      # A weighted value is not exact, so that a fused multiply-add would round
      # once instead of twice. Rounding the product to 23 significant bits, one
      # less than float32 has, prevents the fusion. Decoded values have at most
      # 23 significant bits, so that a weight of 1 leaves them unchanged.
      values = lax.reduce_precision(weighted(values, weight), 8, 22)
    return total + values, None

  operands = encoded, weights
  first = jax.eval_shape(decode, jax.tree.map(lambda part: part[0], encoded))
  total = jnp.zeros(first.shape, jnp.float32)
  # The carry of a scan must vary over the same mesh axes before and after.
  total = calls.unify_varying_axes(total, *jax.tree.leaves(operands))[0]
  return lax.scan(add, total, operands)[0]


def sum_in_order(weights: jax.Array) -> jax.Array:
  """Sums ``[M]`` from first to last, for equal bits on all devices."""
  return functools.reduce(jnp.add, list(weights))


def sender_factors(
  senders: int, weights: jax.Array | None, divide: bool
) -> jax.Array:
  """Returns factors of M encoded vectors and of their sum, float32 ``[M + 1]``.

  The first M factors are the ``weights`` of the vectors, or ones. The last one
  is the factor of their sum: the reciprocal of the total weight, or 1 without
  ``divide``.
  """
  each = jnp.ones(senders, jnp.float32) if weights is None else weights
  whole = 1 / sum_in_order(each) if divide else jnp.ones(())
  return jnp.concatenate([each, whole[None]])


def nesterov(
  encoded: Encoded,
  params: jax.Array,
  momentum: jax.Array,
  codec: Codec,
  outer: OuterOptions,
  weights: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Implements `api.nesterov` in plain jnp.

  Source: DiLoCo, arXiv 2311.08105, in the form of
  ``optax.sgd(learning_rate, decay, nesterov=True)``.
  """
  delta = mean(encoded, params.shape[-1], codec, weights)
  return nesterov_step(delta, params, momentum, outer)


def in_blocks(x: jax.Array, size: int) -> jax.Array:
  """Reshapes ``[..., n]`` to ``[..., blocks, size]``, padded with zeros."""
  n = x.shape[-1]
  count = -(-n // size)
  widths = [(0, 0)] * (x.ndim - 1) + [(0, count * size - n)]
  return jnp.pad(x, widths).reshape(*x.shape[:-1], count, size)


# The functions below operate on tiles of blocks: elements [..., block] and
# scales [..., 1]. Kernels call them too, so that they use only operations of
# Mosaic and Triton, except for fp8.


def delta_with_residual(
  operands: Sequence[jax.Array], feedback: bool
) -> jax.Array:
  """Returns the delta to encode, float32: a difference plus a residual.

  Args:
    operands: ``[x]`` for x, or ``[x, y]`` for x - y, followed by the residual
      if ``feedback`` is set.
    feedback: Whether the last operand is a residual, which is added.
  """
  first, *others = (x.astype(jnp.float32) for x in operands)
  if len(others) > feedback:
    first = first - others[0]
  return first + others[-1] if feedback else first


def max_magnitude(*parts: jax.Array) -> jax.Array:
  """Returns the largest magnitude per block, ``[..., 1]``; infinity for NaN.

  Args:
    *parts: float32 ``[..., block]``, or the two halves of the blocks.
  """
  largest = []
  for part in parts:
    magnitude = jnp.abs(part)
    # Some devices ignore NaNs in a maximum. The comparison is False for NaN,
    # which is thus replaced by infinity.
    magnitude = jnp.where(magnitude < jnp.inf, magnitude, jnp.inf)
    largest.append(jnp.max(magnitude, axis=-1, keepdims=True))
  return functools.reduce(jnp.maximum, largest)


def scale_of(largest: jax.Array, codec: Codec) -> jax.Array:
  """Returns the scales of blocks, given their largest magnitudes.

  A scale is ``largest`` divided by the codec's largest number, rounded up to 16
  significant bits; 0 for ``largest`` below 2^-100, NaN from 2^126 on.
  """
  quotient = largest / np.float32(_FORMATS[codec.name].top)
  # Adding 255 and clearing the lowest 8 of 24 significant bits would round up;
  # a carry out of the mantissa increments the exponent. Adding 251 instead
  # rounds down an excess of up to 4 units in the last place, so that a decoded
  # block has the same scale again even on devices with inexact division.
  bits = lax.bitcast_convert_type(quotient, jnp.int32)
  rounded = lax.bitcast_convert_type((bits + 251) & ~255, jnp.float32)
  # Both limits keep scale and 1 / scale normal numbers, which no device flushes
  # to zero. ``largest`` is infinite for blocks with a NaN.
  scale = jnp.where(largest < 2.0**-100, 0.0, rounded)
  return jnp.where(largest < 2.0**126, scale, jnp.nan)


def codes_of(
  blocks: jax.Array,
  scale: jax.Array,
  codec: Codec,
  draws: jax.Array | None = None,
) -> jax.Array:
  """Returns the codes of elements.

  Args:
    blocks: float32 ``[..., block]``.
    scale: float32 ``[..., 1]``, one per block.
    codec: The codec.
    draws: Uniform random numbers of stochastic rounding, float32 in [0, 1), one
      per element; None for deterministic rounding.

  Returns:
    int32 ``[..., block]``, in [0, 2^bits).
  """
  # Some compilers replace a division by a broadcast scale by this product; an
  # explicit product has the same bits everywhere. The comparison is False for
  # scales of 0 and NaN: all codes of such blocks are zero, and the scale
  # determines that they decode to zeros or to NaN.
  inverse = 1 / jnp.where(scale > 0, scale, 1.0)
  numbers = jnp.where(scale > 0, blocks * inverse, 0.0)
  if codec.stochastic or codec.name == "fp8":
    return _to_codes(_round(numbers, codec, draws), codec.name)
  if codec.name == "e3m0":
    return _nearest_e3m0_codes(numbers)
  # int8 and int4. Floats from 2^23 to 2^24 are integers, so that adding 2^23
  # rounds to the nearest integer, ties to even, in the mantissa bits. The
  # magnitude is rounded instead of the signed number: a compiler may fuse a
  # product and an addition, which then round once instead of twice, but it
  # cannot fuse across the absolute value.
  whole = jnp.abs(numbers) + np.float32(2**23)
  whole = lax.bitcast_convert_type(whole, jnp.int32) - 0x4B000000  # 2^23's bits
  return jnp.where(numbers < 0, -whole, whole) & ((1 << codec.bits) - 1)


def _nearest_e3m0_codes(numbers: jax.Array) -> jax.Array:
  """Returns the codes of the nearest e3m0 numbers."""
  bits = lax.bitcast_convert_type(numbers, jnp.int32)
  magnitude = bits & 0x7FFFFFFF  # without the sign bit
  # Adding half a mantissa increments the exponent from 1.5 * 2^k on, where
  # 2^(k+1) is at least as near as 2^k, and the even multiple in case of a tie.
  # 127 is the exponent bias of float32; the e3m0 code e represents 2^(e - 7).
  exponent = ((magnitude + 0x400000) >> 23) - 127 + 7
  # The sign moves from bit 31 to bit 3. Between 2^-7 and 2^-6 the exponent may
  # be 0 although 2^-6 is nearest, hence the lower limit 1.
  code = jnp.clip(exponent, 1, 7) | ((bits >> 28) & 8)
  half_of_least = 0x3C000000  # bits of 2^-7, a tie, which is rounded to 0
  return jnp.where(magnitude > half_of_least, code, 0)


def _round(
  numbers: jax.Array, codec: Codec, draws: jax.Array | None
) -> jax.Array:
  """Rounds to representable numbers, for fp8 and for stochastic rounding.

  ``draws`` are the uniform random numbers of stochastic rounding, or None.
  """
  form = _FORMATS[codec.name]
  magnitude = jnp.abs(numbers)
  if form.mantissa is None:
    step = inverse = jnp.float32(1)
  else:
    # Spacing of the format's numbers around an element: a power of two, taken
    # from the exponent bits; constant below the smallest exponent.
    bits = lax.bitcast_convert_type(magnitude, jnp.int32) >> 23
    power = jnp.maximum(bits - 127, form.exponent) - form.mantissa
    step = _power_of_two(power)
    inverse = _power_of_two(-power)
  steps = magnitude * inverse  # exact: the inverse is a power of two
  if codec.stochastic:
    # Rounds up with the probability of the fraction: the expectation is steps.
    low = jnp.floor(steps)
    steps = low + jnp.where(draws < steps - low, 1.0, 0.0)
  else:
    steps = jnp.round(steps)  # halves to even
  # The scale may be too small for the largest element by four units in the last
  # place; the minimum prevents rounding to a number above the top.
  magnitude = jnp.minimum(steps * step, np.float32(form.top))
  # Negative zero has no code, so that the result is positive zero.
  return jnp.where((numbers < 0) & (magnitude > 0), -magnitude, magnitude)


def _power_of_two(exponent: jax.Array) -> jax.Array:
  """Returns float32 2^exponent, constructed from its exponent bits."""
  return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _to_codes(values: jax.Array, name: str) -> jax.Array:
  """Returns the int32 codes of representable numbers."""
  if name == "fp8":  # the cast is exact: values are already rounded
    bits = lax.bitcast_convert_type(
      values.astype(jnp.float8_e4m3fn), jnp.uint8
    )
    return bits.astype(jnp.int32)
  if name == "e3m0":
    bits = lax.bitcast_convert_type(jnp.abs(values), jnp.int32) >> 23
    exponent = jnp.where(values == 0, 0, bits - 127 + 7)  # e: 2^(e - 7)
    return exponent | jnp.where(values < 0, 8, 0)
  return values.astype(jnp.int32) & (15 if name == "int4" else 255)


def numbers_of(codes: jax.Array, codec: Codec) -> jax.Array:
  """Decodes codes in [0, 2^bits) to float32 numbers, without the scale."""
  if codec.name == "fp8":
    values = lax.bitcast_convert_type(
      codes.astype(jnp.uint8), jnp.float8_e4m3fn
    )
    return values.astype(jnp.float32)
  if codec.name == "e3m0":
    exponent = codes & 7
    magnitude = jnp.where(exponent == 0, 0.0, _power_of_two(exponent - 7))
    return jnp.where(codes > 7, -magnitude, magnitude)
  # Two's complement: shifts the sign bit to the top of the word, then back with
  # sign extension.
  spare = 32 - codec.bits
  return ((codes << spare) >> spare).astype(jnp.float32)


def weighted(x: jax.Array, weight: jax.Array) -> jax.Array:
  """Returns ``weight * x``; zero if the weight is zero, even if x is NaN."""
  return jnp.where(weight == 0, 0.0, weight * x)


def round_to_23_bits(x: jax.Array) -> jax.Array:
  """Rounds to 23 significant bits, ties to even; NaN is preserved.

  Equals ``lax.reduce_precision(x, 8, 22)``, which Mosaic and Triton lack.
  """
  bits = lax.bitcast_convert_type(x, jnp.int32)
  # Only bit 0 is dropped; a value with bit 0 set is a tie. Adding bit 1 to bit
  # 0 carries if bit 1 is set, that is, if the kept mantissa is odd. For a NaN
  # with all mantissa bits set, which GPUs produce, the carry would overflow to
  # -0; NaNs are therefore returned unchanged.
  bits = (bits + ((bits >> 1) & 1)) & ~1
  return jnp.where(x == x, lax.bitcast_convert_type(bits, jnp.float32), x)


def nesterov_step(
  delta: jax.Array,
  params: jax.Array,
  momentum: jax.Array,
  outer: OuterOptions,
) -> tuple[jax.Array, jax.Array]:
  """Returns new parameters and momentum, given the mean outer gradient.

  Same formula as `api.nesterov`; all arrays are float32 of one shape.
  """
  rate, decay = outer
  momentum = delta + decay * momentum
  return params - rate * (delta + decay * momentum), momentum
