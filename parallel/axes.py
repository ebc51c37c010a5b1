"""Parallel axes of logical ranks, and device meshes that host the ranks.

An experiment has a number of *logical* ranks per axis; a machine has a number
of devices. Each device hosts ``lanes`` ranks as an array's leading dim, so

    logical size = lanes (a leading array dim) x devices (a mesh axis)

and rank ``m`` is hosted by device ``m // lanes`` in lane ``m % lanes``.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import math
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh
import numpy as np

from parallel.base.checks import divisors


@dataclasses.dataclass(frozen=True)
class Axis:
  """Logical parallel axis: a number of ranks, hosted by a number of devices.

  Attributes:
    name: Name of the axis, and of the mesh axis that carries it.
    size: Number of logical ranks.
    devices: Number of devices along the mesh axis; divides ``size``.
    backend: A `parallel.collectives.CollectiveBackend` that computes sums and
      gathers between processes, for an axis with one rank per process
      (`parallel.outer.apart`); None for collectives over the mesh axis.

  Raises:
    ValueError: ``devices`` does not divide ``size``.

  Example:
    >>> axis = Axis("tensor", size=8, devices=4)
    >>> print(axis)
    tensor: 8 ranks = 2 lanes x 4 devices
    >>> divmod(5, axis.lanes)  # rank 5: device, lane
    (2, 1)
  """

  name: str
  size: int
  devices: int = 1
  backend: Any = dataclasses.field(default=None, compare=False, repr=False)

  def __post_init__(self) -> None:
    if self.size < 1 or self.devices < 1 or self.size % self.devices:
      raise ValueError(
        f"axis {self.name!r}: {self.size} logical ranks cannot be split "
        f"evenly over {self.devices} devices; the number of devices must be "
        f"one of {divisors(self.size) if self.size > 0 else []}"
      )

  @property
  def lanes(self) -> int:
    """Number of logical ranks that one device hosts."""
    return self.size // self.devices

  def __str__(self) -> str:
    return (
      f"{self.name}: {self.size} ranks = {self.lanes} lanes x "
      f"{self.devices} devices"
    )


def assign_devices(
  sizes: Mapping[str, int],
  num_devices: int,
  requested: Mapping[str, int] | None = None,
) -> dict[str, Axis]:
  """Assigns a number of devices to each logical axis.

  Args:
    sizes: Logical size of each axis, outermost axis first.
    num_devices: Number of devices that the machine has.
    requested: Number of devices per axis that the user requests; an axis
      without an entry gets one device. None assigns as many devices as
      possible in total; each axis gets a divisor of its size. Ties are resolved
      in favour of the innermost axes, whose ranks communicate most.

  Returns:
    The axes in the order of ``sizes``.

  Raises:
    ValueError: An axis is unknown, a number of devices does not divide the size
      of its axis, or the product of the requested numbers exceeds
      ``num_devices``.

  Example:
    >>> for axis in assign_devices({"data": 4, "tensor": 4}, 8).values():
    ...   print(axis)
    data: 4 ranks = 2 lanes x 2 devices
    tensor: 4 ranks = 1 lanes x 4 devices
  """
  if requested is None:
    counts = _largest_assignment(sizes, num_devices)
  else:
    unknown = [name for name in requested if name not in sizes]
    if unknown:
      raise ValueError(
        f"unknown axis {unknown[0]!r}; the axes are {', '.join(sizes)}"
      )
    counts = {name: requested.get(name, 1) for name in sizes}
    for name, count in counts.items():
      if count < 1 or sizes[name] % count:
        raise ValueError(
          f"{name}:{count} does not divide the axis size {sizes[name]}; use "
          f"one of {divisors(sizes[name])}"
        )
    needed = math.prod(counts.values())
    if needed > num_devices:
      raise ValueError(
        f"the mesh needs {needed} devices, but this machine has {num_devices}; "
        "use a smaller mesh"
      )
  return {name: Axis(name, sizes[name], counts[name]) for name in sizes}


def _largest_assignment(
  sizes: Mapping[str, int], num_devices: int
) -> dict[str, int]:
  """Returns the number of devices per axis that uses most devices in total."""

  def rank(counts: tuple[int, ...]) -> tuple[int, ...]:
    return (math.prod(counts), *reversed(counts))

  # There are few axes with few divisors each, so all assignments are tried.
  candidates = itertools.product(*map(divisors, sizes.values()))
  fitting = [c for c in candidates if math.prod(c) <= num_devices]
  return dict(zip(sizes, max(fitting, key=rank), strict=True))


def make_mesh(
  axes: Mapping[str, Axis], devices: Sequence[jax.Device] | None = None,
  device_order: Sequence[int] = (),
) -> Mesh:
  """Builds a mesh with one axis per entry, outermost first.

  Args:
    axes: The axes by name, as ``assign_devices`` returns them.
    devices: Available devices (default: ``jax.devices()``); the first are used.
    device_order: Index into ``devices`` for each mesh coordinate, in row-major
      order (the last axis varies fastest), for example from a plan. () lets JAX
      choose the order if the mesh uses all given TPU or GPU devices, and
      otherwise uses the order of ``devices``.

  Returns:
    A mesh of Auto axis types, for use with ``jax.shard_map``.

  Raises:
    ValueError: There are fewer devices than the axes need, or ``device_order``
      is not one distinct index per mesh coordinate.

  Example:
    >>> mesh = make_mesh({"data": Axis("data", 4), "tensor": Axis("tensor", 2)})
    >>> mesh.axis_names, mesh.devices.shape  # all ranks are lanes
    (('data', 'tensor'), (1, 1))
  """
  shape = tuple(axis.devices for axis in axes.values())
  count = math.prod(shape)
  devices = list(jax.devices() if devices is None else devices)
  if len(devices) < count:
    raise ValueError(
      f"the mesh {shape} needs {count} devices, but only {len(devices)} are "
      "available"
    )
  if device_order:
    order = list(device_order)
    if (
      len(order) != count or len({*order}) < count
      or not {*order} <= {*range(len(devices))}
    ):
      raise ValueError(
        f"device_order={','.join(map(str, order))} must list distinct devices "
        f"from 0 to {len(devices) - 1}, one for each of {count} coordinates of "
        f"the mesh {' x '.join(f'{k}:{v.devices}' for k, v in axes.items())}"
      )
    devices = [devices[i] for i in order]
  # CPU devices have no physical links to align axes with. JAX's placement also
  # expects devices that form a box of the torus, which the first few devices of
  # a machine need not form.
  by_links = devices[0].platform != "cpu" and count == len(devices)
  if device_order or not by_links:
    grid = np.asarray(devices[:count]).reshape(shape)
  else:
    # Aligns the axes with the physical links of a TPU or GPU machine. Several
    # axes may share one dimension of a torus.
    grid = mesh_utils.create_device_mesh(
      shape, devices, allow_split_physical_axes=True
    )
  return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(shape))
