"""Properties of corpora: readers, splits and refused inputs."""

import json
import os
import pathlib
import unittest.mock

import numpy as np
import pytest

from caatnet.data import sources


def load_corpus(path, validation_percent, validation_path=""):
  return sources.join_documents(
    sources.load_documents(path, validation_percent, validation_path)
  )


def _documents(text: np.ndarray) -> list[bytes]:
  return text.tobytes().split(sources.SEPARATOR)


def _write_folder(root: pathlib.Path, num_files: int = 60) -> pathlib.Path:
  for i in range(num_files):
    file = root / f"{i % 3}" / f"{i}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"document {i // 2}\n")  # each content occurs twice
  return root


def _write_jsonl(file: pathlib.Path, texts: list[str]) -> pathlib.Path:
  file.write_text("".join(json.dumps({"text": x}) + "\n" for x in texts))
  return file


@pytest.fixture(scope="module")
def stdlib() -> sources.Corpus:
  return load_corpus("", 5.0)


def test_stdlib_is_large_source_text_without_tests(stdlib):
  train, validation = _documents(stdlib.train), _documents(stdlib.validation)
  assert len(stdlib.train) > 5_000_000
  assert len(stdlib.validation) > 100_000
  everything = train + validation
  library = pathlib.Path(json.__file__).parents[1]
  assert (library / "json" / "decoder.py").read_bytes() in everything
  assert pathlib.Path(unittest.mock.__file__).read_bytes() in everything
  assert pathlib.Path(np.__file__).read_bytes() not in everything
  assert not any(b"\nfrom test import support" in x for x in everything)


@pytest.mark.quick
def test_stdlib_split_is_disjoint(stdlib):
  train, validation = _documents(stdlib.train), _documents(stdlib.validation)
  assert not set(train) & set(validation)


def test_stdlib_is_read_deterministically(stdlib):
  again = load_corpus("", 5.0)
  assert again.sha256 == stdlib.sha256
  np.testing.assert_array_equal(again.train, stdlib.train)
  np.testing.assert_array_equal(again.validation, stdlib.validation)


def test_folder_split_is_a_partition_that_keeps_copies_together(tmp_path):
  corpus = load_corpus(str(_write_folder(tmp_path)), 40.0)
  train, validation = _documents(corpus.train), _documents(corpus.validation)
  assert not set(train) & set(validation)
  expected = [b"document %d\n" % (i // 2) for i in range(60)]
  assert sorted(train + validation) == sorted(expected)


def test_documents_are_ordered_by_path(tmp_path):
  texts = {"b.txt": "2", "a/z.txt": "1", "c.jsonl": '{"text": "3"}\n'}
  for name, text in texts.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
  corpus = load_corpus(str(tmp_path), 50.0)
  train, validation = _documents(corpus.train), _documents(corpus.validation)
  assert sorted(train + validation) == [b"1", b"2", b"3"]
  assert train == sorted(train)
  assert validation == sorted(validation)


def test_higher_percent_only_moves_documents_to_validation(tmp_path):
  folder = str(_write_folder(tmp_path))
  few = load_corpus(folder, 20.0)
  many = load_corpus(folder, 60.0)
  assert set(_documents(few.validation)) < set(_documents(many.validation))


@pytest.mark.parametrize("percent", [10.0, 50.0, 90.0])
def test_percent_is_the_expected_share(tmp_path, percent):
  texts = [f"document {i}" for i in range(4000)]
  file = _write_jsonl(tmp_path / "x.jsonl", texts)
  corpus = load_corpus(str(file), percent)
  # The standard deviation of the share is at most 0.8 percent.
  assert abs(len(_documents(corpus.validation)) / 40 - percent) < 3


def test_sha256_separates_names_from_contents(tmp_path):
  digests = set()
  for number, (name, text) in enumerate((("a.txt", ".txt"), ("a.txt.txt", ""))):
    folder = tmp_path / str(number)
    folder.mkdir()
    (folder / name).write_text(text)
    _write_jsonl(folder / "z.jsonl", ["b", "c"])
    digests.add(load_corpus(str(folder), 20.0).sha256)
  assert len(digests) == 2


@pytest.mark.parametrize("change", ["content", "name"])
def test_sha256_depends_on_names_and_contents(tmp_path, change):
  folder = _write_folder(tmp_path)
  before = load_corpus(str(folder), 50.0)
  file = folder / "0" / "0.txt"
  if change == "content":
    file.write_text("other\n")
  else:
    file.rename(file.with_name("00.txt"))
  assert load_corpus(str(folder), 50.0).sha256 != before.sha256


def test_single_text_is_cut_at_line_ends(tmp_path):
  text = "".join(f"line {i}\n" for i in range(40_000))
  (tmp_path / "x.txt").write_text(text)
  corpus = load_corpus(str(tmp_path / "x.txt"), 30.0)
  pieces = _documents(corpus.train) + _documents(corpus.validation)
  assert all(x.endswith(b"\n") for x in pieces)
  # Pieces are as long as possible: the next line has 11 bytes.
  assert 16 * 1024 - 11 < max(map(len, pieces)) <= 16 * 1024
  lines = b"".join(pieces).decode().splitlines(keepends=True)
  assert sorted(lines) == sorted(text.splitlines(keepends=True))


def test_long_lines_are_cut_between_characters(tmp_path):
  text = "a" + "\u20ac" * 40_000  # 3 bytes each: no cut is aligned
  (tmp_path / "x.txt").write_text(text, encoding="utf-8")
  corpus = load_corpus(str(tmp_path / "x.txt"), 50.0)
  pieces = _documents(corpus.train) + _documents(corpus.validation)
  assert sum(len(x.decode("utf-8")) for x in pieces) == len(text)
  # 1 + 3 * 5461 bytes; the others are a byte shorter than 3 * 5461 + 1.
  assert max(map(len, pieces)) == 16 * 1024
  assert sorted(map(len, pieces))[1] == 16 * 1024 - 1


@pytest.mark.parametrize(("size", "count"), [(2**14, 1), (2**14 + 1, 2)])
def test_text_of_one_piece_is_one_document(tmp_path, size, count):
  (tmp_path / "x.txt").write_text("a" * size)
  with pytest.raises(ValueError, match=f"has {count} documents"):
    load_corpus(str(tmp_path / "x.txt"), 1e-9)


def test_jsonl_lines_are_documents(tmp_path):
  texts = ["a\nb", "c\u2028d", "\u20ac", "", "e", "f", "g"]
  file = tmp_path / "x.jsonl"
  lines = [json.dumps({"text": x, "id": 1}, ensure_ascii=False) for x in texts]
  file.write_text("\ufeff" + "\n\n".join(lines), encoding="utf-8")
  corpus = load_corpus(str(file), 50.0)
  found = _documents(corpus.train) + _documents(corpus.validation)
  assert sorted(found) == sorted(x.encode() for x in texts if x)


def test_suggested_percent_works(tmp_path):
  file = _write_jsonl(tmp_path / "x.jsonl", ["a", "b", "c"])
  with pytest.raises(ValueError, match=r"values above .* work$") as info:
    load_corpus(str(file), 1e-9)
  words = str(info.value).split()
  low = float(words[words.index("above") + 1])
  high = float(words[words.index("work") - 1])
  for percent in (1.01 * low, 0.99 * high):
    load_corpus(str(file), percent)
  for percent in (0.99 * low, 1.01 * high):
    with pytest.raises(ValueError, match="leaves no"):
      load_corpus(str(file), percent)


def test_custom_validation_text_is_not_trained_on(tmp_path):
  folder = str(_write_folder(tmp_path / "d", 8))  # documents 0 to 3, twice
  own = tmp_path / "own"
  own.mkdir()
  (own / "a.txt").write_text("document 1\n")
  (own / "b.txt").write_text("another")
  found = load_corpus(folder, 5.0, str(own))
  assert _documents(found.validation) == [b"document 1\n", b"another"]
  assert set(_documents(found.train)) == {
    b"document 0\n", b"document 2\n", b"document 3\n"
  }
  assert len(_documents(found.train)) == 6
  (own / "b.txt").write_text("one more")
  assert load_corpus(folder, 5.0, str(own)).sha256 != found.sha256
  with pytest.raises(ValueError, match=r"validation_path=.* has all doc"):
    load_corpus(str(own), 5.0, str(own))
  (own / "c.txt").write_bytes(b"\0")
  with pytest.raises(ValueError, match=r"^config.data.validation_path: .*NUL"):
    load_corpus(folder, 5.0, str(own))


def test_non_regular_files_are_refused_without_blocking(tmp_path):
  """Uses a FIFO, which blocks its reader."""
  (tmp_path / "a.txt").write_text("a")
  os.mkfifo(tmp_path / "b.txt")
  for path in (tmp_path, tmp_path / "b.txt"):
    with pytest.raises(ValueError, match=r"b\.txt"):
      load_corpus(str(path), 5.0)


# Each row: files to write, path to load, percentage, pattern of the error.
# A file of None is a folder.
_MISTAKES = {
  "missing": ({}, "no.txt", 5, r"config.data.path='.*no.txt' does not exist"),
  "empty folder": ({"d": None}, "d", 5, "config.data.path=.* is empty"),
  "empty file": ({"x.txt": b""}, "x.txt", 5, "config.data.path=.* is empty"),
  "empty jsonl": ({"x.jsonl": b"\n"}, "x.jsonl", 5, "config.data.path=.*empty"),
  "only empty texts": (
    {"x.jsonl": b'{"text": ""}'}, "x.jsonl", 5, "config.data.path=.* is empty"
  ),
  "other files only": (
    {"d/x.csv": b"a"}, "d", 5, "config.data.path=.* no .txt or .jsonl files"
  ),
  "other suffix": (
    {"x.csv": b"a"}, "x.csv", 5, "config.data.path=.*csv' must be a .txt"
  ),
  "NUL byte": (
    {"x.txt": b"ab\0"}, "x.txt", 5,
    "config.data.path: .*x.txt is binary: NUL byte at offset 2"
  ),
  "not UTF-8": (
    {"x.txt": b"abc\xff"}, "x.txt", 5,
    "config.data.path: .*x.txt is binary: not UTF-8 at offset 3"
  ),
  "binary file in a folder": (
    {"d/x.txt": b"a", "d/y.jsonl": b"\x80"}, "d", 5,
    "config.data.path: .*y.jsonl is binary"
  ),
  "not JSON": (
    {"x.jsonl": b'{"text": "a"}\nb\n'}, "x.jsonl", 5,
    "config.data.path: .*x.jsonl:2 is not valid JSON"
  ),
  "not an object": (
    {"x.jsonl": b'["text"]'}, "x.jsonl", 5, r"x.jsonl:1: .*\"text\" field"
  ),
  "no text": (
    {"x.jsonl": b'\n{"body": "a"}'}, "x.jsonl", 5, r"x.jsonl:2: .*\"text\""
  ),
  "text is a number": (
    {"x.jsonl": b'{"text": 1}'}, "x.jsonl", 5, r"x.jsonl:1: .*string \"text\""
  ),
  "text with NUL": (
    {"x.jsonl": rb'{"text": "a\u0000b"}'}, "x.jsonl", 5, "x.jsonl:1: .*binary"
  ),
  "text with half a pair": (
    {"x.jsonl": rb'{"text": "\ud800"}'}, "x.jsonl", 5, "x.jsonl:1: .*Unicode"
  ),
  "percent 0": ({}, "", 0, "config.data.validation_percent=0 must be above 0"),
  "percent 100": ({}, "", 100, "validation_percent=100 .* below 100"),
  "percent nan": ({}, "", float("nan"), "validation_percent=nan must be"),
  "one document": (
    {"x.txt": b"a"}, "x.txt", 5,
    "config.data.validation_percent=5 .*no value works for one distinct doc"
  ),
  "no validation": (
    {"d/x.txt": b"a", "d/y.txt": b"b"}, "d", 1e-9,
    "config.data.validation_percent=1e-09 leaves no validation text.* has 2 "
  ),
  "no training": (
    {"d/x.txt": b"a", "d/y.txt": b"b"}, "d", 99.999999,
    "config.data.validation_percent=.* leaves no training text"
  ),
}


@pytest.mark.parametrize("mistake", _MISTAKES)
def test_error_is_one_line_that_names_the_key(tmp_path, mistake):
  files, path, percent, message = _MISTAKES[mistake]
  for name, content in files.items():
    file = tmp_path / name
    if content is None:
      file.mkdir()
    else:
      file.parent.mkdir(exist_ok=True)
      file.write_bytes(content)
  with pytest.raises(ValueError, match=message) as info:
    load_corpus(str(tmp_path / path) if path else "", percent)
  assert "config.data." in str(info.value)
  assert "\n" not in str(info.value)


def test_unreadable_input_is_named(tmp_path):
  (tmp_path / "d").mkdir()
  (tmp_path / "d" / "x.txt").symlink_to(tmp_path / "gone")
  with pytest.raises(ValueError, match=r"data\.path: cannot read .*x\.txt: "):
    load_corpus(str(tmp_path / "d"), 5.0)
