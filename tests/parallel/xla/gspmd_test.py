"""Programs of automatic sharding send what the explicit ones do, by axis."""

import jax
import pytest

from tests.parallel.xla.sharded_programs import PROGRAMS, sent

# A mesh of one axis, too: XLA then makes up axes without our names.
MESHES = (
  {"data": 2, "tensor": 4},
  {"data": 1, "tensor": 8},
  {"data": 8, "tensor": 1},
)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_automatic_sharding_sends_what_the_explicit_program_does(name, sizes):
  automatic, explicit = sent(PROGRAMS[name], sizes, jax.devices())
  assert automatic == explicit
  assert explicit or 1 in sizes.values()
