"""How a model's functions read its parameters."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

# What rematerialisation keeps, as `jax.checkpoint` takes it; None: everything.
Policy = Callable[..., bool] | None


class Access:
  """Reads parameters as they are.

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
    if policy is not None:
      # Common subexpressions are not merged across a loop's iterations, so the
      # barriers that would prevent it between forward and backward are of no
      # use here, and would keep XLA from fusing.
      f = jax.checkpoint(f, policy=policy, prevent_cse=False)
    return lax.scan(
      lambda x, layer: (f(layer, x), None), x, params, unroll=unroll
    )[0]


AS_THEY_ARE = Access()
