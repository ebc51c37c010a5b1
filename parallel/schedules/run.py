"""Execution of schedules inside ``jax.shard_map`` as a series of permutes.

The (source, destination) pairs of a round are split into partial permutations:
sets in which no rank sends twice or receives twice. Each set becomes one
permute. A constant table, indexed by rank, lists the chunks that a rank sends
in the permute, so the program sends exactly the chunks of the schedule. Every
permute and addition is linear, so jax derives the transpose for the backward.

Shape legend: N = ranks of the schedule; R = ranks on this device; C = chunks;
K = elements of a chunk; S = chunks in a rank's slice; s = rows of a slice.
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
from parallel.plans.schedules.check import check
from parallel.plans.schedules.colouring import partial_permutations
from parallel.plans.schedules.schedule import Round, Schedule

Executor = Callable[[jax.Array, str], jax.Array]  # (array, mesh axis name)


def executor(schedule: Schedule) -> Executor:
  """Returns a function that runs the schedule over a mesh axis.

  Args:
    schedule: Schedule, whose correctness is checked here. Its ranks are the
      devices of the mesh axis.

  Returns:
    A function of a device's array and the name of a mesh axis. It computes the
    same values as ``lax.psum`` for an all-reduce, ``lax.psum_scatter(...,
    tiled=True)`` of dim 0 for a reduce-scatter, and ``lax.all_gather(...,
    tiled=True)`` along dim 0 for an all-gather. It can be passed as ``via`` to
    the function of that collective in `parallel.collectives`. Its result is
    device-varying by type.

  Raises:
    ValueError: The schedule does not perform its collective. The returned
      function raises it, when traced, for an axis of another size or a dim
      that is not divisible by the number of ranks.
  """
  check(schedule)
  steps = _steps(schedule)

  def execute(x: jax.Array, name: str) -> jax.Array:
    size = lax.axis_size(name)
    return _run(schedule, steps, x[None], Axis(name, size, size))[0]

  return execute


def run_on_lanes(schedule: Schedule, x: jax.Array, axis: Axis) -> jax.Array:
  """Runs a schedule between logical ranks, several of which may share a device.

  Example:
    The sum of four ranks, which are lanes of one device:

    >>> from jax.sharding import PartitionSpec
    >>> from parallel.axes import make_mesh
    >>> from parallel.plans.schedules import builders
    >>> from parallel.plans.topology.builders import ring
    >>> schedule = builders.build("ring", ring(4))
    >>> axis = Axis("a", 4, 1)
    >>> total = jax.shard_map(
    ...   lambda x: run_on_lanes(schedule, x, axis),
    ...   mesh=make_mesh({"a": axis}),
    ...   in_specs=PartitionSpec("a"), out_specs=PartitionSpec("a"),
    ... )
    >>> total(jnp.ones((4, 8))).min()
    Array(4., dtype=float32)

  Args:
    schedule: Schedule, whose correctness is checked here. Its ranks are the
      logical ranks of the axis.
    x: ``[R, ...]``: array of each of the R ranks on this device (lanes), with
      the shape of a device's array in `executor`.
    axis: Axis over whose ranks the schedule runs.

  Returns:
    ``[R, ...]``: result of each of these ranks.

  Raises:
    ValueError: The schedule does not perform its collective, the axis has
      another size, or a dim is not divisible by the number of ranks.
  """
  check(schedule)
  return _run(schedule, _steps(schedule), x, axis)


@dataclasses.dataclass(frozen=True)
class _Step:
  """One permute, in which each pair of ranks sends k chunks.

  Attributes:
    pairs: (source, destination) of each message.
    reads: int ``[rank, k]``: chunks that a rank sends; arbitrary for ranks that
      do not send.
    writes: int ``[rank, k]``: chunks that a rank receives; C, which is out of
      range, for ranks that do not receive.
    reduces: Whether a receiver adds the chunks to its own; if not, it replaces
      them.
  """

  pairs: tuple[tuple[int, int], ...]
  reads: np.ndarray
  writes: np.ndarray
  reduces: bool


def _steps(schedule: Schedule) -> list[list[_Step]]:
  return [_round_steps(schedule, transfers) for transfers in schedule.rounds]


def _round_steps(schedule: Schedule, transfers: Round) -> list[_Step]:
  """Groups a round's transfers into permutes.

  All pairs of a permute send arrays of one shape. Only pairs with equal numbers
  of chunks share a permute, so that no pair sends padding.
  """
  # All chunks from one rank to another in this round form one message.
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
      # Ranks that do not send read chunk 0, which the permute ignores. Ranks
      # that do not receive get zeros from the permute and drop them, since
      # their writes are out of range.
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
      f"schedule {schedule.name} is for {schedule.num_ranks} ranks, but the "
      f"axis {axis.name!r} has {axis.size}; they must be equal"
    )
  x = collectives.varying(x, axis.name)
  chunks, restore = _LAYOUTS[schedule.collective](schedule, x, axis)
  for permutes in steps:
    chunks = _run_round(chunks, permutes, axis)
  return restore(chunks)


def _run_round(
  before: jax.Array, permutes: list[_Step], axis: Axis
) -> jax.Array:
  """Runs a round's permutes; returns the chunks after it.

  ``before`` and the result are ``[R, C, K]``: C chunks of K elements of each of
  the R ranks on this device.
  """
  ranks = collectives.ranks_here(axis)
  chunks = before
  for step in permutes:
    # The sent chunks come from `before`, not from `chunks`: the transfers of a
    # round read the state before it, even if an earlier permute of the same
    # round has already overwritten the chunk.
    sent = _take(before, jnp.asarray(step.reads)[ranks])  # [R, k, K]
    arrived = collectives.permute(sent, axis, step.pairs)  # [R, k, K]
    writes = jnp.asarray(step.writes)[ranks]
    chunks = jax.vmap(_add if step.reduces else _put)(chunks, arrived, writes)
  return chunks


def _add(chunks: jax.Array, arrived: jax.Array, where: jax.Array) -> jax.Array:
  """Adds k received chunks ``[k, K]`` to the chunks ``where`` of ``[C, K]``.

  The index C, which is out of range, is ignored.
  """
  return chunks.at[where].add(arrived, mode="drop")


def _put(chunks: jax.Array, arrived: jax.Array, where: jax.Array) -> jax.Array:
  """Writes k received chunks ``[k, K]`` to the chunks ``where`` of ``[C, K]``.

  The index C, which is out of range, is ignored.
  """
  return chunks.at[where].set(arrived, mode="drop")


@jax.vmap
def _take(chunks: jax.Array, where: jax.Array) -> jax.Array:
  """Takes the chunks ``where`` of each of R ranks, ``[R, k, K]``.

  ``chunks`` is ``[R, C, K]``, ``where`` is int ``[R, k]``.
  """
  return chunks[where]


def _all_reduce_layout(schedule: Schedule, x: jax.Array, axis: Axis):
  """Splits the arrays of R ranks to C chunks each; also returns the inverse.

  ``[R, ...]`` becomes ``[R, C, K]``.
  """
  del axis
  size = math.prod(x.shape[1:])
  chunks = _cut(x.reshape(x.shape[0], size), schedule.num_chunks)
  return chunks, lambda y: _join(y, size).reshape(x.shape)


def _reduce_scatter_layout(schedule: Schedule, x: jax.Array, axis: Axis):
  """Splits the arrays of R ranks to C chunks each; also returns a function.

  ``[R, N s, ...]`` becomes ``[R, C, K]``. The returned function extracts each
  rank's slice, ``[R, s, ...]``, from the schedule's result ``[R, C, K]``.
  """
  n, lanes = schedule.num_ranks, x.shape[0]
  if x.ndim < 2 or x.shape[1] % n:
    raise ValueError(
      f"{schedule.name}: a reduce-scatter of an array with shape {x.shape[1:]} "
      f"needs a first dim that is a multiple of {n} ranks"
    )
  shape = (lanes, x.shape[1] // n, *x.shape[2:])
  size = math.prod(shape[1:])
  # [R, N, S, K]: each slice is cut, and padded, separately, since a chunk must
  # not cross the border between two ranks' slices.
  slices = _cut(x.reshape(lanes, n, size), schedule.num_chunks // n)
  owned = _owned_chunks(schedule)
  # `owned` lists the chunks in the order of slices. Its inverse permutation
  # gives the position of each chunk among the slices.
  places = np.argsort(owned.reshape(-1))
  chunks = slices.reshape(lanes, schedule.num_chunks, -1)[:, places]
  mine = jnp.asarray(owned)[collectives.ranks_here(axis)]  # [R, S]
  return chunks, lambda y: _join(_take(y, mine), size).reshape(shape)


def _all_gather_layout(schedule: Schedule, x: jax.Array, axis: Axis):
  """Splits the slices of R ranks to chunks; also returns a function.

  ``[R, s, ...]`` becomes ``[R, C, K]``: the chunks of a rank's slice are at
  their indices, all others are zero. The returned function turns the schedule's
  result ``[R, C, K]`` into all slices in rank order, ``[R, N s, ...]``.
  """
  if x.ndim < 2:
    raise ValueError(
      f"{schedule.name}: an all-gather needs an array with at least one dim"
    )
  n, lanes = schedule.num_ranks, x.shape[0]
  shape = (lanes, n * x.shape[1], *x.shape[2:])
  size = math.prod(x.shape[1:])
  # [R, S, K]
  slices = _cut(x.reshape(lanes, size), schedule.num_chunks // n)
  owned = _owned_chunks(schedule)
  zeros = jnp.zeros(
    (lanes, schedule.num_chunks, slices.shape[-1]), slices.dtype
  )
  # A scatter requires that both operands vary over the same mesh axes.
  zeros = collectives.varying(zeros, *collectives.varying_axes(x))
  mine = jnp.asarray(owned)[collectives.ranks_here(axis)]

  def restore(y):
    # [R, C, K] -> [R, N, S, K], chunks in the order of the ranks' slices.
    y = y[:, owned.reshape(-1)].reshape(lanes, n, *slices.shape[1:])
    return _join(y, size).reshape(shape)

  return jax.vmap(_put)(zeros, slices, mine), restore


_LAYOUTS = {
  "all_reduce": _all_reduce_layout,
  "reduce_scatter": _reduce_scatter_layout,
  "all_gather": _all_gather_layout,
}


def _owned_chunks(schedule: Schedule) -> np.ndarray:
  """Returns the S chunks of each rank's slice, int ``[rank, S]``."""
  # The stable sort by owner keeps a rank's chunks in ascending order. `check`
  # has proven that all ranks own the same number of chunks.
  return np.argsort(schedule.owners, kind="stable").reshape(
    schedule.num_ranks, -1
  )


def _cut(x: jax.Array, parts: int) -> jax.Array:
  """Cuts ``[..., size]`` into ``[..., parts, K]``, padded with zeros."""
  padding = -x.shape[-1] % parts
  x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
  return x.reshape(*x.shape[:-1], parts, -1)


def _join(x: jax.Array, size: int) -> jax.Array:
  """Joins ``[..., parts, K]`` to ``[..., size]``, without the padding."""
  return x.reshape(*x.shape[:-2], -1)[..., :size]
