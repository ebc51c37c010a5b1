"""Former name of `parallel.ledger`, which programs of users may import.

An import of it or of its modules warns that it "is now parallel.ledger".
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
# The same modules under both names: a second copy would define other classes.
for _found in pkgutil.iter_modules(ledger.__path__):
  with contextlib.suppress(ModuleNotFoundError):  # a plugin without pytest
    sys.modules[f"{__name__}.{_found.name}"] = importlib.import_module(
      f"{ledger.__name__}.{_found.name}"
    )
sys.modules[__name__] = ledger
