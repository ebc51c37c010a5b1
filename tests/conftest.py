"""Eight virtual CPU devices for every test; set before jax starts."""

import importlib.metadata
import os
import tempfile

# Tests compile far more than they compute: two thirds of the time are XLA's.
FLAGS = [
  "--xla_backend_optimization_level=0",
  "--xla_llvm_disable_expensive_passes=true",
]
EMITTERS = importlib.metadata.version("jaxlib").startswith("0.10.")
if EMITTERS:  # the flag is gone in 0.12
  FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])

# One cache of compiled programs for the run: xdist's workers and the processes
# that tests start have it from the environment. A folder that is given stays.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  PROGRAMS = tempfile.TemporaryDirectory(prefix="programs_")  # goes at exit
  os.environ |= {
    "JAX_COMPILATION_CACHE_DIR": PROGRAMS.name,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def same_bits():
  """Compiler options with which XLA:CPU rounds two programs alike."""
  return {"xla_cpu_use_fusion_emitters": True} if EMITTERS else {}


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
  """Compiled programs of one file are of no use to the next."""
  yield
  jax.clear_caches()
