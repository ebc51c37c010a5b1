"""Incremental decoding of tokens to text, for streaming of generated text.

A token may end inside a character, and its text may depend on the previous
token, for example in a leading space. Returned pieces are final: their
concatenation is the text of all tokens.
"""

import codecs
from collections.abc import Container
import re
from typing import Protocol

import tokenizers

_REPLACEMENT = "\ufffd"
# Byte tokens, by which some tokenizers represent rare characters.
_BYTE_TOKEN = re.compile("<0x[0-9a-fA-F]{2}>")


class Stream(Protocol):
  """Incremental decoder of tokens."""

  def push(self, token: int) -> str:
    """Adds a token; returns the text that is now complete, possibly ""."""
    ...

  def flush(self) -> str:
    """Returns the rest of the text; called after the last token."""
    ...


class ByteStream:
  """`Stream` of byte tokens.

  Example:
    >>> stream = ByteStream()
    >>> [stream.push(byte) for byte in "né".encode()], stream.flush()
    (['n', '', 'é'], '')
  """

  def __init__(self) -> None:
    self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

  def push(self, token: int) -> str:
    return self._decoder.decode(bytes([token])) if token < 256 else ""

  def flush(self) -> str:
    return self._decoder.decode(b"", final=True)


class TokenStream:
  """`Stream` of a tokenizer of the library `tokenizers`.

  The library decodes lists of tokens. Each list begins with the last token that
  has been decoded, since the first token of a list may be decoded differently.

  The library's own stream fails for byte tokens: it decodes consecutive ones
  as UTF-8, but to one U+FFFD per byte if they are not valid as a whole. So byte
  tokens are held back until another token follows.
  """

  def __init__(
    self, library: tokenizers.Tokenizer, special: Container[int]
  ) -> None:
    """Creates a stream without tokens.

    Args:
      library: The tokenizer.
      special: The special tokens, which have no text.
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
    return (
      ""
      if _BYTE_TOKEN.fullmatch(name)
      else self._decode_held_tokens(last=False)
    )

  def flush(self) -> str:
    return self._decode_held_tokens(last=True)

  def _decode_held_tokens(self, last: bool) -> str:
    """Returns the held tokens' text; "" if a character may be incomplete."""
    # The new text is the difference of two decodings with a common start.
    known = self._library.decode(self._before)
    text = self._library.decode([*self._before, *self._held])
    if not last and text.endswith(_REPLACEMENT):
      return ""
    self._before, self._held = self._held[-1:] or self._before, []
    return text[len(known) :]
