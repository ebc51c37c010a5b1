"""MultiTree compared with a definition that tries every path in each turn."""

import itertools
import random

import pytest

from parallel.plans.schedules import multitree
from parallel.plans.topology import builders as t
from parallel.plans.topology.graph import Link, Topology


def shortest(net, free, parent, tree):
  """Returns a shortest path over free links from a parent to a new rank."""
  n = net.num_ranks

  def rank_of_link(pair):  # the order in which a node's links are tried
    if net.num_switches == 0:
      return 0  # that of the topology
    return pair[1] if pair[1] >= n else (pair[1] - parent) % n

  paths = [(parent,)]
  seen = {parent}
  for path in paths:
    ahead = [pair for pair in net.links_by_pair if pair[0] == path[-1]]
    for pair in sorted(ahead, key=rank_of_link):
      if pair not in free:
        continue
      if pair[1] < n and pair[1] not in tree:
        return (*path, pair[1])
      if pair[1] >= n and pair[1] not in seen:
        seen.add(pair[1])
        paths.append((*path, pair[1]))
  return None


def definition(net, farthest_first):
  """Grows the trees as the module's docstring defines them."""
  n = net.num_ranks
  far = [max(net.hops(root, rank) for rank in range(n)) for root in range(n)]
  trees = [[root] for root in range(n)]
  steps = []
  while min(map(len, trees)) < n:
    free, parents = set(net.links_by_pair), [list(tree) for tree in trees]
    grown, order, before = [], list(range(n)), -1
    while before < len(grown):
      before = len(grown)
      for root in order:
        paths = [shortest(net, free, x, trees[root]) for x in parents[root]]
        path = min(filter(None, paths), key=len, default=None)
        if path:  # of the first parent with a path of this length
          free -= set(itertools.pairwise(path))
          trees[root].append(path[-1])
          grown.append((root, path))
      if farthest_first:
        order = sorted(range(n), key=lambda root: (-far[root], -root))
    steps.append(tuple(zip(*grown, strict=True)))
  return steps


def drawn(seed):
  """Draws a connected network of ranks and switches, some links one-way."""
  rng = random.Random(seed)
  n, num_switches = rng.randint(3, 6), rng.randint(0, 4)
  nodes = list(range(n + num_switches))
  way = [*nodes[n:], *nodes[:n]]  # switches form a chain between ranks
  pairs = dict.fromkeys(
    pair for a, b in itertools.pairwise([*way, way[0]])
    for pair in ((a, b), (b, a))
  )
  pairs |= dict.fromkeys(
    tuple(rng.sample(nodes, 2)) for _ in range(rng.randint(0, 2 * n))
  )
  return Topology(
    f"drawn {seed}", n, num_switches, tuple(Link(*pair) for pair in pairs)
  )


@pytest.mark.parametrize("farthest_first", [False, True])
@pytest.mark.parametrize("net", [
  t.torus((3, 4)), t.mesh((3, 3)), t.ring(5).without((1, 0)),
  t.leaf_spine(2, 2, 3), t.bigraph(2, 4), t.dgx(2, 3), t.switch(5),
  *map(drawn, range(12)),
], ids=lambda net: net.name)
def test_steps_are_those_of_the_definition(net, farthest_first):
  assert multitree.grow(net, farthest_first=farthest_first) == (
    definition(net, farthest_first)
  )
