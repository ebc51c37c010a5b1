"""Import rules of ARCHITECTURE.md, one per package."""

import ast
import collections
import pathlib
import re

import pytest

from caatnet.inference.filters import FILTERS

ROOT = pathlib.Path(__file__).parents[1]
OURS = ("parallel", "caatnet", "configs", "launch")
LAZY = "parallel.base.lazy"
FRAMEWORKS = ("flax", "orbax", "ml_collections", "absl")

# Package -> (permitted packages of this project, forbidden packages of others).
# The longest prefix applies. A package may import itself.
PARALLEL = {
  "parallel.base": ((), ("jax", "optax", *FRAMEWORKS)),
  "parallel.plans": (("parallel.base",), ("jax", "optax", *FRAMEWORKS)),
  "parallel.peers": (
    ("parallel.base", "parallel.plans"), ("jax", "optax", *FRAMEWORKS)
  ),
  "parallel.ledger": (("parallel.base", "parallel.plans"), FRAMEWORKS),
  "parallel.xla": (("parallel.ledger",), FRAMEWORKS),
  # Programs: all other modules.
  "parallel": ((), FRAMEWORKS),
}
NO_PROGRAMS = ("parallel.ledger", "parallel.peers")
# Each imports all of `parallel`, and only what stands before it.
ORDER = (
  "caatnet.interrupts", "caatnet.commands", "caatnet.__main__",
  "caatnet.schema", "caatnet.models", "caatnet.data", "caatnet.stages",
  "caatnet.program", "caatnet.train", "caatnet.inference", "caatnet.interop",
  "caatnet.serving", "caatnet.show", "caatnet.federated", "caatnet.config",
  "caatnet.inspection", "caatnet.composition", "caatnet.studies",
  "caatnet.benchmarks", "launch",
)
# Declarations of config keys: of runs, and in the directories of experiments.
SCHEMA = "caatnet.schema"
KEYS = re.compile(r"caatnet\.(benchmarks|studies)\.(\w+\.)?(\w+_)?keys\b")
# Only these import `ml_collections`.
TREES = (
  "caatnet.schema", "caatnet.config", "caatnet.composition",
  "caatnet.benchmarks", "configs",
  "launch",
)


def _within(name: str, room: str) -> bool:
  return name == room or name.startswith(room + ".")


def _imports(source: str) -> list[str]:
  names = []
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      start = "." * node.level + (node.module or "")
      names += [f"{start}.{alias.name}" for alias in node.names]
  return names


def _room(module: str, rooms: object) -> str | None:
  """Returns the longest of the packages that contain a module."""
  return max((r for r in rooms if _within(module, r)), key=len, default=None)


def _permitted(module: str, name: str) -> bool:
  """Returns whether a module may import a name of this project."""
  top = module.partition(".")[0]
  if top == "configs" or KEYS.match(module):
    declares = _within(name, SCHEMA) or bool(KEYS.match(name))
    return declares or (top == "configs" and _within(name, top))
  if top == "parallel":
    room = _room(module, PARALLEL)
    if room == "parallel":
      return _within(name, room) and _room(name, NO_PROGRAMS) is None
    return any(_within(name, r) for r in (room, *PARALLEL[room][0]))
  own, other = _room(module, ORDER), _room(name, ORDER)
  return _within(name, "parallel") or (
    other is not None and ORDER.index(other) <= ORDER.index(own)
  )


def violations(module: str, source: str) -> list[str]:
  """Returns the imports of a module that its rule forbids."""
  top = module.partition(".")[0]
  if top == "caatnet" and _room(module, ORDER) is None:
    return [f"{module}: no place in ORDER"]
  forbidden = {
    "parallel": PARALLEL[_room(module, PARALLEL) or "parallel"][1],
    "configs": ("jax", "numpy", "flax", "absl"),
  }.get("configs" if KEYS.match(module) else top, ())
  if _room(module, TREES) is None:
    forbidden = (*forbidden, "ml_collections")
  found = []
  for name in _imports(source):
    if name.startswith("."):  # relative imports would hide the package
      found.append(f"{module} imports {name}: write the absolute name")
    elif name.partition(".")[0] in OURS:
      if not _permitted(module, name):
        found.append(f"{module} imports {name}")
    elif any(_within(name, f) for f in forbidden):
      found.append(f"{module} imports {name}")
  return found


def _modules() -> dict[str, pathlib.Path]:
  found = {}
  for top in OURS:
    for path in sorted((ROOT / top).rglob("*.py")):
      parts = path.relative_to(ROOT).with_suffix("").parts
      name = ".".join(p for p in parts if p != "__init__")
      if name not in OURS:  # tested by test_packages_import_nothing
        found[name] = path
  return found


@pytest.mark.quick
def test_imports_follow_the_layers():
  found = []
  for name, path in _modules().items():
    found += violations(name, path.read_text())
  assert not found, "\n".join(found)


def test_directories_form_no_cycle():
  """No arrow leads back up in a drawing of the directories."""
  modules = _modules()
  arrows = collections.defaultdict(set)
  for name, path in modules.items():
    for imported in _imports(path.read_text()):
      ends = [
        ".".join(n.split(".")[:3 if n.startswith("parallel.plans.") else 2])
        for n in (name, imported)
      ]
      if imported.partition(".")[0] in OURS and ends[0] != ends[1]:
        arrows[ends[0]].add(ends[1])
  # Directories without arrows out are at the bottom; remove them in turn.
  while arrows:
    bottom = {
      name for name, to in arrows.items() if not to & arrows.keys()
    }
    assert bottom, dict(arrows)
    for name in bottom:
      del arrows[name]


def test_parallel_names_no_config_keys():
  """Callers that know the config add its sections to messages."""
  found = [
    f"{name}: {node.value!r}"
    for name, path in _modules().items() if name.startswith("parallel.")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
    and re.search(r"(?<!jax\.)(?<!caatnet\.)\bconfig\.\w", node.value)
  ]
  assert not found, "\n".join(found)


def test_packages_import_nothing():
  """Except for lazily imported names; tests/exports_test.py resolves them."""
  assert not (ROOT / "configs" / "__init__.py").read_text().strip()
  scripts = (ROOT / "launch" / "__init__.py").read_text()
  assert _imports(scripts) == ["sys", "caatnet.interrupts"]  # before all others
  for top in ("parallel", "caatnet"):
    for path in (ROOT / top).rglob("*.py"):
      if path.name == "__init__.py":
        tree = ast.parse(path.read_text()).body
        if len(tree) == 1:  # the docstring
          continue
        # The docstring, the import of `attach`, and its call.
        assert _imports(path.read_text()) == [f"{LAZY}.attach"], path
        assert len(tree) == 3, path
        assert ast.unparse(tree[2]).startswith(
          "__all__, __getattr__, __dir__ = attach(__name__, "
        ), path


def test_launch_scripts_are_short():
  lengths = {
    path.name: len(path.read_text().splitlines())
    for path in (ROOT / "launch").glob("*.py")
    if path.name not in ("options.py", "processes.py")  # not scripts
  }
  assert {k: v for k, v in lengths.items() if v >= 80} == {}


def test_compiled_functions_call_only_their_own_file():
  """Numba checks only this file to validate its cache."""
  sources = {name: path.read_text() for name, path in _modules().items()}
  loops = [name for name in sources if "\n@compiled(" in sources[name]]
  assert "caatnet.serving.cache.page_loops" in loops
  for name in loops:
    for imported in _imports(sources[name]):
      assert not any(_within(imported, other) for other in loops), name


def test_roots_contain_only_listed_files():
  """Other files belong in a package."""
  roots = {top: {p.name for p in (ROOT / top).glob("*.py")} for top in OURS}
  assert roots["caatnet"] == {
    "__init__.py", "__main__.py", "commands.py", "interrupts.py", "program.py",
    "stages.py",
  }
  assert roots["parallel"] == {
    "__init__.py", "axes.py", "collectives.py", "quantize.py", "routes.py",
    "wire.py", "xla.py",
  }


@pytest.mark.quick
def test_options_start_without_jax():
  tree = ast.parse((ROOT / "launch/options.py").read_text())
  kinds = (ast.Import, ast.ImportFrom)
  at_import = [ast.unparse(n) for n in tree.body if isinstance(n, kinds)]
  names = [name for line in at_import for name in _imports(line)]
  assert names
  assert not [n for n in names if _within(n, "jax")]


def test_each_flag_is_defined_once():
  """Flags of filters in ``launch.generate`` are defined by a loop."""
  names, filters = [], list(FILTERS)
  for path in (ROOT / "launch").rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Call) and "DEFINE_" in ast.unparse(node.func):
        names += filters if "_row" in ast.unparse(node) else [
          ast.literal_eval(node.args[0])
        ]
  assert {"config", "top_p"} < set(names)
  assert len(names) == len(set(names)), sorted(names)


@pytest.mark.parametrize(
  ("module", "source"),
  [
    ("parallel.base.files", "from parallel.plans.hardware import links"),
    ("parallel.base.files", "import jax"),
    ("parallel.plans.network.simulate", "import jax.numpy as jnp"),
    ("parallel.plans.zero.cost", "from parallel.zero import shards"),
    ("parallel.collectives", "import caatnet.config.experiments"),
    ("parallel.collectives", "from .zero import gather"),
    ("parallel.collectives", "from . import zero"),
    ("parallel.collectives", "from parallel.ledger import reading"),
    ("parallel.outer.diloco", "from parallel.peers import swarm"),
    ("parallel.tensor.projections", "from flax import nnx"),
    ("parallel.ledger.ledger", "from parallel.outer import diloco"),
    ("parallel.peers.ring.link_collectives", "from parallel import wire"),
    ("parallel.peers.membership.peer", "import jax"),
    ("caatnet.models.layers", "from caatnet.train import step"),
    ("caatnet.serving.cache.pages", "from caatnet.config import serving"),
    ("caatnet.train.loop", "import ml_collections"),
    ("caatnet.train.evaluate", "from launch import options"),
    ("caatnet.train.loop", "from caatnet.config import experiments"),
    ("caatnet.config.outer", "from caatnet.studies import registry"),
    ("configs.caatnet.tiny", "import jax"),
    ("configs.caatnet.tiny", "from caatnet import build"),
    ("configs.zero.frontier", "from caatnet.studies.partitions import study"),
    ("caatnet.schema.tree", "from caatnet.studies import keys"),
    ("caatnet.studies.flows.keys", "from caatnet.studies.flows import study"),
    ("caatnet.studies.serving.fairness_keys", "import jax"),
    ("caatnet.nowhere", ""),
  ],
)
def test_violation_is_reported(module, source):
  assert violations(module, source)
