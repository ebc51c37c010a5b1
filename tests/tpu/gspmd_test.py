"""Automatic sharding (GSPMD) compiled for TPUs: `make test-tpu`."""

import pytest

pytest.importorskip("libtpu", reason="the tpu extra is not installed")

from parallel.ledger import targets
from tests.parallel.ledger.sharded_programs import PROGRAMS, sent

BOTH = {"data": 2, "tensor": 4}
# On meshes of one axis XLA generates the axis names.
CASES = [
  ("tpu:v5p:2x2x2", BOTH), ("tpu:v5p:2x2x2", {"data": 1, "tensor": 8}),
  ("tpu:v5p:2x2x2", {"data": 8, "tensor": 1}), ("tpu:v5e:2x4", BOTH),
]


@pytest.mark.parametrize(("target", "sizes"), CASES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_automatic_sharding_sends_the_bytes_of_the_explicit_program(
  name, target, sizes
):
  devices = targets.resolve(target).devices
  automatic, explicit = sent(PROGRAMS[name], sizes, devices, "bfloat16")
  assert automatic == explicit
  assert explicit or 1 in sizes.values()
