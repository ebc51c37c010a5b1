"""Graphs on disk, their builders, the sampler, and the Bayes classifier."""

import collections
import gzip
import itertools
import json
import os
import shutil

import numpy as np
import pytest

from caatnet.data.graphs import bayes, builders, csr, loaders, sampling
from caatnet.data.graphs.data import Trees

SMALL = {
  "num_nodes": 5_000, "mean_degree": 6.0, "num_features": 16,
  "num_classes": 4, "inside": 0.7, "signal": 1.0, "seed": 3,
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
  return builders.communities(tmp_path_factory.mktemp("planted"), **SMALL)


def write(folder, pairs, num_nodes=4, chunk=2, **changes):
  """Writes edges (node, neighbour) in chunks."""
  pairs = np.array(pairs, np.int64).reshape(-1, 2)

  def stream():
    for start, stop in csr.chunks(len(pairs), chunk):
      yield pairs[start:stop, 0], pairs[start:stop, 1]

  rows = num_nodes < 100 and [(
    np.ones((num_nodes, 3), "f4"), np.arange(num_nodes),
    np.zeros(num_nodes, int),
  )]
  return csr.write_graph(folder, **{
    "num_nodes": num_nodes, "num_features": 3, "edges": stream,
    "rows": rows, "meta": {},
  } | changes)


# On disk. ---------------------------------------------------------------------


def test_neighbours_are_those_of_the_edges(tmp_path):
  """Keeps the order of the stream for any chunks; includes isolated nodes."""
  edges = np.random.default_rng(0).integers(0, 30, (200, 2))
  edges = edges[edges[:, 0] % 5 != 2]
  expected = collections.defaultdict(list)
  for node, neighbour in edges.tolist():
    expected[node].append(neighbour)
  digests = set()
  for chunk in (1, 7, 1000):
    graph = write(tmp_path / str(chunk), edges, 30, chunk)
    for node in range(30):
      found = graph.indices[graph.indptr[node] : graph.indptr[node + 1]]
      assert found.tolist() == expected[node]
    digests.add(graph.meta["sha256"])
  assert len(digests) == 1


def test_graph_without_edges_is_valid(tmp_path):
  graph = write(tmp_path, [])
  assert graph.num_edges == 0
  for implementation in ("reference", "compiled"):
    sampler = sampling.Sampler(graph, (2, 3), 0, implementation=implementation)
    ids, degrees = sampler.sample(np.array([2, 0]), 0)
    assert (ids == np.array([[2], [0]])).all()  # the node itself as padding
    assert not degrees.any()


def cut_off(folder):
  path = folder / "features.npy"
  path.write_bytes(path.read_bytes()[:-4])


def outside(folder):
  indices = np.load(folder / "indices.npy")
  indices[1] = 4
  np.save(folder / "indices.npy", indices)


def of_another_dtype(folder):
  np.save(folder / "features.npy", np.ones((4, 3)))


def falling(folder):
  np.save(folder / "indptr.npy", np.array([0, 2, 1, 3, 3]))


def shorter(folder):
  np.save(folder / "labels.npy", np.zeros(3, "i4"))


def without_end(folder):
  (folder / "meta.json").unlink()


@pytest.mark.parametrize(
  ("damage", "message"),
  [
    (cut_off, r"features.npy is missing or cut off"),
    (outside, r"indices.npy names node 4, but nodes are 0 to 3"),
    (of_another_dtype, r"features.npy is float64, but must be float32"),
    (falling, r"indptr.npy .* node 1 has fewer than 0 neighbours"),
    (shorter, r"equal numbers of nodes.*'labels.npy': 3"),
    (without_end, r"has no meta.json"),
    (lambda f: (f / "split.npy").unlink(), r"split.npy is missing"),
    (lambda f: (f / "meta.json").write_text("{"), r"meta.json is damaged"),
    (lambda f: (f / "meta.json").write_text("[]"), r"the content must be an"),
    (lambda f: np.save(f / "labels.npy", np.array([0, -2, 1, 1], "i4")),
     r"has -2, but"),
    (lambda f: np.save(f / "split.npy", np.array([0, 4, 1, 1], "u1")),
     r"has 4, but .* are 0 to 3"),
    (lambda f: np.save(f / "indptr.npy", np.arange(5)), r"goes from 0 to 4"),
    (lambda f: np.save(f / "indptr.npy", np.array([1, 2, 2, 3, 3])),
     r"goes from 1 to 3"),
    (lambda f: np.save(f / "labels.npy", np.zeros((4, 1), "i4")),
     r"labels.npy has shape \(4, 1\), but must have 1 dim$"),
    (lambda f: np.save(f / "features.npy", np.zeros(4, "f4")),
     r"features.npy has shape \(4,\), but must have 2 dims$"),
    (shutil.rmtree, r"is not a folder"),
  ],
)
def test_damaged_file_is_named(tmp_path, damage, message):
  write(tmp_path, [(0, 1), (0, 2), (2, 3)])
  damage(tmp_path)
  with pytest.raises(ValueError, match=message):
    csr.open_graph(tmp_path)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"edges": lambda: [(np.array([0]), np.array([4]))]}, "names node 4"),
    ({"edges": lambda: [(np.array([-1]), np.array([0]))]}, "names node -1"),
    ({"rows": [(np.ones((4, 3)), np.zeros(4), np.zeros(4))]}, "float64"),
    ({"rows": [(np.ones((3, 3), "f4"), np.zeros(3), np.zeros(3))]},
     "one row for each of 4 nodes, got 3"),
    ({"rows": [(np.ones((4, 2), "f4"), np.zeros(4), np.zeros(4))]},
     r"float32 \(4, 2\), but must be float32 \[nodes, 3\]"),
    ({"num_nodes": 2**31}, "must be 1 to"),
    ({"num_nodes": 0}, "num_nodes=0 must be 1 to"),
  ],
)
def test_failed_writer_leaves_no_graph(tmp_path, changes, message):
  with pytest.raises(ValueError, match=message):
    write(tmp_path, [(0, 1)], **{"num_nodes": 4} | changes)
  with pytest.raises(ValueError, match=r"no meta.json"):
    csr.open_graph(tmp_path)


# Builders. --------------------------------------------------------------------


def test_rmat_has_its_quarters_and_its_seed(tmp_path):
  """Compares shares of quarters after undoing the permutation of the ids."""
  options = {
    "scale": 8, "num_edges": 40_000, "num_features": 4, "num_classes": 3,
    "quarters": (0.57, 0.19, 0.19), "signal": 1.0,
  }
  graph = builders.rmat(tmp_path / "a", seed=1, **options)
  again = builders.rmat(tmp_path / "b", seed=1, **options)
  other = builders.rmat(tmp_path / "c", seed=2, **options)
  assert graph.meta["sha256"] == again.meta["sha256"] != other.meta["sha256"]
  inverse = pow(0x9E3779B1, -1, 256)
  nodes = np.repeat(np.arange(256), np.diff(graph.indptr)) * inverse % 256
  neighbours = graph.indices.astype(int) * inverse % 256
  for bit in (7, 0):
    quarter = 2 * (nodes >> bit & 1) + (neighbours >> bit & 1)
    shares = np.bincount(quarter, minlength=4) / len(quarter)
    np.testing.assert_allclose(shares, (0.57, 0.19, 0.19, 0.05), atol=0.01)


def test_communities_have_the_planted_statistics(planted):
  """Degrees, shares of neighbours inside, features around class means."""
  degrees = np.diff(planted.indptr)
  assert abs(degrees.mean() - 6) < 0.15
  assert abs(degrees.var() - 6) < 0.6
  assert (degrees == 0).any()  # isolated nodes are among them
  nodes = np.repeat(np.arange(5_000), degrees)
  inside = planted.labels[nodes] == planted.labels[planted.indices]
  assert abs(inside.mean() - 0.7) < 0.01
  means = builders.class_means(4, 16, 1.0, 3)
  np.testing.assert_allclose(np.linalg.norm(means, axis=1), 1, rtol=1e-5)
  noise = planted.features - means[planted.labels]
  assert abs(noise.std() - 1) < 0.02
  assert abs(noise.mean()) < 0.02
  shares = np.bincount(planted.split) / 5_000
  np.testing.assert_allclose(shares, builders.SPLIT_FRACTIONS, atol=0.03)


RMAT = {
  "scale": 3, "num_edges": 9, "num_features": 2, "num_classes": 3,
  "quarters": (0.5, 0.25, 0.25), "signal": 1.0, "seed": 0,
}


@pytest.mark.parametrize(("changes", "fits", "message"), [
  ({"scale": 0}, {"scale": 1}, "scale=0 must be 1 to 30"),
  ({"scale": 31}, {}, "scale=31 must be 1 to 30"),
  ({"quarters": (0.5, 0.5, 0.1)}, {"quarters": (1.0, 0.0, 0.0)}, "quarters="),
  ({"quarters": (0.5, 0.5)}, {}, "quarters=.* must be three probabilities"),
  ({"quarters": (-0.1, 0.5, 0.5)}, {"quarters": (0.0, 0.5, 0.5)}, "quarters="),
  ({"num_features": 0}, {"num_features": 1}, "num_features=0 must be at least"),
])
def test_rmat_parameters_have_ranges(tmp_path, changes, fits, message):
  graph = builders.rmat(tmp_path / "a", **RMAT | fits)
  assert graph.num_nodes == 2 ** (RMAT | fits)["scale"]
  assert graph.num_edges == 9
  with pytest.raises(ValueError, match=message):
    builders.rmat(tmp_path / "b", **RMAT | changes)


@pytest.mark.parametrize(("changes", "fits", "message"), [
  ({"num_classes": 1}, {"num_classes": 2}, "num_classes=1 must be at least 2"),
  ({"num_nodes": 3}, {"num_nodes": 4}, "num_nodes=3 must be at least 4"),
  ({"inside": 1.1}, {"inside": 1.0}, "inside=1.1 must lie in"),
  ({"mean_degree": -1}, {"mean_degree": 0}, "mean_degree=-1 must be at least"),
])
def test_parameters_of_communities_have_ranges(
  tmp_path, changes, fits, message
):
  options = SMALL | {"num_nodes": 40, "num_features": 2}
  graph = builders.communities(tmp_path / "a", **options | fits)
  assert graph.num_nodes == (options | fits)["num_nodes"]
  assert graph.meta["num_classes"] == (options | fits)["num_classes"]
  with pytest.raises(ValueError, match=message):
    builders.communities(tmp_path / "b", **options | changes)


def test_chunks_of_a_graph_have_random_numbers_of_their_own(
  tmp_path, monkeypatch
):
  """Chunks of 8 nodes, with features that are noise only."""
  monkeypatch.setattr(builders, "_NODES", 8)
  options = SMALL | {"num_nodes": 64, "signal": 0.0}
  graph = builders.communities(tmp_path / "a", **options)
  assert len(np.unique(graph.features[:, 0])) == 64
  degrees = np.diff(graph.indptr).reshape(8, 8)
  assert len(np.unique(degrees, axis=0)) == 8
  assert len(np.unique(graph.split.reshape(8, 8), axis=0)) > 4
  monkeypatch.setattr(builders, "_NODES", 64)
  whole = builders.communities(tmp_path / "b", **options)
  np.testing.assert_array_equal(whole.features[:8], graph.features[:8])


# Graphs of other formats. -----------------------------------------------------


def files_of(folder, pairs, features, labels, split):
  """Writes one graph in each supported format; "u v" means that v reads u."""
  columns = pairs.T
  text = "\n".join(f"{u}\t{v}" for u, v in pairs)
  (folder / "edges.txt").write_text(f"# a comment\n{text}\n")
  np.save(folder / "features.npy", features)
  np.save(folder / "labels.npy", labels)
  arrays = {"features": features, "labels": labels, "split": split}
  np.savez(folder / "pairs.npz", edge_index=columns, **arrays)
  order = np.argsort(columns[1], kind="stable")
  indptr = np.r_[0, np.cumsum(np.bincount(columns[1], minlength=len(labels)))]
  np.savez(
    folder / "rows.npz", indptr=indptr, indices=columns[0][order], **arrays
  )

  def zipped(name, values):
    path = folder / "ogb" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
      np.savetxt(file, values, "%r", delimiter=",")

  zipped("raw/edge.csv.gz", pairs.astype(object))
  zipped("raw/node-feat.csv.gz", features.astype(object))
  known = np.where(labels < 0, np.nan, labels)
  zipped("raw/node-label.csv.gz", known.astype(object))
  for number, name in enumerate(("train", "valid", "test")):
    nodes = np.flatnonzero(split == number).astype("O")
    zipped(f"split/a/{name}.csv.gz", nodes)
    zipped(f"../large/split/a/{name}.csv.gz", nodes)
  (folder / "large/raw").mkdir()
  np.savez(folder / "large/raw/data.npz", edge_index=columns,
           node_feat=features.astype("f2"))
  np.savez(folder / "large/raw/node-label.npz",
           node_label=known[:, None])


@pytest.mark.parametrize("undirected", [False, True])
def test_all_formats_of_a_graph_give_one_graph(tmp_path, undirected):
  rng = np.random.default_rng(0)
  pairs, labels = rng.integers(0, 40, (150, 2)), rng.integers(-1, 3, 40)
  features = rng.normal(size=(40, 5)).astype("f2").astype("f8")
  split = rng.integers(0, 4, 40).astype("u1")
  files_of(tmp_path, pairs, features, labels, split)
  both = pairs
  if undirected:  # each pair once in each direction
    both = np.unique(np.concatenate([pairs, pairs[:, ::-1]]), axis=0)
    assert len(both) < 2 * len(pairs)
  options = {"undirected": undirected}
  graphs = {
    "edges": loaders.edge_list(
      tmp_path / "a", path=str(tmp_path / "edges.txt"),
      features=str(tmp_path / "features.npy"),
      labels=str(tmp_path / "labels.npy"), **options,
    )
  } | {
    name: loaders.npz(
      tmp_path / "made" / name, path=str(tmp_path / name), **options
    )
    for name in ("pairs.npz", "rows.npz")
  } | {
    name: loaders.ogb(
      tmp_path / "made" / name, path=str(tmp_path / name), **options
    )
    for name in ("ogb", "large")
  }
  for name, graph in graphs.items():
    nodes = np.repeat(np.arange(40), np.diff(graph.indptr))
    found = sorted(zip(graph.indices.tolist(), nodes.tolist(), strict=True))
    assert found == sorted(map(tuple, both.tolist())), name
    np.testing.assert_array_equal(graph.features, features)
    np.testing.assert_array_equal(graph.labels, labels)
    assert graph.meta["num_classes"] == 3
    assert graph.meta["name"] == ("edges.txt" if name == "edges" else name)
    if name != "edges":  # an edge list has no split
      np.testing.assert_array_equal(graph.split, split)
      for number, side in enumerate(csr.SPLITS):
        nodes = graph.nodes(side)
        assert nodes.dtype == np.int32
        assert nodes.tolist() == [
          v for v in range(40) if split[v] == number and labels[v] >= 0
        ]
  assert set(graphs["edges"].split) == {0, 1, 2}


def edges_of(folder, text, name="edges.txt", **paths):
  """Converts an edge list over 40 nodes."""
  opened = gzip.open if name.endswith(".gz") else open
  with opened(folder / name, "wt") as file:
    file.write(text)
  np.save(folder / "features.npy", np.zeros((40, 2)))
  np.save(folder / "labels.npy", np.zeros(40, int))
  return loaders.edge_list(folder / "graph", **{
    "path": str(folder / name), "undirected": False,
    "features": str(folder / "features.npy"),
    "labels": str(folder / "labels.npy"),
  } | paths)


@pytest.mark.parametrize("name", ["edges.csv", "edges.txt.gz"])
def test_comments_and_empty_lines_of_an_edge_list_are_skipped(tmp_path, name):
  text = "# 9 9\n3 1\n\n% 8 8\n 3,2\n\t\n0\t3"
  graph = edges_of(tmp_path, text, name)
  assert graph.num_edges == 3
  assert graph.indices[graph.indptr[3] : graph.indptr[4]].tolist() == [0]
  assert graph.indices[graph.indptr[1] : graph.indptr[3]].tolist() == [3, 3]


def test_nodes_are_held_out_by_a_hash_of_their_number(tmp_path):
  """3 of 5 train, with and without further nodes."""
  split = loaders._hash_split(10_000)
  shares = np.bincount(split) / len(split)
  np.testing.assert_allclose(shares, (0.6, 0.2, 0.2), atol=0.01)
  graph = edges_of(tmp_path, "0 1\n")
  np.testing.assert_array_equal(graph.split, split[:40])


@pytest.mark.parametrize(("key", "content"), [
  ("features", None), ("labels", None), ("labels", b"12"),
])
def test_array_that_cannot_be_read_names_its_key(tmp_path, key, content):
  path = tmp_path / "other.npy"
  if content:
    path.write_bytes(content)
  with pytest.raises(ValueError, match=f"^{key}=.*must be an .npy file: "):
    edges_of(tmp_path, "0 1\n", **{key: str(path)})


@pytest.mark.parametrize(("damage", "message"), [
  (lambda raw: (raw / "edge.csv.gz").unlink(), "edge.csv.gz must have two"),
  (lambda raw: (raw / "edge.csv.gz").write_text("0,1"), "edge.csv.gz must"),
  (lambda raw: (raw / "node-feat.csv.gz").unlink(), "node-feat.csv.gz is miss"),
  (lambda raw: shutil.rmtree(raw.parent / "split/a"), "split must have a"),
  (lambda raw: np.savetxt(raw / "node-label.csv.gz", np.zeros((4, 2))),
   "node-label.csv.gz is missing or damaged"),
  (lambda raw: np.savetxt(raw / "node-label.csv.gz", np.full(4, 0.5)),
   "has a label that is not an integer"),
  (lambda raw: np.savetxt(raw.parent / "split/a/train.csv.gz", [-1], "%d"),
   "train.csv.gz names node -1"),
  (lambda raw: np.savetxt(raw / "node-label.csv.gz", np.zeros((4, 2)),
                          delimiter=","), "has 2 tasks, but must have one"),
  (lambda raw: np.savetxt(raw / "node-label.csv.gz", np.full(4, 1e300)),
   "has a label that is not an integer below"),
  (lambda raw: np.savetxt(raw.parent / "split/a/test.csv.gz", [1], "%d"),
   "test.csv.gz has node 1, as another file does"),
  (lambda raw: np.savetxt(raw.parent / "split/a/test.csv.gz", np.eye(2), "%d",
                          delimiter=","), "must have one node on each line"),
  (lambda raw: np.savetxt(raw.parent / "split/a/test.csv.gz", []),
   "test.csv.gz is missing or damaged: .*no data"),
])
def test_damaged_ogb_folder_names_its_path(tmp_path, damage, message):
  files_of(tmp_path, np.array([[0, 1], [2, 3]]), np.zeros((4, 2)),
           np.zeros(4, int), np.arange(4, dtype="u1"))
  damage(tmp_path / "ogb/raw")
  with pytest.raises(ValueError, match=f"^path='.*/ogb': .*{message}"):
    loaders.ogb(tmp_path / "a", path=str(tmp_path / "ogb"), undirected=False)


@pytest.mark.parametrize(("name", "arrays"), [
  ("node-label", {"node_label": np.array(["a", "b", "c", "d"])}),
  ("data", {"edge_index": np.zeros((2, 1), int), "node_feat": np.float32(1)}),
])
def test_damaged_large_ogb_folder_names_its_path(tmp_path, name, arrays):
  files_of(tmp_path, np.array([[0, 1], [2, 3]]), np.zeros((4, 2)),
           np.zeros(4, int), np.arange(4, dtype="u1"))
  np.savez(tmp_path / f"large/raw/{name}.npz", **arrays)
  with pytest.raises(ValueError, match=r"^path='.*/large': .*\[N, F\], and la"):
    loaders.ogb(tmp_path / "a", path=str(tmp_path / "large"), undirected=False)


@pytest.mark.parametrize(
  ("text", "message"),
  [("0 1\n2\n", "exactly two"), ("0 1 5\n2 3 4\n", "exactly two"),
   ("0 1 2\n3\n", "exactly two"),
   ("0 x\n", "invalid literal"), ("0 1\n0 40\n", "names node 40"),
   ("0 -1\n", "names node -1"), (f"0 {10**20}\n", "too large")],
)
def test_invalid_edge_list_is_an_error(tmp_path, text, message):
  files_of(
    tmp_path, np.zeros((1, 2), int), np.zeros((40, 2)), np.zeros(40, int),
    np.zeros(40, "u1"),
  )
  (tmp_path / "edges.txt").write_text(text)
  with pytest.raises(ValueError, match=message):
    loaders.edge_list(
      tmp_path / "a", path=str(tmp_path / "edges.txt"), undirected=False,
      **{k: str(tmp_path / f"{k}.npy") for k in ("features", "labels")},
    )


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"labels": np.zeros(4)}, "labels are float64"),
    ({"labels": np.array([0, 1, 10**9, 0])}, "labels are 0 to 1000000000, but"),
    ({"labels": np.full(4, -1)}, "has no labels: all 4 are -1"),
    ({"labels": np.zeros((4, 2), int)}, r"labels are int64 \(4, 2\)"),
    ({"labels": np.int64(4)}, r"labels are int64 \(\)"),
    ({"features": np.float32(4)}, r"features are float32 \(\)"),
    ({"features": np.zeros((4, 3), int)}, "features are int64"),
    ({"edge_index": np.full((2, 1), 4)}, "names node 4"),
    ({"edge_index": np.zeros((3, 1), int)}, r"must be \[2, E\]"),
    ({"edge_index": np.zeros(2, int)}, r"must be \[2, E\]"),
    ({"edge_index": np.zeros((2, 1))}, "edge_index is float64"),
    ({"features": np.zeros((3, 3))}, "features are given for 3 nodes, but"),
    ({"features": np.zeros(4)}, r"features are float64 \(4,\)"),
    ({"split": np.zeros(5, int)}, "split are given for 5 nodes, but labels"),
    ({"split": np.zeros(4)}, "split are float64"),
    ({"split": np.full(4, 9)}, r"split are 9 to 9, but must lie in \[0, 3\]"),
    ({"split": np.full(4, 257)}, "split are 257 to 257"),
    ({"labels": np.full(4, 2**32 + 1)}, "labels are 4294967297 to"),
    ({"labels": np.full(4, -2)}, r"labels are -2 to -2, but must lie in \[-1"),
    ({"labels": np.full(4, 2**63, "u8")}, "labels are 9223372036854775808"),
    ({"features": np.full((4, 3), 1e39)}, "node 0 must be finite"),
    ({"features": np.array([[0.0], [0.0], [np.nan], [0.0]])}, "node 2 must be"),
  ],
)
def test_error_of_a_file_names_the_key(tmp_path, changes, message):
  path = tmp_path / "graph.npz"
  np.savez(path, **{
    "edge_index": np.zeros((2, 1), int), "features": np.zeros((4, 3)),
    "labels": np.zeros(4, int),
  } | changes)
  with pytest.raises(ValueError, match=f"^path='.*graph.npz'.*{message}"):
    loaders.npz(tmp_path / "a", path=str(path), undirected=False)


@pytest.mark.parametrize("dtype", ["u1", "u8", "i2", "i8"])
def test_labels_may_have_any_integer_dtype(tmp_path, dtype):
  path = tmp_path / "graph.npz"
  np.savez(
    path, edge_index=np.zeros((2, 1), int), features=np.zeros((3, 2)),
    labels=np.array([0, 2, 1], dtype),
  )
  graph = loaders.npz(tmp_path / "a", path=str(path), undirected=False)
  assert graph.labels.tolist() == [0, 2, 1]
  assert graph.meta["num_classes"] == 3


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_undirected_edges_count_once_for_any_chunks(
  tmp_path, monkeypatch, chunk
):
  """Whichever directions are listed, and however often; also self-loops."""
  monkeypatch.setattr(csr, "CHUNK", chunk)
  pairs = np.array([[0, 3], [3, 0], [0, 3], [2, 2], [1, 3], [3, 5]])
  np.savez(
    tmp_path / "graph.npz", edge_index=pairs.T, features=np.zeros((7, 2)),
    labels=np.zeros(7, int),
  )
  graph = loaders.npz(
    tmp_path / "a", path=str(tmp_path / "graph.npz"), undirected=True
  )
  assert np.diff(graph.indptr).tolist() == [1, 1, 1, 3, 0, 1, 0]
  assert graph.indices.tolist() == [3, 3, 2, 0, 1, 5, 3]


def test_missing_arrays_of_a_file_are_named(tmp_path):
  np.savez(tmp_path / "x.npz", features=np.zeros((4, 3)))
  for name in ("x.npz", "y.npz"):
    with pytest.raises(ValueError, match=rf"^path=.*{name}' must be an .npz"):
      loaders.npz(
        tmp_path / "a", path=str(tmp_path / name), undirected=False
      )


# The sampler. -----------------------------------------------------------------


def test_compiled_sampler_equals_the_reference(planted):
  """Covers several threads, and batches cut at other places."""
  nodes = np.random.default_rng(0).integers(0, 5_000, 150)
  expected = sampling.Sampler(
    planted, (4, 3, 2), 7, implementation="reference"
  ).sample(nodes, 1000)
  for threads in (1, 3):
    sampler = sampling.Sampler(
      planted, (4, 3, 2), 7, threads, implementation="compiled"
    )
    found = sampler.sample(nodes, 1000)
    np.testing.assert_array_equal(found, expected)
    parts = [sampler.sample(nodes[:9], 1000), sampler.sample(nodes[9:], 1009)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), expected)
  other = sampling.Sampler(planted, (4, 3, 2), 8).sample(nodes, 1000)
  assert (other[0] != expected[0]).mean() > 0.1


def test_sampler_has_a_thread_per_core_unless_told_otherwise(planted):
  assert sampling.Sampler(planted, (2,), 0).threads == os.cpu_count()
  assert sampling.Sampler(planted, (2,), 0, threads=3).threads == 3


def test_trees_hold_neighbours_and_each_edge_at_most_once(planted):
  fanouts = 4, 3
  ids, degrees = sampling.Sampler(planted, fanouts, 1).sample(
    np.arange(300), 0
  )
  assert ids.shape == (300, sampling.num_tree_positions(fanouts)) == (300, 17)
  for row, degree in zip(ids.tolist(), degrees.tolist(), strict=True):
    counts = {0}
    for place in range(5):
      first = 1 + 4 * place if not place else 5 + 3 * (place - 1)
      children = range(first, first + (4 if not place else 3))
      own = planted.indices[slice(*planted.indptr[row[place] : row[place] + 2])]
      assert degree[place] == (len(own) if place in counts else 0)
      for number, child in enumerate(children):
        if number < degree[place]:
          counts.add(child)
        else:
          assert row[child] == row[place]
          assert degree[child] == 0
      taken = [row[child] for child in children if child in counts]
      assert not collections.Counter(taken) - collections.Counter(own.tolist())


def test_all_sets_of_neighbours_are_equally_likely(tmp_path):
  """Five neighbours in three places: ten sets, chi-square below 1e-4."""
  graph = write(tmp_path, [(0, i) for i in range(1, 6)], 6)
  sampler = sampling.Sampler(graph, (3,), 5)
  ids, _ = sampler.sample(np.zeros(20_000, int), 0)
  found = collections.Counter(map(tuple, np.sort(ids[:, 1:]).tolist()))
  assert set(found) == set(itertools.combinations(range(1, 6), 3))
  expected = 2_000
  assert sum((n - expected) ** 2 / expected for n in found.values()) < 34


def test_epochs_hold_every_node_once_in_another_order(planted):
  nodes = planted.nodes("train")[:50]
  trees = Trees(sampling.Sampler(planted, (2,), 0), nodes, 8, seed=4)
  read = np.concatenate([trees.at(n)[0] for n in range(0, 104, 8)])
  first, second = read[:50], read[50:100]
  assert sorted(first) == sorted(second) == nodes.tolist()
  assert (first != second).any()
  other = Trees(trees.sampler, nodes, 8, seed=5)
  assert (other.at(0)[0] != read[:8]).any()


@pytest.mark.parametrize(
  ("fanouts", "implementation", "message"),
  [
    ((), "auto", r"fanouts=\(\) must be integers"),
    ((3, 0), "auto", r"fanouts=\(3, 0\) must be integers of at least 1"),
    ((3,), "fast", "sampler='fast' must be 'auto'"),
  ],
)
def test_invalid_sampler_options_are_errors(
  planted, fanouts, implementation, message
):
  with pytest.raises(ValueError, match=message):
    sampling.Sampler(planted, fanouts, 0, implementation=implementation)
  with pytest.raises(ValueError, match=r"nodes lie in .0, 5000.; they"):
    sampling.Sampler(planted, (3,), 0).sample(np.array([0, 5000]), 0)


# Bayes classifier. ------------------------------------------------------------


def test_bayes_classifier_equals_a_sum_over_all_communities(tmp_path):
  """Enumerates the labels of all places of small trees."""
  options = SMALL | {"num_nodes": 400, "num_classes": 3, "mean_degree": 2.0}
  graph = builders.communities(tmp_path, **options)
  fanouts, nodes = (2, 1), graph.nodes("validation")[:40]
  ids, degrees = sampling.Sampler(graph, fanouts, 0).sample(nodes, 0)
  means = builders.class_means(3, 16, 1.0, 3)
  square = np.square(graph.features[:, None] - means).sum(axis=-1)
  parent = {1: 0, 2: 0, 3: 1, 4: 2}
  right = []
  for row, degree, node in zip(ids, degrees, nodes, strict=True):
    there = {0}
    for place, above in parent.items():
      rank = place - 1 if place < 3 else 0
      if above in there and rank < degree[above]:
        there.add(place)
    posterior = np.zeros(3)
    for labels in itertools.product(range(3), repeat=5):
      log = -sum(square[row[p], labels[p]] for p in there) / 2
      chance = np.prod([
        0.7 if labels[p] == labels[parent[p]] else 0.15 for p in there - {0}
      ])
      posterior[labels[0]] += chance * np.exp(log)
    right.append(posterior.argmax() == graph.labels[node])
  arguments = graph.features, ids, degrees, graph.labels[nodes], fanouts
  assert bayes.accuracy(*arguments, graph.meta) == np.mean(right)


def test_bayes_accuracy_grows_with_depth(planted):
  """Graphs of generators without communities have no accuracy bound."""
  nodes = planted.nodes("validation")
  ids, degrees = sampling.Sampler(planted, (6, 4), 0).sample(nodes, 0)
  arguments = (
    planted.features, ids, degrees, planted.labels[nodes], (6, 4), planted.meta
  )
  bounds = [bayes.accuracy(*arguments, depth) for depth in range(3)]
  assert bounds[0] + 0.15 < bounds[1] < bounds[2] < 0.95
  meta = json.loads(json.dumps(planted.meta))
  meta["generator"]["name"] = "rmat"
  with pytest.raises(ValueError, match="rmat has no accuracy bound"):
    bayes.accuracy(*arguments[:-1], meta)
