"""Kernel programs lowered for devices that are not attached."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.axes import Axis, make_mesh
from parallel.collectives import varying
from parallel.kernels.add_norm import api as add_norm
from parallel.kernels.codec import api as codec_api
from parallel.kernels.codec import cases as codec_cases
from parallel.kernels.codec.reference import Encoded, OuterOptions
from parallel.kernels.gather_rows import api as gather_rows
from parallel.kernels.gather_rows import order as gather_order
from parallel.kernels.reduce_add_norm import api as reduce_add_norm
from parallel.ledger import targets


def on_targets(cases, first, *others):
  """Returns all cases on the first target, one large case on the others."""
  all_cases = (*cases.CASES.values(), *cases.LARGE.values())
  large = next(iter(cases.LARGE.values()))
  return [(first, case) for case in all_cases] + [(t, large) for t in others]


def codec_calls(first, *others):
  """Combines cases with operations; decoding omits stochastic codecs."""
  for target, case in on_targets(codec_cases, first, *others):
    yield from ((target, op, case) for op in ("plain", "delta", "fed"))
    if not case.codec.stochastic:
      yield from ((target, op, case) for op in ("mean", "nesterov"))


@functools.cache
def mesh_of(target, devices):
  found = targets.resolve(target).devices
  return make_mesh({"tensor": Axis("tensor", devices, devices)}, list(found))


def lowered(f, target, *operands, devices=1):
  """Lowers under ``shard_map`` with checked varying axes, as models do."""
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
  return jax.jit(mapped).lower(*operands)


def shapes(*pairs):
  return [jax.ShapeDtypeStruct(s, jnp.dtype(d)) for s, d in pairs]


def lowered_add_norm(case, target, implementation):
  """Lowers forward and backward as one program."""
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

  return lowered(both, target, *parts, *updates, gain, *parts, normed)


def lowered_codec(op, case, target, implementation):
  codec, n = case.codec, case.shape[-1]
  vector, wide, key, weights, payload, scales = shapes(
    (case.shape, case.dtype), (case.shape, "float32"), ((2,), "uint32"),
    ((case.senders,), "float32"),
    ((case.senders, *case.shape[:-1], codec.payload_bytes(n)), "uint8"),
    ((case.senders, *case.shape[:-1], codec.num_scales(n)), "float32"),
  )
  options = {"implementation": implementation}

  def key_of(words):
    return jax.random.wrap_key_data(words) if codec.stochastic else None

  ops = {
    "plain": (
      lambda x, k: codec_api.encode(x, codec, key_of(k), **options),
      (vector, key),
    ),
    "delta": (
      lambda a, x, k: codec_api.encode_delta(
        a, x, codec, key_of(k), **options
      )[0],
      (vector, vector, key),
    ),
    "fed": (
      lambda a, x, e, k: codec_api.encode_delta(
        a, x, codec, key_of(k), e, **options
      ),
      (vector, vector, wide, key),
    ),
    "mean": (
      lambda p, s, w: codec_api.mean(
        Encoded(p, s), n, codec, w, **options
      ),
      (payload, scales, weights),
    ),
    "nesterov": (
      lambda p, s, w, x, v: codec_api.nesterov(
        Encoded(p, s), x, v, codec, OuterOptions(0.7, 0.9), w, **options,
      ),
      (payload, scales, weights, wide, wide),
    ),
  }
  f, operands = ops[op]
  return lowered(f, target, *operands)


def lowered_reduce_add_norm(case, target, implementation):
  n, k, p = case.rows, case.shared, case.private
  blocks = k // case.block if case.block else 1
  shared, private, partial, scales, gain = shapes(
    ((n, k), case.dtype), ((n, p), case.dtype),
    ((case.ranks, n, k), "int8" if case.block else case.dtype),
    ((case.ranks, n, blocks), "float32"), ((k + p,), "float32"),
  )

  def f(shared, private, partial, scales, d_private, gain):
    return reduce_add_norm.reduce_add_norm(
      shared, private, partial, scales if case.block else None, d_private,
      gain, private_scale=case.private_scale, implementation=implementation,
    )

  return lowered(
    f, target, shared, private, partial, scales, private, gain
  )


def lowered_gather_rows(case, target, implementation):
  """Lowers a gather from a table in pinned host memory, if available."""
  mesh = mesh_of(target, 1)
  chosen = gather_rows.select_kernel(
    case.rows, case.width, jnp.dtype("float32"), implementation
  )
  words = case.rows * gather_order.padded_width(case.width)
  shape = (
    (-(-words // 2048), *gather_order.DMA_BLOCK) if implementation == "tpu"
    else (case.rows * case.width,)
  )
  host = NamedSharding(mesh, P(), memory_kind="pinned_host")
  each = NamedSharding(mesh, P("tensor"))

  def body(stored, ids):
    return gather_rows.gather_rows(stored, ids[0], case.width, chosen)[None]

  mapped = jax.shard_map(
    body, mesh=mesh, in_specs=(P(), P("tensor")), out_specs=P("tensor")
  )
  return jax.jit(mapped, in_shardings=(host, each)).lower(
    jax.ShapeDtypeStruct(shape, "float32", sharding=host),
    jax.ShapeDtypeStruct((1, case.ids), "int32", sharding=each),
  )
