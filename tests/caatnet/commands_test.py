"""Properties of the package's command line and of config names."""

import pathlib
import re
import signal
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
  helpers = {
    "__init__", "full_disks", "options", "overriding", "processes", "swarms"
  }
  there = {path.stem for path in (ROOT / "launch").glob("*.py")}
  assert set(commands.scripts()) == there - helpers


def test_unknown_command_is_a_one_line_error():
  ended = caatnet("trian", "--help")
  assert (ended.returncode, ended.stdout) == (2, "")
  assert ended.stderr.startswith(
    "error: unknown command 'trian'; did you mean train?"
  )
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
  assert commands.rewrite_commands(text) == text  # in a checkout
  bundle = tmp_path / "_bundle"
  bundle.symlink_to(ROOT)
  monkeypatch.setattr(commands, "_BUNDLE", bundle)
  assert commands.rewrite_commands(text) == (
    "caatnet train; caatnet convert; launch.options; my/launch.py"
  )


SCRIPT = '''"""Prints its arguments.

More text."""
import sys


def main():
  print(sys.argv[0].endswith("hello.py"), sys.argv[1:])
  sys.exit(3)


if __name__ == "__main__":
  main()
'''


@pytest.fixture
def bundle(tmp_path, monkeypatch):
  """Replaces the scripts by those of a wheel: one script and one helper."""
  folder = tmp_path / "_bundle" / "launch"
  folder.mkdir(parents=True)
  (folder / "__init__.py").touch()
  (folder / "helper.py").write_text('"""Helper."""\n')
  (folder / "hello.py").write_text(SCRIPT)
  monkeypatch.setattr(commands, "_BUNDLE", folder.parent)
  monkeypatch.setattr(sys, "path", list(sys.path))
  for name in [n for n in sys.modules if n.partition(".")[0] == "launch"]:
    monkeypatch.delitem(sys.modules, name)
  yield folder.parent
  for name in [n for n in sys.modules if n.partition(".")[0] == "launch"]:
    del sys.modules[name]


def run(monkeypatch, *arguments):
  """Runs the command in this process and returns its exit code."""
  monkeypatch.setattr(sys, "argv", ["caatnet", *arguments])
  handlers = {
    n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)
  }
  try:
    commands.main()
  except SystemExit as ended:
    return ended.code
  finally:  # of the tests
    for number, handler in handlers.items():
      signal.signal(number, handler)
  return 0


@pytest.mark.quick
def test_installed_command_runs_a_script_of_the_wheel(
  bundle, monkeypatch, capsys
):
  assert commands.root() == bundle
  assert commands.scripts() == {"hello": "Prints its arguments."}
  assert run(monkeypatch, "hello", "--x=1", "hello") == 3
  assert capsys.readouterr() == ("True ['--x=1', 'hello']\n", "")
  assert sys.path[0] == str(bundle)


@pytest.mark.quick
@pytest.mark.parametrize("flag", ["--help", "-h", "-help", "help"])
def test_help_lists_the_scripts_of_the_wheel(bundle, monkeypatch, capsys, flag):
  assert run(monkeypatch, flag) == 0
  assert capsys.readouterr().out == (
    "usage: caatnet COMMAND [--FLAG=VALUE ...]\n\n"
    "commands (each has --help):\n  hello  Prints its arguments.\n"
  )


@pytest.mark.quick
@pytest.mark.parametrize(("arguments", "message"), [
  ((), "usage: caatnet COMMAND [--FLAG=VALUE ...]"),
  (("",), "usage: caatnet COMMAND"),
  (("helo",), "unknown command 'helo'; did you mean hello?"),
  (("helper",), "unknown command 'helper'"),
  (("--config=x",), "unknown command '--config=x'"),
  (("zzz", "hello"), "unknown command 'zzz' (--help"),
])
def test_unknown_command_of_the_wheel_ends_with_2(
  bundle, monkeypatch, capsys, arguments, message
):
  assert run(monkeypatch, *arguments) == 2
  out, text = capsys.readouterr()
  assert (out, text.count("\n")) == ("", 1)
  assert text.startswith(f"error: {message}")
  assert text.endswith("(--help lists commands)\n")


@pytest.mark.quick
def test_configs_are_those_of_the_checkout_or_of_the_wheel(
  tmp_path, monkeypatch
):
  assert commands.root() == ROOT
  assert not commands.is_installed()
  monkeypatch.setattr(commands, "_BUNDLE", tmp_path)
  assert commands.root() == tmp_path


def test_commit_is_that_of_a_checkout_only(tmp_path, monkeypatch):
  """A wheel may be installed within the working tree of another project."""
  def git(*words):
    return subprocess.run(
      ["git", "-c", "user.name=x", "-c", "user.email=x", *words], cwd=tmp_path,
      capture_output=True, text=True, check=True,
    ).stdout.strip()

  git("init")
  monkeypatch.setattr(commands, "_BUNDLE", tmp_path / "caatnet" / "_bundle")
  (tmp_path / "caatnet").mkdir()
  git("commit", "--allow-empty", "--message=x")
  assert commands.current_commit() == git("rev-parse", "HEAD")
  commands._BUNDLE.mkdir()
  assert commands.current_commit() == "unknown"


@pytest.mark.quick
def test_no_other_module_spawns_a_script_by_its_module():
  """`launch` cannot be imported in an installed package."""
  sources = [p for top in ("caatnet", "launch", "parallel")
             for p in (ROOT / top).rglob("*.py")]
  assert len(sources) > 500
  for path in sources:
    assert not re.search(r'"-m",\s*f?"launch\.', path.read_text()), path


def test_child_process_runs_a_script():
  assert commands.script_command("train", "--x=1", "y") == [
    sys.executable, "-m", "caatnet", "train", "--x=1", "y"
  ]
