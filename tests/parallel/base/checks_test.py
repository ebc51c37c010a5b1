"""Validation of numbers, names and option strings."""

import math

import pytest

from parallel.base import checks, lazy
from parallel.wire import CODECS, Wire

pytestmark = pytest.mark.quick

# Check, accepted values, refused values, end of the message.
_NUMBERS = [
  (checks.positive, (1, 0.5, 1e-300), (0, -1, math.inf, math.nan),
   "must be positive"),
  (checks.not_negative, (0, 0.0, 7), (-1, -1e-300, math.inf, math.nan),
   "must be at least 0"),
  (checks.fraction, (0, 0.5, 1), (-0.01, 1.01, 2, math.inf, math.nan),
   r"must lie in \[0, 1\]"),
  (checks.at_least, (1, 2, 3.0), (0, -1), "must be at least 1"),
  (checks.at_least, (1,), (1.5, math.inf, math.nan),
   "must be an integer, at least 1"),
  (lambda key, value: checks.at_least(key, value, 3), (3, 4), (2, 0),
   "must be at least 3"),
]


@pytest.mark.parametrize(("check", "accepted", "refused", "message"), _NUMBERS)
def test_number_is_accepted_or_refused_by_name(
  check, accepted, refused, message
):
  for value in accepted:
    assert check("key", value) is None
  for value in refused:
    with pytest.raises(ValueError, match=f"^key={value:g} {message}$"):
      check("key", value)


def test_number_is_shown_with_six_digits():
  with pytest.raises(ValueError, match=r"^key=1.23457 must lie in \[0, 1\]$"):
    checks.fraction("key", 1.234567)


def test_integer_beyond_float64_is_a_number():
  checks.at_least("key", 10**400)
  for check in (checks.positive, checks.not_negative, checks.at_least):
    with pytest.raises(ValueError, match=r"^key=-inf must be "):
      check("key", -(10**400))
  with pytest.raises(ValueError, match=r"^key=inf must lie in \[0, 1\]$"):
    checks.fraction("key", 10**400)


def test_unknown_name_is_refused_with_the_nearest_one():
  checks.known("link=", "ring", ["ring", "tree"])
  for name, names, message in (
    ("rnig", ["ring", "tree"], "one of ring, tree; did you mean ring?"),
    ("xyz", ["ring", "tree"], "one of ring, tree"),
    ("ring", [], "left out"),
    (None, ["", "tree"], "one of '', tree"),
  ):
    with pytest.raises(ValueError, match="must be") as error:
      checks.known("link=", name, iter(names))
    assert str(error.value) == f"link={name!r} must be {message}"


@pytest.mark.parametrize(("text", "name", "options"), [
  ("dgx:2x8", "dgx:2x8", {}),
  ("a,b", "a,b", {}),
  ("a,x=1,y_z=2.5", "a", {"x": 1, "y_z": 2.5}),
  ("a, x=(1,2), y=True", "a", {"x": (1, 2), "y": True}),
  ("a,x=None,y=b:c,z=", "a", {"x": None, "y": "b:c", "z": ""}),
  ("a,x=p=q", "a", {"x": "p=q"}),
  ("a,x={[]},y=1", "a", {"x": "{[]}", "y": 1}),
  (f"a,x={'-' * 9000}1", "a", {"x": f"{'-' * 9000}1"}),
])
def test_options_are_literals_or_strings(text, name, options):
  assert checks.parse_options(text) == (name, options)


def test_repeated_option_is_refused():
  with pytest.raises(ValueError, match="'a,x=1,x=2' sets the option x twice"):
    checks.parse_options("a,x=1,x=2")


def test_package_has_only_its_public_names():
  public, get, names = lazy.attach(
    "parallel", {"wire": ["Wire", "CODECS"], "axes": ["Axis"]}
  )
  assert public == names() == ["Axis", "CODECS", "Wire"]
  assert get("Wire") is Wire
  assert get("CODECS") is CODECS
  with pytest.raises(
    AttributeError, match="module 'parallel' has no attribute 'wire'"
  ):
    get("wire")


@pytest.mark.parametrize(("missing", "message"), [
  ("optax", r"made_up\.value needs optax: pip install 'caatnet\[training\]'"),
  ("another", "^No module named another$"),
])
def test_missing_package_of_the_extra_is_named(
  missing, message, tmp_path, monkeypatch
):
  (tmp_path / "made_up").mkdir()
  (tmp_path / "made_up/part.py").write_text(
    f"raise ModuleNotFoundError('No module named {missing}', name='{missing}')"
  )
  monkeypatch.syspath_prepend(tmp_path)
  _, get, _ = lazy.attach("made_up", {"part": ["value"]})
  with pytest.raises(ModuleNotFoundError, match=message) as found:
    get("value")
  assert found.value.name == missing


def test_default_wire_is_an_all_reduce_in_float32():
  wire = Wire()
  assert (wire.codec, wire.dtype, wire.route) == (
    "none", "float32", "all_gather"
  )
  assert wire.block_codec is None
  for name in CODECS[1:]:
    codec = Wire(name, 16, "all_to_all", stochastic=True).block_codec
    assert (codec.name, codec.block, codec.stochastic) == (name, 16, True)
    assert Wire(name).block_codec.block == 256
    assert not Wire(name).block_codec.stochastic
