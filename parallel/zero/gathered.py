"""Execution of functions of whole parameters on partitioned (ZeRO) parameters.

`GatheredAccess.apply` and `GatheredAccess.scan` run a function of whole
parameters on shards. The forward gathers a layer's parameters, runs the layer
and keeps its residuals without the parameters. The backward gathers the
parameters again, from the shards or from a secondary copy (shards over fewer
ranks), runs the layer's VJP and immediately reduces the parameters' gradients.
At most one layer's parameters are whole at a time, or two layers' with
prefetch. A depth is a number of levels of ranks (such as the devices of a node)
over which a tensor is sharded (`parallel.zero.shards`).

The backward is written by hand (`jax.custom_vjp`). The transpose of the gather
is unsuitable, for three reasons:

- It shards gradients at the depth of the weights, but a partition may shard
  gradients at another depth.
- It first sums over the ranks of a device (lanes), but a gradient codec needs
  each lane's summand separately.
- The gathered parameters would be residuals, so every layer would stay whole
  until its backward.

Shape legend: D = data-parallel ranks of this device; L = layers.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from parallel.collectives import order_after, varying
from parallel.memory.offload import (
  ON_DEVICE,
  ActivationPlacement,
  group_into_periods,
  split_period,
  stack_trees,
)
from parallel.zero.shards import MeshPartition, TensorSpec

# Primitives whose results are not saved as residuals. A layer's backward often
# needs a parameter in another form: a slice of it, its transpose or a copy in
# bfloat16. If saved, it would be a whole parameter among the residuals, and
# no remat policy by name can distinguish it from an activation. The backward
# therefore recomputes the results of these primitives from the parameters that
# it gathers. They are cheap, so recomputing them for activations does no harm.
# Results of all other primitives are saved, including those with a name
# (`jax.ad_checkpoint.checkpoint_name`).
_RECOMPUTED_PRIMITIVES = frozenset({
  "reshape", "slice", "squeeze", "transpose", "convert_element_type",
  "broadcast_in_dim", "expand_dims", "pad", "concatenate", "pcast", "split",
  "dynamic_slice", "copy",
})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shard:
  """A partitioned parameter; replaces the parameter in the model's tree.

  Attributes:
    weight: This device's shard, one leaf (or encoded leaf) of the result of
      `MeshPartition.working`.
    sink: Zeros, whose values nothing reads. The parameter's gradient, as
      `MeshPartition.reduce` returns it, is the derivative with respect to the
      sink: a derivative must have its argument's shape, and a reduced gradient
      may have another depth than the weight. None without differentiation.
    tensor: Shape and dtype of the whole parameter.
  """

  weight: Any
  sink: Any
  tensor: TensorSpec = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class GatheredAccess:
  """Access of a model to partitioned parameters.

  It implements the model's `Access` protocol (`apply` and `scan`).

  Attributes:
    shards: The partition on a mesh.
    prefetch: Whether a scan gathers the next layer's parameters while the
      current layer runs. Then two layers are whole at a time.
    activations: Kind of memory in which the layers of a scan save activations
      (`parallel.memory.offload`); with prefetch, equal for all layers.

  Example:
    A shard holds half of a parameter; the function reads the whole parameter.

    >>> from jax.sharding import PartitionSpec as P
    >>> from parallel.axes import Axis, make_mesh
    >>> from parallel.plans.zero.partition import Level, named
    >>> axis = Axis("data", 2)
    >>> shards = MeshPartition(named("zero3", [Level("data", 2)]), (axis,))
    >>> def loss(stored, batch):
    ...   w = Shard(stored, None, TensorSpec((4,), "float32"))
    ...   return GatheredAccess(shards).apply(lambda w, x: w @ x, w, batch)
    >>> jax.shard_map(
    ...   loss, mesh=make_mesh({"data": axis}), in_specs=P("data"),
    ...   out_specs=P("data"),
    ... )(jnp.arange(4.0).reshape(2, 2), jnp.ones((2, 4))).tolist()
    [6.0, 6.0]
  """

  shards: MeshPartition
  prefetch: bool = False
  activations: ActivationPlacement = ON_DEVICE

  def apply(
    self,
    f: Callable[..., Any],
    params: Any,
    *args: Any,
    policy: Callable[..., bool] | None = None,
  ) -> Any:
    """Runs ``f(params, *args)`` for each data-parallel rank on this device.

    Args:
      f: Function of whole parameters and one rank's arguments.
      params: Tree of `Shard`.
      *args: Trees of arrays ``[D, ...]``, one slice for each of the D ranks.
      policy: A `jax.checkpoint` policy that selects the residuals; None saves
        everything but parameters.

    Returns:
      The results of f, ``[D, ...]``.
    """
    weights, sinks, tensors = _split_shards(params)
    lifted = self._map_over_lanes(f, policy)

    @jax.custom_vjp
    def call(weights, sinks, *args):
      return self._forward(lifted, tensors, weights, *args)[0]

    def forward(weights, sinks, *args):
      y, (vjp, copy) = self._forward(lifted, tensors, weights, *args)
      done = y if self.shards.ordered else None
      return y, (vjp, weights if copy is None else copy, done)

    def backward(residuals, dy):
      vjp, source, done = residuals
      # Ordered after the forward's result `done`: dy alone does not suffice,
      # since the cotangent of a loss is a constant.
      source = order_after(source, done, self.shards.ordered)
      dsinks, *dargs = self._backward(tensors, vjp, source, dy)
      # The gradient of the parameters is the cotangent of `Shard.sink`. None is
      # the weights' cotangent, which is zero.
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
    """Runs ``x = f(params of a layer, x)`` for all layers in sequence.

    Args:
      f: Function of one layer's whole parameters and one rank's activations;
        returns activations of the same shapes and dtypes.
      params: Tree of `Shard`, every leaf ``[L, ...]`` for L layers.
      x: Tree of activations ``[D, ...]`` before the first layer, of the D
        data-parallel ranks on this device.
      unroll: Layers per iteration of the loop.
      policy: A `jax.checkpoint` policy that selects a layer's residuals. None
        saves everything but parameters and the results of
        `_RECOMPUTED_PRIMITIVES`.

    Returns:
      The activations ``[D, ...]`` after the last layer.
    """
    weights, sinks, tensors = _split_shards(params)
    num_layers = jax.tree.leaves(weights)[0].shape[0]
    layers = [
      self._map_over_lanes(*layer)
      for layer in self.activations.layers(f, policy, num_layers)
    ]
    length, last = len(layers), num_layers - 1
    if self.prefetch and last:  # a single layer has nothing to prefetch
      (lifted,) = layers
      ahead = self._scan_ahead(lifted, tensors, last, unroll)
      return ahead(weights, sinks, x)

    def period(x, weights):
      vjps, copies = [], []
      for layer, one in zip(layers, split_period(weights, length), strict=True):
        x, (vjp, copy) = self._forward(layer, tensors, one, x)
        vjps.append(vjp)
        copies.append(copy)
      return x, (vjps, copies)

    @jax.custom_vjp
    def call(weights, sinks, x):
      return lax.scan(
        lambda x, weights: (period(x, weights)[0], None),
        x, group_into_periods(weights, length), unroll=unroll,
      )[0]

    def forward(weights, sinks, x):
      weights = group_into_periods(weights, length)
      # vjps, copies: residuals and secondary copies of the layers of a period
      # (one iteration), stacked over iterations.
      y, (vjps, copies) = lax.scan(period, x, weights, unroll=unroll)
      return y, (vjps, copies, weights if None in copies else None)

    def backward(residuals, dy):
      def period(dx, residuals):
        vjps, copies, weights = residuals
        dsinks = []
        for vjp, copy, one in reversed(list(zip(
          vjps, copies, split_period(weights, length), strict=True
        ))):
          source = one if copy is None else copy
          new, dx = self._backward(tensors, vjp, source, dx)
          dsinks.insert(0, new)
        return dx, stack_trees(dsinks)

      dx, dsinks = lax.scan(
        period, dy, residuals, reverse=True, unroll=unroll
      )
      return None, jax.tree.map(
        lambda d: d if length == 1 else d.reshape(-1, *d.shape[2:]), dsinks
      ), dx

    call.defvjp(forward, backward)
    return call(weights, sinks, x)

  def _scan_ahead(
    self, lifted: Callable[..., Any], tensors: Any, last: int, unroll: int
  ) -> Callable[..., Any]:
    """Builds the function that `scan` runs with prefetch.

    ``lifted`` is a layer's function of whole parameters and of activations of
    this device's ranks, ``tensors`` a tree of `TensorSpec`, ``last`` the index
    of the last layer, and ``unroll`` the number of layers per iteration.

    The loop carries the whole parameters of the next layer to run. An iteration
    gathers the layer after that one; the layer's compute does not depend on
    this gather, so XLA may run both concurrently. The layer at the end of each
    direction (the last in the forward, the first in the backward) has nothing
    left to gather and runs outside the loop.

    Returns:
      A differentiable function of the weights' shards, of their sinks (zeros
      whose cotangents are the gradients, see `Shard`) and of activations x.
    """

    def run(weights, x):
      def layer(carry, i):
        whole, x = carry
        # Layers are read by index, since iteration i reads layer i + 1: as
        # scanned inputs, the weights would first be sliced and copied.
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
      # vjps and copies are those of layers 0 to last - 1, stacked; vjp and copy
      # are those of the last layer.
      y, ((vjps, copies), (vjp, copy)) = run(weights, x)
      if copy is None:
        copies, copy = weights, _at(weights, last)
      return y, (vjps, vjp, copies, copy)

    def backward(residuals, dy):
      vjps, vjp, sources, source = residuals
      # The VJPs of all layers have the same structure: either all of them read
      # their parameters, or none does.
      reads = vjp.args_res[0] is None

      def gather(source, dy):
        if reads:
          return self._gather_again(tensors, source, dy)
        return None, dy

      # Gradients are carried as one [L, ...] array and written in place. As
      # stacked outputs, the loop's layers would have to be concatenated with
      # the first and the last layer, which copies the gradients of the whole
      # model.
      def layer(carry, i):
        whole, dx, dsinks = carry
        ahead, dx = gather(_at(sources, i - 1), dx)
        new, dx = self._run_vjp_and_reduce(tensors, _at(vjps, i), whole, dx)
        return (ahead, dx, _put(dsinks, new, i)), None

      # Both gathers precede the last layer's VJP, so that the second one can
      # overlap with it.
      whole, dy = gather(source, dy)
      ahead, dy = gather(_at(sources, last - 1), dy)
      new, dx = self._run_vjp_and_reduce(tensors, vjp, whole, dy)
      # [L, ...] with only the last layer correct so far; the copies of its
      # gradient give the other layers a shape and a varying type.
      dsinks = jax.tree.map(
        lambda d: jnp.broadcast_to(d, (last + 1, *d.shape)), new
      )
      (whole, dx, dsinks), _ = lax.scan(
        layer, (ahead, dx, dsinks), jnp.arange(1, last), reverse=True,
        unroll=unroll,
      )
      new, dx = self._run_vjp_and_reduce(tensors, _at(vjps, 0), whole, dx)
      return None, _put(dsinks, new, 0), dx

    call.defvjp(forward, backward)
    return call

  def _forward(
    self, lifted: Callable[..., Any], tensors: Any, weights: Any, *args: Any
  ) -> tuple[Any, Any]:
    """Gathers whole parameters, and returns the result of `_call` with them.

    ``weights`` are the shards of the parameters (`Shard.weight`), ``tensors``
    their shapes and dtypes.
    """
    whole, *args = self._gather(tensors, weights, *args)
    return self._call(lifted, tensors, whole, *args)

  def _backward(
    self, tensors: Any, vjp: Any, source: Any, dy: Any
  ) -> tuple[Any, ...]:
    """Returns the gradients of the parameters and of each other argument.

    ``vjp`` and ``source`` are what the forward has stored: the function's VJP,
    and the shards or the secondary copy from which to gather parameters again.
    ``dy`` are the cotangents of the result.
    """
    # `_call` has stored None here if the VJP needs parameters.
    whole = None
    if vjp.args_res[0] is None:
      whole, dy = self._gather_again(tensors, source, dy)
    return self._run_vjp_and_reduce(tensors, vjp, whole, dy)

  def _gather(
    self, tensors: Any, weights: Any, *args: Any
  ) -> tuple[Any, ...]:
    """Gathers whole parameters; returns them, then the arguments ``args``.

    ``weights`` are the parameters' shards, ``tensors`` their `TensorSpec`.
    On CPUs the gather is ordered after the arguments, and consumers of the
    returned arguments are ordered after the gather (`collectives.order_after`).
    """
    weights = order_after(weights, args, self.shards.ordered)
    whole = self.shards.materialise(weights, tensors)
    return whole, *order_after(args, whole, self.shards.ordered)

  def _gather_again(
    self, tensors: Any, source: Any, dy: Any
  ) -> tuple[Any, Any]:
    """Gathers whole parameters for the backward; returns them and ``dy``.

    ``source`` is the forward's residual for this gather: the weights, or this
    device's part of the secondary copy.
    """
    shards = self.shards
    # This gather has the same operands as the forward's. Without a barrier XLA
    # may merge the two and keep the whole parameters until the backward, which
    # the partition is to avoid. Behind the barrier the source is a
    # different value, which depends on dy. The barrier gives all its results
    # the type of the operand that varies over most mesh axes. A cotangent must
    # keep its type, so the barrier's dy is dropped.
    source, _ = lax.optimization_barrier((source, dy))
    source = order_after(source, dy, shards.ordered)
    again = (
      shards.materialise
      if shards.partition.secondary is None
      else shards.materialise_copy
    )
    whole = again(source, tensors)
    return whole, order_after(dy, whole, shards.ordered)

  def _call(
    self, lifted: Callable[..., Any], tensors: Any, whole: Any, *args: Any
  ) -> tuple[Any, Any]:
    """Runs a function of whole parameters and saves its residuals.

    Args:
      lifted: Function of the parameters and arguments of this device's ranks.
      tensors: Tree of `TensorSpec` of the parameters.
      whole: The whole parameters.
      *args: Further arguments of the function.

    Returns:
      The result; and a pair: the function's VJP without parameters, and the
      secondary copy. The copy is None if the partition has none, or if the VJP
      reads no parameters.
    """
    y, vjp = jax.vjp(lifted, self._per_lane(whole), *args)
    copy = None
    if _needs_parameters(vjp):
      # `jax.vjp` keeps the arguments that its backward reads in `args_res`, in
      # order and separate from other residuals. Parameters are the first
      # argument. None drops them; `_run_vjp_and_reduce` inserts gathered ones.
      vjp.args_res[0] = None
      if self.shards.partition.secondary is not None:
        copy = self.shards.copy(whole, tensors)
    return y, (vjp, copy)

  def _run_vjp_and_reduce(
    self, tensors: Any, vjp: Any, whole: Any, dy: Any
  ) -> tuple[Any, ...]:
    """Runs a VJP and reduces the gradients of the parameters.

    ``dy`` are the cotangents of the result, ``whole`` the whole parameters, or
    None if the VJP reads none, and ``tensors`` their `TensorSpec`.

    Returns:
      The parameters' gradients (`Shard.sink`), then one gradient per argument.
    """
    if vjp.args_res[0] is None:
      vjp.args_res[0] = self._per_lane(whole)
    dwhole, *dargs = vjp(dy)
    dwhole = order_after(dwhole, (dwhole, dargs), self.shards.ordered)
    dsinks = self.shards.reduce(dwhole, tensors)
    return dsinks, *order_after(dargs, dsinks, self.shards.ordered)

  def _per_lane(self, whole: Any) -> Any:
    """Repeats whole parameters for each of the D ranks on this device.

    The result is ``[D, ...]``. The ranks read equal values, but each has a
    separate gradient, which
    `MeshPartition.reduce` encodes and sums.
    """

    def copies(x):
      stacked = jnp.broadcast_to(x, (self.shards.num_lanes, *x.shape))
      # With a type that is equal on all devices, the VJP itself would sum the
      # gradients over the mesh: an all-reduce of whole tensors.
      return varying(stacked, *self.shards.names)

    return jax.tree.map(copies, whole)

  def _map_over_lanes(
    self, f: Callable[..., Any], policy: Callable[..., bool] | None = None
  ) -> Callable[..., Any]:
    """Returns f on arrays ``[D, ...]`` of the D ranks on this device.

    f is a function of one rank; ``policy`` selects its residuals.

    By default, results of `_RECOMPUTED_PRIMITIVES` are not saved.
    """

    def no_forms(primitive, *_, **__):
      return primitive.name not in _RECOMPUTED_PRIMITIVES

    def alone(*args):
      y = f(*jax.tree.map(lambda x: x[0], args))
      return jax.tree.map(lambda x: x[None], y)

    # The model's policy replaces the default in the same checkpoint. Nested
    # ones do not combine: the outermost policy applies to everything inside.
    # One lane needs no vmap, which would add a batch dim of 1 to every
    # operation of the layer. CSE prevention is not needed: the backward starts
    # from parameters behind the barrier of `_gather_again`.
    return jax.checkpoint(
      jax.vmap(f) if self.shards.num_lanes > 1 else alone,
      policy=policy or no_forms, prevent_cse=False,
    )


def _at(tree: Any, i: Any) -> Any:
  """Returns layer i of a tree of arrays of L layers, ``[L, ...]``."""
  return jax.tree.map(
    lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree
  )


def _put(tree: Any, layer: Any, i: Any) -> Any:
  """Returns a tree of arrays of L layers with layer i replaced by ``layer``."""
  return jax.tree.map(
    lambda x, new: lax.dynamic_update_index_in_dim(x, new, i, 0), tree, layer
  )


def _split_shards(params: Any) -> tuple[Any, Any, Any]:
  """Splits a tree of `Shard` into trees of its weight, sink and tensor."""

  def part(field):
    return jax.tree.map(
      lambda shard: getattr(shard, field), params,
      is_leaf=lambda x: isinstance(x, Shard),
    )

  return part("weight"), part("sink"), part("tensor")


def _needs_parameters(vjp: Any) -> bool:
  """Returns whether a VJP reads parameters; an embedding lookup's does not."""
  # An argument that the VJP does not read is replaced by an object without
  # leaves.
  return bool(jax.tree.leaves(vjp.args_res[0]))
