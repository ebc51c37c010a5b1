"""Properties of the package's command line and of config names."""

import pathlib
import re
import subprocess
import sys

import pytest

from caatnet import commands

ROOT = pathlib.Path(__file__).parents[2]


def caatnet(*arguments):
  return subprocess.run(
    [sys.executable, "-m", "caatnet", *arguments], cwd=ROOT, text=True,
    capture_output=True, check=False,
  )


@pytest.mark.quick
def test_every_launch_script_is_a_command():
  listed = re.findall(r"^  (\w+) +(\S.*)$", caatnet("--help").stdout, re.M)
  assert dict(listed) == commands.scripts()
  helpers = {"__init__", "options", "overriding", "processes", "swarms"}
  there = {path.stem for path in (ROOT / "launch").glob("*.py")}
  assert set(commands.scripts()) == there - helpers


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (("trian", "--help"), "unknown command 'trian'; did you mean train?"),
    (("options",), "unknown command 'options'"),
    (("--config=x",), "unknown command '--config=x'"),
    ((), "usage: caatnet COMMAND"),
  ],
)
def test_unknown_command_is_a_one_line_error(arguments, message):
  ended = caatnet(*arguments)
  assert (ended.returncode, ended.stdout) == (2, "")
  assert ended.stderr.startswith(f"error: {message}")
  assert len(ended.stderr.splitlines()) == 1


def test_command_equals_its_script():
  """Compares flags, exit code and the name in errors."""
  script = subprocess.run(
    [sys.executable, "-m", "launch.simulate", "--help"], cwd=ROOT, text=True,
    capture_output=True, check=True,
  )
  assert caatnet("simulate", "--help").stdout == script.stdout
  ended = caatnet("simulate", "--mesh=tensor:2")
  assert ended.returncode == 2
  assert ended.stderr.startswith("error: --mesh has no effect on simulate")


@pytest.mark.quick
@pytest.mark.parametrize(
  "name",
  ["caatnet/tiny", "caatnet/tiny.py", "configs/caatnet/tiny",
   "configs/caatnet/tiny.py"],
)
def test_config_names_are_resolved(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  packaged = ROOT / "configs/caatnet/tiny.py"
  assert pathlib.Path(commands.find_config(name)) == packaged
  # An existing file takes precedence.
  own = pathlib.Path(name).with_suffix(".py")
  own.parent.mkdir(parents=True)
  own.touch()
  assert commands.find_config(name) == str(own)


@pytest.mark.parametrize(
  ("name", "nearest"),
  [
    ("caatnet/tini", "caatnet/tiny"),
    ("caatnet/tini.py", "caatnet/tiny.py"),
    ("configs/caatnet/tini", "configs/caatnet/tiny"),
    ("mein.py", "mine.py"),
  ],
)
def test_nearest_config_is_suggested(name, nearest, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "mine.py").touch()
  with pytest.raises(FileNotFoundError) as error:
    commands.find_config(name)
  assert str(error.value) == (
    f"--config={name}: no such file; did you mean {nearest}?"
  )


def test_commands_in_texts_are_runnable_once_installed(tmp_path, monkeypatch):
  text = "python -m launch.train; launch.convert; launch.options; my/launch.py"
  assert commands.runnable(text) == text  # in a checkout
  bundle = tmp_path / "_bundle"
  bundle.symlink_to(ROOT)
  monkeypatch.setattr(commands, "_BUNDLE", bundle)
  assert commands.runnable(text) == (
    "caatnet train; caatnet convert; launch.options; my/launch.py"
  )
