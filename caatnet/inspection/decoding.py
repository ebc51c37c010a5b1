"""Ahead-of-time compilation and analysis of an inference step.

A decoding step reads the last token of a full context, for each of ``batch``
sequences. A prefill step reads the last chunk of a prompt that fills the
context. No request uses top-k or top-p, whose filters gather the logits.
"""

from collections.abc import Mapping
import dataclasses
import functools
import itertools
import math
import re
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from caatnet.inference import decoder
from caatnet.inference.decoder import Capacity
from caatnet.inference.sampling import (
  DTYPES,
  GATHERING_FILTERS,
  Sampling,
  sampling_reductions,
)
from caatnet.inference.weights import Weights
from caatnet.inspection import programs
from caatnet.inspection.programs import CompiledProgram
from caatnet.models.nanobatches import NanobatchRule
from caatnet.models.paged import Batch, CacheShape
from caatnet.program import Program
from parallel.ledger import hlo, in_place, latency, ledger
from parallel.ledger.ledger import Collective
from parallel.ledger.targets import Target
from parallel.plans.network import inference

PHASES = ("prefill", "decode")


@dataclasses.dataclass(frozen=True)
class InferenceStep:
  """Inference step to compile.

  Attributes:
    phase: One of ``PHASES``.
    program: Model on the target's devices.
    weights: Storage of the parameters, with shapes instead of arrays.
    capacity: Maximum number of sequences and tokens that a replica holds.
    cache_shape: Shape of one rank's cache.
    nanobatches: Division of the step into nano-batches; None for none.
  """

  phase: str
  program: Program
  weights: Weights
  capacity: Capacity
  cache_shape: CacheShape
  nanobatches: NanobatchRule | None = None

  @property
  def _has_decodes(self) -> bool:
    """Whether each sequence has one token: decoding or `batch_invariant`."""
    return self.phase == "decode" or self.capacity.batch_invariant

  @property
  def sizes(self) -> inference.ModelStep:
    """Sizes of the data that a replica reads in the step."""
    capacity = self.capacity
    context = capacity.context
    if self._has_decodes:
      return inference.ModelStep(capacity.batch, 1, context)
    return inference.ModelStep(1, min(capacity.chunk, context), context)

  @property
  def replicas_per_device(self) -> int:
    return math.prod(axis.lanes for axis in self.program.layout.data)

  @functools.cached_property
  def state(self) -> Any:
    """Shapes and shardings of cache and newest tokens."""
    return decoder.abstract_state(
      self.program, self.capacity, self.cache_shape
    )

  @functools.cached_property
  def params(self) -> Any:
    """Shapes and shardings of the stored parameters."""
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      self.weights.params,
      self.program.layout.shardings(self.weights.specs),
    )

  @functools.cached_property
  def inputs(self) -> tuple[Batch, Sampling]:
    """Shapes and shardings of the step's batch and sampling parameters."""
    layout = self.program.layout
    dims = layout.batch_dims[1:]  # without workers
    sharding = layout.shardings(decoder.replica_spec(self.program))

    def array(*shape, dtype=jnp.int32):
      return jax.ShapeDtypeStruct((*dims, *shape), dtype, sharding=sharding)

    sequences, length, _ = self.sizes
    tokens = array(sequences * length)  # [*dims, tokens of the step]
    each = array(sequences)  # [*dims, sequences]
    batch = Batch(
      tokens, tokens, tokens,
      array(sequences, self.capacity.pages_per_sequence), each, each,
      num_decodes=sequences if self._has_decodes else 0,
    )
    return batch, Sampling(
      *(array(sequences, dtype=dtype) for dtype in DTYPES.values())
    )

  @property
  def used_inputs(self) -> Any:
    """The parts of ``inputs`` that are arguments of the compiled program."""
    batch, sampling = self.inputs
    # jit drops unused arguments: parameters of filters, which are off here.
    return batch, [
      x
      for name, x in sampling._asdict().items() if name not in GATHERING_FILTERS
    ]

  def lower(self) -> jax.stages.Lowered:
    """Lowers the step's program, as the decoder runs it."""
    run = decoder.make_step(
      self.program, self.weights, self.cache_shape, self.nanobatches
    )
    return run.lower(self.params, self.state, *self.inputs, filters=False)

  def formula(self) -> dict[tuple[str, str], int]:
    """Returns the bytes that a device reduces over the tensor axis in a step.

    Returns:
      (kind, dtype) -> bytes, by the closed formulas of the model and of
      sampling; empty if one device has the whole axis.
    """
    program, sizes = self.program, self.sizes
    tensor = program.layout.tensor
    found: dict[tuple[str, str], int] = {}
    # Lanes of one device reduce without communication.
    if tensor.devices == 1:
      return found
    count = program.model.decoding_reductions(
      tokens=sizes.sequences * sizes.tokens
    ) + sampling_reductions(
      tensor, num_sequences=sizes.sequences,
      vocab_size=program.model.config.vocab_size, filters=False,
    )
    for reduction, times in count.items():
      key = reduction.kind, reduction.dtype
      size = math.prod(reduction.shape) * jnp.dtype(reduction.dtype).itemsize
      # Operands of the lanes' replicas are stacked into one collective.
      size *= times * self.replicas_per_device
      found[key] = found.get(key, 0) + size
    return found


class BuiltModel(Protocol):
  """Language model that a config describes, without its parameters."""

  program: Program
  capacity: Capacity
  cache_shape: CacheShape
  nanobatches: NanobatchRule | None

  def abstract_weights(self) -> Weights:
    """Returns the weights with shapes instead of arrays."""
    ...


def step_of(phase: str, built: BuiltModel) -> InferenceStep:
  """Returns the step of a phase of the inference that a config describes.

  Raises:
    ValueError: The model keeps a recurrent state, for which this module has no
      bounds.
  """
  if built.cache_shape.states:
    raise ValueError(
      f"--phase={phase} supports only models with a cache of keys and values: "
      f"{type(built.program.model).__name__} keeps a state per sequence"
    )
  return InferenceStep(
    phase, built.program, built.abstract_weights(), built.capacity,
    built.cache_shape, built.nanobatches,
  )


def analyse(
  step: InferenceStep,
  target: Target,
  compiler_options: Mapping[str, bool | str] | None = None,
) -> dict[str, Any]:
  """Compiles an inference step and analyses the program.

  Args:
    step: Step, built on the target's devices.
    target: Machine to compile for.
    compiler_options: XLA options; None for those with which the step is run.

  Returns:
    Plain data, as from `study.analyse`, and "inference": the step's sizes,
    bytes by formula, the attention kernel, and bounds with latency. A program
    that gathers pages has no bounds.

  Raises:
    ValueError: The program copies or slices the cache; the message names the
      instructions. Conversions of a 16-bit cache by XLA:CPU are no error.
  """
  layout = step.program.layout
  if compiler_options is None:
    compiler_options = layout.compiler_options(step.nanobatches is not None)
  made = programs.compile_for(target, layout.mesh, step.lower, compiler_options)
  # Shapes of one device's cache arrays, to recognise them in the compiled HLO.
  cache, latest = step.state
  arrays = [
    hlo.Shape(
      str(x.dtype), x.sharding.shard_shape(x.shape), 8 * x.dtype.itemsize
    )
    for x in jax.tree.leaves(cache)
  ]
  uses = in_place.uses(made.module, arrays, step.cache_shape.num_layers)
  _check_in_place(step, target, uses)
  # Without a paged-attention kernel, attention copies the pages.
  gathers = bool(uses.gathers) or not uses.kernels
  result = made.facts | {
    "memory": made.memory({
      "parameters": step.params,
      "cache": cache,
      "batch": (latest, step.used_inputs),
    }),
    "inference": {
      "phase": step.phase,
      **step.sizes._asdict(),
      "replicas": step.program.layout.num_data_ranks,
      "page_size": step.capacity.page_size,
      "order": step.cache_shape.order,
      "gathers_pages": gathers,
      "widened": list(uses.widened),
      "kernels": sorted({_kernel_scope(name) for name in uses.kernels}),
      "formula": _compare_formula(step, made),
    },
  }
  if target.hardware is not None:
    result |= _analyse_schedule(step, made, arrays, gathers)
  return result


def _check_in_place(
  step: InferenceStep, target: Target, uses: in_place.Uses
) -> None:
  """Raises ValueError if the program copies or slices the cache."""
  on_cpu = target.devices[0].platform == "cpu"
  faults = uses.faults if on_cpu else uses.faults + uses.widened
  if faults:
    raise ValueError(
      f"the program of --phase={step.phase} for {target.name} does not keep "
      f"the cache in place: {'; '.join(faults[:3])}"
      + (f"; and {len(faults) - 3} more" if faults[3:] else "")
    )


def _kernel_scope(name: str) -> str:
  """Returns a kernel's name scope in the model, without jax's own scopes."""
  return ledger.parse_name_stack(name)[2]


def _compare_formula(step: InferenceStep, made: CompiledProgram) -> list[
  dict[str, Any]
]:
  """Returns bytes by formula and in the lowered and compiled programs."""
  formula = step.formula()
  axis = step.program.layout.tensor.name
  sides: dict[str, dict[tuple[str, str], int]] = {"formula": formula}
  for side, entries in (("lowered", made.asked), ("compiled", made.made)):
    sums = sides[side] = {}
    for entry in ledger.select(entries, axis=axis):
      if entry.bytes:
        key = entry.kind, entry.dtype
        sums[key] = sums.get(key, 0) + entry.bytes * (entry.count or 0)
  keys = dict.fromkeys(key for sums in sides.values() for key in sums)
  return [
    {"kind": kind, "dtype": dtype,
     **{side: sums.get((kind, dtype), 0) for side, sums in sides.items()}}
    for kind, dtype in keys
  ]


def _analyse_schedule(
  step: InferenceStep, made: CompiledProgram, arrays: list[hlo.Shape],
  gathers: bool,
) -> dict[str, Any]:
  """Returns the schedule, and bounds of its time with and without latency.

  ``arrays`` are the cache's; a program that ``gathers`` pages has no bounds.
  """
  hardware, dtype = made.target.hardware, step.program.model.dtype
  reads = _kernel_reads(step, made.module, arrays)
  times = programs.timeline(made.schedule(reads=reads).collectives())
  result: dict[str, Any] = times | {"constants": made.constants(dtype)}
  pieces = nanobatch_overlap(made, reads)
  if pieces:
    result["nanobatches"] = pieces
  # A gather of all pages into a dense copy is not required by the step.
  if gathers:
    return result
  operations = inference.operations(
    step.program.model.config.workload, step.sizes,
    step.program.layout.tensor.size,
  )
  # `operations` is per tensor rank; a device hosts this many.
  per_device = step.program.layout.tensor.lanes * step.replicas_per_device
  flops = per_device * sum(o.count * o.flops for o in operations)
  peak = hardware.peak(dtype)
  cost = made.schedule(reads=reads).total()
  # XLA's text does not show the FLOPs of the attention kernel.
  compute = max(cost.seconds, flops / peak)
  result["roofline"] = {
    "model_flops": flops,
    "product_flops": cost.flops,
    "memory_bytes": cost.bytes,
    "model_flops_seconds": flops / peak,
    "memory_seconds": cost.bytes / hardware.memory_bandwidth,
    "formula_seconds": per_device * sum(
      o.count * o.seconds(hardware, dtype) for o in operations
    ),
    **programs.step_time_bounds(compute, times["overlap"]),
  }
  try:
    span = latency.build_time_model(made.target, made.mesh)
    result["with_latency"] = [
      programs.step_time_bounds(
        compute,
        programs.timeline(
          made.schedule(lambda e, i=i: span(e)[i], reads).collectives()
        )["overlap"],
      )
      for i in range(2)
    ]
    result["constants"] |= _latencies(made)
  except ValueError as error:
    result["without_latency"] = str(error)
  return result


def nanobatch_overlap(
  made: CompiledProgram, reads: Mapping[tuple[int, ...], float]
) -> list[dict[str, Any]]:
  """Returns the bytes that nano-batches reduce, and how many are overlapped.

  A nano-batch's reduction is overlapped if a matrix product or custom kernel of
  another nano-batch is between the instructions that start and end it. Its
  hidden fraction is the roofline time of all instructions of other nano-batches
  between these two, divided by its time on the links.

  Args:
    made: The program.
    reads: Bytes that kernels read, as in `CompiledProgram.schedule`.

  Returns:
    A row of operand bytes for each kind of collective in a nano-batch's scope;
    [] without nano-batches.
  """

  def piece(path: str) -> str:
    found = re.search(r"\bnanobatch_(\d+)\b", path)
    return found[1] if found else ""

  def of_other(entry: Collective, instruction: hlo.Instruction) -> bool:
    return piece(instruction.op_name) not in ("", piece(entry.where))

  kernels = {
    i.name for computation in made.module.computations.values()
    for i in computation.instructions if i.opcode == "custom-call"
  }
  rows: dict[str, dict[str, Any]] = {}
  for t in made.schedule(reads=reads, hides=of_other).collectives():
    if not t.bytes or not piece(t.entries[0].where):
      continue
    row = rows.setdefault(t.entries[0].kind, {
      "kind": t.entries[0].kind, "count": 0, "bytes": 0, "asynchronous": 0,
      "overlapped": 0, "hidden": 0.0,
    })
    size = t.bytes * (t.count or 1)
    row["count"] += t.count or 1
    row["bytes"] += size
    row["asynchronous"] += size * t.asynchronous
    row["overlapped"] += size * bool(
      t.overlapped.flops or kernels.intersection(t.between)
    )
    row["hidden"] += size * t.hidden * t.asynchronous
  return list(rows.values())


def _latencies(made: CompiledProgram) -> dict[str, list[str]]:
  """Returns the known latencies of small all-reduces over each set of axes."""
  found = {}
  for entry in made.made:
    if entry.bytes and entry.kind == "all_reduce":
      times = latency.all_reduce_times(made.target, made.mesh, entry)
      least, greatest = (end * 1e6 for end in times.all_reduce(1))
      found[f"smallest all-reduce over {','.join(entry.axes)}"] = [
        f"{least:.0f} to {greatest:.0f} us, {times.mark}", times.source
      ]
  return found


def _kernel_reads(
  step: InferenceStep, module: hlo.Module, arrays: list[hlo.Shape]
) -> dict[tuple[int, ...], float]:
  """Returns dims -> bytes that a kernel reads of each cache array.

  A kernel reads one layer, and at most the positions of its sequences (all, or
  those of its nano-batch).
  """
  shape, sizes = step.cache_shape, step.sizes
  # Fraction of the cache that one call reads: at most one layer, and no more
  # positions than the sequences have.
  slots = shape.num_layers * shape.num_pages * shape.page_size
  part = min(1 / shape.num_layers, sizes.sequences * sizes.context / slots)
  part *= _nanobatch_fraction(step)
  return {
    dims: array.bytes * part
    for array in arrays for dims in in_place.view_dims(module, [array])
  }


def _nanobatch_fraction(step: InferenceStep) -> float:
  """Returns the mean fraction of all cached positions that a nano-batch reads.

  Nano-batches of a decoding step read each context once. A nano-batch of a
  prefill chunk also reads the positions of the ones before it.
  """
  if step.nanobatches is None:
    return 1.0
  sequences, tokens, context = step.sizes
  dims = len(step.program.layout.batch_dims) - 1  # of replicas
  sizes = step.nanobatches.sizes(jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[dims:], x.dtype), step.inputs[0]
  ))
  read = 0
  for start, stop in itertools.pairwise([0, *itertools.accumulate(sizes)]):
    # The last position to which each sequence of the nano-batch attends.
    read += sum(
      context - tokens + min(stop - row * tokens, tokens)
      for row in range(start // tokens, math.ceil(stop / tokens))
    )
  return read / (len(sizes) * sequences * context)
