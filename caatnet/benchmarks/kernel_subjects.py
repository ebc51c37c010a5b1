"""The subjects of the benchmark of kernels: each op on each of its cases."""

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
from parallel.kernels.codec.reference import Encoded, OuterStep
from parallel.kernels.gather_rows import api as gather_rows
from parallel.kernels.gather_rows import cases as gather_cases
from parallel.kernels.gather_rows import order
from parallel.kernels.gather_rows import reference as gather_reference
from parallel.kernels.reduce_add_norm import api as reduce_add_norm
from parallel.kernels.reduce_add_norm import cases as reduce_cases
from parallel.kernels.selection import KERNELS, Choice

# The outer step of the op "nesterov".
_OUTER = OuterStep(learning_rate=0.7, decay=0.9)


@dataclasses.dataclass(frozen=True)
class Subject:
  """One op on one case.

  Attributes:
    op: The op, one of ``config.benchmark.ops``.
    case: The label of the case.
    num_bytes: The bytes that must be read and written.
    choose: Returns which implementation takes the operands, given preferences.
    run: The op, called with the operands and ``implementation=``.
    stages: The reference cut into functions. Each takes the results of the one
      before, then the operands.
    draw: Returns random operands for a seed.
    from_host: Whether the first operand is a table of rows that kernels read
      from the host's memory, laid out by `gather_rows.order`. The reference has
      it on the device.
  """

  op: str
  case: str
  num_bytes: int
  choose: Callable[[Any], Choice]
  run: Callable[..., Any]
  stages: Sequence[Callable[..., Any]]
  draw: Callable[[int], tuple[jax.Array, ...]]
  from_host: bool = False

  def operands(self, seed: int, implementation: str) -> tuple[jax.Array, ...]:
    """Draws operands, and puts them where an implementation reads them."""
    drawn = self.draw(seed)
    if not self.from_host:
      return drawn
    table, *others = drawn
    stored = order.stored(np.asarray(table), _kind(implementation))
    (device,) = table.devices()
    return jax.device_put(stored, _place(device, implementation)), *others

  def shapes(
    self, implementation: str, device: jax.Device
  ) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the operands of an implementation without values.

    Args:
      implementation: A kernel or "reference".
      device: Where they would be, which may be a target's.
    """
    drawn = jax.eval_shape(lambda: self.draw(0))
    there = SingleDeviceSharding(device)
    shapes = [
      jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there) for x in drawn
    ]
    if self.from_host:
      shapes[0] = jax.ShapeDtypeStruct(
        order.stored_shape(*drawn[0].shape, _kind(implementation)),
        drawn[0].dtype, sharding=_place(device, implementation),
      )
    return tuple(shapes)

  def reads(self, implementation: str) -> dict[tuple[int, ...], float]:
    """Maps the dims of an array that is not read whole to the bytes that are.

    The reference's operations say themselves what they read.
    """
    kind = _kind(implementation)
    if not self.from_host or kind == "reference":
      return {}
    table, ids = jax.eval_shape(lambda: self.draw(0))
    waste = order.waste(table.shape[1], kind)
    stored = order.stored_shape(*table.shape, kind)
    return {stored: waste * 4 * table.shape[1] * ids.size}


def _kind(implementation: str) -> str:
  return Choice(implementation, {}).kind


def _place(device: jax.Device, implementation: str) -> SingleDeviceSharding:
  """Returns where an implementation has a table of the host's memory.

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


def _add_norm(timed: bool, backward: bool = False) -> list[Subject]:
  """Returns the add-and-normalise op on large cases if timed, else on small."""
  cases = add_norm_cases.LARGE if timed else add_norm_cases.CASES
  subjects = []
  for name, case in cases.items():
    n, k, p, dtype = case.rows, case.shared, case.private, case.dtype
    parts = (((n, k), dtype), ((n, p), dtype))
    updates = parts if case.update else ()

    def call(shared, private, *rest, case=case, implementation):
      *d, gain = rest
      return add_norm.add_norm(
        shared, private, *(d or (None, None)), gain,
        private_scale=case.private_scale, implementation=implementation,
      )

    # Results that equal another operand or result are left out, since XLA would
    # copy them: the stream where there is no update, and the gradient of the
    # shared update, which is that of the stream.

    def forward(*operands, call=call, case=case, implementation):
      out = call(*operands, implementation=implementation)
      return out if case.update else out[-1:]

    def both(*operands, call=call, case=case, implementation):
      operands, cotangents = operands[:-3], operands[-3:]
      # The results are returned as well, or XLA's program would not write the
      # normalised rows, which a training step keeps.
      out, transpose = jax.vjp(
        functools.partial(call, implementation=implementation), *operands
      )
      gradients = transpose(cotangents)
      if not case.update:
        return out[-1:], gradients
      return out, gradients[:2] + gradients[3:]

    def add(shared, private, *rest, case=case):
      if len(rest) < 3:
        return shared, private
      scale = jnp.asarray(case.private_scale, private.dtype)
      return shared + rest[0], private + rest[1] * scale

    def norm(shared, private, *rest):
      return add_norm.add_norm(
        shared, private, None, None, rest[-1], implementation="reference"
      )

    operands = (*parts, *updates, ((k + p,), "float32"))
    if backward:
      operands += (*parts, ((n, k + p), dtype))
    subjects.append(Subject(
      "add_norm_backward" if backward else "add_norm",
      name,
      case.forward_bytes + (case.backward_bytes if backward else 0),
      functools.partial(
        add_norm.choice, *(jax.ShapeDtypeStruct(*x) for x in parts)
      ),
      both if backward else forward,
      (functools.partial(both, implementation="reference"),)
      if backward
      else (add, norm),
      lambda seed, operands=operands: _normal(seed, *operands),
    ))
  return subjects


def _reduce(timed: bool) -> list[Subject]:
  """Returns the reduce-add-normalise op on large cases if timed."""
  cases = reduce_cases.LARGE if timed else reduce_cases.CASES
  subjects = []
  for name, case in cases.items():
    n, k, p, r, dtype = (
      case.rows, case.shared, case.private, case.ranks, case.dtype
    )
    blocks = k // case.block if case.block else 1

    def draw(seed, n=n, k=k, p=p, r=r, dtype=dtype, blocks=blocks, case=case):
      shared, private, d_private, partial, scales, gain = _normal(
        seed, ((n, k), dtype), ((n, p), dtype), ((n, p), dtype),
        ((r, n, k), dtype), ((r, n, blocks), "float32"),
        ((k + p,), "float32"),
      )
      if case.block:
        partial = (32 * partial).astype(jnp.int8)
      return shared, private, partial, scales, d_private, gain

    def run(
      shared, private, partial, scales, d_private, gain, *, case=case,
      implementation,
    ):
      return reduce_add_norm.reduce_add_norm(
        shared, private, partial, scales if case.block else None, d_private,
        gain, private_scale=case.private_scale, implementation=implementation,
      )

    def total(shared, private, partial, scales, *_, case=case):
      wide = partial.astype(jnp.float32)
      if case.block:
        wide = wide * jnp.repeat(scales, case.block, axis=-1)
      return (wide.sum(0).astype(shared.dtype),)

    def add(update, shared, private, partial, scales, d_private, _, case=case):
      scale = jnp.asarray(case.private_scale, private.dtype)
      return shared + update, private + d_private * scale

    def norm(shared, private, *rest):
      return add_norm.add_norm(
        shared, private, None, None, rest[-1], implementation="reference"
      )

    shapes = jax.eval_shape(draw, 0)
    scales = shapes[3] if case.block else None
    subjects.append(Subject(
      "reduce_add_norm", name, case.forward_bytes,
      functools.partial(reduce_add_norm.choice, *shapes[:3], scales),
      run, (total, add, norm), draw,
    ))
  return subjects


def _codec(timed: bool, op: str) -> list[Subject]:
  """Returns an op of the codec on large cases if timed, else on small ones."""
  cases = codec_cases.LARGE if timed else codec_cases.CASES
  subjects = []
  for name, case in cases.items():
    c, n, m = case.codec, case.shape[-1], case.senders
    if c.stochastic and op != "encode":  # decoding does not depend on it
      continue
    elements = int(np.prod(case.shape))
    rows = elements // n
    wire = rows * (c.payload_bytes(n) + 4 * c.num_scales(n))
    size = jnp.dtype(case.dtype).itemsize
    key = jax.random.key(7) if c.stochastic else None

    def draw(seed, case=case, op=op):
      a, b, e, v = _normal(
        seed,
        *((case.shape, case.dtype) for _ in range(2)),
        *((case.shape, "float32") for _ in range(2)),
      )
      if op == "encode":
        return a, b, e
      one = codec_reference.encode(a, case.codec)
      many = jax.tree.map(lambda x: jnp.stack([x] * case.senders), one)
      return (*many, e, v) if op == "nesterov" else tuple(many)

    def run(*operands, c=c, n=n, op=op, key=key, implementation):
      if op == "encode":
        a, b, e = operands
        return codec.encode_delta(
          a, b, c, key, e, implementation=implementation
        )
      encoded = Encoded(*operands[:2])
      if op == "mean":
        return codec.mean(encoded, n, c, implementation=implementation)
      return codec.nesterov(
        encoded, *operands[2:], c, _OUTER, implementation=implementation
      )

    def delta(a, b, e):
      return (a.astype(jnp.float32) - b.astype(jnp.float32) + e,)

    def encode(x, *_, c=c, key=key):
      return (x, *codec_reference.encode(x, c, key))

    def subtract(x, payload, scales, *_, c=c, n=n):
      decoded = codec_reference.decode(Encoded(payload, scales), n, c)
      return payload, scales, x - decoded

    def mean(payload, scales, *_, c=c, n=n):
      return (codec_reference.mean(Encoded(payload, scales), n, c),)

    def step(mean, payload, scales, x, v):
      return codec_reference.nesterov_step(mean, x, v, _OUTER)

    stages = {
      "encode": (delta, encode, subtract),
      "mean": (mean,),
      "nesterov": (mean, step),
    }[op]
    # Encoding reads both operands of the difference, and reads and writes the
    # residual; a Nesterov step reads and writes parameters and momentum.
    num_bytes = {
      "encode": elements * (2 * size + 8) + wire,
      "mean": m * wire + 4 * elements,
      "nesterov": m * wire + 16 * elements,
    }[op]
    choose = functools.partial(
      codec.choice, case.shape, c, key=key,
      senders=1 if op == "encode" else m,
    )
    subjects.append(Subject(op, name, num_bytes, choose, run, stages, draw))
  return subjects


def _gather_rows(timed: bool) -> list[Subject]:
  """Returns the gather of rows on large cases if timed, else on small ones.

  The host's part, which `configs/benchmark/graphs.py` measures, is not in it.
  """
  cases = gather_cases.LARGE if timed else gather_cases.CASES
  subjects = []
  for name, case in cases.items():

    def draw(seed, case=case):
      table, ids = jax.random.split(jax.random.key(seed))
      shape = case.rows, case.width
      return (
        jax.random.normal(table, shape, jnp.float32),
        jax.random.randint(ids, (case.ids,), 0, case.rows, jnp.int32),
      )

    def run(table, ids, case=case, *, implementation):
      return gather_rows.gather_rows(
        table, ids, case.width, Choice(implementation, {})
      )

    subjects.append(Subject(
      "gather_rows", name, 4 * case.ids * (2 * case.width + 1),
      functools.partial(
        gather_rows.choice, case.rows, case.width, jnp.dtype("float32")
      ),
      run, (lambda *operands: (gather_reference.gather_rows(*operands),),),
      draw, from_host=True,
    ))
  return subjects


# The ops, by the names in config.benchmark.ops. Given whether they are timed,
# which takes large cases, they return their subjects.
SUBJECTS: dict[str, Callable[[bool], list[Subject]]] = {
  "add_norm": _add_norm,
  "add_norm_backward": functools.partial(_add_norm, backward=True),
  "reduce_add_norm": _reduce,
  "encode": functools.partial(_codec, op="encode"),
  "mean": functools.partial(_codec, op="mean"),
  "nesterov": functools.partial(_codec, op="nesterov"),
  "gather_rows": _gather_rows,
}
