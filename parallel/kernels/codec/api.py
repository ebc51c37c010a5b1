"""Block codecs, computed by the preferred implementation that is available.

``reference.py`` specifies every function here. Encodings and means are bitwise
equal in all implementations, except for scales in ``gpu.py``. The residual and
the result of the outer step may differ in the last place.

Shape legend: n = elements of the last dim; M = encoded arrays (senders).
"""

from collections.abc import Callable, Sequence
import math
from typing import Protocol

import jax
import jax.numpy as jnp

from parallel.kernels import calls
from parallel.kernels.codec import gpu, reference, threefry, tpu
from parallel.kernels.codec.reference import Codec, Encoded, OuterOptions
from parallel.kernels.selection import Implementation, SelectedKernel, choose


class Kernels(Protocol):
  """Kernels of a platform: the functions of ``tpu.py`` and ``gpu.py``.

  Arrays have two dims, ``[rows, n]`` with n a multiple of the block, or three,
  ``[M, rows, n]``, for M senders.
  """

  def refusal(
    self, codec: Codec, num_blocks: int, senders: int = 1
  ) -> str | None:
    """Returns the reason why operands are not supported, or None if they are.

    Args:
      codec: The codec.
      num_blocks: Number of blocks of one array.
      senders: Number of encoded arrays that are summed, M.
    """
    ...

  def encode(
    self, operands: Sequence[jax.Array], feedback: bool, codec: Codec,
    key_data: jax.Array | None = None, interpret: bool = False,
  ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Encodes a difference plus a residual.

    Args:
      operands: ``[x]`` to encode x, or ``[anchor, params]`` to encode anchor -
        params, followed by the residual if ``feedback`` is set.
      feedback: Whether the last operand is a residual, which is added.
      codec: The codec.
      key_data: The two words of the key of stochastic rounding, uint32 ``[2]``;
        None for deterministic rounding.
      interpret: Whether to run in the interpreter, on any machine.

    Returns:
      The payload, uint8, ``rows n bits / 8`` bytes; one float32 scale per
      block; and the new residual, float32, or None without ``feedback``. All
      are in the order of the elements; the caller reshapes them.
    """
    ...

  def over_senders(
    self, encoded: Encoded, others: Sequence[jax.Array], codec: Codec,
    outer: OuterOptions | None, weights: jax.Array | None, divide: bool,
    interpret: bool,
  ) -> list[jax.Array]:
    """Averages or sums M encoded arrays, optionally with DiLoCo's outer step.

    Args:
      encoded: Payload uint8 ``[M, rows, n bits / 8]`` and scales float32
        ``[M, rows, n / block]``.
      others: Outer parameters and momentum, float32 ``[rows, n]``; empty
        without an outer step.
      codec: Codec of ``encoded``.
      outer: Learning rate and decay of an outer step with the mean; None to
        return the mean.
      weights: float32 ``[M]``; None for equal weights.
      divide: Whether to average; False for a sum.
      interpret: Whether to run in the interpreter, on any machine.

    Returns:
      The mean or the sum; or the new parameters and the new momentum. Each is
      float32, with ``rows n`` elements in the order of the operands.
    """
    ...


# Name of an implementation -> its kernels.
KERNELS: dict[str, Kernels] = {"tpu": tpu, "gpu": gpu}


def select_kernel(
  shape: tuple[int, ...],
  codec: Codec,
  implementation: Implementation = "auto",
  *,
  key: jax.Array | None = None,
  senders: int = 1,
) -> SelectedKernel:
  """Selects the first preferred implementation that supports the operands.

  Args:
    shape: Shape of the array before encoding, without the dim of senders.
    codec: The codec.
    implementation: "auto", or names in order of preference; see
      `parallel.kernels.selection`.
    key: Random key of stochastic rounding; None for deterministic rounding.
    senders: Number of encoded arrays that are summed, M.

  Raises:
    ValueError: A name is unknown, or no preferred implementation supports the
      operands.
  """
  num_blocks = math.prod(shape[:-1]) * codec.num_scales(shape[-1])

  def refusal(kind):
    if key is not None:
      reason = threefry.refusal(key, num_blocks * codec.block)
      if reason:
        return reason
    return KERNELS[kind].refusal(codec, num_blocks, senders)

  return choose("codec", implementation, refusal)


def encode(
  x: jax.Array,
  codec: Codec,
  key: jax.Array | None = None,
  *,
  implementation: Implementation = "auto",
) -> Encoded:
  """Encodes blocks of the last dim, padded with zeros to whole blocks.

  Kernels read each element once, and write ``bits / 8`` bytes per element and
  one scale per block. If n is not a multiple of the block, x is first copied to
  a padded array.

  Args:
    x: Array to encode, ``[..., n]``; cast to float32.
    codec: The codec.
    key: Random key of stochastic rounding; ignored by deterministic codecs.
    implementation: "auto", or names in order of preference.

  Returns:
    Packed codes, and one scale per block.

  Raises:
    ValueError: Stochastic rounding has no ``key``, a name is unknown, or no
      preferred implementation supports the operands.

  Example:
    >>> codec = Codec("int4", block=4)
    >>> f = jax.jit(lambda x: encode(x, codec))
    >>> payload, scales = f(jnp.array([7.0, 1.0, -2.0, 0.4]))
    >>> payload.tolist(), scales.tolist()  # low half: 7, 1; high half: -2, 0
    ([231, 1], [1.0])
  """
  return encode_delta(None, x, codec, key, implementation=implementation)[0]


def encode_delta(
  anchor: jax.Array | None,
  params: jax.Array,
  codec: Codec,
  key: jax.Array | None = None,
  residual: jax.Array | None = None,
  *,
  implementation: Implementation = "auto",
) -> tuple[Encoded, jax.Array | None]:
  """Encodes ``anchor - params + residual``, and returns the rounding error.

  Kernels use one pass over memory and do not write the difference.

  Args:
    anchor: ``[..., n]``, cast to float32 like all operands; None if ``params``
      is the delta to encode.
    params: ``[..., n]``.
    codec: The codec.
    key: Random key of stochastic rounding; ignored by deterministic codecs.
    residual: Rounding error of the previous call (error feedback),
      ``[..., n]``; None for no error feedback.
    implementation: "auto", or names in order of preference.

  Returns:
    Packed codes and scales; and the new residual, float32 ``[..., n]``, or None
    if ``residual`` is None.

  Raises:
    ValueError: Stochastic rounding has no ``key``, a name is unknown, or no
      preferred implementation supports the operands.
  """
  key = _require_key(codec, key)
  chosen = select_kernel(params.shape, codec, implementation, key=key)
  if chosen.name == "reference":
    return reference.encode_delta(anchor, params, codec, key, residual)
  # The kernels infer the roles from the number of operands and ``feedback``.
  operands = [x for x in (anchor, params, residual) if x is not None]
  return _encode(chosen, operands, codec, key, residual is not None)


def mean(
  encoded: Encoded,
  n: int,
  codec: Codec,
  weights: jax.Array | None = None,
  *,
  implementation: Implementation = "auto",
) -> jax.Array:
  """Returns the mean of M encoded arrays, added in order.

  Args:
    encoded: Payloads ``[M, ..., bytes]`` and scales ``[M, ..., blocks]``.
    n: Elements of the last dim, without padding.
    codec: Codec of ``encoded``.
    weights: float32 ``[M]``, not negative; None for equal weights. An array
      with weight zero contributes nothing, even if it is NaN.
    implementation: "auto", or names in order of preference.

  Returns:
    float32 ``[..., n]``.

  Raises:
    ValueError: A name is unknown, or no preferred implementation supports the
      operands.
  """
  return _reduce_over_senders(
    encoded, n, codec, implementation,
    lambda: reference.mean(encoded, n, codec, weights), weights,
  )


def total(
  encoded: Encoded,
  n: int,
  codec: Codec,
  *,
  implementation: Implementation = "auto",
) -> jax.Array:
  """Returns the sum of M encoded arrays, added in order.

  Args:
    encoded: Payloads ``[M, ..., bytes]`` and scales ``[M, ..., blocks]``.
    n: Elements of the last dim, without padding.
    codec: Codec of ``encoded``.
    implementation: "auto", or names in order of preference.

  Returns:
    float32 ``[..., n]``.

  Raises:
    ValueError: A name is unknown, or no preferred implementation supports the
      operands.
  """
  return _reduce_over_senders(
    encoded, n, codec, implementation,
    lambda: reference.total(encoded, n, codec), divide=False,
  )


def decode(
  encoded: Encoded,
  n: int,
  codec: Codec,
  *,
  implementation: Implementation = "auto",
) -> jax.Array:
  """Decodes one encoded array: the sum over a single sender.

  Args:
    encoded: Payload ``[..., bytes]`` and scales ``[..., blocks]``.
    n: Elements of the last dim, without padding.
    codec: Codec of ``encoded``.
    implementation: "auto", or names in order of preference.

  Returns:
    float32 ``[..., n]``.

  Raises:
    ValueError: A name is unknown, or no preferred implementation supports the
      operands.
  """
  return _reduce_over_senders(
    # A leading dim of one sender.
    Encoded(*(part[None] for part in encoded)), n, codec, implementation,
    lambda: reference.decode(encoded, n, codec), divide=False,
  )


def nesterov(
  encoded: Encoded,
  params: jax.Array,
  momentum: jax.Array,
  codec: Codec,
  outer: OuterOptions,
  weights: jax.Array | None = None,
  *,
  implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
  """Applies DiLoCo's outer step with the mean of encoded outer gradients.

      v <- decay v + mean;  params <- params - learning_rate (mean + decay v)

  Kernels use one pass over memory and do not write the mean.

  Args:
    encoded: Payloads ``[M, ..., bytes]`` and scales ``[M, ..., blocks]``.
    params: Outer parameters, float32 ``[..., n]``.
    momentum: Momentum v, float32 ``[..., n]``.
    codec: Codec of ``encoded``.
    outer: Learning rate and decay of the momentum.
    weights: float32 ``[M]``, not negative; None for equal weights. An array
      with weight zero contributes nothing, even if it is NaN.
    implementation: "auto", or names in order of preference.

  Returns:
    The new parameters and the new momentum, float32 ``[..., n]`` each.

  Raises:
    ValueError: A name is unknown, or no preferred implementation supports the
      operands.
  """
  senders = encoded.scales.shape[0]
  chosen = select_kernel(params.shape, codec, implementation, senders=senders)
  if chosen.name == "reference":
    return reference.nesterov(encoded, params, momentum, codec, outer, weights)
  encoded = _rows_of(encoded)
  # [rows, padded n]; the padding is updated too, and dropped below.
  others = [_to_rows(x, codec) for x in (params, momentum)]
  rows = KERNELS[chosen.kind].over_senders(
    encoded, others, codec, outer, weights, True, chosen.interpret
  )
  new, momentum = (_from_rows(x, params.shape) for x in rows)
  return new, momentum


def _reduce_over_senders(
  encoded: Encoded,
  n: int,
  codec: Codec,
  implementation: Implementation,
  specification: Callable[[], jax.Array],
  weights: jax.Array | None = None,
  divide: bool = True,
) -> jax.Array:
  """Averages or sums M encoded arrays, by a kernel or by ``specification``.

  ``specification`` computes the result without a kernel, and ``divide`` is
  whether to average. Other arguments are those of `mean`.
  """
  senders, *lead, _ = encoded.scales.shape
  shape = (*lead, n)
  chosen = select_kernel(shape, codec, implementation, senders=senders)
  if chosen.name == "reference":
    return specification()
  (rows,) = KERNELS[chosen.kind].over_senders(
    _rows_of(encoded), (), codec, None, weights, divide, chosen.interpret
  )
  return _from_rows(rows, shape)


def _require_key(codec: Codec, key: jax.Array | None) -> jax.Array | None:
  """Returns the key for stochastic codecs, else None."""
  if codec.stochastic and key is None:
    raise ValueError(
      f"codec {codec} rounds stochastically, so it needs a random key; pass key"
    )
  return key if codec.stochastic else None


def _encode(
  chosen: SelectedKernel,
  operands: list[jax.Array],
  codec: Codec,
  key: jax.Array | None,
  feedback: bool,
) -> tuple[Encoded, jax.Array | None]:
  """Encodes by the kernel ``chosen``; arguments as for `Kernels.encode`.

  The results are reshaped to the operands' shape.
  """
  shape = operands[0].shape
  rows = [_to_rows(x, codec) for x in operands]
  words = None
  if key is not None:
    # Kernels take a key as two uint32 words.
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    words = jax.random.key_data(key) if typed else key
    *rows, words = calls.unify_varying_axes(*rows, words)
  payload, scales, residual = KERNELS[chosen.kind].encode(
    calls.unify_varying_axes(*rows), feedback, codec, words, chosen.interpret
  )
  lead, n = shape[:-1], shape[-1]
  encoded = Encoded(
    payload.reshape(*lead, codec.payload_bytes(n)),
    scales.reshape(*lead, codec.num_scales(n)),
  )
  if residual is not None:
    residual = _from_rows(residual, shape)
  return encoded, residual


def _to_rows(x: jax.Array, codec: Codec) -> jax.Array:
  """Flattens ``[..., n]`` to ``[rows, padded n]``, whole blocks per row."""
  padding = codec.padded(x.shape[-1]) - x.shape[-1]
  if padding:
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
  return x.reshape(-1, x.shape[-1])


def _rows_of(encoded: Encoded) -> Encoded:
  """Flattens all dims but the first, which is M senders, and the last.

  The result has payloads ``[M, rows, bytes]``, scales ``[M, rows, blocks]``.
  """
  return Encoded(*(x.reshape(x.shape[0], -1, x.shape[-1]) for x in encoded))


def _from_rows(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Reshapes rows of `_to_rows` to ``shape``, without the padding."""
  return rows.reshape(*shape[:-1], -1)[..., : shape[-1]]
