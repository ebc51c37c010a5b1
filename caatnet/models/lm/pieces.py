"""Layers of a decoding step in nano-batches, with their reductions in order.

A *piece* is one nano-batch: some of a step's tokens. At most one reduction over
tensor ranks runs at any time. The column-parallel products and the attention of
a piece run during the reduction of the previous piece, which ends before this
piece's row-parallel product. So a layer's last reduction runs during the first
products of the next layer, and its operand is carried to the next iteration of
the scan. `parallel.plans.nanobatches.nanobatch` predicts the time of this order
of operations.

XLA:TPU starts a reduction only as early as necessary to end it in time. Since
XLA estimates too short a time for it, `parallel.ledger.compiler_options`
lengthens the estimate (log/2026-11-27-nanobatches-gpus.md).
"""

from collections.abc import Callable, Sequence
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from caatnet.models.access import Access
from caatnet.models.lm.config import StackConfig
from caatnet.models.lm.stack import SyncPolicies, narrow_stream
from parallel.axes import Axis
from parallel.collectives import order_both
from parallel.tensor.partial_sync import PartialSync
from parallel.tensor.projections import sum_update
from parallel.tensor.stream import Stream, Update


class Sublayer(NamedTuple):
  """Half of a layer: attention or MLP, without its sum over ranks.

  Attributes:
    name: Name scope.
    columns: Function ``(x, state, mix) -> (x, y [R, B, T, F], state)`` up to
      the row-parallel product, whose input is y.
    rows: Row-parallel product: function from y to the unsummed update of x.
  """

  name: str
  columns: Callable[[Stream, Any, Any], tuple[Stream, jax.Array, Any]]
  rows: Callable[[jax.Array], Update]


# Function from a layer's parameters and sync policies to its halves.
SublayerFactory = Callable[[Any, SyncPolicies], Sequence[Sublayer]]


class OrderedReducer(NamedTuple):
  """Computes the all-reduces of nano-batches, optionally in a fixed order.

  Attributes:
    axis: The tensor axis.
    ordered: Whether artificial data dependencies make each all-reduce end
      before the next one starts (`parallel.collectives.order_both`).
  """

  axis: Axis
  ordered: bool

  def after(self, tree: Any, results: Any) -> tuple[Any, Any]:
    """Returns both arguments; readers of the returned tree wait for results."""
    return order_both(tree, results, self.ordered)

  def sum(self, update: Update, sync: PartialSync) -> Update:
    return sum_update(update, self.axis, sync)


def embed_nanobatches(
  enter: Callable[[jax.Array], Stream], tokens: Sequence[jax.Array],
  order: OrderedReducer,
) -> list[Stream]:
  """Embeds the tokens of nano-batches (pieces); returns residual streams.

  Args:
    enter: Function from tokens ``[1, T]`` to their stream.
    tokens: Tokens ``[T]`` of each nano-batch.
    order: Order of the all-reduces.
  """
  found: list[Stream] = []
  for i, each in enumerate(tokens):
    if found:
      each, found[-1] = order.after(each, found[-1])
    with jax.named_scope(scope(i)):
      found.append(enter(each[None]))
  return found


def scope(piece: int) -> str:
  """Returns the name scope of the instructions of nano-batch ``piece``."""
  return f"nanobatch_{piece}"


def run(
  halves: SublayerFactory, params: Any, xs: list[Stream], state: Any,
  mixes: Sequence[Any], *, config: StackConfig, access: Access,
  order: OrderedReducer,
) -> tuple[list[Stream], Any]:
  """Runs all layers on the nano-batches (pieces) of a step.

  Args:
    halves: Builds the halves of a layer.
    params: Parameters of all layers, as in `caatnet.models.lm.stack.run`.
    xs: Stream of each piece. There are at least two pieces: a single one would
      read its stream before its own reduction has ended.
    state: The cache, and the index of the next layer.
    mixes: The sequence mixer (such as attention) of each piece.
    config: Width, sync policies of the layers, and layers per scan iteration.
    access: Reads the parameters of the layers.
    order: Computes and orders the all-reduces.

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

    xs = [narrow_stream(x, alike, config.width, access) for x in xs]
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
  halves: Sequence[Sublayer], carried: Any, mixes: Sequence[Any],
  syncs: SyncPolicies, order: OrderedReducer,
) -> Any:
  """Runs one layer on all nano-batches (pieces) of a step.

  Args:
    halves: Halves of the layer.
    carried: Tuple of the pieces' streams, the pending update, and the state.
      The previous layer has left this update of the last piece's stream, which
      is neither summed over ranks nor added yet; None before the first layer.
    mixes: The sequence mixer of each piece.
    syncs: Sync policies of the halves.
    order: Computes and orders the all-reduces.

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
