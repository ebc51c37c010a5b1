"""Block codecs for what goes over slow links, in plain jnp.

A vector is cut into blocks of ``codec.block`` elements. A block is sent as one
scale (float32) and one code per element, which stands for a small number; an
element decodes to ``scale * number``:

  int8  integers -127 ... 127, two's complement
  int4  integers -7 ... 7, two's complement
  e3m0  sign bit, exponent e of three bits, no mantissa: e = 0 is zero,
        e = 1 ... 7 are the magnitudes 2^-6, 2^-5, ... 2^-1, 1
  fp8   float8_e4m3fn, -448 ... 448

The scale is the block's largest magnitude over the codec's largest number,
rounded up to 16 significant bits: then every product is exact in float32, so
that a fused multiply-add or a reassociating compiler cannot change a sum of
decoded values, and encoding a decoded block again changes nothing. Zero has
the code 0; -128, -8, negative zero and the NaN codes are never sent. A block
whose largest magnitude is below 2^-100 has the scale 0 and decodes to zeros;
one of 2^126 or more counts as infinite.

Sources: E3M0 for outer gradients: Streaming DiLoCo, arXiv 2501.18512, section
2.3, which specifies neither the scale nor the zero code: both are choices made
here. E4M3: arXiv 2209.05433.

Shape legend: n elements; padded n = the next multiple of the block; blocks =
padded n / block.
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
    bits: Width of a code.
    top: The largest number.
    mantissa: Mantissa bits of a floating-point format; None for integers.
    exponent: Smallest exponent of a floating-point format; below it the
      numbers are evenly spaced down to zero.
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
    stochastic: Round up or down at random, such that the expectation of what
      is decoded is what was encoded. Otherwise to the nearest value, ties to
      the even multiple of the spacing (so for e3m0 1.5 * 2^k goes up and 2^-7
      goes to zero).
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
    """Bits of one code."""
    return _FORMATS[self.name].bits

  def padded(self, n: int) -> int:
    """``n`` rounded up to whole blocks."""
    return -(-n // self.block) * self.block

  def payload_bytes(self, n: int) -> int:
    """Bytes of the codes of ``n`` elements, padding included."""
    return self.padded(n) * self.bits // 8

  def num_scales(self, n: int) -> int:
    """Scales (float32) of ``n`` elements."""
    return self.padded(n) // self.block


class Encoded(NamedTuple):
  """What goes over the wire.

  Attributes:
    payload: uint8 ``[..., padded n * bits / 8]``. A byte of a 4-bit codec
      holds element i of a block in its low and element i + block / 2 in its
      high half.
    scales: float32 ``[..., blocks]``; NaN where a block holds an infinity or
      a NaN.
  """

  payload: jax.Array
  scales: jax.Array


def max_error(codec: Codec) -> float:
  """Bound of ``|decode(encode(x)) - x|`` per largest magnitude of the block.

  Half of the widest spacing of numbers over the largest one, all of it with
  stochastic rounding: 0.5 / 127, 0.5 / 7, 1 / 4 (e3m0, between 1/2 and 1) and
  16 / 448 (fp8); 2^-15 of that for the rounding of the scale and 2^-22 for
  float32 arithmetic. It holds for blocks that are not flushed to zero.
  """
  form = _FORMATS[codec.name]
  spacing = 1.0
  if form.mantissa is not None:
    exponent = int(np.ceil(np.log2(form.top))) - 1
    spacing = 2.0 ** (exponent - form.mantissa)
  share = 1.0 if codec.stochastic else 0.5
  return share * spacing / form.top * (1 + 2.0**-15) + 2.0**-22


def encode(
  x: jax.Array, codec: Codec, key: jax.Array | None = None
) -> Encoded:
  """Encodes blocks of the last dim, padded with zeros to whole blocks.

  Args:
    x: ``[..., n]``; taken as float32.
    codec: The codec.
    key: Random key of the stochastic rounding; unused without it.

  Returns:
    The codes and scales. A block of zeros has scale 0.

  Raises:
    ValueError: Stochastic rounding without a key.
  """
  if codec.stochastic and key is None:
    raise ValueError(f"{codec}: stochastic rounding needs a key")
  blocks = in_blocks(x.astype(jnp.float32), codec.block)
  draws = None
  if codec.stochastic:
    draws = jax.random.uniform(key, blocks.shape)
  scale = scale_of(largest_of(blocks), codec)
  codes = codes_of(blocks, scale, codec, draws)
  if codec.bits == 4:
    low, high = jnp.split(codes, 2, axis=-1)
    codes = low | (high << 4)
  payload = codes.astype(jnp.uint8).reshape(
    *x.shape[:-1], codec.payload_bytes(x.shape[-1])
  )
  return Encoded(payload, scale[..., 0])


def decode(encoded: Encoded, n: int, codec: Codec) -> jax.Array:
  """The float32 values that the codes stand for.

  Args:
    encoded: What `encode` made of ``[..., n]``.
    n: Elements without padding.
    codec: The codec that encoded.

  Returns:
    float32 ``[..., n]``. Blocks that held an infinity or a NaN are NaN
    throughout, so that a diverged worker is seen.
  """
  payload, scales = encoded
  codes = payload.reshape(*scales.shape, codec.block * codec.bits // 8)
  codes = codes.astype(jnp.int32)
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
  """Encodes ``anchor - params``, with what the last encoding left of it.

  Args:
    anchor: ``[..., n]``; taken as float32, as the others. None: ``params``
      is the difference.
    params: ``[..., n]``.
    codec: The codec.
    key: As for `encode`.
    residual: ``[..., n]``, added to the difference; None: no error feedback.

  Returns:
    The codes and scales, and, with a residual, the new one: what rounding
    took, float32.
  """
  operands = [x for x in (anchor, params, residual) if x is not None]
  delta = difference(operands, residual is not None)
  if residual is None:
    return encode(delta, codec, key), None
  encoded = encode(delta, codec, key)
  return encoded, delta - decode(encoded, delta.shape[-1], codec)


def mean(
  encoded: Encoded, n: int, codec: Codec, weights: jax.Array | None = None
) -> jax.Array:
  """The (weighted) mean of M encoded vectors, summed one after another.

  Args:
    encoded: ``[M, ...]`` each.
    n: Elements without padding.
    codec: The codec that encoded.
    weights: float32 ``[M]``, not negative; a vector of weight zero counts for
      nothing, NaN included.

  Returns:
    float32 ``[..., n]``. Its bits do not depend on how the program is split.
  """
  return mean_of(encoded, lambda part: decode(part, n, codec), weights)


def total(encoded: Encoded, n: int, codec: Codec) -> jax.Array:
  """The sum of M encoded vectors; arguments and result as of `mean`."""
  return sum_of(encoded, lambda part: decode(part, n, codec))


def mean_of(
  encoded: Any,
  decode: Callable[[Any], jax.Array],
  weights: jax.Array | None = None,
) -> jax.Array:
  """`mean` of what is encoded in whatever way; arguments as of `sum_of`."""
  if weights is None:
    divisor = np.float32(len(jax.tree.leaves(encoded)[0]))
  else:
    divisor = sum_in_order(weights)
  # XLA turns a division into this on some numbers of devices: so on all.
  return sum_of(encoded, decode, weights) * (1 / divisor)


def sum_of(
  encoded: Any,
  decode: Callable[[Any], jax.Array],
  weights: jax.Array | None = None,
) -> jax.Array:
  """The (weighted) sum of M encoded vectors.

  A loop, and not a sum over a dim: its order is fixed, and only one decoded
  vector is alive.

  Args:
    encoded: A tuple of arrays ``[M, ...]``.
    decode: One vector's arrays ``[...]`` -> float32.
    weights: See `mean`.
  """

  def add(total, sender):
    part, weight = sender
    values = decode(part)
    if weight is not None:
      # To one bit less than float32 has, which block codecs fit: no compiler
      # can fuse the multiplication into the addition across this rounding.
      values = lax.reduce_precision(weighted(values, weight), 8, 22)
    return total + values, None

  operands = encoded, weights
  first = jax.eval_shape(decode, jax.tree.map(lambda part: part[0], encoded))
  total = jnp.zeros(first.shape, jnp.float32)
  total = calls.same_axes(total, *jax.tree.leaves(operands))[0]
  return lax.scan(add, total, operands)[0]


def sum_in_order(weights: jax.Array) -> jax.Array:
  """``[M] -> []``, from the first to the last, however the program is split."""
  return functools.reduce(jnp.add, list(weights))


def factors(
  senders: int, weights: jax.Array | None, divide: bool
) -> jax.Array:
  """float32 ``[M + 1]`` for kernels: of each vector, and of their sum."""
  each = jnp.ones(senders, jnp.float32) if weights is None else weights
  whole = 1 / sum_in_order(each) if divide else jnp.ones(())
  return jnp.concatenate([each, whole[None]])


def nesterov(
  encoded: Encoded,
  params: jax.Array,
  momentum: jax.Array,
  codec: Codec,
  *,
  learning_rate: float,
  decay: float,
  weights: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """The outer update of DiLoCo with the mean of encoded outer gradients.

      v <- decay v + mean;  params <- params - learning_rate (mean + decay v)

  Args:
    encoded: ``[M, ...]`` each.
    params: float32 ``[..., n]``, the outer parameters.
    momentum: float32 ``[..., n]``, v.
    codec: The codec that encoded.
    learning_rate: Of the outer optimizer.
    decay: Of the momentum.
    weights: See `mean`.

  Returns:
    The new parameters and momentum. Source: arXiv 2311.08105, in the form of
    ``optax.sgd(learning_rate, decay, nesterov=True)``.
  """
  delta = mean(encoded, params.shape[-1], codec, weights)
  return nesterov_step(delta, params, momentum, learning_rate, decay)


def in_blocks(x: jax.Array, size: int) -> jax.Array:
  """``[..., n] -> [..., blocks, size]``, padded with zeros."""
  n = x.shape[-1]
  count = -(-n // size)
  widths = [(0, 0)] * (x.ndim - 1) + [(0, count * size - n)]
  return jnp.pad(x, widths).reshape(*x.shape[:-1], count, size)


# What follows works on tiles of blocks, in kernels too.


def difference(
  operands: Sequence[jax.Array], feedback: bool
) -> jax.Array:
  """float32 of ``[x]`` or ``[x, y]``: x or x - y; with feedback one more."""
  first, *others = (x.astype(jnp.float32) for x in operands)
  if len(others) > feedback:
    first = first - others[0]
  return first + others[-1] if feedback else first


def largest_of(*parts: jax.Array) -> jax.Array:
  """Largest magnitude of the last dims, kept; inf where there is a NaN."""
  largest = []
  for part in parts:
    magnitude = jnp.abs(part)
    # Maxima of floats ignore NaNs on some machines.
    magnitude = jnp.where(magnitude < jnp.inf, magnitude, jnp.inf)
    largest.append(jnp.max(magnitude, axis=-1, keepdims=True))
  return functools.reduce(jnp.maximum, largest)


def scale_of(largest: jax.Array, codec: Codec) -> jax.Array:
  """Scales of blocks with these largest magnitudes.

  ``largest / top``, rounded up to 16 significant bits; 0 below 2^-100, NaN
  from 2^126 on: the inverse of a scale is a normal number.
  """
  quotient = largest / np.float32(_FORMATS[codec.name].top)
  bits = lax.bitcast_convert_type(quotient, jnp.int32)
  # Four units in the last place stay below, so that the scale of a decoded
  # block is found again even where division is inexact.
  rounded = lax.bitcast_convert_type((bits + 251) & ~255, jnp.float32)
  scale = jnp.where(largest < 2.0**-100, 0.0, rounded)
  return jnp.where(largest < 2.0**126, scale, jnp.nan)


def codes_of(
  blocks: jax.Array,
  scale: jax.Array,
  codec: Codec,
  draws: jax.Array | None = None,
) -> jax.Array:
  """The codes of elements.

  Args:
    blocks: float32.
    scale: Of each element's block; broadcasts.
    codec: The codec.
    draws: For stochastic rounding: in [0, 1), one per element.

  Returns:
    int32, in [0, 2^bits).
  """
  # Compilers divide by a broadcast scale so, but not everywhere.
  inverse = 1 / jnp.where(scale > 0, scale, 1.0)
  numbers = jnp.where(scale > 0, blocks * inverse, 0.0)
  if codec.stochastic or codec.name == "fp8":
    return _to_codes(_round(numbers, codec, draws), codec.name)
  if codec.name == "e3m0":
    return _nearest_powers(numbers)
  # From 2^23 on floats are integers. Of magnitudes, since a compiler may fuse a
  # product, but not its magnitude, with the addition, and round once for twice.
  whole = jnp.abs(numbers) + np.float32(2**23)
  whole = lax.bitcast_convert_type(whole, jnp.int32) - 0x4B000000
  return jnp.where(numbers < 0, -whole, whole) & ((1 << codec.bits) - 1)


def _nearest_powers(numbers: jax.Array) -> jax.Array:
  """Codes of the nearest numbers of e3m0: what `_round` makes in more steps."""
  bits = lax.bitcast_convert_type(numbers, jnp.int32)
  magnitude = bits & 0x7FFFFFFF
  # From 1.5 times a power of two on the next one is nearer, or even.
  exponent = ((magnitude + 0x400000) >> 23) - 127 + 7
  code = jnp.clip(exponent, 1, 7) | ((bits >> 28) & 8)
  half_of_least = 0x3C000000  # 2^-7: to the even one, zero
  return jnp.where(magnitude > half_of_least, code, 0)


def _round(
  numbers: jax.Array, codec: Codec, draws: jax.Array | None
) -> jax.Array:
  """Rounds to the numbers that codes stand for; of fp8, or stochastically."""
  form = _FORMATS[codec.name]
  magnitude = jnp.abs(numbers)
  if form.mantissa is None:
    step = inverse = jnp.float32(1)
  else:
    # The spacing of numbers here: a power of two, read off the exponent bits.
    bits = lax.bitcast_convert_type(magnitude, jnp.int32) >> 23
    power = jnp.maximum(bits - 127, form.exponent) - form.mantissa
    step = _power_of_two(power)
    inverse = _power_of_two(-power)
  steps = magnitude * inverse
  if codec.stochastic:
    low = jnp.floor(steps)
    steps = low + jnp.where(draws < steps - low, 1.0, 0.0)
  else:
    steps = jnp.round(steps)  # halves to even
  magnitude = jnp.minimum(steps * step, np.float32(form.top))
  return jnp.where((numbers < 0) & (magnitude > 0), -magnitude, magnitude)


def _power_of_two(exponent: jax.Array) -> jax.Array:
  return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _to_codes(values: jax.Array, name: str) -> jax.Array:
  """Numbers that codes stand for -> codes, int32."""
  if name == "fp8":  # exact: rounded before
    bits = lax.bitcast_convert_type(
      values.astype(jnp.float8_e4m3fn), jnp.uint8
    )
    return bits.astype(jnp.int32)
  if name == "e3m0":
    bits = lax.bitcast_convert_type(jnp.abs(values), jnp.int32) >> 23
    exponent = jnp.where(values == 0, 0, bits - 127 + 7)
    return exponent | jnp.where(values < 0, 8, 0)
  return values.astype(jnp.int32) & (15 if name == "int4" else 255)


def numbers_of(codes: jax.Array, codec: Codec) -> jax.Array:
  """Codes, int32 -> the numbers that they stand for, float32."""
  if codec.name == "fp8":
    values = lax.bitcast_convert_type(
      codes.astype(jnp.uint8), jnp.float8_e4m3fn
    )
    return values.astype(jnp.float32)
  if codec.name == "e3m0":
    exponent = codes & 7
    magnitude = jnp.where(exponent == 0, 0.0, _power_of_two(exponent - 7))
    return jnp.where(codes > 7, -magnitude, magnitude)
  spare = 32 - codec.bits  # the sign bit to the top and back
  return ((codes << spare) >> spare).astype(jnp.float32)


def weighted(x: jax.Array, weight: jax.Array) -> jax.Array:
  """``weight * x``; zero for weight zero, whatever x holds."""
  return jnp.where(weight == 0, 0.0, weight * x)


def to_23_bits(x: jax.Array) -> jax.Array:
  """``lax.reduce_precision(x, 8, 22)``, which Mosaic and Triton lack."""
  bits = lax.bitcast_convert_type(x, jnp.int32)
  bits = (bits + ((bits >> 1) & 1)) & ~1
  return lax.bitcast_convert_type(bits, jnp.float32)


def nesterov_step(
  delta: jax.Array,
  params: jax.Array,
  momentum: jax.Array,
  learning_rate: float,
  decay: float,
) -> tuple[jax.Array, jax.Array]:
  """The outer update itself; see `nesterov`."""
  momentum = delta + decay * momentum
  return params - learning_rate * (delta + decay * momentum), momentum
