"""Automatic sharding (GSPMD): bytes per axis equal the explicit program's."""

import jax
import pytest

from tests.parallel.xla.sharded_programs import PROGRAMS, sent

# Includes a mesh of one axis: XLA then generates axis names.
MESHES = (
  {"data": 2, "tensor": 4},
  {"data": 1, "tensor": 8},
  {"data": 8, "tensor": 1},
)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_automatic_sharding_sends_the_bytes_of_the_explicit_program(
  name, sizes
):
  automatic, explicit = sent(PROGRAMS[name], sizes, jax.devices())
  assert automatic == explicit
  assert explicit or 1 in sizes.values()
