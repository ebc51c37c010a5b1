"""Stored results of a long computation, which resumes after a kill."""

import json
import math

import pytest

from parallel.base.kept import ResultCache


def test_only_missing_results_are_computed(tmp_path):
  path, computed = tmp_path / "new" / "rows.jsonl", []

  def run(keys):
    kept = ResultCache(str(path))
    return [
      kept.get(["row", key], lambda key=key: computed.append(key) or {"n": key})
      for key in keys
    ]

  assert run([1, 2]) == [{"n": 1}, {"n": 2}]
  whole = path.read_text()
  path.write_text(whole[:-9])  # killed during a write
  assert run([1, 2, 3]) == [{"n": 1}, {"n": 2}, {"n": 3}]
  assert computed == [1, 2, 2, 3]
  path.write_text("\n".join(["5", '{"key": 1}', "[" * 10**5, path.read_text()]))
  assert run([3, 2, 1]) == [{"n": 3}, {"n": 2}, {"n": 1}]
  assert computed == [1, 2, 2, 3]


def test_new_results_have_the_form_of_stored_ones(tmp_path):
  kept = ResultCache(tmp_path / "rows.jsonl")
  result = {"pair": (1, 2), "none": math.nan, 3: "three"}
  expected = {"pair": [1, 2], "none": None, "3": "three"}
  assert kept.get("a", lambda: result) == expected
  assert ResultCache(tmp_path / "rows.jsonl").get("a", lambda: None) == expected


def test_result_without_a_file_is_computed_once():
  kept = ResultCache("")
  assert [kept.get("a", lambda n=n: n) for n in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("content", [
  b'{"a": 1}\n', b"[1]\n", b"no JSON\n", b"a", b"\xff\n", b"[" * 10**5 + b"\n",
])
def test_file_of_something_else_is_refused_and_kept(tmp_path, content):
  path = tmp_path / "other.json"
  path.write_bytes(content)
  with pytest.raises(ValueError, match=(
    f"^results='{path}' has no results of an earlier run; name another file"
  )):
    ResultCache(path, "results")
  with pytest.raises(ValueError, match=f"^'{path}' has no results of"):
    ResultCache(path)
  assert path.read_bytes() == content


def test_line_is_json_with_a_key_and_a_result(tmp_path):
  ResultCache(tmp_path / "rows").get({"b": 1, "a": 2}, lambda: 7)
  line = json.loads((tmp_path / "rows").read_text())
  assert (len(line["key"]), line["result"]) == (32, 7)
  # The order of the inputs' keys does not matter.
  assert ResultCache(tmp_path / "rows").get({"a": 2, "b": 1}, lambda: 8) == 7
