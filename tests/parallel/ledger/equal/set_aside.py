"""Ten more programs with planted faults.

They were written without knowledge of how the comparison works, and compared
once before it was developed further with them.
"""

import jax
from jax import lax
from jax.flatten_util import ravel_pytree
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


@register(tensor=4)
def smoothed_over_local_vocabulary(layout: Layout, faulty: bool) -> Program:
  """Label smoothing spreads its mass over the size of a part of the vocabulary.

  NVIDIA/Megatron-LM#737 and #7464.
  """
  def loss(params, x, labels):
    logits = jax.nn.relu(x @ params["hidden"]) @ params["head"]
    peak = lax.pmax(lax.stop_gradient(logits.max(axis=1)), "tensor")
    total = lax.psum(jnp.exp(logits - peak[:, None]).sum(axis=1), "tensor")
    size = logits.shape[1]
    local = labels - lax.axis_index("tensor") * size
    target = jax.nn.one_hot(local, size)  # zeros outside this rank's part
    classes = size if faulty else size * lax.axis_size("tensor")  # FAULT
    target = 0.9 * target + 0.1 / classes
    target = lax.psum((target * logits).sum(axis=1), "tensor")
    return (jnp.log(total) + peak - target).mean()

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    return sgd(params, grads), {"loss": value}

  mesh = mesh_of(layout, "tensor")
  specs = {"hidden": P(), "head": P(None, "tensor")}
  params = {"hidden": weight(4, 16, 32), "head": 2 * weight(5, 32, 64)}
  batch = normal(6, 64, 16), tokens(7, 64, 64)
  step = spmd(step, mesh, (specs, P()), (specs, P()))
  return step, (params, batch)


@register(context=4)
def heads_merged_before_ranks(layout: Layout, faulty: bool) -> Program:
  """The exchange after attention joins what ranks send in the wrong dimension.

  deepspeedai/DeepSpeed#5664 and #8317: a wrong shape after the exchange.
  """
  def block(x, layer):
    num, width = x.shape
    qkv = (x @ layer["qkv"]).reshape(num, 8, -1)  # [tokens, heads, 3 * size]
    qkv = lax.all_to_all(qkv, "context", 1, 0, tiled=True)
    mask = jnp.tri(len(qkv), dtype=bool)
    one = jax.vmap(attend, in_axes=(1, 1, 1, None), out_axes=1)
    out = one(*jnp.split(qkv, 3, axis=2), mask)
    axis = 2 if faulty else 1  # FAULT
    out = lax.all_to_all(out, "context", 0, axis, tiled=True)
    return x + out.reshape(num, width) @ layer["out"], None

  def loss(layers, x, y):
    x, _ = lax.scan(jax.checkpoint(block), x, layers)
    return lax.pmean(squared(x, y).mean(), "context")

  def step(layers, batch):
    value, grads = jax.value_and_grad(loss)(layers, *batch)
    return sgd(layers, grads), {"loss": value}

  mesh = mesh_of(layout, "context")
  layers = {"qkv": weight(4, 2, 32, 96), "out": 0.5 * weight(5, 2, 32, 32)}
  step = spmd(step, mesh, (P(), P("context")), P())
  return step, (layers, regression(32, 32))


@register(tensor=4, small=True)
def input_gradient_partial(layout: Layout, faulty: bool) -> Program:
  """The gradient of what tensor ranks share is not summed in a backward pass.

  pytorch/torchtitan#1805; NVIDIA/Megatron-LM#559 discusses both operators.
  """
  @jax.custom_vjp
  def copied(x):
    return x

  @jax.custom_vjp
  def reduced(x):
    return lax.psum(x, "tensor")

  def sum_gradient(_, grad):
    return (grad if faulty else lax.psum(grad, "tensor"),)  # FAULT

  copied.defvjp(lambda x: (x, None), sum_gradient)
  reduced.defvjp(lambda x: (lax.psum(x, "tensor"), None), lambda _, g: (g,))

  def block(x, layer):
    return x + reduced(mlp(layer, copied(x))), None

  def loss(params, x, y):
    x = jnp.tanh(x @ params["first"])
    x, _ = lax.scan(jax.checkpoint(block), x, params["layers"])
    return squared(x, y).mean()

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    return sgd(params, grads), {"loss": value}

  mesh = mesh_of(layout, "tensor")
  specs = {"w_in": P(None, None, "tensor"), "w_out": P(None, "tensor")}
  specs = {"first": P(), "layers": specs}
  layers = {"w_in": weight(4, 3, 16, 32), "w_out": weight(5, 3, 32, 16)}
  params = {"first": weight(6, 16, 16), "layers": layers}
  step = spmd(step, mesh, (specs, P()), (specs, P()), check_vma=False)
  return step, (params, regression(32))


@register(tensor=4, small=True)
def adapter_scaled_by_local_rank(layout: Layout, faulty: bool) -> Program:
  """The scale of a low-rank adapter divides by its rank on one device.

  predibase/lorax#324 tells the rank after the split from the configured one.
  """
  def loss(adapter, base, x, y):
    down, up = adapter["down"], adapter["up"]
    rank = down.shape[1]
    rank = rank if faulty else rank * lax.axis_size("tensor")  # FAULT
    delta = lax.psum(x @ down @ up, "tensor") * 16 / rank
    hidden = jax.nn.gelu(x @ base["w_in"] + delta)
    return squared(hidden @ base["w_out"], y).mean()

  def step(state, batch):
    adapter, base = state
    value, grads = jax.value_and_grad(loss)(adapter, base, *batch)
    return (sgd(adapter, grads), base), {"loss": value}

  mesh = mesh_of(layout, "tensor")
  specs = {"down": P(None, "tensor"), "up": P("tensor")}, P()
  adapter = {"down": weight(6, 16, 8), "up": np.zeros((8, 32), np.float32)}
  step = spmd(step, mesh, (specs, P()), (specs, P()))
  return step, ((adapter, mlp_params()), regression(64))


@register(data=4)
def gathered_without_scales(layout: Layout, faulty: bool) -> Program:
  """Rows of int8 weights are gathered, and get the scales of a rank's own rows.

  NVIDIA/TransformerEngine#2245 makes the scales of all shards agree.
  """
  def gather(x):
    return lax.all_gather(x, "data", tiled=True)

  @jax.checkpoint
  def hidden(rows, scales, x):
    num = lax.axis_size("data")
    scales = jnp.tile(scales, num) if faulty else gather(scales)  # FAULT
    weights = gather(rows).astype(jnp.float32) * scales[:, None]
    return jax.nn.gelu(x @ weights)

  def loss(head, rows, scales, x, y):
    out = hidden(rows, scales, x) @ head
    return lax.pmean(squared(out, y).mean(), "data")

  def step(state, batch):
    head, *frozen = state
    value, grad = jax.value_and_grad(loss)(head, *frozen, *batch)
    return (sgd(head, grad), *frozen), {"loss": value}

  weights = mlp_params()
  scales = np.abs(weights["w_in"]).max(axis=1) / 127
  rows = np.round(weights["w_in"] / scales[:, None]).astype(np.int8)
  specs = P(), P("data"), P("data")
  ins, outs = (specs, P("data")), (specs, P())
  step = spmd(step, mesh_of(layout, "data"), ins, outs)
  return step, ((weights["w_out"], rows, scales), regression(64))


@register(stage=4)
def chunks_of_adjacent_layers(layout: Layout, faulty: bool) -> Program:
  """Stages hold adjacent layers, but run them in two interleaved rounds.

  PaddlePaddle/Paddle#45402 describes which layers belong to a stage.
  """
  mesh = mesh_of(layout, "stage")
  num, micro = mesh.size, 4
  ahead = [(i, (i + 1) % num) for i in range(num)]

  def layer(x, w):
    return x + jnp.tanh(x @ w), None

  def pipeline(chunks, x, y):
    def one_round(x, layers):
      def tick(received, t):
        stage = lax.axis_index("stage")
        fresh = x[jnp.minimum(t, micro - 1)]
        out, _ = lax.scan(layer, jnp.where(stage == 0, fresh, received), layers)
        return lax.ppermute(out, "stage", ahead), out

      zeros = lax.pcast(jnp.zeros_like(x[0]), "stage", to="varying")
      _, outs = lax.scan(tick, zeros, jnp.arange(micro + num - 1))
      last = lax.axis_index("stage") == num - 1
      return lax.psum(jnp.where(last, outs[num - 1:], 0), "stage"), None

    return squared(lax.scan(one_round, x, chunks[:, 0])[0], y).mean()

  def loss(layers, x, y):
    spread = layers.reshape(2, num, -1, 16, 16)
    adjacent = layers.reshape(num, 2, -1, 16, 16).swapaxes(0, 1)
    return inner(adjacent if faulty else spread, x, y)  # FAULT

  def step(layers, batch):
    value, grads = jax.value_and_grad(loss)(layers, *batch)
    return sgd(layers, grads), {"loss": value}

  inner = spmd(pipeline, mesh, (P(None, "stage"), P(), P()), P())
  batch = tuple(x.reshape(micro, 8, 16) for x in regression(micro * 8))
  return jax.jit(step), (weight(4, 8, 16, 16), batch)


@register(data=4, small=True)
def expert_bias_from_local_load(layout: Layout, faulty: bool) -> Program:
  """Biases that balance experts follow the load of one rank's tokens.

  pytorch/torchtitan#1114 sums the loads over data ranks before the update.
  """
  def loss(params, bias, x, y):
    scores = jax.nn.sigmoid(x @ params["router"])
    _, chosen = lax.top_k(scores + bias[None], 2)
    chosen = jax.nn.one_hot(chosen, len(bias)).sum(axis=1)
    gates = scores * chosen
    gates = gates / gates.sum(axis=1, keepdims=True)
    outs = jnp.tanh(jnp.einsum("tw,ewv->tev", x, params["experts"]))
    out = x + jnp.einsum("te,tev->tv", gates, outs)
    return lax.pmean(squared(out, y).mean(), "data"), chosen.sum(axis=0)

  def step(state, batch):
    params, bias = state
    both = jax.value_and_grad(loss, has_aux=True)
    (value, load), grads = both(params, bias, *batch)
    load = load if faulty else lax.psum(load, "data")  # FAULT
    change = lax.pmean(jnp.sign(load.mean() - load), "data")
    return (sgd(params, grads), bias + 0.01 * change), {"loss": value}

  params = {"router": weight(4, 16, 8), "experts": weight(5, 8, 16, 16)}
  state = params, 0.1 * normal(6, 8)
  step = spmd(step, mesh_of(layout, "data"), (P(), P("data")), P())
  return step, (state, regression(64))


@register(context=4)
def labels_not_rearranged(layout: Layout, faulty: bool) -> Program:
  """Tokens are dealt out so that causal masks cost the same; labels are not.

  modelscope/ms-swift#10071: values per token and masks differ in their order.
  """
  mesh = mesh_of(layout, "context")
  num = mesh.size
  cut = NamedSharding(mesh, P(None, "context"))

  def block(x, layer):
    q, k, v = jnp.split(x @ layer["qkv"], 3, axis=2)
    mask = order[None] <= order[:, None]
    heads = jax.vmap(attend, in_axes=(0, 0, 0, None))(q, k, v, mask)
    x = lax.with_sharding_constraint(x + heads @ layer["out"], cut)
    return x, None

  def loss(params, ids, labels):
    ids = lax.with_sharding_constraint(ids[:, order], cut)
    labels = labels[:, np.arange(32) if faulty else order]  # FAULT
    labels = lax.with_sharding_constraint(labels, cut)
    x = params["table"][ids]
    x, _ = lax.scan(jax.checkpoint(block), x, params["layers"])
    return cross_entropy(x @ params["head"], labels).mean()

  def step(params, ids):
    value, grads = jax.value_and_grad(loss)(params, ids[:, :-1], ids[:, 1:])
    return sgd(params, grads), {"loss": value}

  parts = np.arange(32).reshape(2 * num, -1)  # rank i has i and 2 * num - 1 - i
  order = np.stack([parts[:num], parts[:num - 1:-1]], axis=1).ravel()
  layers = {"qkv": weight(4, 2, 16, 48), "out": 0.5 * weight(5, 2, 16, 16)}
  params = {"table": normal(6, 32, 16), "layers": layers}
  params["head"] = weight(7, 16, 32)
  whole = NamedSharding(mesh, P())
  step = jax.jit(step, in_shardings=whole, out_shardings=whole)
  return step, (params, tokens(8, 32, 4, 33))


@register(data=4, small=True)
def balance_loss_per_device(layout: Layout, faulty: bool) -> Program:
  """The loss that balances experts multiplies by loads of one device's tokens.

  pytorch/torchtitan#3000 and #4772 sum the loads over the global batch.
  """
  mesh = mesh_of(layout, "data")

  def loss(params, x, y):
    gates = jax.nn.softmax(x @ params["router"])
    chosen = jax.nn.one_hot(gates.argmax(axis=1), 4)
    outs = jnp.tanh(jnp.einsum("tw,ewv->tev", x, params["experts"]))
    out = x + jnp.einsum("te,tev->tv", gates * chosen, outs)
    loads, shares = (
      z.reshape(mesh.size, -1, 4).mean(axis=1) for z in (chosen, gates)
    )
    loads = loads if faulty else loads.mean(axis=0, keepdims=True)  # FAULT
    balance = 4 * (loads * shares).sum(axis=1).mean()
    value = squared(out, y).mean()
    return value + 0.02 * balance, balance

  def step(params, batch):
    both = jax.value_and_grad(loss, has_aux=True)
    (value, balance), grads = both(params, *batch)
    return sgd(params, grads, 1.0), {"loss": value, "balance": balance}

  params = {"router": weight(4, 16, 4), "experts": weight(5, 4, 16, 16)}
  whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
  step = jax.jit(step, in_shardings=(whole, rows), out_shardings=whole)
  return step, (params, regression(64))


@register(data=4, small=True)
def decay_mask_in_other_order(layout: Layout, faulty: bool) -> Program:
  """A cut optimizer exempts other elements from weight decay than the biases.

  verl-project/verl#7215: flat parameters mix matrices, biases, and gains.
  """
  mesh = mesh_of(layout, "data")
  num = mesh.size
  params = mlp_params() | {"b_in": normal(6, 32), "b_out": normal(7, 16)}
  flat, unflatten = ravel_pytree(params)
  mask = {k: np.full(p.shape, p.ndim > 1, "f4") for k, p in params.items()}
  mask = np.asarray(ravel_pytree(mask)[0])
  cut = NamedSharding(mesh, P("data"))

  def loss(shards, x, y):
    params = unflatten(shards.reshape(-1))
    hidden = jax.nn.gelu(x @ params["w_in"] + params["b_in"][None])
    return squared(hidden @ params["w_out"] + params["b_out"][None], y).mean()

  def step(state, batch):
    shards, momentum = (z.reshape(num, -1) for z in state)
    shards = lax.with_sharding_constraint(shards, cut)
    value, grads = jax.value_and_grad(loss)(shards, *batch)
    rows, columns = mask.reshape(num, -1), mask.reshape(-1, num).T
    decays = columns if faulty else rows  # FAULT
    momentum = 0.9 * momentum + grads + 0.1 * decays * shards
    shards = lax.with_sharding_constraint(shards - 0.1 * momentum, cut)
    return (shards.reshape(-1), momentum.reshape(-1)), {"loss": value}

  state = np.asarray(flat), 0.1 * np.asarray(flat)[::-1]
  whole = NamedSharding(mesh, P())
  step = jax.jit(step, in_shardings=(cut, cut), out_shardings=(cut, whole))
  return step, (state, regression(64))
