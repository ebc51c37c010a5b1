"""Groups of devices that communicate, as axes of a mesh.

Programs number devices in the order of the mesh: the last axis counts fastest.
HLO writes the groups of a collective in any of these forms:

    {{0,1},{2,3}}                 the device numbers of each group
    {}                            one group of all devices
    [4,2]<=[2,4]T(1,0)            0 to 7 as 2 x 4, transposed, cut into 4 x 2
    mesh['a'=2,'b'=4] {'b'}       one group along b for each place along a
    mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a':(2)2}
                                  devices in another order; a as 2 x 2, of
                                  which the second 2 communicate

The axes of the last two forms are often XLA's own, so what a group is called in
a table follows from its device numbers, whatever the form.

Source: ``hlo/ir/replica_group.cc`` and ``mesh_and_axis.cc`` of XLA.
"""

from collections.abc import Iterable, Iterator, Mapping
import itertools
import math
import re

import numpy as np

_NUMBERS = re.compile(r"\{([\d,]+)\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=(\[.*)")
# A shape, and the order of its dims if it is transposed.
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
  r"mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}"
)


class MeshAxes:
  """Finds the axes of a mesh along which devices communicate."""

  def __init__(self, sizes: Mapping[str, int]) -> None:
    """Takes a mesh.

    Args:
      sizes: Axes and their sizes, in the order that numbers the devices.
    """
    self._sizes = dict(sizes)
    self.num_devices = math.prod(sizes.values())
    self._axes = dict(_groups_of_axes(self._sizes))

  def of_groups(
    self, groups: Iterable[Iterable[int]]
  ) -> tuple[tuple[str, ...], int]:
    """Returns the axes of groups of devices, and the size of a group.

    Args:
      groups: The device numbers of each group. Where groups differ in size,
        StableHLO fills the shorter ones up with -1.

    Returns:
      The axes in mesh order, without those of size 1; none if no set of axes
      makes these groups. And the devices of the largest group.

    Raises:
      ValueError: The groups do not hold the devices of the mesh.
    """
    sets = frozenset(frozenset(int(i) for i in g if i >= 0) for g in groups)
    numbers = set().union(*sets)
    if sets and numbers != set(range(self.num_devices)):
      raise self._another_mesh(numbers)
    return self._axes.get(sets, ()), max(map(len, sets), default=1)

  def of_pairs(self, pairs: np.ndarray) -> tuple[tuple[str, ...], int]:
    """Returns the axes of a permute, and the number of devices along them.

    A permute has no groups. Its axes are those along which some source and its
    target have different coordinates.

    Args:
      pairs: Device numbers ``[n, 2]`` of sources and targets.

    Raises:
      ValueError: A device number is not one of the mesh.
    """
    pairs = pairs.reshape(-1, 2)
    if pairs.max(initial=0) >= self.num_devices:
      raise self._another_mesh(set(pairs.ravel().tolist()))
    places = np.stack(np.unravel_index(pairs, tuple(self._sizes.values())))
    moves = (places[..., 0] != places[..., 1]).any(axis=-1)
    axes = tuple(itertools.compress(self._sizes, moves))
    return axes, math.prod(self._sizes[name] for name in axes)

  def _another_mesh(self, numbers: set[int]) -> ValueError:
    return ValueError(
      f"devices 0 to {max(numbers)} communicate, and the mesh {self._sizes} "
      f"has {self.num_devices}: it is not the program's mesh"
    )


def _groups_of_axes(
  sizes: Mapping[str, int],
) -> Iterator[tuple[frozenset[frozenset[int]], tuple[str, ...]]]:
  """Yields the groups that each set of mesh axes makes, and the set.

  Axes of size 1 are left out, so that no two sets make the same groups.
  """
  devices = np.arange(math.prod(sizes.values()))
  dims = [dim for dim, size in enumerate(sizes.values()) if size > 1]
  for chosen in itertools.chain.from_iterable(
    itertools.combinations(dims, n) for n in range(len(dims) + 1)
  ):
    rows = along(devices, tuple(sizes.values()), chosen)
    groups = frozenset(frozenset(row) for row in rows)
    yield groups, tuple(list(sizes)[dim] for dim in chosen)


def along(
  devices: np.ndarray, shape: Iterable[int], chosen: Iterable[int]
) -> list[list[int]]:
  """Returns the groups of devices that differ along the chosen dims only."""
  shape, chosen = tuple(shape), tuple(chosen)
  # The chosen dims go last: then each row is a group.
  last = range(len(shape) - len(chosen), len(shape))
  group_size = math.prod(shape[dim] for dim in chosen)
  moved = np.moveaxis(devices.reshape(shape), chosen, tuple(last))
  return moved.reshape(-1, group_size).tolist()


def replica_groups(text: str, num_devices: int) -> list[list[int]]:
  """Reads the device numbers of each group from any form that HLO writes.

  Args:
    text: The value of ``replica_groups``, as the module describes its forms.
    num_devices: Number of devices that the program runs on.

  Raises:
    ValueError: The text has another form.
  """
  if text == "{}":
    return [list(range(num_devices))]
  if iota := _IOTA.fullmatch(text):
    return _in_order(iota[2]).reshape(_integers(iota[1])).tolist()
  if mesh := _MESH.fullmatch(text):
    return _of_mesh(*mesh.groups())
  groups = [_integers(row) for row in _NUMBERS.findall(text)]
  if not groups:
    raise ValueError(f"the replica groups {text!r} have an unknown form")
  return groups


def _of_mesh(axes: str, order: str | None, chosen: str) -> list[list[int]]:
  """Reads groups that are written as axes of a mesh, or parts of them."""
  sizes = [(n, int(s)) for n, s in re.findall(r"'([^']+)'=(\d+)", axes)]
  # 'a':(4)2 is the part of a that has 4 places before it and 2 of its own.
  parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen)
  shape, dims = [], []
  for name, size in sizes:
    spans = [
      (int(before or 1), int(before or 1) * int(own or size))
      for other, before, own in parts
      if other == name
    ]
    # An axis is cut into dims where a part of it begins or ends.
    cuts = sorted({1, size}.union(*spans))
    for first, last in itertools.pairwise(cuts):
      if any(begin <= first < end for begin, end in spans):
        dims.append(len(shape))
      shape.append(last // first)
  devices = np.arange(math.prod(shape))
  if order is not None:
    listed = re.fullmatch(r"[\d,]+", order)
    devices = np.array(_integers(order)) if listed else _in_order(order)
  return along(devices, shape, dims)


def _in_order(text: str) -> np.ndarray:
  """Reads ``[2,4]T(1,0)``: 0 to 7 as 2 x 4, transposed, in a row."""
  match = _ORDER.fullmatch(text)
  if not match:
    raise ValueError(f"the order of devices {text!r} has an unknown form")
  shape, order = (_integers(part) if part else None for part in match.groups())
  numbers = np.arange(math.prod(shape)).reshape(shape)
  return np.transpose(numbers, order).ravel()


def _integers(text: str) -> list[int]:
  return [int(number) for number in text.split(",")]
