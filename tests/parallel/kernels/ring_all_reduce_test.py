"""Remote-DMA rings, interpreted with race detection on virtual devices."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.axes import Axis, make_mesh
from parallel.collectives import varying
from parallel.kernels.ring_all_reduce import api, reference, tpu
from parallel.kernels.ring_all_reduce.cases import CASES, RingCase
from tests.parallel.kernels.limits import F2, F4, F8, assert_limit, limits
from tests.parallel.kernels.races import races_found

SPECS = (P(), *(P("tensor"),) * 3, P())


def draw(case):
  rng = np.random.default_rng(0)

  def normal(*shape, dtype=case.dtype):
    return jnp.asarray(rng.normal(size=shape), dtype)

  n, t, k, p = case.devices, case.rows, case.shared, case.private
  return (
    normal(t, k), normal(n, t, p), normal(n, t, k), normal(n, t, p),
    normal(k + p, dtype="float32"),
  )


def on_devices(f, n):
  def body(shared, private, partial, d_private, gain):
    out = f(shared, private[0], partial[0], d_private[0], gain)
    return jax.tree.map(lambda x: x[None], out)

  return jax.jit(jax.shard_map(
    body, mesh=make_mesh({"tensor": Axis("tensor", n, n)}), in_specs=SPECS,
    out_specs=P("tensor"),
  ))


@pytest.mark.rotated
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_the_reference_without_races(name):
  case = CASES[name]
  operands = draw(case)

  def ring(shared, private, partial, d_private, gain):
    shared, gain = varying(shared, "tensor"), varying(gain, "tensor")
    return tpu.ring_partial_all_reduce(
      shared, private, partial, d_private, gain, axis_name="tensor",
      private_scale=float(np.asarray(case.private_scale, case.dtype)),
      eps=0.3, rows=case.chunk, interpret=True, detect_races=True,
    )

  ours = jax.block_until_ready(on_devices(ring, case.devices)(*operands))
  assert not races_found()
  theirs = reference.ring_partial_all_reduce(
    *operands, private_scale=case.private_scale, eps=0.3
  )
  if case.chunk:  # each segment has its ring: the sum's order is per segment
    cut = [
      x.reshape(*x.shape[:-2], -1, 2 * case.devices * case.chunk, x.shape[-1])
      for x in operands[:-1]
    ]
    segments = [
      reference.ring_partial_all_reduce(
        *(x[..., i, :, :] for x in cut), operands[-1],
        private_scale=case.private_scale, eps=0.3,
      )
      for i in range(cut[0].shape[0])
    ]
    theirs = [jnp.concatenate(x, axis=1) for x in zip(*segments, strict=True)]
  for a, b in zip(ours[:2], theirs[:2], strict=True):
    np.testing.assert_array_equal(np.asarray(a, "f4"), np.asarray(b, "f4"))
  unit = 2.0**-7 if case.dtype == "bfloat16" else 1e-5
  np.testing.assert_allclose(
    np.asarray(ours[2], "f4"), np.asarray(theirs[2], "f4"), rtol=unit,
    atol=unit,
  )


def test_gradient_equals_that_of_psum():
  case = RingCase(2, 64, 16, 24)
  operands = draw(case)
  results = []
  for implementation in ("tpu_interpret", "reference"):

    def gradients(*operands, implementation=implementation):
      out, transpose = jax.vjp(
        functools.partial(
          api.ring_partial_all_reduce, axis_name="tensor", private_scale=2.0,
          eps=0.3, implementation=implementation,
        ),
        *(varying(x, "tensor") for x in operands),
      )
      weights = [jnp.cos(jnp.arange(x.size).reshape(x.shape)) for x in out]
      weights = [
        varying(w, "tensor") * (1.0 + jax.lax.axis_index("tensor").astype("f4"))
        for w in weights
      ]
      return out, transpose(tuple(weights))

    results.append(on_devices(gradients, 2)(*operands))
  for a, b in zip(*map(jax.tree.leaves, results), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


def test_leading_dims_are_rows():
  """A batch of rows equals the rows of one dim; defaults have no effect."""
  case = CASES["four devices"]._replace(private_scale=1.0)
  operands = draw(case)

  def body(*operands, shape):
    *rows, gain = operands
    return api.ring_partial_all_reduce(
      *(x.reshape(*shape, x.shape[-1]) for x in rows), gain,
      axis_name="tensor", implementation="reference",
    )

  found = on_devices(functools.partial(body, shape=(2, 4, 8)), 4)(*operands)
  flat = on_devices(functools.partial(body, shape=(64,)), 4)(*operands)
  theirs = reference.ring_partial_all_reduce(*operands)
  for a, b, c in zip(found, flat, theirs, strict=True):
    assert a.shape == (4, 2, 4, 8, b.shape[-1])
    np.testing.assert_array_equal(a.reshape(b.shape), b)
    np.testing.assert_allclose(b, c, rtol=1e-5, atol=1e-5)


def test_refusals_give_the_reason():
  x = jax.ShapeDtypeStruct((64, 8), jnp.float32)
  names = ("tpu", "gpu", "reference")
  assert api.select_kernel(x, x, 2, names).name == "tpu"
  assert "multiple of 80" in api.select_kernel(x, x, 5, names).refused["tpu"]
  assert "one device" in api.select_kernel(x, x, 1, names).refused["tpu"]
  wide = jax.ShapeDtypeStruct((32, 9830), jnp.float32)
  assert "width 19660" in api.select_kernel(wide, wide, 2, names).refused["tpu"]


@pytest.mark.quick
@limits([
  (tpu.refusal, (32, 8, 8, F4, 2), (32, 8, 8, F4, 1), "one device"),
  (tpu.refusal, (64, 8, 8, F2, 2), (32, 8, 8, F2, 2), "multiple of 64"),
  (tpu.refusal, (96, 8, 8, F4, 3), (64, 8, 8, F4, 3), "multiple of 48"),
  (tpu.refusal, (32, 1, 1, F4, 2), (32, 0, 1, F4, 2), "no shared"),
  (tpu.refusal, (32, 1, 1, F4, 2), (32, 1, 0, F4, 2), "no private"),
  (tpu.refusal, (32, 1, 1, F4, 2), (32, 1, 1, F8, 2), "float64"),
  # 32 rows of K + K channels: 80 K bytes per row in 24 MiB.
  (tpu.refusal, (32, 9830, 9830, F4, 2), (32, 9831, 9831, F4, 2),
   "32 rows do not fit 24 MB"),
])
def test_limit_separates_supported_from_refused_operands(
  refusal, supported, refused, reason
):
  assert_limit(refusal, supported, refused, reason)


@pytest.mark.quick
@pytest.mark.parametrize(("rows", "devices", "dtype", "chunk"), [
  (32, 2, F4, 8), (64, 2, F4, 16), (96, 2, F4, 24), (192, 2, F2, 48),
  (4096, 4, F4, 512),
])
def test_ring_sends_the_longest_messages_that_fit(rows, devices, dtype, chunk):
  """A segment takes 2 n messages of rows; segments divide all rows."""
  assert tpu.chunk_rows(rows, 8, 8, dtype, devices) == chunk
  # Also where memory limits the messages.
  for channels in (2048, 4096, 4608, 8192):
    found = tpu.chunk_rows(rows, channels, 0, dtype, devices)
    assert not found or rows % (2 * devices * found) == 0
  # At most 24 MiB: four messages of c rows of 1,024 x 80 bytes.
  assert tpu.chunk_rows(2**13, 1024, 1024, F4, 2) == 64
