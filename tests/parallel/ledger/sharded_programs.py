"""Programs with automatic sharding, each with its explicit counterpart.

The automatic program computes on whole arrays whose dims are sharded, and XLA
inserts the communication. The explicit one computes on one device's part and
calls collectives. Both compiled programs must send the same bytes.
"""

import collections
from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.axes import Axis, make_mesh
from parallel.ledger import compiled, hlo


class Program(NamedTuple):
  """One computation with automatic and with explicit communication.

  Attributes:
    operands: Shape and spec of each operand.
    result: Spec of the result.
    automatic: Function of whole arrays.
    explicit: Function of one device's parts, under ``jax.shard_map``.
  """

  operands: tuple[tuple[tuple[int, ...], P], ...]
  result: Any
  automatic: Callable
  explicit: Callable


B, H, F, L = 128, 256, 512, 3  # batch, width, hidden width, layers
X = ((B, H), P("data"))
W_IN, W_OUT = ((H, F), P(None, "tensor")), ((F, H), P("tensor"))


def mlp(x, w_in, w_out):
  return jax.nn.relu(x @ w_in) @ w_out


def loss(x, w_in, w_out):
  return jnp.sum(mlp(x, w_in, w_out).astype(jnp.float32))


def explicit_gradients(x, w_in, w_out):
  """Differentiates by hand, as autodiff in ``shard_map`` inserts reductions."""
  hidden, transpose = jax.vjp(lambda w: jax.nn.relu(x @ w), w_in)
  ones = jnp.ones((x.shape[0], H), x.dtype)
  (d_in,) = transpose(ones @ w_out.T)
  return lax.psum((d_in, hidden.T @ ones), "data")


def layers(f):
  return lambda x, *ws: lax.scan(lambda x, w: (f(x, *w), None), x, ws)[0]


def stacked(operand):
  shape, spec = operand
  return (L, *shape), P(None, *spec)


def roll(x):
  """Sends the last rows of each device to the next one."""
  n = lax.axis_size("tensor")
  last = lax.ppermute(x[-8:], "tensor", [(i, (i + 1) % n) for i in range(n)])
  return jnp.concatenate([last, x[:-8]])


def explicit_mlp(x, w_in, w_out):
  return lax.psum(mlp(x, w_in, w_out), "tensor")


def explicit_sequence_mlp(x, w_in, w_out):
  x = lax.all_gather(x, "tensor", tiled=True)
  return lax.psum_scatter(
    mlp(x, w_in, w_out), "tensor", scatter_dimension=0, tiled=True
  )


PROGRAMS = {
  "tensor parallel": Program(
    (X, W_IN, W_OUT), P("data"), mlp, explicit_mlp
  ),
  "in layers": Program(
    (X, stacked(W_IN), stacked(W_OUT)), P("data"), layers(mlp),
    layers(explicit_mlp),
  ),
  "sequence parallel": Program(
    (((B, H), P("tensor")), W_IN, W_OUT), P("tensor"), mlp,
    explicit_sequence_mlp,
  ),
  "gradients": Program(
    (X, W_IN, W_OUT), (P(None, "tensor"), P("tensor")),
    jax.grad(loss, argnums=(1, 2)), explicit_gradients,
  ),
  "gathered weights": Program(
    (((F, H), P("data")),), P(), lambda w: 2 * w,
    lambda w: lax.all_gather(2 * w, "data", tiled=True),
  ),
  "one of two axes": Program(
    (((F, H), P(("data", "tensor"))),), P("data"), lambda w: 2 * w,
    lambda w: lax.all_gather(2 * w, "tensor", tiled=True),
  ),
  "both axes": Program(
    (((F, H), P(("data", "tensor"))),), P(), lambda w: 2 * w,
    lambda w: lax.all_gather(2 * w, ("data", "tensor"), tiled=True),
  ),
  "rows to columns": Program(
    (((B, H), P("tensor")),), P(None, "tensor"), lambda x: 2 * x,
    lambda x: lax.all_to_all(2 * x, "tensor", 1, 0, tiled=True),
  ),
  "shifted rows": Program(
    (((B, H), P("tensor")),), P("tensor"),
    lambda x: jnp.roll(x, 8, axis=0), roll,
  ),
}


def sent(program, sizes, devices, dtype="float32"):
  """Returns operand bytes by axes of the automatic and the explicit program."""
  mesh = make_mesh({n: Axis(n, s, s) for n, s in sizes.items()}, devices)

  def on_mesh(spec):
    return NamedSharding(mesh, spec)

  operands = [
    jax.ShapeDtypeStruct(shape, dtype, sharding=on_mesh(spec))
    for shape, spec in program.operands
  ]
  specs = tuple(spec for _, spec in program.operands)
  automatic = jax.jit(
    program.automatic, out_shardings=jax.tree.map(on_mesh, program.result)
  )
  explicit = jax.jit(jax.shard_map(
    program.explicit, mesh=mesh, in_specs=specs, out_specs=program.result,
    check_vma=False,
  ))
  found = []
  for f in (automatic, explicit):
    # Emitters of fusions, which `tests.users` selects, change no collective.
    module = hlo.parse(f.lower(*operands).compile().as_text())
    total = collections.Counter()
    for entry in compiled.collectives(module, mesh):
      if entry.bytes:
        # XLA may rename the axis, but all of its devices participate.
        assert entry.group_size == math.prod(sizes[n] for n in entry.axes)
        assert entry.wire_bytes_ring > 0
        total[entry.axes] += entry.count * entry.bytes
    found.append(total)
  return found
