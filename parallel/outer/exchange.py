"""Averages trees of differences over the workers, in few bits.

It joins `parallel.quantize`, which averages one array, with what an outer loop
keeps for each parameter: residuals, blocks and random draws; and with the rule
that leaves a diverged worker out (`parallel.outer.health`).
"""

import collections
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from parallel import quantize
from parallel.axes import Axis
from parallel.collectives import ranks_here
from parallel.outer import health
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
    weights: One weight per worker, such as its number of tokens; empty for
      equal ones. The mean is divided by the sum over those who are heard.
    error_feedback: Whether what rounding took from a worker's difference is
      kept and added to the worker's next one.
    seed: Decides stochastic rounding and the outer loop's other draws.
    rule: By what workers are judged.
  """

  worker: Axis
  wire: Wire
  block_dims: Any
  weights: tuple[float, ...] = ()
  error_feedback: bool = False
  seed: int = 0
  rule: health.Rule = health.ANY_FINITE

  def init(self, params: Params) -> State:
    """Returns the first state.

    Args:
      params: One worker's parameters, of logical shape.

    Returns:
      The part "workers" of an outer loop's state: what is told of each worker,
      and with error feedback what rounding has taken from it, zeros here.
    """
    workers = health.init(self.worker)
    if self.error_feedback:
      workers["residual"] = stacked_zeros(params, self.worker)
    return {"workers": workers}

  def judge(
    self, workers: Params, anchor: Params | None = None
  ) -> health.Verdict:
    """Decides whose differences are heard.

    Args:
      workers: Tree of float32 ``[W, ...]``, as `mean` takes it.
      anchor: Tree of ``[...]``, as `mean` takes it.
    """
    if anchor is not None:
      workers = jax.tree.map(jnp.subtract, anchor, workers)
    return self.rule.judge(workers, self.worker)

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
        the weights are multiplied; None if all do. Of the others nothing is
        read, and they keep their residuals.
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
    if heard is not None:
      workers = self.rule.then(workers, heard)
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
    weights = health.weights_of(self.weights, heard, self.worker)
    results, left = [], []
    for index, (path, leaf) in enumerate(leaves):
      result, new = quantize.coded_mean(
        leaf, self.worker, self.wire,
        anchor=anchors[index],
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
    residual = treedef.unflatten(left)
    if heard is not None:
      residual = health.choose(
        heard[ranks_here(self.worker)] > 0, residual,
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
