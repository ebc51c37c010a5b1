"""Few sizes, so that few programs are compiled."""

# The shortest chunk: of a small model's step a longer one takes no longer.
MIN_CHUNK = 16

# The lengths and the numbers of chunks for which there are programs grow by it.
CHUNK_FACTOR = 4

# Positions that all tables have pages for, if any sequence gets so long.
SHORT = 1024


def chunk_sizes(chunk: int, batch: int) -> list[tuple[int, int]]:
  """Returns how many chunks of which length a step may have.

  One long one, or more that are shorter, which have as much room in all.

  Args:
    chunk: Tokens of the longest one.
    batch: Sequences at a time.
  """
  count, length = 1, bucket(chunk, MIN_CHUNK, 1 << 30, CHUNK_FACTOR)
  found = [(count, length)]
  while count < batch and length > MIN_CHUNK:
    count, length = count * CHUNK_FACTOR, length // CHUNK_FACTOR
    found.append((count, length))
  return found


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
