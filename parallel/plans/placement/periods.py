"""Number of layers per iteration of a scan, if they save different activations.

An iteration executes several layers, a *period*, each of which saves
activations by its own policy (`parallel.memory.offload`). XLA then has the
weights and gradients of a whole period in memory, not those of one layer.
"""

# Limit on the layers of a period, each of which takes memory and is compiled.
_MAX_LENGTH = 4


def length(num_layers: int) -> int:
  """Returns the number of layers per iteration of a scan (a period).

  It divides ``num_layers``. Two or more layers have two or more periods: XLA
  would merge the forward and backward of a loop with one iteration, and undo
  offloading and recomputation.

  Example:
    >>> length(32), length(6), length(2)
    (4, 3, 1)
  """
  return max(
    n for n in range(1, _MAX_LENGTH + 1)
    if num_layers % n == 0 and (n == 1 or n < num_layers)
  )
