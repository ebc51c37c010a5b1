"""Ten programs with other planted faults, for a final check only.

The comparison must not be developed or tuned with these programs.
"""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from tests.parallel.ledger.equal.programs import (
  Fault,
  Layout,
  Program,
  attend,
  cross_entropy,
  mesh_of,
  mlp,
  mlp_params,
  normal,
  registrar,
  regression,
  sgd,
  spmd,
  squared,
  tokens,
  weight,
)

FAULTS: dict[str, Fault] = {}
register = registrar(FAULTS)


@register(tensor=2)
def dropout_key_per_rank(layout: Layout, faulty: bool) -> Program:
  """Tensor ranks drop different elements of an activation they all hold.

  NVIDIA/Megatron-LM#206: random states of one tensor group diverge.
  """
  def block(x, layer):
    params, key = layer
    rank = lax.axis_index("tensor")
    key = jax.random.fold_in(key, rank if faulty else 0)  # FAULT
    y = lax.psum(mlp(params, x), "tensor")
    kept = jax.random.bernoulli(key, 0.8, y.shape)
    return x + jnp.where(kept, y / 0.8, 0), None

  def loss(layers, keys, x, y):
    x, _ = lax.scan(jax.checkpoint(block), x, (layers, keys))
    return squared(x, y).mean() / lax.axis_size("tensor")

  def step(state, batch):
    layers, count = state
    keys = jax.random.split(jax.random.fold_in(jax.random.key(8), count), 3)
    value, grads = jax.value_and_grad(loss)(layers, keys, *batch)
    state = sgd(layers, grads), count + 1
    return state, {"loss": lax.psum(value, "tensor")}

  mesh = mesh_of(layout, "tensor")
  specs = {"w_in": P(None, None, "tensor"), "w_out": P(None, "tensor")}, P()
  layers = {"w_in": weight(4, 3, 16, 32), "w_out": 0.3 * weight(5, 3, 32, 16)}
  step = spmd(step, mesh, (specs, P()), (specs, P()), check_vma=False)
  return step, ((layers, np.int32(0)), regression(64))


@register(tensor=4)
def norm_of_local_channels(layout: Layout, faulty: bool) -> Program:
  """A norm over channels that are cut takes statistics of local ones.

  axonn-ai/yalis#36 adds the reduction to a tensor-parallel RMSNorm.
  """
  def block(x, layer):
    stats = jnp.stack([x.mean(axis=1), (x**2).mean(axis=1)])
    stats = stats if faulty else lax.pmean(stats, "tensor")  # FAULT
    mean, square = stats[..., None]
    normed = (x - mean) * lax.rsqrt(square - mean**2 + 1e-5)
    y = jnp.tanh(lax.all_gather(normed, "tensor", axis=1, tiled=True) @ layer)
    return x + y, None

  def loss(layers, x, y):
    x, _ = lax.scan(jax.checkpoint(block), x, layers)
    return lax.pmean(squared(x, y).mean(), "tensor")

  def step(layers, batch):
    value, grads = jax.value_and_grad(loss)(layers, *batch)
    return sgd(layers, grads), {"loss": value}

  mesh = mesh_of(layout, "tensor")
  specs, columns = P(None, None, "tensor"), P(None, "tensor")
  step = spmd(step, mesh, (specs, columns), (specs, P()))
  return step, (weight(4, 3, 32, 32), regression(64, 32))


@register(context=4)
def rotary_offset_missing(layout: Layout, faulty: bool) -> Program:
  """Rotary positions restart at 0 on each rank of a cut sequence.

  NVIDIA/Megatron-LM#560 asks about it, NVIDIA-NeMo/Speech#6178 adds support.
  """
  def rotate(x, positions):
    rates = 0.3 ** jnp.arange(x.shape[1] / 2)
    angles = positions.astype(jnp.float32)[:, None] * rates[None]
    a, b = jnp.split(x, 2, axis=1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=1)

  def loss(params, x, y):
    own = lax.axis_index("context") * len(x) + jnp.arange(len(x))
    positions = jnp.arange(len(x)) if faulty else own  # FAULT
    q, k = (rotate(x @ params[name], positions) for name in "qk")
    k, v = (lax.all_gather(z, "context", tiled=True) for z in (k, x))
    mask = jnp.arange(len(k))[None] <= own[:, None]
    out = x + attend(q, k, v @ params["v"], mask)
    return lax.pmean(squared(out, y).mean(), "context")

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    return sgd(params, grads), {"loss": value}

  mesh = mesh_of(layout, "context")
  params = {name: weight(i, 16, 16) for i, name in enumerate("qkv", 4)}
  step = spmd(step, mesh, (P(), P("context")), P())
  return step, (params, regression(64))


@register(context=4)
def merged_without_rescaling(layout: Layout, faulty: bool) -> Program:
  """Ring attention keeps old sums when the running maximum of scores grows.

  No public report is known; the rescaling is that of arXiv:2310.01889.
  """
  mesh = mesh_of(layout, "context")
  num = mesh.size
  ahead = [(i, (i + 1) % num) for i in range(num)]

  def ring(q, k, v):
    def tick(carry, _):
      k, v, out, total, peak = carry
      scores = q @ k.T / 4
      new = jnp.maximum(peak, scores.max(axis=1, keepdims=True))
      new = lax.stop_gradient(new)
      scale = jnp.ones_like(new) if faulty else jnp.exp(peak - new)  # FAULT
      parts = jnp.exp(scores - new)
      out = scale * out + parts @ v
      total = scale * total + parts.sum(axis=1, keepdims=True)
      k, v = lax.ppermute((k, v), "context", ahead)
      return (k, v, out, total, new), None

    carry = k, v, jnp.zeros_like(q), 0 * q[:, :1], jnp.full((len(q), 1), -1e9)
    _, _, out, total, _ = lax.scan(tick, carry, length=num)[0]
    return out / total

  def step(params, batch):
    def loss(params, x, y):
      x = x + ring(*(x @ params[name] for name in "qkv"))
      return squared(x, y).mean() / num

    value, grads = jax.value_and_grad(loss)(params, *batch)
    value, grads = lax.psum((value, grads), "context")
    return sgd(params, grads), {"loss": value}

  params = {name: weight(i, 16, 16) for i, name in enumerate("qkv", 4)}
  step = spmd(step, mesh, (P(), P("context")), P(), check_vma=False)
  return step, (params, regression(64))


@register(data=4)
def batch_norm_per_device(layout: Layout, faulty: bool) -> Program:
  """Batch norm takes the statistics of one device's rows.

  google/flax#877: each device normalizes with its own statistics by default.
  """
  mesh = mesh_of(layout, "data")

  def loss(params, x, y):
    hidden = x @ params["w_in"]
    devices = hidden.reshape(mesh.size, -1, hidden.shape[1])
    parts = devices if faulty else hidden[None]  # FAULT
    mean = parts.mean(axis=1, keepdims=True)
    square = parts.var(axis=1, keepdims=True)
    parts = (parts - mean) * lax.rsqrt(square + 1e-5)
    out = jax.nn.relu(parts.reshape(hidden.shape)) @ params["w_out"]
    return squared(out, y).mean(), (mean.mean((0, 1)), square.mean((0, 1)))

  def step(state, batch):
    params, running = state
    both = jax.value_and_grad(loss, has_aux=True)
    (value, stats), grads = both(params, *batch)
    running = jax.tree.map(lambda r, s: 0.9 * r + 0.1 * s, running, stats)
    return (sgd(params, grads), running), {"loss": value}

  state = mlp_params(), (normal(6, 32), np.abs(normal(7, 32)))
  whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
  step = jax.jit(step, in_shardings=(whole, rows), out_shardings=whole)
  return step, (state, regression(64))


@register(data=4, small=True)
def rate_scaled_by_devices(layout: Layout, faulty: bool) -> Program:
  """The learning rate grows with devices although the global batch does not.

  arXiv:1706.02677 scales the rate with the batch; no public report is known.
  """
  mesh = mesh_of(layout, "data")

  def loss(params, x, y):
    return squared(mlp(params, x), y).mean()

  def step(state, batch):
    params, momentum, count = state
    value, grads = jax.value_and_grad(loss)(params, *batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    rate = 0.02 * jnp.minimum(1, (count + 1) / 10)
    rate = rate * mesh.size if faulty else rate  # FAULT
    state = sgd(params, momentum, rate), momentum, count + 1
    return state, {"loss": value, "rate": rate}

  params = mlp_params()
  momentum = jax.tree.map(lambda p: 0.1 * p[::-1], params)
  whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
  step = jax.jit(step, in_shardings=(whole, rows), out_shardings=whole)
  return step, ((params, momentum, np.float32(5)), regression(64))


@register(data=4)
def count_in_bfloat16(layout: Layout, faulty: bool) -> Program:
  """Each rank rounds its count of tokens to bfloat16, which ends at 256.

  pytorch/torchtitan#2336 asks about sums over many tokens in bfloat16.
  """
  def loss(params, x, y, valid):
    total = jnp.where(valid, squared(mlp(params, x), y), 0).sum()
    count = valid.sum(dtype=jnp.int32)
    count = count.astype(jnp.bfloat16 if faulty else jnp.float32)  # FAULT
    count = lax.psum(count, "data").astype(jnp.float32)
    return lax.psum(total, "data") / count

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    return sgd(params, grads), {"loss": value}

  counts = np.repeat([257, 261, 265, 241], 300)  # 1,024 of 1,200 tokens
  valid = np.arange(1200) % 300 < counts
  step = spmd(step, mesh_of(layout, "data"), (P(), P("data")), P())
  return step, (mlp_params(), (*regression(1200), valid))


@register(tensor=2)
def reduced_after_the_loop(layout: Layout, faulty: bool) -> Program:
  """Partial products of all layers are reduced once, after the last layer.

  sgl-project/sglang#32511: a deferred reduction covers a part of its ranks.
  """
  def block(x, layer):
    y = mlp(layer, x)
    y = y if faulty else lax.psum(y, "tensor")  # FAULT
    return jnp.tanh(x + y), None

  def loss(layers, x, y):
    x, _ = lax.scan(block, x, layers)
    x = lax.pmean(x, "tensor")  # the ranks' replicas are equal
    return squared(x, y).mean() / lax.axis_size("tensor")

  def step(layers, batch):
    value, grads = jax.value_and_grad(loss)(layers, *batch)
    return sgd(layers, grads), {"loss": lax.psum(value, "tensor")}

  mesh = mesh_of(layout, "tensor")
  specs = {"w_in": P(None, None, "tensor"), "w_out": P(None, "tensor")}
  layers = {"w_in": weight(4, 3, 16, 32), "w_out": 0.3 * weight(5, 3, 32, 16)}
  step = spmd(step, mesh, (specs, P()), (specs, P()), check_vma=False)
  return step, (layers, regression(64))


@register(stage=4, small=True)
def tied_embedding_updated_per_stage(layout: Layout, faulty: bool) -> Program:
  """The update of a table that stages share is summed over them once more.

  NVIDIA/Megatron-LM#844: wrong gradients of embeddings that stages share.
  """
  mesh = mesh_of(layout, "stage")
  num = mesh.size
  ahead = [(i, (i + 1) % num) for i in range(num)]

  def layer(x, w):
    return x + jnp.tanh(x @ w), None

  def loss(params, ids, labels):
    x = params["table"][ids]
    for _ in range(num):  # in round i, stage i has its input
      out = lax.scan(layer, x, params["layers"])[0]
      x = lax.ppermute(out, "stage", ahead)
    value = cross_entropy(out @ params["table"].T, labels).mean()
    return jnp.where(lax.axis_index("stage") == num - 1, value, 0)

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    delta = 0.1 * lax.psum(grads["table"], "stage")
    delta = lax.psum(delta, "stage") if faulty else delta  # FAULT
    layers = sgd(params["layers"], grads["layers"])
    params = {"table": params["table"] - delta, "layers": layers}
    return params, {"loss": lax.psum(value, "stage")}

  specs = {"table": P(), "layers": P("stage")}
  params = {"table": 0.5 * normal(4, 32, 16), "layers": weight(5, 4, 16, 16)}
  batch = tokens(6, 32, 64), tokens(7, 32, 64)
  step = spmd(step, mesh, (specs, P()), (specs, P()), check_vma=False)
  return step, (params, batch)


@register(context=4)
def labels_shifted_locally(layout: Layout, faulty: bool) -> Program:
  """The last token of each rank's part of a sequence has no next token.

  huggingface/transformers#36607: sharded sequences lose labels.
  """
  mesh = mesh_of(layout, "context")
  num = mesh.size
  back = [(i, (i - 1) % num) for i in range(num)]

  def loss(params, ids):
    first = lax.ppermute(ids[:, :1], "context", back)  # of the next rank
    ends = lax.axis_index("context") == num - 1
    edge = jnp.where(ends, -1, first)
    edge = jnp.full_like(edge, -1) if faulty else edge  # FAULT
    labels = jnp.concatenate([ids[:, 1:], edge], axis=1)
    valid = labels >= 0
    logits = jnp.tanh(params["table"][ids]) @ params["head"]
    total = jnp.where(valid, cross_entropy(logits, labels), 0).sum()
    count = valid.sum(dtype=jnp.int32).astype(jnp.float32)
    total, count = lax.psum((total, count), "context")
    return total / count

  def step(params, ids):
    value, grads = jax.value_and_grad(loss)(params, ids)
    return sgd(params, grads, rate=1.0), {"loss": value}

  params = {"table": normal(4, 32, 16), "head": weight(5, 16, 32)}
  step = spmd(step, mesh, (P(), P(None, "context")), P())
  return step, (params, tokens(6, 32, 4, 256))
