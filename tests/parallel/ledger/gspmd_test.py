"""Automatic sharding (GSPMD): bytes per axis equal the explicit program's."""

import jax
import pytest

from tests.parallel.ledger.sharded_programs import PROGRAMS, sent

BOTH = {"data": 2, "tensor": 4}
# On meshes of one axis XLA generates the axis names.
DATA, TENSOR = {"data": 8, "tensor": 1}, {"data": 1, "tensor": 8}


@pytest.mark.parametrize(("name", "sizes"), [
  *((name, BOTH) for name in PROGRAMS),
  ("in layers", TENSOR), ("rows to columns", TENSOR),
  ("sequence parallel", TENSOR), ("gradients", DATA), ("both axes", DATA),
], ids=str)
def test_automatic_sharding_sends_the_bytes_of_the_explicit_program(
  name, sizes
):
  automatic, explicit = sent(PROGRAMS[name], sizes, jax.devices())
  assert automatic == explicit
  assert explicit
