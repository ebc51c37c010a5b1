"""How a model's functions read its parameters."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

# What rematerialisation keeps, as `jax.checkpoint` takes it; None: everything.
Policy = Callable[..., bool] | None


class Access:
  """Reads parameters as they are.

  A partition of the parameters has an access of its own with these methods
  (`parallel.zero.gathered`); data may then have more leading dims, and
  parameters be whatever the partition put there.
  """

  def apply(
    self,
    f: Callable[..., Any],
    params: Any,
    *args: Any,
    policy: Policy = None,
  ) -> Any:
    """``f(params, *args)``.

    Args:
      f: A function of parameters and arguments.
      params: Its parameters.
      *args: Its arguments.
      policy: What is kept for the backward pass; None: everything.
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
    """``x = f(one layer's params, x)`` for all layers ``[L, ...]``.

    Args:
      f: A layer; its result has the type of ``x``.
      params: Leaves ``[L, ...]``.
      x: What the first layer gets.
      unroll: Layers per iteration of the loop.
      policy: What of a layer is kept for the backward pass; None: everything.
    """
    if policy is not None:
      # Nothing outside a loop's body is like what is inside: no CSE to prevent.
      f = jax.checkpoint(f, policy=policy, prevent_cse=False)
    return lax.scan(
      lambda x, layer: (f(layer, x), None), x, params, unroll=unroll
    )[0]


AS_THEY_ARE = Access()
