"""Eight virtual CPU devices for every test; set before jax starts."""

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
  """Compiled programs of one file are of no use to the next."""
  yield
  jax.clear_caches()
