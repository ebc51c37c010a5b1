"""Few sizes, so that few programs are compiled."""

# The shortest chunk: of a small model's step a longer one takes no longer.
MIN_CHUNK = 16

# The lengths and the numbers of chunks for which there are programs grow by it.
CHUNK_FACTOR = 4

# Positions that all tables have pages for, if any sequence gets so long.
SHORT = 1024


def chunk_sizes(chunk: int, batch: int) -> list[tuple[int, int]]:
  """Returns how many chunks of which length a step may have at most.

  One long one, or more that are shorter and have as many tokens in all.

  Args:
    chunk: Tokens of a step's chunks.
    batch: Sequences at a time.
  """
  found, count = [(1, chunk)], CHUNK_FACTOR
  while count < CHUNK_FACTOR * batch and chunk // count >= MIN_CHUNK:
    found.append((count, chunk // count))
    count *= CHUNK_FACTOR
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
