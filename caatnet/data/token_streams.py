"""Text of tokens that come one after the other, as when a model writes.

A token may end inside a character, and its text may depend on the token before,
as a leading space does. What is given out is never taken back: all pieces
together are the text of all tokens together.
"""

import codecs
from collections.abc import Container
import re
from typing import Protocol

import tokenizers

_REPLACEMENT = "\ufffd"
# A token that is a byte, of a model that spells rare characters with these.
_BYTE = re.compile("<0x[0-9a-fA-F]{2}>")


class Stream(Protocol):
  """Decodes one token after the other."""

  def push(self, token: int) -> str:
    """Takes a token; returns the text that is now complete, perhaps ""."""
    ...

  def flush(self) -> str:
    """Returns the rest of the text, when no token follows."""
    ...


class ByteStream:
  """A stream of bytes."""

  def __init__(self) -> None:
    self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

  def push(self, token: int) -> str:
    return self._decoder.decode(bytes([token])) if token < 256 else ""

  def flush(self) -> str:
    return self._decoder.decode(b"", final=True)


class TokenStream:
  """A stream of a tokenizer of the library.

  The library decodes lists only. A list begins with the last token whose text
  is out, since the first token of a text may be decoded in another way.

  The library's own stream fails for tokens that are bytes: a run of them is
  text if all of it is UTF-8, and else one U+FFFD for each. So a run is held
  back until another token ends it.
  """

  def __init__(
    self, library: tokenizers.Tokenizer, special: Container[int]
  ) -> None:
    """Starts with no token.

    Args:
      library: The tokenizer.
      special: The tokens that have no text.
    """
    self._library = library
    self._special = special
    self._before: list[int] = []
    self._held: list[int] = []

  def push(self, token: int) -> str:
    name = self._library.id_to_token(token)
    if name is None or token in self._special:  # neither has text
      return ""
    self._held.append(token)
    return "" if _BYTE.fullmatch(name) else self._take(last=False)

  def flush(self) -> str:
    return self._take(last=True)

  def _take(self, last: bool) -> str:
    """Decodes what is held, unless a character may be incomplete."""
    known = self._library.decode(self._before)
    text = self._library.decode([*self._before, *self._held])
    if not last and text.endswith(_REPLACEMENT):
      return ""
    self._before, self._held = self._held[-1:] or self._before, []
    return text[len(known) :]
