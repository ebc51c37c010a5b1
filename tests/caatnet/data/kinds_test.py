"""Kinds of text: order, split, and kinds with too little text."""

import dataclasses
import gzip
import pathlib
import random

from etils import epath
import pytest

from caatnet.data import kinds
from caatnet.data.kinds import Kind
from caatnet.schema.kinds import NAMES


def document(index, words="alpha beta gamma"):
  generator = random.Random(index)
  return "".join(
    f"{generator.choice(words.split())} {generator.random()}\n"
    for _ in range(30)
  )


def write(root: pathlib.Path, num_files=80) -> Kind:
  for index in range(num_files):
    path = root / f"{index % 3}" / f"{index}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document(index))
  return Kind("text", ((str(root), "*.txt"),))


def test_config_has_all_kinds():
  assert set(NAMES) == set(kinds.KINDS)


def test_held_out_files_are_disjoint_and_the_order_is_reproducible(tmp_path):
  kind = write(tmp_path / "a")
  text = kinds.read(kind, 10**9, 20.0)
  assert len(text.train) + len(text.validation) == 80
  assert text.validation
  assert not set(text.train) & set(text.validation)
  # Elsewhere: another root, files written in another order.
  (tmp_path / "b").mkdir()
  for path in sorted((tmp_path / "a").rglob("*.txt"), reverse=True):
    other = tmp_path / "b" / path.relative_to(tmp_path / "a")
    other.parent.mkdir(exist_ok=True)
    other.write_bytes(path.read_bytes())
  other = kinds.read(Kind("text", ((str(tmp_path / "b"), "*.txt"),)), 10**9, 20)
  assert (other.train, other.validation) == (text.train, text.validation)
  assert other.sha256 == text.sha256


def test_size_limits_the_text_to_a_prefix_of_the_files(tmp_path):
  kind = write(tmp_path)
  part, whole = kinds.read(kind, 20_000, 20.0), kinds.read(kind, 10**9, 20.0)
  size = sum(map(len, [*part.train, *part.validation]))
  assert 20_000 <= size < 21_500
  assert part.train == whole.train[: len(part.train)]
  assert part.sha256 != whole.sha256
  # Not in the order of the paths: documents of all three folders.
  numbers = {document(index).encode(): index for index in range(80)}
  assert {numbers[x] % 3 for x in part.train} == {0, 1, 2}


def test_documents_that_are_no_text_are_left_out(tmp_path):
  kind = write(tmp_path, 3)
  (tmp_path / "binary.txt").write_bytes(b"\0" * 500)
  (tmp_path / "latin.txt").write_bytes(b"\xe9" * 500)
  (tmp_path / "short.txt").write_text("short")
  (tmp_path / "copy.txt").write_text(document(0))
  (tmp_path / "tests").mkdir()
  (tmp_path / "tests" / "x.txt").write_text(document(9))
  (tmp_path / "broken.txt.gz").write_bytes(b"\x1f\x8b" + b"x" * 300)
  with gzip.open(tmp_path / "packed.txt.gz", "wt") as file:
    file.write(document(7))
  places = (*kind.places, (str(tmp_path), "*.gz"))
  text = kinds.read(Kind("text", places), 10**9, 50.0)
  assert {*text.train, *text.validation} == {
    document(index).encode() for index in (0, 1, 2, 7)
  }
  shell = Kind("text", places, b"alpha")
  text = kinds.read(shell, 10**9, 50.0)
  found = {*text.train, *text.validation}
  assert found
  assert all(x.startswith(b"alpha") for x in found)


def test_long_documents_end_at_a_line(tmp_path):
  (tmp_path / "a.txt").write_text("123456789\n" * 10_000)
  text = kinds.read(Kind("text", ((str(tmp_path), "*"),)), 10**9, 50.0)
  ((only,),) = [side for side in (text.train, text.validation) if side]
  assert kinds.MAX_DOCUMENT_BYTES - 10 < len(only) <= kinds.MAX_DOCUMENT_BYTES
  assert only.endswith(b"9\n")


def test_held_out_copies_of_training_text_are_left_out(tmp_path):
  """Licences, for example, differ in one line only."""
  for index in range(40):
    text = f"Copyright {index} {document(index)[:20]}\n" + document(1000)
    (tmp_path / f"{index}.txt").write_text(text)
  kind = Kind("text", ((str(tmp_path), "*"),))
  text = kinds.read(kind, 10**9, 20.0)
  assert len(text.train) > 20
  assert not text.validation


def test_kind_with_too_little_text_is_left_out_with_a_message(tmp_path):
  given = {
    "a": write(tmp_path / "a"), "b": write(tmp_path / "b", 2),
    "c": write(tmp_path / "c"), "d": write(tmp_path / "d"),
  }
  found, messages = kinds.read_available(
    "abcd", 2, 10**6, 20_000, 20.0, given
  )
  assert list(found) == ["a", "c"]
  text = kinds.read(given["b"], 10**6, 20.0)
  sizes = [sum(map(len, side)) / 1e3 for side in (text.train, text.validation)]
  assert messages == [
    f"kind 'b' is left out: this machine has {sizes[0]:.0f} kB in "
    f"{len(text.train)} files, held out {sizes[1]:.0f} kB in "
    f"{len(text.validation)} files, sha256 {text.sha256[:16]}, fewer than "
    "20 kB or 1 kB held out"
  ]
  # A quarter of the expected share must be held out; files may be new.
  share = 0.01
  assert not kinds.read(given["c"], 10**6, share).validation
  found, messages = kinds.read_available("c", 1, 10**6, 20_000, share, given)
  assert not found
  assert len(messages) == 1
  write(tmp_path / "b")
  assert [*kinds.read_available("b", 1, 10**6, 20_000, 20.0, given)[0]] == ["b"]


@pytest.mark.parametrize("name", ["python", "licence"])
def test_this_machine_has_text_that_every_python_has(name):
  text = kinds.read(kinds.KINDS[name], 100_000, 10.0)
  assert sum(map(len, text.train)) > 20_000


def test_written_corpora_are_read_again_and_the_union_has_all(tmp_path):
  texts = {
    name: kinds.read(write(tmp_path / name, num_files), 10**9, 20.0)
    for name, num_files in (("a", 40), ("b", 80))
  }
  texts["b"] = dataclasses.replace(texts["b"], train=["ü\u2028\n".encode()])
  folder = epath.Path(tmp_path / "text")
  written = kinds.write_corpora(texts, folder)
  for side in ("train", "validation"):
    parts = [folder / f"{name}.{side}.jsonl" for name in texts]
    union = folder / f"union.{side}.jsonl"
    assert union.read_text() == "".join(path.read_text() for path in parts)
  found = kinds.read_corpora(folder, ["b", "a"], written)
  assert found["a"].sha256 == texts["a"].sha256
  for name, text in found.items():
    assert (text.train, text.validation) == (
      texts[name].train, texts[name].validation
    )
  with pytest.raises(ValueError, match=r"c\.train\.jsonl has no SHA-256"):
    kinds.read_corpora(folder, ["c"], written)
  (folder / "a.train.jsonl").write_text("{}")
  with pytest.raises(ValueError, match=r"a\.train\.jsonl is missing or d"):
    kinds.read_corpora(folder, ["b"], written)
