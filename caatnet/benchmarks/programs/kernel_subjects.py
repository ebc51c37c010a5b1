"""Subjects of the kernel benchmark: each op with each of its cases."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np

from parallel.kernels.add_norm import api as add_norm
from parallel.kernels.add_norm import cases as add_norm_cases
from parallel.kernels.codec import api as codec
from parallel.kernels.codec import cases as codec_cases
from parallel.kernels.codec import reference as codec_reference
from parallel.kernels.codec.reference import Encoded, OuterOptions
from parallel.kernels.gather_rows import api as gather_rows
from parallel.kernels.gather_rows import cases as gather_cases
from parallel.kernels.gather_rows import order
from parallel.kernels.gather_rows import reference as gather_reference
from parallel.kernels.reduce_add_norm import api as reduce_add_norm
from parallel.kernels.reduce_add_norm import cases as reduce_cases
from parallel.kernels.selection import KERNELS, SelectedKernel

# Outer step of the op "nesterov".
_OUTER = OuterOptions(learning_rate=0.7, decay=0.9)


@dataclasses.dataclass(frozen=True)
class Subject:
  """One op with the shapes and dtypes of one case.

  Attributes:
    op: Name of the op, one of ``config.benchmark.ops``.
    case: Label of the shapes and dtypes.
    num_bytes: Least number of bytes that the op must read and write.
    choose: Function from implementations in order of preference to the one
      that is selected for the case.
    run: The op, called with the operands and ``implementation=``.
    stages: The reference split into functions. Each takes the results of the
      previous one, then the operands.
    draw: Function that returns random operands for a seed.
    from_host: Whether the first operand is a table of rows that kernels read
      from the host's memory, laid out by `gather_rows.order`. The reference has
      it on the device.
  """

  op: str
  case: str
  num_bytes: int
  choose: Callable[[Any], SelectedKernel]
  run: Callable[..., Any]
  stages: Sequence[Callable[..., Any]]
  draw: Callable[[int], tuple[jax.Array, ...]]
  from_host: bool = False

  def operands(self, seed: int, implementation: str) -> tuple[jax.Array, ...]:
    """Draws operands, and places them where an implementation reads them."""
    drawn = self.draw(seed)
    if not self.from_host:
      return drawn
    table, *others = drawn
    stored = order.lay_out_table(np.asarray(table), _kind(implementation))
    (device,) = table.devices()
    return jax.device_put(
      stored, _table_sharding(device, implementation)
    ), *others

  def shapes(
    self, implementation: str, device: jax.Device
  ) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns shapes, dtypes and shardings of an implementation's operands.

    Args:
      implementation: A kernel or "reference".
      device: Device that holds them; it may be a target's.
    """
    drawn = jax.eval_shape(lambda: self.draw(0))
    there = SingleDeviceSharding(device)
    shapes = [
      jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there) for x in drawn
    ]
    if self.from_host:
      shapes[0] = jax.ShapeDtypeStruct(
        order.stored_shape(*drawn[0].shape, _kind(implementation)),
        drawn[0].dtype, sharding=_table_sharding(device, implementation),
      )
    return tuple(shapes)

  def reads(self, implementation: str) -> dict[tuple[int, ...], float]:
    """Returns shape -> bytes read, for arrays that are not read entirely.

    It is empty for tables on the device, and for the reference, whose HLO shows
    the bytes that it reads.
    """
    kind = _kind(implementation)
    if not self.from_host or kind == "reference":
      return {}
    table, ids = jax.eval_shape(lambda: self.draw(0))
    waste = order.read_amplification(table.shape[1], kind)
    stored = order.stored_shape(*table.shape, kind)
    # Rows are float32; `waste` is the number of bytes read per useful byte.
    return {stored: waste * 4 * table.shape[1] * ids.size}


def _kind(implementation: str) -> str:
  return SelectedKernel(implementation, {}).kind


def _table_sharding(
  device: jax.Device, implementation: str
) -> SingleDeviceSharding:
  """Returns the sharding of an operand that kernels read from host memory.

  The interpreter and the reference have it on the device.
  """
  is_compiled = any(implementation in names for names in KERNELS.values())
  return SingleDeviceSharding(
    device, memory_kind="pinned_host" if is_compiled else None
  )


def _normal(seed: int, *shapes: tuple[tuple[int, ...], str]):
  """Draws a normal array for each pair of shape and dtype."""
  keys = jax.random.split(jax.random.key(seed), len(shapes))
  return tuple(
    jax.random.normal(key, shape).astype(dtype)
    for key, (shape, dtype) in zip(keys, shapes, strict=True)
  )


def _add_norm_subject(name: str, case: Any, backward: bool = False) -> Subject:
  """Returns the subject of add-and-normalise for a case."""
  n, k, p, dtype = case.rows, case.shared, case.private, case.dtype
  parts = (((n, k), dtype), ((n, p), dtype))
  operands = (*parts, *(parts if case.update else ()), ((k + p,), "float32"))
  if backward:
    operands += (*parts, ((n, k + p), dtype))
  run = functools.partial(
    _add_norm_backward if backward else _add_norm_forward, case
  )
  stages = (functools.partial(_add, case), _norm)
  if backward:
    stages = (functools.partial(run, implementation="reference"),)
  return Subject(
    "add_norm_backward" if backward else "add_norm", name,
    case.forward_bytes + (case.backward_bytes if backward else 0),
    functools.partial(
      add_norm.select_kernel, *(jax.ShapeDtypeStruct(*x) for x in parts)
    ),
    run, stages, lambda seed: _normal(seed, *operands),
  )


def _add_norm_call(case: Any, shared, private, *rest, implementation: str):
  *d, gain = rest
  return add_norm.add_norm(
    shared, private, *(d or (None, None)), gain,
    private_scale=case.private_scale, implementation=implementation,
  )


# Results that equal another operand or result are omitted, since XLA would copy
# them: the stream without an update, and the gradient of the shared update,
# which equals that of the stream.


def _add_norm_forward(case: Any, *operands, implementation: str):
  out = _add_norm_call(case, *operands, implementation=implementation)
  return out if case.update else out[-1:]


def _add_norm_backward(case: Any, *operands, implementation: str):
  operands, cotangents = operands[:-3], operands[-3:]
  # The results are returned as well. Otherwise XLA's program would not write
  # the normalised rows, which a training step keeps.
  out, transpose = jax.vjp(
    functools.partial(_add_norm_call, case, implementation=implementation),
    *operands,
  )
  gradients = transpose(cotangents)
  if not case.update:
    return out[-1:], gradients
  return out, gradients[:2] + gradients[3:]


def _add(case: Any, shared, private, *rest):
  if len(rest) < 3:
    return shared, private
  return shared + rest[0], private + _scaled(case, rest[1])


def _scaled(case: Any, update: jax.Array) -> jax.Array:
  return update * jnp.asarray(case.private_scale, update.dtype)


def _norm(shared, private, *rest):
  return add_norm.add_norm(
    shared, private, None, None, rest[-1], implementation="reference"
  )


def _reduce_subject(name: str, case: Any) -> Subject:
  """Returns the subject of reduce-add-normalise for a case.

  Operands are shared and private channels of the residual stream, the ranks'
  partial sums and their scales, the private update, and the gain of the norm.
  """
  n, k, p, dtype = case.rows, case.shared, case.private, case.dtype
  blocks = k // case.block if case.block else 1  # scales per row

  def draw(seed):
    shared, private, d_private, partial, scales, gain = _normal(
      seed, ((n, k), dtype), ((n, p), dtype), ((n, p), dtype),
      ((case.ranks, n, k), dtype), ((case.ranks, n, blocks), "float32"),
      ((k + p,), "float32"),
    )
    if case.block:
      partial = (32 * partial).astype(jnp.int8)
    return shared, private, partial, scales, d_private, gain

  def run(*operands, implementation):
    shared, private, partial, scales, *others = operands
    return reduce_add_norm.reduce_add_norm(
      shared, private, partial, scales if case.block else None, *others,
      private_scale=case.private_scale, implementation=implementation,
    )

  def total(shared, private, partial, scales, *_):
    wide = partial.astype(jnp.float32)
    if case.block:
      wide = wide * jnp.repeat(scales, case.block, axis=-1)
    return (wide.sum(0).astype(shared.dtype),)  # sum over ranks

  def add(update, shared, private, *others):
    return shared + update, private + _scaled(case, others[-2])

  shapes = jax.eval_shape(draw, 0)
  scales = shapes[3] if case.block else None
  return Subject(
    "reduce_add_norm", name, case.forward_bytes,
    functools.partial(reduce_add_norm.select_kernel, *shapes[:3], scales),
    run, (total, add, _norm), draw,
  )


def _codec_subject(
  op: str, name: str, case: Any, num_bytes: int, run: Callable[..., Any],
  stages: Sequence[Callable[..., Any]],
) -> Subject:
  """Returns the subject of an op of the codec for a case."""
  c = case.codec

  def draw(seed):
    a, b, e, v = _normal(
      seed,
      *((case.shape, case.dtype) for _ in range(2)),
      *((case.shape, "float32") for _ in range(2)),
    )
    if op == "encode":
      return a, b, e
    one = codec_reference.encode(a, c)
    many = jax.tree.map(lambda x: jnp.stack([x] * case.senders), one)
    return (*many, e, v) if op == "nesterov" else tuple(many)

  choose = functools.partial(
    codec.select_kernel, case.shape, c, key=_rounding_key(c),
    senders=1 if op == "encode" else case.senders,
  )
  return Subject(op, name, num_bytes, choose, run, stages, draw)


def _rounding_key(codec: Any) -> jax.Array | None:
  return jax.random.key(7) if codec.stochastic else None


def _wire_bytes(case: Any) -> tuple[int, int]:
  """Returns a case's number of elements, and the bytes of their encoding."""
  elements, n = int(np.prod(case.shape)), case.shape[-1]
  c = case.codec
  # Each row of n elements has a payload and float32 scales.
  return elements, elements // n * (c.payload_bytes(n) + 4 * c.num_scales(n))


def _encode_subject(name: str, case: Any) -> Subject:
  """Returns the subject of encoding a difference with error feedback."""
  c, n, key = case.codec, case.shape[-1], _rounding_key(case.codec)
  elements, wire = _wire_bytes(case)

  def run(a, b, e, *, implementation):
    return codec.encode_delta(a, b, c, key, e, implementation=implementation)

  def delta(a, b, e):
    return (a.astype(jnp.float32) - b.astype(jnp.float32) + e,)

  def encode(x, *_):
    return (x, *codec_reference.encode(x, c, key))

  def subtract(x, payload, scales, *_):
    decoded = codec_reference.decode(Encoded(payload, scales), n, c)
    return payload, scales, x - decoded

  # It reads both operands of the difference, and reads and writes the residual.
  size = jnp.dtype(case.dtype).itemsize
  return _codec_subject(
    "encode", name, case, elements * (2 * size + 8) + wire, run,
    (delta, encode, subtract),
  )


def _mean_subject(name: str, case: Any, step: bool = False) -> Subject | None:
  """Returns the subject of averaging codes, or of a Nesterov step with them.

  None for cases with stochastic rounding, which does not affect decoding.
  """
  c, n = case.codec, case.shape[-1]
  if c.stochastic:
    return None
  elements, wire = _wire_bytes(case)

  def run(*operands, implementation):
    encoded = Encoded(*operands[:2])
    if not step:
      return codec.mean(encoded, n, c, implementation=implementation)
    return codec.nesterov(
      encoded, *operands[2:], c, _OUTER, implementation=implementation
    )

  def mean(payload, scales, *_):
    return (codec_reference.mean(Encoded(payload, scales), n, c),)

  def nesterov(mean, payload, scales, x, v):
    return codec_reference.nesterov_step(mean, x, v, _OUTER)

  # A Nesterov step reads and writes parameters and momentum.
  return _codec_subject(
    "nesterov" if step else "mean", name, case,
    case.senders * wire + (16 if step else 4) * elements, run,
    (mean, nesterov) if step else (mean,),
  )


def _gather_rows_subject(name: str, case: Any) -> Subject:
  """Returns the subject of gathering rows for a case.

  It excludes the host's part, which `configs/benchmark/graphs.py` measures.
  """

  def draw(seed):
    table, ids = jax.random.split(jax.random.key(seed))
    return (
      jax.random.normal(table, (case.rows, case.width), jnp.float32),
      jax.random.randint(ids, (case.ids,), 0, case.rows, jnp.int32),
    )

  def run(table, ids, *, implementation):
    return gather_rows.gather_rows(
      table, ids, case.width, SelectedKernel(implementation, {})
    )

  return Subject(
    "gather_rows", name, 4 * case.ids * (2 * case.width + 1),
    functools.partial(
      gather_rows.select_kernel, case.rows, case.width, jnp.dtype("float32")
    ),
    run, (lambda *operands: (gather_reference.gather_rows(*operands),),),
    draw, from_host=True,
  )


def _make_subjects(
  make: Callable[[str, Any], Subject | None], cases: Any, large: bool
) -> list[Subject]:
  """Returns the subjects of an op, one per large or small kernel case."""
  found = (
    make(name, case)
    for name, case in (cases.LARGE if large else cases.CASES).items()
  )
  return [subject for subject in found if subject is not None]


# Ops by their names in config.benchmark.ops. A function maps "large", which is
# True where cases are timed, to the op's subjects.
SUBJECTS: dict[str, Callable[[bool], list[Subject]]] = {
  op: functools.partial(_make_subjects, make, cases)
  for op, make, cases in (
    ("add_norm", _add_norm_subject, add_norm_cases),
    ("add_norm_backward", functools.partial(_add_norm_subject, backward=True),
     add_norm_cases),
    ("reduce_add_norm", _reduce_subject, reduce_cases),
    ("encode", _encode_subject, codec_cases),
    ("mean", _mean_subject, codec_cases),
    ("nesterov", functools.partial(_mean_subject, step=True), codec_cases),
    ("gather_rows", _gather_rows_subject, gather_cases),
  )
}
