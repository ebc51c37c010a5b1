"""Rank-local functions of layers, written for one tensor rank.

No function here communicates or depends on the number of ranks.

Shape legend: F = features of one rank.
"""

import jax
from jax.ad_checkpoint import checkpoint_name

# Name by which checkpoint policies refer to activations that `name_activations`
# marks.
ACTIVATION_NAME = "activation"


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """Returns ``silu(gate) * up``, ``[..., F]``. Shazeer, arXiv 2002.05202."""
  return jax.nn.silu(gate) * up


def name_activations(*activations: jax.Array) -> tuple[jax.Array, ...]:
  """Names activations, so that checkpoint policies save them.

  The checkpoint policy of a ZeRO partition (`parallel.zero.gathered`) does not
  save slices and reshapes, since these may be gathered parameters. It saves
  named arrays.
  """
  return tuple(checkpoint_name(x, ACTIVATION_NAME) for x in activations)
