"""Clusters from JSON files and by name.

A file contains one object:

    name, source, mark   fields of `LinkMatrix`
    device               a key of `devices.DEVICES`, or an object with name,
                         flops {dtype: FLOP/s}, memory_bytes, memory_bandwidth,
                         source and, optionally, overhead_s per instruction
    others               optional: devices of other kinds, as in
                         [{"devices": [8, 9], "device": "a100"}], or slower ones
                         [{"devices": [3], "slowdown": 1.5}]
    nodes                number of devices of each node, as in [8, 8]
    rows                 "device"; or "node" if rows and columns stand for
                         nodes. The diagonal then describes links inside a node
    bandwidth            bytes per second, a list of rows; null on the diagonal
    latency_s            seconds, a list of rows, or one number for all pairs
    residuals            optional: log(measured / predicted) of step times, for
                         the prediction intervals of `launch.compile`
    family               optional: config keys, each with its values in the runs
                         that gave residuals, as in {"parallel.tensor": [1, 4]}
    widening             optional: logarithm of the factor by which both ends of
                         the interval move for each key whose value is outside
                         of family; by default such an interval is infinite

Rows of both matrices are senders, columns are receivers.

Example:
  >>> from parallel.plans.hardware import cluster_files
  >>> links = cluster_files.cluster("a100:2")
  >>> links.num_devices, links.device.name, links.mark
  (16, 'a100', 'published')
  >>> import json
  >>> again = cluster_files.from_json(json.loads(cluster_files.to_json(links)))
  >>> bool((again.bandwidth == links.bandwidth).all())
  True
"""

from collections.abc import Mapping
import json
import math
import pathlib
from typing import Annotated, Any, Literal

import numpy as np

from parallel.base import checks, schema
from parallel.plans.hardware import link_matrix
from parallel.plans.hardware.clusters import CLUSTERS
from parallel.plans.hardware.devices import (
  DEVICES,
  Device,
  make_measured_device,
  slowed,
)
from parallel.plans.hardware.link_matrix import LinkMatrix

# Largest rate of a device or link, in FLOP/s or bytes per second.
MAX_RATE = schema.MAX_RATE
_DEVICE_KEYS = ("name", "flops", "memory_bytes", "memory_bandwidth", "source")
_BandwidthMatrix = list[list[schema.AnyRate | None]]
_LatencyMatrix = list[list[schema.AnySeconds | None]]
_ConfigValues = Annotated[
  list[schema.either(text=str, number=float)], schema.Field(min_length=1)
]


class _Device(schema.Schema):
  name: str
  flops: dict[str, schema.Rate]
  memory_bytes: schema.Rate
  memory_bandwidth: schema.Rate
  source: str
  overhead_s: schema.Seconds = 0.0


class _OtherDevices(schema.Schema):
  devices: list[Annotated[int, schema.Field(ge=0)]]
  device: schema.either(text=str, other=_Device) | None = None
  slowdown: schema.Rate = 1.0


class _File(schema.Schema):
  name: str
  source: str
  mark: Literal[link_matrix.SOURCE_MARKS]
  device: schema.either(text=str, other=_Device)
  nodes: list[schema.Count]
  rows: Literal["device", "node"]
  bandwidth: schema.either(number=schema.AnyRate, other=_BandwidthMatrix)
  latency_s: schema.either(number=schema.AnySeconds, other=_LatencyMatrix)
  residuals: list[schema.LogRatio] = schema.Field(default_factory=list)
  others: list[_OtherDevices] = schema.Field(default_factory=list)
  family: dict[str, _ConfigValues] = schema.Field(default_factory=dict)
  widening: schema.NotNegative = math.inf


def cluster(text: str) -> LinkMatrix:
  """Returns a cluster by the path of a file or by name.

  Args:
    text: Path that ends in .json; or ``NAME:GROUPS`` with a key of
      `clusters.CLUSTERS` and a number of its outermost groups, as in "a100:16".
      The suffix ``,uneven=SEED`` reduces bandwidths at random
      (`link_matrix.randomize_bandwidths`), ``,slow=(DEVICE, FACTOR)`` slows a
      device down, and "h100:1+a100:1" joins nodes of several kinds
      (`link_matrix.joined`).

  Raises:
    ValueError: The name is unknown, or the file does not describe a cluster.
    FileNotFoundError: The file does not exist.
  """
  if text.endswith(".json"):
    return read(pathlib.Path(text))
  text, options = checks.parse_options(text)
  parts = []
  for part in text.split("+"):
    name, _, groups = part.strip().partition(":")
    checks.known(f"cluster={text!r}: ", name, CLUSTERS)
    if not groups.isdecimal():
      raise ValueError(
        f"cluster={text!r} must be the name and the number of groups of the "
        f"outermost level, as in {name}:2, or a path that ends in .json"
      )
    parts.append((CLUSTERS[name], int(groups)))
  found = (
    link_matrix.joined(parts) if len(parts) > 1
    else link_matrix.of_cluster(*parts[0])
  )
  for option, value in options.items():
    checks.known("option ", option, ("uneven", "slow"))
    if option == "slow":
      kinds = [*map(type, value)] if isinstance(value, tuple) else []
      if kinds not in ([int, int], [int, float]):
        raise ValueError(
          f"slow={value!r} must be the index of a device and the factor by "
          "which it is slower, as in slow=(3,1.5)"
        )
      found = link_matrix.slow_down_devices(found, dict([value]))
    elif type(value) is not int or value < 0:
      raise ValueError(f"{option}={value!r} must be an integer, at least 0")
    else:
      found = link_matrix.randomize_bandwidths(found, value)
  return found


def read(path: pathlib.Path) -> LinkMatrix:
  """Reads a cluster from a JSON file; errors name the file.

  Args:
    path: Path of the file.

  Raises:
    ValueError: The file is not JSON, a key is missing or unknown, a link is
      missing or 0, a matrix is not square, or there are too many devices.
    FileNotFoundError: The file does not exist.
  """
  return schema.read(_File, path, then=_build_link_matrix)


def from_json(found: Mapping[str, Any]) -> LinkMatrix:
  """Returns the cluster that a file's JSON object describes.

  Args:
    found: Object with the keys that the module docstring lists.

  Raises:
    ValueError: A key or value is invalid, as for `read`.
  """
  return _build_link_matrix(schema.check(_File, found))


def _build_link_matrix(found: _File) -> LinkMatrix:
  """Returns the cluster that a file describes, whose fields are validated."""
  if not found.nodes:
    raise ValueError(
      "nodes=[] must have a number of devices per node, as in [8, 8]"
    )
  # Checked before arrays of this size are allocated.
  link_matrix.check_size(sum(found.nodes))
  nodes = np.repeat(np.arange(len(found.nodes)), found.nodes)  # [N]
  # With rows="node", all links between the devices of two nodes are equal.
  by_node = found.rows == "node"
  size = len(found.nodes) if by_node else len(nodes)
  matrices = [
    _matrix("bandwidth", found.bandwidth, size),
    _matrix("latency_s", found.latency_s, size),
  ]
  if by_node:  # [nodes, nodes] -> [N, N]
    matrices = [m[np.ix_(nodes, nodes)] for m in matrices]
  device = _device(found.device)
  devices = [device] * len(nodes)
  for group in found.others:
    other = device if group.device is None else _device(group.device)
    if group.slowdown != 1:
      other = slowed(other, group.slowdown)
    for index in group.devices:
      if index >= len(devices):
        raise ValueError(
          f"others.devices={index} must lie in [0, {len(devices)}), since the "
          f"cluster has {len(devices)} devices"
        )
      devices[index] = other
  return LinkMatrix(
    found.name, device, tuple(nodes.tolist()), *matrices,
    found.source, found.mark, tuple(found.residuals), found.family,
    found.widening, tuple(devices),
  )


def _matrix(
  key: str, rows: float | _BandwidthMatrix | _LatencyMatrix, size: int
) -> np.ndarray:
  """Returns the matrix ``[size, size]`` that the value of ``key`` describes.

  ``rows`` is one number for all pairs, or a list of rows; null becomes NaN, a
  missing link.
  """
  if isinstance(rows, float):  # one number for all pairs
    return np.full((size, size), rows)
  lengths = {len(row) for row in rows}
  if len(rows) != size or lengths != {size}:
    raise ValueError(
      f"{key} has {len(rows)} rows whose lengths are {sorted(lengths)}; it "
      f"must have {size} rows of {size} numbers, one for each pair of devices "
      "or nodes"
    )
  return np.array(rows, float)  # None becomes NaN


def _device(found: str | _Device) -> Device:
  """Returns the device that a key of `DEVICES` or a JSON object describes."""
  if isinstance(found, str):
    checks.known("device=", found, DEVICES)
    return DEVICES[found]
  if not found.flops:
    raise ValueError(
      "device.flops={} must have the rate of at least one dtype, as in "
      '{"bfloat16": 1e15}'
    )
  return make_measured_device(
    found.name, found.flops, int(found.memory_bytes), found.memory_bandwidth,
    found.source, found.overhead_s,
  )


def to_json(links: LinkMatrix) -> str:
  """Returns a cluster as the text of a file for `read`.

  Each row of a matrix is one line; numbers have six significant digits.
  """
  devices = links.devices or (links.device,)
  counts = np.bincount(links.nodes)
  head = {
    "name": links.name, "source": links.source, "mark": links.mark,
    "device": _device_json(devices[0]), "nodes": counts[counts > 0].tolist(),
    "rows": "device",
  }
  names = [device.name for device in devices]
  others = {d.name: d for d in devices if d.name != names[0]}
  if others:
    head["others"] = [
      {"devices": [i for i, x in enumerate(names) if x == name],
       "device": _device_json(device)} for name, device in others.items()
    ]
  if links.residuals:
    head["residuals"] = list(links.residuals)
    if links.family:
      head["family"] = dict(links.family)
    if links.widening < math.inf:
      head["widening"] = links.widening
  lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
  for key in ("bandwidth", "latency_s"):
    rows = ",\n".join(
      "    " + json.dumps([
        # JSON has no infinity, so the diagonal is null.
        None if i == j else float(f"{x:.6g}") for j, x in enumerate(row)
      ])
      for i, row in enumerate(getattr(links, key).tolist())
    )
    lines.append(f"  {json.dumps(key)}: [\n{rows}\n  ]")
  return "{\n" + ",\n".join(lines) + "\n}\n"


def _device_json(device: Device) -> str | dict[str, Any]:
  """Returns the name of a device in `DEVICES`, or the fields of any other."""
  if DEVICES.get(device.name) is device:
    return device.name
  found = {key: getattr(device, key) for key in _DEVICE_KEYS}
  if device.overhead_s:
    found["overhead_s"] = device.overhead_s
  return found
