"""The command ``caatnet``, and the place of launch scripts and configs.

In a checkout ``python -m launch.NAME`` runs a script, and configs are in
``configs/``. A wheel holds both folders in ``caatnet/_bundle``, because
top-level packages named ``launch`` and ``configs`` would clash with those of
other distributions. There ``caatnet NAME`` runs the same script: it prepends
the folder to ``sys.path``, so that absolute imports are equal in both forms.
"""

import ast
import difflib
import pathlib
import re
import runpy
import sys

_BUNDLE = pathlib.Path(__file__).with_name("_bundle")
_USAGE = "usage: caatnet COMMAND [--FLAG=VALUE ...]"


def is_installed() -> bool:
  """Returns whether this package comes from a wheel, not from a checkout."""
  return _BUNDLE.is_dir()


def root() -> pathlib.Path:
  """Returns the folder that holds ``launch``, ``configs`` and ``results``."""
  return _BUNDLE if is_installed() else _BUNDLE.parents[1]


def runnable(text: str) -> str:
  """Rewrites commands in a text to the form that works here.

  Args:
    text: Help, a hint or an error that has commands of a checkout.

  Returns:
    The text; after installation ``python -m launch.train`` in it is
    ``caatnet train``.
  """
  if not is_installed():
    return text
  names = "|".join(scripts())
  return re.sub(rf"(python -m )?\blaunch\.({names})\b", r"caatnet \2", text)


def spawned(name: str, *arguments: str) -> list[str]:
  """Returns the command line of a child process that runs a launch script."""
  return [sys.executable, "-m", "caatnet", name, *arguments]


def require_checkout(name: str) -> None:
  """Refuses to run a script that maintains files of the repository.

  Raises:
    ValueError: This package comes from a wheel.
  """
  if is_installed():
    raise ValueError(
      f"caatnet {name} needs a checkout of the repository, whose files it "
      "maintains"
    )


def find_config(name: str) -> str:
  """Returns the path of a config file.

  Args:
    name: Path of a file, or the name of a config of this package, such as
      ``caatnet/tiny``. The prefix ``configs/`` and the suffix ``.py`` may be
      omitted. An existing file takes precedence.

  Raises:
    FileNotFoundError: There is no such file; the message names the nearest.
  """
  configs = root() / "configs"
  prefix = "configs/" * name.startswith("configs/")
  suffix = ".py" * name.endswith(".py")
  short = name.removeprefix(prefix).removesuffix(suffix)
  for path in (name, f"{name}.py", configs / f"{short}.py"):
    if pathlib.Path(path).is_file():
      return str(path)
  known = [str(p) for p in pathlib.Path(name).parent.glob("*.py")] + [
    prefix + path.relative_to(configs).with_suffix(suffix).as_posix()
    for path in configs.glob("*/*.py") if path.stem != "__init__"
  ]
  raise FileNotFoundError(
    f"--config={name}: no such file{_nearest(name, known)}"
  )


def scripts() -> dict[str, str]:
  """Returns the first line of each launch script's docstring, by name."""
  found = {}
  for path in sorted((root() / "launch").glob("*.py")):
    text = path.read_text()
    if '\nif __name__ == "__main__":' in text:
      found[path.stem] = ast.get_docstring(ast.parse(text)).splitlines()[0]
  return found


def main() -> None:
  """Runs the launch script that the command line names.

  Raises:
    SystemExit: With the script's exit code; 2 for an unknown command.
  """
  known = scripts()
  name, *arguments = sys.argv[1:] or [""]
  if name in ("--help", "-h", "-help", "help"):
    width = max(map(len, known))
    lines = [f"  {key:{width}}  {line}" for key, line in known.items()]
    text = "\n".join([_USAGE, "", "commands (each has --help):", *lines])
    print(runnable(text))
  elif name not in known:
    mistake = f"unknown command {name!r}{_nearest(name, list(known))}"
    print(
      f"error: {mistake if name else _USAGE} (--help lists commands)",
      file=sys.stderr,
    )
    sys.exit(2)
  else:
    sys.path.insert(0, str(root()))
    sys.argv[1:] = arguments
    runpy.run_module(f"launch.{name}", run_name="__main__", alter_sys=True)


def _nearest(name: str, known: list[str]) -> str:
  """Returns "; did you mean ...?" for a misspelt name, or ""."""
  near = difflib.get_close_matches(name, known, 1)
  return f"; did you mean {near[0]}?" if near else ""
