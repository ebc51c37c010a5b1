"""Edge colouring: pairs that send at once, cut into partial permutations."""

from collections.abc import Sequence


def partial_permutations(
  pairs: Sequence[tuple[int, int]],
) -> list[list[tuple[int, int]]]:
  """Cuts pairs into the fewest sets without a repeated source or destination.

  That is as many as the most often named source or destination has pairs:
  Koenig, "Ueber Graphen und ihre Anwendung auf Determinantentheorie und
  Mengenlehre", Math. Ann. 77, 1916, by alternating paths.

  Args:
    pairs: (source, destination), any number of times.
  """
  # colour -> destination at a source, and source at a destination
  sends: dict[int, dict[int, int]] = {}
  receives: dict[int, dict[int, int]] = {}
  for source, destination in pairs:
    out = sends.setdefault(source, {})
    into = receives.setdefault(destination, {})
    mine, theirs = _free(out), _free(into)
    if mine != theirs:
      _swap(sends, receives, destination, mine, theirs)
    out[mine] = destination
    into[mine] = source
  colours: list[list[tuple[int, int]]] = []
  for source, out in sorted(sends.items()):
    for colour, destination in sorted(out.items()):
      while len(colours) <= colour:
        colours.append([])
      colours[colour].append((source, destination))
  return colours


def _free(used: dict[int, int]) -> int:
  colour = 0
  while colour in used:
    colour += 1
  return colour


def _swap(
  sends: dict[int, dict[int, int]],
  receives: dict[int, dict[int, int]],
  destination: int,
  first: int,
  second: int,
) -> None:
  """Exchanges two colours on the path that leaves a destination with one.

  After that ``first`` is free at the destination; it stays free at the source
  in hand, where the path cannot end: it would enter it by ``first``.
  """
  path = []
  node, at_destination, colour = destination, True, first
  while True:
    side = receives if at_destination else sends
    other = side.get(node, {}).get(colour)
    if other is None:
      break
    path.append((other, node, colour) if at_destination
                else (node, other, colour))
    node, at_destination = other, not at_destination
    colour = second if colour == first else first
  for source, there, colour in path:
    del sends[source][colour], receives[there][colour]
  for source, there, colour in path:
    new = second if colour == first else first
    sends[source][new] = there
    receives[there][new] = source
