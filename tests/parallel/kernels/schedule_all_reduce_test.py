"""Schedules executed from their tables by a kernel, with race detection."""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.axes import Axis, make_mesh
from parallel.collectives import varying
from parallel.kernels.ring_all_reduce import api as ring
from parallel.kernels.schedule_all_reduce import api, cases, reference, tpu
from parallel.ledger import ledger
from tests.parallel.kernels.limits import F2, F4, F8, assert_limit, limits
from tests.parallel.kernels.races import races_found


@pytest.mark.parametrize("name", cases.CASES)
def test_kernel_equals_the_reference_without_races(name):
  table = cases.CASES[name]
  n, chunks = table.shape[1], reference.num_chunks(table)
  # Two segments.
  x = np.random.default_rng(0).normal(size=(n, chunks * 16, 5)).astype("f4")
  f = jax.jit(jax.shard_map(
    lambda x: tpu.schedule_all_reduce(
      x[0], table, axis_name="tensor", rows=8, interpret=True,
      detect_races=True,
    )[None],
    mesh=make_mesh({"tensor": Axis("tensor", n, n)}),
    in_specs=P("tensor"), out_specs=P("tensor"),
  ))
  ours = jax.block_until_ready(f(x))
  assert not races_found()
  segments = [
    reference.schedule_all_reduce(part, table)
    for part in jnp.split(jnp.asarray(x), 2, axis=1)
  ]
  np.testing.assert_array_equal(ours, jnp.concatenate(segments, axis=1))


@pytest.mark.parametrize("name", cases.CASES)
def test_schedules_of_the_cases_are_all_reduces(name):
  table = cases.CASES[name]
  n, chunks = table.shape[1], reference.num_chunks(table)
  x = np.random.default_rng(0).integers(9, size=(n, chunks, 2)).astype("f4")
  out = reference.schedule_all_reduce(jnp.asarray(x), table)
  np.testing.assert_array_equal(out, np.broadcast_to(x.sum(0), x.shape))


@pytest.mark.parametrize(
  ("place", "value", "message"),
  [
    ((0, 1, 0), 1, "round 0, device 1: it sends to device 1"),
    ((0, 1, 0), 1 << 20, "sends to device 1048576, which must be another of"),
    ((1, 2, 1), -1, "round 1, device 2: it sends chunk -1 to device 3"),
    ((1, 2, 3), 2, "operation 2; the operation must be 0 .add. or 1 .copy."),
    ((0, 0, 0), 2, "device 2, which also receives from"),
    ((2, 1, slice(2, 4)), -1, "receives chunk -1 from device 0"),
  ],
)
def test_invalid_tables_are_refused(place, value, message):
  table = cases.ring(4)
  table[place] = value
  with pytest.raises(ValueError, match=message):
    reference.senders(table)


def test_refusals_give_the_reason():
  x = jax.ShapeDtypeStruct((64, 8), jnp.float32)
  names = ("tpu", "reference")
  assert api.select_kernel(x, cases.ring(4), names).name == "tpu"
  assert "multiple of 40" in api.select_kernel(
    x, cases.ring(5), names
  ).refused["tpu"]


@pytest.mark.parametrize(("table", "sent"), [
  (cases.ring(4), 2 * 3 / 4), (cases.chain(4), 2),
])
def test_ledger_counts_kernel_messages(table, sent):
  """Those of the device that sends most, as multiples of the array."""
  axes = {"data": Axis("data", 2, 2), "tensor": Axis("tensor", 4, 4)}
  mesh = make_mesh(axes)
  f = jax.jit(jax.shard_map(
    lambda x: api.schedule_all_reduce(
      x[0], table, axis_name="tensor", implementation="tpu"
    )[None],
    mesh=mesh, in_specs=P(("data", "tensor")), out_specs=P(("data", "tensor")),
  ))
  x = jax.ShapeDtypeStruct((8, 64, 128), jnp.bfloat16)
  lowered = f.trace(x).lower(lowering_platforms=("tpu",))
  [entry] = ledger.collectives(lowered, mesh)
  assert (entry.kind, entry.axes) == ("permute", ("tensor",))
  assert entry.bytes == sent * 64 * 128 * 2
  # Other devices wait for the messages, whether or not the sum is used.
  assert "has_side_effect = true" in lowered.as_text()


@pytest.mark.parametrize("name", cases.CASES)
def test_buffer_grants_go_to_the_next_sender(name):
  """Two grants at the start, one per message except the last two, in order."""
  table = cases.CASES[name]
  sender_of = reference.senders(table)
  whole, first = tpu.add_handshake_columns(table)
  for device in range(table.shape[1]):
    turns = np.flatnonzero(sender_of[:, device] >= 0)
    granted = [*first[:, device], *whole[turns, device, -1]]
    senders = sender_of[turns, device].tolist()
    assert [x for x in granted if x >= 0] == senders
    # Messages alternate between two buffers; sender and receiver agree on it.
    buffers = whole[turns, device, -3].tolist()
    assert buffers == [i % 2 for i in range(len(turns))]
    assert whole[turns, senders, -2].tolist() == buffers


def test_lanes_call_the_kernel_sequentially():
  """A mapped grid may run on two cores, which would mix up messages."""
  lanes, table = 3, cases.ring(2)
  mesh = make_mesh({"tensor": Axis("tensor", 2, 2)})

  def reduce(x, implementation):
    reduced = functools.partial(
      api.schedule_all_reduce, table=table, axis_name="tensor",
      implementation=implementation,
    )
    return jax.shard_map(
      lambda x: jax.vmap(reduced)(x[0])[None], mesh=mesh,
      in_specs=P("tensor"), out_specs=P("tensor"),
    )(x)

  x = np.random.default_rng(0).normal(size=(2, lanes, 32, 8)).astype("f4")
  ours = jax.jit(reduce, static_argnums=1)(x, "tpu_interpret")
  np.testing.assert_allclose(
    ours, np.broadcast_to(x.sum(0), x.shape), rtol=1e-5, atol=1e-5
  )
  lowered = jax.jit(reduce, static_argnums=1).trace(x, "tpu").lower(
    lowering_platforms=("tpu",)
  )
  [entry] = ledger.collectives(lowered, mesh)
  assert (entry.count, entry.bytes) == (lanes, 2 * 1 / 2 * 32 * 8 * 4)


def test_kernels_have_a_barrier_per_axis():
  """Messages of a device that runs ahead must not reach another kernel."""
  mesh = make_mesh({n: Axis(n, 2, 2) for n in ("worker", "data", "tensor")})
  x = jax.ShapeDtypeStruct((64, 8), jnp.float32)

  def program(x):
    wide = varying(x, "worker", "data", "tensor")
    for name in ("data", "tensor"):
      wide = api.schedule_all_reduce(
        wide, cases.ring(2), axis_name=name, implementation="tpu"
      )
      wide, *_ = ring.ring_partial_all_reduce(
        wide, wide, wide, wide, jnp.ones(16), axis_name=name,
        implementation="tpu",
      )
    return wide[None]

  lowered = jax.jit(jax.shard_map(
    program, mesh=mesh, in_specs=P(),
    out_specs=P(("worker", "data", "tensor")),
  )).trace(x).lower(lowering_platforms=("tpu",))
  sent = [(c.axes, c.bytes) for c in ledger.collectives(lowered, mesh)]
  assert sent == [((a,), 64 * 8 * 4) for a in ("data",) * 2 + ("tensor",) * 2]
  numbers = re.findall(r"collective_id\\?22?\W+(\d+)", lowered.as_text())
  assert len(numbers) == len(set(numbers)) == 4


@pytest.mark.quick
@limits([
  (tpu.refusal, (8, 1, F4, 1), (0, 1, F4, 1), "0 rows"),
  (tpu.refusal, (16, 1, F2, 1), (8, 1, F2, 1), "a multiple of 16"),
  (tpu.refusal, (24, 1, F4, 3), (32, 1, F4, 3), "a multiple of 24"),
  (tpu.refusal, (8, 1, F4, 1), (8, 1, F8, 1), "dtype float64"),
  # 8 rows of 4 (4 + 3) + 8 bytes per channel in 8 MiB.
  (tpu.refusal, (8, 2**20 // 36, F4, 1), (8, 2**20 // 36 + 1, F4, 1),
   "8 rows do not fit 8 MB"),
])
def test_limit_separates_supported_from_refused_operands(
  refusal, supported, refused, reason
):
  assert_limit(refusal, supported, refused, reason)


@pytest.mark.quick
@pytest.mark.parametrize(("rows", "chunks", "dtype", "sent"), [
  (32, 4, F4, 8), (64, 4, F4, 16), (96, 4, F4, 24), (192, 4, F2, 48),
  (4096, 8, F4, 512),
])
def test_kernel_sends_the_longest_messages_that_fit(rows, chunks, dtype, sent):
  """A segment has a message of rows per chunk; segments divide all rows."""
  assert tpu._chunk_rows(rows, 8, dtype, chunks) == sent
  # At most 8 MiB: c rows of 1,024 x 36 bytes.
  assert tpu._chunk_rows(2**13, 1024, F4, 1) == 128


@pytest.mark.quick
@pytest.mark.parametrize("table", [
  np.zeros((2, 3), np.int32), np.zeros((1, 2, 5), np.int32),
  np.zeros((1, 2, 4), np.int64),
])
def test_arrays_that_are_no_tables_are_refused(table):
  with pytest.raises(ValueError, match=r"must be int32 \[rounds, devices, 4\]"):
    reference.senders(table)
