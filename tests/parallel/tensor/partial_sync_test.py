"""Options of a partial synchronisation, and the kernels that they select."""

import jax
import jax.numpy as jnp
import pytest

from parallel.axes import Axis
from parallel.tensor.partial_sync import PartialSync
from parallel.tensor.reductions import reduce_add_norm_kernel


@pytest.mark.parametrize(("options", "message"), [
  ({"p": 1.01}, r"p=1.01 must lie in \[0, 1\]"),
  ({"p": -0.01}, r"p=-0.01 must lie in \[0, 1\]"),
  ({"p": float("nan")}, "p=nan must lie"),
  ({"route": "rings"}, "route='rings' must be one of psum, .*ring_kernel"),
  ({"private_scale": "no"}, "private_scale='no' must be one of none, init"),
])
def test_invalid_options_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    PartialSync(**options)


@pytest.mark.parametrize(("p", "width", "num"), [
  (0.29, 100, 28), (0.5, 7, 3), (0.0, 9, 0), (1.0, 9, 9),
])
def test_shared_width_is_rounded_down(p, width, num):
  assert PartialSync(p).num_shared(width) == num


def test_private_scale_forward_scales_private_channels_only():
  axis = Axis("tensor", 9, 3)
  assert {
    scale: PartialSync(private_scale=scale).scale(axis)
    for scale in ("none", "init", "forward")
  } == {"none": 1, "init": 1, "forward": 3}


def test_every_fraction_and_function_is_accepted():
  for p in (0.0, 0.29, 1.0):
    assert PartialSync(p, route=jax.lax.psum).p == p


TENSOR = Axis("tensor", 4, 4)


@pytest.mark.parametrize(("options", "rows", "width", "expected"), [
  ({"route": "psum"}, (2, 64), 8, False),
  ({"route": "one_shot"}, (2, 64), 8, True),
  ({"route": "one_shot"}, (1, 1), 8, True),
  ({"route": "one_shot", "p": 0.0}, (2, 64), 8, False),  # nothing is shared
  ({"route": "one_shot", "forward_dtype": "bfloat16"}, (2, 64), 8, True),
  ({"route": "one_shot", "forward_dtype": "float16"}, (2, 64), 8, False),
  ({"route": "one_shot"}, (2, 64), 2**20, False),  # more than VMEM
  ({"route": "ring_kernel", "p": 0.5}, (2, 64), 8, True),
  ({"route": "ring_kernel", "p": 0.5, "forward_dtype": "float32"}, (2, 64), 8,
   True),
  ({"route": "ring_kernel", "p": 0.5}, (2, 63), 8, False),  # part of a tile
  ({"route": "ring_kernel", "p": 0.5}, (2, 64), 2**20, False),
  ({"route": "ring_kernel", "p": 0.0}, (2, 64), 8, False),
  ({"route": "ring_kernel", "p": 1.0}, (2, 64), 8, False),
])
def test_route_has_a_kernel_for_operands_that_it_supports(
  options, rows, width, expected
):
  def kernel(*implementation):
    return reduce_add_norm_kernel(
      rows, width, jnp.dtype("float32"), TENSOR, PartialSync(**options),
      implementation,
    )

  assert (kernel("tpu_interpret", "reference") is not None) == expected
  assert kernel("reference") is None


@pytest.mark.parametrize("devices", [1, 2])
def test_ring_of_one_device_has_no_kernel(devices):
  found = reduce_add_norm_kernel(
    (2, 64), 8, jnp.dtype("float32"), Axis("tensor", 4, devices),
    PartialSync(0.5, route="ring_kernel"), ("tpu_interpret", "reference"),
  )
  assert (found is not None) == (devices > 1)
