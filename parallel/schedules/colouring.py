"""Edge colourings of bipartite multigraphs that load every vertex evenly.

Which flow takes which spine (`parallel.network.flows`), and which pairs may
send at once with one message per port. Sources: de Werra, "Equitable
colorations of graphs", 1971 (every bipartite multigraph has an equitable
colouring); König, 1916 (a regular one is a sum of perfect matchings);
McNaughton, 1959 (cutting a line of jobs at equal lengths, which `even` does
with the matchings).
"""

import collections
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
from scipy import sparse

Edge = tuple[int, int]  # left vertex, right vertex


def equitable(edges: Sequence[Edge], num_colours: int) -> list[int]:
  """Colours edges so that no vertex has one colour two times more than another.

  Args:
    edges: Of a multigraph; left and right vertices may share numbers.
    num_colours: Of any number.

  Returns:
    A colour in [0, num_colours) for each edge. A vertex of degree d has
    floor(d / num_colours) or ceil(d / num_colours) edges of each.
  """
  colours = [0] * len(edges)
  rest: list[int] = []
  for members in _parallel(edges).values():
    whole = len(members) - len(members) % num_colours
    for place, index in enumerate(members[:whole]):
      colours[index] = place % num_colours
    rest += members[whole:]
  # Vertices are cut into ones of degree num_colours, at most one less each:
  # a perfect matching of those gives each of them a colour once.
  left, right = (
    _cut([edges[i][side] for i in rest], num_colours) for side in (0, 1)
  )
  size = max([0, *left, *right]) + 1
  small = _parallel(list(zip(left, right, strict=True)))
  matrix = _regular(small, size, num_colours)
  colour = 0
  for columns, weight in _matchings(matrix):
    for pair in enumerate(columns):
      for turn in range(weight):
        if small.get(pair):
          colours[rest[small[pair].pop()]] = colour + turn
    colour += weight
  assert not any(small.values())
  return colours


def partial_permutations(
  pairs: Sequence[Edge],
) -> list[list[Edge]]:
  """Cuts pairs into the fewest sets without a repeated source or destination.

  That is as many as the most often named source or destination has pairs.

  Args:
    pairs: (source, destination), any number of times.
  """
  parts: list[list[Edge]] = [[] for _ in range(_largest_degree(pairs))]
  for pair, colour in zip(pairs, equitable(pairs, len(parts)), strict=True):
    parts[colour].append(pair)
  return parts


def even(
  edges: Sequence[Edge], num_colours: int
) -> list[tuple[tuple[int, Fraction], ...]]:
  """Shares of colours, degree / num_colours of each at the largest vertices.

  A regular graph of degree d on n + n vertices is a sum of d perfect
  matchings; laid end to end and cut at the multiples of d / num_colours they
  are the colours. That splits edges into n (num_colours - gcd(d,
  num_colours)) more pieces than there are edges, and fewer cannot do: at a
  vertex, groups of edges that fill a group of colours hold num_colours / gcd
  colours at least. Other graphs are filled up to regular ones; then no vertex
  has more of a colour than the largest degree over num_colours.

  Returns:
    For each edge (colour, share) with shares that sum to 1.
  """
  parallel = _parallel(edges)
  vertices = [sorted({e[side] for e in edges}) for side in (0, 1)]
  places = [{v: i for i, v in enumerate(vs)} for vs in vertices]
  small = {(places[0][u], places[1][v]): list(members)
           for (u, v), members in parallel.items()}
  degree = _largest_degree(edges)
  matrix = _regular(small, max(map(len, vertices)), degree)
  slots: dict[Edge, list[int]] = collections.defaultdict(list)
  start = 0
  for columns, weight in _matchings(matrix):
    for pair in enumerate(columns):
      slots[pair] += range(start, start + weight)
    start += weight
  shares: list[tuple[tuple[int, Fraction], ...]] = [()] * len(edges)
  for pair, members in small.items():
    parts = [_parts(slot, degree, num_colours) for slot in slots[pair]]
    parts.sort(key=len)  # what fills the graph up takes the cuts
    for index, part in zip(members, parts, strict=False):
      shares[index] = part
  return shares


def _parts(
  slot: int, degree: int, num_colours: int
) -> tuple[tuple[int, Fraction], ...]:
  """The colours of [slot, slot + 1) when [0, degree) is cut evenly."""
  low, high = slot * num_colours, (slot + 1) * num_colours
  first, last = low // degree, -(-high // degree)
  return tuple(
    (
      colour,
      Fraction(
        min(high, (colour + 1) * degree) - max(low, colour * degree),
        num_colours,
      ),
    )
    for colour in range(first, last)
  )


def _parallel(edges: Sequence[Edge]) -> dict[Edge, list[int]]:
  """Places of the edges between each pair of vertices."""
  found = collections.defaultdict(list)
  for index, edge in enumerate(edges):
    found[edge].append(index)
  return dict(found)


def _largest_degree(edges: Sequence[Edge]) -> int:
  degrees = [collections.Counter(e[side] for e in edges) for side in (0, 1)]
  return max((d for side in degrees for d in side.values()), default=0)


def _cut(vertices: Sequence[int], degree: int) -> list[int]:
  """A number for each edge; no number more than `degree` times."""
  count: collections.Counter[int] = collections.Counter()
  numbers: dict[tuple[int, int], int] = {}
  cut = []
  for vertex in vertices:
    part = (vertex, count[vertex] // degree)
    count[vertex] += 1
    cut.append(numbers.setdefault(part, len(numbers)))
  return cut


def _regular(
  edges: dict[Edge, list[int]], size: int, degree: int
) -> sparse.csr_array:
  """Multiplicities int ``[size, size]``, filled up to a degree everywhere."""
  counts = collections.Counter(
    {pair: len(members) for pair, members in edges.items()}
  )
  rows, columns = [degree] * size, [degree] * size
  for (u, v), count in counts.items():
    rows[u] -= count
    columns[v] -= count
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
  """Perfect matchings, with multiplicities, that sum to a regular matrix.

  Yields:
    The column of each row, and how many times.
  """
  left = matrix.copy()
  while left.nnz:
    columns = sparse.csgraph.maximum_bipartite_matching(
      left, perm_type="column"
    )
    rows = np.repeat(np.arange(len(columns)), np.diff(left.indptr))
    matched = left.indices == columns[rows]
    weight = int(left.data[matched].min())
    left.data[matched] -= weight
    left.eliminate_zeros()
    yield columns.tolist(), weight
