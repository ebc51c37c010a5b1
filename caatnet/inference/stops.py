"""Stop conditions of a sequence, and the text that may be shown before its end.

Tokens arrive one at a time, and text is streamed. A stop string may span
several tokens, so text that could be its beginning is held back until more text
has arrived. The end of a sequence does not depend on how its text is split into
tokens.
"""

from collections.abc import Iterable
import dataclasses
from typing import Literal

from caatnet.data.token_streams import Stream
from parallel.base.checks import at_least

# Reason of a sequence's end: a token of `Stops.ids` was drawn, a string of
# `Stops.strings` was completed, `Stops.max_tokens` were drawn, the context is
# full, or the user has interrupted.
Reason = Literal[
  "stop_id", "stop_string", "max_tokens", "context", "interrupted"
]


@dataclasses.dataclass(frozen=True)
class Stops:
  """Stop conditions of a sequence.

  Attributes:
    max_tokens: Maximum number of drawn tokens, at least 1.
    ids: Tokens that end a sequence; they have no text.
    strings: Strings that end a sequence as soon as one of them is complete. The
      text ends where the string begins; if several are completed by the same
      character, where the longest begins.
  """

  max_tokens: int
  ids: frozenset[int] = frozenset()
  strings: tuple[str, ...] = ()

  def __post_init__(self) -> None:
    at_least("max_tokens", self.max_tokens)
    if "" in self.strings:
      raise ValueError(
        "stop='' must not be empty, since it would end every text before it "
        "begins"
      )


class StopStrings:
  r"""Incremental search for stop strings in text that arrives in pieces.

  Attributes:
    found: String that ended the text; None before the end.

  Example:
    >>> stops = StopStrings(["\n\n"])
    >>> [stops.push(piece) for piece in ("one\n", "two\n", "\nthree")]
    ['one', '\ntwo', '']
    >>> stops.found
    '\n\n'
  """

  def __init__(self, strings: Iterable[str]) -> None:
    self.found: str | None = None
    self._strings = tuple(strings)
    self._held = ""

  def push(self, piece: str) -> str:
    """Takes more text; returns the text that can be shown."""
    text = self._held + piece
    ends = [
      (start + len(string), start, string)
      for string in self._strings
      if (start := text.find(string)) >= 0
    ]
    if ends:
      # The stop string that is complete first, so that the result does not
      # depend on how the text is split into calls of `push`.
      _, start, self.found = min(ends)
      self._held = ""
      return text[:start]
    held = self._partial_match_length(text)
    self._held = text[len(text) - held :]
    return text[: len(text) - held]

  def flush(self) -> str:
    """Returns the text held back, when no more text follows."""
    held, self._held = self._held, ""
    return held

  def _partial_match_length(self, text: str) -> int:
    """Returns the length of the longest suffix that may begin a stop string."""
    longest = max((len(s) for s in self._strings), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
      end = text[len(text) - length :]
      if any(string.startswith(end) for string in self._strings):
        return length
    return 0


class EndDetector:
  """Detector of the end of one sequence, which also returns its text.

  Attributes:
    reason: Reason of the end; None before the end.
    num_tokens: Number of drawn tokens.
  """

  def __init__(
    self, stops: Stops, stream: Stream, room: int
  ) -> None:
    """Starts a sequence.

    Args:
      stops: Stop conditions.
      stream: Decodes the tokens incrementally.
      room: Number of tokens that fit into the context after the prompt.
    """
    self.reason: Reason | None = None
    self.num_tokens = 0
    self._stops, self._stream, self._room = stops, stream, room
    self._strings = StopStrings(stops.strings)

  @property
  def max_tokens(self) -> int:
    """Maximum number of drawn tokens."""
    return min(self._stops.max_tokens, self._room)

  def push(self, token: int) -> str:
    """Takes the next token; returns the text that can be shown.

    If the token ends the sequence, all remaining text is returned, and
    ``reason`` is set.
    """
    self.num_tokens += 1
    if token in self._stops.ids:
      return self._end("stop_id")
    text = self._strings.push(self._stream.push(token))
    if self._strings.found is not None:
      self.reason = "stop_string"
      return text
    if self.num_tokens == self._stops.max_tokens:
      return text + self._end("max_tokens")
    if self.num_tokens == self._room:
      return text + self._end("context")
    return text

  def interrupt(self) -> str:
    """Ends the sequence early; returns the remaining text."""
    return self._end("interrupted")

  def _end(self, reason: Reason) -> str:
    """Sets the reason; returns the remaining text up to a stop string."""
    self.reason = reason
    text = self._strings.push(self._stream.flush())
    if self._strings.found is not None:
      self.reason = "stop_string"
      return text
    return text + self._strings.flush()
