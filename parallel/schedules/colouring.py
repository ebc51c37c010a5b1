"""Edge colourings of bipartite multigraphs that load every vertex evenly.

`caatnet.studies.flows.link_loads` uses them to choose a spine for each flow,
and the schedules to find pairs of ranks that can send at once with one message
per port. Sources:

- de Werra, "Equitable colorations of graphs", 1971: every bipartite multigraph
  has an equitable colouring.
- König, 1916: a regular bipartite multigraph is a sum of perfect matchings.
- McNaughton, 1959: jobs laid end to end and cut at equal lengths. `even` does
  this with the matchings.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
import math

import numpy as np
from scipy import sparse

Edge = tuple[int, int]  # left vertex, right vertex


def equitable(edges: Sequence[Edge], num_colours: int) -> list[int]:
  """Colours edges so that each vertex has nearly as many of every colour.

  Args:
    edges: Edges of a bipartite multigraph. Left and right vertices are
      numbered apart, so the same number may name one of each.
    num_colours: Number of colours, at least 1 if there are edges.

  Returns:
    A colour in [0, num_colours) for each edge. A vertex of degree d has
    floor(d / num_colours) or ceil(d / num_colours) edges of each colour.
  """
  colours = [0] * len(edges)
  rest: list[int] = []
  # Parallel edges in numbers that the colours divide are dealt out evenly at
  # once. Few edges are left for the matchings, which take the time.
  for members in _parallel(edges).values():
    whole = len(members) - len(members) % num_colours
    for place, index in enumerate(members[:whole]):
      colours[index] = place % num_colours
    rest += members[whole:]
  # Each vertex is cut into parts of degree num_colours, and one of at most that
  # degree. Filled up, the graph of these parts is a sum of num_colours perfect
  # matchings. With one colour per matching, a full part has every colour once
  # and the other part has every colour at most once.
  left, right = (
    _cut([edges[i][side] for i in rest], num_colours) for side in (0, 1)
  )
  size = max([0, *left, *right]) + 1
  small = _parallel(list(zip(left, right, strict=True)))
  counts = {pair: len(members) for pair, members in small.items()}
  matrix = _regular(counts, size, num_colours)
  colour = 0
  for columns, weight in _matchings(matrix):
    for pair in enumerate(columns):
      # A matching that is repeated `weight` times stands for as many colours.
      # Edges that only fill the graph up are in no list.
      for turn in range(weight):
        if small.get(pair):
          colours[rest[small[pair].pop()]] = colour + turn
    colour += weight
  assert not any(small.values())
  return colours


def partial_permutations(
  pairs: Sequence[Edge],
) -> list[list[Edge]]:
  """Splits pairs into the fewest sets that name no rank twice on a side.

  Args:
    pairs: (source, destination); a pair may occur several times.

  Returns:
    Sets of pairs, each with distinct sources and distinct destinations. There
    are as many sets as the busiest source or destination has pairs.
  """
  # With as many colours as the largest degree, ceil(degree / colours) is 1: no
  # vertex has a colour twice.
  num_parts = largest_degree(pairs)
  parts: list[list[Edge]] = [[] for _ in range(num_parts)]
  for pair, colour in zip(pairs, equitable(pairs, len(parts)), strict=True):
    parts[colour].append(pair)
  return parts


def even(
  edges: Sequence[Edge],
  num_colours: int,
  weights: Sequence[int] | None = None,
) -> list[tuple[tuple[int, Fraction], ...]]:
  """Gives each edge shares of colours, so that the colours' loads are equal.

  A regular graph of degree d on n + n vertices is a sum of d perfect
  matchings. They are laid end to end on a line of length d. The line is cut at
  the multiples of d / num_colours, and each piece is one colour. An edge that
  lies across a cut gets shares of several colours.

  This makes n (num_colours - gcd(d, num_colours)) more pieces than there are
  edges. Fewer are not possible: at a vertex, whole edges can fill a group of
  whole colours only if the group has at least num_colours / gcd colours.

  A graph that is not regular is filled up to a regular one. Then no vertex has
  more of a colour than the largest degree over num_colours. An edge of weight w
  counts as w edges, and the loads are as even. But it may be cut more often
  than need be: the fewest pieces are promised for edges of one weight only.

  Args:
    edges: Edges of a bipartite multigraph, as in `equitable`.
    num_colours: Number of colours.
    weights: The weight of each edge, at least 1; None for 1 each.

  Returns:
    For each edge its (colour, share) pairs. The shares sum to 1.
  """
  weights = [1] * len(edges) if weights is None else weights
  unit = math.gcd(*weights)
  sizes = [weight // unit for weight in weights]
  vertices = [sorted({e[side] for e in edges}) for side in (0, 1)]
  places = [{v: i for i, v in enumerate(vs)} for vs in vertices]
  small = {(places[0][u], places[1][v]): members
           for (u, v), members in _parallel(edges).items()}
  counts = {
    pair: sum(sizes[i] for i in members) for pair, members in small.items()
  }
  degree = largest_degree(edges, sizes)
  lines = _on_a_line(_regular(counts, max(map(len, vertices)), degree))
  shares: list[tuple[tuple[int, Fraction], ...]] = [()] * len(edges)
  for pair, members in small.items():
    slots = lines[pair]
    if max(sizes) == 1:
      # There may be more slots than edges, as some only fill the graph up. Real
      # edges take the slots with the fewest cuts.
      slots = [(x, x + 1) for low, high in slots for x in range(low, high)]
      slots.sort(key=lambda slot: len(_parts([slot], degree, num_colours)))
    left = collections.deque(slots)
    for index in members:
      taken = _taken(left, sizes[index])
      shares[index] = _parts(taken, degree, num_colours)
  return shares


def _on_a_line(matrix: sparse.csr_array) -> dict[Edge, list[Edge]]:
  """Lays the matchings of a regular graph end to end.

  Returns:
    For each pair of vertices its parts of the line, (low, high). A matching
    that is repeated makes one part.
  """
  lines: dict[Edge, list[Edge]] = collections.defaultdict(list)
  start = 0
  for columns, weight in _matchings(matrix):
    for pair in enumerate(columns):
      lines[pair].append((start, start + weight))
    start += weight
  return lines


def _taken(slots: collections.deque[Edge], length: int) -> list[Edge]:
  """Takes the first ``length`` off slots, which are (start, end) pairs."""
  taken = []
  while length:
    low, high = slots.popleft()
    if high - low > length:
      slots.appendleft((low + length, high))
      high = low + length
    taken.append((low, high))
    length -= high - low
  return taken


def _parts(
  slots: Sequence[Edge], degree: int, num_colours: int
) -> tuple[tuple[int, Fraction], ...]:
  """Returns the colours of slots when [0, degree) is cut evenly."""
  # In units of 1 / num_colours all borders are integers: 1 is num_colours long
  # and a colour is degree long.
  total = num_colours * sum(high - low for low, high in slots)
  parts: dict[int, Fraction] = collections.defaultdict(Fraction)
  for slot in slots:
    low, high = slot[0] * num_colours, slot[1] * num_colours
    for colour in range(low // degree, -(-high // degree)):
      parts[colour] += Fraction(
        min(high, (colour + 1) * degree) - max(low, colour * degree), total
      )
  return tuple(parts.items())


def _parallel(edges: Sequence[Edge]) -> dict[Edge, list[int]]:
  """Returns the places in the list of the edges between each two vertices."""
  found = collections.defaultdict(list)
  for index, edge in enumerate(edges):
    found[edge].append(index)
  return dict(found)


def largest_degree(
  edges: Sequence[Edge], weights: Sequence[int] | None = None
) -> int:
  """Returns the largest weight of the edges at one vertex, of either side.

  Args:
    edges: The edges.
    weights: The weight of each; 1 if None.
  """
  degrees: collections.Counter[tuple[int, int]] = collections.Counter()
  for edge, weight in zip(edges, weights or [1] * len(edges), strict=True):
    for side in (0, 1):
      degrees[side, edge[side]] += weight
  return max(degrees.values(), default=0)


def _cut(vertices: Sequence[int], degree: int) -> list[int]:
  """Cuts the vertices of one side into parts of at most that degree.

  Args:
    vertices: The vertex of each edge.
    degree: The largest degree of a part.

  Returns:
    The part of each edge, numbered from 0.
  """
  count: collections.Counter[int] = collections.Counter()
  numbers: dict[tuple[int, int], int] = {}
  cut = []
  for vertex in vertices:
    part = (vertex, count[vertex] // degree)
    count[vertex] += 1
    cut.append(numbers.setdefault(part, len(numbers)))
  return cut


def _regular(
  edges: Mapping[Edge, int], size: int, degree: int
) -> sparse.csr_array:
  """Fills a bipartite multigraph up so that all vertices have one degree.

  Args:
    edges: (left vertex, right vertex) -> the number of edges between the two.
    size: Number of vertices on each side.
    degree: The degree to fill up to, at least the largest one there is.

  Returns:
    The multiplicity of each pair of vertices, int ``[size, size]``.
  """
  counts = collections.Counter(edges)
  rows, columns = [degree] * size, [degree] * size
  for (u, v), count in counts.items():
    rows[u] -= count
    columns[v] -= count
  # What is missing on the left is as much as on the right in all. Both are
  # walked through once, and each step completes a vertex.
  i = j = 0
  while i < size and j < size:
    fill = min(rows[i], columns[j])
    counts[i, j] += fill
    rows[i] -= fill
    columns[j] -= fill
    i, j = i + (not rows[i]), j + (not columns[j])
  pairs = [pair for pair, count in counts.items() if count]
  places = tuple(np.array(pairs, np.int64).reshape(-1, 2).T)
  weights = np.array([counts[pair] for pair in pairs], np.int64)
  return sparse.csr_array((weights, places), (size, size))


def _matchings(matrix: sparse.csr_array) -> Iterator[tuple[list[int], int]]:
  """Takes a regular matrix apart into perfect matchings.

  Args:
    matrix: Multiplicities, with one sum in all rows and columns.

  Yields:
    The column that each row is matched with, and how many times the matching
    is in the sum.
  """
  left = matrix.copy()
  # Taking a perfect matching out leaves the matrix regular, so there is another
  # one until nothing is left. Each is taken as often as it fits: then at least
  # one entry becomes zero, which bounds the number of matchings.
  while left.nnz:
    columns = sparse.csgraph.maximum_bipartite_matching(
      left, perm_type="column"
    )
    # The row of each stored entry, from the compressed row pointers.
    rows = np.repeat(np.arange(len(columns)), np.diff(left.indptr))
    matched = left.indices == columns[rows]
    weight = int(left.data[matched].min())
    left.data[matched] -= weight
    left.eliminate_zeros()
    yield columns.tolist(), weight
