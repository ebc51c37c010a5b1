"""Execution of a pipeline schedule inside ``jax.shard_map``: a scan over ticks.

In a tick every stage looks up its action and runs it, a branch of a switch.
Then activations are sent to the next stage and cotangents to the previous one,
by one permute each. In a V-shaped placement of parts each may be sent either
way, so each stage sends its action's result to both neighbours. The layers
before the first part and after the last part, such as an embedding that is
sharded over stages, run on all stages at once, outside of the switch. There,
collectives may use the axis of stages. Inside a branch they must not, since
stages take different branches.

A stage stores the inputs of its parts, in as many slots as the schedule needs
(`parallel.plans.pipeline.table`), and either recomputes a part in its backward
or also stores its residuals (`parallel.pipeline.residuals`). Gradients are
summed in the scan's carry, in float32, so no memory grows with the number of
microbatches.

Stages that share a device run one after another rather than under ``jax.vmap``,
which would turn the switch into a selection among all branches' results.

Shape legend: G = stages of this device (lanes); M = microbatches; P = slots of
a buffer.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from parallel.axes import Axis
from parallel.collectives import (
  each_lane,
  order_after,
  permute,
  ranks_here,
  varying,
)
from parallel.pipeline.actions import (
  Actions,
  Buffers,
  TickRow,
  runs_scope,
  scoped,
  write,
)
from parallel.plans.pipeline.pipeline_schedule import (
  ActionKind,
  PipelineSchedule,
)
from parallel.plans.pipeline.table import Table, table


class ModelFunctions(NamedTuple):
  """Functions of a model; only the results of ``part`` differ between stages.

  Attributes:
    enter: ``(around, microbatch) -> x``, the input of the first part, where
      ``around`` are the parameters outside of the parts (`PipelineParams`).
    part: Function of a part of the model, the layers of one chunk of a stage:
      ``(params of the part, constants of the part, x) -> x``.
    judge: ``(around, x, microbatch) -> scores``, where x is the last part's
      output. In a training step the scores are a tree of scalars, such as the
      loss. Their sum is differentiated, so counts must not depend on
      parameters.
  """

  enter: Callable[[Any, Any], Any]
  part: Callable[[Any, Any, Any], Any]
  judge: Callable[[Any, Any, Any], Any]


class PipelineParams(NamedTuple):
  """Parameters that a step differentiates, or their gradients.

  Attributes:
    parts: Parameters of the parts of the G stages on this device, ``[G, chunks,
      ...]``.
    around: Parameters of ``enter`` and ``judge`` (`ModelFunctions`).
  """

  parts: Any
  around: Any


class _TickMicrobatches(NamedTuple):
  """Microbatches that a tick processes outside of the parts; -1 for none.

  Attributes:
    entering: Microbatch that the first part reads in the next tick.
    judged: Microbatch whose forward the last part has finished in this tick.
    leaves: Microbatch whose backward the first part has finished in this tick.
  """

  entering: jax.Array
  judged: jax.Array
  leaves: jax.Array


class _Carry(NamedTuple):
  """Carry of the scan over ticks.

  Attributes:
    buffers: Buffers of the G stages on this device with P slots, ``[G, P,
      ...]``.
    arriving: Received values, ``[G, ...]``. In a loop of stages these are two
      tuples: (an input,) and (a cotangent,). Otherwise there is one tuple with
      a value for each direction, each an input or a cotangent.
    entering: Input of the first part, and cotangent of the last part's output.
    total: Scores of all M microbatches, ``[M, ...]``, or the sum of losses.
    grads: Sum of gradients; None without backward.
  """

  buffers: Buffers
  arriving: tuple[tuple[Any, ...], ...]
  entering: tuple[Any, Any]
  total: Any
  grads: Any


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """A pipeline schedule on an axis of stages.

  Attributes:
    schedule: The schedule, which has been checked.
    axis: The axis of stages.
    ordered: Whether collectives are ordered by data flow, which XLA:CPU
      requires (`parallel.collectives.order_after`).
    keeps: Whether a forward saves its residuals; if not, the backward repeats
      the forward.
  """

  schedule: PipelineSchedule
  axis: Axis
  ordered: bool = False
  keeps: bool = False

  def __post_init__(self) -> None:
    assert self.schedule.num_stages == self.axis.size

  def gradients(
    self, functions: ModelFunctions, params: PipelineParams, constants: Any,
    batch: Any
  ) -> tuple[Any, PipelineParams]:
    """Computes the sums of losses and of gradients over microbatches.

    Args:
      functions: The model.
      params: This device's parameters, whose types vary over stages and over
        all axes over which gradients are reduced later.
      constants: Constants of the parts of the G stages on this device, ``[G,
        chunks, ...]``.
      batch: Tree of ``[M, ...]``, the M microbatches.

    Returns:
      The sums of losses, a tree of scalars, and the sums of gradients, float32
      in the structure of ``params``.
    """
    assert self.schedule.has_backward
    run = _Run(self, functions, params, constants, batch)
    start = _Carry(
      run.buffers(), run.nothing(),
      (run.first(), run.zeros(run.x_shapes)),
      run.zeros(run.score_shapes),
      # Sums of gradients are float32, whatever the parameters' dtype.
      jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params),
    )
    end = run.scan(run.tick, start)
    return end.total, end.grads

  def scores(
    self, functions: ModelFunctions, params: PipelineParams, constants: Any,
    batch: Any
  ) -> Any:
    """Returns the scores of M microbatches, ``[M, ...]``.

    Arguments are those of `gradients`.
    """
    assert not self.schedule.has_backward
    run = _Run(self, functions, params, constants, batch)
    # Cotangents, residuals, deltas and gradients are empty trees.
    count = self.schedule.num_microbatches
    start = _Carry(
      Buffers(run.places(run.table.inputs.places + 1), (), (), ()),
      run.nothing()[:1], (run.first(), ()),
      run.zeros(run.score_shapes, count), None,
    )
    return run.scan(run.tick_forward, start).total


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
  """Arguments of `Pipeline.gradients`, and the functions that trace a step."""

  pipeline: Pipeline
  functions: ModelFunctions
  params: PipelineParams
  constants: Any
  batch: Any

  @property
  def axis(self) -> Axis:
    return self.pipeline.axis

  @property
  def actions(self) -> Actions:
    pipeline = self.pipeline
    return Actions(pipeline.schedule, self.functions.part, pipeline.keeps)

  @functools.cached_property
  def table(self) -> Table:
    return table(self.pipeline.schedule)

  @functools.cached_property
  def x_shapes(self) -> Any:
    """Shapes of the activations between parts."""
    return jax.eval_shape(self.enter, 0)

  @functools.cached_property
  def score_shapes(self) -> Any:
    """Shapes of a microbatch's scores."""
    return jax.eval_shape(self.judge, self.params.around, self.x_shapes, 0)

  def zeros(self, like: Any, *lead: int, names: tuple[str, ...] = ()) -> Any:
    """Makes zeros ``[*lead, ...]`` like ``like``, with further leading dims.

    By type they vary over the mesh axes of ``like`` and of ``names``.
    """
    return jax.tree.map(
      lambda x: varying(
        jnp.zeros((*lead, *x.shape), x.dtype),
        *x.manual_axis_type.varying, *names,
      ), like,
    )

  def places(self, *lead: int, like: Any = None) -> Any:
    """Makes zeros ``[G, *lead, ...]`` for the G stages on this device.

    They have the shapes of ``like``, by default of activations.
    """
    return self.zeros(
      self.x_shapes if like is None else like, self.axis.lanes, *lead,
      names=(self.axis.name,),
    )

  def nothing(self) -> tuple[tuple[Any, ...], ...]:
    """Makes `_Carry.arriving` of the first tick, which no stage reads."""
    if self.pipeline.schedule.is_loop:
      return (self.places(),), (self.places(),)
    return tuple(self.places() for _ in self.table.directions),

  def buffers(self) -> Buffers:
    """Makes the buffers of a step, filled with zeros."""
    how, t = self.actions.backward, self.table
    # [G, ...] -> [...]: one stage's activations.
    x = jax.tree.map(lambda x: x[0], self.places())

    # Residuals and deltas of one part, of which only the shapes are computed.
    def kept(params, fixed, x):
      residuals = how.forward(params, fixed, x)[1]
      if not self.pipeline.schedule.splits:
        return residuals, ()
      return residuals, how.of_input(params, fixed, x, residuals, x)[1]

    # [G, chunks, ...] -> [...]: all parts have equal shapes.
    residuals, deltas = jax.eval_shape(kept, *jax.tree.map(
      lambda x: x[0, 0], (self.params.parts, self.constants)
    ), x)

    return Buffers(
      # An additional slot takes values that arrive but are not read.
      self.places(t.inputs.places + 1), self.places(t.cotangents.places + 1),
      self.places(t.residuals.places, like=residuals),
      self.places(t.deltas.places, like=deltas),
    )

  def microbatch(self, m: Any, late: Any = ()) -> Any:
    """Returns microbatch m; on CPUs its use is ordered after ``late``."""
    return jax.tree.map(
      lambda x: lax.dynamic_index_in_dim(x, m, keepdims=False),
      order_after(self.batch, late, self.pipeline.ordered),
    )

  def enter(self, m: Any, late: Any = ()) -> Any:
    """Returns the first part's input for microbatch m.

    On CPUs it is computed after the results ``late``.
    """
    return self.functions.enter(
      self.params.around, self.microbatch(m, late)
    )

  def judge(self, around: Any, x: Any, m: Any) -> Any:
    """Returns the scores of the last part's output x for microbatch m.

    ``around`` are the parameters outside of the parts.
    """
    return self.functions.judge(around, x, self.microbatch(m))

  def first(self) -> Any:
    """Returns the input of the first part in the first tick."""
    # Each tick computes the input of the next tick; see `next_input`.
    enter = scoped(self.enter, "phase_forward")
    return enter(int(self.table.enters[0]))

  def scan(self, tick: Callable[..., Any], start: _Carry) -> _Carry:
    """Runs ``tick`` for all ticks, from the carry ``start`` to the last."""
    t = self.table
    rows = TickRow(
      t.kinds, t.chunks, t.inputs.write, t.inputs.enter, t.inputs.read,
      t.cotangents.write, t.cotangents.enter, t.cotangents.read,
      t.residuals.read, t.deltas.read,
    )
    # A tick computes the first part's input of the next tick.
    ends = _TickMicrobatches(np.append(t.enters[1:], -1), t.judged, t.leaves)
    # Scans over dim 0 of the table, [T, S].
    return lax.scan(
      lambda carry, step: (tick(carry, *step), None), start,
      jax.tree.map(jnp.asarray, (rows, ends)),
    )[0]

  def tick_forward(
    self, carry: _Carry, row: TickRow, ends: _TickMicrobatches
  ) -> _Carry:
    """Runs one tick of a schedule without backward; returns the new carry.

    ``ends`` are the microbatches that enter before and leave after the parts.
    """
    here = jax.tree.map(lambda x: x[ranks_here(self.axis)], row)
    outputs, inputs = each_lane(
      functools.partial(
        self.actions.forward_only, self.cast_to_varying(carry.entering[0])
      ),
      self.axis, here, self.params.parts, self.constants,
      carry.buffers.inputs, carry.arriving[0],
    )

    # The last part's output, on all stages: [G, ...] -> [...].
    def judge(m):
      x = scoped(self.broadcast_stage, "phase_forward")(
        outputs, self.stage_of(-1)
      )
      scores = self.judge(self.params.around, x, m)
      return write(carry.total, scores, m)

    total = self.run_if_microbatch(ends.judged, judge, lambda: carry.total)
    entering = self.next_input(ends, (outputs, total))
    late = outputs, total, entering
    if self.pipeline.schedule.is_loop:
      arriving = self.move(outputs, 1, late),
    else:
      arriving = self.send_all_directions(outputs, late)
    return _Carry(
      Buffers(inputs, (), (), ()), (arriving,), (entering, ()), total, None
    )

  def tick(
    self, carry: _Carry, row: TickRow, ends: _TickMicrobatches
  ) -> _Carry:
    """Runs one tick of a schedule with backward; returns the new carry.

    ``ends`` are the microbatches that enter before and leave after the parts.
    """
    ordered, around = self.pipeline.ordered, self.params.around
    # [S] -> [G]: the numbers of this device's stages.
    here = jax.tree.map(lambda x: x[ranks_here(self.axis)], row)
    outputs, back, buffers, of_parts = each_lane(
      functools.partial(
        self.actions.forward_or_backward, self.cast_to_varying(carry.entering)
      ),
      self.axis, here, self.params.parts, self.constants, carry.buffers,
      (carry.arriving[0], carry.arriving[-1]), carry.grads.parts,
    )
    grads = carry.grads.around
    # Devices must run the collectives of a tick in one order: those of stages'
    # actions, of the loss, and of the first part's gradient.
    outputs = order_after(outputs, (back, of_parts), ordered)

    # If the last part has run, all stages compute the loss and its cotangent.
    def judge(m):
      x = scoped(self.broadcast_stage, "phase_forward")(
        outputs, self.stage_of(-1)
      )
      loss, vjp = jax.vjp(lambda a, x: self.judge(a, x, m), around, x)
      of_around, dx = vjp(jax.tree.map(jnp.ones_like, loss))
      total = jax.tree.map(jnp.add, carry.total, loss)
      return total, jax.tree.map(jnp.add, grads, of_around), dx

    total, grads, cotangent = self.run_if_microbatch(
      ends.judged, judge,
      lambda: (carry.total, grads, self.zeros(self.x_shapes)),
    )
    back = order_after(back, (outputs, total, cotangent), ordered)

    # If the first part's backward has run, compute the gradients of `enter`.
    def leave(m):
      dx = self.broadcast_stage(back, self.stage_of(0))
      _, vjp = jax.vjp(
        lambda a: self.functions.enter(a, self.microbatch(m, dx)), around
      )
      # Ordered after `vjp`, whose residuals include gathered parameters.
      return jax.tree.map(jnp.add, grads, *vjp(order_after(dx, vjp, ordered)))

    leave = scoped(leave, "phase_backward")
    grads = self.run_if_microbatch(ends.leaves, leave, lambda: grads)
    entering = self.next_input(ends, (back, grads))
    late = (back, grads), entering
    if self.pipeline.schedule.is_loop:
      forward = self.move(outputs, 1, late)
      arriving = (forward,), (self.move(back, -1, forward),)
    else:
      # A stage's action has one of the two results; the other is zero.
      forwards = here.kind == ActionKind.FORWARD
      made = jax.tree.map(
        lambda y, dx: jax.vmap(jnp.where)(forwards, y, dx), outputs, back
      )
      arriving = self.send_all_directions(made, late),
    return _Carry(
      buffers, arriving, (entering, cotangent), total,
      PipelineParams(of_parts, grads)
    )

  def next_input(self, ends: _TickMicrobatches, late: Any) -> Any:
    """Returns the first part's input of the next tick; zeros if there is none.

    On CPUs it is computed after the results ``late``.
    """
    # It runs once less than there are microbatches: `first` is the first input.
    enter = scoped(lambda m: self.enter(m, late), "phase_forward")
    return self.run_if_microbatch(
      ends.entering, enter, lambda: self.zeros(self.x_shapes), in_loop=-1
    )

  def send_all_directions(self, tree: Any, late: Any) -> tuple[Any, Any, Any]:
    """Sends arrays to both neighbour stages; returns what each stage receives.

    The result is a tuple: arrays of the previous stage, of the next one, and of
    the stage itself. On CPUs they are sent after the results ``late``.
    """
    ahead = self.move(tree, 1, late)
    return ahead, self.move(tree, -1, ahead), tree

  def move(self, tree: Any, by: int, late: Any) -> Any:
    """Sends arrays to the next (by=1) or previous (by=-1) stage.

    They are ``[G, ...]`` for the G stages on this device. On CPUs they are sent
    after the results ``late``.
    """
    tree = order_after(tree, late, self.pipeline.ordered)
    phase = "phase_forward" if by > 0 else "phase_backward"
    return scoped(self._permute_stages, phase)(tree, by)

  def _permute_stages(self, tree: Any, by: int) -> Any:
    size = self.axis.size
    # Pairs form a cycle: with several chunks the last stage sends to the first.
    pairs = [(s, (s + by) % size) for s in range(size)]
    leaves, treedef = jax.tree.flatten(tree)
    moved: list[jax.Array] = []
    for x in leaves:  # one permute after another, if an order is needed
      x = order_after(x, moved[-1:], self.pipeline.ordered and bool(moved))
      x = permute(x, self.axis, pairs)
      # Empty arrays can lose their varying type in a permute.
      moved.append(varying(x, self.axis.name))
    return treedef.unflatten(moved)

  def broadcast_stage(self, tree: Any, stage: int) -> Any:
    """Broadcasts one stage's values to all stages.

    Arrays of the G stages on this device, ``[G, ...]``, become ``[...]``.
    """
    here = self.is_stage(stage)

    def chosen(x):
      return jnp.sum(jax.vmap(jnp.where)(here, x, jnp.zeros_like(x)), axis=0)

    # One psum has all arrays as operands, which need no order between them.
    return lax.psum(jax.tree.map(chosen, tree), self.axis.name)

  def cast_to_varying(self, tree: Any) -> Any:
    """Casts values that are equal on all stages to a varying type."""
    return jax.tree.map(lambda x: varying(x, self.axis.name), tree)

  def run_if_microbatch(
    self,
    microbatch: jax.Array,
    then: Callable[[Any], Any],
    otherwise: Callable[[], Any],
    in_loop: int = 0,
  ) -> Any:
    """Runs a function if this tick has a microbatch for it.

    Args:
      microbatch: Index of the microbatch, equal on all stages; -1 for none.
      then: Function of the index.
      otherwise: Function that returns the result if there is no microbatch.
      in_loop: Number of executions of ``then`` in the loop over ticks, minus
        the number of microbatches.
    """
    count = self.pipeline.schedule.num_microbatches + in_loop
    # The branch must not run with an index of -1, which `maximum` replaces.
    return lax.cond(
      microbatch >= 0, scoped(then, runs_scope(count, self.pipeline.schedule)),
      lambda m: otherwise(), jnp.maximum(microbatch, 0),
    )

  def is_stage(self, stage: int) -> jax.Array:
    """Returns which of this device's G stages is ``stage``, bool ``[G]``."""
    return ranks_here(self.axis) == stage

  def stage_of(self, part: int) -> int:
    """Returns the stage of a part of the model; part=-1 is the last part."""
    return int(self.pipeline.schedule.stage_of_part[part])
