"""Compiles a program in an environment of its own, as `--xla_dump_to` would.

  PYTHON caatnet/benchmarks/foreign/run_program.py FOLDER FILE FUNCTION [FAULT]

It needs jax only. FUNCTION returns (jitted function, arguments). Nothing is
executed.
"""

import importlib.metadata
import json
import pathlib
import runpy
import sys

import jax


def main(folder: str, file: str, function: str, *fault: str) -> None:
  """Writes the lowered and compiled texts, and ``versions.json``, to a folder.

  Args:
    folder: Existing folder to write to.
    file: Python file with the program.
    function: Name of the function that returns (jitted function, arguments).
    *fault: Argument of that function; none for a program without faults.
  """
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 8)
  jitted, arguments = runpy.run_path(file)[function](*fault)
  lowered = jitted.lower(*arguments)
  lowered = getattr(lowered, "lowered", lowered)  # equinox wraps it
  compiled = lowered.compile()
  # Names of dumped files, which `parallel.xla.read` pairs.
  stem = f"module_0000.{pathlib.Path(file).stem}"
  for part, text in (
    ("before", lowered.compiler_ir("hlo").as_hlo_module().to_string()),
    ("cpu_after", compiled.as_text()),
  ):
    path = pathlib.Path(folder) / f"{stem}.{part}_optimizations.txt"
    path.write_text(text)
  versions = {
    d.name: d.version for d in importlib.metadata.distributions() if d.name
  }
  (pathlib.Path(folder) / "versions.json").write_text(json.dumps(versions))


if __name__ == "__main__":
  main(*sys.argv[1:])
