"""Periods of layers that save different activations for their backward.

A scan over layers runs one period of them per iteration, each layer with its
own policy (`parallel.memory.offload`). XLA then has the weights and gradients
of a period in memory, instead of those of a layer.
"""

# Most layers of a period: each of them takes memory and is compiled separately.
_MOST = 4


def length(num_layers: int) -> int:
  """Returns the number of layers of a period, which divides that of a model.

  There are two periods or more: XLA would merge forward and backward of a loop
  with one iteration, and undo the copies and the recomputation.

  Example:
    >>> length(32), length(6), length(2)
    (4, 3, 1)
  """
  return max(
    n for n in range(1, _MOST + 1)
    if num_layers % n == 0 and (n == 1 or n < num_layers)
  )
