"""Checkpoints and batches of layouts are compared bit by bit."""

import numpy as np
import pytest

from parallel.ledger.equal.stored import (
  assert_examples_equal,
  assert_restores_equal,
)

LAYOUTS = [{"data": 2}, {"data": 4}]


def size(layout):
  return layout.get("data", 1)


def save(layout, folder):
  """Saves a state whose shards are the rows of each rank."""
  state = {"w": np.arange(8.0), "nan": np.array([np.nan, -0.0], "float32")}
  parts = np.split(state["w"], size(layout))
  np.savez(folder / "state.npz", *parts, nan=state["nan"])
  return state


def restore(layout, folder, lose=0):
  with np.load(folder / "state.npz") as found:
    parts = [found[f"arr_{i}"] for i in range(len(found.files) - 1)]
    parts = parts[: len(parts) - (lose if size(layout) == 4 else 0)]
    w = np.concatenate([*parts, np.zeros(8)])[:8]
    return {"w": w, "nan": found["nan"]}


def test_states_are_restored_on_all_layouts(tmp_path):
  assert_restores_equal(save, restore, LAYOUTS, tmp_path / "right")

  def losing(layout, folder):
    return restore(layout, folder, lose=1)

  message = r"one device to data:4: \['w'\] differs in 7 of 8 elements"
  with pytest.raises(AssertionError, match=message):
    assert_restores_equal(save, losing, LAYOUTS, tmp_path / "wrong")
  with pytest.raises(AssertionError, match="another structure"):
    assert_restores_equal(
      save, lambda *args: {"w": restore(*args)["w"]}, [], tmp_path / "less"
    )
  with pytest.raises(AssertionError, match=r"'w'\] is float32\[8\] instead"):
    assert_restores_equal(save, lambda *args: {
      k: x.astype("float32") for k, x in restore(*args).items()
    }, [], tmp_path / "narrow")


def test_batches_of_layouts_have_the_same_examples():
  rows = np.arange(32).reshape(2, 8, 2)
  assert_examples_equal(lambda layout, step: rows[step], LAYOUTS)
  with pytest.raises(AssertionError, match=r"data:2: step 1 has .* order"):
    assert_examples_equal(
      lambda layout, step: rows[step][:: -1 if step and layout else 1], LAYOUTS
    )
  with pytest.raises(AssertionError, match="data:4: step 0 has other"):
    assert_examples_equal(
      lambda layout, step: rows[step] + (size(layout) == 4), LAYOUTS
    )
