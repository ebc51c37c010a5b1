"""Runs functions of partitioned parameters: gathers before, scatters after.

`apply` and `scan` take a function of whole parameters and run it on shards.
Nothing whole outlives a layer (two with prefetch): the forward keeps the
function's residuals without the parameters, the backward gathers them again,
from the shards or from the secondary copy, and reduces the parameters'
gradients at once.

The backward is written out here and not left to the transpose of a gather,
because gradients are wanted at another depth than weights, summands of lanes
apart for their codec, and parameters must not be among the residuals.

Shape legend: D = data-parallel ranks of this device; L = layers.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from parallel.collectives import after, varying
from parallel.zero.shards import Shards, Tensor

# Of these a function's backward may need results that are parts of parameters
# in another form: they are made again. Everything else is kept, and so is what
# the function gives a name (`jax.ad_checkpoint.checkpoint_name`).
_FORMS = frozenset({
  "reshape", "slice", "squeeze", "transpose", "convert_element_type",
  "broadcast_in_dim", "expand_dims", "pad", "concatenate", "pcast", "split",
  "dynamic_slice", "copy",
})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shard:
  """A partitioned parameter, in place of the parameter.

  Attributes:
    weight: A leaf (or encoded leaf) of `Shards.working`.
    sink: Zeros; the derivative with respect to it is the parameter's gradient
      as `Shards.reduce` gives it. None where nothing is differentiated.
    tensor: The parameter.
  """

  weight: Any
  sink: Any
  tensor: Tensor = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Gathered:
  """How a model reads partitioned parameters.

  Attributes:
    shards: The partition on a mesh.
    prefetch: Whether a scan gathers a layer beside the one that comes before
      it; two layers are whole at a time then.
  """

  shards: Shards
  prefetch: bool = False

  def apply(
    self, f: Callable[..., Any], params: Any, *args: Any
  ) -> Any:
    """``f(params, *args)`` for every data-parallel rank of this device.

    Args:
      f: Of whole parameters and one rank's arguments.
      params: Tree of `Shard`.
      *args: ``[D, ...]``.

    Returns:
      The results, ``[D, ...]``.
    """
    weights, sinks, tensors = _parts(params)
    lifted = self._lifted(f)

    @jax.custom_vjp
    def call(weights, sinks, *args):
      return self._forward(lifted, tensors, weights, *args)[0]

    def forward(weights, sinks, *args):
      y, (vjp, copy) = self._forward(lifted, tensors, weights, *args)
      return y, (vjp, weights if copy is None else copy)

    def backward(residuals, dy):
      vjp, source = residuals
      dsinks, *dargs = self._backward(tensors, vjp, source, dy)
      return None, dsinks, *dargs

    call.defvjp(forward, backward)
    return call(weights, sinks, *args)

  def scan(
    self,
    f: Callable[[Any, Any], Any],
    params: Any,
    x: Any,
    unroll: int = 1,
    policy: Callable[..., bool] | None = None,
  ) -> Any:
    """``x = f(layer's params, x)`` over all layers.

    Args:
      f: Of one layer's whole parameters and one rank's activations.
      params: Tree of `Shard`, every leaf ``[L, ...]``.
      x: ``[D, ...]``, as f returns it.
      unroll: Layers per iteration.
      policy: Of `jax.checkpoint`, what to keep of a layer; None: all but
        parameters.

    Returns:
      ``[D, ...]`` after the last layer.
    """
    weights, sinks, tensors = _parts(params)
    lifted = self._lifted(f, policy)
    last = jax.tree.leaves(weights)[0].shape[0] - 1
    if self.prefetch and last:
      ahead = self._scan_ahead(lifted, tensors, last, unroll)
      return ahead(weights, sinks, x)

    @jax.custom_vjp
    def call(weights, sinks, x):
      def layer(x, weights):
        return self._forward(lifted, tensors, weights, x)[0], None

      return lax.scan(layer, x, weights, unroll=unroll)[0]

    def forward(weights, sinks, x):
      def layer(x, weights):
        return self._forward(lifted, tensors, weights, x)

      y, (vjps, copies) = lax.scan(layer, x, weights, unroll=unroll)
      return y, (vjps, weights if copies is None else copies)

    def backward(residuals, dy):
      def layer(dx, residuals):
        dsinks, dx = self._backward(tensors, *residuals, dx)
        return dx, dsinks

      dx, dsinks = lax.scan(layer, dy, residuals, reverse=True, unroll=unroll)
      return None, dsinks, dx

    call.defvjp(forward, backward)
    return call(weights, sinks, x)

  def _scan_ahead(
    self, lifted: Callable[..., Any], tensors: Any, last: int, unroll: int
  ) -> Callable[..., Any]:
    """`scan` of layers 0 to ``last`` > 0: of weights, sinks and x."""

    def run(weights, x):
      def layer(carry, i):
        whole, x = carry
        ahead, x = self._gather(tensors, _at(weights, i + 1), x)
        y, kept = self._call(lifted, tensors, whole, x)
        return (ahead, y), kept

      first = self._gather(tensors, _at(weights, 0), x)
      (whole, x), kept = lax.scan(
        layer, first, jnp.arange(last), unroll=unroll
      )
      y, kept_last = self._call(lifted, tensors, whole, x)
      return y, (kept, kept_last)

    @jax.custom_vjp
    def call(weights, sinks, x):
      return run(weights, x)[0]

    def forward(weights, sinks, x):
      y, ((vjps, copies), (vjp, copy)) = run(weights, x)
      if copy is None:
        copies, copy = weights, _at(weights, last)
      return y, (vjps, vjp, copies, copy)

    def backward(residuals, dy):
      vjps, vjp, sources, source = residuals

      def layer(carry, i):
        whole, dx, dsinks = carry
        ahead, dx = self._gather_again(tensors, _at(sources, i - 1), dx)
        new, dx = self._transpose(tensors, _at(vjps, i), whole, dx)
        return (ahead, dx, _put(dsinks, new, i)), None

      whole, dy = self._gather_again(tensors, source, dy)
      ahead, dy = self._gather_again(tensors, _at(sources, last - 1), dy)
      new, dx = self._transpose(tensors, vjp, whole, dy)
      dsinks = jax.tree.map(
        lambda d: jnp.broadcast_to(d, (last + 1, *d.shape)), new
      )
      (whole, dx, dsinks), _ = lax.scan(
        layer, (ahead, dx, dsinks), jnp.arange(1, last), reverse=True,
        unroll=unroll,
      )
      new, dx = self._transpose(tensors, _at(vjps, 0), whole, dx)
      return None, _put(dsinks, new, 0), dx

    call.defvjp(forward, backward)
    return call

  def _forward(
    self, lifted: Callable[..., Any], tensors: Any, weights: Any, *args: Any
  ) -> tuple[Any, Any]:
    """The result, its VJP without parameters, and the secondary copy."""
    whole, *args = self._gather(tensors, weights, *args)
    return self._call(lifted, tensors, whole, *args)

  def _backward(
    self, tensors: Any, vjp: Any, source: Any, dy: Any
  ) -> tuple[Any, ...]:
    """Gradients of the sinks and of the arguments.

    Args:
      tensors: Tree of `Tensor`.
      vjp: As `_forward` left it.
      source: Weights or secondary copies to gather.
      dy: Gradient of the result.
    """
    whole = None
    if vjp.args_res[0] is None:
      whole, dy = self._gather_again(tensors, source, dy)
    return self._transpose(tensors, vjp, whole, dy)

  def _gather(
    self, tensors: Any, weights: Any, *args: Any
  ) -> tuple[Any, ...]:
    """Whole parameters, and the arguments: to be used after, on CPUs."""
    weights = after(weights, args, self.shards.ordered)
    whole = self.shards.materialise(weights, tensors)
    return whole, *after(args, whole, self.shards.ordered)

  def _gather_again(
    self, tensors: Any, source: Any, dy: Any
  ) -> tuple[Any, Any]:
    """As `_gather`, from what the forward left for the backward."""
    shards = self.shards
    # Else XLA may keep what the forward gathered for the backward. The
    # barrier's results have one type, so dy is only waited for.
    source, _ = lax.optimization_barrier((source, dy))
    source = after(source, dy, shards.ordered)
    again = (
      shards.materialise
      if shards.partition.secondary is None
      else shards.materialise_copy
    )
    whole = again(source, tensors)
    return whole, after(dy, whole, shards.ordered)

  def _call(
    self, lifted: Callable[..., Any], tensors: Any, whole: Any, *args: Any
  ) -> tuple[Any, Any]:
    """The result, its VJP without parameters, and the secondary copy."""
    y, vjp = jax.vjp(lifted, self._per_lane(whole), *args)
    copy = None
    if _needs_parameters(vjp):
      vjp.args_res[0] = None
      if self.shards.partition.secondary is not None:
        copy = self.shards.copy(whole, tensors)
    return y, (vjp, copy)

  def _transpose(
    self, tensors: Any, vjp: Any, whole: Any, dy: Any
  ) -> tuple[Any, ...]:
    """Gradients of the sinks and of the arguments."""
    if vjp.args_res[0] is None:
      vjp.args_res[0] = self._per_lane(whole)
    dwhole, *dargs = vjp(dy)
    dwhole = after(dwhole, (dwhole, dargs), self.shards.ordered)
    dsinks = self.shards.reduce(dwhole, tensors)
    return dsinks, *after(dargs, dsinks, self.shards.ordered)

  def _per_lane(self, whole: Any) -> Any:
    """``[...] -> [D, ...]``: gradients of ranks stay apart."""

    def copies(x):
      stacked = jnp.broadcast_to(x, (self.shards.num_lanes, *x.shape))
      return varying(stacked, *self.shards.names)

    return jax.tree.map(copies, whole)

  def _lifted(
    self, f: Callable[..., Any], policy: Callable[..., bool] | None = None
  ) -> Callable[..., Any]:
    """f over D, whose residuals have no other forms of its parameters.

    The policy is of no use inside f: one outside decides for all there.
    """

    def no_forms(primitive, *_, **__):
      return primitive.name not in _FORMS

    def alone(*args):
      y = f(*jax.tree.map(lambda x: x[0], args))
      return jax.tree.map(lambda x: x[None], y)

    return jax.checkpoint(
      jax.vmap(f) if self.shards.num_lanes > 1 else alone,
      policy=policy or no_forms, prevent_cse=False,
    )


def _at(tree: Any, i: Any) -> Any:
  """Layer i of ``[L, ...]``; of what a loop only reads no copy is made."""
  return jax.tree.map(
    lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree
  )


def _put(tree: Any, layer: Any, i: Any) -> Any:
  """``[L, ...]`` with another layer i."""
  return jax.tree.map(
    lambda x, new: lax.dynamic_update_index_in_dim(x, new, i, 0), tree, layer
  )


def _parts(params: Any) -> tuple[Any, Any, Any]:
  """Trees of the weights, sinks and tensors of a tree of `Shard`."""

  def part(field):
    return jax.tree.map(
      lambda shard: getattr(shard, field), params,
      is_leaf=lambda x: isinstance(x, Shard),
    )

  return part("weight"), part("sink"), part("tensor")


def _needs_parameters(vjp: Any) -> bool:
  """Whether a VJP reads parameters: that of looking up rows does not."""
  return bool(jax.tree.leaves(vjp.args_res[0]))
