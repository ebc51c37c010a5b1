"""Bucketing of sizes, so that few programs are compiled."""

# Smallest chunk length in tokens: a step of a small model with a shorter chunk
# takes the same time.
MIN_CHUNK = 16

# Ratio of successive buckets of the number and of the length of chunks.
CHUNK_FACTOR = 4

# Minimum width of page tables in positions, if sequences can get this long.
SHORT = 1024


def chunk_sizes(chunk: int, batch: int) -> list[tuple[int, int]]:
  """Returns alternative limits of a step's chunks: number and length.

  All alternatives have about the same total number of tokens.

  Args:
    chunk: Total tokens of a step's chunks.
    batch: Maximum number of concurrent sequences.

  Returns:
    Pairs (maximum chunks, maximum tokens per chunk), few long chunks first.

  Example:
    >>> chunk_sizes(chunk=256, batch=8)
    [(1, 256), (4, 64), (16, 16)]
  """
  found, count = [(1, chunk)], CHUNK_FACTOR
  while count < CHUNK_FACTOR * batch and chunk // count >= MIN_CHUNK:
    found.append((count, chunk // count))
    count *= CHUNK_FACTOR
  return found


def bucket(size: int, smallest: int, largest: float, factor: int) -> int:
  """Rounds a size up to ``smallest * factor**i``, or to ``largest``; 0 to 0.

  Args:
    size: The size, at most ``largest``.
    smallest: The smallest bucket.
    largest: The largest bucket, an integer; ``math.inf`` for no limit.
    factor: Ratio of successive buckets.

  Example:
    >>> [bucket(size, 1, 24, 4) for size in (0, 1, 3, 5, 17)]
    [0, 1, 4, 16, 24]
  """
  if not size:
    return 0
  found = smallest
  while found < size:
    found *= factor
  return int(min(found, largest))
