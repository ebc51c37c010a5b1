"""Causal attention in the fastest implementation available on a platform.

Shape legend: B = batch, T = position, H = query heads, K = key/value heads,
D = head width. All heads here belong to one rank.
"""

from collections.abc import Callable, Iterable
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from parallel.collectives import varying, varying_axes

IMPLEMENTATIONS = ("auto", "xla", "cudnn", "splash")

# Maximum and minimum number of query positions per block of "xla"; between them
# it is a quarter of the sequence. A block skips keys after its last query.
_BLOCK, _MIN_BLOCK = 512, 128


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  implementation: str,
  window: int = 0,
  *,
  return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Returns causal grouped-query attention.

  Args:
    q: ``[B, T, H, D]``.
    k: ``[B, T, K, D]``; K divides H.
    v: ``[B, T, K, D]``.
    implementation: "cudnn" (flash attention on GPUs), "splash" (flash attention
      on TPUs) or "xla" (all platforms, in blocks of queries, so that the score
      matrix of a long sequence is never materialised).
    window: Sliding window in positions, including the query's position; 0 for
      full causal attention.
    return_lse: Whether to return the log-sum-exp too, with which ``merge``
      combines attention over parts of the keys.

  Returns:
    ``[B, T, H, D]``; with ``return_lse`` a pair of it and the log-sum-exp,
    ``[B, T, H]`` in float32: the natural logarithm of the sum of
    ``exp(q @ k / sqrt(D))`` over the keys that a query sees. Both are
    differentiable. In "cudnn" and "splash", the backward of the pair runs the
    kernels twice. The log-sum-exp of "cudnn" has not been tested on a GPU.

  Raises:
    ValueError: If the implementation is unknown.

  Example:
    >>> v = jnp.array([1.0, 2.0, 4.0, 8.0]).reshape(1, 4, 1, 1)
    >>> q = k = jnp.zeros((1, 4, 1, 1))  # equal scores: the mean of the window
    >>> attention(q, k, v, "xla", window=2).ravel().tolist()
    [1.0, 1.5, 3.0, 6.0]
  """
  window = min(window, q.shape[1])
  flash = _flash_lse if return_lse else _flash
  match implementation:
    case "cudnn":
      return flash(functools.partial(_cudnn_kernel, window=window), q, k, v)
    case "splash":
      return flash(functools.partial(_splash_kernel, window=window), q, k, v)
    case "xla":
      return _blockwise(q, k, v, window, return_lse)
  raise ValueError(
    f"config.model.attention={implementation!r} must be one of "
    f"{', '.join(IMPLEMENTATIONS)}"
  )


def merge(
  parts: Iterable[tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
  """Merges attention over disjoint sets of keys.

  Args:
    parts: A pair per set of keys: the result of attention ``[B, T, H, D]``,
      and its log-sum-exp ``[B, T, H]``, which is -inf if a query sees no key of
      the set; the result must be finite there.

  Returns:
    The pair of attention over all keys, in the dtypes of the parts.

  Example:
    >>> one = jnp.ones((1, 1, 1, 1)), jnp.zeros((1, 1, 1))  # a key, score 0
    >>> three = 5 * one[0], one[1] + jnp.log(3.0)  # three keys, scores 0
    >>> out, lse = merge([one, three])
    >>> round(out.item(), 3)  # (1 + 5 + 5 + 5) / 4
    4.0
  """
  out, lse = (jnp.stack(x) for x in zip(*parts, strict=True))
  largest = lax.stop_gradient(jnp.max(lse, axis=0))
  largest = jnp.where(largest == -jnp.inf, 0.0, largest)
  weights = jnp.exp(lse - largest[None])
  total = jnp.sum(weights, axis=0)
  is_seen = total > 0
  total = jnp.where(is_seen, total, 1.0)
  merged = jnp.sum(weights[..., None] * out, axis=0) / total[..., None]
  lse = jnp.where(is_seen, jnp.log(total) + largest, -jnp.inf)
  return merged.astype(out.dtype), lse


def resolve(
  implementation: str,
  platform: str,
  dtype: str,
  seq_len: int,
  head_width: int,
) -> str:
  """Returns the implementation to run; "auto" selects the fastest supported.

  Args:
    implementation: One of ``IMPLEMENTATIONS``.
    platform: The kind of devices: "cpu", "gpu" or "tpu".
    dtype: The dtype of queries, keys and values.
    seq_len: The number of positions, T.
    head_width: The channels of a head, D.

  Raises:
    ValueError: If the implementation does not support such devices or arrays.

  Example:
    >>> resolve("auto", "gpu", "bfloat16", seq_len=2048, head_width=128)
    'cudnn'
    >>> resolve("auto", "gpu", "float32", seq_len=2048, head_width=128)
    'xla'
  """
  # Requirements in the supported jax versions: of cuDNN in
  # `jax.nn.dot_product_attention`, and of the blocks of splash attention.
  needs = {
    "cudnn": {
      "a GPU": platform == "gpu",
      f"config.model.dtype={dtype!r} to be bfloat16 or float16":
        dtype in ("bfloat16", "float16"),
      f"config.model.width / num_heads = {head_width} to be a multiple of 8, "
      "at most 256":
        head_width % 8 == 0 and head_width <= 256,
    },
    "splash": {
      "a TPU": platform == "tpu",
      f"config.data.seq_len={seq_len} to be a multiple of 128":
        seq_len % 128 == 0,
    },
    "xla": {},
  }
  if implementation == "auto":
    return next(name for name, need in needs.items() if all(need.values()))
  for need, is_met in needs[implementation].items():
    if not is_met:
      raise ValueError(
        f"attention={implementation!r} needs {need}; 'auto' selects a "
        "supported implementation"
      )
  return implementation


def _blockwise(
  q: jax.Array, k: jax.Array, v: jax.Array, window: int, return_lse: bool
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Computes attention by blocks of queries, each over the keys it may see."""
  batch, num_positions, num_heads, head_width = q.shape
  num_groups = k.shape[2]
  # In float32 the queries are scaled instead of the scores, which have more
  # elements.
  scale = head_width**-0.5
  if q.dtype == jnp.float32:
    q, scale = q * scale, 1.0
  # Products are batched over the leading dims.
  q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
  # [B, K, H / K, T, D]
  q = q.reshape(batch, num_groups, -1, num_positions, head_width)
  attend = _attend_block
  if num_positions > _BLOCK:
    # Without rematerialisation, the scores of all blocks would be residuals.
    attend = jax.checkpoint(attend, static_argnums=(3, 4, 5, 6))
  size = min(_BLOCK, max(_MIN_BLOCK, num_positions // 4))
  blocks = []
  for start in range(0, num_positions, size):
    stop = min(start + size, num_positions)
    first = max(0, start + 1 - window) if window else 0
    blocks.append(
      attend(
        q[..., start:stop, :], k[:, :, first:stop], v[:, :, first:stop],
        start - first, window, scale, return_lse,
      )
    )
  if return_lse:
    blocks, lse = zip(*blocks, strict=True)
    lse = jnp.concatenate(lse, axis=3)
    lse = lse.reshape(batch, num_heads, num_positions)
  out = jnp.concatenate(blocks, axis=3)
  out = out.reshape(batch, num_heads, num_positions, head_width)
  out = jnp.swapaxes(out, 1, 2)
  return (out, jnp.swapaxes(lse, 1, 2)) if return_lse else out


def _attend_block(
  q: jax.Array, k: jax.Array, v: jax.Array, start: int, window: int,
  scale: float, return_lse: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Computes attention of a block of t queries over s keys.

  Args:
    q: Queries ``[B, K, H / K, t, D]``.
    k: Keys ``[B, K, s, D]`` of consecutive positions.
    v: Values ``[B, K, s, D]``.
    start: Index into the keys of the first query's position.
    window: Sliding window in positions; 0 for full causal attention.
    scale: Factor of the scores.
    return_lse: Whether to return the log-sum-exp of the scores too.

  Returns:
    ``[B, K, H / K, t, D]``, and the log-sum-exp ``[B, K, H / K, t]`` if asked.
  """
  *_, group, num_queries, head_width = q.shape
  scores = jnp.einsum(
    "bktd,bksd->bkts", q.reshape(*k.shape[:2], -1, head_width), k,
    preferred_element_type=jnp.float32,
  )
  if scale != 1:
    scores = scores * scale
  query_position = start + jnp.arange(num_queries)[:, None]
  key_position = jnp.arange(k.shape[2])[None, :]
  visible = key_position <= query_position
  if window:
    visible &= key_position > query_position - window
  # `jnp.where` on the scores would save its mask for the backward.
  hidden = jnp.where(visible, 0.0, -jnp.inf)
  scores = scores + jnp.tile(hidden, (group, 1))[None, None]
  largest = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
  weights = jnp.exp(scores - largest)
  # Divides the result instead of the weights, which have more elements.
  total = jnp.sum(weights, axis=-1, keepdims=True)
  out = jnp.einsum(
    "bkts,bksd->bktd", weights.astype(v.dtype), v,
    preferred_element_type=jnp.float32,
  )
  out = (out / total).astype(v.dtype).reshape(q.shape)
  if not return_lse:
    return out
  return out, (jnp.log(total) + largest).reshape(q.shape[:-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(
  kernel: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
  """Runs a flash attention kernel; the backward repeats its forward.

  ``check_vma=True`` requires that a result's type names the mesh axes over
  which it varies, which these kernels do not support. A ``shard_map`` over no
  axis runs them without this check. It must not be differentiated, which would
  mix checked and unchecked cotangents. Therefore a ``custom_vjp`` saves the
  operands, and its backward has a separate ``shard_map``.
  """
  return _run_unchecked(kernel, q, k, v)


def _flash_forward(kernel, q, k, v):
  return _run_unchecked(kernel, q, k, v), (q, k, v)


def _flash_backward(kernel, inputs, cotangent):
  def backward(q, k, v, cotangent):
    return jax.vjp(kernel, q, k, v)[1](cotangent)

  return _run_unchecked(backward, *inputs, cotangent)


_flash.defvjp(_flash_forward, _flash_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash_lse(
  kernel: Callable[..., Any], q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Runs a flash attention kernel that returns its log-sum-exp too.

  JAX has no gradient of the log-sum-exp of these kernels: splash attention
  raises an error, and cuDNN attention ignores the cotangent.
  """
  return _run_unchecked(functools.partial(kernel, return_lse=True), q, k, v)


def _flash_lse_forward(kernel, q, k, v):
  return _flash_lse(kernel, q, k, v), (q, k, v)


def _flash_lse_backward(kernel, inputs, cotangents):
  def backward(q, k, v, d_out, d_lse):
    dq, dk, dv = jax.vjp(kernel, q, k, v)[1](d_out)
    # The derivatives of the log-sum-exp with respect to the scores are the
    # attention weights. Hence its gradient with respect to q is attention with
    # keys as values, and with respect to k the gradient of such values.
    mean_keys, to_keys = jax.vjp(lambda values: kernel(q, k, values), k)
    d_scores = (d_lse * q.shape[-1]**-0.5)[..., None]
    dq += (d_scores * mean_keys).astype(dq.dtype)
    dk += to_keys((d_scores * q).astype(d_out.dtype))[0]
    return dq, dk, dv

  return _run_unchecked(backward, *inputs, *cotangents)


_flash_lse.defvjp(_flash_lse_forward, _flash_lse_backward)


def _run_unchecked(f: Callable[..., Any], *args: jax.Array) -> Any:
  """Runs f with ``check_vma=False``; results vary over the operands' axes."""

  def run(*args):
    # By type, results of unchecked operations vary over no axis. Multiplying
    # the arguments by one gives all operands this type.
    return f(*(x * jnp.ones((), x.dtype) for x in args))

  out = jax.shard_map(
    run, axis_names=set(), in_specs=P(), out_specs=P(), check_vma=False
  )(*args)
  names = varying_axes(args[0])
  return jax.tree.map(lambda x: varying(x, *names), out)


def _cudnn_kernel(
  q: jax.Array, k: jax.Array, v: jax.Array, window: int,
  return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  if return_lse:
    # `jax.nn.dot_product_attention` rounds the log-sum-exp to the dtype of q.
    # In bfloat16, values from 8 to 16 change the weights of parts by up to 3%.
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    out, lse = cudnn.dot_product_attention(
      q, k, v, scale=q.shape[-1]**-0.5, mask_type=cudnn.MaskType.CAUSAL,
      sliding_window_length=window or None, return_residual=True,
    )
    return out, jnp.swapaxes(lse, 1, 2)
  return jax.nn.dot_product_attention(
    q, k, v, is_causal=True, implementation="cudnn",
    local_window_size=(window - 1, 0) if window else None,
  )


def _splash_blocks(num_positions: int) -> Any:
  """Returns the block sizes of splash attention; None for its defaults.

  The kernel's tables have three bytes per pair of a query block and a key block
  and must fit into scalar memory of 1 MB. With the default of 128 positions per
  block, they do not fit beyond 75,000 positions.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernel,
  )

  size = 512
  if num_positions <= 2**16 or num_positions % size:
    return None
  return kernel.BlockSizes(
    block_q=size, block_kv=size, block_kv_compute=size,
    block_q_dkv=size, block_kv_dkv=size, block_kv_dkv_compute=size,
    block_q_dq=size, block_kv_dq=size,
  )


def _splash_kernel(
  q: jax.Array, k: jax.Array, v: jax.Array, window: int,
  return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernel,
  )
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as mask,
  )

  # The kernel computes multi-query attention: one key/value head with its group
  # of query heads. `vmap` below maps it over batch and key/value heads.
  batch, num_positions, num_heads, head_width = q.shape
  num_groups = k.shape[2]
  group = num_heads // num_groups
  square = (num_positions, num_positions)
  visible = mask.CausalMask(square)
  if window:
    visible = mask.LocalMask(square, window_size=(window - 1, 0), offset=0)
  attend = kernel.make_splash_mqa_single_device(
    mask=mask.MultiHeadMask([visible] * group),
    block_sizes=_splash_blocks(num_positions),
    save_residuals=return_lse,
  )
  heads_first = functools.partial(jnp.swapaxes, axis1=1, axis2=2)
  # The kernel does not scale scores, so queries are scaled.
  q, k, v = (heads_first(x) for x in (q * head_width**-0.5, k, v))
  q = q.reshape(batch, num_groups, group, num_positions, head_width)
  out = jax.vmap(jax.vmap(attend))(q, k, v)
  if return_lse:
    out, (lse,) = out
    lse = heads_first(lse.reshape(batch, num_heads, num_positions))
  out = out.reshape(batch, num_heads, num_positions, head_width)
  out = heads_first(out).astype(q.dtype)
  return (out, lse) if return_lse else out
