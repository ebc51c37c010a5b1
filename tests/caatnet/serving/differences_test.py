"""Experts as differences from a base: errors, sizes, storage."""

import jax
import numpy as np
import pytest

from caatnet.serving import differences
from caatnet.serving.experts import Library
from parallel.kernels.codec import reference as codec

RANK = 2


def trees(seed):
  generator = np.random.default_rng(seed)
  base = {
    "blocks": {"w": generator.standard_normal((2, 1, 12, 160), np.float32)},
    "table": generator.standard_normal((1, 9, 7), np.float32),
    "norm": generator.standard_normal((2, 12), np.float32),
  }
  params = jax.tree.map(
    lambda x: x + generator.standard_normal(x.shape, np.float32) / 8, base
  )
  return params, base


def restored(params, base, form, folder):
  """Stores parameters in a library, and reconstructs them on the device."""
  library = Library.create(folder)
  library.add("base", base)
  stored = differences.encode(params, base, form, RANK)
  library.add("e", stored, form=form, base="base")
  assert library.form("e") == form
  restore = jax.jit(differences.restore, static_argnames="form")
  return restore(base, library.read("e")[1](), form=form), stored


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_error_of_codes_is_bounded_by_their_spacing(tmp_path, form, seed):
  params, base = trees(seed)
  found, stored = restored(params, base, form, tmp_path)
  delta = params["blocks"]["w"] - base["blocks"]["w"]
  error = np.abs(found["blocks"]["w"] - params["blocks"]["w"])
  # Blocks of 128 elements of a row; the last one has 32.
  for columns in (slice(128), slice(128, None)):
    largest = np.abs(delta[..., columns]).max(axis=-1, keepdims=True)
    bound = codec.max_error(codec.Codec(form)) * largest + 1e-6
    assert (error[..., columns] <= bound).all()
  assert error.max() > 0
  np.testing.assert_allclose(found["norm"], params["norm"], rtol=1e-6)
  whole = sum(x.nbytes for x in jax.tree.leaves(params))
  assert differences.size_bytes(stored) < whole / 2


@pytest.mark.parametrize("seed", [0, 1])
def test_error_of_factors_is_that_of_the_dropped_singular_values(
  tmp_path, seed
):
  params, base = trees(seed)
  found, _ = restored(params, base, "low_rank", tmp_path)
  for path in (("blocks", "w"), ("table",)):
    x, y, z = params, base, found
    for key in path:
      x, y, z = x[key], y[key], z[key]
    dropped = np.linalg.svd(x - y, compute_uv=False)[..., RANK:]
    np.testing.assert_allclose(
      np.linalg.norm(z - x, axis=(-2, -1)),
      np.linalg.norm(dropped, axis=-1), rtol=1e-4,
    )


def test_difference_of_low_rank_is_exact(tmp_path):
  params, base = trees(0)
  generator = np.random.default_rng(0)
  left = generator.standard_normal((2, 1, 12, RANK), np.float32)
  right = generator.standard_normal((2, 1, RANK, 160), np.float32)
  params["blocks"]["w"] = base["blocks"]["w"] + left @ right
  found, stored = restored(params, base, "low_rank", tmp_path)
  assert stored["blocks"]["w:left"].shape == left.shape
  np.testing.assert_allclose(
    found["blocks"]["w"], params["blocks"]["w"], atol=1e-4
  )


def test_whole_parameters_are_unchanged(tmp_path):
  params, base = trees(0)
  found, _ = restored(params, base, "whole", tmp_path)
  jax.tree.map(np.testing.assert_array_equal, found, params)


@pytest.mark.parametrize("change", [
  lambda blocks: blocks.update({"w:left": blocks["w:left"][..., :1]}),
  lambda blocks: blocks.pop("w:right"),
  lambda blocks: blocks.pop("w:left"),
])
def test_incomplete_difference_is_refused(tmp_path, change):
  params, base = trees(0)
  library = Library.create(tmp_path)
  library.add("base", base)
  stored = differences.encode(params, base, "low_rank", RANK)
  change(stored["blocks"])
  with pytest.raises(ValueError, match="'blocks/w' is missing or damaged"):
    library.add("e", stored, form="low_rank", base="base")
