"""Check of wording: it reads all prose of a file, and only prose."""

import json
import pathlib
import textwrap

import pytest

from docs import prose

_CODE = '''
"""Which is told."""  # beside it

beside = "beside a text of the code"


def function(x):
  """Returns x.

  Args:
    x: Of the caller.
    y (int): A number.

  Raises:
    ValueError: Nobody gave x.
  """
  if x:
    raise ValueError(f"{x=} needs somebody")
  return field(1, "How often it is done.")
'''
_MARKDOWN = """
# Beside

    beside in code

```
beside in code
```

In place of a word.
"""


def found(name, text, check=None):
  path = pathlib.Path(name)
  lines = prose._READERS[path.suffix](textwrap.dedent(text))
  hints = [(check or prose.ProseChecker()).hint(path, line) for line in lines]
  return sorted((h.line.number, h.found) for h in hints if h)


def test_all_prose_of_python_is_read_and_no_code():
  assert found("a.py", _CODE) == [
    (2, "beside"), (2, "is told"), (11, "Of"), (15, "Nobody"), (18, "somebody"),
    (19, "How often"),
  ]


def test_code_in_markdown_is_not_read():
  assert found("a.md", _MARKDOWN) == [(2, "Beside"), (10, "In place of")]


def test_markdown_of_notebooks_is_read():
  cells = [
    {"cell_type": "code", "source": ["# beside"]},
    {"cell_type": "markdown", "source": ["Alongside.\n", "Beside."]},
  ]
  text = json.dumps({"cells": cells})
  assert found("a.ipynb", text) == [(2, "Beside")]


def test_exception_holds_for_its_file_and_text(tmp_path):
  data = tmp_path / "prose.toml"
  data.write_text(
    'most_per_1000 = 1\nopeners = ["Of"]\n[wording]\n"beside" = "alongside"\n'
    '[[exception]]\npath = "a/*"\ntext = "beside the point"\nreason = "idiom"\n'
  )
  check = prose.ProseChecker(data)
  text = "beside the point\n\nbeside it\n"
  assert found("a/b.md", text, check) == [(3, "beside")]
  assert found("b/b.md", text, check) == [(1, "beside"), (3, "beside")]


@pytest.mark.parametrize(
  "sentence", [
    "The scheduler preempts the request with the lowest priority.",
    "Returns the peak number of live activations per stage.",
    "A message that arrives after the deadline is dropped.",
  ],
)
def test_plain_sentences_have_no_hint(sentence):
  assert found("a.py", f'"""{sentence}"""') == []
