"""What a stage does in a tick: a branch of a switch, inside ``jax.shard_map``.

Stages take different branches, so these communicate over no axis of stages, and
over other axes only among devices of one stage.
"""

from collections.abc import Callable
import contextlib
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from parallel.pipeline.timetable import Kind, Timetable

Tree = Any


class Row(NamedTuple):
  """A tick of a table; arrays ``[S]``, or ``[G]`` of this device's stages."""

  kind: jax.Array
  chunk: jax.Array
  write_input: jax.Array
  enter_input: jax.Array
  read_input: jax.Array
  write_cotangent: jax.Array
  enter_cotangent: jax.Array
  read_cotangent: jax.Array


class Actions(NamedTuple):
  """Actions of a timetable.

  Attributes:
    timetable: The timetable.
    part: ``(params of a part, constants of a part, x) -> x``.
  """

  timetable: Timetable
  part: Callable[[Any, Any, Any], Any]

  def forward_only(
    self, entering: Tree, row: Row, params: Tree, constants: Tree,
    inputs: Tree, arriving: Tree,
  ) -> tuple[Tree, Tree]:
    """Does a stage's action in a timetable without backward.

    Args:
      entering: What the first part reads, if this tick has such.
      row: The tick's numbers, of this stage.
      params: Of the stage's parts, ``[chunks, ...]``.
      constants: What parts read beside, likewise.
      inputs: The buffer of inputs, ``[P + 1, ...]``.
      arriving: What another stage has sent.

    Returns:
      What it sends on, and the buffer.
    """
    inputs = self._received(
      inputs, arriving, row.write_input, entering, row.enter_input
    )

    def forward(x):
      return self.part(_chunk(params, row), _chunk(constants, row), x)

    y = lax.cond(
      row.kind == Kind.FORWARD, scoped(forward, self._runs), lambda x: x,
      read(inputs, row.read_input),
    )
    return y, inputs

  def any_kind(
    self, entering: tuple[Tree, Tree], row: Row, params: Tree,
    constants: Tree, inputs: Tree, cotangents: Tree,
    arriving: tuple[Tree, Tree], grads: Tree,
  ) -> tuple[Tree, Tree, Tree, Tree, Tree]:
    """Does a stage's action; arguments as of `forward_only`.

    Returns:
      What it sends on and back, its buffers, and the gradients of its parts.
    """
    inputs = self._received(
      inputs, arriving[0], row.write_input, entering[0], row.enter_input
    )
    cotangents = self._received(
      cotangents, arriving[1], row.write_cotangent, entering[1],
      row.enter_cotangent,
    )
    x = read(inputs, row.read_input)
    nothing = jax.tree.map(jnp.zeros_like, x)

    def idle(x, dy):
      return nothing, nothing, grads

    def forward(x, dy):
      y = self.part(_chunk(params, row), _chunk(constants, row), x)
      return y, nothing, grads

    def backward(x, dy):
      fixed = _chunk(constants, row)
      _, vjp = jax.vjp(
        lambda p, x: self.part(p, fixed, x), _chunk(params, row), x
      )
      of_params, dx = vjp(dy)
      return nothing, dx, _added(grads, of_params, row)

    def of_input(x, dy):
      mine, fixed = _chunk(params, row), _chunk(constants, row)
      _, vjp = jax.vjp(lambda x: self.part(mine, fixed, x), x)
      return nothing, *vjp(dy), grads

    def of_weight(x, dy):
      fixed = _chunk(constants, row)
      _, vjp = jax.vjp(lambda p: self.part(p, fixed, x), _chunk(params, row))
      return nothing, nothing, _added(grads, *vjp(dy), row)

    branches = {
      Kind.IDLE: idle,
      Kind.FORWARD: scoped(forward, self._runs, "phase_forward"),
      Kind.BACKWARD: scoped(backward, self._runs, "phase_backward"),
      Kind.INPUT: scoped(of_input, self._runs, "phase_backward"),
      Kind.WEIGHT: scoped(of_weight, self._runs, "phase_backward"),
    }
    # A branch that never runs would only be compiled.
    used = [k for k in Kind if not k or (self.timetable.kinds == k).any()]
    number = jnp.asarray([used.index(k) if k in used else 0 for k in Kind])
    y, dx, grads = lax.switch(
      number[row.kind], [branches[kind] for kind in used], x,
      read(cotangents, row.read_cotangent),
    )
    return y, dx, inputs, cotangents, grads

  def _received(
    self, buffer: Tree, arriving: Tree, place: jax.Array, entering: Tree,
    entered: jax.Array,
  ) -> Tree:
    """Puts what comes from another stage, and from outside, into a buffer."""
    if self.timetable.num_chunks > 1:  # both may come in one tick
      return write(write(buffer, arriving, place), entering, entered)
    values = jax.tree.map(
      lambda a, e: jnp.where(place < entered, a, e), arriving, entering
    )
    return write(buffer, values, jnp.minimum(place, entered))

  @property
  def _runs(self) -> str:
    """The scope of what a stage does for each microbatch of each part."""
    t = self.timetable
    return runs(t.num_microbatches * t.num_chunks, t)


def runs(count: int, timetable: Timetable) -> str:
  """Names the scope of what runs in so many of all ticks, for the ledger."""
  return f"runs_{count}_of_{timetable.num_ticks}"


def scoped(f: Callable[..., Any], *names: str) -> Callable[..., Any]:
  """Puts a function into named scopes, which the ledger reads."""

  def in_scopes(*args):
    with contextlib.ExitStack() as scopes:
      for name in names:
        scopes.enter_context(jax.named_scope(name))
      return f(*args)

  return in_scopes


def read(tree: Tree, place: jax.Array) -> Tree:
  """Takes what is in a place of a buffer."""
  return jax.tree.map(
    lambda x: lax.dynamic_index_in_dim(x, place, keepdims=False), tree
  )


def write(tree: Tree, values: Tree, place: jax.Array) -> Tree:
  """Puts values into a place of a buffer."""
  return jax.tree.map(
    lambda x, v: lax.dynamic_update_index_in_dim(x, v, place, 0), tree, values
  )


def _chunk(tree: Tree, row: Row) -> Tree:
  """Takes the parameters of an action's part; of one part without a copy."""
  leaves = jax.tree.leaves(tree)
  if leaves and leaves[0].shape[0] == 1:
    return jax.tree.map(lambda x: x[0], tree)
  return read(tree, row.chunk)


def _added(grads: Tree, of_params: Tree, row: Row) -> Tree:
  """Adds the gradients of an action's part."""

  def added(total, x):
    if total.shape[0] == 1:
      return total + x[None].astype(total.dtype)
    return total.at[row.chunk].add(x.astype(total.dtype))

  return jax.tree.map(added, grads, of_params)
