"""Text documents, split into training and validation.

A hash of each document's content determines its side: training or validation.
So the split is independent of the seed and of paths, identical documents are on
the same side, and a document stays there if others are added. A separate
validation text replaces the split; its documents are removed from training.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import platform
import sysconfig
from typing import NoReturn

import numpy as np

SEPARATOR = b"\0"
PIECE_SIZE_BYTES = 16 * 1024

_SUFFIXES = (".txt", ".jsonl")
_EXCLUDED_FOLDERS = frozenset((
  "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test",
))


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
  """Documents in their original form, without empty ones.

  Attributes:
    name: Name of the text for users.
    sha256: The hex digest of every relative path and content that was read.
    train: The training documents.
    validation: The validation documents.
  """

  name: str
  sha256: str
  train: Sequence[bytes]
  validation: Sequence[bytes]


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """Text corpus as two arrays of tokens (bytes, or those of a tokenizer).

  Attributes:
    name: Name of the text for users.
    sha256: The hex digest of every relative path and content that was read.
    train: The training documents, joined by a separator token, unsigned
      ``[num_train_tokens]``.
    validation: The validation documents, joined by a separator token, unsigned
      ``[num_validation_tokens]``.
    unit: Unit of the arrays: "bytes" or "tokens".
  """

  name: str
  sha256: str
  train: np.ndarray
  validation: np.ndarray
  unit: str = "bytes"


def join_documents(documents: Documents) -> Corpus:
  """Returns the corpus of bytes, with byte 0 between documents."""
  return Corpus(
    name=documents.name,
    sha256=documents.sha256,
    train=np.frombuffer(SEPARATOR.join(documents.train), np.uint8),
    validation=np.frombuffer(SEPARATOR.join(documents.validation), np.uint8),
  )


def load_documents(
  path: str, validation_percent: float, validation_path: str = ""
) -> Documents:
  """Reads documents and splits them.

  Args:
    path: A .txt or .jsonl file, or a folder of them, which is searched
      recursively. A .txt file is one document, unless it is the only file: then
      it is cut at line ends into pieces of at most 16 KiB. Each line of a
      .jsonl file is an object whose "text" is one document. "" reads the Python
      files of this interpreter's standard library, without its tests.
    validation_percent: The expected percentage of the documents in validation,
      above 0 and below 100.
    validation_path: A file or folder like ``path`` whose documents are the
      validation text, instead of a part of ``path``. They are removed from the
      training documents. "" for none.

  Returns:
    The documents, in the order of their relative paths.

  Raises:
    ValueError: If the text cannot be read, is empty or binary, or a side of the
      split would be empty. The message is one line that names the config key.
  """
  if not 0 < validation_percent < 100:
    raise ValueError(
      f"config.data.validation_percent={validation_percent} must be above 0 "
      "and below 100"
    )
  if path:
    name = os.path.basename(os.path.abspath(os.path.expanduser(path)))
    sha256, documents = _read_path("config.data.path", path)
  else:
    name = f"python-{platform.python_version()}-stdlib"
    sha256, documents = _read_stdlib()
  documents = [document for document in documents if document]
  if not documents:
    raise ValueError(f"config.data.path={path!r} is empty: no text in it")

  if validation_path:
    key = "config.data.validation_path"
    other, validation = _read_path(key, validation_path)
    validation = [document for document in validation if document]
    if not validation:
      raise ValueError(f"{key}={validation_path!r} is empty: no text in it")
    sha256 = hashlib.sha256(f"{sha256} {other}".encode()).hexdigest()
    # Training documents that are also validation documents are removed.
    held_out = frozenset(validation)
    train = [document for document in documents if document not in held_out]
    if not train:
      raise ValueError(
        f"{key}={validation_path!r} has all documents of "
        f"config.data.path={path!r}, so no training text is left"
      )
  else:
    train, validation = _split(path, documents, validation_percent)
  return Documents(name, sha256, train, validation)


def load_stdlib_packages(validation_percent: float) -> list[Documents]:
  """Reads the packages of this interpreter's standard library.

  A package is a folder; modules outside of folders belong to none. As in
  `load_documents`, tests are left out, and hashes of the documents determine
  the split into training and validation.

  Args:
    validation_percent: The expected percentage of the documents in validation.

  Returns:
    Documents of each package, largest first. Its training or its validation
    documents may be empty.
  """
  sha256, names, contents = _read_stdlib_files()
  found: dict[str, list[bytes]] = {}
  for name, content in zip(names, contents, strict=True):
    package, inside, _ = name.partition("/")
    if inside and content:
      found.setdefault(package, []).append(content)
  largest = sorted(found, key=lambda name: -sum(map(len, found[name])))
  return [
    Documents(
      name, sha256,
      *(
        [x for x in found[name] if held_out == (
          100 * hash_to_unit_interval(x) < validation_percent
        )] for held_out in (False, True)
      ),
    )
    for name in largest
  ]


def _split(
  path: str, documents: Sequence[bytes], validation_percent: float
) -> tuple[list[bytes], list[bytes]]:
  """Returns the training and the validation documents; neither is empty."""
  train, validation = [], []
  places = [100 * hash_to_unit_interval(document) for document in documents]
  for document, place in zip(documents, places, strict=True):
    (validation if place < validation_percent else train).append(document)
  if not train or not validation:
    # A percentage in (low, high] puts at least one document on each side.
    low, high = min(places), max(places)
    side = "validation" if train else "training"
    advice = (
      f"values above {low:.4g} and up to {high:.4g} work"
      if low < high else "no value works for one distinct document"
    )
    raise ValueError(
      f"config.data.validation_percent={validation_percent} leaves no {side} "
      f"text: config.data.path={path!r} has {len(documents)} documents; "
      f"{advice}"
    )
  return train, validation


def hash_to_unit_interval(document: bytes) -> float:
  """Hashes a document to a uniformly distributed number in [0, 1).

  Example:
    >>> round(hash_to_unit_interval(b"hello"), 4)
    0.1756
  """
  # The first 53 bits, which a float represents exactly.
  digest = hashlib.sha256(document).digest()
  return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def _content_sha256(files: Sequence[tuple[str, bytes]]) -> str:
  """Returns the SHA-256 of names and contents of files, in hex digits."""
  digest = hashlib.sha256()
  for name, content in files:
    for part in (os.fsencode(name), content):
      # With the length, ("ab", "c") and ("a", "bc") have different hashes.
      digest.update(len(part).to_bytes(8, "big"))
      digest.update(part)
  return digest.hexdigest()


def _find_files(
  root: pathlib.Path,
  suffixes: Sequence[str],
  excluded: frozenset[str] = frozenset(),
) -> list[str]:
  """Returns the sorted relative POSIX paths of files in `root`, recursively."""
  names = []
  for folder, subfolders, files in os.walk(root, onerror=_raise_unreadable):
    # Changed in place, so that os.walk does not enter excluded folders.
    subfolders[:] = [x for x in subfolders if x not in excluded]
    relative = pathlib.Path(folder).relative_to(root)
    names += [
      (relative / x).as_posix()
      for x in files if pathlib.Path(x).suffix.lower() in suffixes
    ]
  return sorted(names)


def _read_stdlib() -> tuple[str, list[bytes]]:
  """Reads Python's standard library; returns hash and documents."""
  sha256, _, contents = _read_stdlib_files()
  return sha256, contents


def _read_stdlib_files() -> tuple[str, list[str], list[bytes]]:
  """Reads Python's standard library; returns hash, paths and contents."""
  root = pathlib.Path(sysconfig.get_paths()["stdlib"])
  with _prefix_errors("config.data.path"):
    names = _find_files(root, (".py",), _EXCLUDED_FOLDERS)
    files = [(name, _read_bytes(root / name)) for name in names]
  if not names:
    raise ValueError(
      f"config.data.path='' reads the Python standard library, but {root} "
      "has no .py files; name a .txt or .jsonl file or folder"
    )
  return _content_sha256(files), names, [content for _, content in files]


def _read_path(key: str, path: str) -> tuple[str, list[bytes]]:
  """Reads the file or folder ``path``, the value of the config key ``key``.

  Returns the hash of the content, and the documents.
  """
  root = pathlib.Path(os.path.expanduser(path))
  if os.path.isdir(root):
    with _prefix_errors(key):
      names = _find_files(root, _SUFFIXES)
    if not names:
      what = "has no .txt or .jsonl files" if os.listdir(root) else "is empty"
      raise ValueError(f"{key}={path!r} is a folder that {what}")
  elif not os.path.exists(root):
    raise ValueError(f"{key}={path!r} does not exist")
  elif root.suffix.lower() not in _SUFFIXES or not root.is_file():
    raise ValueError(
      f"{key}={path!r} must be a .txt file, a .jsonl file or a folder of them"
    )
  else:
    root, names = root.parent, [root.name]

  documents = []
  # All files are read before the first is parsed, so that the hash covers all.
  with _prefix_errors(key):
    files = [(name, _read_bytes(root / name)) for name in names]
    for name, content in files:
      _check_text(root / name, content)
      if name.lower().endswith(".jsonl"):
        documents += _jsonl_documents(root / name, content)
      elif len(files) == 1:
        documents += _pieces(content)
      else:
        documents.append(content)
  return _content_sha256(files), documents


@contextlib.contextmanager
def _prefix_errors(key: str) -> Iterator[None]:
  """Context manager that prefixes errors with the config key of the file."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f"{key}: {error}") from error


def _read_bytes(file: pathlib.Path) -> bytes:
  # Opening a FIFO would block until it has a writer.
  if file.exists() and not file.is_file():
    raise ValueError(f"{file} is not a regular file")
  try:
    return file.read_bytes()
  except OSError as error:
    _raise_unreadable(error)


def _raise_unreadable(error: OSError) -> NoReturn:
  raise ValueError(
    f"cannot read {error.filename}: {error.strerror}"
  ) from error


def _check_text(file: pathlib.Path, content: bytes) -> None:
  """Raises ValueError for text that is not UTF-8 or has a NUL byte."""
  place = content.find(SEPARATOR)
  if place >= 0:
    raise ValueError(f"{file} is binary: NUL byte at offset {place}")
  try:
    content.decode("utf-8")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{file} is binary: not UTF-8 at offset {error.start}"
    ) from error


def _jsonl_documents(file: pathlib.Path, content: bytes) -> Iterator[bytes]:
  """Yields the "text" of each line."""
  # Lines end at \n only: JSON strings may hold other Unicode line ends.
  lines = content.decode("utf-8-sig").split("\n")
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    where = f"{file}:{number}"
    try:
      record = json.loads(line)
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{where} is not valid JSON: {error}") from error
    text = record.get("text") if isinstance(record, dict) else None
    is_document = isinstance(text, str)
    if not is_document:
      raise ValueError(f'{where}: not an object with a string "text" field')
    try:
      document = text.encode("utf-8")
    except UnicodeEncodeError as error:
      raise ValueError(f'{where}: "text" is not valid Unicode') from error
    if SEPARATOR in document:
      raise ValueError(f'{where}: "text" is binary: it has a NUL character')
    yield document


def _pieces(content: bytes) -> Iterator[bytes]:
  """Yields pieces of UTF-8 text of at most ``PIECE_SIZE_BYTES``.

  Pieces end at line ends, or between characters in longer lines.
  """
  start = 0
  while start < len(content):
    stop = min(start + PIECE_SIZE_BYTES, len(content))
    if stop < len(content):
      line_end = content.rfind(b"\n", start, stop)
      if line_end >= 0:
        stop = line_end + 1
      else:
        while content[stop] & 0xC0 == 0x80:  # a byte inside a character
          stop -= 1
    yield content[start:stop]
    start = stop
