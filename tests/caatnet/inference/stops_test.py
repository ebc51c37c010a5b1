"""Properties of stops: the end of a text does not depend on its tokens."""

from hypothesis import given
from hypothesis import strategies as st
import pytest

from caatnet.data.token_streams import ByteStream
from caatnet.inference.stops import EndDetector, Stops, StopStrings


class Pieces:
  """Tokenizer stream whose tokens are pieces of text."""

  def __init__(self, pieces):
    self._pieces = pieces

  def push(self, token):
    return self._pieces[token]

  def flush(self):
    return ""


def of_whole_text(text, strings):
  """Returns the text up to the first complete stop string, and that string."""
  for end in range(len(text) + 1):
    found = [s for s in strings if text[:end].endswith(s)]
    if found:
      longest = max(found, key=len)
      return text[: end - len(longest)], longest
  return text, None


# Few letters, so that strings overlap with each other and with themselves.
LETTERS = st.text("ab", min_size=2, max_size=4)
CUTS = st.lists(st.text("abc", max_size=5), max_size=8)


@given(CUTS, st.lists(LETTERS, max_size=3))
def test_end_of_a_text_does_not_depend_on_its_tokens(pieces, strings):
  text, found = of_whole_text("".join(pieces), strings)
  stops = StopStrings(strings)
  shown = ""
  for i, piece in enumerate(pieces):
    shown += stops.push(piece)
    assert not any(s in shown for s in strings)
    if stops.found is not None:
      break
    # The held text is a prefix of a stop string, and not longer than needed.
    all_text = "".join(pieces[: i + 1])
    held = all_text[len(shown):]
    assert all_text == shown + held
    assert not held or any(s.startswith(held) for s in strings)
    assert not any(
      s.startswith(all_text[start:])
      for s in strings for start in range(len(shown))
    )
  else:
    shown += stops.flush()
  assert (shown, stops.found) == (text, found)


@given(
  st.text(min_size=1, max_size=8),
  st.lists(st.text(min_size=1, max_size=2), max_size=2),
)
def test_multibyte_characters_are_given_out_whole(text, strings):
  data = text.encode()
  ending = EndDetector(
    Stops(len(data), strings=tuple(strings)), ByteStream(), 99
  )
  shown = []
  for byte in data:
    shown.append(ending.push(byte))
    if ending.reason:
      break
  expected, found = of_whole_text(text, strings)
  assert "".join(shown) == expected
  assert ending.reason == ("max_tokens" if found is None else "stop_string")


@pytest.mark.parametrize(
  ("stops", "room", "tokens", "text", "reason"),
  [
    (Stops(3), 9, "abcdef", "abc", "max_tokens"),
    (Stops(3), 3, "abcdef", "abc", "max_tokens"),
    (Stops(9), 3, "abcdef", "abc", "context"),
    (Stops(9, frozenset({100})), 9, "abcdef", "abc", "stop_id"),
    (Stops(4, frozenset({100})), 4, "abcdef", "abc", "stop_id"),
    (Stops(4, strings=("cd",)), 4, "abcdef", "ab", "stop_string"),
    # Held back as the start of a stop string that can no longer follow.
    (Stops(3, strings=("cd",)), 9, "abcdef", "abc", "max_tokens"),
    (Stops(9, frozenset({100}), ("cd",)), 9, "abcdef", "abc", "stop_id"),
    # Half a character is replaced, which may complete a stop string.
    (Stops(2), 9, "a\N{EURO SIGN}", "a\ufffd", "max_tokens"),
    (Stops(2, strings=("\ufffd",)), 9, "a\N{EURO SIGN}", "a", "stop_string"),
  ],
)
def test_reason_and_text_at_the_end_of_a_sequence(
  stops, room, tokens, text, reason
):
  ending = EndDetector(stops, ByteStream(), room)
  shown = ""
  for byte in tokens.encode():
    assert ending.reason is None
    shown += ending.push(byte)
    if ending.reason:
      break
  assert (shown, ending.reason) == (text, reason)


def test_text_is_given_out_as_soon_as_no_stop_string_fits():
  pieces = ["x", "a", "a", "ab", "y"]
  ending = EndDetector(Stops(9, strings=("aab!",)), Pieces(pieces), 9)
  assert [ending.push(i) for i in range(5)] == ["x", "", "", "a", "aaby"]
  assert ending.interrupt() == ""
  assert ending.reason == "interrupted"


@pytest.mark.parametrize(
  ("arguments", "message"),
  [({"max_tokens": 0}, "max_tokens=0"),
   ({"max_tokens": 1, "strings": ("a", "")}, "stop=''")],
)
def test_invalid_stops_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    Stops(**arguments)
