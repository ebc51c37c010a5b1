"""Graphs on disk: compressed sparse rows in memory-mapped files.

A graph is a folder of arrays, of which a process reads the pages that it
touches, and no more:

    indptr.npy    int64 [N + 1], where each node's neighbours begin
    indices.npy   int32 [E], the neighbours of node 0, then those of node 1, ...
    features.npy  float32 [N, F], a row for each node
    labels.npy    int32 [N], a class, or -1 where it is not known
    split.npy     uint8 [N], a place in ``SPLITS``
    meta.json     what made it, and a digest; written last

A folder without meta.json is one whose writer was stopped. Node v reads the
features of ``indices[indptr[v] : indptr[v + 1]]``, so an edge is stored with
the node that it goes *to* a model's layer. A node may have no neighbours, or
one of them several times.

Edges come as a stream that is read twice, first to count and then to place
them, so that building takes memory for the nodes' degrees and for one chunk
only.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any, BinaryIO

import numpy as np

from caatnet.data.graphs import paging

SPLITS = ("train", "validation", "test", "none")
# What each file must be; features also have a second dim.
DTYPES = {
  "indptr": np.int64,
  "indices": np.int32,
  "features": np.float32,
  "labels": np.int32,
  "split": np.uint8,
}
# Nodes or edges that are looked at together.
CHUNK = 1 << 20

# Edges: node and neighbour, integers [n] each.
Edges = tuple[np.ndarray, np.ndarray]
# Of successive nodes: features [n, F], labels [n] and splits [n].
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
  """An opened graph; arrays are mapped from its files.

  Attributes:
    folder: Where it lies.
    indptr: int64 ``[N + 1]``.
    indices: int32 ``[E]``.
    features: float32 ``[N, F]``.
    labels: int32 ``[N]``; -1 where it is not known.
    split: uint8 ``[N]``, a place in ``SPLITS``.
    meta: What its builder wrote; "sha256" is the digest of all files.
  """

  folder: pathlib.Path
  indptr: np.ndarray
  indices: np.ndarray
  features: np.ndarray
  labels: np.ndarray
  split: np.ndarray
  meta: Mapping[str, Any]

  @property
  def num_nodes(self) -> int:
    return len(self.labels)

  @property
  def num_edges(self) -> int:
    return len(self.indices)

  def nodes(self, split: str) -> np.ndarray:
    """Returns the labelled nodes of a split, int32, in order.

    Args:
      split: One of ``SPLITS``.
    """
    chosen = (self.split == SPLITS.index(split)) & (self.labels >= 0)
    return np.flatnonzero(chosen).astype(np.int32)


def open_graph(folder: str | os.PathLike[str]) -> Graph:
  """Opens a graph and checks it, reading labels, splits and edges once.

  Raises:
    ValueError: The folder holds no whole graph, an array has another dtype or
      shape than it must, or an edge names a node that does not exist.
  """
  folder = pathlib.Path(folder).expanduser()
  path = folder / "meta.json"
  if not folder.is_dir():
    raise ValueError(f"{folder} is no folder")
  if not path.is_file():
    raise ValueError(
      f"{folder} has no meta.json: it is no graph, or one whose writer was "
      "stopped"
    )
  try:
    meta = json.loads(path.read_text())
  except ValueError as error:
    raise ValueError(f"{path} is damaged: {error}") from error
  if not isinstance(meta, dict) or "sha256" not in meta:
    raise ValueError(f"{path} is damaged: it has no sha256")
  arrays = {name: _mapped(folder / f"{name}.npy", name) for name in DTYPES}
  graph = Graph(folder, **arrays, meta=meta)
  _check(graph)
  paging.expect_no_order(
    (graph.features, graph.indices), paging.memory_bytes()
  )
  return graph


def _mapped(path: pathlib.Path, name: str) -> np.ndarray:
  """Maps a file; refuses one that is cut off, or not what it must be."""
  try:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
  except (OSError, ValueError, EOFError) as error:
    raise ValueError(f"{path} is missing or cut off: {error}") from error
  if array.dtype != DTYPES[name]:
    raise ValueError(
      f"{path} is {array.dtype}, but must be {np.dtype(DTYPES[name])}"
    )
  dims = 2 if name == "features" else 1
  if array.ndim != dims:
    raise ValueError(f"{path} has shape {array.shape}, but must have {dims} "
                     f"{'dims' if dims > 1 else 'dim'}")
  return array


def _check(graph: Graph) -> None:
  """Refuses arrays that do not fit each other, and edges to nowhere."""
  nodes = {
    "indptr.npy": len(graph.indptr) - 1, "features.npy": len(graph.features),
    "labels.npy": len(graph.labels), "split.npy": len(graph.split),
  }
  if len(set(nodes.values())) > 1:
    raise ValueError(f"{graph.folder} has different numbers of nodes: {nodes}")
  ends = int(graph.indptr[0]), int(graph.indptr[-1])
  if ends != (0, graph.num_edges):
    raise ValueError(
      f"{graph.folder}/indptr.npy goes from {ends[0]} to {ends[1]}, but must "
      f"go from 0 to {graph.num_edges}, the edges of indices.npy"
    )
  for start, stop in chunks(graph.num_nodes):
    part = graph.indptr[start : stop + 1]
    if (np.diff(part) < 0).any():
      node = start + int(np.argmax(np.diff(part) < 0))
      raise ValueError(
        f"{graph.folder}/indptr.npy: node {node} has fewer than 0 neighbours"
      )
  for start, stop in chunks(graph.num_edges):
    _in_range(
      f"{graph.folder}/indices.npy", graph.indices[start:stop], graph.num_nodes
    )
  if graph.num_nodes and int(graph.labels.min()) < -1:
    raise ValueError(
      f"{graph.folder}/labels.npy has {graph.labels.min()}, but must be "
      "classes from 0 on, or -1 where it is not known"
    )
  if graph.num_nodes and int(graph.split.max()) >= len(SPLITS):
    raise ValueError(
      f"{graph.folder}/split.npy has {graph.split.max()}, but {SPLITS} are "
      f"0 to {len(SPLITS) - 1}"
    )


def _in_range(what: str, ids: np.ndarray, num_nodes: int) -> None:
  """Refuses ids of nodes that do not exist."""
  if not len(ids):
    return
  low, high = int(ids.min()), int(ids.max())
  if low < 0 or high >= num_nodes:
    raise ValueError(
      f"{what} names node {low if low < 0 else high}, but nodes are 0 to "
      f"{num_nodes - 1}"
    )


def write_graph(
  folder: str | os.PathLike[str],
  *,
  num_nodes: int,
  num_features: int,
  edges: Callable[[], Iterable[Edges]],
  rows: Iterable[Rows],
  meta: Mapping[str, Any],
) -> Graph:
  """Writes a graph in bounded memory, and opens it.

  Args:
    folder: Where to; made if it is missing. Nobody must read a graph there.
    num_nodes: N, fewer than 2^31.
    num_features: F, the features of a node.
    edges: Starts the stream of edges anew; both times it must give the same. A
      node's neighbours are stored in the order of the stream.
    rows: Features, labels and splits of all nodes in order.
    meta: What to keep about the graph, plain data.

  Raises:
    ValueError: A node does not exist, features have another dtype or width, or
      there are more or fewer rows than nodes.
  """
  folder = pathlib.Path(folder).expanduser()
  folder.mkdir(parents=True, exist_ok=True)
  if not 0 < num_nodes < 2**31:
    raise ValueError(f"num_nodes={num_nodes} must be 1 to 2^31 - 1")
  _write_edges(folder, num_nodes, edges)
  _write_rows(folder, num_nodes, num_features, rows)
  digest = hashlib.sha256()
  for name in DTYPES:
    with (folder / f"{name}.npy").open("rb") as file:
      while part := file.read(1 << 24):
        digest.update(part)
  (folder / "meta.json").write_text(
    json.dumps(dict(meta) | {"sha256": digest.hexdigest()}, indent=2)
  )
  return open_graph(folder)


def _write_edges(
  folder: pathlib.Path, num_nodes: int, edges: Callable[[], Iterable[Edges]]
) -> None:
  """Counts the edges of each node, then puts each in its place."""
  ends = np.zeros(num_nodes + 1, np.int64)
  for nodes, neighbours in edges():
    for ids in (nodes, neighbours):
      _in_range("an edge", ids, num_nodes)
    np.add.at(ends[1:], nodes, 1)
  np.cumsum(ends, out=ends)
  with _started(folder, "indptr", num_nodes + 1) as file:
    file.write(ends.data)
  with _started(folder, "indices", int(ends[-1])) as file:
    file.truncate(file.tell() + 4 * int(ends[-1]))
  if not ends[-1]:
    return
  indices = np.load(folder / "indices.npy", mmap_mode="r+")
  free = ends[:-1]  # the next free place of each node
  for nodes, neighbours in edges():
    if not len(nodes):
      continue
    order = np.argsort(nodes, kind="stable")
    nodes = nodes[order]
    # Edges of one node are neighbours now: each comes as many places after the
    # first of them as there are others before it.
    first = np.flatnonzero(np.r_[True, nodes[1:] != nodes[:-1]])
    counts = np.diff(np.r_[first, len(nodes)])
    places = free[nodes] + np.arange(len(nodes)) - np.repeat(first, counts)
    indices[places] = neighbours[order]
    free[nodes[first]] += counts
  indices.flush()


def _write_rows(
  folder: pathlib.Path, num_nodes: int, num_features: int, rows: Iterable[Rows]
) -> None:
  """Appends what is stored for each node; nothing of it stays in memory."""
  with contextlib.ExitStack() as opened:
    shapes = {
      "features": (num_nodes, num_features), "labels": (num_nodes,),
      "split": (num_nodes,),
    }
    files = {
      name: opened.enter_context(_started(folder, name, *shape))
      for name, shape in shapes.items()
    }
    count = 0
    for features, labels, split in rows:
      if (features.dtype, features.shape[1:]) != (
        np.dtype(np.float32), (num_features,)
      ):
        raise ValueError(
          f"features are {features.dtype} {features.shape}, but must be "
          f"float32 [nodes, {num_features}]"
        )
      count += len(features)
      for name, part in zip(files, (features, labels, split), strict=True):
        files[name].write(np.ascontiguousarray(part, DTYPES[name]).data)
    if count != num_nodes:
      raise ValueError(f"there are rows for {count} nodes of {num_nodes}")


def _started(folder: pathlib.Path, name: str, *shape: int) -> BinaryIO:
  """Opens a file to which an array's elements are to be appended."""
  file = (folder / f"{name}.npy").open("wb")
  np.lib.format.write_array_header_1_0(file, {
    "descr": np.lib.format.dtype_to_descr(np.dtype(DTYPES[name])),
    "fortran_order": False,
    "shape": shape,
  })
  return file


def chunks(length: int, size: int = CHUNK) -> Iterator[tuple[int, int]]:
  """Yields the starts and ends of the parts of a range, in order.

  Args:
    length: The end of the range, which begins at 0.
    size: The length of all parts but the last.
  """
  for start in range(0, length, size):
    yield start, min(start + size, length)
