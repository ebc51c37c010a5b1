"""Programs of other projects: what they send and compute.

What they send is compared with closed forms, and what they compute on devices
with one device. `run_program.py` compiles the programs in an environment made
from the package registry, and their texts are read here. `equal_program.py`
runs them there. Projects that need another version of a package have an
environment of their own, the others share one.
"""

from collections.abc import Iterable
import importlib
import json
import pathlib
import tempfile
from typing import Any

from jax.sharding import AbstractMesh
import numpy as np

from caatnet.benchmarks.harness import environments
from parallel.ledger import reading
from parallel.ledger.reading import Executed, Reading
from tests.foreign.closed_forms import PROGRAMS, Sends

_HERE = pathlib.Path(__file__).parent


def environment(
  project: str, folder: pathlib.Path, python: str = ""
) -> pathlib.Path:
  """Returns the Python of a project's environment, which is made once.

  Args:
    project: A key of ``PROGRAMS``.
    folder: Folder of environments.
    python: Python that makes it; "" for this one.

  Raises:
    ValueError: The packages cannot be installed.
  """
  name, packages = _environment(project)
  return environments.create(folder / name, packages, python)


def _environment(project: str) -> tuple[str, list[str]]:
  """Returns the name of a project's environment, and its packages."""
  packages = {p: _module(p).PACKAGES for p in PROGRAMS}
  if _pinned(packages[project]):
    return project, list(packages[project])
  shared = (p for own in packages.values() if not _pinned(own) for p in own)
  return "shared", sorted(set(shared))


def _pinned(packages: Iterable[str]) -> bool:
  return any("==" in p for p in packages)


def read(
  python: pathlib.Path, project: str, name: str, kind: str = "",
  devices: int = 8,
) -> tuple[Reading, dict[str, Any]]:
  """Compiles a program for virtual CPU devices, and reads it.

  Args:
    python: Python that has the project's packages.
    project: A key of ``PROGRAMS``.
    name: Function of ``with_PROJECT.py``.
    kind: Kind of the fault to plant; "" for none.
    devices: Number of devices.

  Returns:
    The reading; and ``versions`` of the project's packages (of those with a
    required version, if any) and of jax, and ``lines`` that the fault adds
    collectives to.
  """
  with tempfile.TemporaryDirectory() as folder:
    environments.execute([
      str(python), str(_HERE / "run_program.py"), folder, project, name,
      str(devices), *[kind] * bool(kind),
    ], {"XLA_FLAGS": ""})  # those of the tests are of another jax
    # Programs of older versions of jax do not name their mesh.
    axes = getattr(_module(project), "MESH", None)
    mesh = axes and AbstractMesh(tuple(axes.values()), tuple(axes))
    (found,) = reading.read_all(folder, mesh).values()
    facts = json.loads(pathlib.Path(folder, "facts.json").read_text())
  packages = _module(project).PACKAGES
  wanted = [
    p.partition("==")[0] for p in packages if "==" in p or not _pinned(packages)
  ]
  facts["versions"] = {
    p: facts["versions"][p] for p in dict.fromkeys([*wanted, "jax"])
  }
  return found, facts


def equal(
  python: pathlib.Path, project: str, name: str, dtype: str = "float32",
  devices: int = 8,
) -> dict[str, Any]:
  """Compares a program on several devices with the same program on one.

  Args:
    python: Python that has the project's packages.
    project: A key of ``PROGRAMS``.
    name: Function of ``with_PROJECT.py``.
    dtype: Dtype of floating arguments.
    devices: Number of devices.

  Returns:
    The line that `equal_program.py` prints.
  """
  text = environments.execute([
    str(python), str(_HERE / "equal_program.py"), project, name, str(devices),
    dtype,
  ], {"XLA_FLAGS": ""})
  return json.loads(text.splitlines()[-1])


def compared(found: Reading, expected: Sends) -> dict[str, Any]:
  """Compares a reading with a closed form.

  Returns:
    ``read`` and ``expected``: "axes kind" -> bytes; ``unknown``: what may
    communicate and is not counted; ``equal``: whether all collectives are those
    of the closed form.
  """
  sent = sums(found)
  return {
    "collectives": len(found.executed),
    "read": {" ".join(key): size for key, size in sent.items()},
    "expected": {" ".join(key): size for key, size in expected.items()},
    "equal": sent == expected,
    "unknown": [*map(str, found.unknown)],
  }


def sums(found: Reading) -> Sends:
  """Returns the bytes of a reading in the dtypes that were requested."""
  sent: Sends = {}
  for e in found.executed:
    key: tuple[str, ...] = e.entry.over, e.entry.kind
    size = e.entry.bytes
    if e.requested:
      widths = [np.dtype(d).itemsize for d in (e.requested, e.entry.dtype)]
      size = size * widths[0] // widths[1]
    if e.entry.count is None:
      key += ("unknown",)
    sent[key] = sent.get(key, 0) + size * (e.entry.count or 1)
  return sent


def judged(
  found: Reading, lines: Iterable[str], sound: Reading
) -> dict[str, Any]:
  """Compares the lines that a reading blames with those of a planted fault.

  Args:
    found: Reading of the program with the fault.
    lines: FILE:LINE of each line to name.
    sound: Reading of the program without it.
  """
  wanted = sorted(map(_short, lines))
  blamed = sorted({_short(e.source) for e in added(found, sound)})
  return {"lines": wanted, "blamed": blamed, "found": blamed == wanted}


def _short(line: str) -> str:
  """Returns a source line without the folder of packages, or of this file."""
  return line.removeprefix(f"{_HERE}/").rpartition("/site-packages/")[2]


def added(found: Reading, sound: Reading) -> list[Executed]:
  """Returns the collectives that a reading has in addition to another one."""
  before = [_facts(e) for e in sound.executed]
  more = []
  for e in found.executed:
    if _facts(e) in before:
      before.remove(_facts(e))
    else:
      more.append(e)
  return more


def _facts(e: Executed) -> tuple[Any, ...]:
  entry = e.entry
  return (
    entry.over, entry.kind, e.requested, entry.shape, entry.count,
    entry.rematted,
  )


def _module(project: str) -> Any:
  return importlib.import_module(f"tests.foreign.with_{project}")
