"""Programs in a folder that XLA has dumped by `--xla_dump_to`."""

import pathlib
import re
from typing import NamedTuple

# module_0001.jit_step.gpu_after_optimizations.txt, also with sm_9.0_ or none.
_OPTIMIZED = re.compile(
  r"(module_\d+\..+?)\.(?:[\w.]+_)?after_optimizations\.txt"
)


class Dump(NamedTuple):
  """Program before and after XLA's optimizations.

  Attributes:
    name: Name, such as "module_0001.jit_step".
    optimized: HLO text of the optimized program.
    unoptimized: HLO text before; None if it was not dumped.
  """

  name: str
  optimized: str
  unoptimized: str | None


def dumps(folder: pathlib.Path) -> list[Dump]:
  """Returns the programs of a folder, in the order of compilation.

  Raises:
    ValueError: The folder has no optimized program as text.
  """
  found = []
  for path in sorted(folder.iterdir()):
    if match := _OPTIMIZED.fullmatch(path.name):
      before = folder / f"{match[1]}.before_optimizations.txt"
      found.append(Dump(
        match[1], path.read_text(),
        before.read_text() if before.exists() else None,
      ))
  if not found:
    raise ValueError(
      f"{folder}: no file *after_optimizations.txt; dump a program by "
      'XLA_FLAGS="--xla_dump_to=FOLDER --xla_dump_hlo_as_text"'
    )
  return found
