"""Few sizes, so that few programs are compiled."""

# The shortest chunk: of a small model's step a longer one takes no longer.
MIN_CHUNK = 16

# The lengths of chunks for which there are programs grow by it.
CHUNK_FACTOR = 4

# Positions that all tables have pages for, if any sequence gets so long.
SHORT = 1024


def bucket(size: int, smallest: int, largest: int, factor: int) -> int:
  """Rounds a size up to one of few: ``smallest * factor**i``, or ``largest``.

  Nothing stays nothing.
  """
  if not size:
    return 0
  found = smallest
  while found < size:
    found *= factor
  return min(found, largest)
