"""Edge colourings: even loads at every vertex, and few divided edges."""

import collections
from fractions import Fraction
import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from parallel.plans.schedules import colouring

VERTICES = st.integers(0, 4)
EDGES = st.lists(st.tuples(VERTICES, VERTICES), min_size=1, max_size=20)
COLOURS = st.integers(1, 5)


def degrees(edges, weights):
  """Returns (side, vertex) -> total weight of its edges."""
  found = collections.Counter()
  for edge, weight in zip(edges, weights, strict=True):
    for end in enumerate(edge):
      found[end] += weight
  return found


def loads(edges, weights, shares):
  """Returns (side, vertex) -> colour -> weight of its edges of that colour."""
  found = {end: collections.Counter() for end in degrees(edges, weights)}
  for edge, weight, parts in zip(edges, weights, shares, strict=True):
    for colour, share in parts:
      for end in enumerate(edge):
        found[end][colour] += weight * share
  return found


@given(EDGES, COLOURS)
@settings(max_examples=50)
def test_colours_are_about_equally_frequent_at_each_vertex(edges, num_colours):
  colours = colouring.equitable(edges, num_colours)
  ones = [1] * len(edges)
  found = loads(edges, ones, [[(colour, 1)] for colour in colours])
  assert set(colours) <= set(range(num_colours))
  for end, degree in degrees(edges, ones).items():
    counts = {found[end][colour] for colour in range(num_colours)}
    assert counts <= {degree // num_colours, -(-degree // num_colours)}


def test_no_edges_have_no_colours():
  assert colouring.equitable([], 3) == []
  assert colouring.largest_degree([]) == 0


@given(EDGES, COLOURS, st.data())
@settings(max_examples=50)
def test_no_vertex_has_more_of_a_colour_than_the_mean(edges, num_colours, data):
  """The mean is that of the vertex with the largest total weight."""
  weights = data.draw(st.one_of(st.none(), st.lists(
    st.sampled_from([2, 4, 6]), min_size=len(edges), max_size=len(edges)
  )))
  shares = colouring.split_evenly(edges, num_colours, weights)
  weights = weights or [1] * len(edges)
  largest = max(degrees(edges, weights).values())
  assert colouring.largest_degree(edges, weights) == largest
  for parts in shares:
    assert sum(share for _, share in parts) == 1
    assert min(share for _, share in parts) > 0
    assert len({colour for colour, _ in parts}) == len(parts)
    assert {colour for colour, _ in parts} <= set(range(num_colours))
  for found in loads(edges, weights, shares).values():
    assert max(found.values()) <= Fraction(largest, num_colours)


@pytest.mark.parametrize("weight", [None, 3])
@pytest.mark.parametrize(("degree", "num_colours"), [
  (2, 3), (3, 2), (4, 6), (6, 4), (5, 5), (4, 1),
])
def test_regular_graph_is_cut_as_rarely_as_possible(
  degree, num_colours, weight
):
  """Makes n (k - gcd(degree, k)) more pieces than edges, for k colours."""
  n, rng = 4, random.Random(degree)
  edges = [
    (10 + u, v) for _ in range(degree)
    for u, v in enumerate(rng.sample(range(n), n))
  ]
  weights = weight and [weight] * len(edges)
  shares = colouring.split_evenly(edges, num_colours, weights)
  assert sum(map(len, shares)) == (
    len(edges) + n * (num_colours - math.gcd(degree, num_colours))
  )
  for found in loads(edges, [1] * len(edges), shares).values():
    assert set(found.values()) == {Fraction(degree, num_colours)}


def test_padding_takes_the_slots_that_are_cut():
  """Two colours divide the second of three slots."""
  shares = colouring.split_evenly([(0, 0)] * 3 + [(1, 1)] * 2, 2)
  assert sorted(map(len, shares)) == [1, 1, 1, 1, 2]
  assert [len(parts) for parts in shares[3:]] == [1, 1]
