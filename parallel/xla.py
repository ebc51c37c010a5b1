"""Deprecated alias of `parallel.ledger`, for programs that still import it.

Importing it or one of its modules warns that it "is now parallel.ledger".
"""

import contextlib
import importlib
import pkgutil
import sys
import warnings

from parallel import ledger

warnings.warn(
  "parallel.xla is now parallel.ledger", FutureWarning, stacklevel=2
)
# Both names refer to the same modules: a copy would define the classes again.
for _found in pkgutil.iter_modules(ledger.__path__):
  with contextlib.suppress(ModuleNotFoundError):  # pytest is not installed
    sys.modules[f"{__name__}.{_found.name}"] = importlib.import_module(
      f"{ledger.__name__}.{_found.name}"
    )
sys.modules[__name__] = ledger
