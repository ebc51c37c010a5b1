"""Runs functions of partitioned parameters: gathers before, scatters after.

`apply` and `scan` take a function of whole parameters and run it on shards.
Nothing whole outlives a layer: the forward keeps the function's residuals
without the parameters, the backward gathers them again, from the shards or
from the secondary copy, and reduces the parameters' gradients at once.

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
# in another form: they are made again, everything else is kept.
_FORMS = frozenset({
  "reshape", "slice", "squeeze", "transpose", "convert_element_type",
  "broadcast_in_dim", "expand_dims", "pad", "concatenate", "pcast", "split",
  "dynamic_slice", "copy", "name",
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
  """

  shards: Shards

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
    lifted = _lifted(f)

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
    lifted = _lifted(f, policy)

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

  def _forward(
    self, lifted: Callable[..., Any], tensors: Any, weights: Any, *args: Any
  ) -> tuple[Any, Any]:
    """The result, its VJP without parameters, and the secondary copy."""
    weights = after(weights, args, self.shards.ordered)
    whole = self.shards.materialise(weights, tensors)
    args = after(args, whole, self.shards.ordered)
    y, vjp = jax.vjp(lifted, self._per_lane(whole), *args)
    copy = None
    if _needs_parameters(vjp):
      vjp.args_res[0] = None
      if self.shards.partition.secondary is not None:
        copy = self.shards.copy(whole, tensors)
    return y, (vjp, copy)

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
    shards = self.shards
    if vjp.args_res[0] is None:
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
      dy = after(dy, whole, shards.ordered)
      vjp.args_res[0] = self._per_lane(whole)
    dwhole, *dargs = vjp(dy)
    dwhole = after(dwhole, (dwhole, dargs), shards.ordered)
    dsinks = shards.reduce(dwhole, tensors)
    dargs = after(dargs, dsinks, shards.ordered)
    return dsinks, *dargs

  def _per_lane(self, whole: Any) -> Any:
    """``[...] -> [D, ...]``: gradients of ranks stay apart."""

    def copies(x):
      stacked = jnp.broadcast_to(x, (self.shards.num_lanes, *x.shape))
      return varying(stacked, *self.shards.names)

    return jax.tree.map(copies, whole)


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


def _lifted(
  f: Callable[..., Any], policy: Callable[..., bool] | None = None
) -> Callable[..., Any]:
  """f over D, whose residuals have no other forms of its parameters.

  The policy is of no use inside f: one outside decides for all there.
  """

  def no_forms(primitive, *_, **__):
    return primitive.name not in _FORMS

  return jax.vmap(
    jax.checkpoint(f, policy=policy or no_forms, prevent_cse=False)
  )
