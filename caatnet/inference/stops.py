"""When a sequence ends, and which of its text may be shown before it does.

Tokens come one at a time, and text is shown as it comes. A stop string may lie
across tokens, so text that could be its beginning is held back until more text
says what it is. Where a sequence ends does not depend on how its text is cut
into tokens.
"""

from collections.abc import Iterable
import dataclasses
from typing import Literal

from caatnet.data.token_streams import Stream

# Why a sequence has ended: a token of `Stops.ids` was drawn, a string of
# `Stops.strings` was completed, `Stops.max_tokens` were drawn, the context is
# full, or the user has interrupted.
Reason = Literal[
  "stop_id", "stop_string", "max_tokens", "context", "interrupted"
]


@dataclasses.dataclass(frozen=True)
class Stops:
  """What ends a sequence.

  Attributes:
    max_tokens: How many tokens are drawn at most, at least 1.
    ids: Tokens that end a sequence; they have no text.
    strings: Strings that end a sequence as soon as one of them is complete.
      The text ends where the string begins; where several are complete at
      once, at the longest.
  """

  max_tokens: int
  ids: frozenset[int] = frozenset()
  strings: tuple[str, ...] = ()

  def __post_init__(self) -> None:
    if self.max_tokens < 1:
      raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
    if "" in self.strings:
      raise ValueError("stop='' would end every text before it begins")


class StopStrings:
  """Looks for stop strings in text that comes in pieces.

  Attributes:
    found: The string that ended the text; None while it goes on.
  """

  def __init__(self, strings: Iterable[str]) -> None:
    self.found: str | None = None
    self._strings = tuple(strings)
    self._held = ""

  def push(self, piece: str) -> str:
    """Takes more text and returns what can be shown of all that was held."""
    text = self._held + piece
    ends = [
      (start + len(string), start, string)
      for string in self._strings
      if (start := text.find(string)) >= 0
    ]
    if ends:
      # The first to be complete: a longer piece must not find another one.
      _, start, self.found = min(ends)
      self._held = ""
      return text[:start]
    held = self._possible_beginning(text)
    self._held = text[len(text) - held :]
    return text[: len(text) - held]

  def flush(self) -> str:
    """Returns what is held, when no more text comes."""
    held, self._held = self._held, ""
    return held

  def _possible_beginning(self, text: str) -> int:
    """Returns how many characters at the end may begin a stop string."""
    longest = max((len(s) for s in self._strings), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
      end = text[len(text) - length :]
      if any(string.startswith(end) for string in self._strings):
        return length
    return 0


class Ending:
  """Follows one sequence: its text as it comes, and why it ends.

  Attributes:
    reason: Why the sequence has ended; None while it goes on.
    num_tokens: How many tokens were drawn.
  """

  def __init__(
    self, stops: Stops, stream: Stream, room: int
  ) -> None:
    """Starts a sequence.

    Args:
      stops: What ends it.
      stream: Makes text of its tokens.
      room: How many tokens fit into the context after the prompt.
    """
    self.reason: Reason | None = None
    self.num_tokens = 0
    self._stops, self._stream, self._room = stops, stream, room
    self._strings = StopStrings(stops.strings)

  @property
  def most_tokens(self) -> int:
    """How many tokens are drawn at most."""
    return min(self._stops.max_tokens, self._room)

  def push(self, token: int) -> str:
    """Takes the next token and returns the text that can be shown.

    If the token ends the sequence, this is all the text that is left, and
    ``reason`` says why.
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
    """Ends the sequence where it is, and returns the text that is left."""
    return self._end("interrupted")

  def _end(self, reason: Reason) -> str:
    self.reason = reason
    text = self._strings.push(self._stream.flush())
    if self._strings.found is not None:
      self.reason = "stop_string"
      return text
    return text + self._strings.flush()
