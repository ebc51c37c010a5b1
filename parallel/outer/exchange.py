"""Averages trees of differences over all workers, in few bits.

It joins `parallel.quantize`, which averages one array, with what an outer loop
keeps for each parameter: residuals, blocks and random draws.
"""

import collections
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from parallel import quantize
from parallel.axes import Axis
from parallel.outer.base import Params, State, at_path, stacked_zeros
from parallel.wire import MEAN_ITSELF, Wire


@dataclasses.dataclass(frozen=True)
class Exchange:
  """How an outer loop averages over workers.

  Attributes:
    worker: The worker axis.
    wire: The codec, and how coded differences travel.
    block_dims: Tree in the structure of the parameters: how many leading dims
      of each parameter no block of the codec crosses. These dims hold the ranks
      of other axes, so that results do not depend on how many of those ranks a
      device carries.
    weights: One weight per worker, empty for equal ones. The mean is divided by
      their sum.
    error_feedback: Whether what rounding took from a worker's difference is
      kept and added to the worker's next one.
    seed: Decides stochastic rounding and the outer loop's other draws.
  """

  worker: Axis
  wire: Wire
  block_dims: Any
  weights: tuple[float, ...] = ()
  error_feedback: bool = False
  seed: int = 0

  def init(self, params: Params) -> State:
    """Returns the state: what rounding has taken from each worker, zeros here.

    Args:
      params: One worker's parameters, of logical shape.

    Returns:
      The part under "workers" of an outer loop's state; empty without error
      feedback.
    """
    if not self.error_feedback:
      return {}
    return {"workers": {"residual": stacked_zeros(params, self.worker)}}

  def mean(
    self,
    workers: Params,
    state: State,
    number: jax.Array,
    heard: jax.Array | None = None,
    anchor: Params | None = None,
    uses: Any = None,
  ) -> tuple[Any, State]:
    """Averages differences over all workers.

    Args:
      workers: Tree of float32 ``[W, ...]``: the differences, or with an anchor
        what is subtracted from it. The path of a leaf is its parameter's.
      state: An outer loop's state with the part that `init` returned.
      number: int32, the number of this exchange, which decides its random
        draws.
      heard: Which workers take part: float32 ``[workers]``, 1 or 0, by which
        the weights are multiplied; None if all do.
      anchor: Tree of ``[...]``, the same for all workers, from which the
        workers' arrays are subtracted where they are encoded; None: they are
        differences already.
      uses: Tree with a `Use` for each leaf, which says what becomes of its
        mean; None: the means are the results.

    Returns:
      A tree of means ``[...]``, or of what the uses make of them, with the same
      bits on every device; and the new part of the state.
    """
    # Drawn from seed and number alone: a resumed run repeats its roundings.
    key = jax.random.fold_in(jax.random.key(self.seed), number)
    leaves, treedef = jax.tree.flatten_with_path(workers)
    nones = [None] * len(leaves)
    anchors = nones if anchor is None else jax.tree.leaves(anchor)
    residuals = nones
    # What the last rounding took is added before this one.
    if self.error_feedback:
      residuals = jax.tree.leaves(state["workers"]["residual"])
    if uses is None:
      uses = [MEAN_ITSELF] * len(leaves)
    else:
      uses = jax.tree.leaves(uses)
    weights = self._weights(heard)
    results, left = [], []
    for index, (path, leaf) in enumerate(leaves):
      result, new = quantize.coded_mean_difference(
        anchors[index], leaf, self.worker, self.wire,
        residual=residuals[index],
        weights=weights,
        # Each parameter rounds by random numbers of its own.
        key=jax.random.fold_in(key, index),
        block_dims=self.num_block_dims(path),
        use=uses[index],
      )
      results.append(result)
      left.append(new)
    result = treedef.unflatten(results)
    if not self.error_feedback:
      return result, {}
    return result, {
      "workers": state["workers"] | {"residual": treedef.unflatten(left)}
    }

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    """Returns the operand bytes of one mean, per device, by dtype on the wire.

    Args:
      shapes: Shapes of one worker's arrays on one device.
    """
    total: collections.Counter[str] = collections.Counter()
    for path, leaf in jax.tree.leaves_with_path(shapes):
      dims = self.num_block_dims(path)
      rows = math.prod(leaf.shape[:dims])
      total.update(
        quantize.sent_bytes(
          math.prod(leaf.shape[dims:]), self.worker, self.wire, rows
        )
      )
    return dict(total)

  def num_block_dims(self, path: tuple[Any, ...]) -> int:
    """Returns how many dims of the parameter at a path no block crosses."""
    return at_path(self.block_dims, path)

  def _weights(self, heard: jax.Array | None) -> jax.Array | None:
    """Returns the weights, float32 ``[workers]``; None if they are equal."""
    if not self.weights and heard is None:
      return None
    weights = jnp.asarray(self.weights or (1.0,) * self.worker.size)
    return weights if heard is None else weights * heard
