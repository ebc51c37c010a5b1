"""Graphs as training data: batches, resuming, held-out nodes, bounds."""

import shutil

import numpy as np
import pytest

from caatnet.data.graphs import builders
from caatnet.data.graphs.data import GraphData

SMALL = {
  "num_nodes": 2_000, "mean_degree": 6.0, "num_features": 16,
  "num_classes": 4, "inside": 0.7, "signal": 1.0, "seed": 3,
}
OPTIONS = {
  "num_features": 16, "num_classes": 4, "fanouts": (3, 2), "batch_size": 6,
  "validation_nodes": 40, "sampler": "reference", "threads": 1,
  "access": "cpu_gather", "cache": "degree", "cache_rows": 0, "ahead": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return str(builders.communities(
    tmp_path_factory.mktemp("planted") / "graph", **SMALL
  ).folder)


def opened(folder, **changes):
  return GraphData(path=folder, **(OPTIONS | changes))


def ids(batch):
  return batch["features"].ids.tolist()


def test_example_is_a_node_with_its_tree(folder):
  data = opened(folder)
  assert (data.unit, data.units_per_example) == ("nodes", 1)
  # A node, 3 of its neighbours, and 2 neighbours of each of these.
  shapes = {k: v.shape for k, v in data.example.items()}
  assert shapes == {"features": (1 + 3 + 6, 16), "degree": (10,), "label": ()}
  batch = next(data.load(0).batches)
  assert np.shape(batch["features"].ids) == np.shape(batch["degree"]) == (6, 10)
  assert batch["label"].shape == (6,)


def test_labels_are_those_of_the_roots(folder):
  found = opened(folder).load(0)
  labels = np.load(f"{folder}/labels.npy")
  for part in (next(found.batches), found.validation):
    roots = part["features"].ids[:, 0]
    np.testing.assert_array_equal(part["label"], labels[roots])


def test_position_is_the_number_of_examples(folder):
  """Reads consecutive batches, and resumes at the position of a state."""
  data = opened(folder)
  batches = data.load(0).batches
  assert batches.get_state() == {"examples": 0}
  read = [next(batches) for _ in range(3)]
  assert batches.get_state() == {"examples": 18}
  resumed = data.load(0).batches
  resumed.set_state({"examples": 6})
  assert [ids(next(resumed)) for _ in range(2)] == [ids(b) for b in read[1:]]
  # Single examples equal those of the batches, and do not move the position.
  found = data.load(0)
  for number in (0, 6, 12):
    assert found.examples[number]["features"].ids[0] == (
      read[number // 6]["features"].ids[0, 0]
    )
  assert ids(next(found.batches)) == ids(read[0])
  assert ids(next(data.load(1).batches)) != ids(read[0])


def test_validation_nodes_are_a_fixed_part_of_their_split(folder):
  split = opened(folder, validation_nodes=0).load(0).validation
  few = opened(folder).load(7).validation
  roots = split["features"].ids[:, 0]
  assert len(few["label"]) == 40 < len(roots)
  np.testing.assert_array_equal(few["features"].ids[:, 0], roots[:40])
  trained = next(opened(folder).load(0).batches)["features"].ids[:, 0]
  assert not np.intersect1d(trained, roots).size


@pytest.mark.parametrize("cache", ["degree", "presampling"])
def test_cached_rows_are_requested_more_than_others(folder, cache):
  found = opened(folder, cache=cache, cache_rows=100).load(0)
  hot = found.table.hot
  assert len(set(hot.tolist())) == 100
  asked = np.zeros(2_000)
  for _ in range(60):
    np.add.at(asked, np.unique(next(found.batches)["features"].ids), 1)
  assert asked[hot].mean() > 1.3 * np.delete(asked, hot).mean()
  assert len(opened(folder).load(0).table.hot) == 0


def test_measures_include_the_bound_of_a_planted_graph(folder):
  found = opened(folder, validation_nodes=0).load(0)
  means = {"loss": 0.3, "accuracy": 0.5, "other": 1.0}
  measures = found.measures(means)
  assert {k: measures[k] for k in ("loss", "accuracy")} == {
    "loss": 0.3, "accuracy": 0.5,
  }
  baselines = found.baselines()
  assert set(measures) == {"loss", "accuracy", "bound"}
  assert baselines["Bayes"]["accuracy"] == measures["bound"]
  own = baselines["a node's own features, Bayes"]["accuracy"]
  assert 1 / 4 < own < measures["bound"] <= 1


@pytest.mark.parametrize(("changes", "message"), [
  ({"num_features": 15}, "num_features=15, but nodes have 16"),
  ({"num_classes": 3}, "num_classes=3, but there is the label 3"),
  ({"batch_size": 2001}, "labelled nodes to train on, but must have 2001, con"),
  ({"cache_rows": 2001}, "cache_rows=2001 must be at most 2000"),
  ({"cache": "lru"}, "cache='lru' must be"),
  ({"fanouts": (2**31 - 1,), "batch_size": 1},
   r"fanouts=.* config.data.batch_size=1 need 2,147,483,648 places for "
   "nodes; at most 2,147,483,647"),
  ({"access": "disk"}, "access='disk' must be"),
  ({"sampler": "fast"}, "sampler='fast' must be"),
])
def test_mismatch_with_the_graph_is_named(folder, changes, message):
  with pytest.raises(ValueError, match=message):
    opened(folder, **changes).load(0)


def test_largest_options_of_a_graph_are_valid(folder):
  assert len(opened(folder, cache_rows=2_000).load(0).table.hot) == 2_000
  assert opened(folder, batch_size=1, fanouts=(2**31 - 2,)).example[
    "degree"
  ].shape == (2**31 - 1,)


def test_graph_needs_a_labelled_node_of_each_side(folder, tmp_path):
  """Names the key of the batch size only if a batch is larger than a node."""
  shutil.copytree(folder, tmp_path / "graph")
  path = str(tmp_path / "graph")
  split = np.load(f"{folder}/split.npy")
  for side, number, least in (
    ("train", 0, "6, config.data.batch_size"), ("validate", 1, "1"),
  ):
    np.save(f"{path}/split.npy", np.where(split == number, 2, split))
    with pytest.raises(ValueError) as error:
      opened(path).load(0)
    assert str(error.value) == (
      f"config.data.path={path!r} has 0 labelled nodes to {side} on, but must "
      f"have {least}"
    )
  with pytest.raises(ValueError, match=r"^config.data.path='no': no is not a"):
    opened("no").load(0)


def test_default_graph_has_the_documented_bounds():
  """Compares the comment of `DEFAULT_GRAPH`, on 2,000 nodes."""
  found = opened(
    "", num_classes=8, fanouts=(10, 5), validation_nodes=2_000
  ).load(0)
  assert found.name == "communities of 65,536 nodes"
  baselines = found.baselines()
  own = baselines["a node's own features, Bayes"]["accuracy"]
  assert own == pytest.approx(0.39, abs=0.03)
  assert baselines["Bayes"]["accuracy"] == pytest.approx(0.85, abs=0.03)
  assert set(baselines) == {
    "label frequencies", "a node's own features, Bayes", "Bayes"
  }


def test_graph_without_communities_has_no_bound(tmp_path):
  graph = builders.rmat(
    tmp_path / "graph", scale=7, num_edges=500, num_features=2, num_classes=3,
    quarters=(0.5, 0.2, 0.2), signal=1.0, seed=0,
  )
  found = opened(
    str(graph.folder), num_features=2, num_classes=3, validation_nodes=5
  ).load(0)
  assert found.name == "rmat of 128 nodes"
  assert found.sha256 == graph.meta["sha256"]
  assert set(found.measures({"loss": 1.0, "accuracy": 0.5})) == {
    "loss", "accuracy"
  }
  truth, train = found.validation["label"], graph.labels[graph.nodes("train")]
  counts = np.bincount(train, minlength=3)
  baselines = found.baselines()
  assert set(baselines) == {"label frequencies"}
  assert baselines["label frequencies"]["accuracy"] == pytest.approx(
    (truth == counts.argmax()).mean()
  )


@pytest.mark.parametrize(("size", "fits"), [(None, True), (1, False)])
def test_batch_may_have_all_training_nodes(folder, size, fits):
  train = (np.load(f"{folder}/split.npy") == 0).sum()
  data = opened(folder, batch_size=int(train + (size or 0)))
  if fits:
    roots = next(data.load(0).batches)["features"].ids[:, 0]
    assert len(np.unique(roots)) == train
  else:
    with pytest.raises(ValueError, match="labelled nodes to train on"):
      data.load(0)


def test_graph_with_one_class_is_valid(folder, tmp_path):
  shutil.copytree(folder, tmp_path / "graph")
  labels = np.zeros_like(np.load(f"{folder}/labels.npy"))
  np.save(tmp_path / "graph/labels.npy", labels)
  found = opened(str(tmp_path / "graph"), num_classes=1).load(0)
  assert not next(found.batches)["label"].any()
