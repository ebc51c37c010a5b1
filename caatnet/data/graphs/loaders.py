"""Loaders of existing graphs: edge lists, .npz files, and OGB folders.

Each graph is converted once to a folder of `caatnet.data.graphs.csr`. A pair
"u v" means that v reads the features of u (a message from u to v); with
``undirected`` u also reads the features of v, and a pair counts once, however
often and in whichever directions it is listed.
"""

from collections.abc import Callable, Iterator, Mapping
import functools
import gzip
import os
import pathlib
import warnings
import zlib

import numpy as np

from caatnet.data.graphs.csr import (
  CHUNK,
  SPLITS,
  Edges,
  Graph,
  check_node_ids,
  chunks,
  write_graph,
)
from parallel.base.arrays import map_npy, read_npz

# Maximum number of classes: a larger label is probably an id, and the model has
# weights for each class.
_MAX_CLASSES = 2**20


def _prefix_path_in_errors(load: Callable[..., Graph]) -> Callable[..., Graph]:
  """Wraps a loader so that its errors begin with the name of an argument.

  Errors that do not begin with an argument's name are attributed to ``path``.
  """

  @functools.wraps(load)
  def named(folder: str | os.PathLike[str], **options) -> Graph:
    try:
      return load(folder, **options)
    except (OSError, LookupError, ValueError) as error:
      if str(error).startswith(tuple(f"{key}=" for key in options)):
        raise
      raise ValueError(f"path={options['path']!r}: {error}") from error

  return named


@_prefix_path_in_errors
def edge_list(
  folder: str | os.PathLike[str],
  *,
  path: str,
  features: str,
  labels: str,
  undirected: bool,
) -> Graph:
  """Converts a text file with two node ids on each line.

  Args:
    folder: Folder of the converted graph.
    path: The file, .txt or .csv, possibly with .gz. Numbers are separated by
      blanks, tabs or commas; lines that begin with # or % are comments.
    features: An .npy file, float ``[N, F]``.
    labels: An .npy file, int ``[N]``, -1 for none. A hash of node ids
      determines the nodes for validation and test.
    undirected: Whether each edge has both directions.

  Returns:
    The opened graph.

  Raises:
    ValueError: If a file is missing or has another format.
  """
  rows, known = (_array(name, p) for name, p in
                 (("features", features), ("labels", labels)))
  return _write(
    folder, lambda: _read_pairs(pathlib.Path(path).expanduser()), rows, known,
    None, undirected, pathlib.Path(path).name,
  )


@_prefix_path_in_errors
def npz(
  folder: str | os.PathLike[str], *, path: str, undirected: bool
) -> Graph:
  """Converts an .npz file.

  Its arrays are "edge_index", int ``[2, E]``, or "indptr" and "indices";
  "features", float ``[N, F]``; "labels", int ``[N]``; and optionally "split",
  an index into ``csr.SPLITS`` for each node.

  Args:
    folder: Folder of the converted graph.
    path: The file.
    undirected: Whether each edge has both directions.

  Returns:
    The opened graph.

  Raises:
    ValueError: If the file is missing or has another format.
  """
  file = pathlib.Path(path).expanduser()
  try:
    found = read_npz(file)
    rows, labels = found["features"], found["labels"]
    if "edge_index" in found:
      pairs = found["edge_index"]
    else:
      indptr, indices = found["indptr"], found["indices"]
      if indptr.ndim != 1 or len(indptr) != len(labels) + 1 or (
        int(indptr[0]), int(indptr[-1])
      ) != (0, len(indices)):
        raise ValueError(
          "indptr must start at 0 and end at the number of indices"
        )
      nodes = np.repeat(np.arange(len(labels)), np.diff(indptr))
      pairs = np.stack([indices, nodes])
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"path={path!r} must be an .npz file with edge_index (or indptr and "
      f"indices), features and labels: {error}"
    ) from error
  return _write(
    folder, lambda: _iterate_pairs(pairs), rows, labels,
    found.get("split"), undirected, file.name,
  )


@_prefix_path_in_errors
def ogb(
  folder: str | os.PathLike[str], *, path: str, undirected: bool
) -> Graph:
  """Converts an unpacked node property dataset of OGB.

  Args:
    folder: Folder of the converted graph.
    path: The dataset's folder, with ``raw`` (``edge.csv.gz``,
      ``node-feat.csv.gz``, ``node-label.csv.gz``, or ``data.npz`` and
      ``node-label.npz``) and ``split/NAME`` (``train``, ``valid`` and ``test``
      .csv.gz).
    undirected: Whether each edge has both directions.

  Returns:
    The opened graph.

  Raises:
    ValueError: If a file is missing or has another format.

  Source: Hu et al., arXiv 2005.00687, and the file formats of the package ogb.
  """
  root = pathlib.Path(path).expanduser()
  raw = root / "raw"
  if (raw / "data.npz").is_file():  # format of the large datasets
    data = read_npz(raw / "data.npz")
    pairs, rows = data["edge_index"], data["node_feat"]
    labels = read_npz(raw / "node-label.npz")["node_label"]
    stream: Callable[[], Iterator[Edges]] = lambda: _iterate_pairs(pairs)  # noqa: E731
  else:
    rows = _csv(raw / "node-feat.csv.gz", np.float32)
    labels = _csv(raw / "node-label.csv.gz", np.float64)
    stream = lambda: _read_pairs(raw / "edge.csv.gz")  # noqa: E731
  if rows.ndim != 2 or labels.dtype.kind not in "biuf":
    raise ValueError(
      f"{root} has features {rows.dtype} {rows.shape} and labels "
      f"{labels.dtype}; features must be numbers [N, F], and labels must be "
      "numbers"
    )
  labels = labels.reshape(len(rows), -1)
  if labels.shape[1] != 1:
    raise ValueError(f"{root} has {labels.shape[1]} tasks, but must have one")
  labels = np.where(np.isnan(labels[:, 0]), -1, labels[:, 0])
  # Floats from 2^53 on may be rounded integers.
  if not ((np.abs(labels) < 2**53) & (labels == np.floor(labels))).all():
    raise ValueError(f"{root} has a label that is not an integer below 2^53")
  labels = labels.astype(np.int64)
  split = np.full(len(rows), SPLITS.index("none"), np.uint8)
  folders = sorted(p for p in (root / "split").glob("*") if p.is_dir())
  if not folders:
    raise ValueError(f"{root}/split must have a folder with train.csv.gz")
  for name, file in (
    ("train", "train"), ("validation", "valid"), ("test", "test")
  ):
    listed = folders[0] / f"{file}.csv.gz"
    nodes = _csv(listed, np.int64)
    if nodes.ndim != 1:
      raise ValueError(f"{listed} must have one node on each line")
    check_node_ids(str(listed), nodes, len(rows))
    taken = nodes[split[nodes] != SPLITS.index("none")]
    if len(taken):
      raise ValueError(f"{listed} has node {taken[0]}, as another file does")
    split[nodes] = SPLITS.index(name)
  return _write(folder, stream, rows, labels, split, undirected, root.name)


# Loaders by config name.
LOADERS: Mapping[str, Callable[..., Graph]] = {
  "edges": edge_list, "npz": npz, "ogb": ogb
}


def _write(
  folder, stream, rows, labels, split, undirected, name
) -> Graph:
  """Checks and writes a graph.

  ``stream`` returns chunks of edges, (source, target); ``rows`` are the nodes'
  features. If ``split`` is None, a hash of node ids determines the splits.
  """
  for what, array, dims, kind, form in (
    ("labels", labels, 1, np.integer, "integers [N]"),
    ("split", split, 1, np.integer, "integers [N]"),
    ("features", rows, 2, np.floating, "floats [N, F]"),
  ):
    if array is not None and (
      array.ndim != dims or not np.issubdtype(array.dtype, kind)
    ):
      raise ValueError(
        f"{name}: {what} are {array.dtype} {array.shape}, but must be {form}"
      )
  num_nodes = len(labels)
  split = _hash_split(num_nodes) if split is None else split
  for what, array in (("features", rows), ("split", split)):
    if len(array) != num_nodes:
      raise ValueError(
        f"{name}: {what} are given for {len(array)} nodes, but labels for "
        f"{num_nodes}; the numbers must be equal"
      )
  largest = int(labels.max()) if num_nodes else -1
  if num_nodes and largest == -1:
    raise ValueError(
      f"{name} has no labels: all {num_nodes} are -1; at least one node needs "
      "a label"
    )
  for what, array, least, most in (
    ("labels", labels, -1, _MAX_CLASSES - 1),
    ("split", split, 0, len(SPLITS) - 1),
  ):
    if num_nodes and not least <= int(array.min()) <= int(array.max()) <= most:
      raise ValueError(
        f"{name}: {what} are {array.min()} to {array.max()}, but must lie in "
        f"[{least}, {most}]"
      )

  def edges() -> Iterator[Edges]:
    for source, target in stream():
      yield target, source  # stored with the node that receives messages
      if undirected:
        yield source, target

  return write_graph(
    folder, num_nodes=num_nodes, num_features=rows.shape[1], edges=edges,
    rows=(
      (_float32(rows, a, b), labels[a:b], split[a:b])
      for a, b in chunks(num_nodes, CHUNK >> 4)
    ),
    meta={"name": name, "num_classes": largest + 1}, unique=undirected,
  )


def _float32(rows: np.ndarray, start: int, stop: int) -> np.ndarray:
  """Returns features of nodes ``start`` to ``stop - 1`` as float32.

  Raises ValueError unless they are finite.
  """
  with np.errstate(over="ignore"):
    found = rows[start:stop].astype(np.float32)
  if not np.isfinite(found).all():
    node = int(np.argmin(np.isfinite(found).all(axis=1)))
    raise ValueError(
      f"features of node {start + node} must be finite float32 numbers"
    )
  return found


def _hash_split(num_nodes: int) -> np.ndarray:
  """Splits nodes by a hash of ids: 3 of 5 train, 1 validation, 1 test."""
  place = np.arange(num_nodes, dtype=np.uint64)
  # Multiplicative (Fibonacci) hashing; the upper bits are well mixed.
  place = place * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)
  return np.array([0, 0, 0, 1, 2], np.uint8)[place % np.uint64(5)]


def _iterate_pairs(pairs: np.ndarray) -> Iterator[Edges]:
  """Yields the columns of ``[2, E]`` in chunks."""
  if pairs.ndim != 2 or len(pairs) != 2:
    raise ValueError(f"edge_index has {pairs.shape}, but must be [2, E]")
  if not np.issubdtype(pairs.dtype, np.integer):
    raise ValueError(f"edge_index is {pairs.dtype}, but must be integers")
  for start, stop in chunks(pairs.shape[1]):
    yield tuple(pairs[:, start:stop].astype(np.int64))


def _read_pairs(path: pathlib.Path) -> Iterator[Edges]:
  """Yields the pairs of a text file in chunks of about 16 MB."""
  opened = gzip.open if path.suffix == ".gz" else open
  is_empty = True
  try:
    with opened(path, "rt") as file:
      while lines := file.readlines(1 << 24):
        pairs = [
          line.replace(",", " ").split() for line in lines
          if not line.startswith(("#", "%"))
        ]
        pairs = [pair for pair in pairs if pair]
        if any(len(pair) != 2 for pair in pairs):
          raise ValueError("a line does not have exactly two numbers")
        is_empty = is_empty and not pairs
        yield tuple(np.array(pairs, np.int64).reshape(-1, 2).T)
    if is_empty:
      raise ValueError("it has no edges")
  except (OSError, EOFError, OverflowError, ValueError, zlib.error) as error:
    raise ValueError(f"{path} must have two node ids on each line: {error}"
                     ) from error


def _csv(path: pathlib.Path, dtype: type) -> np.ndarray:
  try:
    # numpy warns of an empty file.
    with warnings.catch_warnings(action="error", category=UserWarning):
      return np.loadtxt(path, dtype, delimiter=",", ndmin=1)
  except (OSError, EOFError, UserWarning, ValueError, zlib.error) as error:
    raise ValueError(f"{path} is missing or damaged: {error}") from error


def _array(name: str, path: str) -> np.ndarray:
  try:
    return map_npy(pathlib.Path(path).expanduser())
  except ValueError as error:
    raise ValueError(f"{name}={path!r} must be an .npy file: {error}"
                     ) from error
