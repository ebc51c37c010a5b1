"""Twenty programs with one planted fault each, for tests of the comparison."""

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
  adamw,
  adamw_state,
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


@register(data=4, small=True)
def gradients_not_reduced(layout: Layout, faulty: bool) -> Program:
  """Each data rank updates its replica of the weights with local gradients.

  ByteDance-Seed/VeOmni#1115: the group of the reduction has a single rank.
  """
  def loss(params, x, y):
    return squared(mlp(params, x), y).mean()

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    grads = grads if faulty else lax.pmean(grads, "data")  # FAULT
    return sgd(params, grads), {"loss": lax.pmean(value, "data")}

  mesh = mesh_of(layout, "data")
  step = spmd(step, mesh, (P(), P("data")), P(), check_vma=False)
  return step, (mlp_params(), regression(64))


@register(data=4, small=True)
def gradients_summed(layout: Layout, faulty: bool) -> Program:
  """Gradients of means per device are summed; AdamW hides the factor.

  pytorch/pytorch#160285: gradients are twice too large, loss curves agree.
  """
  mesh = mesh_of(layout, "data")

  def loss(params, x, y):
    return squared(mlp(params, x), y).mean()

  def reduced(grad):
    return grad.sum(axis=0) if faulty else grad.mean(axis=0)  # FAULT

  def step(state, batch):
    parts = jax.tree.map(
      lambda x: x.reshape(mesh.size, -1, x.shape[-1]), batch
    )
    each = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0, 0))
    values, grads = each(state["params"], *parts)
    grads = jax.tree.map(reduced, grads)
    return adamw(state, grads), {"loss": values.mean()}

  whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
  step = jax.jit(step, in_shardings=(whole, rows), out_shardings=whole)
  return step, (adamw_state(mlp_params()), regression(64))


@register(data=2, context=2, small=True)
def averaged_twice(layout: Layout, faulty: bool) -> Program:
  """Gradients of a mean over all tokens are averaged over context ranks again.

  NVIDIA/Megatron-LM#906 and #3672: a loss has one factor of an axis too many.
  """
  mesh = mesh_of(layout, "data", "context")
  axes = data, context = mesh.axis_names

  def loss(params, x, y):
    count = lax.psum(x.shape[0] * x.shape[1], axes)
    return squared(mlp(params, x), y).sum() / count

  def step(params, batch):
    value, g = jax.value_and_grad(loss)(params, *batch)
    g = lax.psum(g, data)
    g = lax.pmean(g, context) if faulty else lax.psum(g, context)  # FAULT
    return sgd(params, g), {"loss": lax.psum(value, axes)}

  batch = tuple(x.reshape(8, 16, 16) for x in regression(8 * 16))
  step = spmd(step, mesh, (P(), P(data, context)), P(), check_vma=False)
  return step, (mlp_params(), batch)


@register(data=4)
def mean_of_means(layout: Layout, faulty: bool) -> Program:
  """The loss is a mean of means per device, which have unequal token counts.

  huggingface/transformers#19494 and meta-pytorch/torchtune#1875.
  """
  mesh = mesh_of(layout, "data")

  def loss(params, x, y, mask):
    error = mask * squared(mlp(params, x), y)
    total = error.reshape(mesh.size, -1).sum(axis=1)
    count = mask.reshape(mesh.size, -1).sum(axis=1)
    count = count if faulty else count.mean(keepdims=True)  # FAULT
    return (total / count).mean()

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    return sgd(params, grads), {"loss": value}

  mask = (normal(6, 64) < np.linspace(-1, 1, 64)).astype(np.float32)
  whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
  step = jax.jit(step, in_shardings=(whole, rows), out_shardings=whole)
  return step, (mlp_params(), (*regression(64), mask))


@register(tensor=4, small=True)
def gain_gradient_local(layout: Layout, faulty: bool) -> Program:
  """Gradients of norm gains are not summed over ranks that share a sequence.

  NVIDIA/Megatron-LM#1446: tensor ranks disagree with sequence parallelism.
  """
  def block(x, layer):
    rows = lax.all_gather(rms_norm(x, layer["gain"]), "tensor", tiled=True)
    return x + lax.psum_scatter(mlp(layer, rows), "tensor", tiled=True), None

  def loss(layers, x, y):
    x, _ = lax.scan(jax.checkpoint(block), x, layers)
    return squared(x, y).sum() / lax.psum(x.shape[0], "tensor")

  def step(layers, batch):
    value, grads = jax.value_and_grad(loss)(layers, *batch)
    gain = grads["gain"]
    grads["gain"] = gain if faulty else lax.psum(gain, "tensor")  # FAULT
    return sgd(layers, grads), {"loss": lax.psum(value, "tensor")}

  specs = {
    "gain": P(), "w_in": P(None, None, "tensor"), "w_out": P(None, "tensor")
  }
  layers = {
    "gain": 1 + 0.1 * normal(6, 3, 16), "w_in": weight(4, 3, 16, 32),
    "w_out": 0.3 * weight(5, 3, 32, 16),
  }
  mesh = mesh_of(layout, "tensor")
  ins, outs = (specs, P("tensor")), (specs, P())
  step = spmd(step, mesh, ins, outs, check_vma=False)
  return step, (layers, regression(32))


@register(tensor=2)
def bias_on_every_rank(layout: Layout, faulty: bool) -> Program:
  """The bias of a row-parallel product is added before the sum over ranks.

  huggingface/text-generation-inference#1036, Wenyueh/MinivLLM#80.
  """
  total = functools.partial(lax.psum, axis_name="tensor")

  def block(x, layer):
    y, bias = mlp(layer, x), layer["bias"][None]
    y = total(y + bias) if faulty else total(y) + bias  # FAULT
    return x + y, None

  def loss(layers, x, y):
    x, _ = lax.scan(jax.checkpoint(block), x, layers)
    return squared(x, y).mean()

  def step(layers, batch):
    value, grads = jax.value_and_grad(loss)(layers, *batch)
    return sgd(layers, grads), {"loss": value}

  specs = {
    "bias": P(), "w_in": P(None, None, "tensor"), "w_out": P(None, "tensor")
  }
  layers = {
    "bias": 0.2 * normal(6, 3, 16), "w_in": weight(4, 3, 16, 32),
    "w_out": 0.3 * weight(5, 3, 32, 16),
  }
  step = spmd(step, mesh_of(layout, "tensor"), (specs, P()), (specs, P()))
  return step, (layers, regression(32))


@register(tensor=4, small=True)
def clipped_by_local_norm(layout: Layout, faulty: bool) -> Program:
  """Each tensor rank clips its part of the gradients by its own norm.

  hpcaitech/ColossalAI#2192, NVIDIA/Megatron-LM#5916.
  """
  def loss(params, x, y):
    return squared(lax.psum(mlp(params, x), "tensor"), y).mean()

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    square = sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))
    square = square if faulty else lax.psum(square, "tensor")  # FAULT
    scale = 0.1 / jnp.maximum(jnp.sqrt(square), 0.1)
    grads = jax.tree.map(lambda g: scale * g, grads)
    return sgd(params, grads, rate=1.0), {"loss": value}

  mesh = mesh_of(layout, "tensor")
  specs = {"w_in": P(None, "tensor"), "w_out": P("tensor")}
  step = spmd(step, mesh, (specs, P()), (specs, P()))
  return step, (mlp_params(), regression(64))


@register(data=4, small=True)
def decayed_by_every_rank(layout: Layout, faulty: bool) -> Program:
  """Each rank adds the whole weight decay to gradients that are then summed.

  No public report is known.
  """
  params, unflatten = ravel_pytree(mlp_params())

  def loss(flat, x, y):
    return squared(mlp(unflatten(flat), x), y).mean()

  def step(shard, batch):
    num = lax.axis_size("data")
    flat = lax.all_gather(shard, "data", tiled=True)
    value, grad = jax.value_and_grad(loss)(flat, *batch)
    share = flat if faulty else flat / num  # FAULT
    grad = grad / num + 0.1 * share
    grad = lax.psum_scatter(grad, "data", tiled=True)
    return sgd(shard, grad), {"loss": lax.pmean(value, "data")}

  mesh = mesh_of(layout, "data")
  step = spmd(step, mesh, (P("data"), P("data")), (P("data"), P()))
  return step, (np.asarray(params), regression(64))


@register(context=4)
def gathered_in_wrong_order(layout: Layout, faulty: bool) -> Program:
  """Gathered keys and values are merged with tokens before ranks.

  THUDM/slime#1871 (order of tokens), pytorch/torchtitan#3206 (dimension).
  """
  def loss(params, x, y):
    num, width = x.shape
    kv = lax.all_gather(x @ params["kv"], "context")  # [ranks, tokens, 2 width]
    kv = kv.swapaxes(0, 1) if faulty else kv  # FAULT
    k, v = jnp.split(kv.reshape(-1, 2 * width), 2, axis=1)
    rows = lax.axis_index("context") * num + jnp.arange(num)
    mask = jnp.arange(len(k))[None] <= rows[:, None]
    out = x + attend(x @ params["q"], k, v, mask) @ params["out"]
    return lax.pmean(squared(out, y).mean(), "context")

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    return sgd(params, grads), {"loss": value}

  mesh = mesh_of(layout, "context")
  params = {
    "q": weight(4, 16, 16), "kv": weight(5, 16, 32), "out": weight(6, 16, 16)
  }
  step = spmd(step, mesh, (P(), P("context")), P())
  return step, (params, regression(64))


@register(tensor=4)
def ring_reversed(layout: Layout, faulty: bool) -> Program:
  """A ring sends rows to the previous rank, and places them as if to the next.

  No public report is known.
  """
  mesh = mesh_of(layout, "tensor")
  num = mesh.size
  ahead = [(i, (i + 1) % num) for i in range(num)]
  back = [(i, (i - 1) % num) for i in range(num)]

  def gather_product(x, w):
    def tick(x, _):
      y = x @ w
      return lax.ppermute(x, "tensor", back if faulty else ahead), y  # FAULT

    _, parts = lax.scan(tick, x, length=num)
    order = (lax.axis_index("tensor") - jnp.arange(num)) % num
    return parts[order].reshape(-1, w.shape[1])

  def loss(params, x, y):
    hidden = jax.nn.gelu(gather_product(x, params["w_in"]))
    out = lax.psum_scatter(hidden @ params["w_out"], "tensor", tiled=True)
    return lax.pmean(squared(out, y).mean(), "tensor")

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    return sgd(params, grads), {"loss": value}

  specs = {"w_in": P(None, "tensor"), "w_out": P("tensor")}
  step = spmd(step, mesh, (specs, P("tensor")), (specs, P()))
  return step, (mlp_params(), regression(64))


@register(stage=4)
def stale_activation(layout: Layout, faulty: bool) -> Program:
  """Pipeline stages read what they received one tick before the last one.

  No public report is known.
  """
  mesh = mesh_of(layout, "stage")
  num, micro = mesh.size, 6
  ahead = [(i, (i + 1) % num) for i in range(num)]

  def apply(layers, x):
    return lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, layers)[0]

  def loss(layers, x, y):
    def tick(received, t):
      new, old = received
      source = old if faulty else new  # FAULT
      fresh = x[jnp.minimum(t, micro - 1)]
      stage = lax.axis_index("stage")
      out = apply(layers, jnp.where(stage == 0, fresh, source))
      return (lax.ppermute(out, "stage", ahead), new), out

    zeros = lax.pcast(jnp.zeros_like(x[0]), "stage", to="varying")
    _, outs = lax.scan(tick, (zeros, zeros), jnp.arange(micro + num - 1))
    value = squared(outs[num - 1:], y).mean()
    last = lax.axis_index("stage") == num - 1
    return lax.psum(jnp.where(last, value, 0), "stage")

  def step(layers, batch):
    value, grads = jax.value_and_grad(loss)(layers, *batch)
    return sgd(layers, grads), {"loss": value}

  batch = tuple(x.reshape(micro, 8, 16) for x in regression(micro * 8))
  step = spmd(step, mesh, (P("stage"), P()), (P("stage"), P()))
  return step, (weight(4, 4, 16, 16), batch)


@register(data=4, tensor=2, small=True)
def scatter_divides_by_other_axis(layout: Layout, faulty: bool) -> Program:
  """The backward pass of gathered weights divides by the size of another axis.

  NVIDIA/Megatron-LM#5956: expert gradients are divided by too small a group.
  """
  @jax.custom_vjp
  def gather(w):
    return lax.all_gather(w, "data", tiled=True)

  def backward(_, grad):
    own, other = lax.axis_size("data"), lax.axis_size("tensor")
    grad = lax.psum_scatter(grad, "data", tiled=True)
    return (grad / other if faulty else grad / own,)  # FAULT

  gather.defvjp(lambda w: (gather(w), None), backward)

  def loss(params, x, y):
    params = {"w_in": gather(params["w_in"]), "w_out": params["w_out"]}
    return squared(lax.psum(mlp(params, x), "tensor"), y).mean()

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    grads["w_out"] /= lax.axis_size("data")  # a sum, as it is replicated
    return sgd(params, grads), {"loss": lax.pmean(value, "data")}

  mesh = mesh_of(layout, "data", "tensor")
  specs = {"w_in": P("data", "tensor"), "w_out": P("tensor")}
  step = spmd(step, mesh, (specs, P("data")), (specs, P()))
  return step, (mlp_params(), regression(64))


@register(tensor=4)
def lookup_without_mask(layout: Layout, faulty: bool) -> Program:
  """Ids outside a rank's part of the vocabulary add the nearest row.

  NVIDIA/Megatron-LM#926 and deepseek-ai/DeepSeek-V3#298 discuss the mask.
  """
  def loss(params, ids, labels):
    size = len(params["table"])
    local = ids - lax.axis_index("tensor") * size
    rows = params["table"][jnp.clip(local, 0, size - 1)]
    inside = ((local >= 0) & (local < size))[..., None]
    rows = rows if faulty else jnp.where(inside, rows, 0)  # FAULT
    x = lax.psum(rows, "tensor").mean(axis=1)  # [sequences, width]
    return cross_entropy(x @ params["head"], labels).mean()

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    return sgd(params, grads), {"loss": value}

  mesh = mesh_of(layout, "tensor")
  specs = {"table": P("tensor"), "head": P()}
  params = {"table": normal(4, 64, 16), "head": weight(5, 16, 10)}
  batch = tokens(6, 64, 32, 8), tokens(7, 10, 32)
  step = spmd(step, mesh, (specs, P()), (specs, P()))
  return step, (params, batch)


@register(tensor=4)
def local_maximum(layout: Layout, faulty: bool) -> Program:
  """Each rank subtracts the maximum of its own part of the vocabulary.

  bigscience-workshop/Megatron-DeepSpeed#394 asks about a loss 1% apart.
  """
  def loss(params, x, labels):
    logits = jnp.tanh(x @ params["hidden"]) @ params["head"]
    peak = lax.stop_gradient(logits.max(axis=1))
    peak = peak if faulty else lax.pmax(peak, "tensor")  # FAULT
    total = lax.psum(jnp.exp(logits - peak[:, None]).sum(axis=1), "tensor")
    size = logits.shape[1]
    local = labels - lax.axis_index("tensor") * size
    target = jax.nn.one_hot(local, size)  # zeros outside this rank's part
    target = lax.psum((target * logits).sum(axis=1), "tensor")
    return (jnp.log(total) + peak - target).mean() / lax.axis_size("tensor")

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    grads["hidden"] = lax.psum(grads["hidden"], "tensor")
    return sgd(params, grads), {"loss": lax.psum(value, "tensor")}

  mesh = mesh_of(layout, "tensor")
  specs = {"hidden": P(), "head": P(None, "tensor")}
  params = {"hidden": weight(4, 16, 32), "head": 2 * weight(5, 32, 64)}
  batch = normal(6, 64, 16), tokens(7, 64, 64)
  step = spmd(step, mesh, (specs, P()), (specs, P()), check_vma=False)
  return step, (params, batch)


@register(data=4, small=True)
def momentum_of_local_gradients(layout: Layout, faulty: bool) -> Program:
  """Nesterov momentum accumulates gradients before they are reduced.

  No public report is known.
  """
  def loss(params, x, y):
    return squared(mlp(params, x), y).mean()

  def step(state, batch):
    value, grads = jax.value_and_grad(loss)(state["params"], *batch)
    mean = lax.pmean(grads, "data")
    source = grads if faulty else mean  # FAULT
    momentum = jax.tree.map(
      lambda m, g: 0.9 * m + g, state["momentum"], source
    )
    update = jax.tree.map(lambda g, m: g + 0.9 * m, mean, momentum)
    params = sgd(state["params"], update, rate=0.03)
    state = {"params": params, "momentum": momentum}
    return state, {"loss": lax.pmean(value, "data")}

  params = mlp_params()
  momentum = jax.tree.map(lambda p: 0.1 * p[::-1], params)
  mesh = mesh_of(layout, "data")
  step = spmd(step, mesh, (P(), P("data")), P(), check_vma=False)
  return step, ({"params": params, "momentum": momentum}, regression(64))


@register(data=4)
def last_microbatches_dropped(layout: Layout, faulty: bool) -> Program:
  """The last round of microbatches, which some ranks lack, is dropped.

  ml-explore/mlx-lm#1413 describes a dropped partial window.
  """
  mesh = mesh_of(layout, "data")
  num, micro = mesh.size, 10  # padded to 16 microbatches, dealt out in rounds

  def loss(params, x, y):
    return squared(mlp(params, x), y).mean()

  def local(params, batch):
    def accumulate(total, part):
      i, (x, y) = part
      own, last = i * num + lax.axis_index("data"), (i + 1) * num - 1
      use = jnp.float32((last if faulty else own) < micro)  # FAULT
      one = jax.value_and_grad(loss)(params, x[0], y[0])
      return jax.tree.map(lambda t, v: t + use * v, total, (use, one)), None

    zeros = (0.0, (0.0, jax.tree.map(jnp.zeros_like, params)))
    rounds = jnp.arange(len(batch[0])), batch
    total, _ = lax.scan(accumulate, zeros, rounds)
    count, (value, grads) = lax.psum(total, "data")
    grads = jax.tree.map(lambda g: g / count, grads)
    return sgd(params, grads), {"loss": value / count}

  def step(params, batch):
    batch = jax.tree.map(lambda x: x.reshape(-1, num, *x.shape[1:]), batch)
    return inner(params, batch)

  inner = spmd(local, mesh, (P(), P(None, "data")), P(), check_vma=False)
  batch = tuple(x.reshape(16, 4, 16) for x in regression(64))
  return jax.jit(step), (mlp_params(), batch)


@register(expert=4, small=True)
def expert_drops_last_token(layout: Layout, faulty: bool) -> Program:
  """The number of tokens of a rank is rounded down, which drops the last one.

  pytorch/torchtitan#3193 pads the count that does not divide.
  """
  mesh = mesh_of(layout, "expert")
  total, padded = 2001, 2004
  down, up = total // mesh.size, -(-total // mesh.size)

  def loss(params, x, y, valid):
    inside = jnp.arange(len(x)) < (down if faulty else up)  # FAULT
    used = jnp.where(inside, valid, 0)
    gates = jax.nn.softmax(x @ params["router"]) * used[:, None]
    choice = jax.nn.one_hot(gates.argmax(axis=1), 4)
    sent = choice.T[..., None] * x[None]  # [experts, tokens, width]
    mine = lax.all_to_all(sent, "expert", 0, 1, tiled=True)
    mine = jnp.tanh(mine @ params["experts"])
    back = lax.all_to_all(mine, "expert", 1, 0, tiled=True)
    out = x + jnp.einsum("te,etd->td", gates * choice, back)
    return lax.psum((valid * squared(out, y)).sum(), "expert") / total

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    return sgd(params, grads), {"loss": value}

  specs = {"router": P(), "experts": P("expert")}
  params = {"router": weight(4, 8, 4), "experts": weight(5, 4, 8, 8)}
  valid = (np.arange(padded) < total).astype(np.float32)
  step = spmd(step, mesh, (specs, P("expert")), (specs, P()))
  return step, (params, (*regression(padded, 8), valid))


@register(context=4)
def local_causal_mask(layout: Layout, faulty: bool) -> Program:
  """The causal mask counts queries from the start of the rank's own part.

  zhuzilin/ring-flash-attention#54 asks how the mask has to be cut.
  """
  def block(x, layer):
    num = len(x)
    start = 0 if faulty else lax.axis_index("context") * num  # FAULT
    whole = lax.all_gather(x, "context", tiled=True)
    mask = jnp.arange(len(whole))[None] <= start + jnp.arange(num)[:, None]
    v = whole @ layer["v"]
    return x + attend(x @ layer["q"], whole @ layer["k"], v, mask), None

  def loss(layers, x, y):
    x, _ = lax.scan(jax.checkpoint(block), x, layers)
    return lax.pmean(squared(x, y).mean(), "context")

  def step(layers, batch):
    value, grads = jax.value_and_grad(loss)(layers, *batch)
    return sgd(layers, grads), {"loss": value}

  mesh = mesh_of(layout, "context")
  layers = {
    "q": weight(4, 2, 16, 16), "k": weight(5, 2, 16, 16),
    "v": 0.5 * weight(6, 2, 16, 16),
  }
  step = spmd(step, mesh, (P(), P("context")), P())
  return step, (layers, regression(64))


@register(data=4, small=True)
def gather_backward_slices(layout: Layout, faulty: bool) -> Program:
  """The backward pass of a gather ignores the gradients of the other ranks.

  pytorch/xla#5784, lightly-ai/lightly#1531, mlfoundations/open_clip#616.
  """
  @jax.custom_vjp
  def gather(x):
    return lax.all_gather(x, "data", tiled=True)

  def backward(_, grad):
    grad = grad if faulty else lax.psum(grad, "data")  # FAULT
    num = len(grad) // lax.axis_size("data")
    start = lax.axis_index("data") * num
    return (lax.dynamic_slice_in_dim(grad, start, num),)

  gather.defvjp(lambda x: (gather(x), None), backward)

  def loss(params, images, texts):
    images, texts = images @ params["image"], texts @ params["text"]
    logits = images @ gather(texts).T
    labels = lax.axis_index("data") * len(images) + jnp.arange(len(images))
    return lax.pmean(cross_entropy(logits, labels).mean(), "data")

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    return sgd(params, grads), {"loss": value}

  mesh = mesh_of(layout, "data")
  params = {"image": weight(4, 16, 8), "text": weight(5, 16, 8)}
  step = spmd(step, mesh, (P(), P("data")), P())
  return step, (params, regression(32))


@register(data=4, small=True)
def shard_orthogonalized(layout: Layout, faulty: bool) -> Program:
  """Newton-Schulz iterations of Muon use the Gram matrix of a rank's own rows.

  NVIDIA/Megatron-LM#5961 names the difference to the whole matrix.
  """
  def orthogonal(x):
    def iterate(x, _):
      gram = x.T @ x
      gram = gram if faulty else lax.psum(gram, "data")  # FAULT
      return x @ (3.4445 * eye - 4.775 * gram + 2.0315 * gram @ gram), None

    eye = jnp.eye(x.shape[1])
    norm = jnp.sqrt(lax.psum(jnp.sum(x**2), "data"))
    return lax.scan(iterate, x / norm, length=5)[0]

  def loss(shard, x, y):
    w = lax.all_gather(shard, "data", tiled=True)
    return lax.pmean(squared(jnp.tanh(x @ w), y).mean(), "data")

  def step(state, batch):
    shard, momentum = state
    value, grad = jax.value_and_grad(loss)(shard, *batch)
    momentum = 0.9 * momentum + grad
    shard = shard - 0.02 * orthogonal(momentum)
    return (shard, momentum), {"loss": value}

  mesh = mesh_of(layout, "data")
  state = weight(4, 16, 16), 0.1 * weight(5, 16, 16)
  step = spmd(step, mesh, (P("data"), P("data")), (P("data"), P()))
  return step, (state, regression(64))
