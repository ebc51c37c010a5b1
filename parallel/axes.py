"""A parallel axis is lanes x devices, and a mesh is a handful of such axes.

An experiment has a number of *logical* ranks per axis; a machine has a number
of devices. Each device hosts ``lanes`` ranks as a leading array dim, so

    logical size = lanes (a leading array dim) x devices (a mesh axis)

and rank ``m`` lives on device ``m // lanes`` in lane ``m % lanes``.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import math

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh
import numpy as np

# Outermost first. Ranks that talk most are innermost, on the nearest devices.
_PREFERRED = "tensor"


@dataclasses.dataclass(frozen=True)
class Axis:
  """A logical parallel axis.

  Attributes:
    name: The mesh axis that carries it.
    size: Number of logical ranks.
    devices: Number of devices along the mesh axis; divides ``size``.
  """

  name: str
  size: int
  devices: int = 1

  def __post_init__(self) -> None:
    if self.size < 1 or self.devices < 1 or self.size % self.devices:
      raise ValueError(
        f"axis {self.name!r}: {self.size} logical ranks cannot be split "
        f"evenly over {self.devices} devices; the number of devices must be "
        f"one of {divisors(self.size) if self.size > 0 else []}"
      )

  @property
  def lanes(self) -> int:
    """Logical ranks that one device hosts."""
    return self.size // self.devices

  def __str__(self) -> str:
    return (
      f"{self.name}: {self.size} ranks = {self.lanes} lanes x "
      f"{self.devices} devices"
    )


def divisors(n: int) -> list[int]:
  """The positive divisors of ``n`` in ascending order."""
  return [d for d in range(1, n + 1) if n % d == 0]


def assign_devices(
  sizes: Mapping[str, int],
  num_devices: int,
  requested: Mapping[str, int] | None = None,
) -> dict[str, Axis]:
  """Decides how many devices carry each logical axis.

  Args:
    sizes: Logical size of each axis, outermost axis first.
    num_devices: Devices that the machine has.
    requested: Devices per axis, as the user's ``--mesh`` has it; an axis that
      it does not name gets one device. None chooses the divisors of the sizes
      with the largest product of devices, ties in favour of the tensor axis
      and then of the innermost ones.

  Returns:
    The axes in the order of ``sizes``.

  Raises:
    ValueError: An unknown axis, a size that does not divide, or more devices
      than the machine has.
  """
  if requested is None:
    counts = _largest_assignment(sizes, num_devices)
  else:
    unknown = [name for name in requested if name not in sizes]
    if unknown:
      raise ValueError(
        f"--mesh names the axis {unknown[0]!r}; this config has the axes "
        f"{', '.join(sizes)} (config.parallel)"
      )
    counts = {name: requested.get(name, 1) for name in sizes}
    for name, count in counts.items():
      if count < 1 or sizes[name] % count:
        raise ValueError(
          f"--mesh={name}:{count} does not divide "
          f"config.parallel.{name}={sizes[name]}; use one of "
          f"{divisors(sizes[name])}"
        )
    needed = math.prod(counts.values())
    if needed > num_devices:
      raise ValueError(
        f"--mesh asks for {needed} devices, this machine has {num_devices}; "
        "virtual CPU devices: --cpu_devices=N"
      )
  return {name: Axis(name, sizes[name], counts[name]) for name in sizes}


def _largest_assignment(
  sizes: Mapping[str, int], num_devices: int
) -> dict[str, int]:
  names = list(sizes)
  innermost_first = sorted(names, key=lambda n: n != _PREFERRED)
  innermost_first[1:] = [
    n for n in reversed(names) if n != innermost_first[0]
  ]

  def rank(counts: tuple[int, ...]) -> tuple[int, ...]:
    by_name = dict(zip(names, counts, strict=True))
    return (math.prod(counts), *(by_name[n] for n in innermost_first))

  candidates = itertools.product(*(divisors(sizes[n]) for n in names))
  fitting = [c for c in candidates if math.prod(c) <= num_devices]
  return dict(zip(names, max(fitting, key=rank), strict=True))


def make_mesh(
  axes: Mapping[str, Axis], devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """A mesh with one axis per entry, outermost first.

  Args:
    axes: As ``assign_devices`` returns them.
    devices: Devices to use, the first ones of ``jax.devices()`` by default.

  Returns:
    A mesh of Auto axis types, for use with ``jax.shard_map``.
  """
  shape = tuple(axis.devices for axis in axes.values())
  count = math.prod(shape)
  devices = list(jax.devices() if devices is None else devices)
  if len(devices) < count:
    raise ValueError(f"the mesh {shape} needs {count} devices")
  if devices[0].platform == "cpu" or count < len(devices):
    grid = np.asarray(devices[:count]).reshape(shape)
  else:
    # Lays the axes along the physical links of a TPU or GPU machine, several
    # axes along one dimension of a torus where they must share it.
    grid = mesh_utils.create_device_mesh(
      shape, devices, allow_split_physical_axes=True
    )
  return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(shape))
