"""Block codecs, by the best implementation that there is."""

from collections.abc import Callable
import math
from types import ModuleType

import jax
import jax.numpy as jnp

from parallel.kernels import calls
from parallel.kernels.codec import gpu, reference, threefry, tpu
from parallel.kernels.codec.reference import Codec, Encoded
from parallel.kernels.selection import Choice, Implementation, choose

_KERNELS: dict[str, ModuleType] = {"tpu": tpu, "gpu": gpu}


def choice(
  shape: tuple[int, ...],
  codec: Codec,
  implementation: Implementation = "auto",
  *,
  key: jax.Array | None = None,
  senders: int = 1,
) -> Choice:
  """Which implementation runs, and why not another.

  Args:
    shape: Of what is encoded or decoded, without senders.
    codec: The codec.
    implementation: "auto", or names in order of preference: see
      `parallel.kernels.selection`.
    key: Of stochastic rounding.
    senders: M, of means.
  """
  num_blocks = math.prod(shape[:-1]) * codec.num_scales(shape[-1])

  def refusal(kind):
    if key is not None:
      reason = threefry.refusal(key, num_blocks * codec.block)
      if reason:
        return reason
    return _KERNELS[kind].refusal(codec, num_blocks, senders)

  return choose("codec", implementation, refusal)


def encode(
  x: jax.Array,
  codec: Codec,
  key: jax.Array | None = None,
  *,
  implementation: Implementation = "auto",
) -> Encoded:
  """See ``reference.encode``: the same bits by every implementation.

  Args:
    x: ``[..., n]``. Bytes: n elements read, ``n bits / 8`` and scales written.
      Kernels copy x first where n is not a multiple of the block.
    codec: The codec.
    key: Random key of the stochastic rounding.
    implementation: See `choice`.
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
  """See ``reference.encode_delta``.

  Args:
    anchor: ``[..., n]``; None: ``params`` is the difference.
    params: ``[..., n]``.
    codec: The codec.
    key: Random key of the stochastic rounding.
    residual: ``[..., n]``; None: no error feedback.
    implementation: See `choice`.
  """
  key = _key_of(codec, key)
  chosen = choice(params.shape, codec, implementation, key=key)
  if chosen.name == "reference":
    return reference.encode_delta(anchor, params, codec, key, residual)
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
  """See ``reference.mean``: the same bits by every implementation.

  Args:
    encoded: ``[M, ...]`` each.
    n: Elements without padding.
    codec: The codec.
    weights: float32 ``[M]``.
    implementation: See `choice`.
  """
  return _over_senders(
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
  """See ``reference.total``; arguments as of `mean`."""
  return _over_senders(
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
  """See ``reference.decode``; arguments as of `mean`, of one sender."""
  return _over_senders(
    Encoded(*(part[None] for part in encoded)), n, codec, implementation,
    lambda: reference.decode(encoded, n, codec), divide=False,
  )


def nesterov(
  encoded: Encoded,
  params: jax.Array,
  momentum: jax.Array,
  codec: Codec,
  *,
  learning_rate: float,
  decay: float,
  weights: jax.Array | None = None,
  implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
  """See ``reference.nesterov``.

  Args:
    encoded: ``[M, ...]`` each.
    params: float32 ``[..., n]``.
    momentum: float32 ``[..., n]``.
    codec: The codec.
    learning_rate: Of the outer optimizer.
    decay: Of the momentum.
    weights: float32 ``[M]``.
    implementation: See `choice`.
  """
  senders = encoded.scales.shape[0]
  chosen = choice(params.shape, codec, implementation, senders=senders)
  if chosen.name == "reference":
    return reference.nesterov(
      encoded, params, momentum, codec,
      learning_rate=learning_rate, decay=decay, weights=weights,
    )
  kernels = _KERNELS[chosen.kind]
  rows = kernels.nesterov(
    *_rows_of(encoded), _to_rows(params, codec),
    _to_rows(momentum, codec), codec, learning_rate, decay, weights,
    chosen.interpret,
  )
  new, momentum = (_from_rows(x, params.shape) for x in rows)
  return new, momentum


def _over_senders(
  encoded: Encoded,
  n: int,
  codec: Codec,
  implementation: Implementation,
  specification: Callable[[], jax.Array],
  weights: jax.Array | None = None,
  divide: bool = True,
) -> jax.Array:
  """A mean or a sum of M encoded vectors by a kernel, or as specified."""
  senders, *lead, _ = encoded.scales.shape
  shape = (*lead, n)
  chosen = choice(shape, codec, implementation, senders=senders)
  if chosen.name == "reference":
    return specification()
  rows = _KERNELS[chosen.kind].mean(
    *_rows_of(encoded), codec, weights, divide, chosen.interpret
  )
  return _from_rows(rows, shape)


def _key_of(codec: Codec, key: jax.Array | None) -> jax.Array | None:
  if codec.stochastic and key is None:
    raise ValueError(f"{codec}: stochastic rounding needs a key")
  return key if codec.stochastic else None


def _encode(
  chosen: Choice,
  operands: list[jax.Array],
  codec: Codec,
  key: jax.Array | None,
  feedback: bool,
) -> tuple[Encoded, jax.Array | None]:
  shape = operands[0].shape
  rows = [_to_rows(x, codec) for x in operands]
  words = None
  if key is not None:
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    words = jax.random.key_data(key) if typed else key
    *rows, words = calls.same_axes(*rows, words)
  payload, scales, residual = _KERNELS[chosen.kind].encode(
    calls.same_axes(*rows), feedback, codec, words, chosen.interpret
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
  """``[..., n] -> [rows, n]``, padded to whole blocks."""
  padding = codec.padded(x.shape[-1]) - x.shape[-1]
  if padding:
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
  return x.reshape(-1, x.shape[-1])


def _rows_of(encoded: Encoded) -> tuple[jax.Array, jax.Array]:
  """Payload ``[M, rows, bytes]`` and scales ``[M, rows, blocks]``."""
  payload, scales = (
    x.reshape(x.shape[0], -1, x.shape[-1]) for x in encoded
  )
  return payload, scales


def _from_rows(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  return rows.reshape(*shape[:-1], -1)[..., : shape[-1]]
