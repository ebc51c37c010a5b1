"""Rank-local functions of layers, written for one tensor rank.

Nothing here communicates or knows that there are other ranks.

Shape legend: F = features of one rank.
"""

import jax
from jax.ad_checkpoint import checkpoint_name


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """Returns ``silu(gate) * up``, ``[..., F]``. Shazeer, arXiv 2002.05202."""
  return jax.nn.silu(gate) * up


def kept(*activations: jax.Array) -> tuple[jax.Array, ...]:
  """Names activations, so that the backward keeps them.

  A partition does not keep slices and other forms of arrays, which might be
  parameters (`parallel.zero.gathered`), but what has a name it keeps.
  """
  return tuple(checkpoint_name(x, "activation") for x in activations)
