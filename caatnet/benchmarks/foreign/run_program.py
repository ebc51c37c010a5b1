r"""Compiles a program in an environment of its own, as `--xla_dump_to` would.

  PYTHON caatnet/benchmarks/foreign/run_program.py FOLDER PROJECT FUNCTION \
    TARGET [KIND]

It needs jax and the project only. FUNCTION of with_PROJECT.py returns (jitted
function, arguments). Nothing is executed.
"""

import contextlib
import importlib
import importlib.metadata
import json
import pathlib
import sys

import jax


def main(
  folder: str, project: str, function: str, target: str, kind: str = ""
) -> None:
  """Writes the lowered and compiled texts, and ``facts.json``, to a folder.

  The facts are ``versions``, package -> version, and ``lines``, FILE:LINE of
  each line that a reading must name.

  Args:
    folder: Existing folder to write to.
    project: Project of `with_PROJECT.py`.
    function: Name of the function that returns (jitted function, arguments).
    target: Target of `parallel.xla.targets`.
    kind: Kind of the fault of `planted.py` to plant; "" for none.
  """
  import planted  # the file next to this one

  jax.config.update("jax_platforms", "cpu")
  fault = planted.FAULTS[project, function][kind] if kind else None
  if fault:
    planted.plant(fault)
  with _devices(target):
    module = importlib.import_module(f"with_{project}")
    jitted, arguments = getattr(module, function)()
    lowered = jitted.lower(*arguments)
    lowered = getattr(lowered, "lowered", lowered)  # equinox wraps it
    compiled = lowered.compile()
  # Names of dumped files, which `parallel.xla.read` pairs.
  stem = f"module_0000.{project}"
  for part, text in (
    ("before", lowered.compiler_ir("hlo").as_hlo_module().to_string()),
    ("cpu_after", compiled.as_text()),
  ):
    path = pathlib.Path(folder) / f"{stem}.{part}_optimizations.txt"
    path.write_text(text)
  (pathlib.Path(folder) / "facts.json").write_text(json.dumps({
    "versions": {
      d.name: d.version for d in importlib.metadata.distributions() if d.name
    },
    "lines": planted.lines(fault) if fault else [],
  }))


def _devices(target: str) -> contextlib.AbstractContextManager[None]:
  """Returns a context in which jax has the devices of a target."""
  kind, _, rest = target.partition(":")
  if kind == "cpu":
    jax.config.update("jax_num_cpu_devices", int(rest))
    return contextlib.nullcontext()
  sys.path.append(str(pathlib.Path(__file__).parents[3]))
  from parallel.xla import targets  # needs no more than jax

  return targets.described(targets.resolve(target).devices)


if __name__ == "__main__":
  main(*sys.argv[1:])
