"""Logical axis sizes and their assignment to devices."""

import math

from hypothesis import given
from hypothesis import strategies as st
import jax
import pytest

from parallel.axes import Axis, assign_devices, make_mesh
from parallel.base.checks import divisors

SIZES = st.integers(1, 24)


@pytest.mark.quick
@given(SIZES, SIZES, st.integers(1, 64))
def test_default_mesh_uses_most_devices_and_prefers_tensor(data, tensor, num):
  sizes = {"data": data, "tensor": tensor}
  axes = assign_devices(sizes, num)
  options = [
    (d * t, t)
    for d in divisors(data)
    for t in divisors(tensor)
    if d * t <= num
  ]
  chosen = (axes["data"].devices, axes["tensor"].devices)
  assert (math.prod(chosen), chosen[1]) == max(options)
  for name, axis in axes.items():
    assert axis.lanes * axis.devices == axis.size == sizes[name]


def test_ties_go_to_the_innermost_axis_without_a_tensor_axis():
  axes = assign_devices({"node": 4, "gpu": 4, "gcd": 3}, 8)
  assert [axes[name].devices for name in axes] == [2, 4, 1]
  axes = assign_devices({"node": 4, "gpu": 4}, 4)
  assert [axes[name].devices for name in axes] == [1, 4]


def test_axis_that_the_mesh_does_not_name_gets_one_device():
  axes = assign_devices({"data": 4, "tensor": 8}, 8, {"tensor": 2})
  assert (axes["data"].devices, axes["data"].lanes) == (1, 4)
  assert (axes["tensor"].devices, axes["tensor"].lanes) == (2, 4)


@pytest.mark.parametrize(
  ("requested", "message"),
  [
    ({"tensor": 2, "pipe": 2}, "axis 'pipe'; the axes are data, tensor"),
    ({"tensor": 3}, r"use one of \[1, 2, 4, 8\]"),
    ({"tensor": 8, "data": 2}, "the mesh needs 16 devices, but this machine"),
  ],
)
def test_impossible_mesh_is_refused_with_the_reason(requested, message):
  with pytest.raises(ValueError, match=message):
    assign_devices({"data": 2, "tensor": 8}, 8, requested)


@pytest.mark.parametrize(("size", "devices", "message"), [
  (6, 4, r"'tensor': 6 logical ranks.* one of \[1, 2, 3, 6\]"),
  (0, 1, r"0 logical ranks.* one of \[\]"), (-2, 1, "-2 logical ranks"),
  (2, 0, "over 0 devices"), (1, 2, "over 2 devices"),
])
def test_devices_must_divide_ranks(size, devices, message):
  with pytest.raises(ValueError, match=message):
    Axis("tensor", size, devices)


def test_axis_has_one_device_by_default():
  axis = Axis("tensor", 6)
  assert (axis.devices, axis.lanes) == (1, 6)
  assert axis.backend is None
  assert str(Axis("data", 6, 2)) == "data: 6 ranks = 3 lanes x 2 devices"
  assert [divisors(n) for n in (1, 4, 6)] == [[1], [1, 2, 4], [1, 2, 3, 6]]


def test_divisors_are_found_without_trying_all_numbers():
  for n in range(1, 200):
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]
  assert divisors(3**24) == [3**k for k in range(25)]


def test_mesh_may_use_all_devices_and_no_more():
  axes = assign_devices({"data": 4, "tensor": 8}, 8, {"data": 1, "tensor": 8})
  assert make_mesh(axes).devices.shape == (1, 8)
  with pytest.raises(ValueError, match=r"the mesh \(1, 8\) needs 8 devices"):
    make_mesh(axes, jax.devices()[:7])
  with pytest.raises(ValueError, match="tensor:0 does not divide the axis"):
    assign_devices({"tensor": 8}, 8, {"tensor": 0})
  two = make_mesh({"a": Axis("a", 2, 2)}, jax.devices()[3:])
  assert [d.id for d in two.devices] == [3, 4]


def test_device_order_places_devices_on_mesh_coordinates():
  axes = assign_devices({"data": 2, "tensor": 2}, 4)
  mesh = make_mesh(axes, device_order=(7, 2, 0, 5))
  assert [d.id for d in mesh.devices.flat] == [7, 2, 0, 5]
  assert mesh.devices[1, 0].id == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 1, 2, 2), (0, 1, 2, 8)])
def test_device_order_lists_distinct_devices_of_the_machine(order):
  axes = assign_devices({"data": 2, "tensor": 2}, 4)
  with pytest.raises(ValueError, match=(
    r"must list distinct devices from 0 to 7, one for each of 4 coordinates of "
    r"the mesh data:2 x tensor:2"
  )):
    make_mesh(axes, device_order=order)


def test_mesh_has_its_axes_outermost_first():
  axes = assign_devices({"data": 2, "tensor": 8}, 8, {"data": 2, "tensor": 4})
  mesh = make_mesh(axes)
  assert dict(mesh.shape) == {"data": 2, "tensor": 4}
  assert list(mesh.devices.flat) == jax.devices()


def test_backend_does_not_affect_axis_equality():
  axis = Axis("worker", 4, 2)
  carried = Axis("worker", 4, 2, backend=object())
  assert axis == carried
  assert repr(axis) == repr(carried)
