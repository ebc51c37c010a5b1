"""Names of a server's models, and the weights that answer a request.

A server of one model has one name. A server of experts has one name per expert,
and ``auto`` for the choice of its router. A request is answered by the revision
of an expert that was current when it arrived: the revision stays readable until
its last request has ended, even if the expert is replaced or removed.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import threading
from typing import Any, Protocol

from caatnet.serving.engine.expert_weights import StoredExpert
from caatnet.serving.experts import WHOLE_FORM, Entry, Library
from caatnet.serving.router import Router
from caatnet.serving.server.errors import ApiError

AUTO = "auto"
# Number of open files above which those without requests are closed.
_MAX_FILES = 512


@dataclasses.dataclass(frozen=True)
class OpenedModel:
  """Model that answers a request.

  Attributes:
    name: Name of the model in the response.
    key: Key of the expert, "NAME@REVISION"; "" for a server of one model.
  """

  name: str
  key: str = ""


class Models(Protocol):
  """Models of a server; its methods are called in asyncio's event loop.

  Attributes:
    title: Title of the server's web page.
    pinned: Keys of the experts that are never evicted.
  """

  title: str
  pinned: frozenset[str]

  @property
  def names(self) -> tuple[str, ...]:
    """Model names that a request may contain."""
    ...

  def open(self, name: str, text: Callable[[], str]) -> OpenedModel:
    """Returns the model for a request; `close` must be called at its end.

    Args:
      name: One of `names`.
      text: Returns the text of the prompt.

    Raises:
      ApiError: The model is not available.
    """
    ...

  def close(self, opened: OpenedModel) -> None:
    """Ends a request's use of its model."""
    ...

  def retire(self) -> Sequence[str]:
    """Returns keys of experts whose weights are not needed any more."""
    ...

  def details(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the additional fields of a model's entry in /v1/models.

    Args:
      name: One of `names`.
      state: Snapshot of the server (`caatnet.serving.server.snapshot`).
    """
    ...


# Adds an expert from a path of this machine, or replaces one. Arguments:
# library, name, whether to replace, path, kind of text, description.
ExpertChanger = Callable[[Library, str, bool, str, str, str], None]


def refuse_change(*change: object) -> None:
  """Raises ValueError: the server has no `ExpertChanger`."""
  del change
  raise ValueError("this server cannot add or replace experts")


class OneModel:
  """The only model of a server."""

  pinned: frozenset[str] = frozenset()

  def __init__(self, name: str) -> None:
    """Sets the name of the model."""
    self.names, self.title = (name,), name

  def open(self, name: str, text: Callable[[], str]) -> OpenedModel:
    """Returns the model."""
    del text
    return OpenedModel(name)

  def close(self, opened: OpenedModel) -> None:
    """Ends a request's use of its model."""

  def retire(self) -> Sequence[str]:
    """Returns no keys: the weights stay."""
    return ()

  def details(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns no further fields."""
    del name, state
    return {}


@dataclasses.dataclass
class _Revision:
  """Revision of an expert that is in the library's list or answers requests.

  Attributes:
    read: Reads the weights from an open file; None after a failure, so that the
      next request opens the file again, which may have been repaired.
    num_open: Number of open requests.
  """

  read: Callable[[], StoredExpert] | None = None
  num_open: int = 0


class Catalog:
  """Experts of a library, by name and by key.

  Attributes:
    library: Directory of the experts.
    router: Selects the expert of a prompt; None without a router.
    title: Title of the server's web page.
    change: Adds or replaces an expert.
  """

  def __init__(
    self, library: Library, router: Router | None, pinned: Sequence[str] = (),
    change: ExpertChanger = refuse_change,
  ) -> None:
    """Starts without open requests.

    Args:
      library: Directory of the experts.
      router: Selects the expert of a prompt; None without a router.
      pinned: Names of experts that are never evicted.
      change: Adds or replaces an expert.
    """
    self.library, self.router, self.change = library, router, change
    self.title, self._pinned = library.path.name, tuple(pinned)
    # Also read by the thread that loads weights.
    self._revisions: dict[str, _Revision] = {}
    self._lock = threading.Lock()

  @property
  def names(self) -> tuple[str, ...]:
    """Experts that a request may name, and ``auto`` if there is a router."""
    self.library.refresh()
    return ((AUTO,) if self.router else ()) + self.library.names

  @property
  def entries(self) -> tuple[Entry, ...]:
    """Experts of the library, in the order of its list."""
    self.library.refresh()
    return self.library.entries

  def open(self, name: str, text: Callable[[], str]) -> OpenedModel:
    """Returns the current revision of an expert; see `Models`."""
    try:
      if name == AUTO:
        assert self.router is not None
        name = self.router.route(text().encode(), self.entries)
      key = self.key(name)
    except ValueError as error:
      raise ApiError(500, str(error), "expert_failed", "model") from error
    with self._lock:
      self._revisions[key].num_open += 1
    return OpenedModel(name, key)

  def key(self, name: str) -> str:
    """Returns the key of an expert's current revision, which `read` accepts.

    Raises:
      ValueError: There is no such expert, or its file is missing or damaged.
    """
    self.library.refresh()
    key = key_of(self.library.entry(name))
    revision = self._revisions.get(key)
    if revision is None or revision.read is None:
      key, read = self._reader(name)
      with self._lock:
        self._revisions.setdefault(key, _Revision()).read = read
    return key

  def _reader(self, name: str) -> tuple[str, Callable[[], StoredExpert]]:
    """Returns an expert's current key, and a function that reads its weights.

    The files stay open until the function is deleted.
    """
    ours = self.library.read(name)
    key = f"{name}@{ours.revision}"
    if ours.form == WHOLE_FORM:
      return key, lambda: StoredExpert(WHOLE_FORM, ours.load())
    base = self.library.read(ours.base)
    return key, lambda: StoredExpert(
      ours.form, ours.load(), f"{ours.base}@{base.revision}", base.load
    )

  def close(self, opened: OpenedModel) -> None:
    """Ends a request's use of its model."""
    with self._lock:
      self._revisions[opened.key].num_open -= 1

  @property
  def pinned(self) -> frozenset[str]:
    """Keys of the experts that are never evicted."""
    return frozenset(
      key_of(entry) for entry in self.library.entries
      if entry.name in self._pinned
    )

  def retire(self) -> list[str]:
    """Forgets revisions without requests that were replaced or removed.

    Returns:
      Keys of the forgotten revisions.
    """
    current = set(map(key_of, self.library.entries))
    with self._lock:
      idle = [k for k, found in self._revisions.items() if not found.num_open]
      stale = [key for key in idle if key not in current]
      full = len(self._revisions) > _MAX_FILES
      for key in idle if full else stale:
        del self._revisions[key]
    return stale

  def details(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an expert's kind, description, origin, revision and tier.

    The tier is "device", "loading" (to the device), "host" or "file".
    """
    if name == AUTO:
      return {"description": "the expert that the router selects"}
    entry, experts = self.library.entry(name), state["experts"]
    key, tier = key_of(entry), "file"
    if key in experts["host"]:
      tier = "host"
    for slot in experts["slots"]:
      if slot["expert"] == key:
        tier = "device" if slot["state"] == "ready" else "loading"
    return {
      "kind": entry.kind, "description": entry.description,
      "origin": entry.origin, "revision": entry.revision, "tier": tier,
    }

  def read(self, key: str) -> StoredExpert:
    """Reads the weights of a revision; called by the thread that loads them.

    Raises:
      ValueError: The revision was removed, or its file is damaged.
    """
    with self._lock:
      revision = self._revisions.get(key)
      read = revision and revision.read
    if not read:
      raise ValueError("the expert was removed, or its last load failed")
    try:
      return read()
    except Exception:
      with self._lock:
        revision.read = None
      raise


def key_of(entry: Entry) -> str:
  """Returns the key of an expert's revision: "NAME@REVISION"."""
  return f"{entry.name}@{entry.revision}"
