"""Named cases have the sizes and properties that their names state."""

import math
import re

import pytest

from parallel.kernels.add_norm import cases as add_norm_cases
from parallel.kernels.codec import cases as codec_cases
from parallel.kernels.gather_rows import cases as gather_cases
from parallel.kernels.paged_attention import cases as paged_cases
from parallel.kernels.reduce_add_norm import cases as reduce_cases
from parallel.kernels.ring_all_reduce import cases as ring_cases

pytestmark = pytest.mark.quick


def _share(name):
  """Shared channels by the name of a case: "7B, p=.5" -> 0.5."""
  return float(re.search(r"p=([\d.]+)", name)[1])


@pytest.mark.parametrize(("module", "width"), [
  (add_norm_cases, 4096), (reduce_cases, 4096), (ring_cases, 4096),
], ids=lambda x: getattr(x, "__name__", None))
def test_large_cases_are_of_a_7b_model_with_eight_ranks(module, width):
  large = {k: v for k, v in module.LARGE.items() if k.startswith("7B")}
  assert len(large) >= 2
  for name, case in large.items():
    assert (case.rows, case.shared + case.private) == (8192, width)
    assert case.shared == _share(name) * width
    full = _share(name) == 1 or not getattr(case, "update", True)
    assert case.private_scale**2 == pytest.approx(1 if full else 8)
    assert case.dtype == ("float32" if "float32" in name else "bfloat16")


def test_scale_of_the_square_case_is_that_of_eight_ranks():
  case = add_norm_cases.LARGE["8192 x 8192"]
  assert (case.rows, case.shared + case.private) == (8192, 8192)
  assert case.private_scale**2 == pytest.approx(8)


def test_large_pages_are_one_of_eight_ranks_of_7b_and_70b_models():
  for name, case in paged_cases.LARGE.items():
    heads = {"7B": (32, 32), "70B": (64, 8)}.get(name.partition(",")[0])
    if heads:
      assert (8 * case.heads, 8 * case.kv_heads) == heads
      assert case.width == 128
    assert ("chunk" in name) == (case.rows == 256)
    assert ("decode" in name) == (case.rows == 1)
    assert ("window" in name) == bool(case.window)
    # 32 or 4 sequences of 2,048 positions; four layers.
    assert case.pages * case.page_size == 2048
    assert case.seqs * case.rows in (32, 1024)
    assert case.num_pages == 4 * (16 * case.seqs + 2)
    assert case.types("heads")[0].shape == (
      case.seqs, case.rows, case.heads, case.width
    )


def test_large_tables_have_the_features_of_published_graphs():
  large = gather_cases.LARGE
  assert {name: case.width for name, case in large.items()} == {
    "products": 100, "papers100M": 128, "reddit": 602,
  }
  for case in large.values():
    assert 2**15 == case.ids < case.rows


def test_cases_have_the_properties_of_their_names():
  rows = gather_cases.CASES
  assert rows["a line"].width * 4 == 128  # bytes
  assert 2048 % rows["no divisor of a block"].width
  assert rows["one feature"].width == 1
  assert 2048 < rows["two blocks"].width <= 4096
  for name, case in codec_cases.CASES.items():
    assert name.startswith(case.codec.name)
    assert ("stochastic" in name) == case.codec.stochastic
    assert ("bf16" in name) == (case.dtype == "bfloat16")
    assert ("odd" in name) == bool(case.shape[-1] % case.codec.block)
    count = re.search(r"(\d+) rows", name)
    assert not count or int(count[1]) == math.prod(case.shape[:-1])
  for name, case in codec_cases.LARGE.items():
    elements = 8192**2 if name.startswith("8192") else 2048**2
    assert math.prod(case.shape) == elements
    assert case.senders == 2
  for name, case in ring_cases.CASES.items():
    count = {"two": 2, "four": 4}[name.split()[0]]
    assert case.devices == count
    if "three segments" in name:
      assert case.rows == 3 * 2 * count * case.chunk
