"""Experiment log: form, length, links and index of its entries."""

import re

import pytest

from docs import log
from docs.points import ROOT
from tests.claims_test import faults

PATHS = log.paths()
ENTRIES = list(log.entries())
README = (log.FOLDER / "README.md").read_text()
TEXT = """# Ring

- Question: How fast is it,
  in seconds?
- Date: 2026-11-25
- Machine: standard
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
def test_an_entry_is_short_and_states_its_verdict(entry):
  assert entry.num_words <= log.MAX_WORDS
  assert entry.head["Question"].endswith("?")
  assert entry.verdict.endswith((".", ":"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_commands_paths_and_links_of_an_entry_are_valid(path):
  text = path.read_text()
  for link in re.findall(r"\]\((?!http)([^)#]+)", text):
    assert (path.parent / link).exists(), link
  # The parser of `faults` has no flags of elastic training.
  text = re.sub(r"\]\([^)]*\)|--elastic=\S+", "", text)
  assert faults(text) == []


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
  assert marked == set(log.with_tables())


def test_words_of_tables_and_code_are_not_counted():
  entry = log.parse("2026-11-25-ring", TEXT)
  assert entry.title == "Ring"
  assert entry.head["Question"] == "How fast is it, in seconds?"
  assert entry.verdict == "It takes 1.5 s."
  without = re.sub(r"^(\||```|make).*\n", "", TEXT, flags=re.M)
  assert entry.num_words == len(without.split())


@pytest.mark.parametrize(
  ("name", "old", "new", "message"),
  [
    ("2026-11-25-ring", "- Machine: standard\n", "", "head lacks Machine"),
    ("2026-11-25-ring", "- Date: 2026-11-25\n", "", "head lacks Date"),
    ("2026-11-25-ring", "```sh\nmake test\n```\n", "", "head lacks Command"),
    ("2026-11-25-ring", "## Verdict", "## Reading", "got .*'Reading'"),
    ("2026-11-25-ring", "# Ring\n", "", "expected a title"),
    ("2026-11-24-ring", "", "", "expected 2026-11-25-subject"),
    ("2026-11-25-Ring", "", "", "expected 2026-11-25-subject"),
  ],
)
def test_another_form_is_an_error_that_names_the_entry(name, old, new, message):
  with pytest.raises(ValueError, match=f"{name}: .*{message}"):
    log.parse(name, TEXT.replace(old, new, 1))
