"""Routers: features, choice of an expert, files."""

import numpy as np
import pytest

from caatnet.serving.experts import Entry
from caatnet.serving.router import FILE, MAX_PROMPT_BYTES, Router, features


def entry(name, kind, origin="fine-tuned"):
  return Entry(
    name=name, file=f"{name}.safetensors", sha256="0" * 64, kind=kind,
    description="", origin=origin,
  )


@pytest.fixture
def router():
  """Router whose most probable kinds are c, b, a for any prompt."""
  return Router(
    ("a", "b", "c"), np.zeros((8, 3), np.float32),
    np.arange(3, dtype=np.float32),
  )


def test_features_have_norm_one_and_depend_on_order():
  x, y = features(b"abcd", 64), features(b"dcba", 64)
  assert x.dtype == np.float32
  np.testing.assert_allclose([np.linalg.norm(x), np.linalg.norm(y)], 1, 1e-5)
  assert (x != y).any()
  assert not features(b"", 64).any()
  tail = bytes(range(256)) * (MAX_PROMPT_BYTES // 256)
  np.testing.assert_array_equal(features(b"x" + tail, 64), features(tail, 64))


def test_route_is_the_first_expert_of_the_most_probable_kind(router):
  """Fine-tuned experts of a kind come before others."""
  entries = [
    entry("base", "", "base"), entry("b0", "b", "seed"), entry("b1", "b"),
    entry("b2", "b"), entry("a1", "a"),
  ]
  assert router.route(b"x", entries) == "b1"
  assert router.route(b"", [*entries, entry("c1", "c", "seed")]) == "c1"
  assert router.route(b"x", entries[:2]) == "b0"
  with pytest.raises(ValueError, match="no expert has one of the kinds a, b"):
    router.route(b"x", entries[:1])


def test_router_is_read_with_equal_bits(router, tmp_path):
  router.write(tmp_path)
  found = Router.read(tmp_path)
  assert found.kinds == router.kinds
  assert found.weights.tobytes() == router.weights.tobytes()
  assert found.bias.tobytes() == router.bias.tobytes()
  assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_damaged_router_is_refused(router, tmp_path):
  with pytest.raises(ValueError, match="cannot be read"):
    Router.read(tmp_path)
  Router(("a", "b"), router.weights, router.bias).write(tmp_path)
  with pytest.raises(ValueError, match="is damaged"):
    Router.read(tmp_path)
  router.write(tmp_path)
  content = bytearray((tmp_path / FILE).read_bytes())
  content[-1] ^= 1  # of a number
  (tmp_path / FILE).write_bytes(content)
  with pytest.raises(ValueError, match="is damaged: the checksum differs"):
    Router.read(tmp_path)


def test_features_count_all_runs_of_up_to_four_bytes():
  """The length is a part of the hash: a zero byte is not a pair of them."""
  found = features(b"abcd", 2**20)
  assert np.count_nonzero(found) == 4 + 3 + 2 + 1
  assert np.ptp(found[found > 0]) == 0
  # Counts of "a" and "aa": 3 and 2; log(1 + count), of norm 1.
  counts = np.array([3, 2, 1])
  found = np.sort(features(b"aaa", 2**20))[-3:][::-1]
  np.testing.assert_allclose(
    found, np.log1p(counts) / np.linalg.norm(np.log1p(counts)), rtol=1e-5
  )
  assert np.count_nonzero(features(b"\0\0", 2**20)) == 2


def test_most_probable_kind_and_size_of_a_router(router):
  assert (router.kind(b"x"), router.num_params) == ("c", 8 * 3 + 3)
