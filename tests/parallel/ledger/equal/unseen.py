"""Ten more programs with planted faults.

They were written without knowledge of how the comparison works, and compared
once before it was developed further with them.
"""

import functools

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
  rms_norm,
  sgd,
  spmd,
  squared,
  tokens,
  weight,
)

FAULTS: dict[str, Fault] = {}
register = registrar(FAULTS)


@register(tensor=4)
def kv_heads_tiled(layout: Layout, faulty: bool) -> Program:
  """Copies of key-value heads for more ranks than heads are in a wrong order.

  vllm-project/tpu-inference#1429 and hiyouga/LlamaFactory#10794 tell the order.
  """
  mesh = mesh_of(layout, "tensor")
  heads, kv_heads, size = 8, 2, 4
  copies = max(1, mesh.size // kv_heads)
  cut = NamedSharding(mesh, P("tensor"))

  def per_head(x):
    return x.reshape(len(x), -1, size).swapaxes(0, 1)  # [heads, tokens, size]

  def spread(x):
    x = jnp.tile(x, (copies, 1, 1)) if faulty else x.repeat(copies, 0)  # FAULT
    return lax.with_sharding_constraint(x, cut)

  def block(x, layer):
    k, v = (spread(per_head(x @ layer[name])) for name in "kv")
    q = per_head(x @ layer["q"]).reshape(len(k), -1, len(x), size)
    q = lax.with_sharding_constraint(q, cut)
    group = jax.vmap(attend, in_axes=(0, None, None, None))
    mask = jnp.tri(len(x), dtype=bool)
    out = jax.vmap(group, in_axes=(0, 0, 0, None))(q, k, v, mask)
    out = out.reshape(heads, len(x), size).swapaxes(0, 1)
    return x + out.reshape(len(x), -1) @ layer["out"], None

  def step(layers, batch):
    def loss(layers, x, y):
      return squared(lax.scan(block, x, layers)[0], y).mean()

    value, grads = jax.value_and_grad(loss)(layers, *batch)
    return sgd(layers, grads), {"loss": value}

  layers = {"q": weight(4, 2, 32, 32), "out": weight(5, 2, 32, 32)}
  layers |= {"k": weight(6, 2, 32, 8), "v": weight(7, 2, 32, 8)}
  return jax.jit(step), (layers, regression(32, 32))


@register(expert=2, tensor=2)
def gate_and_up_cut_together(layout: Layout, faulty: bool) -> Program:
  """The columns of all gates and then of all ups are cut as one matrix.

  NVIDIA/Megatron-LM#360 and, for experts, #985: wrong pairs of columns.
  """
  mesh = mesh_of(layout, "expert", "tensor")
  num = mesh.shape["tensor"]

  def experts(params, x):
    gates = jax.nn.softmax(x @ params["router"])
    local = len(params["down"])
    start = lax.axis_index("expert") * local
    gates = lax.dynamic_slice_in_dim(gates, start, local, axis=1)
    hidden = jnp.einsum("tw,ewh->teh", x, params["gate_up"])
    gate, up = jnp.split(hidden, 2, axis=2)
    hidden = jax.nn.silu(gate) * up * gates[..., None]
    out = jnp.einsum("teh,ehw->tw", hidden, params["down"])
    return x + lax.psum(out, ("expert", "tensor"))

  def fuse(fused):
    pairs = fused.reshape(*fused.shape[:2], 2, num, -1)
    paired = pairs.swapaxes(2, 3).reshape(fused.shape)  # by rank
    return fused if faulty else paired  # FAULT

  def loss(params, x, y):
    params = params | {"gate_up": fuse(params["gate_up"])}
    return squared(inner(params, x), y).mean()

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    return sgd(params, grads), {"loss": value}

  specs = {"gate_up": P("expert", None, "tensor")}
  specs |= {"router": P(), "down": P("expert", "tensor")}
  inner = spmd(experts, mesh, (specs, P()), P())
  params = {"router": weight(4, 16, 4), "gate_up": weight(5, 4, 16, 64)}
  params["down"] = weight(6, 4, 32, 16)
  return jax.jit(step), (params, regression(64))


@register(context=4)
def recurrence_restarts(layout: Layout, faulty: bool) -> Program:
  """A linear recurrence starts from zeros on every rank of a cut sequence.

  huggingface/accelerate#4177, NVIDIA/Megatron-LM#6808 passes the state.
  """
  def merge(a, b):
    return a[0] * b[0], a[1] * b[0] + b[1]

  def block(x, layer):
    decay = jax.nn.sigmoid(x @ layer["decay"] + 1)
    parts = decay, (1 - decay) * (x @ layer["value"])
    decay, state = lax.associative_scan(merge, parts)
    ends = lax.all_gather((decay[-1], state[-1]), "context")
    zeros = jnp.zeros_like(state[-1])
    starts = lax.scan(lambda s, end: (end[0] * s + end[1], s), zeros, ends)[1]
    start = starts[lax.axis_index("context")]
    start = zeros if faulty else start  # FAULT
    return x + jnp.tanh(state + decay * start[None]) @ layer["out"], None

  def loss(layers, x, y):
    x, _ = lax.scan(jax.checkpoint(block), x, layers)
    return lax.pmean(squared(x, y).mean(), "context")

  def step(layers, batch):
    value, grads = jax.value_and_grad(loss)(layers, *batch)
    return sgd(layers, grads), {"loss": value}

  names = "decay", "value", "out"
  layers = {name: weight(i, 2, 16, 16) for i, name in enumerate(names, 4)}
  mesh = mesh_of(layout, "context")
  step = spmd(step, mesh, (P(), P("context")), P())
  return step, (layers, regression(64))


@register(tensor=4, small=True)
def replicated_counted_per_rank(layout: Layout, faulty: bool) -> Program:
  """The norm for clipping counts replicated parameters once for every rank.

  NVIDIA-NeMo/RL#3788, and ROCm/TransformerEngine#715.
  """
  def block(x, layer):
    normed = rms_norm(x, layer["gain"])
    return x + lax.psum(mlp(layer, normed), "tensor"), None

  def loss(params, x, y):
    x = x @ params["first"]
    x, _ = lax.scan(jax.checkpoint(block), x, params["layers"])
    return squared(x, y).mean()

  def squares(grad, spec):
    square = jnp.sum(grad**2)
    if "tensor" not in spec:
      square /= 1 if faulty else lax.axis_size("tensor")  # FAULT
    return square

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    square = sum(jax.tree.leaves(jax.tree.map(squares, grads, specs)))
    norm = jnp.sqrt(lax.psum(square, "tensor"))
    scale = jnp.minimum(1, 0.5 / norm)
    params = sgd(params, jax.tree.map(lambda g: scale * g, grads))
    return params, {"loss": value, "norm": norm}

  specs = {"gain": P(), "w_in": P(None, None, "tensor")}
  specs = {"first": P(), "layers": specs | {"w_out": P(None, "tensor")}}
  layers = {"w_in": weight(4, 3, 16, 32), "w_out": weight(5, 3, 32, 16)}
  layers["gain"] = 1 + 0.1 * normal(6, 3, 16)
  mesh = mesh_of(layout, "tensor")
  step = spmd(step, mesh, (specs, P()), (specs, P()))
  params = {"first": weight(7, 16, 16), "layers": layers}
  return step, (params, regression(64))


@register(data=4, small=True)
def overflow_skips_own_part(layout: Layout, faulty: bool) -> Program:
  """Only those parts of a cut optimizer skip a step whose gradients overflow.

  deepspeedai/DeepSpeed#7580 makes all ranks know of an overflow.
  """
  mesh = mesh_of(layout, "data")
  flat, unflatten = ravel_pytree(mlp_params())
  cut = NamedSharding(mesh, P("data"))

  def loss(flat, x, y):
    return squared(mlp(unflatten(flat), x), y).mean()

  def step(state, batch):
    flat, momentum, scale = state
    value, grad = jax.value_and_grad(loss)(flat, *batch)
    half = (scale * grad).astype(jnp.float16)
    half, flat, momentum = (
      lax.with_sharding_constraint(z.reshape(mesh.size, -1), cut)
      for z in (half, flat, momentum)
    )
    finite = jnp.isfinite(half).all(axis=1, keepdims=True)
    everywhere = finite.all()
    apply = finite if faulty else everywhere  # FAULT
    new = 0.9 * momentum + half.astype(jnp.float32) / scale
    momentum = jnp.where(apply, new, momentum)
    flat = jnp.where(apply, flat - 0.1 * new, flat)
    scale = jnp.where(everywhere, scale, scale / 2)
    return (flat.ravel(), momentum.ravel(), scale), {"loss": value}

  flat = np.asarray(flat)
  state = flat, 0.1 * flat[::-1], np.float32(2**20)
  whole = NamedSharding(mesh, P())
  step = jax.jit(step, in_shardings=((cut, cut, whole), cut))
  return step, (state, regression(64))


@register(stage=4)
def balance_loss_of_bubbles(layout: Layout, faulty: bool) -> Program:
  """Stages without a microbatch still add to the loss that balances experts.

  databricks/megablocks#85: this loss grows with the number of stages.
  """
  mesh = mesh_of(layout, "stage")
  num, micro = mesh.size, 4
  cut = NamedSharding(mesh, P("stage"))

  @jax.checkpoint
  def layer(x, params):
    gates = jax.nn.softmax(x @ params["router"])
    out = jnp.einsum("te,tw,ewv->tv", gates, jnp.tanh(x), params["experts"])
    return x + out, 4 * jnp.sum(gates.mean(axis=0) ** 2)

  stages = jax.vmap(lambda x, layers: lax.scan(layer, x, layers))

  def loss(layers, x, y):
    layers = jax.tree.map(lambda w: w.reshape(num, -1, *w.shape[1:]), layers)

    def tick(inputs, t):
      inputs = inputs.at[0].set(x[t % micro])
      outs, balance = stages(lax.with_sharding_constraint(inputs, cut), layers)
      index = t - jnp.arange(num)[:, None]
      busy = (index >= 0) & (index < micro)
      balance = balance if faulty else jnp.where(busy, balance, 0)  # FAULT
      return jnp.roll(outs, 1, axis=0), (outs[-1], balance.sum())

    inputs = jnp.zeros((num, *x.shape[1:]), x.dtype)
    _, (outs, balance) = lax.scan(tick, inputs, jnp.arange(micro + num - 1))
    return squared(outs[num - 1:], y).mean() + 0.02 * balance.sum() / micro

  def step(layers, batch):
    value, grads = jax.value_and_grad(loss)(layers, *batch)
    return sgd(layers, grads), {"loss": value}

  batch = tuple(x.reshape(micro, 16, 16) for x in regression(micro * 16))
  layers = {"router": weight(4, 4, 16, 4), "experts": weight(5, 4, 4, 16, 16)}
  step = jax.jit(step, in_shardings=(cut, NamedSharding(mesh, P())))
  return step, (layers, batch)


@register(data=8, small=True)
def rounded_before_reduction(layout: Layout, faulty: bool) -> Program:
  """Gradients are rounded to bfloat16 before, not after, they are reduced.

  NVIDIA/Megatron-LM#6624, pytorch/pytorch#190627.
  """
  def loss(params, x, y):
    return squared(mlp(params, x), y).mean()

  def step(state, batch):
    shards, momentum = state
    params = lax.all_gather(shards, "data", tiled=True)
    value, grads = jax.value_and_grad(loss)(params, *batch)
    wire = jnp.bfloat16 if faulty else jnp.float32  # FAULT
    grads = jax.tree.map(lambda g: g.astype(wire), grads)
    grads = lax.psum_scatter(grads, "data", tiled=True)
    grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads)
    num = lax.axis_size("data")
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g / num, momentum, grads)
    return (sgd(shards, momentum), momentum), {"loss": lax.pmean(value, "data")}

  mesh = mesh_of(layout, "data")
  params = mlp_params()
  momentum = jax.tree.map(np.zeros_like, params)
  step = spmd(step, mesh, (P("data"), P("data")), (P("data"), P()))
  return step, ((params, momentum), regression(64))


@register(tensor=4)
def padded_vocabulary(layout: Layout, faulty: bool) -> Program:
  """Columns that pad a vocabulary to a multiple of the ranks get probability.

  NVIDIA/Megatron-LM#1754: losses differ if the vocabulary does not divide.
  """
  mesh = mesh_of(layout, "tensor")
  words = 50
  padded = -(-words // mesh.size) * mesh.size

  def loss(params, ids, labels):
    head = jnp.pad(params["head"], ((0, 0), (0, padded - words)))
    cut = NamedSharding(mesh, P(None, "tensor"))
    head = lax.with_sharding_constraint(head, cut)
    x = params["table"][ids]
    x = x + mlp(params, x)
    real = jnp.arange(padded) < words
    logits = x @ head
    logits = logits if faulty else jnp.where(real, logits, -1e9)  # FAULT
    return cross_entropy(logits, labels).mean()

  def step(params, ids):
    value, grads = jax.value_and_grad(loss)(params, ids[:, :-1], ids[:, 1:])
    return sgd(params, grads), {"loss": value}

  params = {"table": normal(6, words, 16), "head": weight(7, 16, words)}
  return jax.jit(step), (params | mlp_params(), tokens(8, words, 4, 33))


@register(context=4, small=True)
def ring_backward_uses_own_keys(layout: Layout, faulty: bool) -> Program:
  """The backward pass of ring attention ignores the keys that it receives.

  huggingface/diffusers#14265: saved tensors are those of the first tick.
  """
  mesh = mesh_of(layout, "context")
  num = mesh.size
  ahead = [(i, (i + 1) % num) for i in range(num)]
  shift = functools.partial(lax.ppermute, axis_name="context", perm=ahead)

  def chunk(q, k, v):  # of sigmoid attention: a sum over keys
    return jax.nn.sigmoid(q @ k.T / 4 - 4) @ v

  def forward(q, *kv):
    outs = lax.scan(lambda z, _: (shift(z), chunk(q, *z)), kv, length=num)[1]
    return outs.sum(axis=0), (q, *kv)

  def backward(saved, grad):
    def tick(carry, _):
      kv, total = carry
      dq, *new = jax.vjp(chunk, q, *(own if faulty else kv))[1](grad)  # FAULT
      return shift((kv, jax.tree.map(jnp.add, total, new))), dq

    q, *own = saved
    (_, grads), dq = lax.scan(tick, (own, [0 * z for z in own]), length=num)
    return dq.sum(axis=0), *grads

  def loss(params, x, y):
    return squared(x + ring(*(x @ w for w in params)), y).mean()

  def step(params, batch):
    each = jax.value_and_grad(loss)(params, *batch)
    value, grads = lax.pmean(each, "context")
    return sgd(params, grads), {"loss": value}

  ring = jax.custom_vjp(lambda *qkv: forward(*qkv)[0])
  ring.defvjp(forward, backward)
  params = tuple(weight(seed, 16, 16) for seed in (4, 5, 6))
  step = spmd(step, mesh, (P(), P("context")), P(), check_vma=False)
  return step, (params, regression(64))


@register(data=4, small=True)
def first_microbatch_reduced(layout: Layout, faulty: bool) -> Program:
  """Accumulated gradients are reduced after the first microbatch, not the last.

  modelscope/FunASR#3472.
  """
  micro = 4

  def loss(params, x, y):
    return squared(mlp(params, x), y).mean()

  def step(params, batch):
    def accumulate(total, part):
      i, (x, y) = part
      value, grads = jax.value_and_grad(loss)(params, x, y)
      total = jax.tree.map(lambda t, g: t + g / micro, total, grads)
      done = i if faulty else i + 1  # FAULT
      total = lax.cond(
        done % micro == 0, lambda t: lax.pmean(t, "data"), lambda t: t, total
      )
      return total, value

    zeros = jax.tree.map(jnp.zeros_like, params)
    parts = jnp.arange(micro), batch
    grads, values = lax.scan(accumulate, zeros, parts)
    return sgd(params, grads), {"loss": lax.pmean(values.mean(), "data")}

  batch = tuple(x.reshape(micro, -1, 16) for x in regression(128))
  mesh = mesh_of(layout, "data")
  step = spmd(step, mesh, (P(), P(None, "data")), P(), check_vma=False)
  return step, (mlp_params(), batch)
