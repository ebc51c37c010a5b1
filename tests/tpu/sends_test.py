"""What programs compiled for TPUs send: slices and kernels.

Run by `make test-tpu`.
"""

import pytest

pytest.importorskip("libtpu", reason="the tpu extra is not installed")

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from parallel.ledger import targets
from parallel.ledger.expectations import assert_sends
from parallel.ledger.reading import read

X = (256, 256), jnp.float32
SIZE = 256 * 256 * 4


def sharded(f, target, **sizes):
  devices = np.array(targets.resolve(target).devices)
  mesh = Mesh(
    devices.reshape(*sizes.values()), tuple(sizes),
    (AxisType.Auto,) * len(sizes),
  )
  mapped = jax.shard_map(
    f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
  )
  x = jax.ShapeDtypeStruct(*X, sharding=NamedSharding(mesh, P()))
  return jax.jit(mapped), x


def test_traffic_between_slices_is_counted():
  f, x = sharded(
    lambda x: lax.psum(jnp.sin(x), "outer") + lax.psum(x, "inner"),
    "tpu:v5p:2x2x1:2", outer=2, inner=4,
  )
  found = assert_sends(
    f, x, expect={"slices": SIZE, "inner": ("all_reduce", 1)}
  )
  assert dict(found.axes) == {"outer": 1, "inner": 4}
  f, x = sharded(
    lambda x: lax.ppermute(x, "outer", [(0, 1)]), "tpu:v6e:2x2:2", outer=2,
    inner=4,
  )
  assert_sends(f, x, expect={"slices": ("permute", 1)})


@pytest.mark.parametrize("sends", [True, False])
def test_kernel_that_sends_without_metadata_is_unknown(sends):
  def kernel(x_ref, o_ref, send, receive):
    if not sends:
      pltpu.make_async_copy(x_ref, o_ref, send).start()
      pltpu.make_async_copy(x_ref, o_ref, send).wait()
      return
    copy = pltpu.make_async_remote_copy(
      x_ref, o_ref, send, receive, ((lax.axis_index("x") + 1) % 4,),
      pl.DeviceIdType.MESH,
    )
    copy.start()
    copy.wait()

  f, x = sharded(
    pl.pallas_call(
      kernel, jax.ShapeDtypeStruct(*X),
      in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
      out_specs=pl.BlockSpec(memory_space=pl.ANY),
      scratch_shapes=[pltpu.SemaphoreType.DMA] * 2,
      compiler_params=pltpu.CompilerParams(has_side_effects=True),
    ), "tpu:v5p:2x2x1", x=4,
  )
  lowered = f.lower(x)
  for found in (read(lowered), read(lowered.as_text())):
    assert not found.executed
    assert [u.target for u in found.unknown] == ["tpu_custom_call"] * sends


def test_linear_algebra_is_understood():
  f, x = sharded(
    lambda x: jnp.linalg.qr(x)[0] @ jnp.linalg.inv(x)
    + jnp.linalg.eigh(x[:64, :64])[0].sum() + lax.approx_max_k(x, 4)[0].sum()
    + jnp.fft.fft(x).real + lax.top_k(x, 4)[0].sum() + jnp.linalg.cholesky(x),
    "tpu:v5e:2x2", x=4,
  )
  assert_sends(f, x, expect={})
