"""Experiment log: form, length, links and index of its entries."""

import decimal
import re

from hypothesis import given
from hypothesis import strategies as st
import pytest

from docs import log
from docs.points import ROOT
from tests import claims_test, history

PATHS = log.paths()
ENTRIES = list(log.entries())
README = (log.FOLDER / "README.md").read_text()
TEXT = """# Ring

- Question: How fast is it,
  in seconds?
- Date: 2026-11-25
- Machine: standard
- Commit: 2c7e4b1e
- Command:

```sh
make test
```

## Result

12 s.

| a | b |
|---|---|
| 1 | 2 |

## Verdict

It takes 1.5 s. Not more.
"""


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_asks_a_question_and_states_its_verdict(entry):
  assert entry.head["Question"].endswith("?")
  assert entry.verdict.endswith((".", ":"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_commands_paths_and_links_of_an_entry_are_valid(path):
  text = path.read_text()
  for link in re.findall(r"\]\((?!http)([^)#]+)", text):
    assert (path.parent / link).exists(), link
  text = re.sub(r"\]\([^)]*\)", "", text)
  assert history.faults(text, log.parse(path.stem, text).commit) == []


@pytest.mark.parametrize("text", [
  "`python -m launch.nowhere --config=configs/caatnet/tiny.py`",
  "`python -m launch.train --config=configs/nowhere.py:test`",
  "`python -m pytest tests/nowhere_test.py`", "`parallel/nowhere/`",
  "`nowhere.csv`",
])
def test_a_file_that_a_commit_does_not_have_is_named(text):
  (fault,) = history.faults(f"Text: {text}.", "d7bae595")
  assert "nowhere" in fault
  assert "not in d7bae595" in fault
  with pytest.raises(ValueError, match="no commit 0123abcd"):
    history.faults(text, "0123abcd")


def test_a_file_of_an_older_commit_needs_not_exist_now():
  gone = "`parallel/elastic/patience.py`"
  assert claims_test.faults(gone)
  assert not history.faults(gone, "2c7e4b1e")


def test_the_index_lists_every_entry_newest_first():
  rows = re.findall(r"^\| (\S+) \| \[.*?\]\((\S+)\.md\) ", README, re.M)
  assert [name for _, name in rows] == [path.stem for path in PATHS]
  dates = [date for date, _ in rows]
  assert dates == sorted(dates, reverse=True)
  assert {path.name for path in log.FOLDER.iterdir()} == {
    "README.md", *(f"{name}.md" for _, name in rows)
  }


def test_every_result_with_a_generated_table_is_among_the_documents():
  marked = {
    path.relative_to(ROOT).as_posix() for path in log.FOLDER.iterdir()
    if "<!-- table:" in path.read_text()
  }
  assert marked == set(log.documents_with_tables())


def test_verdict_is_the_first_sentence():
  entry = log.parse("2026-11-25-ring", TEXT)
  assert entry.title == "Ring"
  assert entry.head["Question"] == "How fast is it, in seconds?"
  assert entry.verdict == "It takes 1.5 s."


@pytest.mark.parametrize(
  ("figure", "is_recorded"),
  [
    ("12", True), ("1.5", True), ("1", True), ("2", True), ("1.50", False),
    ("12%", False), ("2026", False), ("25", False), ("+12", True),
    ("-12", False), ("1,200", False), ("5", False),
  ],
)
def test_a_figure_is_recorded_if_it_is_in_the_result_or_the_verdict(
  figure, is_recorded
):
  """1.5 rounds to 1 or 2; dates, code and parts of numbers do not count."""
  text = TEXT.replace("12 s.", "12 s (2026-11-25).")
  assert log.contains_figure(text, figure) == is_recorded


@given(st.integers(0, 10**7), st.integers(0, 4), st.sampled_from(["", "%"]))
def test_a_figure_is_found_with_as_many_decimals_or_fewer(digits, count, unit):
  value = decimal.Decimal(digits).scaleb(-count)
  entry = f"## Result\n\n12 {value:,.{count}f}{unit}"
  text = f"# Ring\n\n{entry} in a ring.\n"
  for decimals in range(count + 1):
    assert log.contains_figure(text, f"{value:,.{decimals}f}{unit}")
  assert not log.contains_figure(text, f"{value:,.{count + 1}f}{unit}")
  assert not log.contains_figure(text, f"{value + 20:,.{count}f}{unit}")


@pytest.mark.parametrize("figure", ["", "fast", "12 s", "1.5.2"])
def test_only_numbers_are_looked_up(figure):
  with pytest.raises(ValueError, match=f"expected a number, got '{figure}'"):
    log.contains_figure(TEXT, figure)


@pytest.mark.parametrize(
  ("name", "old", "new", "message"),
  [
    ("2026-11-25-ring", "- Machine: standard\n", "", "head of the entry must"),
    ("2026-11-25-ring", "- Date: 2026-11-25\n", "", "head of the entry must"),
    ("2026-11-25-ring", "- Commit: 2c7e4b1e\n", "", "head of the entry must"),
    ("2026-11-25-ring", "2c7e4b1e", "unknown", "Commit must have a hash, got"),
    ("2026-11-25-ring", "```sh\nmake test\n```\n", "", "head of the entry"),
    ("2026-11-25-ring", "## Verdict", "## Reading", "got .*'Reading'"),
    ("2026-11-25-ring", "# Ring\n", "", "expected a title"),
    ("2026-11-24-ring", "", "", "must be 2026-11-25-subject"),
    ("2026-11-25-Ring", "", "", "must be 2026-11-25-subject"),
  ],
)
def test_another_form_is_an_error_that_names_the_entry(name, old, new, message):
  with pytest.raises(ValueError, match=f"{name}: .*{message}"):
    log.parse(name, TEXT.replace(old, new, 1))
