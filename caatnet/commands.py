"""Command ``caatnet``, and the location of launch scripts and configs.

In a checkout ``python -m launch.NAME`` runs a script, and configs are in
``configs/``. A wheel contains both directories in ``caatnet/_bundle``, because
top-level packages named ``launch`` and ``configs`` would conflict with those of
other distributions. There ``caatnet NAME`` runs the same script: it prepends
the directory to ``sys.path``, so that absolute imports are equal in both forms.
"""

import ast
import contextlib
import difflib
import pathlib
import re
import runpy
import subprocess
import sys

_BUNDLE = pathlib.Path(__file__).with_name("_bundle")
_USAGE = "usage: caatnet COMMAND [--FLAG=VALUE ...]"


def is_installed() -> bool:
  """Returns whether this package is installed from a wheel, not a checkout."""
  return _BUNDLE.is_dir()


def root() -> pathlib.Path:
  """Returns the directory that has ``launch``, ``configs`` and ``results``."""
  return _BUNDLE if is_installed() else _BUNDLE.parents[1]


def rewrite_commands(text: str) -> str:
  """Rewrites commands in a text to the form of this installation.

  Args:
    text: Help text, hint or error that contains commands of a checkout.

  Returns:
    The text; in an installation from a wheel, ``python -m launch.train`` is
    replaced by ``caatnet train``.
  """
  if not is_installed():
    return text
  names = "|".join(scripts())
  return re.sub(rf"(python -m )?\blaunch\.({names})\b", r"caatnet \2", text)


def script_command(name: str, *arguments: str) -> list[str]:
  """Returns the command line of a child process that runs a launch script."""
  return [sys.executable, "-m", "caatnet", name, *arguments]


def find_config(name: str) -> str:
  """Returns the path of a config file.

  Args:
    name: Path of a file, or name of a config of this package, such as
      ``caatnet/tiny``. The prefix ``configs/`` and the suffix ``.py`` may be
      omitted. A file at that path takes precedence over this package's configs.

  Raises:
    FileNotFoundError: The file does not exist; the message contains the most
      similar name.
  """
  configs = root() / "configs"
  prefix = "configs/" * name.startswith("configs/")
  suffix = ".py" * name.endswith(".py")
  short = name.removeprefix(prefix).removesuffix(suffix)
  for path in (name, f"{name}.py", configs / f"{short}.py"):
    if pathlib.Path(path).is_file():
      return str(path)
  # Suggestions have the form in which the name was given.
  known = [str(p) for p in pathlib.Path(name).parent.glob("*.py")] + [
    prefix + path.relative_to(configs).with_suffix(suffix).as_posix()
    for path in configs.glob("*/*.py") if path.stem != "__init__"
  ]
  raise FileNotFoundError(
    f"--config={name}: no such file{_suggestion(name, known)}"
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
  """Runs the launch script named on the command line.

  Raises:
    SystemExit: The script's exit code; 2 for an unknown command.
  """
  from caatnet import interrupts  # not at the top: notebooks copy this file

  interrupts.install()
  known = scripts()
  name, *arguments = sys.argv[1:] or [""]  # "" prints the usage
  if name in ("--help", "-h", "-help", "help"):
    width = max(map(len, known))
    lines = [f"  {key:{width}}  {line}" for key, line in known.items()]
    text = "\n".join([_USAGE, "", "commands (each has --help):", *lines])
    print(rewrite_commands(text))
  elif name not in known:
    mistake = f"unknown command {name!r}{_suggestion(name, list(known))}"
    print(
      f"error: {mistake if name else _USAGE} (--help lists commands)",
      file=sys.stderr,
    )
    sys.exit(2)
  else:
    # The script is found as `launch.NAME`, in a checkout and in a wheel.
    sys.path.insert(0, str(root()))
    sys.argv[1:] = arguments
    runpy.run_module(f"launch.{name}", run_name="__main__", alter_sys=True)


def _suggestion(name: str, known: list[str]) -> str:
  """Returns "; did you mean ...?" for a misspelt name, or ""."""
  near = difflib.get_close_matches(name, known, 1)
  return f"; did you mean {near[0]}?" if near else ""


def current_commit() -> str:
  """Returns the commit of the checkout, or "unknown".

  An installed package has none: site-packages may lie in the working tree of
  another repository.
  """
  found = ""
  if not is_installed():
    with contextlib.suppress(OSError):  # no git on this machine
      found = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True,
        check=False, cwd=root(),
      ).stdout.strip()
  return found or "unknown"
