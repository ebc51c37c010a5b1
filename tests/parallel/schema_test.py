"""Schemas of files: what is accepted, and errors of one line."""

import gzip
import json

import pytest

from parallel import schema
from parallel.schema import Count, NotNegative, OpenSchema, Positive, Schema


class Part(Schema):
  size: Count
  delay: NotNegative = 0.0


class Foreign(OpenSchema):
  rate: Positive


class Whole(Schema):
  name: str
  parts: list[Part]
  link: schema.either(text=str, other=Foreign)
  rows: schema.either(number=float, other=list[list[float | None]]) = 1.0


GOOD = {"name": "a", "parts": [{"size": 1}], "link": "b"}


@pytest.mark.parametrize("changes", [
  {}, {"parts": []}, {"parts": [{"size": 2, "delay": 3}]},
  {"link": {"rate": 1, "more": [True]}}, {"rows": 2}, {"rows": [[1, None]]},
], ids=str)
def test_values_of_the_right_type_are_accepted(changes):
  """An integer is a number; keys of other programs are ignored."""
  found = schema.parse(Whole, json.dumps(GOOD | changes))
  assert found == schema.check(Whole, GOOD | changes)
  assert found.name == "a"
  with pytest.raises(ValueError, match="frozen"):
    found.name = "b"


@pytest.mark.parametrize(("changes", "message"), [
  ({"name": 1}, "name=1 must be a valid string"),
  ({"parts": [{"size": 1.0}]}, "parts[0].size=1.0 must be a valid integer"),
  ({"parts": [{"size": True}]}, "parts[0].size=true must be a valid integer"),
  ({"parts": [{"size": 0}]}, "parts[0].size=0 must be greater than or equal"),
  ({"parts": [{}]}, "parts[0].size is missing; keys are size, delay"),
  ({"parts": [{"size": 1, "deley": 1}]},
   "parts[0]: key 'deley' must be one of size, delay; did you mean delay?"),
  ({"parts": [{"size": 1, "delay": "1"}]}, 'parts[0].delay="1" must be a'),
  ({"link": {"rate": 0}}, "link.rate=0 must be greater than 0"),
  ({"link": {}}, "link.rate is missing; keys are rate"),
  ({"link": 3}, "link=3 must be"),
  ({"rows": [[float("nan")]]}, "rows[0][0]=NaN must be a finite number"),
  ({"rows": float("inf")}, "rows=Infinity must be a finite number"),
  ({"rows": [[1, "x" * 100]]}, 'rows[0][1]="' + 56 * "x" + "... must be"),
  ({"nam": "b"}, "key 'nam' must be one of name, parts, link, rows; did you"),
  ({"name": None, "link": 3}, "(1 more errors)"),
])
def test_error_names_place_value_and_what_it_must_be(changes, message):
  for check in (
    lambda: schema.parse(Whole, json.dumps(GOOD | changes)),
    lambda: schema.check(Whole, GOOD | changes),
  ):
    with pytest.raises(ValueError) as error:
      check()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_file_may_be_gzipped_but_not_large(tmp_path):
  plain, packed = tmp_path / "a.json", tmp_path / "a.json.gz"
  plain.write_text(json.dumps(GOOD))
  packed.write_bytes(gzip.compress(plain.read_bytes()))
  size = plain.stat().st_size
  for path in (plain, packed):
    assert schema.read(Whole, path, max(size, path.stat().st_size)).name == "a"
  with pytest.raises(ValueError, match=f"a.json: has more than {size - 1} by"):
    schema.read(Whole, plain, size - 1)
  packed.write_bytes(gzip.compress(plain.read_bytes() + b" " * 10**6))
  with pytest.raises(ValueError, match=r"a.json.gz: has more than 10,000 byte"):
    schema.read(Whole, packed, 10_000)
  packed.write_bytes(packed.read_bytes()[:-20])
  for path in (packed, tmp_path / "b.json"):
    with pytest.raises((ValueError, OSError), match=path.name):
      schema.read(Whole, path)
