"""Public names of a package, imported when they are first used (PEP 562).

``import parallel`` loads no submodule, so that subpackages that do not use JAX
can be imported without loading JAX. If a package is missing, the error names
the extra (as in ``pip install caatnet[extra]``) that installs the package.
"""

from collections.abc import Callable, Mapping, Sequence
import importlib
from typing import Any

# Import names of the packages in the extra "training" of setup.cfg.
TRAINING_PACKAGES = (
  "flax", "grain", "optax", "orbax", "safetensors", "tensorboardX",
  "tokenizers",
)


def attach(
  package: str, names: Mapping[str, Sequence[str]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
  """Builds the public interface of a package.

  Args:
    package: The package's ``__name__``.
    names: Submodule -> public names that it defines. No public name may equal
      the name of a submodule: importing the submodule would replace it.

  Returns:
    ``__all__``, ``__getattr__`` and ``__dir__`` of the package.

  Example:
    >>> public, get, _ = attach("parallel", {"axes": ["Axis", "make_mesh"]})
    >>> public, get("Axis").__module__
    (['Axis', 'make_mesh'], 'parallel.axes')
  """
  # public name -> submodule
  places = {name: place for place, found in names.items() for name in found}

  def get(name: str) -> Any:
    if name not in places:
      raise AttributeError(f"module {package!r} has no attribute {name!r}")
    try:
      module = importlib.import_module(f"{package}.{places[name]}")
    except ModuleNotFoundError as error:
      if (needs := install_hint(error)) is None:
        raise
      raise ModuleNotFoundError(
        f"{package}.{name} {needs}", name=error.name
      ) from error
    return getattr(module, name)

  public = sorted(places)
  return public, get, lambda: public


def install_hint(error: ModuleNotFoundError) -> str | None:
  """Names the command that installs a package whose import has failed.

  Args:
    error: Error of the failed import.

  Returns:
    "needs PACKAGE: COMMAND"; None if the extra "training" lacks the package.

  Example:
    >>> install_hint(ModuleNotFoundError(name="orbax.checkpoint"))
    "needs orbax: pip install 'caatnet[training]'"
  """
  package = (error.name or "").partition(".")[0]
  if package not in TRAINING_PACKAGES:
    return None
  return f"needs {package}: pip install 'caatnet[training]'"
