"""Training step with parameters cut over an axis.

It takes the model of another project: parameters are gathered as bfloat16,
gradients are reduced in float32. Run with `run_program.py` in an environment
that has jax.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import mesh_utils
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

FSDP = 4


def padded(size: int) -> int:
  """Returns the number of parameters with those that fill the last shard."""
  return -(-size // FSDP) * FSDP


def mesh_of(axis: str, size: int) -> Mesh:
  """Returns all devices on "data" and an axis of a size.

  The axes may divide those of a torus, which `jax.make_mesh` refuses.
  """
  devices = mesh_utils.create_device_mesh(
    (jax.device_count() // size, size), jax.devices(),
    allow_split_physical_axes=True,
  )
  return Mesh(devices, ("data", axis), axis_types=(AxisType.Auto,) * 2)


def sharded(
  init: Callable[[], Any], apply: Callable[[Any, jax.Array], jax.Array],
  batch: jax.ShapeDtypeStruct,
) -> tuple[Any, tuple[Any, ...]]:
  """Returns the jitted step and its arguments.

  Args:
    init: Function that returns the parameters; it is not executed.
    apply: Function from parameters and a batch to float32 outputs ``[n, out]``.
    batch: Batch of all devices.
  """
  mesh = mesh_of("fsdp", FSDP)
  example = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype),
                         jax.eval_shape(init))
  flat, unravel = ravel_pytree(example)
  size = flat.size

  def loss(whole, batch):
    y = apply(unravel(whole[:size].astype(flat.dtype)), batch)
    # Statistics over the workers, as in a normalisation.
    mean = lax.stop_gradient(lax.pmean(y.mean(0), "data"))
    return jnp.mean(jnp.tanh(y - mean) ** 2)

  def step(shard, batch):
    wire = shard.astype(jnp.bfloat16)
    whole = lax.all_gather(wire, "fsdp", tiled=True).astype(jnp.float32)
    value, grads = jax.value_and_grad(loss)(whole, batch)
    grads = lax.psum_scatter(grads, "fsdp", tiled=True)
    grads = lax.psum(grads, "data")
    return shard - 0.1 * grads, value[None]

  shaped = jax.shard_map(
    step, mesh=mesh, in_specs=(P("fsdp"), P(("data", "fsdp"))),
    out_specs=(P("fsdp"), P(("data", "fsdp"))), check_vma=False,
  )
  shard = jax.ShapeDtypeStruct(
    (padded(size),), jnp.float32, sharding=NamedSharding(mesh, P("fsdp"))
  )
  return jax.jit(shaped), (shard, batch)


def sends(size: int, outputs: int) -> dict[tuple[str, ...], int]:
  """Returns the bytes that a sound step sends: (axes, kind) -> bytes.

  Args:
    size: Number of parameters.
    outputs: Channels of the model's outputs.
  """
  part = padded(size) // FSDP
  return {
    ("fsdp", "all_gather"): 2 * part,
    ("fsdp", "reduce_scatter"): 4 * padded(size),
    ("data", "all_reduce"): 4 * part + 4 * outputs,
  }
