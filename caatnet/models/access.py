"""How a model's functions read its parameters."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

# What rematerialisation keeps, as `jax.checkpoint` takes it; None: everything.
Policy = Callable[..., bool] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Declared:
  """A stored parameter that functions read in its declared dtype.

  Attributes:
    value: The stored float32 array.
    dtype: The dtype in which a function reads it.
  """

  value: jax.Array
  dtype: str = dataclasses.field(metadata={"static": True})


def declared(params: Any, parameters: Any) -> Any:
  """Marks stored parameters with the dtypes in which functions read them.

  Args:
    params: Tree of float32 arrays.
    parameters: A `caatnet.models.protocol.Parameter` for each.

  Returns:
    The tree, with a `Declared` for each array that an `Access` has to cast.
  """

  def mark(x: jax.Array, p: Any) -> Any:
    cast = p.cast and x.dtype != jnp.dtype(p.dtype)
    return Declared(x, p.dtype) if cast else x

  return jax.tree.map(mark, params, parameters)


def _reading(f: Callable[..., Any]) -> Callable[..., Any]:
  """Returns ``f`` as a function of parameters that may be `Declared`."""

  def read(x: Any) -> Any:
    return x.value.astype(x.dtype) if isinstance(x, Declared) else x

  def reading(params: Any, *args: Any) -> Any:
    params = jax.tree.map(
      read, params, is_leaf=lambda x: isinstance(x, Declared)
    )
    return f(params, *args)

  return reading


class Access:
  """Reads parameters unchanged, or in the dtypes that are `declared`.

  The cast is part of the function that reads: where the backward rematerialises
  the function, no copy in the other dtype is kept.

  Models read parameters through an access only, so that a partition can take
  its place: `parallel.zero.gathered` has the same methods, gathers parameters
  before a function runs and scatters their gradients after it. Arguments then
  have a leading dim of data-parallel ranks, and what stands for a parameter is
  known to the partition alone.
  """

  def apply(
    self,
    f: Callable[..., Any],
    params: Any,
    *args: Any,
    policy: Policy = None,
  ) -> Any:
    """Computes ``f(params, *args)``.

    Args:
      f: A function of parameters and arguments.
      params: The parameters.
      *args: The arguments.
      policy: What is kept for the backward; None keeps everything.
    """
    f = _reading(f)
    if policy is not None:
      f = jax.checkpoint(f, policy=policy)
    return f(params, *args)

  def scan(
    self,
    f: Callable[[Any, Any], Any],
    params: Any,
    x: Any,
    unroll: int,
    policy: Policy,
  ) -> Any:
    """Computes ``x = f(one layer's params, x)`` for all layers in turn.

    Args:
      f: A layer's function; its result has the type of ``x``.
      params: The parameters of all layers, ``[L, ...]``.
      x: What the first layer gets.
      unroll: Layers per iteration of the loop.
      policy: What is kept of a layer for the backward; None keeps everything.

    Returns:
      The result of the last layer.
    """
    f = _reading(f)
    if policy is not None:
      # Common subexpressions are not merged across a loop's iterations, so the
      # barriers that would prevent it between forward and backward are of no
      # use here, and would keep XLA from fusing.
      f = jax.checkpoint(f, policy=policy, prevent_cse=False)
    return lax.scan(
      lambda x, layer: (f(layer, x), None), x, params, unroll=unroll
    )[0]


AS_THEY_ARE = Access()
