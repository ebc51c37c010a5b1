"""Library of experts: a directory of files whose tensors have equal shapes.

An expert is one safetensors file. Its tensors are the parameters of a model as
training stores them, named by their paths joined by "/" (form "whole"), or a
difference from another expert of the library, its base
(`caatnet.serving.differences`). ``experts.json`` lists the experts with the
SHA-256 hash of each file. The first 12 hex digits of the hash are the expert's
revision. All experts have the parameter names and shapes of the first one.

A file is never changed: replacing an expert writes a file of another name and
then replaces ``experts.json``, so a reader gets the old or the new weights,
even if the writer is killed. A file that was damaged, truncated or overwritten
is rejected when it is read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import fcntl
import hashlib
import os
import pathlib
import re
import secrets
from typing import Any, Literal, NamedTuple

import numpy as np

from caatnet.serving import weights_file
from caatnet.serving.weights_file import Header, WeightsFile
from parallel.base import atomic, schema
from parallel.base.checks import known

INDEX = "experts.json"
WHOLE_FORM = "whole"
FORMS = (WHOLE_FORM, "low_rank", "int8", "int4")
ORIGINS = ("base", "fine-tuned", "checkpoint", "seed")
_MAX_BLOCK_SIZE = 128  # maximum number of elements of a row that share a scale

_ParameterType = tuple[np.dtype, tuple[int, ...]]
# Names of experts are model names of a server, whose name for the router's
# choice is "auto"; "@" separates name and revision.
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Entry(schema.Schema):
  """Expert in the list of a library.

  Attributes:
    name: Name of the expert.
    file: Name of its file within the library's directory.
    sha256: Hash of the file, in hex digits.
    kind: Kind of text it was trained for; "" for none.
    description: Description for users.
    origin: Origin of the weights, one of `ORIGINS`.
  """

  name: str
  # A name with a directory could be outside of the library.
  file: str = schema.Field(pattern=r"^[^/\\\x00]+$")
  sha256: str
  kind: str
  description: str
  origin: Literal[ORIGINS]

  @property
  def revision(self) -> str:
    """Revision of the weights: the first 12 hex digits of the hash."""
    return self.sha256[:12]


class _ExpertList(schema.Schema):
  """Content of experts.json."""

  experts: tuple[Entry, ...]


class Reader(NamedTuple):
  """Access to the weights of one revision of an expert.

  Attributes:
    revision: First 12 hex digits of the hash of its file.
    load: Reads the arrays from the open file.
    form: One of `FORMS`.
    base: Name of the base of a difference; "" for a whole expert.
  """

  revision: str
  load: Callable[[], dict[str, Any]]
  form: str
  base: str


class _AddOptions(NamedTuple):
  """Options of `Library.add`."""

  kind: str
  description: str
  origin: str
  form: str = WHOLE_FORM
  base: str = ""
  tokenizer: str = ""


class Library:
  """Experts of a directory; safe to use while other processes change it.

  Example:
    >>> import tempfile
    >>> library = Library.create(tempfile.mkdtemp() + "/experts")
    >>> tree = {"blocks": {"w": np.ones((2, 3), np.float32)}}
    >>> _ = library.add("base", tree, origin="base")
    >>> revision, load, *_ = library.read("base")
    >>> len(revision), load()["blocks"]["w"].shape
    (12, (2, 3))
  """

  def __init__(self, path: str | os.PathLike[str]) -> None:
    """Opens a library.

    Args:
      path: The directory.

    Raises:
      ValueError: The directory has no list of experts, or it is damaged.
    """
    self.path = pathlib.Path(path)
    # Fingerprint of the list's file, and entries by name; replaced together,
    # since threads share a library.
    self._state: tuple[Any, dict[str, Entry]] = None, {}
    self._verified: set[Any] = set()
    self.refresh()

  @classmethod
  def create(cls, path: str | os.PathLike[str]) -> "Library":
    """Opens a library; creates an empty one if it does not exist."""
    path = pathlib.Path(path)
    path.mkdir(parents=True, exist_ok=True)
    with _exclusive_lock(path):
      if not (path / INDEX).exists():
        weights_file.replace(path / INDEX, b'{"experts": []}\n')
    return cls(path)

  @property
  def _entries(self) -> dict[str, Entry]:
    return self._state[1]

  @property
  def names(self) -> tuple[str, ...]:
    """Names of the experts, in the order of the list."""
    return tuple(self._entries)

  @property
  def entries(self) -> tuple[Entry, ...]:
    """The experts, in the order of the list."""
    return tuple(self._entries.values())

  def refresh(self) -> bool:
    """Reads the list again if it has changed; returns whether it has."""
    index = self.path / INDEX
    try:
      stamp = weights_file.stat_fingerprint(os.stat(index))
      if stamp == self._state[0]:
        return False
      text = index.read_bytes()
    except OSError as error:
      raise ValueError(
        f"{index} cannot be read: {error.strerror}"
      ) from error
    try:
      entries = schema.parse(_ExpertList, text).experts
    except ValueError as error:
      raise ValueError(f"{index} is damaged: {error}") from error
    self._state = stamp, {entry.name: entry for entry in entries}
    return True

  def entry(self, name: str) -> Entry:
    """Returns an expert's entry.

    Raises:
      ValueError: There is no such expert.
    """
    known("expert ", name, self._entries)
    return self._entries[name]

  def read(self, name: str) -> Reader:
    """Returns access to the weights of an expert's current revision.

    The file is opened here and closed when `Reader.load` is deleted, so `load`
    returns the weights of this revision even if the expert is replaced or
    removed in between. `load` may be called several times, in any thread.

    Args:
      name: Name of the expert.

    Returns:
      A `Reader`. Its ``load`` returns a nested dict of newly allocated numpy
      arrays: parameters, or a difference from the base.

    Raises:
      ValueError: There is no such expert, its file is missing, or its
        parameters are not those of the library. ``load`` raises ValueError if
        the file is truncated, damaged or changed.
    """
    self.refresh()
    while True:
      entry = self.entry(name)
      try:
        file = WeightsFile(self.path / entry.file)
        break
      except ValueError:
        if not self.refresh():  # not replaced between list and file
          raise
    header = file.header()
    self._check(entry, file, header)
    form = _form(header)
    return Reader(
      entry.revision, lambda: _nested(self._load(entry, file, header)), form,
      "" if form == WHOLE_FORM else self._base(entry, header).name,
    )

  def form(self, name: str) -> str:
    """Returns an expert's form, one of `FORMS`."""
    return _form(self.header(name))

  def header(self, name: str) -> Header:
    """Returns the header of an expert's file.

    Raises:
      ValueError: The file is missing or damaged.
    """
    return WeightsFile(self.path / self.entry(name).file).header()

  def size_bytes(self, name: str) -> int:
    """Returns the size of an expert's file in bytes."""
    return self.header(name).size_bytes

  def add(
    self,
    name: str,
    tree: Mapping[str, Any],
    *,
    kind: str = "",
    description: str = "",
    origin: str = "checkpoint",
    form: str = WHOLE_FORM,
    base: str = "",
    tokenizer: str = "",
  ) -> str:
    """Adds an expert.

    Args:
      name: Name of the expert.
      tree: Nested dict of arrays: parameters, or a difference.
      kind: Kind of text it was trained for.
      description: Description for users.
      origin: One of `ORIGINS`.
      form: One of `FORMS`.
      base: Name of the base, for a difference.
      tokenizer: Identity of the tokenizer; "" for bytes.

    Returns:
      The revision.

    Raises:
      ValueError: The name is taken or not allowed, or the parameters or the
        tokenizer are not those of the library.
    """
    about = _AddOptions(kind, description, origin, form, base, tokenizer)
    return self._write(name, tree, about, exists=False)

  def replace(self, name: str, tree: Mapping[str, Any], **options: str) -> str:
    """Replaces an expert's weights, with the options and errors of `add`.

    Options that are not given keep their values, except for form, base and
    tokenizer.
    """
    self.refresh()
    old = self.entry(name)
    kept = {key: getattr(old, key) for key in ("kind", "description", "origin")}
    return self._write(name, tree, _AddOptions(**(kept | options)), exists=True)

  def remove(self, name: str) -> None:
    """Removes an expert.

    Raises:
      ValueError: There is no such expert, or it is the base of another one.
    """
    with _exclusive_lock(self.path):
      self.refresh()
      self._check_unused(self.entry(name))
      self._store(name, [x for x in self.entries if x.name != name])

  def _write(
    self, name: str, tree: Mapping[str, Any], about: _AddOptions, exists: bool
  ) -> str:
    """Writes an expert's file and lists it; returns the revision.

    Args:
      name: Name of the expert.
      tree: Nested dict of arrays.
      about: Other arguments of `add`.
      exists: Whether an expert of this name must exist, or must not.
    """
    if not _NAME_PATTERN.fullmatch(name) or name == "auto":
      raise ValueError(
        f"expert {name!r} must consist of letters, digits, '.', '_' and '-', "
        "and not be 'auto'"
      )
    known("origin=", about.origin, ORIGINS)
    known("form=", about.form, FORMS)
    with _exclusive_lock(self.path):
      self.refresh()
      if (name in self._entries) != exists:
        raise ValueError(
          f"expert {name!r} {'does not exist' if exists else 'exists'}"
        )
      metadata = {"form": about.form, "tokenizer": about.tokenizer}
      if about.form != WHOLE_FORM:
        if about.base == name or self.form(about.base) != WHOLE_FORM:
          raise ValueError(
            f"base {about.base!r} must be another expert, stored whole"
          )
        metadata["base"] = self.entry(about.base).sha256
      partial = self.path / f".{name}.{secrets.token_hex(4)}.partial"
      try:
        sha256 = weights_file.write(partial, _flat(tree), metadata)
        entry = Entry(
          name=name, file=f"{name}-{sha256[:12]}.safetensors", sha256=sha256,
          kind=about.kind, description=about.description, origin=about.origin,
        )
        opened = WeightsFile(partial)
        self._check(entry, opened, opened.header())
        if exists and sha256 != self._entries[name].sha256:
          self._check_unused(self._entries[name])
        os.replace(partial, self.path / entry.file)
      finally:
        partial.unlink(missing_ok=True)
      self._store(name, (self._entries | {name: entry}).values())
    return entry.revision

  def _store(self, name: str, entries: Iterable[Entry]) -> None:
    """Replaces the list, and deletes an expert's files that are not listed.

    These are the file of its previous revision, and files of killed writers.
    """
    made = _ExpertList(experts=tuple(entries))
    text = made.model_dump_json(indent=2)
    weights_file.replace(self.path / INDEX, text.encode() + b"\n")
    listed = {entry.file for entry in made.experts}
    own = re.compile(
      rf"{re.escape(name)}-[0-9a-f]{{12}}\.safetensors"
      rf"|\.{re.escape(name)}\.[0-9a-f]{{8}}\.partial"
    )
    for path in self.path.iterdir():
      if own.fullmatch(path.name) and path.name not in listed:
        path.unlink(missing_ok=True)
    atomic.remove_unfinished(self.path / INDEX)
    self.refresh()

  def _check_unused(self, entry: Entry) -> None:
    """Raises ValueError if an expert is the base of others."""
    for other in self.entries:
      # An expert whose file is damaged can be replaced and removed.
      with contextlib.suppress(ValueError):
        based = self.header(other.name).metadata.get("base")
        if other != entry and based == entry.sha256:
          break
    else:
      return
    raise ValueError(
      f"expert {entry.name!r} is the base of {other.name!r}, which is stored "
      "as a difference"
    )

  def _base(self, entry: Entry, header: Header) -> Entry:
    """Returns the base of a difference; raises ValueError if it is missing."""
    for other in self.entries:
      if other.sha256 == header.metadata.get("base"):
        return other
    raise ValueError(
      f"expert {entry.name!r} is a difference from the base "
      f"{header.metadata.get('base', '')[:12]!r}, which is not in {self.path}"
    )

  def _check(self, entry: Entry, file: WeightsFile, header: Header) -> None:
    """Raises ValueError for an invalid form, base, tokenizer or parameter."""
    known(f"{file.path}: form=", _form(header), FORMS)
    if _form(header) != WHOLE_FORM:
      self._base(entry, header)
    reference, first = self._first_readable_whole() or (entry.name, header)
    if _form(first) != WHOLE_FORM:
      raise ValueError(
        f"expert {reference!r} is stored as a difference, but the first expert "
        "of a library must be whole"
      )
    theirs = header.metadata.get("tokenizer", "")
    ours = first.metadata.get("tokenizer", "")
    if theirs != ours:
      raise ValueError(
        f"expert {entry.name!r} has the tokenizer {theirs[:16] or 'bytes'!r}, "
        f"the library {ours[:16] or 'bytes'!r}"
      )
    expected = {name: x[:2] for name, x in first.tensors.items()}
    found = _parameters(header, expected)
    for name in sorted(expected.keys() | found.keys()):
      if found.get(name) != expected.get(name):
        raise ValueError(
          f"expert {entry.name!r} must have the parameters of {reference!r}: "
          f"{name!r} is {_format_parameter(found.get(name))}, but must be "
          f"{_format_parameter(expected.get(name))}"
        )

  def _first_readable_whole(self) -> tuple[str, Header] | None:
    """Returns the first whole expert whose file can be read, or None.

    Not always the first expert: if its file is damaged, others stay usable.
    """
    for name in self.names:
      with contextlib.suppress(ValueError):
        header = self.header(name)
        if _form(header) == WHOLE_FORM:
          return name, header
    return None

  def _load(
    self, entry: Entry, file: WeightsFile, header: Header
  ) -> dict[str, np.ndarray]:
    """Returns all tensors of a file; the first read checks the file's hash."""
    data, stamp = file.content(header.size_bytes)
    if (entry.sha256, stamp) not in self._verified:
      sha256 = hashlib.sha256(data).hexdigest()
      if sha256 != entry.sha256:
        raise ValueError(
          f"{file.path} is damaged: its SHA-256 hash begins with "
          f"{sha256[:12]}, {INDEX} has {entry.revision}"
        )
      self._verified.add((entry.sha256, stamp))
    return header.views(data)


def scale_block_size(width: int) -> int:
  """Returns how many elements share a scale in "int8" and "int4"; it is even.

  Args:
    width: Length of a matrix's rows.
  """
  return min(_MAX_BLOCK_SIZE, width + width % 2)


def _form(header: Header) -> str:
  """Returns the form of an expert's file."""
  return header.metadata.get("form", WHOLE_FORM)


def _parameters(
  header: Header, expected: Mapping[str, _ParameterType]
) -> dict[str, _ParameterType | None]:
  """Returns dtype and shape of a file's parameters; None for damaged ones.

  Args:
    header: Header of the file.
    expected: Dtypes and shapes of the library's parameters. A difference has
      these dtypes, and rows of these lengths without padding.
  """
  if _form(header) == WHOLE_FORM:
    return {name: x[:2] for name, x in header.tensors.items()}
  bits = 4 if _form(header) == "int4" else 8
  shapes = {name: shape for name, (_, shape, _) in header.tensors.items()}
  found: dict[str, _ParameterType | None] = {}
  for name, shape in shapes.items():
    path, _, part = name.partition(":")
    dtype, want = expected.get(path, (np.dtype(np.float32), ()))
    if not part:
      found[path] = dtype, shape
    elif part == "left":
      right = shapes.get(f"{path}:right", ())
      fits = len(shape) > 1 and (*shape[:-2], shape[-1]) == right[:-1]
      found[path] = (dtype, (*shape[:-1], right[-1])) if fits else None
    elif part == "codes":
      size = scale_block_size(want[-1]) if want else 1
      blocks = -(-want[-1] // size) if want else 0
      fits = (
        shape == (*want[:-1], blocks * size * bits // 8)
        and shapes.get(f"{path}:scales") == (*want[:-1], blocks)
      )
      found[path] = (dtype, want) if fits else None
    elif part not in ("right", "scales"):
      found[name] = dtype, shape
  return found


def _format_parameter(parameter: _ParameterType | None) -> str:
  """Formats a parameter: "float32[2, 3]"."""
  if parameter is None:
    return "missing or damaged"
  return f"{parameter[0]}{list(parameter[1])}"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
  """Returns the arrays of a nested dict by their paths, joined by "/"."""
  flat: dict[str, np.ndarray] = {}
  for key, value in sorted(tree.items()):
    if isinstance(value, Mapping):
      flat |= _flat(value, f"{prefix}{key}/")
    else:
      flat[prefix + key] = np.asarray(value)
  return flat


def _nested(flat: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """Inverts `_flat`."""
  tree: dict[str, Any] = {}
  for path, value in flat.items():
    *keys, last = path.split("/")
    node = tree
    for key in keys:
      node = node.setdefault(key, {})
    node[last] = value
  return tree


@contextlib.contextmanager
def _exclusive_lock(path: pathlib.Path) -> Iterator[None]:
  """Context manager that excludes other writers of a library."""
  with open(path / ".lock", "a", encoding="utf-8") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield
