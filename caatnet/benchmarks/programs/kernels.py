"""Times of kernels, compared with XLA's program of the reference.

The reference runs as one program, and in stages. For a target that this machine
lacks, the bytes that the programs move are counted.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import functools
import itertools
import math
from types import MappingProxyType
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from caatnet.benchmarks.harness import setup, timing
from caatnet.benchmarks.programs.kernel_subjects import SUBJECTS, Subject
from caatnet.show import tables
from parallel.axes import Axis, make_mesh
from parallel.base.checks import known
from parallel.ledger import fingerprint, hlo, roofline, targets

# Size of the array whose copy gives the reference bandwidth: far larger than
# any cache.
_COPY_BYTES = 1 << 28
# Bytes that a timed program moves. The host takes some 50 us to start it, 3% of
# the time of 4 GiB at 3 TB/s.
_TIMED_BYTES = 1 << 32


def run(config: Any) -> dict[str, Any]:
  """Checks and times kernels, or counts bytes; prints and returns a table.

  Args:
    config: Config like configs/benchmark/kernels.py.

  Raises:
    ValueError: An op or the target is unknown.
  """
  options = config.benchmark
  for op in options.ops:
    known("config.benchmark.ops: ", op, SUBJECTS)
  if options.target:
    return _count_for_target(options, targets.resolve(options.target))
  platform = jax.default_backend()
  timed = platform != "cpu"  # on CPUs kernels are interpreted
  implementation = platform if timed else "tpu_interpret"
  subjects = _subjects(options, timed)
  rows = []
  for subject in timing.progress(subjects, "kernels"):
    choice = subject.choose((implementation, "reference"))
    row = {
      "op": subject.op,
      "case": subject.case,
      "bytes": subject.num_bytes,
      "implementation": choice.name,
      "refused": choice.refused,
    }
    row |= _compare_to_reference(subject, choice.name, timed)
    if timed:
      row |= _measure(subject, choice.name, options)
    rows.append(row)
  _print(rows, timed)
  return {"environment": setup.describe_environment(), "rows": rows}


def _subjects(options: Any, large: bool) -> list[Subject]:
  return list(itertools.chain.from_iterable(
    SUBJECTS[op](large) for op in options.ops
  ))


def _count_for_target(options: Any, target: targets.Target) -> dict[str, Any]:
  """Counts the main-memory bytes of large cases, compiled for a target."""
  if target.hardware is None:
    raise ValueError(
      f"config.benchmark.target={options.target!r} must be a TPU or GPU, such "
      "as tpu:v5e:2x2 or gpu:h200:1x1"
    )
  kind = options.target.split(":")[0]
  rows = []
  for subject in timing.progress(_subjects(options, True), "compiling"):
    choice = subject.choose((kind, "reference"))
    lowered = _lowered(subject, choice.name, target)
    kernel = _count_moved_bytes(lowered, target, subject.reads(choice.name))
    xla = _count_moved_bytes(_lowered(subject, "reference", target), target)
    rows.append({
      "op": subject.op, "case": subject.case, "least_bytes": subject.num_bytes,
      "fingerprint": fingerprint.fingerprint(lowered),
      "implementation": choice.name, "refused": choice.refused,
      "kernel_bytes": kernel[0], "kernel_temporary_bytes": kernel[1],
      "xla_bytes": xla[0], "xla_temporary_bytes": xla[1],
    })
  tables.print_table(
    f"MB of main memory moved by programs compiled for {options.target}",
    "{op}, {case}=op, case | least_bytes/1e6:,.1f=least | "
    "kernel_bytes/1e6:,.1f=with kernel | xla_bytes/1e6:,.1f=by XLA alone | "
    "ratio:.2f=x kernel's | "
    "kernel_temporary_bytes/1e6:,.1f=temporary MB with kernel | "
    "xla_temporary_bytes/1e6:,.1f=temporary MB by XLA alone",
    [r | {"ratio": r["xla_bytes"] / r["kernel_bytes"]} for r in rows],
  )
  _print_refusals(rows)
  return {
    "target": options.target,
    "versions": fingerprint.versions(target.devices[0].platform),
    "environment": setup.describe_environment(),
    "rows": rows,
  }


def fingerprints(options: Any) -> dict[tuple[str, str], str]:
  """Lowers each op and case with its kernel; returns their fingerprints.

  Args:
    options: Section ``config.benchmark``, with a target.
  """
  target = targets.resolve(options.target)
  kind = options.target.split(":")[0]
  return {
    (subject.op, subject.case): fingerprint.fingerprint(
      _lowered(subject, subject.choose((kind, "reference")).name, target)
    )
    for subject in _subjects(options, True)
  }


def _lowered(
  subject: Subject, implementation: str, target: targets.Target
) -> jax.stages.Lowered:
  """Lowers a subject for one device of a target."""
  operands = subject.shapes(implementation, target.devices[0])
  run = jax.jit(functools.partial(subject.run, implementation=implementation))
  mesh = contextlib.nullcontext()
  if subject.from_host or target.devices[0].platform == "gpu":
    # Pallas queries the mesh for the device: for GPUs since jax 0.11, for TPUs
    # when a block is a vector. A mesh would change other TPU fingerprints.
    mesh = jax.set_mesh(
      make_mesh({"device": Axis("device", 1)}, list(target.devices))
    )
  with mesh:
    return fingerprint.lowered_without_locations(lambda: run.lower(*operands))


def _count_moved_bytes(
  lowered: jax.stages.Lowered,
  target: targets.Target,
  reads: Mapping[tuple[int, ...], float] = MappingProxyType({}),
) -> tuple[float, int]:
  """Counts the bytes that a program moves; ``reads`` is as in `roofline.cost`.

  Returns:
    Bytes that it reads and writes, with loops of unknown length counted once,
    and its bytes of temporaries.
  """
  program = lowered.compile()
  module = hlo.parse(program.as_text())
  moved = 0.0
  for computation, times in module.runs():
    for instruction in computation.instructions:
      cost = roofline.cost(
        module, computation, instruction, target.hardware, reads
      )
      num_bytes = cost.bytes
      # The roofline has no cost for asynchronous copies, which run concurrently
      # with other work; but they move bytes.
      if instruction.opcode == "copy-start":
        (source,) = computation.operands(instruction)
        ends = source.shapes[0], instruction.shapes[0]
        num_bytes += sum(x.bytes for x in ends if not x.on_chip)
      moved += num_bytes * (times or 1)
  return moved, program.memory_analysis().temp_size_in_bytes


def _compare_to_reference(
  subject: Subject, implementation: str, timed: bool
) -> dict[str, Any]:
  """Compares an implementation with the reference.

  Returns:
    Largest difference, relative to the largest element of each result; and, if
    it is timed, the bytes of temporaries.
  """
  operands = subject.operands(0, implementation)
  program = jax.jit(
    functools.partial(subject.run, implementation=implementation)
  ).lower(*operands).compile()
  # The reference gets its own copy, as its table may have another layout.
  theirs = jax.jit(
    functools.partial(subject.run, implementation="reference")
  )(*subject.operands(0, "reference"))
  error = 0.0
  for a, b in zip(
    jax.tree.leaves(program(*operands)), jax.tree.leaves(theirs), strict=True
  ):
    if a.size:
      a, b = np.asarray(a, "f4"), np.asarray(b, "f4")
      largest = max(float(np.abs(b).max()), 1e-30)
      error = max(error, float(np.abs(a - b).max()) / largest)
  found = {"relative_error": error}
  if timed:  # the interpreter's memory is irrelevant
    memory = program.memory_analysis()
    found["temporary_bytes"] = memory.temp_size_in_bytes
  return found


def _measure(
  subject: Subject, implementation: str, options: Any
) -> dict[str, Any]:
  """Times kernel, reference, its stages and a copy in alternation.

  The copy is within the device's memory, or from the host's if the kernel reads
  host memory.
  """
  return _times_and_ratios(subject.num_bytes, timing.in_turns(
    _timers(subject, implementation, options), options.rounds, label=None,
  ))


def _times_and_ratios(
  num_bytes: int, seconds: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
  """Returns a row's times, rates and ratios.

  Args:
    num_bytes: Bytes that the kernel must read and write.
    seconds: Seconds of a call in each round, by the names of `_timers`.
  """
  kernel = timing.summary(seconds["kernel"])
  medians = {name: float(np.median(times)) for name, times in seconds.items()}
  bandwidth = 2 * _COPY_BYTES / medians["copy"]  # read and written
  return kernel | {
    "copy_bytes_per_s": bandwidth,
    "of_copy_bandwidth": num_bytes / medians["kernel"] / bandwidth,
    "of_fused": medians["kernel"] / medians["fused"],
    "of_unfused": medians["kernel"] / medians["unfused"],
  }


def _timers(
  subject: Subject, implementation: str, options: Any
) -> dict[str, Callable[[], float]]:
  """Returns functions that measure the seconds of a call.

  Calls alternate between several sets of operands, which prevents them from
  finding their operands in a cache.
  """
  seeds = range(options.buffers)
  theirs = [subject.operands(seed, "reference") for seed in seeds]
  buffers = theirs  # inputs of the kernel
  if subject.from_host:
    buffers = [subject.operands(seed, implementation) for seed in seeds]
  source = [
    jax.random.normal(jax.random.key(seed), _COPY_BYTES // 4) for seed in seeds
  ]
  copy = jnp.negative  # XLA would alias an unchanged array
  if subject.from_host:
    copy = functools.partial(jax.device_put, device=source[0].sharding)
    host = source[0].sharding.with_memory_kind("pinned_host")
    source = [jax.device_put(x, host) for x in source]

  def unfused(*operands):
    results = ()
    for stage in subject.stages:
      results = lax.optimization_barrier(stage(*results, *operands))
    return results

  def repeats(num_bytes):
    if subject.from_host:  # XLA cannot carry such operands through a loop
      return 1
    # XLA inlines a loop of one iteration, and omits the pass before it.
    return max(3, math.ceil(_TIMED_BYTES / num_bytes / options.buffers))

  kernel, fused = (
    functools.partial(subject.run, implementation=name)
    for name in (implementation, "reference")
  )
  times = repeats(subject.num_bytes)
  return {
    "kernel": _timer(kernel, buffers, times),
    "fused": _timer(fused, theirs, times),
    "unfused": _timer(unfused, theirs, times),
    "copy": _timer(
      copy, [(x,) for x in source], repeats(2 * _COPY_BYTES)
    ),
  }


def _timer(
  function: Callable[..., Any], sets: Sequence[tuple[Any, ...]], times: int
) -> Callable[[], float]:
  """Returns a function that measures the seconds per call of ``function``.

  Args:
    function: Function to time.
    sets: Sets of operands. The function is called on each of them.
    times: Number of passes over the sets; 1, or at least 3.
  """
  each = jax.jit(function)
  passes = jax.jit(functools.partial(_passes, function, times))

  def run():
    if times > 1:
      return passes(sets)
    return [each(*operands) for operands in sets]

  return lambda: timing.seconds(
    lambda: jax.block_until_ready(run())
  ) / (times * len(sets))


def _passes(
  function: Callable[..., Any], times: int, sets: Sequence[tuple[Any, ...]]
) -> list[Any]:
  """Calls a function on each set of operands, several times in one program.

  XLA does not hoist a call that depends on the loop's counter, and neither
  merges nor omits calls on whose results the next call depends.
  """

  def one_pass(turn, sets, last):
    results = []
    for operands in sets:
      operands, *_ = lax.optimization_barrier((operands, turn, last))
      last = function(*operands)
      results.append(last)
    return results

  return lax.fori_loop(
    1, times, lambda turn, results: one_pass(turn, sets, results[-1]),
    one_pass(0, sets, ()),
  )


def _print(rows: list[dict[str, Any]], timed: bool) -> None:
  columns = (
    "{op}, {case}=op, case | implementation=runs | bytes/1e6:,.3f=MB | "
    "relative_error:.1e=error"
  )
  if timed:
    columns += (
      " | temporary_bytes/1e6:,.3f=temporary MB | median_s/1e-6:,.0f=us | "
      "of_copy_bandwidth:.0%=of copy | of_fused:.2f=x XLA | "
      "of_unfused:.2f=x unfused"
    )
  device = jax.devices()[0].device_kind
  how = "medians" if timed else "interpreted: no times"
  tables.print_table(f"kernels on {device}, {how}", columns, rows)
  _print_refusals(rows)


def _print_refusals(rows: list[dict[str, Any]]) -> None:
  for row in rows:
    for name, reason in row["refused"].items():
      print(f"{row['op']}, {row['case']}: no {name} kernel: {reason}")
