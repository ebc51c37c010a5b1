"""Edge colourings of bipartite multigraphs that load every vertex evenly.

`caatnet.studies.flows.link_loads` uses them to choose a spine for each flow.
The schedules use them to find pairs of ranks that can send at the same time
with one message per port. Sources:

- de Werra, "Equitable colorations of graphs", 1971: every bipartite multigraph
  has an equitable colouring.
- König, 1916: a regular bipartite multigraph is a sum of perfect matchings.
- McNaughton, 1959: jobs are laid end to end and cut at equal lengths, as the
  matchings are in `split_evenly`.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
import math

import numpy as np
from scipy import sparse

Edge = tuple[int, int]  # left vertex, right vertex


def equitable(edges: Sequence[Edge], num_colours: int) -> list[int]:
  """Colours edges so that each vertex has about equally many of each colour.

  Args:
    edges: Edges of a bipartite multigraph. Left and right vertices have
      separate numberings, so one number may occur on both sides.
    num_colours: Number of colours, at least 1 if there are edges.

  Returns:
    A colour in [0, num_colours) for each edge. A vertex of degree d has
    floor(d / num_colours) or ceil(d / num_colours) edges of each colour.
  """
  colours = [0] * len(edges)
  rest: list[int] = []
  # Parallel edges are first dealt out evenly, in multiples of the number of
  # colours. The expensive matchings then handle only the few remaining edges.
  for members in _group_parallel(edges).values():
    whole = len(members) - len(members) % num_colours
    for place, index in enumerate(members[:whole]):
      colours[index] = place % num_colours
    rest += members[whole:]
  # Each vertex is cut into parts of degree num_colours and one part of at most
  # that degree. The graph of these parts, padded to a regular one, is a sum of
  # num_colours perfect matchings. With one colour per matching, a full part has
  # every colour once, and a smaller part has every colour at most once.
  left, right = (
    _split_vertices(
      [edges[i][side] for i in rest], num_colours
    ) for side in (0, 1)
  )
  size = max([0, *left, *right]) + 1
  small = _group_parallel(list(zip(left, right, strict=True)))
  counts = {pair: len(members) for pair, members in small.items()}
  matrix = _pad_to_regular(counts, size, num_colours)
  colour = 0
  for columns, weight in _matchings(matrix):
    for pair in enumerate(columns):
      # A matching with multiplicity `weight` uses as many colours. Edges that
      # only pad the graph are not in `small`.
      for turn in range(weight):
        if small.get(pair):
          colours[rest[small[pair].pop()]] = colour + turn
    colour += weight
  assert not any(small.values())
  return colours


def partial_permutations(
  pairs: Sequence[Edge],
) -> list[list[Edge]]:
  """Splits pairs into the fewest sets without a repeated source or destination.

  Args:
    pairs: (source, destination); a pair may occur several times.

  Returns:
    Sets of pairs, each with distinct sources and distinct destinations. Their
    number equals the largest number of pairs at one source or destination.
  """
  # With as many colours as the largest degree, ceil(degree / colours) is 1: no
  # colour occurs twice at a vertex.
  num_parts = largest_degree(pairs)
  parts: list[list[Edge]] = [[] for _ in range(num_parts)]
  for pair, colour in zip(pairs, equitable(pairs, len(parts)), strict=True):
    parts[colour].append(pair)
  return parts


def split_evenly(
  edges: Sequence[Edge],
  num_colours: int,
  weights: Sequence[int] | None = None,
) -> list[tuple[tuple[int, Fraction], ...]]:
  """Splits edges between colours so that all colours have equal loads.

  A regular graph of degree d on n + n vertices is a sum of d perfect
  matchings. They are laid end to end on a line of length d. The line is cut at
  the multiples of d / num_colours, and each section is one colour. An edge that
  lies across a cut is split between several colours.

  Let g = gcd(d, num_colours). The result has n (num_colours - g) more parts
  than there are edges, which is the minimum: at a vertex, whole edges can fill
  a group of whole colours only if the group has at least num_colours / g of
  them.

  A graph that is not regular is padded to a regular one. Then the load of a
  colour at a vertex is at most (largest degree) / num_colours. An edge of
  weight w counts as w edges, and loads remain equal. With different weights,
  however, edges may be cut more often than necessary: the number of parts is
  minimal only for equal weights.

  Args:
    edges: Edges of a bipartite multigraph, as in `equitable`.
    num_colours: Number of colours.
    weights: Weight of each edge, at least 1; None for 1 each.

  Returns:
    For each edge, pairs (colour, fraction of the edge); fractions sum to 1.
  """
  weights = [1] * len(edges) if weights is None else weights
  unit = math.gcd(*weights)
  sizes = [weight // unit for weight in weights]
  vertices = [sorted({e[side] for e in edges}) for side in (0, 1)]
  places = [{v: i for i, v in enumerate(vs)} for vs in vertices]
  small = {(places[0][u], places[1][v]): members
           for (u, v), members in _group_parallel(edges).items()}
  counts = {
    pair: sum(sizes[i] for i in members) for pair, members in small.items()
  }
  degree = largest_degree(edges, sizes)
  lines = _matching_intervals(
    _pad_to_regular(counts, max(map(len, vertices)), degree)
  )
  shares: list[tuple[tuple[int, Fraction], ...]] = [()] * len(edges)
  for pair, members in small.items():
    slots = lines[pair]
    if max(sizes) == 1:
      # There may be more slots than edges, since some slots are padding. Edges
      # take the slots with the fewest cuts.
      slots = [(x, x + 1) for low, high in slots for x in range(low, high)]
      slots.sort(
        key=lambda slot: len(_colour_fractions([slot], degree, num_colours))
      )
    left = collections.deque(slots)
    for index in members:
      taken = _take_units(left, sizes[index])
      shares[index] = _colour_fractions(taken, degree, num_colours)
  return shares


def _matching_intervals(matrix: sparse.csr_array) -> dict[Edge, list[Edge]]:
  """Lays the matchings of a regular graph end to end on a line.

  Returns:
    For each pair (left vertex, right vertex), the intervals (low, high) of
    matchings that contain the pair. A repeated matching makes one interval.
  """
  lines: dict[Edge, list[Edge]] = collections.defaultdict(list)
  start = 0
  for columns, weight in _matchings(matrix):
    for pair in enumerate(columns):
      lines[pair].append((start, start + weight))
    start += weight
  return lines


def _take_units(slots: collections.deque[Edge], length: int) -> list[Edge]:
  """Removes intervals (start, end) of total length ``length``; returns them.

  They are taken from the start of ``slots``, the last one possibly in part.
  """
  taken = []
  while length:
    low, high = slots.popleft()
    if high - low > length:
      slots.appendleft((low + length, high))
      high = low + length
    taken.append((low, high))
    length -= high - low
  return taken


def _colour_fractions(
  slots: Sequence[Edge], degree: int, num_colours: int
) -> tuple[tuple[int, Fraction], ...]:
  """Returns the colours of the intervals ``slots`` (start, end) of a line.

  The line [0, degree) is cut into ``num_colours`` equal sections, one for each
  colour.

  Returns:
    (colour, fraction of the intervals' total length that the colour has).
  """
  # In units of 1 / num_colours all borders are integers: length 1 becomes
  # num_colours, and the length of a colour becomes degree.
  total = num_colours * sum(high - low for low, high in slots)
  parts: dict[int, Fraction] = collections.defaultdict(Fraction)
  for slot in slots:
    low, high = slot[0] * num_colours, slot[1] * num_colours
    for colour in range(low // degree, -(-high // degree)):
      parts[colour] += Fraction(
        min(high, (colour + 1) * degree) - max(low, colour * degree), total
      )
  return tuple(parts.items())


def _group_parallel(edges: Sequence[Edge]) -> dict[Edge, list[int]]:
  """Returns (left, right) vertex -> indices of the edges between them."""
  found = collections.defaultdict(list)
  for index, edge in enumerate(edges):
    found[edge].append(index)
  return dict(found)


def largest_degree(
  edges: Sequence[Edge], weights: Sequence[int] | None = None
) -> int:
  """Returns the largest total weight of a vertex's edges, left or right.

  Args:
    edges: The edges.
    weights: Weight of each edge; 1 each if None.
  """
  degrees: collections.Counter[tuple[int, int]] = collections.Counter()
  for edge, weight in zip(edges, weights or [1] * len(edges), strict=True):
    for side in (0, 1):
      degrees[side, edge[side]] += weight
  return max(degrees.values(), default=0)


def _split_vertices(vertices: Sequence[int], degree: int) -> list[int]:
  """Splits vertices into new ones with at most the given number of edges.

  Args:
    vertices: Vertex of each edge, on one side of a bipartite graph.
    degree: Largest number of edges of a new vertex.

  Returns:
    New vertex of each edge, numbered from 0.
  """
  count: collections.Counter[int] = collections.Counter()
  numbers: dict[tuple[int, int], int] = {}
  cut = []
  for vertex in vertices:
    part = (vertex, count[vertex] // degree)
    count[vertex] += 1
    cut.append(numbers.setdefault(part, len(numbers)))
  return cut


def _pad_to_regular(
  edges: Mapping[Edge, int], size: int, degree: int
) -> sparse.csr_array:
  """Pads a bipartite multigraph so that all vertices have the same degree.

  Args:
    edges: (left vertex, right vertex) -> number of edges between them.
    size: Number of vertices on each side.
    degree: Target degree, at least the largest existing one.

  Returns:
    Multiplicity of each pair of vertices, int ``[size, size]``.
  """
  counts = collections.Counter(edges)
  rows, columns = [degree] * size, [degree] * size
  for (u, v), count in counts.items():
    rows[u] -= count
    columns[v] -= count
  # The missing degrees have the same sum on both sides. One pass over both
  # sides adds them: each step completes at least one vertex.
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
  """Decomposes a regular matrix into perfect matchings.

  Args:
    matrix: Multiplicities; all rows and columns have the same sum.

  Yields:
    Column matched with each row, and the multiplicity of the matching.
  """
  left = matrix.copy()
  # Removing a perfect matching leaves the matrix regular, so there is another
  # one until nothing remains. Each is removed with its largest multiplicity:
  # then at least one entry becomes zero, which bounds the number of matchings.
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
