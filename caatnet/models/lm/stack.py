"""A residual stream through layers that synchronise in part.

Layers may share different fractions of the stream's channels.
"""

from collections.abc import Callable, Sequence
import itertools
from typing import Any

import jax

from caatnet.models.access import Access, Policy
from parallel.tensor.partial_sync import PartialSync
from parallel.tensor.stream import Stream

# How the row doors of a layer synchronise, in the order in which they run.
Syncs = tuple[PartialSync, ...]


def narrowed(x: Stream, syncs: Syncs, width: int, access: Access) -> Stream:
  """Shares no more channels than a layer does that the stream enters.

  Args:
    x: The stream, or what ``access`` takes in its place.
    syncs: Synchronisation policies of the layer.
    width: The channels of the stream.
    access: Reads the parameters.
  """
  shared = min(s.num_shared(width) for s in syncs)
  return access.apply(
    lambda _, x: x.narrow(min(x.shared.shape[-1], shared)), None, x
  )


def run(
  layer: Callable[[Any, tuple[Stream, Any], Syncs], tuple[Stream, Any]],
  params: Any,
  x: Stream,
  state: Any,
  *,
  syncs: Sequence[Syncs],
  width: int,
  access: Access,
  unroll: int = 1,
  policy: Policy = None,
  carries: Callable[[Syncs], bool] = lambda syncs: False,
) -> tuple[Stream, Any]:
  """Returns the residual stream after the last layer, before the final norm.

  Layers that synchronise alike are scanned together. What a scan carries must
  keep its type. Two things about a stream are part of its type: how many
  channels are shared, and which update is pending. So the stream is narrowed
  before the scan, to the fewest channels that the layers share. And where
  layers leave an update pending, the first of them runs before the scan, as it
  finds nothing pending, or an update of another policy.

  Args:
    layer: A function ``(params, (x, state), syncs) -> (x, state)``.
    params: The parameters of all layers: arrays ``[L, ...]``, or a tuple of
      each layer's own, which ``access`` runs one after another.
    x: The stream before the first layer.
    state: Value carried from layer to layer along with the stream.
    syncs: For each layer how its row doors synchronise.
    width: The channels of the stream.
    access: Reads the parameters of the layers.
    unroll: Layers per iteration of a scan.
    policy: Checkpoint policy of a layer; None keeps all activations.
    carries: Whether layers that synchronise so leave an update pending.

  Returns:
    The stream, and the state.
  """
  for alike, group in itertools.groupby(
    range(len(syncs)), key=lambda number: syncs[number]
  ):
    start, *others = group
    stop = start + 1 + len(others)

    def one(params, carried, alike=alike):
      return layer(params, carried, alike)

    x = narrowed(x, alike, width, access)
    with jax.named_scope("blocks"):
      if carries(alike):
        first = jax.tree.map(lambda p, i=start: p[i], params)
        x, state = access.apply(one, first, (x, state), policy=policy)
        start += 1
      if start < stop:
        # A slice of all layers would be a copy of them.
        chosen = params
        if isinstance(params, tuple):
          chosen = params[start:stop]
        elif stop - start < len(syncs):
          chosen = jax.tree.map(lambda p: p[start:stop], params)  # noqa: B023
        x, state = access.scan(one, chosen, (x, state), unroll, policy)
  return x, state
