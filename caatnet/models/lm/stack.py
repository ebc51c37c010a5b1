"""Scan over layers that may synchronise different fractions of channels."""

from collections.abc import Callable, Sequence
import itertools
from typing import Any

import jax

from caatnet.models.access import Access, RematPolicy
from parallel.tensor.partial_sync import PartialSync
from parallel.tensor.stream import Stream

# Sync policies of a layer's row-parallel projections, in execution order.
SyncPolicies = tuple[PartialSync, ...]


def narrow_stream(
  x: Stream, syncs: SyncPolicies, width: int, access: Access
) -> Stream:
  """Returns the stream with no more shared channels than a layer sums.

  Args:
    x: The stream, in the representation that ``access`` reads.
    syncs: Sync policies of the layer.
    width: The channels of the stream.
    access: Reads the parameters.
  """
  shared = min(s.num_shared(width) for s in syncs)
  return access.apply(
    lambda _, x: x.narrow(min(x.shared.shape[-1], shared)), None, x
  )


def run(
  layer: Callable[[Any, tuple[Stream, Any], SyncPolicies], tuple[Stream, Any]],
  params: Any,
  x: Stream,
  state: Any,
  *,
  syncs: Sequence[SyncPolicies],
  width: int,
  access: Access,
  unroll: int = 1,
  policy: RematPolicy = None,
  carries: Callable[[SyncPolicies], bool] = lambda syncs: False,
) -> tuple[Stream, Any]:
  """Returns the residual stream after the last layer, before the final norm.

  Consecutive layers with equal sync policies are scanned together. The carry of
  a scan must keep its type. The type of a stream includes the number of its
  shared channels, which are equal on all ranks, and the policy of its pending
  update, which is not reduced yet. So `narrow_stream` is called before a scan.
  If layers leave an update pending, the first layer runs before the scan, since
  its input has no pending update, or one of another policy.

  Args:
    layer: A function ``(params, (x, state), syncs) -> (x, state)``.
    params: The parameters of all layers: arrays ``[layers, ...]``, or a tuple
      with each layer's parameters, whose layers run one after another.
    x: The stream before the first layer.
    state: Value carried from layer to layer along with the stream.
    syncs: For each layer, the sync policies of its row-parallel projections.
    width: The channels of the stream.
    access: Reads the parameters of the layers.
    unroll: Layers per iteration of a scan.
    policy: Checkpoint policy of a layer; None saves all activations.
    carries: Returns whether layers with given policies leave an update pending.

  Returns:
    The stream and the state after the last layer.
  """
  for alike, group in itertools.groupby(
    range(len(syncs)), key=lambda number: syncs[number]
  ):
    start, *others = group
    stop = start + 1 + len(others)

    def one(params, carried, alike=alike):
      return layer(params, carried, alike)

    x = narrow_stream(x, alike, width, access)
    with jax.named_scope("blocks"):
      if carries(alike):
        first = jax.tree.map(lambda p, i=start: p[i], params)
        x, state = access.apply(one, first, (x, state), policy=policy)
        start += 1
      if start < stop:
        # Slicing all layers would copy them, so slice only a proper subset.
        chosen = params
        if isinstance(params, tuple):
          chosen = params[start:stop]
        elif stop - start < len(syncs):
          chosen = jax.tree.map(lambda p: p[start:stop], params)  # noqa: B023
        x, state = access.scan(one, chosen, (x, state), unroll, policy)
  return x, state
