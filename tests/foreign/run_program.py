r"""Compiles a program in an environment of its own, as `--xla_dump_to` would.

  PYTHON tests/foreign/run_program.py FOLDER PROJECT FUNCTION DEVICES [KIND]

It needs jax and the project only. FUNCTION of with_PROJECT.py returns (jitted
function, arguments). Nothing is executed.
"""

import importlib
import importlib.metadata
import json
import pathlib
import sys

import jax


def main(
  folder: str, project: str, function: str, devices: str, kind: str = ""
) -> None:
  """Writes the lowered and compiled texts, and ``facts.json``, to a folder.

  The facts are ``versions``, package -> version, and ``lines``, FILE:LINE of
  each line that a reading must name.

  Args:
    folder: Existing folder to write to.
    project: Project of `with_PROJECT.py`.
    function: Name of the function that returns (jitted function, arguments).
    devices: Number of virtual CPU devices.
    kind: Kind of the fault of `planted.py` to plant; "" for none.
  """
  import planted  # the file next to this one

  jax.config.update("jax_platforms", "cpu")
  fault = planted.FAULTS[project, function][kind] if kind else None
  if fault:
    planted.plant(fault)
  jax.config.update("jax_num_cpu_devices", int(devices))
  module = importlib.import_module(f"with_{project}")
  jitted, arguments = getattr(module, function)()
  lowered = jitted.lower(*arguments)
  lowered = getattr(lowered, "lowered", lowered)  # equinox wraps it
  compiled = lowered.compile()
  # Names of dumped files, which `parallel.ledger.read` pairs.
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


if __name__ == "__main__":
  main(*sys.argv[1:])
