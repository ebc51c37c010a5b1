"""Times of collectives on measured links."""

import dataclasses

from jax.sharding import AbstractMesh
import numpy as np
import pytest

from parallel.ledger import link_times
from parallel.ledger.ledger import Collective
from parallel.plans.hardware import devices
from parallel.plans.hardware.link_matrix import LinkMatrix

MESH = AbstractMesh((2, 2, 2), ("data", "stage", "tensor"))
DEVICE = devices.make_measured_device("d", {"float32": 1e9}, 10**9, 1e9, "test")


def entry(kind, axes, elements=1000):
  size = 2 ** len(axes)
  return Collective(
    kind, axes, size, "float32", (elements,), 1, "forward", False, None, ""
  )


def cluster(latency_s=1e-3, bandwidth=1e6, n=8):
  return LinkMatrix(
    "c", DEVICE, (0,) * n, np.full((n, n), bandwidth),
    np.full((n, n), latency_s), "test", "measured",
  )


def test_groups_are_the_devices_along_the_axes():
  found = link_times.groups(MESH, entry("all_reduce", ("stage",)))
  assert found.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
  found = link_times.groups(MESH, entry("all_reduce", ("data", "tensor")))
  assert found.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
  unknown = dataclasses.replace(entry("all_reduce", ()), group_size=2)
  assert link_times.groups(MESH, unknown).tolist() == [[*range(8)]]


@pytest.mark.parametrize(("kind", "axes", "hops", "size"), [
  ("all_reduce", ("tensor",), 2, 4000),
  ("all_reduce", MESH.axis_names, 14, 7000),
  ("all_gather", ("data", "stage"), 3, 12000),
  ("reduce_scatter", ("data", "stage"), 3, 3000),
  ("permute", ("stage",), 1, 4000),
])
def test_time_is_that_of_the_hops_and_bytes_of_a_ring(kind, axes, hops, size):
  seconds = link_times.build_time_model(cluster(), MESH)(entry(kind, axes))
  assert seconds == pytest.approx(hops * 1e-3 + size / 1e6)


def test_group_that_no_axes_describe_may_have_all_devices():
  """The network between TPU slices is no axis; its groups may be unknown."""
  of_all = entry("all_reduce", MESH.axis_names)
  seconds = link_times.build_time_model(cluster(), MESH)
  for axes, size in (((), None), (("slices",), None), (("slices",), 8)):
    found = dataclasses.replace(of_all, axes=axes, group_size=size)
    assert seconds(found) == seconds(of_all) > 0


def test_slowest_link_between_neighbours_counts():
  links = cluster()
  links.bandwidth[6, 4] = 1e5  # in a group along the stages
  links.bandwidth[0, 7] = 1e3  # in no group of one axis
  seconds = link_times.build_time_model(links, MESH)
  assert seconds(entry("permute", ("stage",))) == pytest.approx(1e-3 + 4e-2)
  assert seconds(entry("permute", ("tensor",))) == pytest.approx(1e-3 + 4e-3)
  assert seconds(entry("all_reduce", ("stage",), 0)) == 0


def test_devices_of_a_ring_send_to_the_next_one():
  links = cluster()
  links.bandwidth[0, 5] = 1e3  # the ring is 0 -> 1 -> 4 -> 5 -> 0
  gather = entry("all_gather", ("data", "tensor"))
  assert link_times.build_time_model(links, MESH)(gather) == pytest.approx(
    0.015
  )
  links.bandwidth[5, 0] = 1e5
  assert link_times.build_time_model(links, MESH)(gather) == pytest.approx(
    0.123
  )


def test_cluster_with_fewer_devices_is_refused():
  with pytest.raises(ValueError, match="'c' has 4 devices, fewer than the 8"):
    link_times.build_time_model(cluster(n=4), MESH)
