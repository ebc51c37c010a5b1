"""Actions of a stage in a tick, a time step of a pipeline schedule.

A part is the layers of one chunk of a stage. An action, such as the forward of
a part, is a branch of a switch inside ``jax.shard_map``. Stages take different
branches, so a branch must not communicate over the axis of stages. Over other
axes, it may communicate only among devices of one stage.
"""

from collections.abc import Callable, Sequence
import contextlib
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
import jax.numpy as jnp

from parallel.pipeline.residuals import (
  Backward,
  RecomputingBackward,
  SavingBackward,
  Tree,
)
from parallel.plans.pipeline.pipeline_schedule import (
  ActionKind,
  PipelineSchedule,
)


class TickRow(NamedTuple):
  """Actions and buffer slots of one tick (`parallel.plans.pipeline.table`).

  Arrays are int32, ``[stages]`` (all, or those of this device) or ``[]``.

  Attributes:
    kind: `ActionKind` of the stage's action.
    chunk: Index of the action's part among the stage's parts.
    write_input, write_cotangent: For each direction, the slot for the value
      that arrives from there.
    enter_input, enter_cotangent: Slot for a value from outside the parts.
    read_input, read_cotangent: Slot that the action reads.
    residuals, deltas: Slot of these values that the action reads or writes.
  """

  kind: jax.Array
  chunk: jax.Array
  write_input: tuple[jax.Array, ...]
  enter_input: jax.Array
  read_input: jax.Array
  write_cotangent: tuple[jax.Array, ...]
  enter_cotangent: jax.Array
  read_cotangent: jax.Array
  residuals: jax.Array
  deltas: jax.Array


class Buffers(NamedTuple):
  """Buffers of a stage: trees of ``[P, ...]`` with P slots; P differs by tree.

  Attributes:
    inputs: Inputs of the stage's parts of the model. Received values that no
      action reads are written to the last slot.
    cotangents: Cotangents of the outputs of parts, with such a slot, too.
    residuals: Residuals that forwards have saved for backwards.
    deltas: Values that the first half of a split backward saves for the second
      half (`parallel.pipeline.residuals`).
  """

  inputs: Tree
  cotangents: Tree
  residuals: Tree
  deltas: Tree


class Actions(NamedTuple):
  """Actions of a pipeline schedule.

  Attributes:
    schedule: The schedule.
    part: Function of a part of the model, the layers of one chunk of a stage:
      ``(params of the part, constants of the part, x) -> x``.
    keeps: Whether a forward saves its residuals for the backward.
  """

  schedule: PipelineSchedule
  part: Callable[[Tree, Tree, Tree], Tree]
  keeps: bool

  @property
  def backward(self) -> Backward:
    """Functions that compute forward and backward of a part of the model."""
    if self.keeps:
      return SavingBackward(self.part, self.schedule.splits)
    return RecomputingBackward(self.part)

  def forward_only(
    self, entering: Tree, row: TickRow, params: Tree, constants: Tree,
    inputs: Tree, arriving: Sequence[Tree],
  ) -> tuple[Tree, Tree]:
    """Runs a stage's action in a schedule without backward.

    Args:
      entering: Input of the first part of the model, if one enters in this
        tick.
      row: Action and buffer slots of this stage in the tick.
      params: Parameters of the stage's parts, ``[chunks, ...]``.
      constants: Constants of the stage's parts, ``[chunks, ...]``.
      inputs: Buffer of inputs with P slots and an unused one, ``[P + 1, ...]``.
      arriving: Values from other stages, one for each direction.

    Returns:
      The part's output, and the updated buffer.
    """
    # Values are written before the action runs, which may read them.
    inputs = self._write_received(
      inputs, arriving, row.write_input, entering, row.enter_input
    )

    def forward(x):
      return self.part(_chunk(params, row), _chunk(constants, row), x)

    # Idle stages send their input, which no stage reads.
    y = lax.cond(
      row.kind == ActionKind.FORWARD, self._scoped(forward, ActionKind.FORWARD),
      lambda x: x,
      read(inputs, row.read_input),
    )
    return y, inputs

  def forward_or_backward(
    self, entering: tuple[Tree, Tree], row: TickRow, params: Tree,
    constants: Tree, buffers: Buffers,
    arriving: tuple[Sequence[Tree], Sequence[Tree]],
    grads: Tree,
  ) -> tuple[Tree, Tree, Buffers, Tree]:
    """Runs a stage's action in a schedule with backward.

    Arguments are those of `forward_only`, but ``entering`` and ``arriving`` are
    pairs: (inputs, cotangents). ``grads`` are sums of gradients.

    Returns:
      The part's output, the cotangents of its input, the updated buffers, and
      the updated sums of gradients.
    """
    # Values are written before the action runs, which may read them.
    inputs = self._write_received(
      buffers.inputs, arriving[0], row.write_input, entering[0],
      row.enter_input,
    )
    cotangents = self._write_received(
      buffers.cotangents, arriving[1], row.write_cotangent, entering[1],
      row.enter_cotangent,
    )
    _, _, residuals, deltas = buffers
    x, dy = read(inputs, row.read_input), read(cotangents, row.read_cotangent)
    nothing = jax.tree.map(jnp.zeros_like, x)  # sent by stages that are idle
    how = self.backward

    # Arguments of `Backward.forward` and of the backward's methods.
    def part():
      return _chunk(params, row), _chunk(constants, row), x

    def given():
      return *part(), _read_kept(residuals, row.residuals), dy

    def forward():
      y, kept = how.forward(*part())
      return y, _write_kept(residuals, kept, row.residuals)

    def backward():
      of_params, dx = how.both(*given())
      return dx, deltas, _add_gradients(grads, of_params, row)

    # The first half saves deltas; the second half reads them.
    def of_input():
      dx, kept = how.of_input(*given())
      return dx, _write_kept(deltas, kept, row.deltas), grads

    def of_weight():
      of_params = how.of_weight(*given(), _read_kept(deltas, row.deltas))
      return _add_gradients(grads, of_params, row)

    # There are several switches, since XLA copies a buffer that a switch both
    # reads and returns. Each of these either reads a buffer or changes it.
    y, residuals = self._run_if_due(
      row, {ActionKind.FORWARD: forward}, (nothing, residuals)
    )
    dx, deltas, grads = self._run_if_due(
      row, {ActionKind.BACKWARD: backward, ActionKind.INPUT: of_input},
      (nothing, deltas, grads),
    )
    grads = self._run_if_due(row, {ActionKind.WEIGHT: of_weight}, grads)
    return y, dx, Buffers(inputs, cotangents, residuals, deltas), grads

  def _run_if_due(
    self, row: TickRow, actions: dict[ActionKind, Callable[[], Tree]],
    otherwise: Tree
  ) -> Tree:
    """Returns the result of the action in ``row``, one of ``actions``.

    The result is ``otherwise`` if its kind is not among them.
    """
    # Kinds that the schedule never uses are excluded at trace time, so that
    # their branches are not compiled.
    used = [kind for kind in actions if (self.schedule.kinds == kind).any()]
    if not used:
      return otherwise
    # Kind -> branch; 0 for all other kinds.
    number = jnp.asarray([
      used.index(kind) + 1 if kind in used else 0 for kind in ActionKind
    ])
    return lax.switch(number[row.kind], [
      lambda: otherwise, *(self._scoped(actions[kind], kind) for kind in used)
    ])

  def _scoped(
    self, action: Callable[..., Tree], kind: ActionKind
  ) -> Callable[..., Tree]:
    """Wraps an action in named scopes: number of executions, kind and phase."""
    # The ledger groups bytes and FLOPs by these scopes.
    phase = "forward" if kind is ActionKind.FORWARD else "backward"
    return scoped(
      action, self._runs_scope(kind), f"action_{kind.name.lower()}",
      f"phase_{phase}"
    )

  def _write_received(
    self, buffer: Tree, arriving: Sequence[Tree], places: Sequence[jax.Array],
    entering: Tree, entered: jax.Array,
  ) -> Tree:
    """Writes received values, and one that enters the pipeline, to a buffer.

    Args:
      buffer: The buffer.
      arriving: Values from other stages, one for each direction.
      places: Slot for each of these values.
      entering: Value from outside the pipeline.
      entered: Slot for this value.
    """
    if self.schedule.num_chunks > 1:  # several values may arrive in one tick
      for values, place in zip(arriving, places, strict=True):
        buffer = write(buffer, values, place)
      return write(buffer, entering, entered)
    # At most one of the two values is read; the slot of the other is the last.
    place, = places
    values = jax.tree.map(
      lambda a, e: jnp.where(place < entered, a, e), *arriving, entering
    )
    return write(buffer, values, jnp.minimum(place, entered))

  def _runs_scope(self, kind: ActionKind) -> str:
    """Returns the `runs_scope` of a kind of actions.

    Executions are counted on the stage that splits most backwards.
    """
    t = self.schedule
    stage = (t.kinds == ActionKind.INPUT).sum(0).argmax()
    return runs_scope(int((t.kinds[:, stage] == kind).sum()), t)


def runs_scope(count: int, schedule: PipelineSchedule) -> str:
  """Returns a scope name from which the ledger reads how many ticks run code.

  ``count`` is the number of these ticks.

  Example:
    >>> from parallel.plans.pipeline.builders import build
    >>> runs_scope(3, build("1f1b", stages=2, microbatches=3))
    'runs_3_of_8'
  """
  return f"runs_{count}_of_{schedule.num_ticks}"


def scoped(f: Callable[..., Any], *names: str) -> Callable[..., Any]:
  """Wraps a function in named scopes, which `parallel.ledger` reads."""

  def in_scopes(*args):
    with contextlib.ExitStack() as scopes:
      for name in names:
        scopes.enter_context(jax.named_scope(name))
      return f(*args)

  return in_scopes


def read(tree: Tree, place: jax.Array) -> Tree:
  """Returns slot ``place`` of a buffer, a tree of ``[slots, ...]``."""
  return jax.tree.map(
    lambda x: lax.dynamic_index_in_dim(x, place, keepdims=False), tree
  )


def _read_kept(tree: Tree, place: jax.Array) -> Tree:
  """Returns slot ``place`` of a buffer in a fixed layout; see `_row_major`."""
  return _row_major(read(_row_major(tree), place))


def _write_kept(tree: Tree, values: Tree, place: jax.Array) -> Tree:
  """Writes values to slot ``place`` of a buffer in a fixed layout."""
  return _row_major(write(tree, values, place))


def _row_major(tree: Tree) -> Tree:
  """Fixes the memory layout of arrays, with the last dim innermost.

  If one branch prefers another layout of a buffer, XLA:TPU copies the whole
  buffer in that branch. With a fixed layout it copies only the slot.
  """
  return jax.tree.map(
    lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))), tree
  )


def write(tree: Tree, values: Tree, place: jax.Array) -> Tree:
  """Writes values to slot ``place`` of a buffer, a tree of ``[slots, ...]``."""
  return jax.tree.map(
    lambda x, v: lax.dynamic_update_index_in_dim(x, v, place, 0), tree, values
  )


def _chunk(tree: Tree, row: TickRow) -> Tree:
  """Returns the parameters of an action's part out of ``[chunks, ...]``.

  A stage has one part of the model per chunk.
  """
  # With one part, [1, ...] -> [...] is a static slice, which copies nothing.
  leaves = jax.tree.leaves(tree)
  if leaves and leaves[0].shape[0] == 1:
    return jax.tree.map(lambda x: x[0], tree)
  return read(tree, row.chunk)


def _add_gradients(grads: Tree, of_params: Tree, row: TickRow) -> Tree:
  """Adds the gradients of an action's part to the sums ``[chunks, ...]``.

  ``of_params`` are the gradients of the parameters of the part of the model
  that the action in ``row`` runs.
  """

  def added(total, x):
    if total.shape[0] == 1:
      return total + x[None].astype(total.dtype)  # no indexing for one part
    return total.at[row.chunk].add(x.astype(total.dtype))

  return jax.tree.map(added, grads, of_params)
