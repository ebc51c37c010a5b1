"""Products of few rows that read int8 codes, compared with decoded matrices."""

import jax
import jax.numpy as jnp
import pytest

from parallel.kernels.calls import compiles_loops
from parallel.kernels.coded import CodedMatrix
from tests.parallel.kernels.compare import assert_close

pytestmark = pytest.mark.skipif(not compiles_loops(), reason="needs numba")


@pytest.mark.parametrize(("rows", "channels", "features"), [
  ((1, 1), 4, 2**16 + 1), ((2, 2), 2048, 140), ((3,), 2**17, 2),
  ((64,), 512, 513),
])
def test_product_reads_codes(rows, channels, features):
  """Features that neither pieces nor blocks divide."""
  x = jax.random.normal(jax.random.key(0), (*rows, channels))
  w = jax.random.normal(jax.random.key(1), (1, channels, features))
  coded = CodedMatrix.encode(w, "float32")
  product = jax.jit(lambda x, coded: coded.product(x))
  program = product.lower(x, coded).as_text()
  assert "coded_product" in program
  assert f"{channels}x{features}xf32" not in program  # decoded nowhere
  assert_close(product(x, coded), x @ coded.decode()[0], "float32", 16)


@pytest.mark.parametrize(("rows", "dtype", "channels"), [
  (65, "float32", 2048), (1, "bfloat16", 2048), (1, "float32", 2050),
])
def test_other_products_decode(rows, dtype, channels):
  x = jnp.ones((rows, channels), dtype)
  coded = CodedMatrix.encode(jnp.full((1, channels, 140), 127.0), dtype)
  product = jax.jit(lambda x, coded: coded.product(x))
  assert "coded_product" not in product.lower(x, coded).as_text()
  assert (product(x, coded) == 127 * channels).all()


def test_rows_of_replicas_read_the_same_codes():
  x = jax.random.normal(jax.random.key(0), (3, 2, 2048))
  w = jax.random.normal(jax.random.key(1), (1, 2048, 140))
  coded = CodedMatrix.encode(w, "float32")
  found = jax.vmap(coded.product)(x)
  assert_close(found, x @ coded.decode()[0], "float32", 16)
