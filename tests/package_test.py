"""The wheel: its contents, and its commands outside of a checkout."""

import configparser
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv
import zipfile

from packaging.requirements import Requirement
import pytest

from parallel.base import lazy

ROOT = pathlib.Path(__file__).parents[1]
# Folders whose place in the wheel differs from that in the repository.
BUNDLED = ("configs", "launch", "results")
TINY = (
  "--config=caatnet/tiny:test", "--cpu_devices=2", "--workdir=run",
  "--config.parallel.tensor=2", "--config.model.num_layers=1",
  "--config.optimizer.warmup_steps=0",
)


def tracked():
  """Returns the repository's files, including new ones that are not ignored."""
  listed = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT, capture_output=True, text=True, check=True,
  )
  return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def build(source, folder):
  """Builds a wheel from a folder or an archive, without the network."""
  subprocess.run(
    [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index",
     "--no-build-isolation", f"--wheel-dir={folder}", source],
    check=True,
  )
  (built,) = folder.glob("*.whl")
  return built


def contents(wheel):
  with zipfile.ZipFile(wheel) as archive:
    return {
      name: archive.read(name)
      for name in archive.namelist() if ".dist-info/" not in name
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory):
  """Copy of the repository's files."""
  folder = tmp_path_factory.mktemp("source")
  for name in tracked():
    if not name.startswith(("tests/", "colabs/")):
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copyfile(ROOT / name, folder / name)
  # Left by an earlier build: no longer part of the package.
  stale = folder / "build/lib/caatnet/removed.py"
  stale.parent.mkdir(parents=True)
  stale.touch()
  return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
  return build(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
  """Function that runs programs with the installed wheel in an empty folder.

  Dependencies are those of this environment. A path in a .pth file does not
  execute the .pth files in that path, so the checkout is not found even if it
  is an editable installation.
  """
  run = environment(wheel, tmp_path_factory)
  theirs = [path for path in sys.path if path.endswith("site-packages")]
  (run.site / "dependencies.pth").write_text("\n".join(theirs) + "\n")
  return run


@pytest.fixture(scope="module")
def lean(wheel, tmp_path_factory):
  """Function like `installed`, without extras.

  Only the distributions that the wheel requires are found there.
  """
  run = environment(wheel, tmp_path_factory)
  (own,) = importlib.metadata.distributions(
    name="caatnet", path=[str(run.site)]
  )
  for distribution in required(own):
    for top in {file.parts[0] for file in distribution.files}:
      source, target = distribution.locate_file(top), run.site / top
      if top != ".." and not target.exists():
        target.symlink_to(source)
  return run


def required(distribution, extras=("",), seen=None):
  """Returns the installed distributions that one requires, transitively."""
  found = {} if seen is None else seen
  for line in distribution.requires or ():
    need = Requirement(line)
    if need.marker is None or any(
      need.marker.evaluate({"extra": extra}) for extra in extras
    ):
      key = need.name, *sorted(need.extras)
      if key not in found:
        found[key] = importlib.metadata.distribution(need.name)
        required(found[key], ("", *need.extras), found)
  return found.values()


def environment(wheel, tmp_path_factory):
  """Returns a function that runs programs of an environment with a wheel."""
  home = tmp_path_factory.mktemp("environment")
  venv.create(home, with_pip=False)
  subprocess.run(
    [sys.executable, "-m", "pip", "--python", home / "bin/python", "install",
     "-q", "--no-deps", "--no-index", wheel],
    check=True,
  )
  (site,) = home.glob("lib/python*/site-packages")
  environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
  folder = tmp_path_factory.mktemp("elsewhere")

  def run(program, *arguments, code=0):
    ended = subprocess.run(
      [home / "bin" / program, *arguments], cwd=folder, env=environment,
      capture_output=True, text=True, check=False,
    )
    assert ended.returncode == code, ended.stderr
    return ended

  run.folder, run.site = folder, site
  return run


def test_wheel_has_every_file_and_no_other(wheel):
  expected = {
    name for name in tracked() if name.startswith(("caatnet/", "parallel/"))
  } | {
    f"caatnet/_bundle/{name}" for name in tracked()
    if name.startswith(tuple(f"{top}/" for top in BUNDLED))
  }
  assert len(expected) > 500
  assert set(contents(wheel)) == expected


def test_source_distribution_builds_the_same_wheel(
  wheel, source, tmp_path
):
  program = "from setuptools import build_meta; build_meta.build_sdist('dist')"
  subprocess.run(
    [sys.executable, "-c", program], cwd=source, check=True,
    capture_output=True,
  )
  (archive,) = (source / "dist").glob("*.tar.gz")
  assert contents(build(archive, tmp_path)) == contents(wheel)


def test_packages_are_importable_without_a_checkout(installed):
  """Installs no generic top-level name."""
  program = """
import importlib.util, caatnet, parallel
for name in ("configs", "docs", "launch", "results", "tests"):
  assert importlib.util.find_spec(name) is None, name
print(caatnet.__file__, parallel.__file__)
"""
  for path in installed("python", "-c", program).stdout.split():
    assert path.startswith(str(installed.site))


def test_run_outside_of_a_checkout(installed):
  """Trains, and evaluates the stored run."""
  train = installed("caatnet", "train", *TINY, "--config.train.num_steps=2")
  assert "\nevaluate: caatnet evaluate --workdir=run" in train.stdout
  facts = json.loads((installed.folder / "run/environment.json").read_text())
  assert facts["commit"] == "unknown"
  evaluated = installed("caatnet", "evaluate", "--workdir=run", "--json")
  assert json.loads(evaluated.stdout)["step"] == 2


def test_federated_run_outside_of_a_checkout(installed):
  """Starts a process for each client."""
  client = ROOT / "docs/examples/numpy_client.py"
  ended = installed(
    "caatnet", "federate", "--config=federated/numpy:test",
    f"--config.federated.numpy_client={client}:client_fn",
    "--workdir=federated",
  )
  rounds = (installed.folder / "federated/metrics.jsonl").read_text()
  assert len(rounds.splitlines()) == 3, ended.stdout


def test_prediction_outside_of_a_checkout(installed):
  """Uses the path that messages and documents give to a config."""
  ended = installed(
    "caatnet", "simulate", "--config=configs/diloco/utilisation.py",
    "--output=out.json", "--json",
  )
  assert json.loads(ended.stdout)
  kept = json.loads((installed.folder / "out.json").read_text())
  assert kept["command"].startswith("caatnet simulate --config=conf")


def test_help_and_messages_name_the_installed_command(installed):
  script = subprocess.run(
    [sys.executable, "-m", "launch.train", "--help"], cwd=ROOT,
    capture_output=True, text=True, check=True,
  )
  shown = installed("caatnet", "train", "--help").stdout
  assert "python -m" not in shown
  assert "caatnet train --config=configs/caatnet/tiny.py" in shown
  flags = script.stdout.split("flags:")[1]
  assert shown.split("flags:")[1] == flags
  ended = installed("caatnet", "train", "--config=caatnet/tini", code=2)
  assert ended.stderr == (
    "error: --config=caatnet/tini: no such file; did you mean caatnet/tiny?\n"
  )
  ended = installed(
    "caatnet", "train", "--config=diloco/utilisation", code=2
  )
  assert "for this config there is caatnet simulate" in ended.stderr


# Prints the help of every script, each in a forked process: they share imports.
HELP = """
import os, runpy, sys
from caatnet import commands
sys.path.insert(0, str(commands.root()))
import launch.options
for name in commands.scripts():
  print(f"== {name}", flush=True)
  child = os.fork()
  if not child:
    if commands.is_installed():
      sys.argv = ["caatnet", name, "--help"]
      commands.main()
    else:
      sys.argv = [name, "--help"]
      runpy.run_module(f"launch.{name}", run_name="__main__", alter_sys=True)
  os.waitpid(child, 0)
"""


def test_installed_commands_have_the_flags_of_the_scripts(installed):
  script = subprocess.run(
    [sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True,
    check=True,
  )
  found = []
  for text in script.stdout, installed("python", "-c", HELP).stdout:
    parts = re.split("^== ", text, flags=re.M)[1:]
    found.append({
      part.split()[0]: re.findall(
        r"^  --(\S+)$", part.partition("flags:")[2], re.M
      ) for part in parts
    })
  ours, theirs = found
  assert ours == theirs
  assert len(ours) > 15
  assert all("debug" in flags for flags in ours.values())


def test_local_config_takes_precedence(installed):
  own = installed.folder / "caatnet/tiny.py"
  own.parent.mkdir()
  own.write_text(
    "from configs.caatnet import tiny\n"
    "def get_config(size):\n  raise ValueError(f'own {size}')\n"
  )
  try:
    ended = installed("caatnet", "train", *TINY, code=2)
  finally:
    shutil.rmtree(own.parent)
  assert ended.stderr == "error: own test\n"


def test_coordinator_is_spawned_by_the_command_of_benchmarks(installed):
  """Checks `commands.script_command` in an installed package."""
  program = """
import subprocess
from caatnet import commands
words = commands.script_command("coordinator", "--help")
print(subprocess.run(words, capture_output=True, text=True).stdout)
"""
  assert "--least" in installed("python", "-c", program).stdout


def test_ledger_needs_no_extra(lean):
  example = ROOT / "docs/examples/mlp.py"
  shown = lean("caatnet", "sends", f"{example}:step", "--devices=8", "--json")
  (found,) = json.loads(shown.stdout).values()
  assert {row["over"] for row in found["collectives"]} == {
    "data", "fsdp", "tensor"
  }


def test_training_names_its_extra(lean):
  ended = lean("caatnet", "train", *TINY, code=2)
  assert ended.stderr == (
    "error: caatnet train needs tokenizers: pip install 'caatnet[training]'\n"
  )
  program = "import parallel.outer; parallel.outer.OuterLoop"
  ended = lean("python", "-c", program, code=1)
  assert ended.stderr.splitlines()[-1] == (
    "ModuleNotFoundError: parallel.outer.OuterLoop needs optax: pip install "
    "'caatnet[training]'"
  )


def test_extra_training_has_the_packages_that_errors_name():
  config = configparser.ConfigParser()
  config.read(ROOT / "setup.cfg")
  extra = config["options.extras_require"]["training"].split()
  names = {Requirement(line).name.partition("-")[0] for line in extra}
  assert names == set(lazy.TRAINING_PACKAGES)


def test_ledger_imports_no_package_for_training():
  program = f"""
import sys
import launch.sends, parallel.ledger
for name in parallel.ledger.__all__:
  getattr(parallel.ledger, name)
from parallel.ledger.sends import foreign, report, trace
print(*(name for name in sys.modules if name in {lazy.TRAINING_PACKAGES}))
"""
  ended = subprocess.run(
    [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True,
    check=True,
  )
  assert ended.stdout == "\n"
