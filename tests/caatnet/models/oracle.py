"""Plain reference implementation of the transformer, without a mesh.

``rank_logits`` keeps one full stream per rank. ``dense_loss``, which the model
must equal at p = 1, has no ranks. Both take parameters in the library's layout.
"""

import jax
import jax.numpy as jnp
import numpy as np


def _norm(x, gain, eps):
  gain = jnp.expand_dims(gain, range(x.ndim - 1))
  return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * gain


def _rope(x, config):
  half = x.shape[-1] // 2
  frequency = config.rope_base ** (-np.arange(half) / half)
  if config.rope_scaling:
    frequency = config.rope_scaling(frequency)
  angle = np.arange(x.shape[1])[:, None] * frequency
  cos, sin = np.cos(angle)[None, :, None], np.sin(angle)[None, :, None]
  cos, sin = cos.astype(np.float32), sin.astype(np.float32)
  a, b = x[..., :half], x[..., half:]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _attention(x, w_qkv, heads, kv_heads, config, bias=0.0, gains=None):
  batch, length, _ = x.shape
  y = x @ w_qkv + jnp.reshape(bias, (1, 1, -1))
  y = y.reshape(batch, length, heads + 2 * kv_heads, -1)
  q, k = y[:, :, :heads], y[:, :, heads : heads + kv_heads]
  if gains:
    q, k = (
      _norm(z, g, config.norm_eps) for z, g in zip((q, k), gains, strict=True)
    )
  q, k = _rope(q, config), _rope(k, config)
  v = y[:, :, heads + kv_heads :]
  k, v = (jnp.repeat(z, heads // kv_heads, axis=2) for z in (k, v))
  scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
  ones = np.ones((length, length), bool)
  visible = np.tril(ones)
  if config.sliding_window:
    visible &= np.triu(ones, 1 - config.sliding_window)
  scores = jnp.where(visible, scores, -1e30)
  out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
  return out.reshape(batch, length, -1)


def _gains(block):
  return [block[f"{x}_norm"] for x in ("query", "key") if f"{x}_norm" in block]


def _mlp(x, w_gate_up):
  gate, up = jnp.split(x @ w_gate_up, 2, -1)
  return gate / (1 + jnp.exp(-gate)) * up


def _cross_entropy(logits, targets):
  log_p = jax.nn.log_softmax(logits, -1)
  return -jnp.take_along_axis(log_p, targets[..., None], -1).mean()


def rank_loss(params, tokens, config, ranks):
  """Returns the mean next-token loss of `rank_logits`."""
  logits = rank_logits(params, tokens[:, :-1], config, ranks)
  return _cross_entropy(logits, tokens[:, 1:])


def rank_logits(params, tokens, config, ranks):
  """Returns logits [B, T, vocabulary]; each rank has a stream ``x[rank]``."""
  eps = config.norm_eps
  table = params["embedding"].reshape(-1, config.width)
  x = jnp.stack([table[tokens]] * ranks)
  kv_heads = -(-config.num_kv_heads // ranks)
  heads = kv_heads * config.num_heads // config.num_kv_heads

  def attend(x, w_qkv, w_out, bias, gains):
    return _attention(x, w_qkv, heads, kv_heads, config, bias, gains) @ w_out

  def mlp(x, w_gate_up, w_down):
    return _mlp(x, w_gate_up) @ w_down

  def synchronise(partial, sync):
    k = int(sync.p * config.width)
    scale = np.sqrt(ranks) if sync.private_scale == "forward" else 1.0
    total = jnp.broadcast_to(partial.sum(0), partial.shape)
    return jnp.concatenate(
      [total[..., :k], float(scale) * partial[..., k:]], -1
    )

  for layer, (sync_attention, sync_mlp) in enumerate(config.syncs):
    block = {key: value[layer] for key, value in params["blocks"].items()}
    normed = _norm(x, block["norm_1"], eps)
    bias = block.get("b_qkv", jnp.zeros((ranks, 1)))
    partial = jax.vmap(attend, (0, 0, 0, 0, None))(
      normed, block["w_qkv"], block["w_out"], bias, _gains(block)
    )
    x = x + synchronise(partial, sync_attention)
    normed = _norm(x, block["norm_2"], eps)
    partial = jax.vmap(mlp)(normed, block["w_gate_up"], block["w_down"])
    x = x + synchronise(partial, sync_mlp)
  head = params.get("head")
  if head is None:
    head = jnp.swapaxes(params["embedding"], 1, 2)
  logits = jax.vmap(jnp.matmul)(_norm(x, params["norm"], eps), head)
  return jnp.concatenate(list(logits), -1)[..., : config.vocab_size]


def dense_loss(params, tokens, config, ranks):
  """Returns the mean next-token loss of the dense model without padding."""
  d, eps = config.head_width, config.norm_eps
  heads, kv_heads = config.num_heads, config.num_kv_heads
  kv_cut = -(-kv_heads // ranks)
  cut = kv_cut * heads // kv_heads

  def columns(w, size):  # [R, H, f] -> [H, size]
    return jnp.concatenate(list(w), -1)[:, :size]

  def rows(w, size):
    return jnp.concatenate(list(w), 0)[:size]

  def dense_qkv(w):  # [R, H, f] -> [H, size]
    q, k, v = jnp.split(w, [cut * d, (cut + kv_cut) * d], -1)
    parts = columns(q, heads * d), columns(k, kv_heads * d), columns(
      v, kv_heads * d
    )
    return jnp.concatenate(parts, -1)

  x = rows(params["embedding"], config.vocab_size)[tokens[:, :-1]]
  for layer in range(config.num_layers):
    block = {key: value[layer] for key, value in params["blocks"].items()}
    y = _attention(
      _norm(x, block["norm_1"], eps), dense_qkv(block["w_qkv"]), heads,
      kv_heads, config,
      dense_qkv(block["b_qkv"][:, None])[0] if "b_qkv" in block else 0.0,
      _gains(block),
    )
    x = x + y @ rows(block["w_out"], heads * d)
    gate, up = jnp.split(block["w_gate_up"], 2, -1)
    gate_up = jnp.concatenate(
      [columns(gate, config.ffn_width), columns(up, config.ffn_width)], -1
    )
    y = _mlp(_norm(x, block["norm_2"], eps), gate_up)
    x = x + y @ rows(block["w_down"], config.ffn_width)
  if "head" in params:
    head = columns(params["head"], config.vocab_size)
  else:
    head = rows(params["embedding"], config.vocab_size).T
  return _cross_entropy(_norm(x, params["norm"], eps) @ head, tokens[:, 1:])
