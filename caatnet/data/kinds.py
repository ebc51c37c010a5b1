"""Kinds of text in files that many machines have, such as manual pages.

A kind is a set of files, such as C headers or manual pages. Its documents are
read in the order of the hashes of their relative paths until their total size
reaches a limit. A hash of the content decides which documents are held out, as
in `caatnet.data.sources`, so a document is held out in all kinds or in none.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import fnmatch
import functools
import gzip
import hashlib
import json
import os
import pathlib
import re
import sysconfig
from typing import Any
import zlib

from etils import epath

from caatnet.data import sources
from parallel.base import schema

# Limits of a document in bytes: shorter ones are left out, and longer ones are
# cut at the end of a line.
MIN_DOCUMENT_BYTES, MAX_DOCUMENT_BYTES = 200, 16 * 1024
# A held-out document is left out if more than this fraction of its bytes is in
# lines of training documents: licences and changelogs repeat texts.
MAX_REPEATED_FRACTION = 0.5

_EXCLUDED = frozenset(("__pycache__", ".git", "test", "tests", "idle_test"))


@dataclasses.dataclass(frozen=True)
class Kind:
  """Kind of text, defined by file names.

  Attributes:
    description: Description for users.
    places: Pairs of a folder (absolute, or the name of a `sysconfig` path) and
      a pattern of paths in this folder (`fnmatch`; "*" also matches "/").
    starts: Regular expression that matches at the start of every document.
  """

  description: str
  places: tuple[tuple[str, str], ...]
  starts: bytes = b""


def _library_places(*patterns: str) -> tuple[tuple[str, str], ...]:
  """Returns `Kind.places` in the libraries of Python and of the system."""
  roots = ("stdlib", "purelib", "/usr/share", "/usr/lib")
  return tuple((root, pattern) for root in roots for pattern in patterns)


KINDS = {
  "python": Kind("Python source", (("stdlib", "*.py"),)),
  "c": Kind(
    "C headers",
    (("/usr/include", "*.h"), ("include", "*.h"), ("purelib", "*.h")),
  ),
  "licence": Kind("licences and copyright notices", (
    ("/usr/share/common-licenses", "*"), ("/usr/share/doc", "*/copyright"),
    ("purelib", "*LICENSE*"), ("purelib", "*COPYING*"),
  )),
  "documentation": Kind(
    "documentation in Markdown and reStructuredText",
    (*_library_places("*.md", "*.rst"), ("purelib", "*.dist-info/METADATA")),
  ),
  "json": Kind("JSON", _library_places("*.json"), rb"\s*[{\[]"),
  "shell": Kind("shell scripts", (
    *_library_places("*.sh"), ("/usr/bin", "*"), ("/usr/sbin", "*"),
    ("/etc", "*"), ("/var/lib/dpkg/info", "*inst"),
    ("/var/lib/dpkg/info", "*rm"),
  ), rb"#!\s*/\S*(/|env )(ba|da)?sh\b"),
  "changelog": Kind(
    "changelogs", (("/usr/share/doc", "*/changelog*"), ("purelib", "*CHANGE*"))
  ),
  "manual": Kind("manual pages", (
    ("/usr/share/man", "man[0-9]/*"), ("/usr/local/share/man", "man[0-9]/*")
  )),
  "perl": Kind("Perl source", (
    ("/usr/share/perl", "*.p[lm]"), ("/usr/share/perl5", "*.p[lm]"),
    ("/usr/lib", "*.pm"),
  )),
  "markup": Kind("HTML and XML", _library_places("*.html", "*.xml", "*.svg")),
}


class Manifest(schema.Schema):
  """Content of the file that is written after corpora and describes them.

  Attributes:
    kinds: Names of the kinds of text.
    left_out: Messages of `read_available` about kinds that were left out.
    options: Arguments of `read_available`.
    files: SHA-256 of each corpus by its file's name, in hex digits.
  """

  kinds: tuple[str, ...]
  left_out: tuple[str, ...]
  options: dict[str, Any]
  files: dict[str, str]


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
  """Documents of a kind of text.

  Attributes:
    train: The training documents.
    validation: The held-out documents.
    sha256: Hash of all documents in order, in hex digits.
  """

  train: Sequence[bytes]
  validation: Sequence[bytes]
  sha256: str

  def describe(self) -> str:
    """Returns sizes and hash: "1,200 kB in 31 files, ..."."""
    train, held = (
      f"{sum(map(len, side)) / 1e3:,.0f} kB in {len(side)} files"
      for side in (self.train, self.validation)
    )
    return f"{train}, held out {held}, sha256 {self.sha256[:16]}"


def read(
  kind: Kind, size_bytes: int, validation_percent: float
) -> Text:
  """Reads documents of a kind of text on this machine.

  Args:
    kind: The kind.
    size_bytes: Size after which no more documents are read.
    validation_percent: Expected percentage of documents that are held out.
  """
  documents: dict[bytes, None] = {}  # a set that keeps the order
  total = 0
  for path in _files(kind.places):
    if total >= size_bytes:
      break
    document = _document(path)
    if document is None or document in documents:
      continue
    if re.match(kind.starts, document):
      documents[document] = None
      total += len(document)
  train, held = [], []
  for document in documents:
    is_held = 100 * sources.hash_to_unit_interval(document) < validation_percent
    (held if is_held else train).append(document)
  lines = {line for document in train for line in document.splitlines()}
  held = [
    x for x in held if repeated_fraction(x, lines) <= MAX_REPEATED_FRACTION
  ]
  return _text(train, held)


def repeated_fraction(document: bytes, lines: set[bytes]) -> float:
  """Returns the fraction of a document's bytes that is in lines of a set.

  Example:
    >>> repeated_fraction(b"abc\\nd\\n", {b"abc"})
    0.75
  """
  found = document.splitlines()
  return sum(len(x) for x in found if x in lines) / max(1, sum(map(len, found)))


def read_available(
  names: Sequence[str], count: int, size_bytes: int, min_bytes: int,
  validation_percent: float, kinds: Mapping[str, Kind] | None = None,
) -> tuple[dict[str, Text], list[str]]:
  """Reads the first kinds of text of which this machine has enough.

  Args:
    names: Names of kinds, in order of preference.
    count: Number of kinds.
    size_bytes: Size of each kind's text.
    min_bytes: Smallest size of a kind's training text; its held-out text must
      have at least `validation_percent` / 4 percent of ``min_bytes``.
    validation_percent: Expected percentage of documents that are held out.
    kinds: The kinds by name; None for `KINDS`.

  Returns:
    The text by name, and a message for each kind that was left out.
  """
  kinds = KINDS if kinds is None else kinds
  _names.cache_clear()  # files may have changed since an earlier call
  found: dict[str, Text] = {}
  messages = []
  for name in names:
    if len(found) == count:
      break
    text = read(kinds[name], size_bytes, validation_percent)
    min_held = min_bytes * validation_percent / 400
    if sum(map(len, text.train)) >= min_bytes and (
      sum(map(len, text.validation)) >= min_held
    ):
      found[name] = text
    else:
      messages.append(
        f"kind {name!r} is left out: this machine has {text.describe()}, fewer "
        f"than {min_bytes / 1e3:,.0f} kB or {min_held / 1e3:,.0f} kB held "
        "out"
      )
  return found, messages


def _files(places: Sequence[tuple[str, str]]) -> list[pathlib.Path]:
  """Returns the files in ``places``, (folder, pattern of paths) each.

  They are ordered by hashes of their relative paths.
  """
  found: dict[str, tuple[bytes, pathlib.Path]] = {}
  for root, pattern in places:
    folder = pathlib.Path(
      root if root.startswith("/") else sysconfig.get_paths()[root]
    )
    matches = re.compile(fnmatch.translate(pattern)).match
    for name in _names(folder):
      if matches(name):
        # Relative, so that the order does not depend on Python's location.
        digest = hashlib.sha256(os.fsencode(name)).digest()
        # One root may contain another one, or link to it.
        path = folder / name
        found.setdefault(os.path.realpath(path), (digest, path))
  return [path for _, path in sorted(found.values())]


@functools.cache
def _names(root: pathlib.Path) -> tuple[str, ...]:
  """Returns the relative paths of all files in a folder, sorted."""
  # Packages installed in the standard library's folder are not part of it.
  excluded = _EXCLUDED
  if root == pathlib.Path(sysconfig.get_paths()["stdlib"]):
    excluded |= {"site-packages", "dist-packages"}
  names = []
  for folder, subfolders, files in os.walk(root):
    subfolders[:] = [x for x in subfolders if x not in excluded]
    relative = os.path.relpath(folder, root)
    names += [os.path.normpath(os.path.join(relative, x)) for x in files]
  return tuple(sorted(names))


def _document(path: pathlib.Path) -> bytes | None:
  """Returns a file's UTF-8 text, cut if long; None if it is not usable text."""
  try:
    if not path.is_file():  # opening a FIFO would block
      return None
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
      content = file.read(MAX_DOCUMENT_BYTES + 1)
  except (OSError, EOFError, zlib.error):  # unreadable, such as a private key
    return None
  if len(content) > MAX_DOCUMENT_BYTES:
    content = content[: content.rfind(b"\n", 0, MAX_DOCUMENT_BYTES) + 1]
  try:
    content.decode("utf-8")
  except UnicodeDecodeError:
    return None
  is_text = (
    sources.SEPARATOR not in content and len(content) >= MIN_DOCUMENT_BYTES
  )
  return content if is_text else None


def write_corpora(
  texts: Mapping[str, Text], folder: epath.Path
) -> dict[str, str]:
  """Writes "KIND.train.jsonl" and "KIND.validation.jsonl" per kind of text.

  The unions of all kinds are "union.train.jsonl" and "union.validation.jsonl".

  Returns:
    The SHA-256 of each file by its name, in hex digits, for `read_corpora`.
  """
  folder.mkdir(parents=True, exist_ok=True)
  written: dict[str, str] = {}

  def write(name: str, documents: Sequence[bytes]) -> None:
    content = "".join(
      json.dumps({"text": x.decode()}) + "\n" for x in documents
    ).encode()
    (folder / name).write_bytes(content)
    written[name] = hashlib.sha256(content).hexdigest()

  for side in ("train", "validation"):
    union: list[bytes] = []
    for name, text in texts.items():
      documents = getattr(text, side)
      union += documents
      write(f"{name}.{side}.jsonl", documents)
    write(f"union.{side}.jsonl", union)
  return written


def read_manifest(path: epath.Path) -> Manifest:
  """Reads a manifest.

  Raises:
    ValueError: The manifest is damaged; the message has one line.
  """
  try:
    return schema.parse(Manifest, path.read_bytes())
  except ValueError as error:
    raise ValueError(f"{path} is damaged: {error}") from error


def read_corpora(
  folder: epath.Path, names: Sequence[str], written: Mapping[str, str]
) -> dict[str, Text]:
  """Returns the text of kinds that `write_corpora` has written, by name.

  Args:
    folder: The folder of the files.
    names: Names of the kinds.
    written: Result of `write_corpora`.

  Raises:
    ValueError: A file is missing, not listed, or has changed.
  """
  contents = {}
  for name, digest in written.items():
    path = folder / name
    contents[name] = path.read_bytes() if path.exists() else b""
    if hashlib.sha256(contents[name]).hexdigest() != digest:
      raise ValueError(
        f"{path} is missing or damaged: its SHA-256 must be {digest}"
      )

  def documents(name: str, side: str) -> list[bytes]:
    file = f"{name}.{side}.jsonl"
    if file not in contents:
      raise ValueError(
        f"{folder / file} has no SHA-256 in the manifest"
      )
    return [
      json.loads(line)["text"].encode() for line in contents[file].splitlines()
    ]

  return {
    name: _text(documents(name, "train"), documents(name, "validation"))
    for name in names
  }


def _text(train: Sequence[bytes], validation: Sequence[bytes]) -> Text:
  """Returns a `Text` of given documents, with their hash."""
  digest = hashlib.sha256()
  for document in (*train, *validation):
    digest.update(hashlib.sha256(document).digest())
  return Text(train, validation, digest.hexdigest())
