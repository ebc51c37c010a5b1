"""Public names of a package, imported when they are first used (PEP 562).

``import parallel`` loads no submodule, so rooms without jax start without jax.
"""

from collections.abc import Callable, Mapping, Sequence
import importlib
from typing import Any


def attach(
  package: str, names: Mapping[str, Sequence[str]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
  """Makes the public interface of a package.

  >>> __all__, __getattr__, __dir__ = attach(__name__, {"axes": ["Axis"]})

  Args:
    package: The package's ``__name__``.
    names: Public names by the submodule that defines them. None is the name of
      a submodule, which would replace it when it is imported.

  Returns:
    ``__all__``, ``__getattr__`` and ``__dir__`` of the package.
  """
  places = {name: place for place, found in names.items() for name in found}

  def get(name: str) -> Any:
    if name not in places:
      raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{package}.{places[name]}"), name)

  public = sorted(places)
  return public, get, lambda: public
