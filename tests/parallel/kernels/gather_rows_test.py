"""Kernels of gather_rows compared with the reference, bit for bit."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.kernels.gather_rows import api, cases, gpu, order, tpu
from tests.parallel.kernels.compare import KERNELS
from tests.parallel.kernels.limits import F4, assert_limit, limits


@pytest.mark.parametrize("name", cases.CASES)
@pytest.mark.parametrize("kernel", [*KERNELS, "reference"])
def test_kernel_equals_the_reference(kernel, name):
  case = cases.CASES[name]
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(case.rows, case.width)).astype("f4")
  ids = rng.integers(0, case.rows, case.ids).astype("i4")
  ids[:2] = 0, case.rows - 1
  chosen = api.select_kernel(case.rows, case.width, rows.dtype, kernel)
  there = SingleDeviceSharding(
    jax.devices()[0],
    memory_kind="pinned_host" if kernel in ("gpu", "tpu") else None,
  )
  stored = jax.device_put(order.lay_out_table(rows, chosen.kind), there)
  found = api.gather_rows(stored, jnp.asarray(ids), case.width, chosen)
  np.testing.assert_array_equal(found, rows[ids])


@pytest.mark.parametrize("width", [100, 2500])
def test_copies_are_split_into_grid_steps(monkeypatch, width):
  """Six ids, of one and of two blocks, in steps of four copies."""
  monkeypatch.setattr(tpu, "_COPIES", 4)
  rows = np.random.default_rng(0).normal(size=(37, width)).astype("f4")
  ids = np.array([36, 0, 7, 7, 20, 35], "i4")
  stored = jnp.asarray(order.lay_out_table(rows, "tpu"))
  found = tpu.gather(stored, jnp.asarray(ids), width, interpret=True)
  np.testing.assert_array_equal(found, rows[ids])


def test_table_that_is_a_multiple_of_blocks_is_not_copied():
  rows = np.zeros((32, 128), "f4")
  for kind in ("tpu", "gpu", "reference"):
    assert np.shares_memory(order.lay_out_table(rows, kind), rows)


def test_gpu_program_reads_the_table_from_pinned_memory():
  """Lowers for CUDA on any host: the kernel's operand is the argument."""
  mesh = jax.make_mesh(
    (1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  chosen = api.select_kernel(1000, 100, np.dtype("f4"), "gpu")
  host = NamedSharding(mesh, P(), memory_kind="pinned_host")
  each = NamedSharding(mesh, P("d"))
  program = jax.jit(
    jax.shard_map(
      lambda rows, ids: api.gather_rows(rows, ids[0], 100, chosen)[None],
      mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"),
    ),
    in_shardings=(host, each),
  )
  text = program.trace(
    jax.ShapeDtypeStruct((100_000,), "f4", sharding=host),
    jax.ShapeDtypeStruct((1, 64), "i4", sharding=each),
  ).lower(lowering_platforms=("cuda",)).as_text()
  argument = text.index('%arg0: tensor<100000xf32> {mhlo.memory_kind = "pinned')
  call = text.index("__gpu$xla.gpu.triton")
  assert argument < call
  assert "%arg0)" in text[call : call + 60]


def test_unsupported_tables_are_refused():
  for kernel, rows, dtype, why in (
    ("tpu", 10, "f8", "dtype float64: float32"),
    ("gpu", 10, "f8", "dtype float64: float32"),
    ("gpu", 2**27, "f4", "134217728 x 16 elements: places are int32"),
  ):
    with pytest.raises(ValueError, match=why):
      api.select_kernel(rows, 16, np.dtype(dtype), kernel)
    chosen = api.select_kernel(rows, 16, np.dtype(dtype), (kernel, "reference"))
    assert chosen.name == "reference"
    assert why in chosen.refused[kernel]


@pytest.mark.quick
@limits([
  (gpu.refusal, (2**27 - 1, 16, F4), (2**27, 16, F4), "int32"),
])
def test_limit_separates_supported_from_refused_operands(
  refusal, supported, refused, reason
):
  assert_limit(refusal, supported, refused, reason)


@pytest.mark.quick
@pytest.mark.parametrize(("width", "padded", "waste"), [
  (1, 1, 2048), (3, 4, 2048 / 3), (128, 128, 16), (129, 256, 2048 / 129),
  (2048, 2048, 1), (2049, 4096, 4096 / 2049),
])
def test_rows_are_padded_to_divisors_or_multiples_of_a_block(
  width, padded, waste
):
  assert order.padded_width(width) == padded
  assert order.read_amplification(width, "tpu") == pytest.approx(waste)
  assert order.read_amplification(width, "gpu") == 1
  blocks = -(-3 * padded // 2048)
  assert order.stored_shape(3, width, "tpu") == (blocks, 8, 256)
  assert order.stored_shape(3, width, "gpu") == (3 * width,)
  assert order.stored_shape(3, width, "reference") == (3, width)


@pytest.mark.quick
@pytest.mark.parametrize("width", [1, 2, 97, 98, 400])
def test_programs_of_a_gather_have_a_warp_per_line(width):
  """The lanes of a row with its offset in a line, at most four warps."""
  jaxpr = str(jax.make_jaxpr(
    functools.partial(gpu.gather, width=width)
  )(jnp.zeros(4 * width), jnp.arange(3)))
  lanes = 1 << (width + 31 - 1).bit_length()
  assert f"num_warps={min(4, lanes // 32)}" in jaxpr
