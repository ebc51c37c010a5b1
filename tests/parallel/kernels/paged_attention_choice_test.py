"""Choice of a kernel of attention and of an order of pages, with limits."""

import functools

import jax.numpy as jnp
import pytest

from parallel.kernels import selection
from parallel.kernels.paged_attention import api, cpu, gpu, library, order, tpu
from parallel.kernels.paged_attention.cases import LARGE, AttentionCase
from tests.parallel.kernels.limits import assert_limit, limits

DECODE = AttentionCase(2, 1, 4, 2, 128, 128, 2, dtype="bfloat16")


def _paged(refusal, name):
  """Refusal of a kernel as a function of the changes of a case."""
  def of(**changes):
    case = DECODE._replace(**changes)
    q, pages, tables, _ = case.types(name)
    return refusal(q, pages, tables, case.window)

  return of


_paged_gpu = _paged(gpu.refusal, "heads")
_paged_tpu = _paged(tpu.refusal, "packed")
_paged_cpu = _paged(cpu.refusal, "heads")
_of_jax = {
  name: _paged(functools.partial(library.refusal, name), pages)
  for name, pages in (
    ("jax_tpu_ragged", "interleaved"), ("jax_tpu_paged", "packed"),
    ("jax_gpu_paged", "heads"),
  )
}


@pytest.mark.quick
@limits([
  (_paged_cpu, {"stored": "int8"}, {}, "pages of bfloat16: float32 or int8"),
  (_paged_cpu, {"stored": "float32"}, {"stored": "float32", "rows": 2},
   "2 rows per sequence"),
  (_paged_gpu, {"width": 16}, {"width": 15}, "heads of 15 channels: 16 to 256"),
  (_paged_gpu, {"width": 256}, {"width": 257}, "heads of 257 channels"),
  (_paged_gpu, {"dtype": "float16"}, {"dtype": "int32"}, "dtype int32"),
  (_paged_gpu, {"stored": "int8"}, {"stored": "float32"},
   "pages of float32, queries of bfloat16"),
  (_paged_gpu, {"stored": "int8", "layers": 10922},
   {"stored": "int8", "layers": 10923}, "2 to 4 GiB"),
  (_paged_gpu, {"stored": "int8", "layers": 21846},
   {"stored": "int8", "layers": 21845}, "2 to 4 GiB"),
  (_paged_tpu, {"page_size": 8}, {"page_size": 12}, "a multiple of 8, so"),
  (_paged_tpu, {"page_size": 16, "width": 64}, {"page_size": 8, "width": 64},
   "page_size 8: a multiple of 16"),
  (_paged_tpu, {"stored": "int8"}, {"stored": "int8", "page_size": 64},
   "a multiple of 128, so that pages of int8"),
  (_paged_tpu, {"width": 256}, {"width": 96}, "heads of 96 channels"),
  (_paged_tpu, {}, {"stored": "float32"}, "pages of float32"),
  (_paged_tpu, {"dtype": "float32"}, {"dtype": "float16"}, "dtype float16"),
  # 4 bytes for each page and two positions per sequence, in 768 KiB.
  (_paged_tpu, {"seqs": 1024, "pages": 190}, {"seqs": 1024, "pages": 191},
   "1024 x 191 pages exceed 768 KB"),
  (_of_jax["jax_gpu_paged"], {"width": 16}, {"width": 8}, "heads of 8"),
  (_of_jax["jax_gpu_paged"], {"width": 32}, {"width": 48}, "powers of two"),
  (_of_jax["jax_gpu_paged"], {"page_size": 16}, {"page_size": 8},
   "page_size 8: powers of two from 16"),
  (_of_jax["jax_gpu_paged"], {"page_size": 32}, {"page_size": 24},
   "page_size 24"),
  (_of_jax["jax_gpu_paged"], {"dtype": "float16"}, {"dtype": "int32"}, "dtype"),
  (_of_jax["jax_gpu_paged"], {"stored": "int8"}, {"stored": "float32"},
   "one dtype, or int8"),
  (_of_jax["jax_gpu_paged"], {"rows": 1}, {"rows": 2}, "2 new tokens"),
  (_of_jax["jax_tpu_paged"], {"width": 256}, {"width": 192}, "multiples of"),
  (_of_jax["jax_tpu_paged"], {"window": 0}, {"window": 1}, "window 1"),
  (_of_jax["jax_tpu_paged"], {}, {"dtype": "float32"}, "bfloat16 only"),
  (_of_jax["jax_tpu_paged"], {}, {"stored": "int8"}, "int8 pages"),
  (_of_jax["jax_tpu_ragged"], {"width": 128}, {"width": 64}, "multiples of"),
  (_of_jax["jax_tpu_ragged"], {"dtype": "float32"}, {"stored": "float32"},
   "float32 or bfloat16, both"),
  (_of_jax["jax_tpu_ragged"], {}, {"stored": "int8"}, "only one scale"),
  # Keys and values of a token: 1, 2, 4 or a multiple of 8 words per lane.
  *(
    (_of_jax["jax_tpu_ragged"], {"kv_heads": some, "heads": some},
     {"kv_heads": other, "heads": other}, f"{other} kv heads")
    for some, other in ((1, 3), (2, 5), (4, 6), (8, 7), (16, 12))
  ),
  (_of_jax["jax_tpu_ragged"], {"kv_heads": 2, "dtype": "float32"},
   {"kv_heads": 3, "heads": 3, "dtype": "float32"}, "tiles of float32"),
])
def test_limit_separates_supported_from_refused_operands(
  refusal, supported, refused, reason
):
  assert_limit(refusal, supported, refused, reason)


def chosen(case, name, platform, **options):
  names = selection.preference("auto", platform, api.KERNELS)
  return api.select_kernel(
    *case.types(name)[:3], window=case.window, implementation=names, **options
  )


@pytest.mark.parametrize(
  ("platform", "name", "changes", "expected"),
  [
    ("tpu", "interleaved", {}, "jax_tpu_ragged"),
    ("tpu", "interleaved", {"rows": 8, "window": 9}, "jax_tpu_ragged"),
    ("tpu", "interleaved", {"kv_heads": 5, "heads": 5}, "reference"),
    ("tpu", "packed", {}, "jax_tpu_paged"),
    ("tpu", "packed", {"rows": 8}, "tpu"),
    ("tpu", "packed", {"window": 9}, "tpu"),
    ("tpu", "packed", {"width": 64}, "tpu"),
    ("tpu", "packed", {"stored": "int8"}, "tpu"),
    ("tpu", "packed", {"width": 96}, "reference"),
    ("gpu", "heads", {}, "jax_gpu_paged"),
    ("gpu", "heads", {"rows": 8}, "gpu"),
    ("gpu", "heads", {"window": 9}, "gpu"),
    ("gpu", "heads", {"width": 96}, "gpu"),
    ("gpu", "packed", {"width": 64}, "reference"),
    ("cpu", "heads", {}, "reference"),
  ],
)
def test_first_kernel_that_supports_the_operands_is_chosen(
  platform, name, changes, expected
):
  """Kernels of jax require pages that are declared finite."""
  case = LARGE["7B, decode"]._replace(**changes)
  choice = chosen(case, name, platform, finite=True)
  assert choice.name == expected
  before = api.KERNELS.get(platform, ())
  if expected in before:
    before = before[: before.index(expected)]
  assert list(choice.refused) == list(before)
  assert all(choice.refused.values())
  assert not chosen(case, name, platform).name.startswith("jax")


def test_refusals_name_a_supported_alternative():
  case = LARGE["7B, decode"]
  refused = chosen(case._replace(rows=8), "heads", "tpu", finite=True).refused
  assert refused["jax_tpu_ragged"] == (
    "pages in the order 'heads': reads 'interleaved' only"
  )
  assert "not declared finite" in chosen(case, "heads", "gpu").refused[
    "jax_gpu_paged"
  ]
  with pytest.raises(ValueError, match="page_size 64: a multiple of 128, so"):
    api.select_kernel(
      *case._replace(stored="int8", page_size=64).types("packed")[:3],
      implementation="tpu",
    )
  with pytest.raises(ValueError, match=r"'mosaic' must be 'auto' or .*_ragged"):
    api.select_kernel(*case.types("heads")[:3], implementation="mosaic")
  with pytest.raises(ValueError, match="order 'rows' must be one of heads"):
    order.shapes("rows", 1, 16, 1, 64, "float32")
  with pytest.raises(ValueError, match=r"page_size=3 must be a multiple of 2"):
    order.shapes("packed", 1, 3, 1, 64, "float32")


@pytest.mark.parametrize(
  ("platform", "changes", "expected"),
  [
    ("cpu", {}, "heads"),
    ("gpu", {}, "heads"),
    ("tpu", {}, "interleaved"),
    ("tpu", {"finite": False}, "packed"),
    ("tpu", {"mapped": True}, "packed"),
    ("tpu", {"head_width": 64}, "packed"),
    ("tpu", {"num_kv_heads": 5, "num_heads": 5}, "packed"),
    ("tpu", {"stored": "int8"}, "packed"),
    ("tpu", {"head_width": 64, "page_size": 3}, "heads"),
  ],
)
def test_page_order_suits_the_platform_kernels(platform, changes, expected):
  options = {
    "num_heads": 8, "num_kv_heads": 2, "head_width": 128, "page_size": 128,
    "dtype": jnp.bfloat16, "stored": jnp.bfloat16, "finite": True,
  } | changes
  mapped = options.pop("mapped", False)
  names = api.preferred_kernels(platform, mapped)
  assert api.best_order(names, **options) == expected


def test_all_jax_kernels_are_known():
  compiled = [name for names in api.KERNELS.values() for name in names]
  assert {n for n in compiled if n.startswith("jax")} == set(library.NAMES)
  assert set(compiled) == set(api.ORDERS)


@pytest.mark.quick
@pytest.mark.parametrize(("n", "most", "powers", "found"), [
  (12, 12, False, 12), (12, 11, False, 6), (12, 5, False, 4),
  (12, 12, True, 4), (7, 6, False, 1), (8, 0, False, 1), (8, 8, True, 8),
])
def test_largest_divisor(n, most, powers, found):
  assert library._largest_divisor(n, most, powers) == found
