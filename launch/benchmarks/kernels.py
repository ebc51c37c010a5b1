"""Times kernels: ours, XLA's fusion of the reference, and its stages apart.

Or, for a target that is not here, counts what their programs move.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np
from rich.progress import track

from caatnet import report
from caatnet.train.records import environment
from parallel.axes import Axis, make_mesh
from parallel.kernels.add_norm import api as add_norm
from parallel.kernels.add_norm import cases as add_norm_cases
from parallel.kernels.codec import api as codec
from parallel.kernels.codec import cases as codec_cases
from parallel.kernels.codec import reference as codec_reference
from parallel.kernels.codec.reference import Encoded
from parallel.kernels.reduce_add_norm import api as reduce_add_norm
from parallel.kernels.reduce_add_norm import cases as reduce_cases
from parallel.kernels.selection import Choice
from parallel.xla import hlo, roofline, targets

_COPY_BYTES = 1 << 28
_OUTER = {"learning_rate": 0.7, "decay": 0.9}


@dataclasses.dataclass(frozen=True)
class Subject:
  """One op on one case.

  Attributes:
    op: See ``config.benchmark.ops``.
    case: Its label.
    num_bytes: That must be moved.
    choose: Implementation -> which one takes the operands.
    run: ``(*operands, implementation=...)``.
    stages: The reference as functions, each of the results of the one before
      and then of the operands.
    draw: Seed -> operands.
  """

  op: str
  case: str
  num_bytes: int
  choose: Callable[[Any], Choice]
  run: Callable[..., Any]
  stages: Sequence[Callable[..., Any]]
  draw: Callable[[int], tuple[jax.Array, ...]]


def run(config: Any) -> dict[str, Any]:
  """Checks, measures or counts; prints a table, returns it as plain data."""
  options = config.benchmark
  unknown = [op for op in options.ops if op not in _SUBJECTS]
  if unknown:
    raise ValueError(
      f"config.benchmark.ops names {unknown[0]!r}; known: "
      f"{', '.join(_SUBJECTS)}"
    )
  if options.target:
    return _count(options)
  platform = jax.default_backend()
  timed = platform != "cpu"
  implementation = platform if timed else "tpu_interpret"
  subjects = _subjects(options, timed)
  rows = []
  for subject in track(subjects, "kernels", transient=True):
    choice = subject.choose((implementation, "reference"))
    row = {
      "op": subject.op,
      "case": subject.case,
      "bytes": subject.num_bytes,
      "implementation": choice.name,
      "refused": choice.refused,
    }
    row |= _check(subject, choice.name, timed)
    if timed:
      row |= _measure(subject, choice.name, options)
    rows.append(row)
  _print(rows, timed)
  return {"environment": _environment(), "rows": rows}


def _environment() -> dict[str, Any]:
  return environment(make_mesh({"device": Axis("device", 1)}))


def _subjects(options: Any, large: bool) -> list[Subject]:
  return list(itertools.chain.from_iterable(
    _SUBJECTS[op](large) for op in options.ops
  ))


def _count(options: Any) -> dict[str, Any]:
  """Main-memory bytes of large cases' programs, compiled for a target."""
  target = targets.resolve(options.target)
  if target.hardware is None:
    raise ValueError(
      f"config.benchmark.target={options.target!r}: one of a TPU or GPU, as "
      "tpu:v5e:2x2 or gpu:h200:1x1"
    )
  kind = options.target.split(":")[0]
  rows = []
  for subject in track(_subjects(options, True), "compiling", transient=True):
    choice = subject.choose((kind, "reference"))
    kernel = _moved(subject, choice.name, target)
    xla = _moved(subject, "reference", target)
    rows.append({
      "op": subject.op, "case": subject.case, "least_bytes": subject.num_bytes,
      "implementation": choice.name, "refused": choice.refused,
      "kernel_bytes": kernel[0], "kernel_temporary_bytes": kernel[1],
      "xla_bytes": xla[0], "xla_temporary_bytes": xla[1],
    })
  report.table(
    f"MB of main memory moved by programs compiled for {options.target}",
    ["op, case", "least", "with kernel", "by XLA alone", "x kernel's",
     "temporary MB with kernel", "by XLA alone"],
    [
      [f"{r['op']}, {r['case']}"]
      + [f"{r[k] / 1e6:,.1f}" for k in ("least_bytes", "kernel_bytes",
                                        "xla_bytes")]
      + [f"{r['xla_bytes'] / r['kernel_bytes']:.2f}"]
      + [f"{r[k] / 1e6:,.1f}" for k in ("kernel_temporary_bytes",
                                        "xla_temporary_bytes")]
      for r in rows
    ],
  )
  _print_refusals(rows)
  return {"target": options.target, "environment": _environment(), "rows": rows}


def _moved(
  subject: Subject, implementation: str, target: targets.Target
) -> tuple[float, int]:
  """Bytes read and written (a loop of unknown length: once); temporaries."""
  operands = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=SingleDeviceSharding(target.devices[0])
    ),
    jax.eval_shape(lambda: subject.draw(0)),
  )
  program = jax.jit(
    functools.partial(subject.run, implementation=implementation)
  ).lower(*operands).compile()
  module = hlo.parse(program.as_text())
  moved = 0.0
  for computation, times in module.runs():
    for instruction in computation.instructions:
      cost = roofline.cost(module, computation, instruction, target.hardware)
      num_bytes = cost.bytes
      if instruction.opcode == "copy-start":  # beside others, so no cost there
        (source,) = computation.operands(instruction)
        ends = source.shapes[0], instruction.shapes[0]
        num_bytes += sum(x.bytes for x in ends if not x.on_chip)
      moved += num_bytes * (times or 1)
  return moved, program.memory_analysis().temp_size_in_bytes


def _check(
  subject: Subject, implementation: str, timed: bool
) -> dict[str, Any]:
  """Largest difference from the reference, and memory beside the operands."""
  operands = subject.draw(0)
  program = jax.jit(
    functools.partial(subject.run, implementation=implementation)
  ).lower(*operands).compile()
  theirs = jax.jit(
    functools.partial(subject.run, implementation="reference")
  )(*operands)
  error = 0.0
  for a, b in zip(
    jax.tree.leaves(program(*operands)), jax.tree.leaves(theirs), strict=True
  ):
    if a.size:
      a, b = np.asarray(a, "f4"), np.asarray(b, "f4")
      largest = max(float(np.abs(b).max()), 1e-30)
      error = max(error, float(np.abs(a - b).max()) / largest)
  found = {"relative_error": error}
  if timed:  # those of the interpreter say nothing
    memory = program.memory_analysis()
    found["temporary_bytes"] = memory.temp_size_in_bytes
  return found


def _measure(
  subject: Subject, implementation: str, options: Any
) -> dict[str, Any]:
  buffers = [subject.draw(seed) for seed in range(options.buffers)]
  source = [
    jax.random.normal(jax.random.key(i), _COPY_BYTES // 4)
    for i in range(options.buffers)
  ]
  stages = [jax.jit(stage) for stage in subject.stages]

  def unfused(*operands):
    results = ()
    for stage in stages:
      results = stage(*results, *operands)
    return results

  compiled = {
    name: jax.jit(functools.partial(subject.run, implementation=name))
    for name in (implementation, "reference")
  }
  runners = {
    "kernel": (compiled[implementation], buffers),
    "fused": (compiled["reference"], buffers),
    "unfused": (unfused, buffers),
    # XLA would alias what is not changed.
    "copy": (jax.jit(lambda x: -x), [(x,) for x in source]),
  }
  seconds: dict[str, list[float]] = {name: [] for name in runners}
  for turn in range(-1, options.rounds):
    for name, (f, operands) in runners.items():
      # All buffers in one go, so that the host's part of a call is hidden.
      start = time.perf_counter()
      jax.block_until_ready([f(*each) for each in operands])
      if turn >= 0:
        seconds[name].append((time.perf_counter() - start) / len(operands))
  medians = {k: float(np.median(v)) for k, v in seconds.items()}
  bandwidth = 2 * _COPY_BYTES / medians["copy"]
  return {
    "median_s": medians["kernel"],
    "min_s": min(seconds["kernel"]),
    "max_s": max(seconds["kernel"]),
    "copy_bytes_per_s": bandwidth,
    "of_copy_bandwidth": subject.num_bytes / medians["kernel"] / bandwidth,
    "of_fused": medians["kernel"] / medians["fused"],
    "of_unfused": medians["kernel"] / medians["unfused"],
  }


def _print(rows: list[dict[str, Any]], timed: bool) -> None:
  columns = ["op, case", "runs", "MB", "error"]
  if timed:
    columns += ["temporary MB", "us", "of copy", "x XLA", "x unfused"]
  table = []
  for row in rows:
    cells = [
      f"{row['op']}, {row['case']}", row["implementation"],
      f"{row['bytes'] / 1e6:,.3f}", f"{row['relative_error']:.1e}",
    ]
    if timed:
      cells += [
        f"{row['temporary_bytes'] / 1e6:,.3f}",
        f"{row['median_s'] * 1e6:,.0f}", f"{row['of_copy_bandwidth']:.0%}",
        f"{row['of_fused']:.2f}", f"{row['of_unfused']:.2f}",
      ]
    table.append(cells)
  device = jax.devices()[0].device_kind
  how = "medians" if timed else "interpreted: no times"
  report.table(f"kernels on {device}, {how}", columns, table)
  _print_refusals(rows)


def _print_refusals(rows: list[dict[str, Any]]) -> None:
  for row in rows:
    for name, reason in row["refused"].items():
      print(f"{row['op']}, {row['case']}: no {name} kernel: {reason}")


def _normal(seed: int, *shapes: tuple[tuple[int, ...], str]):
  keys = jax.random.split(jax.random.key(seed), len(shapes))
  return tuple(
    jax.random.normal(key, shape).astype(dtype)
    for key, (shape, dtype) in zip(keys, shapes, strict=True)
  )


def _add_norm(timed: bool, backward: bool = False) -> list[Subject]:
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

    # Left out, since XLA would copy them: a stream without an update, and the
    # shared update's gradient, which is the stream's.

    def forward(*operands, call=call, case=case, implementation):
      out = call(*operands, implementation=implementation)
      return out if case.update else out[-1:]

    def both(*operands, call=call, case=case, implementation):
      operands, cotangents = operands[:-3], operands[-3:]
      # With the results, or XLA alone would not write the normalised rows.
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
  cases = codec_cases.LARGE if timed else codec_cases.CASES
  subjects = []
  for name, case in cases.items():
    c, n, m = case.codec, case.shape[-1], case.senders
    if c.stochastic and op != "encode":
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
        encoded, *operands[2:], c, implementation=implementation, **_OUTER
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
      return codec_reference.nesterov_step(mean, x, v, *_OUTER.values())

    stages = {
      "encode": (delta, encode, subtract),
      "mean": (mean,),
      "nesterov": (mean, step),
    }[op]
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


_SUBJECTS: dict[str, Callable[[bool], list[Subject]]] = {
  "add_norm": _add_norm,
  "add_norm_backward": functools.partial(_add_norm, backward=True),
  "reduce_add_norm": _reduce,
  "encode": functools.partial(_codec, op="encode"),
  "mean": functools.partial(_codec, op="mean"),
  "nesterov": functools.partial(_codec, op="nesterov"),
}
