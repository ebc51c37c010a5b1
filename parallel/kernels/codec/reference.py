"""Block codecs for what goes over slow links: the specification.

A vector is cut into blocks of ``codec.block`` elements. A block is sent as one
float32 scale and one code per element. A code stands for a small number, and
the element decodes to ``scale * number``:

  int8  integers -127 ... 127, two's complement
  int4  integers -7 ... 7, two's complement
  e3m0  sign bit, exponent e of three bits, no mantissa: e = 0 is zero,
        e = 1 ... 7 are the magnitudes 2^-6, 2^-5, ... 2^-1, 1. The nearest of
        these shrinks Gaussian values by 3.5 % in blocks of 256
  fp8   float8_e4m3fn, -448 ... 448

The scale is the block's largest magnitude divided by the codec's largest
number, rounded up to 16 significant bits. A number has at most 7 significant
bits, so every product ``scale * number`` is exact in float32. So no fused
multiply-add can change a sum of decoded values, and encoding a decoded block
again changes nothing.

Zero has the code 0. The codes of -128, -8, negative zero and NaN are never
sent. A block whose largest magnitude is below 2^-100 has the scale 0 and
decodes to zeros; one of 2^126 or more counts as infinite and decodes to NaN.

The functions from `difference` on work on tiles of blocks. Kernels call them,
too, so that all implementations send the same bits.

Sources: E3M0 for outer gradients, without scale and code of zero, is from
Streaming DiLoCo, arXiv 2501.18512, section 2.3. E4M3 is from arXiv 2209.05433.

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
  """The numbers that codes stand for.

  Attributes:
    bits: Width of a code in bits.
    top: The largest number.
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
  """A block codec.

  Attributes:
    name: "int8", "int4", "e3m0" or "fp8".
    block: Elements that share a scale; even.
    stochastic: If set, elements are rounded up or down at random, such that the
      expectation of what is decoded is what was encoded. Otherwise they are
      rounded to the nearest number, ties to the even multiple of the spacing
      there (so in e3m0 1.5 * 2^k goes up and 2^-7 goes to zero).
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
        f"codec block={self.block}: elements per scale must be even, at least "
        "2 (two 4-bit codes share a byte)"
      )

  @property
  def bits(self) -> int:
    """Width of a code in bits."""
    return _FORMATS[self.name].bits

  def padded(self, n: int) -> int:
    """Returns ``n`` rounded up to whole blocks."""
    return -(-n // self.block) * self.block

  def payload_bytes(self, n: int) -> int:
    """Returns the bytes of the codes of ``n`` elements, padding included."""
    return self.padded(n) * self.bits // 8

  def num_scales(self, n: int) -> int:
    """Returns the number of scales (float32) of ``n`` elements."""
    return self.padded(n) // self.block


class Encoded(NamedTuple):
  """What goes over the wire.

  Attributes:
    payload: The codes, uint8 ``[..., padded n * bits / 8]``. A byte of a 4-bit
      codec holds element i of a block in its low half and element
      i + block / 2 in its high half: so the two halves of a block are unpacked
      without moving an element to another lane.
    scales: float32 ``[..., blocks]``; NaN where a block holds an infinity or
      a NaN.
  """

  payload: jax.Array
  scales: jax.Array


class OuterStep(NamedTuple):
  """Hyperparameters of DiLoCo's outer optimizer.

  Attributes:
    learning_rate: Learning rate.
    decay: Decay of the momentum.
  """

  learning_rate: float
  decay: float


def max_error(codec: Codec) -> float:
  """Bounds ``|decode(encode(x)) - x|`` by the block's largest magnitude.

  The error of rounding is half of the widest spacing between neighbouring
  numbers: 0.5 / 127 (int8), 0.5 / 7 (int4), 1 / 4 (e3m0, between 1/2 and 1) and
  16 / 448 (fp8) of the largest number. With stochastic rounding it is twice
  that. The scale is rounded up by at most 2^-15 of itself, which widens all
  spacings. 2^-22 is added for the arithmetic in float32.

  Returns:
    The bound as a fraction of the largest magnitude in the block. It holds for
    blocks that are not flushed to zero.
  """
  form = _FORMATS[codec.name]
  spacing = 1.0
  if form.mantissa is not None:
    # The spacing just below the largest number: of [256, 512] in fp8 and of
    # [1/2, 1] in e3m0, which has no number above 1.
    exponent = int(np.ceil(np.log2(form.top))) - 1
    spacing = 2.0 ** (exponent - form.mantissa)
  share = 1.0 if codec.stochastic else 0.5
  return share * spacing / form.top * (1 + 2.0**-15) + 2.0**-22


def encode(
  x: jax.Array, codec: Codec, key: jax.Array | None = None
) -> Encoded:
  """Specifies `api.encode`. A block of zeros has the scale 0."""
  if codec.stochastic and key is None:
    raise ValueError(f"{codec}: stochastic rounding needs a key")
  blocks = in_blocks(x.astype(jnp.float32), codec.block)  # [..., blocks, block]
  draws = None
  if codec.stochastic:
    draws = jax.random.uniform(key, blocks.shape)
  scale = scale_of(largest_of(blocks), codec)  # [..., blocks, 1]
  codes = codes_of(blocks, scale, codec, draws)
  if codec.bits == 4:  # [..., blocks, block] -> [..., blocks, block / 2]
    low, high = jnp.split(codes, 2, axis=-1)
    codes = low | (high << 4)
  payload = codes.astype(jnp.uint8).reshape(
    *x.shape[:-1], codec.payload_bytes(x.shape[-1])
  )
  return Encoded(payload, scale[..., 0])


def decode(encoded: Encoded, n: int, codec: Codec) -> jax.Array:
  """Specifies `api.decode`.

  Blocks that held an infinity or a NaN are NaN throughout, so that a diverged
  worker is seen.
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
  """Specifies `api.encode_delta`."""
  operands = [x for x in (anchor, params, residual) if x is not None]
  delta = difference(operands, residual is not None)
  if residual is None:
    return encode(delta, codec, key), None
  encoded = encode(delta, codec, key)
  return encoded, delta - decode(encoded, delta.shape[-1], codec)


def mean(
  encoded: Encoded, n: int, codec: Codec, weights: jax.Array | None = None
) -> jax.Array:
  """Specifies `api.mean`; vectors are added one after another.

  The bits of the result do not depend on how a program is split over devices.
  """
  return mean_of(encoded, lambda part: decode(part, n, codec), weights)


def total(encoded: Encoded, n: int, codec: Codec) -> jax.Array:
  """Specifies `api.total`."""
  return sum_of(encoded, lambda part: decode(part, n, codec))


def mean_of(
  encoded: Any,
  decode: Callable[[Any], jax.Array],
  weights: jax.Array | None = None,
) -> jax.Array:
  """Returns the mean, float32, of M vectors that are encoded in any way.

  Args:
    encoded: A tuple of arrays ``[M, ...]``.
    decode: Maps one vector's arrays ``[...]`` to its float32 values.
    weights: float32 ``[M]``, not negative; None for equal weights.
  """
  if weights is None:
    divisor = np.float32(len(jax.tree.leaves(encoded)[0]))
  else:
    divisor = sum_in_order(weights)
  # XLA replaces a division by this product in some programs and not in others.
  # Written as a product it has the same bits on any number of devices.
  return sum_of(encoded, decode, weights) * (1 / divisor)


def sum_of(
  encoded: Any,
  decode: Callable[[Any], jax.Array],
  weights: jax.Array | None = None,
) -> jax.Array:
  """Returns the sum, float32, of M vectors that are encoded in any way.

  This is a loop and not a sum over a dim, so that the order of the additions is
  fixed and only one decoded vector is in memory at a time.

  Args:
    encoded: A tuple of arrays ``[M, ...]``.
    decode: Maps one vector's arrays ``[...]`` to its float32 values.
    weights: float32 ``[M]``, not negative; None for a plain sum.
  """

  def add(total, sender):
    part, weight = sender
    values = decode(part)
    if weight is not None:
      # A weighted value is not exact, so a compiler that fused product and sum
      # would round once in place of twice. It cannot fuse them across this
      # rounding to 23 significant bits, one less than float32 has. Decoded
      # values have no more than 23, so a weight of 1 changes nothing.
      values = lax.reduce_precision(weighted(values, weight), 8, 22)
    return total + values, None

  operands = encoded, weights
  first = jax.eval_shape(decode, jax.tree.map(lambda part: part[0], encoded))
  total = jnp.zeros(first.shape, jnp.float32)
  # The carry of a scan must vary over the same mesh axes before and after.
  total = calls.same_axes(total, *jax.tree.leaves(operands))[0]
  return lax.scan(add, total, operands)[0]


def sum_in_order(weights: jax.Array) -> jax.Array:
  """Sums ``[M]`` in this order, so that the bits are the same everywhere."""
  return functools.reduce(jnp.add, list(weights))


def factors(
  senders: int, weights: jax.Array | None, divide: bool
) -> jax.Array:
  """Returns what kernels multiply by, float32 ``[M + 1]``.

  The first M factors are those of the vectors (``weights``, or ones). The last
  is that of their sum, which makes it a mean, or 1 without ``divide``.
  """
  each = jnp.ones(senders, jnp.float32) if weights is None else weights
  whole = 1 / sum_in_order(each) if divide else jnp.ones(())
  return jnp.concatenate([each, whole[None]])


def nesterov(
  encoded: Encoded,
  params: jax.Array,
  momentum: jax.Array,
  codec: Codec,
  outer: OuterStep,
  weights: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Specifies `api.nesterov`.

  Source: DiLoCo, arXiv 2311.08105, in the form of
  ``optax.sgd(learning_rate, decay, nesterov=True)``.
  """
  delta = mean(encoded, params.shape[-1], codec, weights)
  return nesterov_step(delta, params, momentum, outer)


def in_blocks(x: jax.Array, size: int) -> jax.Array:
  """Cuts ``[..., n]`` into ``[..., blocks, size]``, padded with zeros."""
  n = x.shape[-1]
  count = -(-n // size)
  widths = [(0, 0)] * (x.ndim - 1) + [(0, count * size - n)]
  return jnp.pad(x, widths).reshape(*x.shape[:-1], count, size)


# The functions below work on tiles of blocks, [..., block] of elements beside
# [..., 1] of scales. Kernels call them, too; so, fp8 aside, they use only
# operations that Mosaic and Triton have.


def difference(
  operands: Sequence[jax.Array], feedback: bool
) -> jax.Array:
  """Returns what is encoded, in float32: a difference plus a residual.

  Args:
    operands: ``[x]`` for x itself or ``[x, y]`` for x - y, followed by the
      residual if ``feedback`` is set.
    feedback: Whether the last operand is a residual, which is added.
  """
  first, *others = (x.astype(jnp.float32) for x in operands)
  if len(others) > feedback:
    first = first - others[0]
  return first + others[-1] if feedback else first


def largest_of(*parts: jax.Array) -> jax.Array:
  """Returns each block's largest magnitude ``[..., 1]``; infinity for a NaN.

  Args:
    *parts: float32 ``[..., block]``, or the two halves of the blocks.
  """
  largest = []
  for part in parts:
    magnitude = jnp.abs(part)
    # Some machines ignore NaNs in a maximum of floats. An infinity is kept, and
    # the comparison is false for a NaN.
    magnitude = jnp.where(magnitude < jnp.inf, magnitude, jnp.inf)
    largest.append(jnp.max(magnitude, axis=-1, keepdims=True))
  return functools.reduce(jnp.maximum, largest)


def scale_of(largest: jax.Array, codec: Codec) -> jax.Array:
  """Returns the scales of blocks with these largest magnitudes.

  A scale is ``largest / top``, rounded up to 16 significant bits; 0 where
  ``largest`` is below 2^-100, and NaN where it is 2^126 or more.
  """
  quotient = largest / np.float32(_FORMATS[codec.name].top)
  # Adding 255 and clearing the lowest 8 of 24 significant bits would round up,
  # with a carry out of the mantissa into the exponent. Adding 251 rounds an
  # excess of up to 4 units in the last place down: so a decoded block gets the
  # scale that it was decoded with even where a division is inexact.
  bits = lax.bitcast_convert_type(quotient, jnp.int32)
  rounded = lax.bitcast_convert_type((bits + 251) & ~255, jnp.float32)
  # Both limits keep scale and 1 / scale normal numbers, which no machine
  # flushes to zero. largest is infinite where the block holds a NaN.
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
    scale: float32 ``[..., 1]``, of the block.
    codec: The codec.
    draws: For stochastic rounding, float32 in [0, 1), one per element.

  Returns:
    int32 ``[..., block]``, in [0, 2^bits).
  """
  # Some compilers turn a division by a broadcast scale into this product and
  # others do not. Written out it has the same bits everywhere. Scales of 0 and
  # NaN fail the comparison: such blocks send codes of zero, and the scale alone
  # says that they decode to zeros or to NaN.
  inverse = 1 / jnp.where(scale > 0, scale, 1.0)
  numbers = jnp.where(scale > 0, blocks * inverse, 0.0)
  if codec.stochastic or codec.name == "fp8":
    return _to_codes(_round(numbers, codec, draws), codec.name)
  if codec.name == "e3m0":
    return _nearest_powers(numbers)
  # int8 and int4. Floats from 2^23 to 2^24 are the integers, so adding 2^23
  # rounds to the nearest integer, ties to even, and leaves it in the mantissa
  # bits. The magnitude is rounded and not the number itself: a compiler may
  # fuse a product with an addition and round once in place of twice, but not
  # the magnitude of a product.
  whole = jnp.abs(numbers) + np.float32(2**23)
  whole = lax.bitcast_convert_type(whole, jnp.int32) - 0x4B000000  # 2^23's bits
  return jnp.where(numbers < 0, -whole, whole) & ((1 << codec.bits) - 1)


def _nearest_powers(numbers: jax.Array) -> jax.Array:
  """Returns the codes of the nearest numbers of e3m0."""
  bits = lax.bitcast_convert_type(numbers, jnp.int32)
  magnitude = bits & 0x7FFFFFFF  # without the sign bit
  # Adding half a mantissa carries into the exponent from 1.5 * 2^k on, where
  # 2^(k+1) is nearer than 2^k, or as near and the even multiple of the spacing.
  # 127 is float32's exponent bias; e3m0's code e stands for 2^(e - 7).
  exponent = ((magnitude + 0x400000) >> 23) - 127 + 7
  # Bit 31, the sign, goes to bit 3. Between 2^-7 and 2^-6 the exponent may come
  # out as 0, but 2^-6 is nearest: clip to 1.
  code = jnp.clip(exponent, 1, 7) | ((bits >> 28) & 8)
  half_of_least = 0x3C000000  # the bits of 2^-7, which is a tie and goes to 0
  return jnp.where(magnitude > half_of_least, code, 0)


def _round(
  numbers: jax.Array, codec: Codec, draws: jax.Array | None
) -> jax.Array:
  """Rounds to numbers that have a code; for fp8 and stochastic rounding."""
  form = _FORMATS[codec.name]
  magnitude = jnp.abs(numbers)
  if form.mantissa is None:
    step = inverse = jnp.float32(1)
  else:
    # The spacing of the format's numbers around an element, a power of two that
    # is read off the exponent bits; constant below the smallest exponent.
    bits = lax.bitcast_convert_type(magnitude, jnp.int32) >> 23
    power = jnp.maximum(bits - 127, form.exponent) - form.mantissa
    step = _power_of_two(power)
    inverse = _power_of_two(-power)
  steps = magnitude * inverse  # exact: the inverse is a power of two
  if codec.stochastic:
    # Up with the probability of the fraction, so that the expectation is steps.
    low = jnp.floor(steps)
    steps = low + jnp.where(draws < steps - low, 1.0, 0.0)
  else:
    steps = jnp.round(steps)  # halves to even
  # The scale may be four units in the last place too small for the largest
  # element, which must not become the next number above the top.
  magnitude = jnp.minimum(steps * step, np.float32(form.top))
  # Zero stays positive: negative zero has no code.
  return jnp.where((numbers < 0) & (magnitude > 0), -magnitude, magnitude)


def _power_of_two(exponent: jax.Array) -> jax.Array:
  """Returns float32 2^exponent, made of its exponent bits."""
  return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _to_codes(values: jax.Array, name: str) -> jax.Array:
  """Returns the codes, int32, of numbers that have one."""
  if name == "fp8":  # the cast is exact, as the values are rounded already
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
  """Returns the numbers, float32, that codes in [0, 2^bits) stand for."""
  if codec.name == "fp8":
    values = lax.bitcast_convert_type(
      codes.astype(jnp.uint8), jnp.float8_e4m3fn
    )
    return values.astype(jnp.float32)
  if codec.name == "e3m0":
    exponent = codes & 7
    magnitude = jnp.where(exponent == 0, 0.0, _power_of_two(exponent - 7))
    return jnp.where(codes > 7, -magnitude, magnitude)
  # Two's complement: the sign bit goes to the top of the word, and comes back
  # with copies of itself.
  spare = 32 - codec.bits
  return ((codes << spare) >> spare).astype(jnp.float32)


def weighted(x: jax.Array, weight: jax.Array) -> jax.Array:
  """Returns ``weight * x``; zero where the weight is zero, even if x is NaN."""
  return jnp.where(weight == 0, 0.0, weight * x)


def to_23_bits(x: jax.Array) -> jax.Array:
  """Rounds to 23 significant bits, ties to even; NaN stays, of all ones too.

  ``lax.reduce_precision(x, 8, 22)`` does the same; Mosaic and Triton lack it.
  """
  bits = lax.bitcast_convert_type(x, jnp.int32)
  # Only bit 0 is dropped: where it is set, the value is a tie. Adding bit 1 to
  # it carries if bit 1 is set, which is where the kept mantissa is odd. Through
  # a NaN of all ones, which GPUs make, the carry would run on to -0.
  bits = (bits + ((bits >> 1) & 1)) & ~1
  return jnp.where(x == x, lax.bitcast_convert_type(bits, jnp.float32), x)


def nesterov_step(
  delta: jax.Array,
  params: jax.Array,
  momentum: jax.Array,
  outer: OuterStep,
) -> tuple[jax.Array, jax.Array]:
  """Returns new parameters and momentum, given the mean outer gradient.

  The formula is that of `nesterov`; all arrays are float32 of one shape.
  """
  rate, decay = outer
  momentum = delta + decay * momentum
  return params - rate * (delta + decay * momentum), momentum
