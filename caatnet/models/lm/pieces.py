"""Layers of a decoding step in nano-batches, with their reductions in order.

A *piece* is one nano-batch: some of a step's tokens. At most one reduction runs
at any time. The column-parallel products and the attention of a piece run
during the reduction of the previous piece, which ends before this piece's
row-parallel product. So a layer's last reduction runs during the first products
of the next layer, and its operand is carried to the next iteration of the scan.
`parallel.plans.nanobatches.nanobatch` times the same order of operations.

The end of a reduction is ordered before the row-parallel product, so that
attention or the MLP's first product can run during it. XLA:TPU starts a
reduction only as early as the time that XLA assumes for it requires, and
assumes too short a time; `parallel.ledger.compiler_options` lengthens it
(log/2026-11-27-nanobatches-gpus.md).
"""

from collections.abc import Callable, Sequence
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from caatnet.models.access import Access
from caatnet.models.lm.config import StackConfig
from caatnet.models.lm.stack import Syncs, narrowed
from parallel.axes import Axis
from parallel.collectives import in_turn
from parallel.tensor.partial_sync import PartialSync
from parallel.tensor.projections import summed
from parallel.tensor.stream import Stream, Update


class Half(NamedTuple):
  """Half of a layer: attention or MLP, without its sum over ranks.

  Attributes:
    name: Name scope.
    columns: Function ``(x, state, mix) -> (x, y [R, B, T, F], state)``.
    rows: Function from y to the update before its sum over ranks.
  """

  name: str
  columns: Callable[[Stream, Any, Any], tuple[Stream, jax.Array, Any]]
  rows: Callable[[jax.Array], Update]


# Halves of a layer, from its parameters.
Halves = Callable[[Any, Syncs], Sequence[Half]]


class Order(NamedTuple):
  """Computes the all-reduces of nano-batches, if wanted one after another.

  Attributes:
    axis: The tensor axis.
    ordered: Whether artificial data dependencies make each all-reduce end
      before the next one starts (`parallel.collectives.in_turn`).
  """

  axis: Axis
  ordered: bool

  def after(self, tree: Any, results: Any) -> tuple[Any, Any]:
    """Returns both arguments; readers of ``tree`` run after ``results``."""
    return in_turn(tree, results, self.ordered)

  def sum(self, update: Update, sync: PartialSync) -> Update:
    return summed(update, self.axis, sync)


def entered(
  enter: Callable[[jax.Array], Stream], tokens: Sequence[jax.Array],
  order: Order,
) -> list[Stream]:
  """Returns the streams of pieces before the first layer, embedded in order.

  Args:
    enter: Function from tokens ``[1, T]`` to their stream.
    tokens: Tokens ``[T]`` of each piece.
    order: Order of the sums.
  """
  found: list[Stream] = []
  for i, each in enumerate(tokens):
    if found:
      each, found[-1] = order.after(each, found[-1])
    with jax.named_scope(scope(i)):
      found.append(enter(each[None]))
  return found


def scope(piece: int) -> str:
  """Returns the name scope of a piece's instructions in compiled programs."""
  return f"nanobatch_{piece}"


def run(
  halves: Halves, params: Any, xs: list[Stream], state: Any,
  mixes: Sequence[Any], *, config: StackConfig, access: Access, order: Order,
) -> tuple[list[Stream], Any]:
  """Runs all layers on the pieces of a step.

  Args:
    halves: Builds the halves of a layer.
    params: Parameters of all layers, as in `caatnet.models.lm.stack.run`.
    xs: Stream of each piece. There are at least two pieces: a single one would
      read its stream before its own reduction has ended.
    state: The cache, and the index of the next layer.
    mixes: The sequence mixer (such as attention) of each piece.
    config: Width, sync policies of the layers, and layers per scan iteration.
    access: Reads the parameters of the layers.
    order: Order of the sums.

  Returns:
    The streams and the state after the last layer.
  """
  assert len(xs) > 1, "a single batch is run by caatnet.models.lm.stack"
  for alike, group in itertools.groupby(
    range(config.num_layers), key=lambda number: config.syncs[number]
  ):
    start, *others = group

    def layer(params, carried, alike=alike):
      return _layer(halves(params, alike), carried, mixes, alike, order)

    def numbered(index, carried, layer=layer):
      one = params[index] if isinstance(params, tuple) else (
        jax.tree.map(lambda p: p[index], params)
      )
      return access.apply(layer, one, carried)

    xs = [narrowed(x, alike, config.width, access) for x in xs]
    with jax.named_scope("blocks"):
      # The first layer runs outside of the scan: no update is pending before
      # it, so its carry has another type.
      carried = numbered(start, (xs, None, state))
      if isinstance(params, tuple):
        for index in others:
          carried = numbered(index, carried)
      elif others:  # by index, since a slice of stacked layers would be a copy
        carried = access.scan(
          numbered, jnp.asarray(others), carried, config.unroll, None
        )
      xs, left, state = carried
      with jax.named_scope(scope(len(xs) - 1)):
        last = xs[-1] + order.sum(left, alike[-1])
        xs = [*xs[:-1], last.resolved()]
  return xs, state


def _layer(
  halves: Sequence[Half], carried: Any, mixes: Sequence[Any],
  syncs: Syncs, order: Order,
) -> Any:
  """Runs one layer.

  Args:
    halves: Halves of the layer.
    carried: The streams of the pieces; the previous layer's update of the last
      piece, not yet summed over ranks or added, or None; and the state.
    mixes: The sequence mixer of each piece.
    syncs: Sync policies of the halves.
    order: Order of the sums.

  Returns:
    Values like ``carried``, after this layer.
  """
  xs, left, (cache, index) = carried
  xs, sync = list(xs), syncs[-1]  # `sync`: policy of the pending update `left`
  for half, next_sync in zip(halves, syncs, strict=True):
    for i, mix in enumerate(mixes):
      before = i - 1  # -1: the last piece, whose update is of the previous half
      if i:
        # A piece writes the cache only after the previous piece has read the
        # cache; otherwise XLA would copy it.
        xs[i], left = order.after(xs[i], left)
      if left is not None:
        with jax.named_scope(scope(before % len(xs))):
          total = order.sum(left, sync)
      with jax.named_scope(scope(i)), jax.named_scope(half.name):
        # Products and attention run during the sum above.
        xs[i], y, (cache, _) = half.columns(xs[i], (cache, index), mix)
        if left is None:
          y, xs[before] = order.after(y, xs[before])
        else:
          y, total = order.after(y, total)
          xs[before] = xs[before] + total
        left = half.rows(y)
      sync = next_sync
  # Only the last stream has a pending update, `left`.
  return [x.resolved() for x in xs], left, (cache, index + 1)
