"""Properties of encoded corpora: equal documents, and all of their bytes."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from caatnet.data import bpe, encoding, sources
from caatnet.data.tokenizers import LibraryTokenizer
from tests.caatnet.data.small_tokenizers import bpe_files, llama_files, subject

TRAIN = [b"the cat\n", b"a", "caf\u00e9 \u20ac \U0001f600 .".encode(),
         f"it says {bpe.END} here".encode(), b"  <s> ab </s>"] * 3
VALIDATION = ["the bat \u20ac\u20ac\n".encode(), b" ab.",
              "\U0001f600".encode(), b"bc"]


def encoded(name):
  documents = sources.Documents("x", "0" * 64, TRAIN, VALIDATION)
  return encoding.encode_corpus(documents, subject(name))


def split(tokens, separator):
  places = np.flatnonzero(tokens == separator)
  return [
    x[x != separator] for x in np.split(tokens, places)
  ]


@pytest.mark.parametrize("name", ["bpe", "llama"])
def test_documents_lie_between_separators(name, monkeypatch):
  """Includes documents that quote special tokens, and several batch sizes."""
  tokenizer, found = subject(name), encoded(name)
  for side, texts in (
    (found.corpus.train, TRAIN), (found.corpus.validation, VALIDATION),
  ):
    assert side.dtype == np.uint16
    parts = split(side, tokenizer.separator)
    assert [tokenizer.decode(x).encode() for x in parts] == texts
  monkeypatch.setattr(encoding, "_BATCH_BYTES", 9)
  again = encoded(name)
  np.testing.assert_array_equal(again.corpus.train, found.corpus.train)
  np.testing.assert_array_equal(again.sizes, found.sizes)
  end = bpe.END if name == "bpe" else "</s>"  # special in a prompt
  assert tokenizer.encode(f"a{end}")[-1] == tokenizer.separator


@pytest.mark.parametrize("name", ["bpe", "llama", "mistral"])
def test_token_sizes_add_up_to_the_bytes_of_the_text(name):
  """Counts the bytes of each document, and one byte per separator."""
  tokenizer, found = subject(name), encoded(name)
  tokens, sizes = found.corpus.validation, found.sizes
  assert found.text.tobytes() == sources.SEPARATOR.join(VALIDATION)
  assert sizes.shape == tokens.shape
  assert (sizes >= 0).all()
  assert (sizes[tokens == tokenizer.separator] == 1).all()
  parts = np.split(sizes, np.flatnonzero(tokens == tokenizer.separator))
  sums = [part.sum() for part in parts]
  assert sums == [len(VALIDATION[0]), *(1 + len(x) for x in VALIDATION[1:])]


@pytest.mark.parametrize(
  ("name", "text", "sizes"),
  [
    ("bpe", "the \u20ac", [3, 4]),  # "the", " \u20ac"
    ("smallest", "a\u20acb\U0001f600", [1, 3, 0, 0, 1, 4, 0, 0, 0]),
    # The last character of each size, and the first of the next size.
    ("smallest", "\x7f\x80\u07ff\u0800\uffff\U00010000",
     [1, 2, 0, 2, 0, 3, 0, 0, 3, 0, 0, 4, 0, 0, 0]),
    # Two spaces, one of which the tokenizer adds; "ab", four bytes, ".".
    ("llama", " ab\U0001f600.", [1, 2, 4, 0, 0, 0, 1]),
  ],
)
def test_token_sizes_equal_the_values_by_hand(name, text, sizes):
  """Counts a character for the first of its tokens."""
  tokenizer = subject(name) if name != "smallest" else LibraryTokenizer(
    "x", bpe_files(257), "x"
  )
  documents = sources.Documents("x", "", [b"a"], [text.encode()])
  found = encoding.encode_corpus(documents, tokenizer)
  assert found.sizes.tolist() == sizes


def test_stripped_spaces_count_for_the_next_token():
  """Counts stripped spaces at the end for the last token."""
  main = json.loads(llama_files()["tokenizer.json"])
  strip = {"type": "Strip", "strip_left": True, "strip_right": True}
  main["normalizer"]["normalizers"].insert(0, strip)
  tokenizer = LibraryTokenizer("x", {"tokenizer.json": json.dumps(main)}, "x")
  documents = sources.Documents("x", "", [b"a"], [b"  c ab  "])
  found = encoding.encode_corpus(documents, tokenizer)
  assert found.sizes.tolist() == [3, 0, 5]  # the first token is an added space


def test_documents_without_a_separator_are_adjacent():
  tokenizer = subject("bpe")
  files = {"tokenizer.json": tokenizer.files["tokenizer.json"]}
  alone = type(tokenizer)("x", files, "x")
  documents = sources.Documents("x", "", TRAIN, VALIDATION)
  found = encoding.encode_corpus(documents, alone)
  assert tokenizer.decode(found.corpus.train).encode() == b"".join(TRAIN)
  assert found.sizes.sum() == sum(map(len, VALIDATION))


@pytest.mark.parametrize(("size", "dtype"), [(256, "u1"), (257, "u2")])
def test_dtype_is_the_smallest_that_holds_all_tokens(size, dtype):
  vocab = {chr(0x100 + i): i for i in range(size)}
  library = Tokenizer(models.WordLevel(vocab, unk_token=chr(0x100)))
  files = {"tokenizer.json": library.to_str()}
  documents = sources.Documents("x", "", [b"a"], [chr(0xff + size).encode()])
  found = encoding.encode_corpus(documents, LibraryTokenizer("x", files, "x"))
  assert found.corpus.train.dtype == found.corpus.validation.dtype == dtype
  assert found.corpus.validation.tolist() == [size - 1]


def test_batches_reach_one_mebibyte():
  sizes = [2**18] * 5 + [2**20 + 1, 2**18 - 1]
  batches = list(encoding._batches([bytes(size) for size in sizes]))
  assert [list(map(len, batch)) for batch in batches] == [
    [2**18] * 4, [2**18, 2**20 + 1], [2**18 - 1]
  ]


def test_progress_is_printed_with_the_encoded_share(monkeypatch, capsys):
  document = b"the cat " * 12_500
  documents = sources.Documents("some", "", [document] * 2, [document])
  monkeypatch.setattr(encoding, "_BATCH_BYTES", len(document))
  encoding.encode_corpus(documents, subject("bpe"))
  assert not capsys.readouterr().err  # took less than ten seconds
  monkeypatch.setattr(encoding, "_SECONDS_PER_LINE", -1)
  encoding.encode_corpus(documents, subject("bpe"))
  assert capsys.readouterr().err.splitlines() == [
    f"encoding  some: {done} of 0.3 MB" for done in ("0.0", "0.1", "0.2")
  ]


def test_text_that_is_not_utf_8_is_named():
  documents = sources.Documents("x", "", [b"a\xff"], VALIDATION)
  with pytest.raises(ValueError, match=r"config\.data\.path: a document of x"):
    encoding.encode_corpus(documents, subject("bpe"))
