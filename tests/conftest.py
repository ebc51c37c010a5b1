"""Eight virtual CPU devices for every test; set before jax starts."""

import importlib.metadata
import os

# Tests compile far more than they compute: two thirds of the time are XLA's.
FLAGS = [
  "--xla_backend_optimization_level=0",
  "--xla_llvm_disable_expensive_passes=true",
]
EMITTERS = importlib.metadata.version("jaxlib").startswith("0.10.")
if EMITTERS:  # the flag is gone in 0.12
  FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])

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
