"""Access objects, through which a model's functions read its parameters."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from parallel.memory.offload import (
  ON_DEVICE,
  ActivationPlacement,
  group_into_periods,
  split_period,
)

# Rematerialisation policy of `jax.checkpoint`; None saves all activations.
RematPolicy = Callable[..., bool] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CastOnRead:
  """Stored parameter that functions read in its declared dtype.

  Attributes:
    value: The stored float32 array.
    dtype: The dtype to which it is cast when a function reads it.
  """

  value: jax.Array
  dtype: str = dataclasses.field(metadata={"static": True})


def mark_read_dtypes(params: Any, parameters: Any) -> Any:
  """Marks stored parameters with the dtypes in which functions read them.

  Args:
    params: Tree of float32 arrays.
    parameters: Tree of `caatnet.models.protocol.Parameter`, one per array.

  Returns:
    The tree, with a `CastOnRead` for each array that an `Access` has to cast.
  """

  def mark(x: jax.Array, p: Any) -> Any:
    cast = p.cast and x.dtype != jnp.dtype(p.dtype)
    return CastOnRead(x, p.dtype) if cast else x

  return jax.tree.map(mark, params, parameters)


def _with_casts(f: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a function that casts `CastOnRead` parameters and calls ``f``."""

  def read(x: Any) -> Any:
    return x.value.astype(x.dtype) if isinstance(x, CastOnRead) else x

  def reading(params: Any, *args: Any) -> Any:
    params = jax.tree.map(
      read, params, is_leaf=lambda x: isinstance(x, CastOnRead)
    )
    return f(params, *args)

  return reading


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
  """Reader of parameters, which casts `CastOnRead` ones to their dtypes.

  The cast is part of the function that reads the parameter. If the backward
  pass rematerialises that function, no copy in the other dtype is stored.

  Models read parameters through an access only, so that a ZeRO partition can
  replace it: `parallel.zero.gathered` has the same methods, gathers parameters
  before a function runs and reduce-scatters their gradients after it. Arguments
  then have a leading dim of data-parallel ranks, and the representation of a
  parameter is private to the partition.

  Attributes:
    activations: Memory of the activations that layers of a scan save
      (`parallel.memory.offload`).

  Example:
    >>> weights = jnp.array([2.0, 3.0])  # one weight per layer
    >>> layer = lambda w, x: w * x
    >>> Access().scan(layer, weights, jnp.float32(1), 1, None)
    Array(6., dtype=float32)
    >>> stored = CastOnRead(weights, "bfloat16")
    >>> Access().apply(lambda w: w, stored).dtype
    dtype(bfloat16)
  """

  activations: ActivationPlacement = ON_DEVICE

  def apply(
    self,
    f: Callable[..., Any],
    params: Any,
    *args: Any,
    policy: RematPolicy = None,
  ) -> Any:
    """Computes ``f(params, *args)``.

    Args:
      f: A function of parameters and arguments.
      params: The parameters.
      *args: The arguments.
      policy: Selects the residuals saved for the backward; None saves all.
    """
    f = _with_casts(f)
    if policy is not None:
      f = jax.checkpoint(f, policy=policy)
    return f(params, *args)

  def scan(
    self,
    f: Callable[[Any, Any], Any],
    params: Any,
    x: Any,
    unroll: int,
    policy: RematPolicy,
  ) -> Any:
    """Computes ``x = f(one layer's params, x)`` for one layer after another.

    Args:
      f: A layer's function; its result has the type of ``x``.
      params: The parameters of all layers, ``[layers, ...]``.
      x: Input of the first layer.
      unroll: Periods per iteration of the compiled loop. A period is one layer,
        or several whose activations are placed in a fixed pattern
        (`ActivationPlacement.layers`).
      policy: Selects the residuals saved for the backward; None saves all.

    Returns:
      The result of the last layer.
    """
    # Common subexpressions are not merged across loop iterations, so the
    # barriers that prevent merging of forward and backward are not needed here,
    # and they would prevent fusion.
    num_layers = jax.tree.leaves(params)[0].shape[0]
    layers = [
      f if policy is None
      else jax.checkpoint(f, policy=policy, prevent_cse=False)
      for f, policy in self.activations.layers(
        _with_casts(f), policy, num_layers
      )
    ]
    length = len(layers)

    def period(x: Any, params: Any) -> tuple[Any, None]:
      for layer, one in zip(layers, split_period(params, length), strict=True):
        x = layer(one, x)
      return x, None

    return lax.scan(
      period, x, group_into_periods(params, length), unroll=unroll
    )[0]


DEFAULT_ACCESS = Access()
