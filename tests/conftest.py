"""Eight virtual CPU devices for every test; set before jax starts."""

import collections
import concurrent.futures
import datetime
import gc
import os
import pathlib
import tempfile

from tests import users  # imports no jax

# Tests compile far more than they compute: XLA takes two thirds of the time.
FLAGS = [
  "--xla_backend_optimization_level=0",
  "--xla_llvm_disable_expensive_passes=true",
]
if users.HAS_OPTION:  # jaxlib 0.12 has removed the first flag
  FLAGS += [
    "--xla_cpu_use_fusion_emitters=false",
    # Compiles a small program as one LLVM module instead of one per loop.
    "--xla_cpu_parallel_codegen_split_count=1",
  ]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])

# One cache of compiled programs for the run: xdist's workers and the processes
# that tests start inherit it from the environment. A given folder is kept.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  PROGRAMS = tempfile.TemporaryDirectory(prefix="programs_")  # removed at exit
  os.environ |= {
    "JAX_COMPILATION_CACHE_DIR": PROGRAMS.name,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }

# Rows of tables marked `rotated`: "all", or those of a day, here its number.
# xdist's workers inherit the number, also if they start after midnight.
ROWS = "TEST_ROWS"
if os.environ.setdefault(ROWS, "all") == "day":
  os.environ[ROWS] = str(datetime.date.today().toordinal())

import hypothesis
import jax
import pytest

from parallel.peers.emulation import cpu_limits, namespaces
from tests import unavailable

# The first example of a test may compile, which takes seconds.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# TEST_PLATFORM=cuda,cpu runs tests/parallel/kernels on a GPU. By default its
# products of float32 operands have fewer bits, also those of references.
jax.config.update("jax_platforms", os.environ.get("TEST_PLATFORM", "cpu"))
if "TEST_PLATFORM" in os.environ:
  jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_num_cpu_devices", 8)
# Broadcasting between arrays of different rank is an error.
jax.config.update("jax_numpy_rank_promotion", "raise")


# Files that take longest come first, so that no worker starts one of them when
# the others are done. Makefile keeps xdist from sorting files by its own rule,
# the number of tests.
LONGEST = (
  "caatnet/train/loop_test.py",
  "recipes_test.py",
  "caatnet/models/transformer_test.py",
  "caatnet/train/stages_test.py",
  "caatnet/train/collective_order_test.py",
  "caatnet/models/models_test.py",
  "caatnet/train/outer_loops_test.py",
  "launch/processes_test.py",
  "caatnet/train/zero_test.py",
  "caatnet/train/swarm_test.py",
  "package_test.py",
  "colabs_test.py",
  "reproduce_test.py",
  "configs_test.py",
  "caatnet/train/zero_workers_test.py",
  "caatnet/models/convolutional_test.py",
  "parallel/plans/schedules/run_test.py",
  "parallel/tensor/projections_test.py",
  "caatnet/train/zero_layers_test.py",
  "caatnet/train/linear_model_test.py",
)


def _of_the_day(items, day):
  """Returns the items of a day: all but some rows of tables marked `rotated`.

  Row i of a table is run if i and the day's number are equal modulo the
  argument of the mark, 3 by default.
  """
  rows, kept = collections.Counter(), []
  for item in items:
    mark = item.get_closest_marker("rotated")
    table = (item.path, item.cls, getattr(item, "originalname", item.name))
    of = (mark.args or (3,))[0] if mark else 1
    if (rows[table] - day) % of == 0:
      kept.append(item)
    rows[table] += 1
  return kept


def pytest_collection_modifyitems(config, items):
  if os.environ[ROWS] != "all":
    kept = _of_the_day(items, int(os.environ[ROWS]))
    gone = set(items) - set(kept)
    config.hook.pytest_deselected(items=[i for i in items if i in gone])
    items[:] = kept
  places = {
    pathlib.Path(__file__).parent / name: place
    for place, name in enumerate(LONGEST)
  }
  items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish():
  """Freezes imported objects: collecting them took an eighth of the time."""
  gc.freeze()
  gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def same_bits():
  """Compiler options with which XLA:CPU rounds two programs alike."""
  return users.OPTIONS


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
  """Clears compiled programs, which the next file does not use."""
  yield
  jax.clear_caches()


@pytest.fixture(scope="module")
def pool():
  """Threads for three peers, which wait for each other."""
  with concurrent.futures.ThreadPoolExecutor(3) as pool:
    yield pool


@pytest.fixture
def root():
  """Skips the test if this user cannot shape links."""
  with unavailable.skips(), namespaces.delayed_link(100, 10):
    pass


@pytest.fixture
def quotas():
  """Skips the test if this user cannot limit processor time."""
  with unavailable.skips(), cpu_limits.limited_groups(0.9, 1):
    pass
