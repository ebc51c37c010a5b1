"""Programs of other projects: what they send, compared with closed forms.

`run_program.py` compiles the programs in an environment made from the package
registry, and their texts are read here. Projects that need another version of a
package have an environment of their own, the others share one.
"""

from collections.abc import Iterable, Mapping, Sequence
import concurrent.futures
import contextlib
import importlib
import json
import math
import pathlib
import sys
import tempfile
import threading
from typing import Any

from jax.sharding import AbstractMesh
import numpy as np

from caatnet.benchmarks.foreign import planted
from caatnet.benchmarks.foreign.closed_forms import PROGRAMS, Sends, programs
from caatnet.benchmarks.harness import environments, timing
from caatnet.show.render import table
from parallel.checks import known
from parallel.xla import reading
from parallel.xla.reading import Executed, Reading

_HERE = pathlib.Path(__file__).parent
_AT_ONCE = 4  # programs that are compiled; each imports for seconds
_LIBTPU = threading.Lock()
_FIRST = "cpu:8"  # target of all programs, and of those with a fault
# Platform -> package that describes its devices. The CUDA plugin of jax 0.11.2
# does not compile all programs.
_PLUGINS = {"cpu": (), "tpu": ("jax[tpu]",), "gpu": ("jax[cuda12]==0.10.2",)}


def run(config: Any) -> dict[str, Any]:
  """Reads all programs, prints tables, and returns them as plain data.

  Args:
    config: Config like configs/benchmark/foreign_programs.py.

  Raises:
    ValueError: A project is unknown, or its environment cannot be made, or a
      program does not compile for eight CPU devices. On other targets, that is
      a result.
  """
  options = config.benchmark
  folder = pathlib.Path(options.folder)
  projects = options.projects or [*PROGRAMS]
  pythons = {}
  for project in projects:
    known("config.benchmark.projects=", project, PROGRAMS)
    for target in _targets(project, options.targets):
      pythons[project, target] = environment(
        project, folder, options.python or sys.executable, target
      )
  cases = [
    (project, name, target, kind) for project, target in pythons
    for name in PROGRAMS[project]
    for kind in ("", *planted.FAULTS[project, name])
    if not kind or target == _FIRST
  ]

  def attempt(case: tuple[str, ...]) -> tuple[Reading, dict[str, Any]] | str:
    try:
      return read(pythons[case[0], case[2]], *case)
    except ValueError as error:
      if case[2] == _FIRST:
        raise
      return str(error)[-200:]

  with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
    found = dict(zip(cases, timing.progress(
      pool.map(attempt, cases), "compiling", len(cases),
    ), strict=True))
  result = _rows(found)
  _print(result)
  return result


def _rows(
  found: Mapping[tuple[str, ...], tuple[Reading, dict[str, Any]] | str]
) -> dict[str, Any]:
  """Compares what was read with closed forms and with planted faults.

  Args:
    found: (project, program, target, kind of the fault) -> result of `read`, or
      the error of a program that does not compile.
  """
  rows, faults = [], []
  for (project, name, target, kind), result in found.items():
    where = {"project": project, "program": name}
    if isinstance(result, str):
      rows.append(where | {"target": target, "error": result})
      continue
    each, facts = result
    if kind:
      sound, _ = found[project, name, target, ""]
      row = {"fault": kind, **judged(each, facts["lines"], sound)}
      faults.append(where | row)
    else:
      form = programs(math.prod(each.axes.values()))[project][name]
      rows.append(where | {
        "target": target, "axes": dict(each.axes),
        "versions": facts["versions"], **compared(each, form),
      })
  return {"rows": rows, "faults": faults}


def _targets(project: str, targets: Sequence[str]) -> list[str]:
  """Returns the targets that a project's programs can be compiled for."""
  module = _module(project)
  # Others have an older jax, or arrays on their devices.
  if getattr(module, "ANY_TARGET", False):
    return list(targets)
  return [_FIRST] if _FIRST in targets else []


def environment(
  project: str, folder: pathlib.Path, python: str, target: str = _FIRST
) -> pathlib.Path:
  """Returns the Python of a project's environment, which is made once.

  Args:
    project: A key of ``PROGRAMS``.
    folder: Folder of environments.
    python: Python that makes it.
    target: Target whose description it needs.

  Raises:
    ValueError: The packages cannot be installed, or the platform is unknown.
  """
  platform = target.partition(":")[0]
  known("config.benchmark.targets=", platform, _PLUGINS)
  name, packages = _environment(project)
  if plugin := _PLUGINS[platform]:
    name, packages = f"{name}_{platform}", [*packages, *plugin]
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
  python: pathlib.Path, project: str, name: str, target: str = _FIRST,
  kind: str = "",
) -> tuple[Reading, dict[str, Any]]:
  """Compiles a program for a target, and reads it.

  Args:
    python: Python that has the project's packages.
    project: A key of ``PROGRAMS``.
    name: Function of ``with_PROJECT.py``.
    target: Target of `parallel.xla.targets`.
    kind: Kind of the fault to plant; "" for none.

  Returns:
    The reading; and ``versions`` of the project's packages (of those with a
    required version, if any) and of jax, and ``lines`` that the fault adds
    collectives to.
  """
  # One process at a time has libtpu.
  alone = _LIBTPU if target.startswith("tpu:") else contextlib.nullcontext()
  with tempfile.TemporaryDirectory() as folder:
    with alone:
      environments.execute([
        str(python), str(_HERE / "run_program.py"), folder, project, name,
        target, *[kind] * bool(kind),
      ])
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
  return importlib.import_module(f"caatnet.benchmarks.foreign.with_{project}")


def _print(result: Mapping[str, Any]) -> None:
  table(
    "What programs of other projects send",
    ["project", "program", "mesh", "collectives", "read, bytes",
     "closed form", "not understood"],
    [
      [
        " ".join(f"{p} {v}" for p, v in row["versions"].items()),
        f"{row['program']}\n{row['target']}",
        ", ".join(f"{a} {n}" for a, n in row["axes"].items()),
        str(row["collectives"]),
        "\n".join(f"{k} {v:,}" for k, v in row["read"].items()),
        "equal" if row["equal"] else "\n".join(
          f"{k} {v:,}" for k, v in row["expected"].items()
        ),
        "\n".join(row["unknown"]) or "nothing",
      ]
      for row in result["rows"] if "error" not in row
    ],
  )
  for row in result["rows"]:
    if "error" in row:
      print(f"{row['project']} {row['program']}, {row['target']}: no program: "
            f"{row['error']}")
  table(
    "Planted faults: the source line that the reading names",
    ["project", "program", "fault", "lines of its collectives", "named"],
    [
      [row["project"], row["program"], row["fault"], "\n".join(row["lines"]),
       "\n".join(row["blamed"])]
      for row in result["faults"]
    ],
  )
