"""Ten further programs with planted faults.

They were written without knowledge of how the comparison works, and compared
once before it was developed further with them.
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


@register(stage=4, small=True)
def rescaled_in_every_round(layout: Layout, faulty: bool) -> Program:
  """All gradients so far are divided by the microbatches of each new round.

  pytorch/torchtitan#1733: what is accumulated becomes a moving average.
  """
  mesh = mesh_of(layout, "stage")
  num = mesh.size  # of stages, and of microbatches in a round
  cut = NamedSharding(mesh, P("stage"))

  @jax.vmap
  def stages(x, layers):
    return lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, layers)[0]

  def pipeline(layers, x, y):
    def tick(inputs, t):
      inputs = inputs.at[0].set(x[jnp.minimum(t, num - 1)])
      inputs = lax.with_sharding_constraint(inputs, cut)
      outs = stages(inputs, layers.reshape(num, -1, 16, 16))
      return jnp.roll(outs, 1, axis=0), outs[-1]

    _, outs = lax.scan(tick, jnp.zeros_like(x), jnp.arange(2 * num - 1))
    return squared(outs[num - 1:], y).mean(axis=1).sum()

  def step(layers, batch):
    def accumulate(total, part):
      value, new = jax.value_and_grad(pipeline)(layers, *part)
      total = (total + new) / num if faulty else total + new / num  # FAULT
      return total, value / num

    total, values = lax.scan(accumulate, jnp.zeros_like(layers), batch)
    return sgd(layers, total / len(values)), {"loss": values.mean()}

  batch = tuple(x.reshape(3, num, -1, 16) for x in regression(96))
  step = jax.jit(step, in_shardings=(cut, NamedSharding(mesh, P())))
  return step, (weight(4, 4, 16, 16), batch)


@register(data=2, context=2)
def whitened_over_data_only(layout: Layout, faulty: bool) -> Program:
  """Advantages get mean 0 and variance 1 on each part of the sequences.

  THUDM/slime#2235, radixark/miles#3229: the group lacks the context ranks.
  """
  mesh = mesh_of(layout, "data", "context")
  axes = data, _ = mesh.axis_names

  def whiten(values, mask):
    group = data if faulty else axes  # FAULT
    count = lax.psum(mask.sum(), group)
    centered = values - lax.psum((mask * values).sum(), group) / count
    square = lax.psum((mask * centered**2).sum(), group) / count
    return centered * lax.rsqrt(square + 1e-8)

  def loss(params, x, actions, old, advantages, mask):
    ratio = jnp.exp(-cross_entropy(mlp(params, x), actions) - old)
    clipped = jnp.clip(ratio, 0.8, 1.2)
    gain = jnp.minimum(ratio * advantages, clipped * advantages)
    return -lax.psum((mask * gain).sum(), axes) / lax.psum(mask.sum(), axes)

  def step(params, batch):
    *inputs, rewards, mask = batch
    inputs += [whiten(rewards, mask), mask]
    value, grads = jax.value_and_grad(loss)(params, *inputs)
    return sgd(params, grads), {"loss": value}

  x, actions = normal(1, 8, 32, 16), tokens(2, 16, 8, 32)
  old = 0.3 * normal(3, 8, 32) - np.float32(np.log(16))
  rewards = normal(6, 8, 32) + np.linspace(1, 0, 32, dtype=np.float32)
  mask = np.arange(32) < np.array([32, 30, 17, 25, 9, 32, 22, 13])[:, None]
  step = spmd(step, mesh, (P(), P(*axes)), P())
  return step, (mlp_params(), (x, actions, old, rewards, mask))


@register(data=4, small=True)
def mean_of_own_rows(layout: Layout, faulty: bool) -> Program:
  """Adafactor divides its row statistics by the mean of a rank's own rows.

  pytorch/pytorch#109581 names the reduction, hpcaitech/ColossalAI#5484 adds it.
  """
  def loss(shards, x, y):
    params = lax.all_gather(shards, "data", tiled=True)
    return lax.pmean(squared(mlp(params, x), y).mean(), "data")

  def adafactor(param, grad, row, column):
    row = 0.9 * row + 0.1 * (grad**2).mean(axis=1)
    column = 0.9 * column + 0.1 * lax.pmean((grad**2).mean(axis=0), "data")
    mean = row.mean() if faulty else lax.pmean(row.mean(), "data")  # FAULT
    scale = lax.rsqrt(row / mean)[:, None] * lax.rsqrt(column)[None]
    return param - 0.01 * scale * grad, row, column

  def step(state, batch):
    params, *stats = state
    value, grads = jax.value_and_grad(loss)(params, *batch)
    each = jax.tree.map(adafactor, params, grads, *stats)
    state = jax.tree.transpose(jax.tree.structure(params), None, each)
    return state, {"loss": value}

  params = mlp_params()
  rows = {k: 1e-3 * np.exp(normal(6, len(w))) for k, w in params.items()}
  columns = {k: 1e-3 * np.exp(normal(7, len(w.T))) for k, w in params.items()}
  specs = P("data"), P("data"), P()
  step = spmd(step, mesh_of(layout, "data"), (specs, P("data")), (specs, P()))
  return step, ((params, rows, columns), regression(64))


@register(tensor=4)
def slopes_of_first_heads(layout: Layout, faulty: bool) -> Program:
  """Every tensor rank biases its heads with the slopes of the first ones.

  bigscience-workshop/Megatron-DeepSpeed#227, flashinfer-ai/flashinfer#1606.
  """
  def block(x, layer):
    q, k, v = ((x @ layer[name]).reshape(len(x), -1, 4) for name in "qkv")
    local = q.shape[1]  # of 8 heads
    first = 0 if faulty else local * lax.axis_index("tensor")  # FAULT
    slopes = 2.0 ** -(first + jnp.arange(local) + 1)
    ago = jnp.arange(len(x))[:, None] - jnp.arange(len(x))[None]
    scores = jnp.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    scores = scores - slopes[:, None, None] * ago[None]
    probs = jax.nn.softmax(jnp.where(ago >= 0, scores, -1e30))
    out = jnp.einsum("hqk,khd->qhd", probs, v).reshape(len(x), -1)
    return x + lax.psum(out @ layer["out"], "tensor"), None

  def loss(layers, x, y):
    return squared(lax.scan(jax.checkpoint(block), x, layers)[0], y).mean()

  def step(layers, batch):
    value, grads = jax.value_and_grad(loss)(layers, *batch)
    return sgd(layers, grads), {"loss": value}

  specs = dict.fromkeys("qkv", P(None, None, "tensor"))
  specs["out"] = P(None, "tensor")
  layers = {name: weight(i, 2, 32, 32) for i, name in enumerate(specs, 4)}
  ins = specs, P()
  step = spmd(step, mesh_of(layout, "tensor"), ins, ins)
  return step, (layers, regression(48, 32))


@register(expert=4)
def combined_with_dispatched_gates(layout: Layout, faulty: bool) -> Program:
  """What experts return is weighted by gates that came from other ranks.

  vllm-project/vllm#52639: the exchange overwrites what the routing chose.
  """
  mesh = mesh_of(layout, "expert")

  def exchange(z):  # [experts, ...]: between tokens' ranks and experts' ranks
    parts = z.reshape(mesh.size, -1, *z.shape[1:])
    return lax.all_to_all(parts, "expert", 0, 0).reshape(z.shape)

  def block(x, layer):
    gates = jax.nn.softmax(x @ layer["router"])
    gates = jnp.where(gates >= lax.top_k(gates, 2)[0][:, 1:], gates, 0)
    slots = jnp.argsort(-gates.T, axis=1)  # those without a token are last
    gates = jnp.take_along_axis(gates.T, slots, axis=1)
    dispatched = exchange(gates)
    inputs = exchange(x[slots]) * (dispatched > 0)[..., None]
    inputs = inputs.reshape(mesh.size, -1, *inputs.shape[1:])
    outs = jnp.tanh(jnp.einsum("retw,ewv->retv", inputs, layer["experts"]))
    outs = exchange(outs.reshape(-1, *outs.shape[2:]))
    used = dispatched if faulty else gates  # FAULT
    return x.at[slots].add(used[..., None] * outs), None

  def loss(layers, x, y):
    x, _ = lax.scan(block, x, layers)
    return lax.pmean(squared(x, y).mean(), "expert")

  def step(layers, batch):
    value, grads = jax.value_and_grad(loss)(layers, *batch)
    return sgd(layers, grads), {"loss": value}

  specs = {"router": P(), "experts": P(None, "expert")}
  layers = {"router": weight(4, 2, 16, 8), "experts": weight(5, 2, 8, 16, 16)}
  step = spmd(step, mesh, (specs, P("expert")), (specs, P()))
  return step, (layers, regression(64))


@register(data=4, small=True)
def clipped_by_own_logits(layout: Layout, faulty: bool) -> Program:
  """Queries and keys are scaled down by the largest logits of a rank's batch.

  modelscope/ms-swift#9901, pytorch/torchtitan#4243: QK-Clip needs the maximum.
  """
  heads, limit = 4, 3.5

  def block(x, layer):
    parts = (x @ layer[name] for name in "qkv")
    q, k, v = (z.reshape(*x.shape[:2], heads, -1) for z in parts)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return x + out.reshape(x.shape), scores.max(axis=(0, 2, 3))

  def loss(layers, x, y):
    x, peaks = lax.scan(block, x, layers)  # [layers, heads]
    return squared(x, y).mean(), peaks

  def step(layers, batch):
    both = jax.value_and_grad(loss, has_aux=True)
    (value, peaks), grads = both(layers, *batch)
    value, grads = lax.pmean((value, grads), "data")
    peaks = peaks if faulty else lax.pmax(peaks, "data")  # FAULT
    scale = jnp.sqrt(jnp.minimum(1, limit / peaks))
    scale = jnp.repeat(scale, 16 // heads, axis=1)[:, None]
    layers = sgd(layers, grads)
    layers |= {name: scale * layers[name] for name in "qk"}
    return layers, {"loss": value}

  layers = {name: weight(i, 2, 16, 16) for i, name in enumerate("qkv", 4)}
  batch = tuple(x.reshape(16, 8, 16) for x in regression(128))
  ins = P(), P("data")
  step = spmd(step, mesh_of(layout, "data"), ins, P(), check_vma=False)
  return step, (layers, batch)


@register(data=4)
def same_noise_on_every_device(layout: Layout, faulty: bool) -> Program:
  """The noise of a row depends on its place among the rows of one device.

  Robbyant/lingbot-vla-v2#41, threestudio-project/threestudio#195.
  """
  mesh = mesh_of(layout, "data")
  rows = NamedSharding(mesh, P("data"))

  def loss(params, key, x):
    def draw(row):
      first, second = jax.random.split(jax.random.fold_in(key, row))
      noise = jax.random.normal(first, x.shape[1:], x.dtype)
      return noise, jax.random.uniform(second, (1,), x.dtype)

    ids = jnp.arange(len(x))
    ids = ids % (len(x) // mesh.size) if faulty else ids  # FAULT
    ids = lax.with_sharding_constraint(ids, rows)
    noise, time = jax.vmap(draw)(ids)
    mixed = jnp.concatenate([(1 - time) * x + time * noise, time], axis=1)
    return squared(mlp(params, mixed), noise - x).mean()

  def step(state, x):
    params, count = state
    key = jax.random.fold_in(jax.random.key(8), count)
    value, grads = jax.value_and_grad(loss)(params, key, x)
    return (sgd(params, grads), count + 1), {"loss": value}

  params = {"w_in": weight(4, 17, 32), "w_out": weight(5, 32, 16)}
  step = jax.jit(step, in_shardings=(NamedSharding(mesh, P()), rows))
  return step, ((params, np.int32(3)), regression(64)[0])


@register(data=8, small=True)
def padding_evaluated(layout: Layout, faulty: bool) -> Program:
  """Rows that are repeated to fill all devices are counted in an evaluation.

  pytorch/pytorch#25162, roboflow/rf-detr#1507.
  """
  mesh = mesh_of(layout, "data")
  whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

  def loss(params, x, labels):
    return cross_entropy(mlp(params, x), labels).mean()

  def evaluate(params, x, labels):
    real = len(x)
    padded = -(-real // mesh.size) * mesh.size
    order = jnp.arange(padded) % real
    x, labels = lax.with_sharding_constraint((x[order], labels[order]), rows)
    logits = mlp(params, x)
    counted = jnp.arange(padded) < (padded if faulty else real)  # FAULT
    each = {"eval_loss": cross_entropy(logits, labels)}
    each["accuracy"] = 1.0 * (logits.argmax(axis=1) == labels)
    return jax.tree.map(lambda z: z.mean(where=counted), each)

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, *batch[0])
    params = sgd(params, grads)
    return params, {"loss": value} | evaluate(params, *batch[1])

  train = normal(1, 64, 16), tokens(2, 16, 64)
  held_out = normal(3, 50, 16), tokens(6, 16, 50)
  step = jax.jit(step, in_shardings=(whole, (rows, whole)))
  return step, (mlp_params(), (train, held_out))


@register(stage=4)
def masks_of_entering_microbatch(layout: Layout, faulty: bool) -> Program:
  """All stages mask attention for the microbatch that enters the first one.

  pytorch/torchtitan#1723, NVIDIA/Megatron-LM#752: masks are not passed along.
  """
  mesh = mesh_of(layout, "stage")
  num, micro = mesh.size, 6
  cut = NamedSharding(mesh, P("stage"))

  @jax.checkpoint
  def stage(x, layers, document):
    mask = jnp.tri(len(x), dtype=bool) & (document[:, None] == document[None])
    for w in layers:
      q, k, v = jnp.split(x @ w, 3, axis=1)
      x = x + attend(q, k, v, mask)
    return x

  def loss(layers, x, y, documents):
    def tick(inputs, t):
      inputs = inputs.at[0].set(x[jnp.minimum(t, micro - 1)])
      inputs = lax.with_sharding_constraint(inputs, cut)
      behind = jnp.zeros(num, int) if faulty else jnp.arange(num)  # FAULT
      current = jnp.clip(t - behind, 0, micro - 1)
      outs = jax.vmap(stage)(inputs, layers, documents[current])
      return jnp.roll(outs, 1, axis=0), outs[-1]

    layers = layers.reshape(num, -1, *layers.shape[1:])
    inputs = jnp.zeros((num, *x.shape[1:]), x.dtype)
    _, outs = lax.scan(tick, inputs, jnp.arange(micro + num - 1))
    return squared(outs[num - 1:], y).mean()

  def step(layers, batch):
    value, grads = jax.value_and_grad(loss)(layers, *batch)
    return sgd(layers, grads), {"loss": value}

  batch = tuple(x.reshape(micro, 16, 16) for x in regression(micro * 16))
  documents = np.sort(tokens(6, 4, micro, 16), axis=1)
  step = jax.jit(step, in_shardings=(cut, NamedSharding(mesh, P())))
  return step, (weight(4, 4, 16, 48), (*batch, documents))


@register(tensor=4, small=True)
def target_subtracted_everywhere(layout: Layout, faulty: bool) -> Program:
  """Ranks without the target word subtract it from the gradients of another.

  modelscope/ms-swift#9947: only the rank that owns a target may subtract it.
  """
  def forward(logits, labels):
    peak = lax.pmax(logits.max(axis=1), "tensor")[:, None]
    parts = jnp.exp(logits - peak)
    total = lax.psum(parts.sum(axis=1, keepdims=True), "tensor")
    size = logits.shape[1]
    local = labels[:, None] - lax.axis_index("tensor") * size
    owned = (local >= 0) & (local < size)
    local = jnp.clip(local, 0, size - 1)
    target = jnp.where(owned, jnp.take_along_axis(logits, local, axis=1), 0)
    target = lax.psum(target, "tensor")
    loss = jnp.log(total) + peak - target
    return loss[:, 0], (parts / total, owned, local)

  def backward(saved, grad):
    probs, owned, local = saved
    hits = jnp.ones_like(owned) if faulty else owned  # FAULT
    rows = jnp.arange(len(probs))[:, None]
    return grad[:, None] * probs.at[rows, local].add(-1.0 * hits), None

  def loss(params, x, labels):
    logits = jax.nn.gelu(x @ params["hidden"]) @ params["head"]
    return token_loss(logits, labels).mean()

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    grads["hidden"] = lax.psum(grads["hidden"], "tensor")
    return sgd(params, grads), {"loss": value}

  token_loss = jax.custom_vjp(lambda *args: forward(*args)[0])
  token_loss.defvjp(forward, backward)
  ins = {"hidden": P(), "head": P(None, "tensor")}, P()
  step = spmd(step, mesh_of(layout, "tensor"), ins, ins, check_vma=False)
  params = {"hidden": weight(4, 16, 32), "head": weight(5, 32, 64)}
  return step, (params, (normal(6, 64, 16), tokens(7, 64, 64)))
