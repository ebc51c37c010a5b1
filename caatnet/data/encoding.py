"""Encoding of documents by a tokenizer, with the bytes of each token.

Documents are encoded one by one and joined by the tokenizer's `separator`, if
it has one.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import sys
import time

import numpy as np

from caatnet.data import sources
from caatnet.data.tokenizers import LibraryTokenizer

_BATCH_BYTES = 1 << 20  # limits memory: the library takes 100 bytes per token
_SECONDS_PER_LINE = 10


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedCorpus:
  """Corpus of tokens with the bytes of its validation text.

  Attributes:
    corpus: The tokens.
    text: The validation documents joined by byte 0, uint8 ``[num_bytes]``.
    sizes: Bytes of ``text`` per validation token, int32
      ``[num_validation_tokens]``. A character that is split over several tokens
      counts in the first of them. A token between documents counts as one byte,
      the byte 0 in ``text``. Text that a normalizer removes counts in the next
      token.
  """

  corpus: sources.Corpus
  text: np.ndarray
  sizes: np.ndarray


def encode_corpus(
  documents: sources.Documents, tokenizer: LibraryTokenizer
) -> EncodedCorpus:
  """Encodes documents; prints the progress every ten seconds.

  Args:
    documents: The documents.
    tokenizer: The tokenizer.

  Raises:
    ValueError: If a document is not UTF-8, or the tokenizer cannot encode it.
  """
  # The smallest dtype that holds all tokens: a corpus is kept in memory.
  dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
  progress = _Progress(documents)
  between = [] if tokenizer.separator is None else [tokenizer.separator]

  def join(parts: list[np.ndarray], separator: list[int]) -> np.ndarray:
    """Joins the arrays of one or more documents."""
    joint = np.array(separator, parts[0].dtype)
    return np.concatenate([x for part in parts for x in (joint, part)][1:])

  train = [
    np.array(found.ids, dtype)
    for batch in _batches(documents.train)
    for found in tokenizer.encode_documents(progress.texts(batch), False)
  ]
  validation, sizes = [], []
  for batch in _batches(documents.validation):
    texts = progress.texts(batch)
    for text, found in zip(
      texts, tokenizer.encode_documents(texts, True), strict=True
    ):
      # Sizes need the characters of each token, which only validation computes.
      validation.append(np.array(found.ids, dtype))
      sizes.append(
        _count_token_bytes(text, [stop for _, stop in found.offsets])
      )
  return EncodedCorpus(
    corpus=sources.Corpus(
      name=documents.name,
      sha256=documents.sha256,
      train=join(train, between),
      validation=join(validation, between),
      unit="tokens",
    ),
    text=sources.join_documents(documents).validation,
    sizes=join(sizes, [1] * len(between)),
  )


def _count_token_bytes(text: str, stops: Sequence[int]) -> np.ndarray:
  """Returns the number of bytes of each token of a document, int32 ``[N]``.

  Args:
    text: The document.
    stops: For each token, the index of the character after its last one.

  Example:
    >>> # é has two bytes in UTF-8
    >>> _count_token_bytes("né!", [1, 2, 3]).tolist()
    [1, 2, 1]
  """
  code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
  # A character has one byte in UTF-8, plus one per bound that it reaches.
  longer = sum((code_points >= bound for bound in (0x80, 0x800, 0x10000)), 1)
  ends = np.concatenate([[0], np.cumsum(longer)])  # byte offset by character
  # Tokens without characters have arbitrary stops, hence the running maximum.
  reached = np.maximum.accumulate(ends[np.array(stops, np.int64)])
  if len(reached):
    reached[-1] = ends[-1]  # the last token includes text that follows it
  return np.diff(reached, prepend=0).astype(np.int32)


def _batches(documents: Sequence[bytes]) -> Iterator[list[bytes]]:
  """Yields documents in batches of limited size."""
  batch, size = [], 0
  for document in documents:
    batch.append(document)
    size += len(document)
    if size >= _BATCH_BYTES:
      yield batch
      batch, size = [], 0
  if batch:
    yield batch


class _Progress:
  """Decoder of documents that prints its progress."""

  def __init__(self, documents: sources.Documents) -> None:
    self._name = documents.name
    self._total = sum(map(len, (*documents.train, *documents.validation)))
    self._done = 0
    self._last_line = time.monotonic()

  def texts(self, documents: Sequence[bytes]) -> list[str]:
    """Decodes documents; prints the progress if this is due again."""
    if time.monotonic() - self._last_line > _SECONDS_PER_LINE:
      self._last_line = time.monotonic()
      print(
        f"encoding  {self._name}: {self._done / 1e6:.1f} of "
        f"{self._total / 1e6:.1f} MB",
        file=sys.stderr,
        flush=True,
      )
    self._done += sum(map(len, documents))
    try:
      return [document.decode() for document in documents]
    except UnicodeDecodeError as error:
      raise ValueError(
        f"config.data.path: a document of {self._name} is not UTF-8: {error}"
      ) from error
