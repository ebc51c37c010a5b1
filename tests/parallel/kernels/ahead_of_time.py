"""Kernels compiled for devices that are not here."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.axes import Axis, make_mesh
from parallel.collectives import varying
from parallel.kernels.add_norm import api as add_norm
from parallel.xla import targets


@functools.cache
def mesh_of(target, devices):
  found = targets.resolve(target).devices
  return make_mesh({"tensor": Axis("tensor", devices, devices)}, list(found))


def compiled(f, target, *operands, devices=1):
  """Under ``shard_map`` with checked varying axes, as the models run it."""
  mesh = mesh_of(target, devices)
  operands = [
    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))
    for x in operands
  ]

  def body(*operands):
    operands = [varying(x, "tensor") for x in operands]
    return jax.tree.map(lambda x: x[None], f(*operands))

  mapped = jax.shard_map(
    body, mesh=mesh, in_specs=P(), out_specs=P("tensor")
  )
  return jax.jit(mapped).lower(*operands).compile()


def shapes(*pairs):
  return [jax.ShapeDtypeStruct(s, jnp.dtype(d)) for s, d in pairs]


def compiled_add_norm(case, target, implementation):
  """Forward and backward in one program."""
  n, width, dtype = case.rows, case.shared + case.private, case.dtype
  parts = shapes(((n, case.shared), dtype), ((n, case.private), dtype))
  gain, normed = shapes(((width,), "float32"), ((n, width), dtype))
  updates = parts if case.update else []

  def both(*operands):
    *stream, gain = operands[:-3]
    stream = (*stream, None, None)[:4]
    out, transpose = jax.vjp(
      functools.partial(
        add_norm.add_norm, private_scale=case.private_scale,
        implementation=implementation,
      ),
      *stream, gain,
    )
    gradients = transpose(operands[-3:])
    return out, [g for g in gradients if g is not None]

  return compiled(both, target, *parts, *updates, gain, *parts, normed)
