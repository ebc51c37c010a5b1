"""Execution of a pipeline schedule inside ``jax.shard_map``: a scan over ticks.

In a tick every stage looks up its action and runs it, a branch of a switch.
Then activations are sent to the next stage and cotangents to the previous one,
by one permute each. In a V-shaped placement of parts both may be sent either
way, so each stage sends its action's result to both neighbours. The layers
before the first part and after the last part, such as an embedding that is
sharded over stages, run on all stages at once, outside of the switch. There,
collectives may use the axis of stages. Inside a branch they must not, since
stages take different branches.

A stage stores the inputs of its parts, in as many slots as the schedule needs
(`parallel.plans.pipeline.table`), and either recomputes the rest of a part in
its backward or stores that, too (`parallel.pipeline.residuals`). Gradients are
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
  after,
  each_lane,
  permute,
  ranks_here,
  varying,
)
from parallel.pipeline.actions import Actions, Buffers, Row, runs, scoped, write
from parallel.plans.pipeline.pipeline_schedule import Kind, PipelineSchedule
from parallel.plans.pipeline.table import Table, table


class Functions(NamedTuple):
  """Functions of a model in parts; only results of ``part`` differ by stage.

  Attributes:
    enter: ``(around, microbatch) -> x``, the input of the first part, where
      ``around`` are the parameters outside of the parts (`Params`).
    part: ``(params of a part, constants of a part, x) -> x``.
    judge: ``(around, x, microbatch) -> scores`` of the last part's output. For
      a training step these are a scalar, the loss.
  """

  enter: Callable[[Any, Any], Any]
  part: Callable[[Any, Any, Any], Any]
  judge: Callable[[Any, Any, Any], Any]


class Params(NamedTuple):
  """Parameters that a step differentiates, or their gradients.

  Attributes:
    parts: Parameters of each stage's parts, ``[G, chunks, ...]``.
    around: Parameters of ``enter`` and ``judge``.
  """

  parts: Any
  around: Any


class _Ends(NamedTuple):
  """Microbatches that a tick processes outside of the parts; -1 for none.

  Attributes:
    entering: Microbatch that the first part reads in the next tick.
    judged: Microbatch that the last part has finished in this tick.
    leaves: Microbatch whose cotangents of the first part are complete.
  """

  entering: jax.Array
  judged: jax.Array
  leaves: jax.Array


class _Carry(NamedTuple):
  """Carry of the scan over ticks.

  Attributes:
    buffers: Buffers of the stages, ``[G, P, ...]``.
    arriving: Received values, ``[G, ...]``. In a loop of stages there are two
      tuples, of one input and of one cotangent; otherwise one tuple, with a
      value for each direction, is used for both.
    entering: Input of the first part, and cotangent of the last part's output.
    total: Scores of all microbatches, ``[M, ...]``, or the sum of losses.
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
    schedule: The schedule, already checked.
    axis: The axis of stages.
    ordered: Whether collectives are ordered by data flow, which XLA:CPU
      requires (`parallel.collectives.after`).
    keeps: Whether a forward saves its residuals; if not, a backward recomputes
      it from its input.
  """

  schedule: PipelineSchedule
  axis: Axis
  ordered: bool = False
  keeps: bool = False

  def __post_init__(self) -> None:
    assert self.schedule.num_stages == self.axis.size

  def gradients(
    self, functions: Functions, params: Params, constants: Any, batch: Any
  ) -> tuple[jax.Array, Params]:
    """Computes the sums of losses and of gradients over microbatches.

    Args:
      functions: The model.
      params: This device's parameters, whose types vary over stages and over
        all axes over which gradients are reduced later.
      constants: Constants of the parts, ``[G, chunks, ...]``.
      batch: Tree of ``[M, ...]``, the microbatches.

    Returns:
      The sum of losses, a scalar, and the sums of gradients, float32 in the
      structure of ``params``.
    """
    assert self.schedule.has_backward
    run = _Run(self, functions, params, constants, batch)
    start = _Carry(
      run.buffers(), run.nothing(),
      (run.first(), run.zeros(run.of_x)),
      run.zeros(run.of_score),
      # Sums of gradients are float32, whatever the parameters' dtype.
      jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params),
    )
    end = run.scan(run.tick, start)
    return end.total, end.grads

  def scores(
    self, functions: Functions, params: Params, constants: Any, batch: Any
  ) -> Any:
    """Returns the scores ``[M, ...]``; arguments as in `gradients`."""
    assert not self.schedule.has_backward
    run = _Run(self, functions, params, constants, batch)
    # Cotangents, residuals, deltas and gradients are empty trees.
    count = self.schedule.num_microbatches
    start = _Carry(
      Buffers(run.places(run.table.inputs.places + 1), (), (), ()),
      run.nothing()[:1], (run.first(), ()),
      run.zeros(run.of_score, count), None,
    )
    return run.scan(run.tick_forward, start).total


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
  """Arguments of `Pipeline.gradients` with the functions that trace it."""

  pipeline: Pipeline
  functions: Functions
  params: Params
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
  def of_x(self) -> Any:
    """Shapes of the activations between parts."""
    return jax.eval_shape(self.enter, 0)

  @functools.cached_property
  def of_score(self) -> Any:
    """Shapes of a microbatch's scores."""
    return jax.eval_shape(self.judge, self.params.around, self.of_x, 0)

  def zeros(self, like: Any, *lead: int, names: tuple[str, ...] = ()) -> Any:
    """Makes zeros that vary over the axes of ``like`` and over ``names``."""
    return jax.tree.map(
      lambda x: varying(
        jnp.zeros((*lead, *x.shape), x.dtype),
        *x.manual_axis_type.varying, *names,
      ), like,
    )

  def places(self, *lead: int, like: Any = None) -> Any:
    """Makes zeros ``[G, *lead, ...]`` like activations, or like ``like``."""
    return self.zeros(
      self.of_x if like is None else like, self.axis.lanes, *lead,
      names=(self.axis.name,),
    )

  def nothing(self) -> tuple[tuple[Any, ...], ...]:
    """Makes the values that "arrive" in the first tick; no stage reads them."""
    if self.pipeline.schedule.is_loop:
      return (self.places(),), (self.places(),)
    return tuple(self.places() for _ in self.table.directions),

  def buffers(self) -> Buffers:
    """Makes empty buffers of a step."""
    how, t = self.actions.backward, self.table
    # [G, ...] -> [...]: one stage's activations.
    x = jax.tree.map(lambda x: x[0], self.places())

    # Shapes of one part's residuals and deltas, without computing them.
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
      # One more slot takes values that arrive but are not read.
      self.places(t.inputs.places + 1), self.places(t.cotangents.places + 1),
      self.places(t.residuals.places, like=residuals),
      self.places(t.deltas.places, like=deltas),
    )

  def microbatch(self, m: Any, late: Any = ()) -> Any:
    """Returns a microbatch; on CPUs ordered after the results ``late``."""
    return jax.tree.map(
      lambda x: lax.dynamic_index_in_dim(x, m, keepdims=False),
      after(self.batch, late, self.pipeline.ordered),
    )

  def enter(self, m: Any, late: Any = ()) -> Any:
    """Returns the input of the first part for a microbatch."""
    return self.functions.enter(
      self.params.around, self.microbatch(m, late)
    )

  def judge(self, around: Any, x: Any, m: Any) -> Any:
    """Returns the scores of the last part's output for a microbatch."""
    return self.functions.judge(around, x, self.microbatch(m))

  def first(self) -> Any:
    """Returns the input of the first part in the first tick."""
    # A tick computes the input of the next one; see `next_microbatch`.
    enter = scoped(self.enter, "phase_forward")
    return enter(int(self.table.enters[0]))

  def scan(self, tick: Callable[..., Any], start: _Carry) -> _Carry:
    """Runs all ticks and returns the last carry."""
    t = self.table
    rows = Row(
      t.kinds, t.chunks, t.inputs.write, t.inputs.enter, t.inputs.read,
      t.cotangents.write, t.cotangents.enter, t.cotangents.read,
      t.residuals.read, t.deltas.read,
    )
    # A tick computes the first part's input of the next tick.
    ends = _Ends(np.append(t.enters[1:], -1), t.judged, t.leaves)
    # Scans over dim 0 of the table, [T, S].
    return lax.scan(
      lambda carry, step: (tick(carry, *step), None), start,
      jax.tree.map(jnp.asarray, (rows, ends)),
    )[0]

  def tick_forward(self, carry: _Carry, row: Row, ends: _Ends) -> _Carry:
    """Runs one tick of a schedule without backward."""
    here = jax.tree.map(lambda x: x[ranks_here(self.axis)], row)
    outputs, inputs = each_lane(
      functools.partial(
        self.actions.forward_only, self.everywhere(carry.entering[0])
      ),
      self.axis, here, self.params.parts, self.constants,
      carry.buffers.inputs, carry.arriving[0],
    )

    # The last part's output, on all stages: [G, ...] -> [...].
    def judge(m):
      x = scoped(self.of_stage, "phase_forward")(outputs, self.stage_of(-1))
      scores = self.judge(self.params.around, x, m)
      return write(carry.total, scores, m)

    total = self.if_any(ends.judged, judge, lambda: carry.total)
    entering = self.next_microbatch(ends, (outputs, total))
    late = outputs, total, entering
    if self.pipeline.schedule.is_loop:
      arriving = self.move(outputs, 1, late),
    else:
      arriving = self.move_both(outputs, late)
    return _Carry(
      Buffers(inputs, (), (), ()), (arriving,), (entering, ()), total, None
    )

  def tick(self, carry: _Carry, row: Row, ends: _Ends) -> _Carry:
    """Runs one tick of a training step."""
    ordered, around = self.pipeline.ordered, self.params.around
    # [S] -> [G]: the numbers of this device's stages.
    here = jax.tree.map(lambda x: x[ranks_here(self.axis)], row)
    outputs, back, buffers, of_parts = each_lane(
      functools.partial(
        self.actions.any_kind, self.everywhere(carry.entering)
      ),
      self.axis, here, self.params.parts, self.constants, carry.buffers,
      (carry.arriving[0], carry.arriving[-1]), carry.grads.parts,
    )
    grads = carry.grads.around
    # Devices must run the collectives of a tick in one order: those of stages'
    # actions, of the loss, and of the first part's gradient.
    outputs = after(outputs, (back, of_parts), ordered)

    # Loss and its cotangent, on all stages at once, if the last part has run.
    def judge(m):
      x = scoped(self.of_stage, "phase_forward")(outputs, self.stage_of(-1))
      loss, vjp = jax.vjp(lambda a, x: self.judge(a, x, m), around, x)
      of_around, dx = vjp(jnp.ones_like(loss))
      return carry.total + loss, jax.tree.map(jnp.add, grads, of_around), dx

    total, grads, cotangent = self.if_any(
      ends.judged, judge,
      lambda: (carry.total, grads, self.zeros(self.of_x)),
    )
    back = after(back, (outputs, total, cotangent), ordered)

    # Gradients of `enter` from the first part's cotangents.
    def leave(m):
      dx = self.of_stage(back, self.stage_of(0))
      _, vjp = jax.vjp(
        lambda a: self.functions.enter(a, self.microbatch(m, dx)), around
      )
      # Ordered after `vjp`, whose residuals include gathered parameters.
      return jax.tree.map(jnp.add, grads, *vjp(after(dx, vjp, ordered)))

    leave = scoped(leave, "phase_backward")
    grads = self.if_any(ends.leaves, leave, lambda: grads)
    entering = self.next_microbatch(ends, (back, grads))
    late = (back, grads), entering
    if self.pipeline.schedule.is_loop:
      forward = self.move(outputs, 1, late)
      arriving = (forward,), (self.move(back, -1, forward),)
    else:
      # A stage's action has one of the two results; the other is zero.
      forwards = here.kind == Kind.FORWARD
      made = jax.tree.map(
        lambda y, dx: jax.vmap(jnp.where)(forwards, y, dx), outputs, back
      )
      arriving = self.move_both(made, late),
    return _Carry(
      buffers, arriving, (entering, cotangent), total, Params(of_parts, grads)
    )

  def next_microbatch(self, ends: _Ends, late: Any) -> Any:
    """Returns the first part's input of the next tick."""
    # One run fewer than microbatches: `first` computes the first input.
    enter = scoped(lambda m: self.enter(m, late), "phase_forward")
    return self.if_any(
      ends.entering, enter, lambda: self.zeros(self.of_x), in_loop=-1
    )

  def move_both(self, tree: Any, late: Any) -> tuple[Any, Any, Any]:
    """Sends arrays in the three directions of `Table.directions`."""
    ahead = self.move(tree, 1, late)
    return ahead, self.move(tree, -1, ahead), tree

  def move(self, tree: Any, by: int, late: Any) -> Any:
    """Sends arrays ``[G, ...]`` to the stage at offset ``by``, 1 or -1.

    On CPUs they are sent after the results ``late``.
    """
    tree = after(tree, late, self.pipeline.ordered)
    phase = "phase_forward" if by > 0 else "phase_backward"
    return scoped(self._permuted, phase)(tree, by)

  def _permuted(self, tree: Any, by: int) -> Any:
    size = self.axis.size
    # A cycle: with several chunks the last stage sends to the first one.
    pairs = [(s, (s + by) % size) for s in range(size)]
    leaves, treedef = jax.tree.flatten(tree)
    moved: list[jax.Array] = []
    for x in leaves:  # one permute after another, if an order is needed
      x = after(x, moved[-1:], self.pipeline.ordered and bool(moved))
      x = permute(x, self.axis, pairs)
      # Empty arrays can lose their varying type in a permute.
      moved.append(varying(x, self.axis.name))
    return treedef.unflatten(moved)

  def of_stage(self, tree: Any, stage: int) -> Any:
    """Broadcasts one stage's values to all stages: ``[G, ...] -> [...]``."""
    here = self.is_stage(stage)

    def chosen(x):
      return jnp.sum(jax.vmap(jnp.where)(here, x, jnp.zeros_like(x)), axis=0)

    # One psum with several operands: no order between them is needed.
    return lax.psum(jax.tree.map(chosen, tree), self.axis.name)

  def everywhere(self, tree: Any) -> Any:
    """Casts values that are equal on all stages to a varying type."""
    return jax.tree.map(lambda x: varying(x, self.axis.name), tree)

  def if_any(
    self,
    microbatch: jax.Array,
    then: Callable[[Any], Any],
    otherwise: Callable[[], Any],
    in_loop: int = 0,
  ) -> Any:
    """Runs a function of a microbatch if there is one, on all stages alike.

    Args:
      microbatch: Index of the microbatch; -1 for none.
      then: The function.
      otherwise: Returns the result without a microbatch.
      in_loop: Number of runs minus number of microbatches, for the ledger.
    """
    count = self.pipeline.schedule.num_microbatches + in_loop
    # The branch must not run with an index of -1, which `maximum` replaces.
    return lax.cond(
      microbatch >= 0, scoped(then, runs(count, self.pipeline.schedule)),
      lambda m: otherwise(), jnp.maximum(microbatch, 0),
    )

  def is_stage(self, stage: int) -> jax.Array:
    """Returns which of this device's stages is ``stage``, bool ``[G]``."""
    return ranks_here(self.axis) == stage

  def stage_of(self, part: int) -> int:
    """Returns the stage of a part; -1 for the last part."""
    return int(self.pipeline.schedule.stage_of_part[part])
