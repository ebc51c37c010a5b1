"""Schemas of files: what is accepted, and errors of one line."""

import gzip
import json
import re

import pytest

from parallel.base import schema
from parallel.base.schema import (
  Count,
  Field,
  NotNegative,
  OpenSchema,
  Positive,
  Schema,
  parse_lines,
  parse_table,
)


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


def test_error_of_a_whole_file_names_its_content():
  with pytest.raises(ValueError, match=r"^the content=3 must "):
    schema.parse(Whole, "3")
  with pytest.raises(ValueError, match=r"^is not JSON: "):
    schema.parse(Whole, "{")


class Link(Schema):
  rate: schema.Rate
  delay: schema.Seconds = 0.0


def test_rates_and_times_have_limits():
  """Sums and products of accepted numbers are finite."""
  assert schema.parse(Link, '{"rate": 1e24, "delay": 1e12}').rate == 1e24
  for text, message in (
    ('{"rate": 1e25}', "rate=1e+25 must be less than or equal to"),
    ('{"rate": 0}', "rate=0 must be greater than 0"),
    ('{"rate": 1, "delay": 1e13}', "delay=10000000000000.0 must be less"),
    ('{"rate": 1, "delay": -1}', "delay=-1 must be greater than or equal"),
  ):
    with pytest.raises(ValueError, match=re.escape(message)):
      schema.parse(Link, text)


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


class Row(OpenSchema):
  layer: str
  num_tokens: Count = Field(alias="tokens")
  us: NotNegative


TABLE = "tokens,note,layer,us\n8,,mlp,2.5\n16,\"a,b\",mlp,3\n"


def test_fields_of_a_table_are_texts_of_values():
  rows = [(number, row.num_tokens, row.us) for number, row in
          parse_table(Row, TABLE)]
  assert rows == [(2, 8, 2.5), (3, 16, 3.0)]
  assert [*parse_table(Row, "layer,tokens,us")] == []


@pytest.mark.parametrize(("old", "new", "message"), [
  ("16,", "1.5,", 'line 3: tokens="1.5" must be a valid integer'),
  ("16,", "0,", 'line 3: tokens="0" must be greater than or equal to 1'),
  ("16,", "true,", 'line 3: tokens="true" must be a valid integer'),
  (",3", ",nan", 'line 3: us="nan" must be a finite number'),
  (",3", "", "line 3: must have 4 fields"),
  (",3", ",3,4", "line 3: must have 4 fields"),
  ("us", "ms", "line 1: column us is missing; columns are tokens, note, "),
  ("note", "us", "line 1: column us is listed 2 times"),
  ("tokens,note,layer,us", "", "line 1: is empty"),
  ("2.5", "2.5\x00", 'line 2: us="2.5'),
  ('"a,b"', '"a', "line 3: "),
  ('"a,b"', "a" * 200_000, "line 3: field larger than field limit"),
])
def test_invalid_row_of_a_table_is_named(old, new, message):
  assert old in TABLE
  with pytest.raises(ValueError, match=re.escape(message)) as error:
    [*parse_table(Row, TABLE.replace(old, new, 1))]
  assert "\n" not in str(error.value)


def test_invalid_line_of_json_is_named():
  good = json.dumps({"size": 2})
  (found,) = parse_lines(Part, good)
  assert found == (1, Part(size=2))
  with pytest.raises(ValueError, match="line 2: size is missing"):
    [*parse_lines(Part, good + "\n{}")]


def test_a_key_listed_twice_is_an_error():
  """Also within a key that the schema ignores."""
  text = '{"name": "a", "parts": [{"size": 1, "size": 1}], "link": "b"}'
  with pytest.raises(ValueError, match='key "size" is listed 2 times'):
    schema.parse(Whole, text)
  with pytest.raises(ValueError, match='key "b" is listed 2 times'):
    schema.parse(Foreign, '{"rate": 1, "more": {"b": 1, "b": 1}}')


def test_a_folder_is_no_file(tmp_path):
  with pytest.raises(ValueError, match="is not a regular file"):
    schema.read(Whole, tmp_path)
