"""Import rules: the table of ARCHITECTURE.md, enforced."""

import ast
import pathlib
import re

import pytest

from caatnet.inference.filters import FILTERS

ROOT = pathlib.Path(__file__).parents[1]
OURS = ("parallel", "caatnet", "configs", "launch")

# The longest matching prefix applies: prefix -> (permitted modules of this
# project, forbidden packages). A prefix may always import itself.
NUMPY_ONLY = ("jax", "flax", "optax", "orbax", "ml_collections", "absl")
# Like NUMPY_ONLY, but with ml_collections.
SCHEMA = ("jax", "flax", "optax", "orbax", "absl")
LIBRARY = ("flax", "orbax", "ml_collections", "absl")
# Files of packages with jax that packages without it may import.
COSTS = (
  "parallel.plans.zero.partition",
  "parallel.plans.zero.cost",
  "parallel.plans.outer.cost",
  "parallel.plans.outer.fragment_plan",
)
LAZY = "parallel.base.lazy"
# Permitted in every package: lists of public names, checks, schemas, files.
ANYWHERE = ("parallel.base",)
# Declarations of the config keys of studies and benchmarks.
KEYS = tuple(
  ".".join(path.relative_to(ROOT).with_suffix("").parts)
  for folder in ("benchmarks", "studies")
  for path in sorted((ROOT / "caatnet" / folder).rglob("*keys.py"))
)
RULES = {
  "parallel.base": ((), NUMPY_ONLY),
  "parallel.plans.hardware": ((), NUMPY_ONLY),
  "parallel.plans.topology": (("parallel.plans.hardware",), NUMPY_ONLY),
  "parallel.plans.schedules": (("parallel.plans.topology",), NUMPY_ONLY),
  "parallel.schedules.run": (
    ("parallel.axes", "parallel.collectives", "parallel.plans.schedules"),
    LIBRARY,
  ),
  "parallel.pipeline": ((), NUMPY_ONLY),
  "parallel.pipeline.run": (
    ("parallel.axes", "parallel.collectives", "parallel.pipeline"),
    LIBRARY,
  ),
  "parallel.pipeline.actions": (("parallel.pipeline",), LIBRARY),
  "parallel.pipeline.residuals": ((), LIBRARY),
  "parallel.plans.network": (
    (
      "parallel.pipeline",
      "parallel.plans.schedules",
      "parallel.plans.topology",
      "parallel.plans.hardware",
      "parallel.plans.workload",
      *COSTS,
    ),
    NUMPY_ONLY,
  ),
  "parallel.plans.planner": (
    (
      "parallel.plans.network",
      "parallel.pipeline",
      "parallel.plans.schedules",
      "parallel.plans.topology",
      "parallel.plans.hardware",
      "parallel.plans.workload",
      *COSTS,
    ),
    NUMPY_ONLY,
  ),
  "parallel.plans.nanobatches": (
    ("parallel.plans.network", "parallel.plans.hardware", "parallel.plans.workload"), NUMPY_ONLY
  ),
  "parallel.plans.workload": (("parallel.plans.hardware",), NUMPY_ONLY),
  "parallel.axes": ((), LIBRARY),
  "parallel.kernels": ((), LIBRARY),
  "parallel.collectives": (("parallel.axes", "parallel.kernels"), LIBRARY),
  "parallel.routes": (("parallel.collectives",), LIBRARY),
  "parallel.tensor": (
    (
      "parallel.axes",
      "parallel.collectives",
      "parallel.kernels",
      "parallel.routes",
    ),
    LIBRARY,
  ),
  "parallel.wire": (("parallel.kernels",), LIBRARY),
  "parallel.quantize": (
    (
      "parallel.axes",
      "parallel.collectives",
      "parallel.kernels",
      "parallel.wire",
    ),
    LIBRARY,
  ),
  "parallel.zero": (
    (
      "parallel.axes",
      "parallel.collectives",
      "parallel.memory.offload",
      "parallel.quantize",
      "parallel.wire",
      "parallel.kernels",
    ),
    LIBRARY,
  ),
  # Read by packages without jax, so these load none.
  "parallel.plans.zero.partition": (("parallel.plans.zero.cost",), NUMPY_ONLY),
  "parallel.plans.zero.cost": (("parallel.plans.zero.partition",), NUMPY_ONLY),
  "parallel.memory": (("parallel.plans.hardware", "parallel.plans.workload"), NUMPY_ONLY),
  "parallel.plans.placement.periods": ((), NUMPY_ONLY),
  "parallel.memory.offload": (("parallel.plans.placement.periods",), LIBRARY),
  **dict.fromkeys(
    ("parallel.memory.features", "parallel.memory.ways"),
    (
      (
        "parallel.axes",
        "parallel.collectives",
        "parallel.kernels",
        "parallel.memory",
      ),
      LIBRARY,
    ),
  ),
  "parallel.outer": (
    (
      "parallel.axes",
      "parallel.collectives",
      "parallel.quantize",
      "parallel.wire",
      "parallel.kernels",
    ),
    LIBRARY,
  ),
  "parallel.plans.outer.cost": (("parallel.plans.outer.fragment_plan",), NUMPY_ONLY),
  "parallel.plans.outer.fragment_plan": ((), NUMPY_ONLY),
  # Bytes and float32 on sockets: callers pass codecs and choose the order of
  # rings.
  "parallel.elastic": ((), NUMPY_ONLY),
  "parallel.xla": (("parallel.plans.hardware", "parallel.axes"), LIBRARY),
  "parallel.xla.conformal": ((), NUMPY_ONLY),
  # The command line starts without jax.
  "caatnet.commands": (("caatnet.interrupts",), NUMPY_ONLY),
  "caatnet.interrupts": ((), NUMPY_ONLY),
  "caatnet.__main__": (("caatnet.commands",), NUMPY_ONLY),
  "caatnet.models": (
    (
      "parallel.axes",
      "parallel.collectives",
      "parallel.memory.offload",
      "parallel.tensor",
      "parallel.kernels",
      "parallel.plans.workload",
    ),
    ("ml_collections", "absl", "optax", "orbax"),
  ),
  "caatnet.data": (
    (
      "caatnet.config.schema", "parallel.memory",
    ),
    ("flax", "orbax", "ml_collections", "absl", "optax"),
  ),
  "caatnet.stages": (("parallel.axes", "parallel.pipeline"), LIBRARY),
  "caatnet.program": (
    ("caatnet.models", "caatnet.stages", "parallel"),
    ("flax", "ml_collections", "absl"),
  ),
  "caatnet.train": (
    (
      "caatnet.commands",
      "caatnet.config.schema",
      "caatnet.data",
      "caatnet.interrupts",
      "caatnet.models.access",
      "caatnet.models.protocol",
      "caatnet.program",
      "caatnet.stages",
      "parallel",
    ),
    ("flax", "ml_collections", "absl"),
  ),
  "caatnet.federated": (
    (
      "caatnet.config.schema",
      "caatnet.data",
      "caatnet.models",
      "caatnet.program",
      "parallel.base.plot",
      "parallel.base.report",
      "caatnet.train",
      "parallel",
    ),
    ("flax", "ml_collections", "absl"),
  ),
  # The server's core and its simulation, and clients in numpy: no jax.
  **dict.fromkeys(
    ("caatnet.federated.client", "caatnet.federated.events",
     "caatnet.federated.flower", "caatnet.federated.messages",
     "caatnet.federated.sampling",
     "caatnet.federated.server", "caatnet.federated.simulate",
     "caatnet.federated.snapshot", "caatnet.federated.state",
     "caatnet.federated.transfers"),
    (("caatnet.federated",
      "parallel.elastic"), NUMPY_ONLY),
  ),
  **dict.fromkeys(
    ("caatnet.federated.predict", "caatnet.federated.streamed"),
    (("caatnet.federated", "parallel.elastic.transport.frames",
      "parallel.plans.network"), NUMPY_ONLY),
  ),
  "caatnet.federated.uplinks": (("parallel.plans.network",), NUMPY_ONLY),
  "caatnet.federated.links": ((), NUMPY_ONLY),
  "caatnet.inference": (
    (
      "caatnet.data",
      "caatnet.models",
      "caatnet.program",
      "parallel",
    ),
    ("ml_collections", "absl", "optax", "orbax"),
  ),
  # Schedules and simulations load no jax.
  "caatnet.serving": (
    (
      "caatnet.config.schema",
      "parallel.plans.hardware",
      "parallel.plans.placement.slots",
      "parallel.plans.network",
      "parallel.plans.workload",
    ),
    (*NUMPY_ONLY, "pydantic"),
  ),
  "caatnet.serving.engine.calibration": (
    ("caatnet.inference", "caatnet.models.paged", "caatnet.serving"),
    ("ml_collections", "absl", "optax", "orbax", "pydantic"),
  ),
  "caatnet.serving.engine.device": (
    ("caatnet.inference", "caatnet.models.paged", "caatnet.serving"),
    ("ml_collections", "absl", "optax", "orbax", "pydantic"),
  ),
  "caatnet.serving.engine.device_weights": (
    ("caatnet.inference", "caatnet.program", "caatnet.serving"),
    ("ml_collections", "absl", "optax", "orbax", "pydantic"),
  ),
  "caatnet.serving.engine.expert_weights": (
    ("caatnet.serving",),
    ("ml_collections", "absl", "optax", "orbax", "pydantic"),
  ),
  "caatnet.serving.engine.warm_up": (
    ("caatnet.inference", "caatnet.models.paged", "caatnet.serving"),
    ("ml_collections", "absl", "optax", "orbax", "pydantic"),
  ),
  "caatnet.serving.differences": (
    ("caatnet.serving.experts", "parallel.kernels"),
    ("ml_collections", "absl", "optax", "orbax", "pydantic"),
  ),
  "caatnet.serving.generate": (
    ("caatnet.data", "caatnet.inference", "caatnet.serving"),
    ("ml_collections", "absl", "optax", "orbax", "pydantic"),
  ),
  "caatnet.serving.server": (
    (
      "caatnet.data", "caatnet.inference", "caatnet.serving",
      "parallel.plans.placement.slots",
    ),
    ("ml_collections", "absl", "optax", "orbax"),
  ),
  "caatnet.interop": (
    (
      "caatnet.data.tokenizers",
      "caatnet.inference",
      "caatnet.models",
      "caatnet.train",
      "parallel.axes",
      "parallel.tensor",
    ),
    ("flax", "ml_collections", "absl", "torch", "transformers"),
  ),
  "caatnet.show": (
    (
      "caatnet.commands",
      "caatnet.data.protocol",
      "caatnet.data.tokenizers",
      "caatnet.inference",
      "caatnet.serving.generate",
      "caatnet.train",
    ),
    ("flax", "ml_collections", "absl"),
  ),
  # Reports as data.
  "parallel.base.plot": ((), (*NUMPY_ONLY, "matplotlib", "rich")),
  "parallel.base.report": (
    ("parallel.base.plot",), (*NUMPY_ONLY, "matplotlib", "rich"),
  ),
  # A coordinator starts without jax.
  "caatnet.show.swarms": (("parallel.elastic",), NUMPY_ONLY),
  # Declarations of config keys, also used by configs: no jax.
  "caatnet.config.schema": ((), SCHEMA),
  "caatnet.config": (
    (
      "caatnet.data",
      "caatnet.federated",
      "caatnet.inference",
      "caatnet.interop",
      "caatnet.models",
      "caatnet.program",
      "caatnet.stages",
      "caatnet.serving",
      "caatnet.train",
      "parallel",
    ),
    ("absl",),
  ),
  "caatnet.composition": (
    (
      "caatnet.config",
      "caatnet.data",
      "caatnet.serving",
      "caatnet.show",
      "caatnet.train",
      "parallel.xla.persistent",
    ),
    ("flax", "absl", "pydantic"),
  ),
  "caatnet.studies": (
    (
      "caatnet.config.schema",
      "caatnet.federated",
      "caatnet.inference",
      "caatnet.interop.families",
      "caatnet.models.nanobatches",
      "caatnet.models.paged",
      "caatnet.program",
      "caatnet.serving",
      "caatnet.show",
      "caatnet.train",
      "parallel",
    ),
    ("flax", "ml_collections", "absl"),
  ),
  # Closed forms and searches of one study: no jax.
  **{
    f"caatnet.studies.{name}": (
      ("caatnet.studies", "parallel"), NUMPY_ONLY,
    )
    for name in (
      "alignment.predictor", "collectives.chosen", "datacentre.closed_forms",
      "datacentre.expressions", "datacentre.knobs", "datacentre.uncertainty",
      "flows.link_loads", "flows.patterns",
      "partitions.predictor", "published.choosers", "published.models",
      "utilisation.predictor", "utilisation.recommend",
    )
  },
  **{
    name: (("caatnet.config.schema", *KEYS), SCHEMA)
    for name in (*KEYS, "caatnet.benchmarks.registry")
  },
  "configs": (
    ("caatnet.config.schema", *KEYS), ("jax", "numpy", "flax", "absl")
  ),
  "launch": (
    ("caatnet", "parallel", "launch.options", "launch.swarms"),
    ("flax", "orbax"),
  ),
  "launch.options": (
    (
      "caatnet.commands", "caatnet.config.schema",
      "caatnet.interrupts", "launch.full_disks", "launch.overriding",
      "launch.processes",
      "parallel.base.heap", "parallel.xla.persistent",
    ),
    ("flax", "orbax"),
  ),
  "launch.full_disks": ((), NUMPY_ONLY),
  "launch.overriding": (("caatnet.config.schema",), ("flax", "orbax")),
  "launch.processes": ((), ("flax", "orbax")),
  "caatnet.benchmarks": (("caatnet", "parallel"), ()),
}


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


def violations(module: str, source: str) -> list[str]:
  """Returns the imports of a module that its rule forbids."""
  rooms = [room for room in RULES if _within(module, room)]
  if not rooms:
    return [f"{module}: no rule for this room"]
  room = max(rooms, key=len)
  allowed, forbidden = RULES[room]
  found = []
  for name in _imports(source):
    if name.startswith("."):  # relative imports would hide the package
      found.append(f"{module} imports {name}: write the absolute name")
    ours = name.split(".")[0] in OURS
    own = room if room != "launch" else module
    if ours and not any(_within(name, a) for a in (*allowed, own, *ANYWHERE)):
      found.append(f"{module} imports {name}")
    if not ours and any(_within(name, f) for f in forbidden):
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
    "wire.py", "workload.py",
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
    ("parallel.axes", "from parallel import collectives"),
    ("parallel.collectives", "import caatnet.config.experiments"),
    ("parallel.collectives", "from .zero import gather"),
    ("parallel.collectives", "from . import zero"),
    ("parallel.tensor.projections", "from flax import nnx"),
    ("parallel.plans.network.simulate", "import jax.numpy as jnp"),
    ("parallel.plans.pipeline.cost", "import jax"),
    ("parallel.plans.pipeline.simulate", "from parallel.plans.network import trace"),
    ("parallel.plans.zero.cost", "import jax"),
    ("parallel.plans.zero.cost", "from parallel.zero import gather"),
    ("parallel.outer.diloco", "from parallel.zero import partition"),
    ("parallel.xla.ledger", "from parallel.outer import diloco"),
    ("parallel.elastic.ring.link_collectives", "from parallel import wire"),
    ("parallel.elastic.membership.peer", "import jax"),
    ("caatnet.studies.alignment.predictor", "import jax"),
    ("parallel.memory.features", "from parallel.zero import cost"),
    ("caatnet.models.layers", "from caatnet.train import step"),
    ("caatnet.serving.scheduler.scheduler", "import jax"),
    ("caatnet.serving.cache.pages", "from caatnet.inference import decoder"),
    ("caatnet.serving.generate", "import pydantic"),
    ("caatnet.train.loop", "import ml_collections"),
    ("caatnet.train.evaluate", "from launch import options"),
    ("caatnet.train.loop", "from caatnet.config import experiments"),
    ("caatnet.config.outer", "from caatnet.studies import registry"),
    ("parallel.plans.planner.outer", "from parallel.outer import streaming"),
    ("parallel.plans.outer.fragment_plan", "import jax"),
    ("parallel.plans.outer.cost", "from parallel.outer import exchange"),
    ("configs.caatnet.tiny", "import jax"),
    ("configs.caatnet.tiny", "from caatnet import build"),
    ("configs.zero.frontier", "from caatnet.studies.partitions import study"),
    ("caatnet.config.schema.tree", "from caatnet.studies import keys"),
    ("caatnet.studies.flows.keys", "from caatnet.studies.flows import study"),
    ("launch.demo", "from launch import train"),
    ("parallel.nowhere", ""),
  ],
)
def test_violation_is_reported(module, source):
  assert violations(module, source)
