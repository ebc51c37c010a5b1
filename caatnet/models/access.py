"""How a model's functions read its parameters."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


class Access:
  """As they are.

  A partition of the parameters has one of its own with these methods; data
  may then have more leading dims, and parameters be whatever it put there.
  """

  def apply(self, f: Callable[..., Any], params: Any, *args: Any) -> Any:
    """``f(params, *args)``."""
    return f(params, *args)

  def scan(
    self,
    f: Callable[[Any, Any], Any],
    params: Any,
    x: Any,
    unroll: int,
    policy: Callable[..., bool] | None,
  ) -> Any:
    """``x = f(one layer's params, x)`` for all layers ``[L, ...]``.

    ``policy`` is one of ``REMAT_POLICIES``.
    """
    if policy is not None:
      f = jax.checkpoint(f, policy=policy, prevent_cse=False)
    return lax.scan(
      lambda x, layer: (f(layer, x), None), x, params, unroll=unroll
    )[0]


AS_THEY_ARE = Access()
