"""Mean of the workers' deltas of all parameters, sent with few bits.

`parallel.quantize` averages one array. This module applies it to a tree of
parameters, with separate residuals, codec blocks and random numbers for each
parameter, and excludes diverged workers (`parallel.outer.health`).
"""

import collections
import dataclasses
import math
from typing import Any

import jax

from parallel import quantize
from parallel.axes import Axis
from parallel.collectives import ranks_here
from parallel.outer import health
from parallel.outer.base import Params, State, at_path, stacked_zeros
from parallel.wire import IDENTITY, Wire


@dataclasses.dataclass(frozen=True)
class Exchange:
  """Mean over the workers of an outer loop.

  Attributes:
    worker: The worker axis.
    wire: Codec of the deltas, and the collective that averages them.
    block_dims: Tree in the structure of the parameters: the number of leading
      dims of each parameter that blocks of the codec do not span: a block lies
      within one index of each of them. These dims hold the ranks of other axes,
      so that results do not depend on the number of those ranks per device.
    weights: One weight per worker, such as its number of tokens; empty for
      equal weights. The weights of included workers are divided by their sum.
    error_feedback: Whether the rounding error of a worker's delta is kept and
      added to that worker's next delta.
    seed: Seed of stochastic rounding and of other random choices of the loop.
    rule: Criterion that excludes diverged workers.

  Example:
    The mean of two workers' deltas, which are lanes of one device.

    >>> import jax.numpy as jnp
    >>> from jax.sharding import PartitionSpec as P
    >>> from parallel.axes import make_mesh
    >>> worker = Axis("worker", size=2)
    >>> exchange = Exchange(worker, Wire(), block_dims={"w": 0})
    >>> mean = jax.shard_map(
    ...   lambda deltas: exchange.mean(deltas, state={}, number=0)[0],
    ...   mesh=make_mesh({"worker": worker}),
    ...   in_specs=P("worker"),
    ...   out_specs=P(),
    ... )
    >>> mean({"w": jnp.array([[1.0, 2.0], [3.0, 6.0]])})["w"].tolist()
    [2.0, 4.0]
  """

  worker: Axis
  wire: Wire
  block_dims: Any
  weights: tuple[float, ...] = ()
  error_feedback: bool = False
  seed: int = 0
  rule: health.ExclusionRule = health.ANY_FINITE

  def init(self, params: Params) -> State:
    """Returns the initial state.

    Args:
      params: Parameters of one worker, of logical shape.

    Returns:
      The part "workers" of an outer loop's state: the health statistics of each
      worker and, with error feedback, its rounding residuals, initially zero.
    """
    workers = health.init(self.worker)
    if self.error_feedback:
      workers["residual"] = stacked_zeros(params, self.worker)
    return {"workers": workers}

  def judge(
    self, workers: Params, anchor: Params | None = None
  ) -> health.Verdict:
    """Decides which workers' deltas the mean of an exchange includes.

    Args:
      workers: Tree of float32 ``[W, ...]`` of this device's W workers, as in
        `mean`.
      anchor: Tree of ``[...]`` from which to subtract ``workers``; None if
        ``workers`` are the deltas.
    """
    if anchor is not None:
      workers = jax.tree.map(lambda x, y: x[None] - y, anchor, workers)
    return self.rule.judge(workers, self.worker)

  def mean(
    self,
    workers: Params,
    state: State,
    number: jax.Array,
    mask: jax.Array | None = None,
    anchor: Params | None = None,
    epilogues: Any = None,
  ) -> tuple[Any, State]:
    """Averages deltas over all workers.

    Args:
      workers: Tree of float32 ``[W, ...]`` of this device's W workers: the
        deltas, or with an anchor the arrays to subtract from it. Each leaf has
        the path of a parameter.
      state: State of an outer loop, with the part that `init` returned.
      number: int32, the number of this exchange, which seeds its random draws.
      mask: Mask of included workers, float32 ``[workers]``, 1 or 0, multiplied
        with the weights; None includes all. Excluded workers' values are not
        read, and they keep their residuals.
      anchor: Tree of ``[...]``, equal for all workers, from which the encoder
        subtracts the workers' arrays; None if these are deltas already.
      epilogues: Tree with one `parallel.wire.Epilogue` per leaf, which is
        applied to the mean of the leaf; None returns the means.

    Returns:
      A tree of means ``[...]``, or of the epilogues' results, with the same
      bits on every device; and the new part of the state.
    """
    # The key depends only on seed and number: a resumed run repeats its
    # roundings.
    key = jax.random.fold_in(jax.random.key(self.seed), number)
    if mask is not None:
      workers = self.rule.order_after(workers, mask)
    # Leaves in sorted order of paths, as for all parameter trees.
    leaves, treedef = jax.tree.flatten_with_path(workers)
    nones = [None] * len(leaves)
    anchors = nones if anchor is None else jax.tree.leaves(anchor)
    residuals = nones
    # Error feedback: the last rounding error is added before this encoding.
    if self.error_feedback:
      residuals = jax.tree.leaves(state["workers"]["residual"])
    if epilogues is None:
      epilogues = [IDENTITY] * len(leaves)
    else:
      epilogues = jax.tree.leaves(epilogues)
    weights = health.weights_of(self.weights, mask, self.worker)
    results, left = [], []
    for index, (path, leaf) in enumerate(leaves):
      result, new = quantize.coded_mean(
        leaf, self.worker, self.wire,
        anchor=anchors[index],
        residual=residuals[index],
        weights=weights,
        # Independent random numbers for each parameter.
        key=jax.random.fold_in(key, index),
        block_dims=self.num_block_dims(path),
        epilogue=epilogues[index],
      )
      results.append(result)
      left.append(new)
    result = treedef.unflatten(results)
    if not self.error_feedback:
      return result, {}
    residual = treedef.unflatten(left)
    # Excluded workers have sent nothing: their residuals do not change.
    if mask is not None:
      residual = health.select_per_worker(
        mask[ranks_here(self.worker)] > 0, residual,
        state["workers"]["residual"],
      )
    return result, {"workers": state["workers"] | {"residual": residual}}

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    """Returns the operand bytes of one exchange, per device, by dtype.

    Args:
      shapes: Shapes of one worker's arrays on one device.
    """
    total = collections.Counter(health.sent_bytes(self.worker))
    for path, leaf in jax.tree.leaves_with_path(shapes):
      dims = self.num_block_dims(path)
      rows = math.prod(leaf.shape[:dims])  # blocks do not cross rows
      total.update(
        quantize.sent_bytes(
          math.prod(leaf.shape[dims:]), self.worker, self.wire, rows
        )
      )
    return dict(total)

  def num_block_dims(self, path: tuple[Any, ...]) -> int:
    """Returns how many leading dims of a parameter the blocks do not span.

    A block of the codec lies within one index of each of these dims.
    """
    return at_path(self.block_dims, path)
