"""Kernels of gather_rows compared with the reference, bit for bit."""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.kernels.gather_rows import api, cases, order, tpu

KERNELS = ("tpu_interpret", "gpu_interpret", "reference")


@pytest.mark.parametrize("name", cases.CASES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_equals_the_reference(kernel, name):
  case = cases.CASES[name]
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(case.rows, case.width)).astype("f4")
  ids = rng.integers(0, case.rows, case.ids).astype("i4")
  ids[:2] = 0, case.rows - 1
  chosen = api.choice(case.rows, case.width, rows.dtype, kernel)
  stored = jax.numpy.asarray(order.stored(rows, chosen.kind))
  found = api.gather_rows(stored, jax.numpy.asarray(ids), case.width, chosen)
  np.testing.assert_array_equal(found, rows[ids])


@pytest.mark.parametrize("width", [100, 2500])
def test_copies_are_split_into_grid_steps(monkeypatch, width):
  """Six ids, of one and of two blocks, in steps of four copies."""
  monkeypatch.setattr(tpu, "_COPIES", 4)
  rows = np.random.default_rng(0).normal(size=(37, width)).astype("f4")
  ids = np.array([36, 0, 7, 7, 20, 35], "i4")
  stored = jax.numpy.asarray(order.stored(rows, "tpu"))
  found = tpu.gather(stored, jax.numpy.asarray(ids), width, interpret=True)
  np.testing.assert_array_equal(found, rows[ids])


def test_table_that_is_a_multiple_of_blocks_is_not_copied():
  rows = np.zeros((32, 128), "f4")
  for kind in ("tpu", "gpu", "reference"):
    assert np.shares_memory(order.stored(rows, kind), rows)


def test_gpu_program_reads_the_table_from_pinned_memory():
  """Lowers for CUDA on any host: the kernel's operand is the argument."""
  mesh = jax.make_mesh(
    (1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  chosen = api.choice(1000, 100, np.dtype("f4"), "gpu")
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
    ("gpu", 2**27, "f4", "places are int32"),
  ):
    with pytest.raises(ValueError, match=why):
      api.choice(rows, 16, np.dtype(dtype), kernel)
    chosen = api.choice(rows, 16, np.dtype(dtype), (kernel, "reference"))
    assert chosen.name == "reference"
    assert why in chosen.refused[kernel]
