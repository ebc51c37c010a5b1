"""Checkpoints and examples of layouts, compared with those of one device."""

from collections.abc import Callable, Mapping, Sequence
import itertools
import pathlib
from typing import Any

import jax
import numpy as np

from parallel.ledger.equal.programs import format_layout

Layout = Mapping[str, int]


def assert_restores_equal(
  save: Callable[[Layout, pathlib.Path], Any],
  restore: Callable[[Layout, pathlib.Path], Any],
  layouts: Sequence[Layout], folder: pathlib.Path,
) -> None:
  """Asserts that a state that one layout saves is restored on all others.

  Args:
    save: Function of a layout and an empty folder that saves a state of this
      layout and returns it, as a tree of arrays of global shape.
    restore: Function of a layout and a folder that returns the restored state.
    layouts: Layouts; one device, {}, is added to them.
    folder: Folder for checkpoints.

  Raises:
    AssertionError: An array differs in one bit; its path, the layouts, and how
      many elements differ.
  """
  every = [{}, *layouts]
  for number, (source, target) in enumerate(itertools.product(every, every)):
    place = folder / str(number)
    place.mkdir(parents=True)
    saved = save(source, place)
    restored = restore(target, place)
    names = f"{format_layout(source)} to {format_layout(target)}"
    assert jax.tree.structure(saved) == jax.tree.structure(restored), (
      f"{names}: the restored state has another structure"
    )
    for (path, a), b in zip(
      jax.tree.leaves_with_path(saved), jax.tree.leaves(restored), strict=True
    ):
      where = f"{names}: {jax.tree_util.keystr(path)}"
      a, b = np.asarray(a), np.asarray(b)
      assert (a.shape, a.dtype) == (b.shape, b.dtype), (
        f"{where} is {b.dtype}{list(b.shape)} instead of "
        f"{a.dtype}{list(a.shape)}"
      )
      wrong = np.count_nonzero(_bits(a) != _bits(b))
      assert not wrong, f"{where} differs in {wrong:,} of {a.size:,} elements"


def assert_examples_equal(
  examples: Callable[[Layout, int], Any], layouts: Sequence[Layout],
  steps: int = 2,
) -> None:
  """Asserts that all layouts train on the same examples in the same steps.

  Args:
    examples: Function of a layout and the number of a step that returns its
      global batch, a tree of ``[batch, ...]``.
    layouts: Layouts to compare with one device.
    steps: Number of steps.

  Raises:
    AssertionError: A batch differs; whether only the order of its rows does.
  """
  for step in range(steps):
    expected = jax.tree.leaves(examples({}, step))
    for layout in layouts:
      found = jax.tree.leaves(examples(layout, step))
      for a, b in zip(expected, found, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        where = f"{format_layout(layout)}: step {step}"
        same = sorted(map(bytes, map(np.ascontiguousarray, a))) == sorted(
          map(bytes, map(np.ascontiguousarray, b))
        )
        assert same, f"{where} has other examples than one device"
        assert np.array_equal(a, b), (
          f"{where} has the examples of one device in another order"
        )


def _bits(x: np.ndarray) -> np.ndarray:
  """Returns an array as unsigned integers, which compare NaN and -0, too."""
  return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")
