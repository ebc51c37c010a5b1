"""Programs in a folder that XLA has dumped by `--xla_dump_to`."""

import pathlib
import re
from typing import NamedTuple

# NAME.gpu_after_optimizations.txt; the platform may be sm_9.0_gpu or absent.
_OPTIMIZED = re.compile(
  r"(module_(\d+)\..+?)\.(?:[\w.]+_)?after_optimizations\.txt"
)
_UNOPTIMIZED = ".before_optimizations.txt"


class Dump(NamedTuple):
  """Program before and after XLA's optimizations.

  Attributes:
    name: Name, such as "module_0001.jit_step".
    optimized: HLO text of the optimized program.
    unoptimized: HLO text before optimizations; None if it was not dumped.
  """

  name: str
  optimized: str
  unoptimized: str | None


def read_dumps(folder: pathlib.Path) -> list[Dump]:
  """Returns the programs of a folder, in the order of compilation.

  Raises:
    ValueError: The folder has no optimized program as text, two programs of one
      name (from two processes), or a file that is not UTF-8 text.
  """
  names = {path.name for path in folder.iterdir()}
  # Both a program's and a platform's name may contain dots, so the end of the
  # program's name is taken from its file before optimizations.
  stems = sorted(
    (n.removesuffix(_UNOPTIMIZED) for n in names if n.endswith(_UNOPTIMIZED)),
    key=len, reverse=True,
  )
  found: dict[str, tuple[int, Dump]] = {}
  for file in sorted(names):
    match = _OPTIMIZED.fullmatch(file)
    if not match:
      continue
    stem = next((s for s in stems if file.startswith(f"{s}.")), None)
    name = stem or match[1]
    if name in found:
      raise ValueError(
        f"{folder} has two programs named {name}; use one dump folder per "
        "process"
      )
    found[name] = int(match[2]), Dump(
      name, _text(folder / file),
      _text(folder / f"{stem}{_UNOPTIMIZED}") if stem else None,
    )
  if not found:
    raise ValueError(
      f"{folder} has no file *after_optimizations.txt; dump a program with "
      'XLA_FLAGS="--xla_dump_to=FOLDER --xla_dump_hlo_as_text"'
    )
  return [dump for _, dump in sorted(found.values(), key=lambda x: x[0])]


def _text(path: pathlib.Path) -> str:
  try:
    return path.read_text()
  except UnicodeDecodeError as error:
    raise ValueError(f"{path}: {error}") from error
