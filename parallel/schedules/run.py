"""Runs schedules inside ``jax.shard_map``, by permutes.

A round's pairs are coloured into partial permutations, and each becomes one
permute of the chunks that its pairs send; which chunks these are is a constant
table indexed by rank. So what the program sends is what the schedule says, no
chunk more. Every step is linear and differentiates to its transpose.

Shape legend: R = lanes on this device; C = chunks; K = elements of a chunk; S =
chunks in a rank's slice.
"""

from collections.abc import Callable
import dataclasses
import math

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from parallel import collectives
from parallel.axes import Axis
from parallel.schedules.check import check
from parallel.schedules.colouring import partial_permutations
from parallel.schedules.schedule import Round, Schedule

Executor = Callable[[jax.Array, str], jax.Array]


def executor(schedule: Schedule) -> Executor:
  """A schedule as a function of a device's array and a mesh axis's name.

  Args:
    schedule: Proven first; its ranks are the devices of the mesh axis.

  Returns:
    For an all-reduce, what ``lax.psum`` computes; for a reduce-scatter,
    ``lax.psum_scatter(..., tiled=True)`` of dim 0; for an all-gather,
    ``lax.all_gather(..., tiled=True)`` along dim 0. Each fits as ``via=`` of
    the verb in `parallel.collectives`. The result is device-varying by type.

  Raises:
    ValueError: The schedule is not what it says; when traced, an axis of
      another size, or a dim that does not divide.
  """
  check(schedule)
  steps = _steps(schedule)

  def execute(x: jax.Array, name: str) -> jax.Array:
    size = lax.axis_size(name)
    return _run(schedule, steps, x[None], Axis(name, size, size))[0]

  return execute


def on_lanes(schedule: Schedule, x: jax.Array, axis: Axis) -> jax.Array:
  """Runs a schedule between logical ranks, of which a device may host several.

  Args:
    schedule: Proven first; its ranks are the logical ones.
    x: ``[R, ...]``: what each lane would give to `executor`.
    axis: Whose ranks.

  Returns:
    ``[R, ...]``: what each rank ends with.
  """
  check(schedule)
  return _run(schedule, _steps(schedule), x, axis)


@dataclasses.dataclass(frozen=True)
class _Step:
  """One permute.

  Attributes:
    pairs: (source, destination).
    reads: int ``[rank, k]``: chunks that a rank sends.
    writes: int ``[rank, k]``: where they go at the receiver; C at others.
    reduces: Whether they are added there.
  """

  pairs: tuple[tuple[int, int], ...]
  reads: np.ndarray
  writes: np.ndarray
  reduces: bool


def _steps(schedule: Schedule) -> list[list[_Step]]:
  return [_round_steps(schedule, transfers) for transfers in schedule.rounds]


def _round_steps(schedule: Schedule, transfers: Round) -> list[_Step]:
  """Pairs of one step send equally many chunks, so that none are padding."""
  chunks: dict[tuple[int, int, bool], list[int]] = {}
  for t in transfers:
    key = (t.source, t.destination, t.operation == "reduce")
    chunks.setdefault(key, []).append(t.chunk)
  kinds: dict[tuple[bool, int], list[tuple[int, int]]] = {}
  for (source, there, reduces), sent in chunks.items():
    kinds.setdefault((reduces, len(sent)), []).append((source, there))
  steps = []
  for (reduces, count), pairs in kinds.items():
    for part in partial_permutations(pairs):
      reads = np.zeros((schedule.num_ranks, count), np.int32)
      writes = np.full_like(reads, schedule.num_chunks)
      for source, there in part:
        reads[source] = writes[there] = chunks[source, there, reduces]
      steps.append(_Step(tuple(part), reads, writes, reduces))
  return steps


def _run(
  schedule: Schedule, steps: list[list[_Step]], x: jax.Array, axis: Axis
) -> jax.Array:
  if axis.size != schedule.num_ranks:
    raise ValueError(
      f"{schedule.name} is a schedule of {schedule.num_ranks} ranks; the axis "
      f"{axis.name!r} has {axis.size}"
    )
  x = collectives.varying(x, axis.name)
  chunks, restore = _LAYOUTS[schedule.collective](schedule, x, axis)
  for permutes in steps:
    chunks = _round(chunks, permutes, axis)
  return restore(chunks)


def _round(
  before: jax.Array, permutes: list[_Step], axis: Axis
) -> jax.Array:
  """One round on ``[R, C, K]``."""
  ranks = collectives.ranks_here(axis)
  chunks = before
  for step in permutes:
    sent = _take(before, jnp.asarray(step.reads)[ranks])
    arrived = collectives.permute(sent, axis, step.pairs)
    writes = jnp.asarray(step.writes)[ranks]
    chunks = jax.vmap(_add if step.reduces else _put)(chunks, arrived, writes)
  return chunks


def _add(chunks: jax.Array, arrived: jax.Array, where: jax.Array) -> jax.Array:
  return chunks.at[where].add(arrived, mode="drop")


def _put(chunks: jax.Array, arrived: jax.Array, where: jax.Array) -> jax.Array:
  return chunks.at[where].set(arrived, mode="drop")


@jax.vmap
def _take(chunks: jax.Array, where: jax.Array) -> jax.Array:
  return chunks[where]


def _all_reduce_layout(schedule: Schedule, x: jax.Array, axis: Axis):
  """``[R, ...] -> [R, C, K]`` and the way back."""
  del axis
  size = math.prod(x.shape[1:])
  chunks = _cut(x.reshape(x.shape[0], size), schedule.num_chunks)
  return chunks, lambda y: _join(y, size).reshape(x.shape)


def _reduce_scatter_layout(schedule: Schedule, x: jax.Array, axis: Axis):
  """``[R, N s, ...] -> [R, C, K]``, and back to ``[R, s, ...]``."""
  n, lanes = schedule.num_ranks, x.shape[0]
  if x.ndim < 2 or x.shape[1] % n:
    raise ValueError(
      f"{schedule.name}: a reduce-scatter of {x.shape[1:]} needs a first dim "
      f"that {n} ranks divide"
    )
  shape = (lanes, x.shape[1] // n, *x.shape[2:])
  size = math.prod(shape[1:])
  slices = _cut(x.reshape(lanes, n, size), schedule.num_chunks // n)
  owned = _owned(schedule)
  places = np.argsort(owned.reshape(-1))  # of chunks, among all slices'
  chunks = slices.reshape(lanes, schedule.num_chunks, -1)[:, places]
  mine = jnp.asarray(owned)[collectives.ranks_here(axis)]
  return chunks, lambda y: _join(_take(y, mine), size).reshape(shape)


def _all_gather_layout(schedule: Schedule, x: jax.Array, axis: Axis):
  """``[R, s, ...] -> [R, C, K]``, and back to ``[R, N s, ...]``."""
  if x.ndim < 2:
    raise ValueError(f"{schedule.name}: an all-gather needs a dim to join")
  n, lanes = schedule.num_ranks, x.shape[0]
  shape = (lanes, n * x.shape[1], *x.shape[2:])
  size = math.prod(x.shape[1:])
  slices = _cut(x.reshape(lanes, size), schedule.num_chunks // n)
  owned = _owned(schedule)
  zeros = jnp.zeros(
    (lanes, schedule.num_chunks, slices.shape[-1]), slices.dtype
  )
  zeros = collectives.varying(zeros, *collectives.varying_axes(x))
  mine = jnp.asarray(owned)[collectives.ranks_here(axis)]

  def restore(y):
    y = y[:, owned.reshape(-1)].reshape(lanes, n, *slices.shape[1:])
    return _join(y, size).reshape(shape)

  return jax.vmap(_put)(zeros, slices, mine), restore


_LAYOUTS = {
  "all_reduce": _all_reduce_layout,
  "reduce_scatter": _reduce_scatter_layout,
  "all_gather": _all_gather_layout,
}


def _owned(schedule: Schedule) -> np.ndarray:
  """int ``[rank, S]``: chunks of each rank's slice."""
  return np.argsort(schedule.owners, kind="stable").reshape(
    schedule.num_ranks, -1
  )


def _cut(x: jax.Array, parts: int) -> jax.Array:
  """``[..., size] -> [..., parts, K]``, padded with zeros."""
  padding = -x.shape[-1] % parts
  x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
  return x.reshape(*x.shape[:-1], parts, -1)


def _join(x: jax.Array, size: int) -> jax.Array:
  """``[..., parts, K] -> [..., size]``."""
  return x.reshape(*x.shape[:-2], -1)[..., :size]
