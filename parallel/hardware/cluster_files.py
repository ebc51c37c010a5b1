"""Clusters from JSON files and by name.

A file contains one object:

    name, source, mark   fields of `LinkMatrix`
    device               a key of `devices.DEVICES`, or an object with name,
                         flops {dtype: FLOP/s}, memory_bytes, memory_bandwidth
                         and source
    nodes                number of devices of each node, as in [8, 8]
    rows                 "device"; or "node" if rows and columns stand for
                         nodes. The diagonal then describes links inside a node
    bandwidth            bytes per second, a list of rows; null on the diagonal
    latency_s            seconds, a list of rows, or one number for all pairs

Rows of both matrices are senders, columns are receivers.

Example:
  >>> from parallel.hardware import cluster_files
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
import pathlib
from typing import Any

import numpy as np

from parallel import checks
from parallel.hardware import link_matrix
from parallel.hardware.clusters import CLUSTERS
from parallel.hardware.devices import DEVICES, Device
from parallel.hardware.link_matrix import LinkMatrix
from parallel.hardware.links import LinkKind

_KEYS = (
  "name", "source", "mark", "device", "nodes", "rows", "bandwidth", "latency_s"
)
_DEVICE_KEYS = ("name", "flops", "memory_bytes", "memory_bandwidth", "source")


def cluster(text: str) -> LinkMatrix:
  """Returns a cluster by the path of a file or by name.

  Args:
    text: Path that ends in .json; or ``NAME:GROUPS`` with a key of
      `clusters.CLUSTERS` and a number of its outermost groups, as in "a100:16".
      The suffix ``,uneven=SEED`` reduces bandwidths at random
      (`link_matrix.uneven`).

  Raises:
    ValueError: The name is unknown, or the file does not describe a cluster.
    FileNotFoundError: The file does not exist.
  """
  if text.endswith(".json"):
    return read(pathlib.Path(text))
  text, options = checks.options(text)
  name, _, groups = text.partition(":")
  checks.known("cluster=", name, CLUSTERS)
  if not groups.isdigit():
    raise ValueError(
      f"cluster={text!r} must give its number of groups of the outermost "
      f"level, as in {name}:2, or be a path that ends in .json"
    )
  found = link_matrix.of_cluster(CLUSTERS[name], int(groups))
  for option, value in options.items():
    checks.known("option ", option, ("uneven",))
    checks.at_least(option, value, 0)
    found = link_matrix.uneven(found, value)
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
  try:
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
      raise ValueError(f"it is a {type(found).__name__}, not an object")
    return from_json(found)
  except (ValueError, TypeError) as error:
    raise ValueError(f"{path}: {error}") from error


def from_json(found: Mapping[str, Any]) -> LinkMatrix:
  """Returns the cluster that a file's JSON object describes.

  Args:
    found: Object with the keys that the module docstring lists.

  Raises:
    ValueError: A key or value is invalid, as for `read`.
  """
  for key in _KEYS:
    if key not in found:
      raise ValueError(f"key {key!r} is missing; keys are {', '.join(_KEYS)}")
  for key in found:
    checks.known("key ", key, _KEYS)
  counts = found["nodes"]
  if not isinstance(counts, list) or not counts:
    raise ValueError(f"nodes={counts!r} must be a list, as in [8, 8]")
  for count in counts:
    checks.at_least("nodes", count)
  nodes = np.repeat(np.arange(len(counts)), counts)  # [N]
  checks.known("rows=", found["rows"], ("device", "node"))
  # Compact form for clusters with equal links between two nodes.
  by_node = found["rows"] == "node"
  size = len(counts) if by_node else len(nodes)
  if len(nodes) > link_matrix.MOST_DEVICES:  # LinkMatrix raises; do not expand
    matrices = [np.empty((0, 0))] * 2
  else:
    matrices = [
      _matrix(key, found[key], size) for key in ("bandwidth", "latency_s")
    ]
    if by_node:  # [nodes, nodes] -> [N, N]
      matrices = [m[np.ix_(nodes, nodes)] for m in matrices]
  return LinkMatrix(
    found["name"], _device(found["device"]), tuple(nodes.tolist()), *matrices,
    found["source"], found["mark"],
  )


def _matrix(key: str, rows: Any, size: int) -> np.ndarray:
  """Returns a matrix ``[size, size]``; null becomes NaN, a missing link."""
  if isinstance(rows, int | float):  # one number for all pairs
    return np.full((size, size), float(rows))
  lengths = {len(row) if isinstance(row, list) else 1 for row in rows}
  if len(rows) != size or lengths != {size}:
    raise ValueError(
      f"{key} has {len(rows)} rows of {sorted(lengths)} numbers, not {size} of "
      f"{size}, as nodes and rows require"
    )
  return np.array(rows, float)  # None becomes NaN


def _device(found: Any) -> Device:
  """Returns a device by name, or from an object with its fields."""
  if isinstance(found, str):
    checks.known("device=", found, DEVICES)
    return DEVICES[found]
  for key in found:
    checks.known("device: key ", key, _DEVICE_KEYS)
  for key in _DEVICE_KEYS:
    if key not in found:
      raise ValueError(f"device has no {key!r}; it is a key of "
                       f"{', '.join(DEVICES)}, or an object with all of "
                       f"{', '.join(_DEVICE_KEYS)}")
  for key in ("memory_bytes", "memory_bandwidth"):
    checks.positive(f"device: {key}", found[key])
  for dtype, rate in found["flops"].items():
    checks.positive(f"device: flops of {dtype}", rate)
  flops = dict(found["flops"])
  # `Device.peak` needs a default; the fastest dtype of the file is used.
  flops.setdefault("bfloat16", max(flops.values()))
  # The matrix replaces the device's link; its bandwidth is a placeholder.
  link = LinkKind("the matrix", found["memory_bandwidth"], None, "the matrix")
  return Device(
    found["name"], flops, int(found["memory_bytes"]),
    found["memory_bandwidth"], link, 1, found["source"],
  )


def to_json(links: LinkMatrix) -> str:
  """Returns a cluster as the text of a file for `read`.

  Each row of a matrix is one line; numbers have six significant digits.
  """
  device: Any = links.device.name
  # Only a device that is not in the registry is written with its fields.
  if DEVICES.get(device) is not links.device:
    device = {key: getattr(links.device, key) for key in _DEVICE_KEYS}
  counts = np.bincount(links.nodes)
  head = {
    "name": links.name, "source": links.source, "mark": links.mark,
    "device": device, "nodes": counts[counts > 0].tolist(), "rows": "device",
  }
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
