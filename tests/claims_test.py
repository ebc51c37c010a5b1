"""Every command in CLAIMS.md parses, and every file that it names exists.

`faults` reads any document: commands are taken from its code blocks and from
its inline code, files from inline code and links. A command of `launch` goes
through the parser of `launch/options.py` with the flags of its script, so that
keys, values, the config's argument and required flags are checked as a user's
are; nothing is built or run. tests/reproduce_test.py runs claims.
"""

import ast
from collections.abc import Iterator, Sequence
import contextlib
import copy
import importlib
import pathlib
import re
import shlex
import sys
from typing import Any
from unittest import mock

from absl import flags
from ml_collections import config_flags
import pytest

from caatnet.config.override import override, take_sweep
from caatnet.train import sweep
from launch import options

ROOT = pathlib.Path(__file__).parents[1]
# A bare file name may be anywhere in these.
ROOMS = ("caatnet", "colabs", "configs", "docs", "launch", "parallel",
         "results", "tests")
SUFFIXES = "cfg|csv|ipynb|json|md|png|py|svg|toml|yaml"
FENCED = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4}.*$", re.MULTILINE)
COMMAND = re.compile(
  r"(?<![\w.-])python3? -m (?:launch\.|docs\.demo\b|pytest\b).*"
)
MAKE = re.compile(r"\s*make [a-z].*")
RUN_FILE = re.compile(r"runs/|(config|environment)\.json$")
ANY_NAME = re.compile(r"<\w+>|\b[A-Z]{2,}(?=[/._])(?!\.md$)")
OPERATORS = {"|", ">", ">>", "<", "&&", "||", ";", "&"}


def faults(text: str) -> list[str]:
  """Returns one line for each command and each file that is wrong in a text."""
  found = []
  with contextlib.chdir(ROOT):
    for command in commands(text):
      found += [f"{command}: {fault}" for fault in _command_faults(command)]
    for name in files(text):
      if not _exists(name):
        found.append(f"{name}: no such file")
  return found


def commands(text: str) -> list[str]:
  """Returns the commands of a document that `faults` can check."""
  code = [block.replace("\\\n", " ") for block in FENCED.findall(text)]
  prose = FENCED.sub("", text)
  continued = re.sub(r"\\\n", " ", prose)
  code += INDENTED.findall(continued)
  lines = [line for block in code for line in block.splitlines()]
  lines += _inline(text)
  found = []
  for line in lines:
    match = COMMAND.search(line) or MAKE.fullmatch(line)
    if match:
      found.append(match[0].strip())
  return found


def files(text: str) -> list[str]:
  """Returns the names in a document that can only be files and folders.

  Those are relative links, and inline code that has a file's ending, ends with
  a slash or begins with a folder of the tree. ``<op>`` and ``OP`` stand for any
  name; what a run leaves in its folder is not looked for.
  """
  found = re.findall(r"\]\((?!https?:)([^)#\s]+)[^)]*\)", text)
  folders = "|".join(ROOMS)
  for code in _inline(text):
    name = re.sub(r":.*", "", code)
    if not re.fullmatch(r"[\w.<>*/-]+", name) or RUN_FILE.match(name):
      continue
    if re.search(rf"\.({SUFFIXES})$|/$|^({folders})/", name):
      found.append(name)
  return found


def _inline(text: str) -> Iterator[str]:
  prose = INDENTED.sub("", re.sub(r"\\\n", " ", FENCED.sub("", text)))
  for code in re.findall(r"`([^`]+)`", prose):
    yield " ".join(code.split())


def _exists(name: str) -> bool:
  pattern = ANY_NAME.sub("*", name).rstrip("/")
  if next(ROOT.glob(pattern), None) is not None:
    return True
  return "/" not in name and any(
    next((ROOT / room).rglob(pattern), None) is not None for room in ROOMS
  )


def _command_faults(command: str) -> list[str]:
  try:
    words = shlex.split(command, comments=True)
  except ValueError as error:
    return [str(error)]
  end = next((i for i, w in enumerate(words) if w in OPERATORS), len(words))
  words = words[:end]
  if words[0] == "make":
    return _make_faults(words[1:])
  if words[2] == "pytest":
    return _pytest_faults(words[3:])
  script = words[2].removeprefix("launch.")
  if not path_of(script).is_file():
    return [f"no script launch/{script}.py"]
  if not words[3:]:  # the script is only named
    return []
  try:
    _parse(script, words[3:])
  except (ValueError, FileNotFoundError) as error:
    return [str(error)]
  return []


def _make_faults(words: Sequence[str]) -> list[str]:
  targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(),
                       re.MULTILINE)
  return [f"no target {w!r} in the Makefile" for w in words
          if "=" not in w and w not in targets]


def _pytest_faults(words: Sequence[str]) -> list[str]:
  found, sources, expression = [], [], ""
  for before, word in zip(["", *words], words, strict=False):
    if before == "-k":
      expression = word
    elif not word.startswith("-") and before not in ("-n", "-m", "--dist"):
      path, _, test = word.partition("::")
      here = ROOT / path
      if not here.exists():
        found.append(f"no such file {path}")
        continue
      paths = [here] if here.is_file() else sorted(here.rglob("*_test.py"))
      sources += [p.read_text() for p in paths]
      name = test.partition("[")[0]
      if name and f"def {name}(" not in sources[-1]:
        found.append(f"no test {name} in {path}")
  if sources:
    names = set(re.findall(r"\w+", expression)) - {"and", "or", "not"}
    found += [f"-k {name}: not in {words}" for name in sorted(names)
              if not any(name.lower() in s.lower() for s in sources)]
  return found


def _parse(script: str, arguments: Sequence[str]) -> None:
  """Parses a command line as the script would; raises what it reports."""
  own = importlib.import_module(_module(script)).__name__
  uses, required, defaults, positional = run_arguments(script)
  values = flags.FlagValues()  # not absl's own, which all tests share
  config_flags.DEFINE_config_file(
    "config", None, flag_values=values, lock_config=True
  )
  modules = flags.FLAGS.flags_by_module_dict()
  for module in (options.__name__, own):
    for flag in modules.get(module, ()):
      if flag.name != "config":
        values[flag.name] = copy.deepcopy(flag)
  for name in uses:  # shared by scripts in a further module
    if name not in values:
      values[name] = copy.deepcopy(flags.FLAGS[name])
  argv = [script, *arguments]
  for name, value in defaults.items():
    if not any(re.match(rf"--?{name}(=|$)", a) for a in arguments):
      argv.insert(1, f"--{name}={value}")
  # ml_collections looks for overrides in sys.argv.
  with (mock.patch.object(options, "FLAGS", values),
        mock.patch.object(sys, "argv", argv)):
    options._parse(argv, uses, required, positional)
  if script == "compile":
    override(values.config, re.sub(r"(^|\s)(--)?config\.", r"\1",
                                   values.compare))
  if script == "sweep":
    config = values.config.copy_and_resolve_references()
    study = take_sweep(config)
    for point in sweep.expand(values.grid) if values.grid else study.points:
      override(config, point, study.sections)


def _module(script: str) -> str:
  """Returns the module of a script: of `launch`, or with its own package."""
  return script if "." in script else f"launch.{script}"


def path_of(script: str) -> pathlib.Path:
  """Returns the file of a script."""
  return ROOT / f"{_module(script).replace('.', '/')}.py"


def run_arguments(
  script: str,
) -> tuple[Sequence[str], Sequence[str], dict[str, str], str]:
  """Returns arguments of `options.run`: uses, required, defaults, positional.
  """
  tree = ast.parse(path_of(script).read_text())
  given: dict[str, Any] = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "options.run":
      given = {k.arg: ast.literal_eval(k.value) for k in node.keywords}
  required = given.get("required", ("config",))
  return (
    given["uses"], required, given.get("defaults", {}),
    given.get("positional", ""),
  )


CLAIMS = (ROOT / "CLAIMS.md").read_text()


def test_commands_parse_and_files_exist():
  assert len(commands(CLAIMS)) > 30
  assert len(files(CLAIMS)) > 10
  assert faults(CLAIMS) == []


TINY = "python -m launch.train --config=configs/caatnet/tiny.py"
COMPILE = "python -m launch.compile --config=configs/caatnet/tiny.py"
SWEEP = "python -m launch.sweep --config=configs/caatnet/sweep.py"
TEST = "python -m pytest -q tests/launch/options_test.py"
WRONG = [
  ("python -m launch.trian --config=configs/caatnet/tiny.py",
   "no script launch/trian.py"),
  ("python -m launch.train --cpu_devices=8", "--config is required"),
  ("python -m launch.train --config=configs/caatnet/tini.py",
   "did you mean configs/caatnet/tiny.py?"),
  (f"{TINY}:huge", "the sizes are demo and test"),
  (f"{TINY} --config.model.p=0.5", "no key config.model.p"),
  (f"{TINY} --config.sync.p=half", "half"),
  (f"{TINY} --target=cpu:8", "--target has no effect on"),
  (f"{TINY} --cpu_devices=eight", "eight"),
  (f"{TINY} --mesh=tensor", "is not AXIS:DEVICES"),
  (f"{TINY} stray", "unexpected argument 'stray'"),
  (COMPILE, "--target is required"),
  (f'{COMPILE} --target=cpu:8 --compare="config.model.p=.5"', "'model.p'"),
  (f'{SWEEP} --grid="sync.q=1.0,0.5"', "'sync.q'"),
  (f'{SWEEP} --grid="outer.algorithm=dilocco"', "'dilocco'"),
  (f'{SWEEP} --grid="sync.p=1.0', "No closing quotation"),
  ("python -m pytest -q tests/launch/option_test.py", "no such file"),
  (f"{TEST}::test_nothing", "no test test_nothing"),
  (f"{TEST} -k nowhere_to_be_found", "-k nowhere_to_be_found"),
  ("make tset", "no target 'tset'"),
]
RIGHT = [
  TINY,
  f"{TINY}:test --config.sync.p=.5 --mesh=tensor:4 --debug",
  f'{COMPILE} --target=cpu:8 --compare="config.sync.p=.5 --config.seed=1"',
  f'{SWEEP} --grid="sync.p=1.0,0.5 parallel.tensor=2,4" --seeds=0,1',
  "python -m docs.demo --cpu_devices=4",
  "python -m launch.train",
  f"{TEST}::test_mesh_flag_is_parsed -k 'mesh and not profile'",
  "make demo",
]


@pytest.mark.parametrize(("command", "message"), WRONG)
@pytest.mark.parametrize("form", ["    {}\n", "```\n{}\n```\n"])
def test_a_wrong_command_is_reported(command, message, form):
  (fault,) = faults(f"Text.\n\n{form.format(command)}")
  assert message in fault


@pytest.mark.parametrize("command", RIGHT)
def test_a_right_command_is_not(command):
  text = f"Run `{command}`, or\n\n    {command}  # a comment\n"
  assert commands(text) == [f"{command}  # a comment", command]
  assert faults(text) == []


def test_commands_are_found_whole():
  text = (
    "As `python -m launch.train\n--config=configs/none.py` has it:\n\n"
    "    GLIBC_TUNABLES=x .venv/bin/python -m launch.train \\\n"
    "      --config=configs/no.py | tee log\n\n"
    "```\n$ python -m pytest \\\n  tests/none.py && make all\n```\n"
  )
  assert [command.split() for command in commands(text)] == [
    ["python", "-m", "pytest", "tests/none.py", "&&", "make", "all"],
    ["python", "-m", "launch.train", "--config=configs/no.py", "|", "tee",
     "log"],
    ["python", "-m", "launch.train", "--config=configs/none.py"],
  ]
  assert len(faults(text)) == 3


@pytest.mark.parametrize(
  ("text", "missing"),
  [
    ("`results/zero.csv` `CLAIMS.md` [log](log/README.md)", []),
    ("`parallel/kernels/<op>/reference.py` `results/*.csv` `zero.csv`", []),
    ("`configs/caatnet/tiny.py:test` `tests/claims_test.py::faults`", []),
    ("`parallel/outer/` `config.sync.p` `a/b` `runs/x.png` [x](https://x)", []),
    ("`results/zeros.csv`", ["results/zeros.csv"]),
    ("`nowhere.py` and [there](docs/nowhere.svg)",
     ["docs/nowhere.svg", "nowhere.py"]),
    ("`parallel/kernels/OP/gpu.py` `parallel/outer/NAME.py`", []),
    ("`parallel/<op>/nowhere.py`", ["parallel/<op>/nowhere.py"]),
    ("`parallel/OP/nowhere.py` `CLAIM.md`", ["parallel/OP/nowhere.py",
                                             "CLAIM.md"]),
    ("`parallel/inner/` `parallel/outre`", ["parallel/inner/",
                                            "parallel/outre"]),
    ("`configs/caatnet/tini.py:test`", ["configs/caatnet/tini.py"]),
  ],
)
def test_a_missing_file_is_reported(text, missing):
  assert faults(text) == [f"{name}: no such file" for name in missing]
