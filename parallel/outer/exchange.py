"""The mean over workers of trees of differences, in few bits."""

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
  """How outer loops average.

  Attributes:
    worker: The worker axis.
    wire: Codec and route.
    block_dims: In the shape of the parameters: how many leading dims of each
      no block of a codec crosses. With the ranks of other axes among them,
      results do not depend on how those lie on devices.
    weights: One per worker, empty for equal ones; their scale cancels.
    error_feedback: Keep what rounding took from a worker's difference, and add
      it to its next one.
    seed: Decides stochastic rounding and draws.
  """

  worker: Axis
  wire: Wire
  block_dims: Any
  weights: tuple[float, ...] = ()
  error_feedback: bool = False
  seed: int = 0

  def init(self, params: Params) -> State:
    """State under "workers": what the last roundings left, zeros at first."""
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
    """Averages differences ``[W, ...]`` over all workers.

    Args:
      workers: float32 leaves; a leaf's path ends like its parameter's. The
        differences, or with an anchor what is subtracted from it.
      state: Holds ``init``'s part.
      number: int32, of this exchange; decides its random draws.
      heard: float32 ``[workers]`` that multiplies the weights; None: ones.
      anchor: ``[...]``, the same for all workers.
      uses: A `Use` for each leaf: what becomes of its mean; None: the
        means themselves.

    Returns:
      A tree of means ``[...]``, or of what their uses make of them, the same
      bits on every device; and the new part of the state.
    """
    key = jax.random.fold_in(jax.random.key(self.seed), number)
    leaves, treedef = jax.tree.flatten_with_path(workers)
    nones = [None] * len(leaves)
    anchors = nones if anchor is None else jax.tree.leaves(anchor)
    residuals = nones
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
    """Operand bytes of one mean, per device, by dtype on the wire.

    Args:
      shapes: One worker's arrays on one device, as for ``mean`` without W.
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
    """Block dims of the leaf at a path, in the parameters or a part of them."""
    return at_path(self.block_dims, path)

  def _weights(self, heard: jax.Array | None) -> jax.Array | None:
    """float32 ``[workers]``; None: equal."""
    if not self.weights and heard is None:
      return None
    weights = jnp.asarray(self.weights or (1.0,) * self.worker.size)
    return weights if heard is None else weights * heard
