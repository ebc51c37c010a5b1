"""Few sizes, so that few programs are compiled."""


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
