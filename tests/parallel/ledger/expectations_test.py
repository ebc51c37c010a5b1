"""Planted faults: each fails with the source line that made it."""

import pathlib
import subprocess
import sys

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import pytest

from parallel.ledger.expectations import assert_sends

ROWS, WIDTH = 16, 128
SIZE = ROWS // 2 * WIDTH * 4  # bytes of x on a device, float32
EXPECT = {"data": ("all_reduce", 1), "tensor": SIZE}


def line_of(mark):
  lines = pathlib.Path(__file__).read_text().splitlines()
  (number,) = (n for n, x in enumerate(lines, 1) if x.endswith(f"# {mark}"))
  return f"{__file__}:{number}"


def sharded(f):
  mesh = jax.make_mesh(
    (2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2
  )
  mapped = jax.shard_map(
    f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False,
  )
  return jax.jit(mapped), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def correct(x):
  x = lax.psum(x, "tensor")
  return x + lax.pmean(jnp.sum(x), "data")


def wrong_dtype(x):
  x = lax.psum(x.astype(jnp.bfloat16), "tensor")  # narrow
  x = x.astype(jnp.float32)
  return x + lax.pmean(jnp.sum(x), "data")


def another_gather(x):
  x = lax.psum(x, "tensor")
  y = lax.all_gather(x, "data", tiled=True)  # gather
  return x + y[:8] + lax.pmean(jnp.sum(x), "data")


def full_reduction(x):
  # A reduce-scatter is enough.
  x = lax.psum(x, "tensor")
  x = lax.psum(x, "tensor")  # whole
  return x + lax.pmean(jnp.sum(x), "data")


def axis_too_many(x):
  x = lax.psum(x, ("data", "tensor"))  # both
  return x + lax.pmean(jnp.sum(x), "data")


def repeated(x):
  @jax.checkpoint
  def layer(x):
    return jnp.sin(lax.psum(jnp.sin(x), "tensor"))  # again

  return jax.grad(lambda x: jnp.sum(layer(layer(x))))(x)


def test_correct_program_passes():
  f, x = sharded(correct)
  reading = assert_sends(f, x, expect=EXPECT, dtype="float32")
  assert len(reading.executed) == 2


@pytest.mark.parametrize(("f", "mark", "message"), [
  (wrong_dtype, "narrow", "other dtypes than float32"),
  (another_gather, "gather", "data: expected 1 x all_reduce"),
  (full_reduction, "whole", f"tensor: {2 * SIZE:,} B, expected {SIZE:,} B"),
  (axis_too_many, "both", "data,tensor: nothing is expected"),
])
def test_fault_is_found_with_its_line(f, mark, message):
  f, x = sharded(f)
  with pytest.raises(AssertionError) as error:
    assert_sends(f, x, expect=EXPECT, dtype="float32")
  assert message in str(error.value)
  assert line_of(mark) in str(error.value)
  if mark == "both":  # in any order
    assert_sends(sharded(axis_too_many)[0], x, expect={
      "tensor,data": SIZE, "data": ("all_reduce", 1),
    })


def test_requested_dtype_is_shown_and_unknown_counts_are_faults():
  def loop(x):
    x = lax.psum(x.astype(jnp.bfloat16), "tensor")
    return lax.while_loop(
      lambda x: jnp.sum(x) < 9, lambda x: lax.psum(x, "tensor"),
      x.astype(jnp.float32),
    )

  f, x = sharded(loop)
  for expected in (1, ("all_reduce", 1), "1 kB"):
    with pytest.raises(AssertionError) as error:
      assert_sends(f, x, expect={"tensor": expected})
    assert "(requested bfloat16)" in str(error.value)
    assert ": ? x all_reduce" in str(error.value)


def test_reduction_that_remat_repeats_is_marked():
  f, x = sharded(repeated)
  with pytest.raises(AssertionError, match="again") as error:
    assert_sends(f, x, expect={"tensor": 0})
  assert line_of("again") in str(error.value)


@pytest.mark.parametrize(("expected", "passes"), [
  ("4 kB", True), ("4.1 kB", True), ("4.10 kB", True), ("4.096 kB", True),
  ("4096 B", True), ("4.0 kB", False), ("5 kB", False), ("0.00 MB", True),
  (4096, True), (4097, False), ("0.004 MB", True),
])
def test_size_is_compared_at_the_digits_shown(expected, passes):
  assert SIZE == 4096
  f, x = sharded(lambda x: lax.psum(x, "tensor"))
  if passes:
    assert_sends(f, x, expect={"tensor": expected})
  else:
    with pytest.raises(AssertionError, match="tensor: 4"):
      assert_sends(f, x, expect={"tensor": expected})


RAGGED = """module @m attributes {mhlo.num_replicas = 4 : i32} {
  func.func public @main(%arg0: tensor<8xf32>, %n: tensor<4xi32>)
      -> tensor<8xf32> {
    %0 = stablehlo.custom_call @ragged_all_to_all(
      %arg0, %arg0, %n, %n, %n, %n) {api_version = 4 : i32, backend_config = {
        replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>
    }} : (tensor<8xf32>, tensor<8xf32>, tensor<4xi32>, tensor<4xi32>,
          tensor<4xi32>, tensor<4xi32>) -> tensor<8xf32>
    return %0 : tensor<8xf32>
  }
}
"""


def test_upper_bound_must_be_expected_as_one():
  for expected in ("at most 32 B", "at most 0.03 kB", ("ragged_all_to_all", 1)):
    assert_sends(RAGGED, expect={"4@1": expected})
  for expected in (32, "32 B"):
    with pytest.raises(AssertionError, match="4@1: at most 32 B, expected 32"):
      assert_sends(RAGGED, expect={"4@1": expected})
  with pytest.raises(AssertionError, match=r"at most 32 B .*, expected 33 B"):
    assert_sends(RAGGED, expect={"4@1": "at most 33 B"})
  f, x = sharded(lambda x: lax.psum(x, "tensor"))
  with pytest.raises(AssertionError, match="4,096 B, expected at most 4096 B"):
    assert_sends(f, x, expect={"tensor": "at most 4096 B"})


@pytest.mark.parametrize(("expect", "message"), [
  ({"tensor": "4 KiB"}, "must be a size, as in '3.2 GB'"),
  ({"tensor": 4.5}, "must be a size, as in '3.2 GB'"),
  ({"model": 1}, "the axes of the mesh: data, tensor"),
])
def test_malformed_expectation_is_refused(expect, message):
  f, x = sharded(lambda x: lax.psum(x, "tensor"))
  with pytest.raises(ValueError, match=message):
    assert_sends(f, x, expect=expect)


def test_fixture_of_other_projects(tmp_path):
  (tmp_path / "conftest.py").write_text(
    'pytest_plugins = ["parallel.ledger.pytest_plugin"]\n'
  )
  file = tmp_path / "sums_test.py"
  file.write_text(
    "import jax\n\n\ndef test_nothing_is_sent(assert_sends):\n"
    "  assert_sends(jax.jit(lambda x: 2 * x), 1.0, expect={})\n"
  )
  run = subprocess.run(
    [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
     "--rootdir", str(tmp_path), str(file)],
    capture_output=True, text=True,
  )
  assert "1 passed" in run.stdout, run.stdout + run.stderr
