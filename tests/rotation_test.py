"""Rows of long tables that a day runs (`tests/conftest.py`)."""

import types

import pytest

from tests.conftest import _of_the_day


def _table(name, rows, *mark):
  """Returns items of a table; ``mark`` is empty, or has the mark's argument."""
  marker = types.SimpleNamespace(args=mark[:1] if mark != (3,) else ())
  return [
    types.SimpleNamespace(
      path="a_test.py", cls=None, originalname=name, name=f"{name}[{row}]",
      get_closest_marker=lambda _: marker if mark else None,
    )
    for row in range(rows)
  ]


@pytest.mark.parametrize("day", range(739_000, 739_006))
def test_a_day_runs_a_share_of_marked_tables_and_all_others(day):
  items = [*_table("a", 7, 3), *_table("b", 4), *_table("c", 5, 2)]
  kept = [item.name for item in _of_the_day(items, day)]
  counts = [sum(name[0] == table for name in kept) for table in "abc"]
  assert counts[0] in (2, 3)
  assert counts[1] == 4
  assert counts[2] in (2, 3)


def test_every_row_is_run_within_three_days():
  items = [*_table("a", 7, 3), *_table("b", 2, 2), *_table("c", 1, 3)]
  seen = [item.name for day in range(3) for item in _of_the_day(items, day)]
  assert set(seen) == {item.name for item in items}
  assert sorted(n for n in seen if n[0] == "a") == sorted(
    item.name for item in items[:7]
  )
