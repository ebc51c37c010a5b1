"""Graphs on disk: compressed sparse rows (CSR) in memory-mapped files.

A graph is a folder of arrays, of which a process reads only the pages that it
accesses:

    indptr.npy    int64 [N + 1], start of each node's neighbours in indices
    indices.npy   int32 [E], the neighbours of node 0, of node 1, ...
    features.npy  float32 [N, F], one row per node
    labels.npy    int32 [N], a class, or -1 if it is unknown
    split.npy     uint8 [N], an index into ``SPLITS``
    meta.json     parameters of the generator, and a digest; written last

A folder without meta.json is incomplete. Node v reads the features of
``indices[indptr[v] : indptr[v + 1]]``, so an edge is stored with the node that
receives messages. A node may have no neighbours, or duplicate neighbours.

Edges are a stream that is read twice, first to count them per node and then to
place them. So writing needs memory for the nodes' degrees and one chunk only.
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

from parallel.base import available, schema
from parallel.base.arrays import disable_readahead, map_npy

SPLITS = ("train", "validation", "test", "none")
# Dtype of each file's array; features have two dims, the others one.
DTYPES = {
  "indptr": np.int64,
  "indices": np.int32,
  "features": np.float32,
  "labels": np.int32,
  "split": np.uint8,
}
# Nodes or edges per chunk of processing.
CHUNK = 1 << 20

# Edges: node and neighbour, integers [n] each.
Edges = tuple[np.ndarray, np.ndarray]
# Features [n, F], labels [n] and splits [n] of consecutive nodes.
NodeRows = tuple[np.ndarray, np.ndarray, np.ndarray]


class _Meta(schema.OpenSchema):  # meta.json
  sha256: str
  name: str = ""
  num_classes: schema.Count = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
  """Opened graph; arrays are memory-mapped files.

  Attributes:
    folder: The folder of the graph.
    indptr: int64 ``[N + 1]``, start of each node's neighbours in ``indices``.
    indices: int32 ``[E]``, the neighbours.
    features: float32 ``[N, F]``.
    labels: int32 ``[N]``; -1 if unknown.
    split: uint8 ``[N]``, an index into ``SPLITS``.
    meta: Content of meta.json; "sha256" is the digest of all arrays.
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
  """Opens a graph and checks it, which reads labels, splits and edges once.

  Raises:
    ValueError: If the folder has no complete graph, an array has a wrong dtype
      or shape, or an edge refers to a node that does not exist.
  """
  folder = pathlib.Path(folder).expanduser()
  path = folder / "meta.json"
  if not folder.is_dir():
    raise ValueError(f"{folder} is not a folder")
  if not path.is_file():
    raise ValueError(
      f"{folder} has no meta.json, so it is not a graph, or its writer was "
      "stopped; write it again"
    )
  try:
    data = schema.read_bytes(path)
    schema.parse(_Meta, data)
    meta = json.loads(data)
  except ValueError as error:
    raise ValueError(f"{path} is damaged: {error}") from error
  arrays = {name: _mapped(folder / f"{name}.npy", name) for name in DTYPES}
  graph = Graph(folder, **arrays, meta=meta)
  _check(graph)
  disable_readahead((graph.features, graph.indices), available.limit_bytes())
  return graph


def _mapped(path: pathlib.Path, name: str) -> np.ndarray:
  """Maps a file; raises ValueError if it is truncated or of another type."""
  try:
    array = map_npy(path)
  except ValueError as error:
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
  """Raises ValueError for inconsistent arrays and for edges out of range."""
  nodes = {
    "indptr.npy": len(graph.indptr) - 1, "features.npy": len(graph.features),
    "labels.npy": len(graph.labels), "split.npy": len(graph.split),
  }
  if len(set(nodes.values())) > 1:
    raise ValueError(
      f"the files of {graph.folder} must have equal numbers of nodes, got "
      f"{nodes}"
    )
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
        f"{graph.folder}/indptr.npy must not decrease, but node {node} has "
        "fewer than 0 neighbours"
      )
  for start, stop in chunks(graph.num_edges):
    check_node_ids(
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


def check_node_ids(what: str, ids: np.ndarray, num_nodes: int) -> None:
  """Raises ValueError for ids of nodes that do not exist."""
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
  rows: Iterable[NodeRows],
  meta: Mapping[str, Any],
  unique: bool = False,
) -> Graph:
  """Writes a graph in bounded memory, and opens it.

  Args:
    folder: Folder of the graph, which is created if it is missing. No process
      may be reading a graph there.
    num_nodes: N, less than 2^31.
    num_features: F, the features of a node.
    edges: Returns a new iterator over all edges; it is called twice and must
      give equal edges. A node's neighbours are stored in the iterator's order.
    rows: Chunks of features, labels and splits of all nodes in order.
    meta: Metadata of the graph as plain data.
    unique: Whether equal edges count once; a node's neighbours are then sorted.

  Returns:
    The opened graph.

  Raises:
    ValueError: If a node does not exist, features have another dtype or width,
      or the number of rows differs from the number of nodes.
  """
  folder = pathlib.Path(folder).expanduser()
  folder.mkdir(parents=True, exist_ok=True)
  if not 0 < num_nodes < 2**31:
    raise ValueError(f"num_nodes={num_nodes} must be 1 to 2^31 - 1")
  _write_edges(folder, num_nodes, edges)
  if unique:
    _remove_duplicate_edges(folder, num_nodes)
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
  """Writes indptr and indices: counts each node's edges, then places them."""
  ends = np.zeros(num_nodes + 1, np.int64)
  for nodes, neighbours in edges():
    for ids in (nodes, neighbours):
      check_node_ids("an edge", ids, num_nodes)
    np.add.at(ends[1:], nodes, 1)  # counts duplicates of a node
  np.cumsum(ends, out=ends)
  with _create_npy(folder, "indptr", num_nodes + 1) as file:
    file.write(ends.data)
  with _create_npy(folder, "indices", int(ends[-1])) as file:
    file.truncate(file.tell() + 4 * int(ends[-1]))  # a sparse file of int32
  if not ends[-1]:
    return
  indices = np.load(folder / "indices.npy", mmap_mode="r+")
  free = ends[:-1]  # the next free index of each node in indices
  for nodes, neighbours in edges():
    if not len(nodes):
      continue
    # Stable, so that a node's neighbours keep the order of the stream.
    order = np.argsort(nodes, kind="stable")
    nodes = nodes[order]
    # Edges of one node are now consecutive. The i-th edge of a node in this
    # chunk goes to the node's next free index plus i.
    first = np.flatnonzero(np.r_[True, nodes[1:] != nodes[:-1]])
    counts = np.diff(np.r_[first, len(nodes)])
    places = free[nodes] + np.arange(len(nodes)) - np.repeat(first, counts)
    indices[places] = neighbours[order]
    free[nodes[first]] += counts
  indices.flush()


def _remove_duplicate_edges(folder: pathlib.Path, num_nodes: int) -> None:
  """Sorts each node's neighbours and removes repeated ones.

  One block of nodes is in memory at a time: either a single node, or nodes with
  at most `CHUNK` edges in total.
  """
  indptr = np.array(np.load(folder / "indptr.npy", mmap_mode="r"))
  if not indptr[-1]:
    return
  indices = np.load(folder / "indices.npy", mmap_mode="r")

  def parts() -> Iterator[tuple[int, np.ndarray]]:
    """Yields each block's first node, and node << 32 | neighbour, sorted."""
    start = 0
    while start < num_nodes:
      last = np.searchsorted(indptr, indptr[start] + CHUNK, side="right") - 1
      stop = min(max(int(last), start + 1), num_nodes)
      degrees = np.diff(indptr[start : stop + 1])
      nodes = np.repeat(np.arange(start, stop, dtype=np.int64), degrees)
      neighbours = indices[indptr[start] : indptr[stop]]
      yield start, np.unique(nodes << 32 | neighbours)
      start = stop

  ends = np.zeros(num_nodes + 1, np.int64)
  for start, keys in parts():
    degrees = np.bincount((keys >> 32) - start)
    ends[start + 1 : start + 1 + len(degrees)] = degrees
  np.cumsum(ends, out=ends)
  with _create_npy(
    folder, "unique", int(ends[-1]), dtype=DTYPES["indices"]
  ) as file:
    for _, keys in parts():
      file.write((keys & 0xFFFFFFFF).astype(np.int32).data)
  with _create_npy(folder, "indptr", num_nodes + 1) as file:
    file.write(ends.data)
  (folder / "unique.npy").replace(folder / "indices.npy")


def _write_rows(
  folder: pathlib.Path, num_nodes: int, num_features: int,
  rows: Iterable[NodeRows]
) -> None:
  """Writes features, labels and splits, one chunk in memory at a time."""
  with contextlib.ExitStack() as opened:
    shapes = {
      "features": (num_nodes, num_features), "labels": (num_nodes,),
      "split": (num_nodes,),
    }
    files = {
      name: opened.enter_context(_create_npy(folder, name, *shape))
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
      raise ValueError(
        f"features must have one row for each of {num_nodes} nodes, got {count}"
      )


def _create_npy(
  folder: pathlib.Path, name: str, *shape: int, dtype: Any = None
) -> BinaryIO:
  """Creates an .npy file with its header; elements are appended later."""
  file = (folder / f"{name}.npy").open("wb")
  np.lib.format.write_array_header_1_0(file, {
    "descr": np.lib.format.dtype_to_descr(np.dtype(dtype or DTYPES[name])),
    "fortran_order": False,
    "shape": shape,
  })
  return file


def chunks(length: int, size: int = CHUNK) -> Iterator[tuple[int, int]]:
  """Yields start and end of consecutive chunks of a range.

  Args:
    length: The end of the range, which begins at 0.
    size: The length of all chunks except the last.

  Example:
    >>> list(chunks(5, size=2))
    [(0, 2), (2, 4), (4, 5)]
  """
  for start in range(0, length, size):
    yield start, min(start + size, length)
