"""Registry of papers: existing paths, unique claims and strategies."""

import collections

import pytest

from docs import papers
from docs.points import ROOT

PAPERS = papers.load()


@pytest.mark.parametrize("paper", PAPERS, ids=lambda p: p.key)
def test_paths_of_an_entry_exist(paper):
  assert [p for p in paper.paths if not (ROOT / p).exists()] == []


def test_claims_and_strategies_are_listed_once():
  numbers = collections.Counter(c.number for p in PAPERS for c in p.claims)
  names = collections.Counter(s.name for p in PAPERS for s in p.strategies)
  order = [s.order for p in PAPERS for s in p.strategies]
  assert [k for k, n in (numbers + names).items() if n > 1] == []
  assert sorted(order) == list(range(1, len(order) + 1))


def test_every_study_and_notebook_belongs_to_a_paper():
  """A new study is listed with the paper that it compares."""
  named = {path for paper in PAPERS for path in paper.paths}
  studies = {
    path.parent.relative_to(ROOT).as_posix()
    for path in (ROOT / "caatnet/studies").glob("*/study.py")
  }
  notebooks = {
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "colabs").glob("*.ipynb")
  }
  assert studies | notebooks <= named


def test_every_module_is_in_the_map_with_a_summary():
  rows = [r for r in papers.module_map().splitlines() if r.startswith("- ")]
  sources = [
    path for top in ("caatnet", "parallel", "launch", "configs")
    for path in (ROOT / top).rglob("*.py") if path.name != "__init__.py"
  ]
  assert len(rows) == len(sources)
  assert [row for row in rows if row.endswith(": ")] == []


@pytest.mark.parametrize(
  ("entry", "message"),
  [
    ('subject = "a"', "papers.a: .*reference"),
    ('subject = "a"\nreference = "b"\nfile = "c"', "papers.a: .*file"),
    ('subject = "a"\nreference = "b"\nclaims = {"1.1" = {claim = "c"}}',
     "papers.a: .*claims"),
  ],
)
def test_invalid_entry_is_named(tmp_path, entry, message):
  path = tmp_path / "papers.toml"
  path.write_text(f"[papers.a]\n{entry}\n")
  with pytest.raises(ValueError, match=message):
    papers.load(path)


def test_figure_of_no_strategy_is_refused():
  with pytest.raises(ValueError, match="must have rows for nothing"):
    papers.strategy_table({"nothing": ("", "")})
