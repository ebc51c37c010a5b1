"""Properties of the flags that all scripts share."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from caatnet.config.override import override
from caatnet.schema import tree
from configs.caatnet import tiny
from launch import options
from tests.claims_test import path_of, run_arguments

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = """
import os
import atexit
import signal

import numpy
from rich.console import Console

from caatnet.config.override import override
from caatnet.schema import tree
from configs.caatnet import tiny
from launch import options

def main():
  if options.FLAGS.config.seed == 130:
    # A shell that runs the tests in the background ignores interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)  # handled immediately in this thread
  if options.FLAGS.config.seed == 50:
    numpy.empty(1 << options.FLAGS.config.seed)
  while options.FLAGS.config.seed == 141:
    print("more than anybody reads")
  while options.FLAGS.config.seed == 1410:
    Console().print("a table of rich")
  if options.FLAGS.config.seed == 0:
    for number in (signal.SIGINT, signal.SIGTERM):
      atexit.register(signal.raise_signal, number)
    return
  raise KeyError("a mistake of ours")

if __name__ == "__main__":
  options.run(main, uses=("config", "mesh", "coordinator", "num_processes",
                          "process_id"))
"""
HEAD = "from ml_collections import ConfigDict\ndef get_config():\n"
GOOD = HEAD + "  return ConfigDict({'seed': 1})\n"


@pytest.mark.quick
@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("", None),
    ("tensor:8", {"tensor": 8}),
    ("data:2, tensor:4", {"data": 2, "tensor": 4}),
  ],
)
def test_mesh_flag_is_parsed(text, expected):
  assert options.parse_mesh(text) == expected


@pytest.mark.parametrize(
  "text", ["data", "data:", ":2", "data:0", "data:-1", "data:2,", "data:1.5"]
)
def test_malformed_mesh_is_quoted(text):
  with pytest.raises(ValueError, match="is not AXIS:DEVICES") as error:
    options.parse_mesh(text)
  assert f"--mesh={text}" in str(error.value)


def test_profile_flag_is_parsed():
  assert options.parse_profile("") is None
  assert options.parse_profile("10:13") == (10, 13)
  for text in ("10", "13:10", "3:3", "a:b"):
    with pytest.raises(ValueError, match=f"--profile={text} is not"):
      options.parse_profile(text)


CHANGEABLE = ("inference", "parallel.data")


@pytest.mark.quick
def test_config_overrides_are_separated_from_flags():
  argv = ["generate.py", "--config.inference.batch=3", "--top_k=2",
          "-config.parallel.data=4", "--prompt=--config.x=1"]
  assert options.split_overrides(argv, CHANGEABLE) == (
    ["generate.py", "--top_k=2", "--prompt=--config.x=1"],
    ["inference.batch=3", "parallel.data=4"],
  )


@pytest.mark.parametrize(
  "argument", ["--config.sync.p=1", "--config.parallel.data_2=1",
               "--config.parallel=1", "--config.inferences.batch=1"]
)
def test_overrides_of_other_config_keys_are_refused(argument):
  with pytest.raises(ValueError, match=r"only config\.inference, config\.p"):
    options.split_overrides([argument], CHANGEABLE)


def test_config_is_found_by_its_name():
  """Keeps its argument and other flags."""
  path, config = options._load_config("caatnet/tiny:test")
  assert path == str(ROOT / "configs/caatnet/tiny.py")
  assert config.train.num_steps == 12
  argv = ["train", "--prompt=--config=x", "--config", "caatnet/tiny"]
  assert options._config_value(argv) == "caatnet/tiny"


# Flags of devices and processes are applied before a script begins.
SET_UP = {
  "cpu_devices", "coordinator", "num_processes", "process_id", "programs"
}


@pytest.mark.quick
@pytest.mark.parametrize("script", [
  "train", "evaluate", "sweep", "docs.demo", "benchmark", "compile", "simulate",
  "generate",
])
def test_script_reads_exactly_the_flags_that_it_declares(script):
  text = path_of(script).read_text()
  own = set(re.findall(r'flags\.DEFINE_\w+\(\s*"(\w+)"', text))
  if "swarms.endpoint()" in text:  # which reads the flags of a swarm
    text += (ROOT / "launch/swarms.py").read_text()
  uses, *_ = run_arguments(script)
  read = {
    *re.findall(r"\bFLAGS\.(\w+)", text),
    *re.findall(r"\boptions\.(mesh|profile)(?:d_steps)?\(\)", text),
    *re.findall(r'\boptions\.integers\("(\w+)"\)', text),
    *re.findall(r'\b_address\("(\w+)"', text),
  }
  assert set(uses) - SET_UP == read - own - SET_UP
  assert own <= read


def run_script(folder, config, *args, stdout=subprocess.PIPE):
  (folder / "script.py").write_text(SCRIPT)
  (folder / "config.py").write_text(config)
  return subprocess.run(
    [sys.executable, "script.py", "--config=config.py", *args],
    cwd=folder,
    env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    stdout=stdout,
    stderr=subprocess.PIPE,
    text=True,
    timeout=300,
    check=False,
  )


@pytest.mark.parametrize(
  ("config", "args", "message"),
  [
    (HEAD + "  c = ConfigDict({'a': 1})\n  return c.b\n", [],
     "--config=config.py, line 4: AttributeError: "),
    (HEAD + "  return {}['rate']\n", [],
     "--config=config.py, line 3: KeyError: 'rate'"),
    (HEAD + "  return []\n", [], "must return a ConfigDict, but returns []"),
    (HEAD + "  pass\n", [], "must return a ConfigDict, but returns None"),
    (GOOD, ["--coordinator=here", "--num_processes=2", "--process_id=0"],
     "--coordinator=here is not HOST:PORT"),
  ],
  ids=["attribute", "key", "list", "none", "coordinator"],
)
def test_error_is_one_line_with_exit_code_2(tmp_path, config, args, message):
  result = run_script(tmp_path, config, *args)
  assert result.returncode == 2, result.stderr
  assert len(result.stderr.splitlines()) == 1, result.stderr
  assert result.stderr.startswith("error: ")
  assert message in result.stderr


@pytest.mark.parametrize("debug", ["--debug", "-debug", "--debug=True",
                                   "--debug=1"])
def test_debug_shows_the_traceback(tmp_path, debug):
  result = run_script(tmp_path, GOOD, "--mesh=x", debug)
  assert result.returncode == 1
  assert "Traceback" in result.stderr


@pytest.mark.parametrize(("config", "args", "words"), [
  (GOOD, ["--config.seed=50"], "out of memory with config.seed=50: Unable to"),
  (GOOD.replace("1", "50"), [], "out of memory with this config: Unable to"),
])
def test_too_little_memory_names_the_overrides(tmp_path, config, args, words):
  result = run_script(tmp_path, config, *args)
  assert result.returncode == 2, result.stderr
  assert len(result.stderr.splitlines()) == 1, result.stderr
  assert result.stderr.startswith(f"error: {words}")


def test_internal_error_keeps_its_traceback(tmp_path):
  result = run_script(tmp_path, GOOD)
  assert result.returncode == 1
  assert "Traceback" in result.stderr
  assert "a mistake of ours" in result.stderr


CONFIG = """
import pathlib

from configs.caatnet import tiny

def get_config():
  with open("executed", "a") as file:
    file.write("once ")
  return tiny.get_config("test")
"""
SELECTED = [
  ["--config.outer.algorithm=diloco", "--config.outer.sync_every=7"],
  ["--config.outer.sync_every=7", "--config.outer.algorithm", "diloco"],
]


@pytest.mark.parametrize("flags", SELECTED)
def test_help_config_prints_every_key_after_all_overrides(tmp_path, flags):
  """Applies selectors first in any order; executes the file once."""
  result = run_script(tmp_path, CONFIG, "--help_config", *flags)
  assert result.returncode == 0, result.stderr
  assert (tmp_path / "executed").read_text() == "once "
  expected = override(tiny.get_config("test"), "outer.algorithm=diloco")
  expected.outer.sync_every = 7
  assert result.stdout == tree.help_text(expected) + "\n"
  assert "--config.outer.sync_every=7\n" in result.stdout


def test_invalid_value_with_help_config_is_an_error(tmp_path):
  result = run_script(tmp_path, CONFIG, "--help_config", "--config.sync.p=nan")
  assert result.returncode == 2
  assert result.stderr == "error: config.sync.p=nan must lie in [0, 1]\n"


@pytest.mark.parametrize(
  ("seed", "code", "stderr"), [
    (130, 130, "interrupted\n"), (141, 141, ""), (1410, 141, ""),
    (0, 0, ""),  # signals after the work
  ]
)
def test_interrupt_and_closed_pipe_have_their_exit_codes(
  tmp_path, seed, code, stderr
):
  outlet, inlet = os.pipe()
  os.close(outlet)
  with open(inlet, "w") as stdout:
    result = run_script(
      tmp_path, GOOD.replace("1", str(seed)), stdout=stdout
    )
  assert (result.returncode, result.stderr) == (code, stderr)


@pytest.mark.parametrize(
  ("argument", "keys", "refused"),
  [
    ("--config=a.py", (), True),
    ("-config.sync.p=0.5", (), True),
    ("--to=config.model.width=8", (), False),
    ("--config.model.width=8", ("model.", "parallel.tensor"), True),
    ("--config.sync.p=0.5", ("model.", "parallel.tensor"), False),
  ],
)
def test_config_without_effect_is_refused(monkeypatch, argument, keys, refused):
  monkeypatch.setattr("sys.argv", ["convert", argument])
  if not refused:
    return options.refuse_config(keys, "why")
  with pytest.raises(ValueError, match="has no effect: why"):
    options.refuse_config(keys, "why")
