"""Number of layers per iteration of a scan, if they save different activations.

Each layer of an iteration, a *period*, saves activations for its backward by
its own policy (`parallel.memory.offload`). XLA then has the weights and
gradients of a period in memory, instead of those of a layer.
"""

# Limit on the layers of a period, each of which takes memory and is compiled.
_MOST = 4


def length(num_layers: int) -> int:
  """Returns the number of layers of a period, a divisor of ``num_layers``.

  Two or more layers have two or more periods: XLA would merge the forward and
  backward of a loop with one iteration, and undo offloading and recomputation.

  Example:
    >>> length(32), length(6), length(2)
    (4, 3, 1)
  """
  return max(
    n for n in range(1, _MOST + 1)
    if num_layers % n == 0 and (n == 1 or n < num_layers)
  )
