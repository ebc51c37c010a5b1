"""Samples are functions of the seed, and cover files and functions."""

import collections

import pytest

from tests.mutation import sample
from tests.mutation.candidates import candidates

LONG = "def f(a):\n" + "  a[0] = a[1] + 2\n" * 50
SHORT = "def g(a):\n  return a < 1\n\ndef h(a):\n  return a - 1\n"


@pytest.fixture
def root(tmp_path):
  folder = tmp_path / "parallel" / "room" / "deep"
  folder.mkdir(parents=True)
  (tmp_path / "parallel" / "top.py").write_text(SHORT)
  (folder.parent / "long.py").write_text(LONG)
  (folder / "short.py").write_text(SHORT)
  return tmp_path


def drawn(root, num, seed, skipped=()):
  files = sample.sources(root)["parallel/room"]
  return sample.sample(root, "parallel/room", files, num, seed, skipped)


def test_directories(root):
  assert sample.sources(root) == {
    "parallel/room": [
      "parallel/room/deep/short.py", "parallel/room/long.py",
    ],
    "parallel": ["parallel/top.py"],
  }


def test_a_seed_gives_one_sample(root):
  assert drawn(root, 9, 0) == drawn(root, 9, 0)
  assert drawn(root, 9, 0) != drawn(root, 9, 1)
  assert drawn(root, 9, 0)[:5] == drawn(root, 5, 0)


def test_nothing_is_drawn_twice_and_all_can_be(root):
  every = {
    m for f in sample.sources(root)["parallel/room"]
    for m in candidates((root / f).read_text(), f)
  }
  found = drawn(root, 10_000, 0)
  assert len(found) == len(set(found))
  assert set(found) == every


def test_short_files_are_represented(root):
  every = [
    m for f in sample.sources(root)["parallel/room"]
    for m in candidates((root / f).read_text(), f)
  ]
  counts = collections.Counter(
    next(sample.draw(every, seed, "")).function for seed in range(300)
  )
  # In proportion to mutants, the two short functions would have 1.4%.
  assert sum(m.function != "f" for m in every) / len(every) < 0.02
  assert min(counts["g"], counts["h"]) > 5


def test_equivalents_are_replaced_by_the_next(root):
  first, second, third = drawn(root, 3, 0)
  assert drawn(root, 2, 0, {first.identity}) == [second, third]


def test_split_is_even():
  nums = sample.split(100, [str(i) for i in range(24)], 3)
  assert sum(nums.values()) == 100
  assert set(nums.values()) == {4, 5}
