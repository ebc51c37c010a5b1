"""Covering arrays contain every valid pair, and no excluded row."""

import doctest
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from tests import pairwise


@given(
  sizes=st.lists(st.integers(1, 4), min_size=2, max_size=5), seed=st.integers(),
)
@settings(max_examples=40, derandomize=True, database=None)
def test_rows_contain_every_pair_of_a_valid_row(sizes, seed):
  options = {f"option {i}": range(n) for i, n in enumerate(sizes)}

  def excluded(row):
    return hash((seed, *row.values())) % 3 == 0

  every = [
    dict(zip(options, values, strict=True))
    for values in itertools.product(*options.values())
  ]
  every = [row for row in every if not excluded(row)]
  found = pairwise.rows(options, excluded)
  assert all(row in every for row in found)
  assert len(found) <= len(every)

  def contained(table, a, b):
    return {(row[a], row[b]) for row in table}

  for a, b in itertools.combinations(options, 2):
    assert contained(found, a, b) == contained(every, a, b)


@pytest.mark.parametrize(("options", "most"), [
  ({i: range(2) for i in range(3)}, 4),
  ({i: range(3) for i in range(4)}, 9),
  ({i: range(2) for i in range(8)}, 8),
  ({"a": range(4), "b": range(3), "c": range(2), "d": range(2)}, 12),
])
def test_tables_are_small(options, most):
  assert len(pairwise.rows(options)) <= most


def test_example_prints_the_shown_output():
  found = doctest.testmod(pairwise)
  assert (found.attempted, found.failed) == (1, 0)
