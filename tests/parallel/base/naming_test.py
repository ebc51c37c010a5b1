"""Errors that name the config key."""

import pytest

from parallel.base import naming as checks


def renamed(message, *arguments):
  with pytest.raises(ValueError) as error, checks.prefix_error_keys(*arguments):
    raise ValueError(message)
  return str(error.value), error.value.__cause__


@pytest.mark.parametrize(("message", "expected"), [
  ("pieces=3 must be 1", "config.outer.pieces=3 must be 1"),
  ("keep=1 with pieces=3", "config.outer.keep=1 with config.outer.pieces=3"),
  # Other words, dotted names and names without a value are kept.
  ("all_pieces=3 and pieces2=3", "all_pieces=3 and pieces2=3"),
  ("config.sync.keep=3", "config.sync.keep=3"), ("no pieces", "no pieces"),
  ("a.b=1 ab=2", "config.outer.a.b=1 ab=2"), ("axb=1", "axb=1"),
  ("(keep=0)", "(config.outer.keep=0)"),
])
def test_keys_in_messages_have_their_section(message, expected):
  text, cause = renamed(message, "config.outer", ("pieces", "keep", "a.b"))
  assert text == expected
  assert str(cause) == message


def test_flags_have_no_joint():
  assert renamed("mesh=x", "--", ["mesh"], "")[0] == "--mesh=x"


def test_error_of_a_section_without_keys_is_unchanged():
  assert renamed("pieces=3", "config.outer", ()) == ("pieces=3", None)
  with (
    pytest.raises(KeyError, match="pieces=3"),
    checks.prefix_error_keys("config.outer", ("pieces",)),
  ):
    raise KeyError("pieces=3")
