"""Limits of kernels: the last operands supported, and the first refused."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallel.kernels import calls, evidence, selection
from parallel.kernels.add_norm import cases as add_norm_cases
from parallel.kernels.add_norm import gpu as add_norm_gpu
from parallel.kernels.add_norm import tpu as add_norm_tpu
from parallel.kernels.codec import cases as codec_cases
from parallel.kernels.codec import gpu as codec_gpu
from parallel.kernels.codec import reference, threefry, top_k
from parallel.kernels.codec import tpu as codec_tpu
from parallel.kernels.codec.reference import Codec
from parallel.kernels.gather_rows import cases as gather_cases
from parallel.kernels.gather_rows import gpu as gather_gpu
from parallel.kernels.gather_rows import order as gather_order
from parallel.kernels.paged_attention import cases as paged_cases
from parallel.kernels.paged_attention import gpu as paged_gpu
from parallel.kernels.paged_attention import library, order
from parallel.kernels.paged_attention import tpu as paged_tpu
from parallel.kernels.paged_attention.cases import Case
from parallel.kernels.reduce_add_norm import cases as reduce_cases
from parallel.kernels.reduce_add_norm import gpu as reduce_gpu
from parallel.kernels.reduce_add_norm import tpu as reduce_tpu
from parallel.kernels.ring_all_reduce import cases as ring_cases
from parallel.kernels.ring_all_reduce import tpu as ring_tpu
from parallel.kernels.schedule_all_reduce import reference as schedule
from parallel.kernels.schedule_all_reduce import tpu as schedule_tpu

pytestmark = pytest.mark.quick

F4, F2, F8 = (jnp.dtype(x) for x in ("float32", "bfloat16", "float64"))
INT8 = jnp.dtype("int8")
DECODE = Case(2, 1, 4, 2, 128, 128, 2, dtype="bfloat16")


def _paged(refusal, name):
  """Refusal of a kernel as a function of the changes of a case."""
  def of(**changes):
    case = DECODE._replace(**changes)
    q, pages, tables, _ = case.types(name)
    return refusal(q, pages, tables, case.window)

  return of


_codec_gpu, _codec_tpu = codec_gpu.refusal, codec_tpu.refusal
_paged_gpu = _paged(paged_gpu.refusal, "heads")
_paged_tpu = _paged(paged_tpu.refusal, "packed")
_of_jax = {
  name: _paged(functools.partial(library.refusal, name), pages)
  for name, pages in (
    ("jax_tpu_ragged", "interleaved"), ("jax_tpu_paged", "packed"),
    ("jax_gpu_paged", "heads"),
  )
}
_reduce_tpu = reduce_tpu.refusal

# Function, last arguments that are supported, first ones that are not, reason.
# Arguments in dicts are keywords.
_LIMITS = [
  (_codec_gpu, (Codec("int8", 16384), 1), (Codec("int8", 16386), 1),
   "block=16386 > 16384"),
  (_codec_gpu, (Codec("int8"), 1), (Codec("int8"), 0), "no elements"),
  (_codec_gpu, (Codec("int8"), 2**21 - 1), (Codec("int8"), 2**21), "31 bits"),
  (_codec_gpu, (Codec("int8"), 2**20 - 1, 8), (Codec("int8"), 2**20, 8),
   "8 x 1048576 blocks"),
  (_codec_gpu, (Codec("e3m0"), 1), (Codec("fp8"), 1), "codec fp8"),
  (_codec_tpu, (Codec("int8", 128), 1), (Codec("int8", 192), 1),
   "a multiple of 128 for 8 bits"),
  (_codec_tpu, (Codec("e3m0", 256), 1), (Codec("e3m0", 128), 1),
   "a multiple of 256 for 4 bits"),
  (_codec_tpu, (Codec("int8"), 1), (Codec("int8"), 0), "no elements"),
  # 128 blocks of float32, four arrays, and codes, all twice, in 8 MiB.
  (_codec_tpu, (Codec("int8", 1920), 1), (Codec("int8", 2048), 1),
   "1 x 128 blocks of 2048 do not fit 8 MB"),
  (_codec_tpu, (Codec("int8"), 1, 112), (Codec("int8"), 1, 113), "113 x 128"),
  (_codec_tpu, (Codec("int4"), 1, 224), (Codec("int4"), 1, 225), "225 x 128"),
  (add_norm_gpu.refusal, (1, 32768, F4), (1, 32769, F4), "width 32769 > 32768"),
  (add_norm_gpu.refusal, (1, 8, F2), (0, 8, F2), "no rows"),
  (add_norm_gpu.refusal, (1, 8, jnp.float16), (1, 8, F8), "dtype float64"),
  # 16 rows: five arrays twice, and three in float32, in 8 MiB.
  (add_norm_tpu.refusal, (16, 2**19 // 52, F4), (16, 2**19 // 52 + 1, F4),
   "16 rows do not fit 8 MB"),
  (add_norm_tpu.refusal, (99, 2**19 // 32, F2), (99, 2**19 // 32 + 1, F2),
   "width 16385"),
  (add_norm_tpu.refusal, (1, 2**23 // 52, F4), (1, 2**23 // 52 + 1, F4), "fit"),
  (add_norm_tpu.refusal, (1, 8, F4), (0, 8, F4), "no rows"),
  (add_norm_tpu.refusal, (1, 8, F2), (1, 8, jnp.float16), "dtype"),
  (gather_gpu.refusal, (2**27 - 1, 16, F4), (2**27, 16, F4), "int32"),
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
  (reduce_gpu.refusal, (1, 1, 0, F4, 64, F4, None),
   (1, 1, 0, F4, 65, F4, None), "65 ranks > 64"),
  (reduce_gpu.refusal, (1, 1, 0, F4, 1, F4, None),
   (1, 0, 1, F4, 1, F4, None), "nothing to sum"),
  (_reduce_tpu, (1, 1, 0, F4, 1, F2, None), (0, 1, 0, F4, 1, F2, None),
   "nothing to sum"),
  (_reduce_tpu, (1, 1, 9, F4, 1, F2, None), (1, 0, 9, F4, 1, F2, None),
   "nothing to sum"),
  (_reduce_tpu, (1, 256, 0, F4, 1, INT8, 128), (1, 192, 0, F4, 1, INT8, 96),
   "96 channels per scale: a multiple of 128"),
  (_reduce_tpu, (1, 128, 0, F4, 1, INT8, 128), (1, 128, 0, F4, 1, INT8, None),
   "dtype int8"),
  (_reduce_tpu, (1, 8, 0, F2, 1, F4, None), (1, 8, 0, F8, 1, F4, None),
   "dtype float64"),
  # 16 rows of 1,024 + 1,024 channels: four arrays twice, three in float32, and
  # the partial sums twice.
  (_reduce_tpu, (16, 1024, 1024, F2, 114, F2, None),
   (16, 1024, 1024, F2, 115, F2, None), "115 x 1024 . 1024 channels"),
  (_reduce_tpu, (16, 1024, 1024, F4, 106, F2, None),
   (16, 1024, 1024, F4, 107, F2, None), "16 rows do not fit 8 MB"),
  # One row of 128 scales per rank as well.
  (_reduce_tpu, (16, 1024, 1024, F2, 152, INT8, 128),
   (16, 1024, 1024, F2, 153, INT8, 128), "153 x 1024"),
  (ring_tpu.refusal, (32, 8, 8, F4, 2), (32, 8, 8, F4, 1), "one device"),
  (ring_tpu.refusal, (64, 8, 8, F2, 2), (32, 8, 8, F2, 2), "multiple of 64"),
  (ring_tpu.refusal, (96, 8, 8, F4, 3), (64, 8, 8, F4, 3), "multiple of 48"),
  (ring_tpu.refusal, (32, 1, 1, F4, 2), (32, 0, 1, F4, 2), "no shared"),
  (ring_tpu.refusal, (32, 1, 1, F4, 2), (32, 1, 0, F4, 2), "no private"),
  (ring_tpu.refusal, (32, 1, 1, F4, 2), (32, 1, 1, F8, 2), "float64"),
  # 32 rows of K + K channels: 80 K bytes per row in 24 MiB.
  (ring_tpu.refusal, (32, 9830, 9830, F4, 2), (32, 9831, 9831, F4, 2),
   "32 rows do not fit 24 MB"),
  (schedule_tpu.refusal, (8, 1, F4, 1), (0, 1, F4, 1), "0 rows"),
  (schedule_tpu.refusal, (16, 1, F2, 1), (8, 1, F2, 1), "a multiple of 16"),
  (schedule_tpu.refusal, (24, 1, F4, 3), (32, 1, F4, 3), "a multiple of 24"),
  (schedule_tpu.refusal, (8, 1, F4, 1), (8, 1, F8, 1), "dtype float64"),
  # 8 rows of 4 (4 + 3) + 8 bytes per channel in 8 MiB.
  (schedule_tpu.refusal, (8, 2**20 // 36, F4, 1), (8, 2**20 // 36 + 1, F4, 1),
   "8 rows do not fit 8 MB"),
]


def _called(function, arguments):
  if isinstance(arguments, dict):
    return function(**arguments)
  return function(*arguments)


@pytest.mark.parametrize(
  ("refusal", "supported", "refused", "reason"), _LIMITS,
  ids=lambda x: x if isinstance(x, str) else "",
)
def test_limit_separates_supported_from_refused_operands(
  refusal, supported, refused, reason
):
  assert _called(refusal, supported) is None
  assert reason.replace(" . ", " + ") in _called(refusal, refused)


def test_random_numbers_have_limits():
  key = jax.random.key(0)
  assert threefry.refusal(key, 2**32 - 1) is None
  assert threefry.refusal(jax.random.key_data(key), 1) is None
  assert "fewer than 2^32" in threefry.refusal(key, 2**32)
  assert "threefry only" in threefry.refusal(jax.random.key(0, impl="rbg"), 1)
  with jax.threefry_partitionable(False):
    assert "partitionable is off" in threefry.refusal(key, 1)


@pytest.mark.parametrize(("rows", "devices", "dtype", "chunk"), [
  (32, 2, F4, 8), (64, 2, F4, 16), (96, 2, F4, 24), (192, 2, F2, 48),
  (4096, 4, F4, 512),
])
def test_ring_sends_the_longest_messages_that_fit(rows, devices, dtype, chunk):
  """A segment takes 2 n messages of rows; segments divide all rows."""
  assert ring_tpu.chunk_rows(rows, 8, 8, dtype, devices) == chunk
  # At most 24 MiB: four messages of c rows of 1,024 x 80 bytes.
  assert ring_tpu.chunk_rows(2**13, 1024, 1024, F4, 2) == 64
  assert schedule_tpu._chunk_rows(rows, 8, dtype, 2 * devices) == chunk
  assert schedule_tpu._chunk_rows(2**13, 1024, F4, 1) == 128


@pytest.mark.parametrize(("codec", "blocks", "rows", "warps"), [
  # 512 elements per warp, and 4,096 per program at most.
  (Codec("int8"), 1, 1, 1), (Codec("int8"), 100, 16, 8),
  (Codec("int8"), 3, 4, 2), (Codec("int4"), 100, 16, 8),
  (Codec("int8", 200), 100, 16, 8), (Codec("int8", 4096), 9, 1, 8),
  (Codec("int8", 16384), 9, 1, 32), (Codec("int8", 2), 1, 1, 1),
])
def test_programs_of_the_codec_hold_whole_blocks(codec, blocks, rows, warps):
  tile = codec_gpu._Tile(codec, blocks)
  assert tile.rows == rows
  assert tile.grid == (-(-blocks // rows),)
  assert tile.parts * tile.width == codec.block
  params = tile.params(interpret=False)
  assert params["compiler_params"].num_warps == warps
  assert params["interpret"] is False


@pytest.mark.parametrize(("widths", "warps"), [
  ([1], 1), ([512], 1), ([513], 2), ([2048, 2048], 8), ([2049, 2048], 16),
  ([32768], 32), ([32768, 1], 32),
])
def test_programs_of_the_norm_have_512_channels_per_warp(widths, warps):
  parts = calls.spans([np.zeros((1, w)) for w in widths])
  assert parts == [(0, widths[0]), (widths[0], widths[-1])][: len(widths)]
  params = add_norm_gpu.params(parts, interpret=True)
  assert params["compiler_params"].num_warps == warps
  assert params["interpret"] is True


@pytest.mark.parametrize(("rows", "arrays", "groups"), [
  (1, 4, 1), (128, 4, 1), (129, 4, 2), (300, 4, 2), (385, 4, 4),
  (10**6, 4, 4), (10**6, 1, 8),
])
def test_grid_steps_of_the_codec_have_a_power_of_two_of_groups(
  rows, arrays, groups
):
  """In 8 MiB, 256 channels: 4 arrays of 128 rows, twice, take 1.1 MB."""
  assert codec_tpu._groups(Codec("int8"), rows, 1, arrays) == groups


def test_smallest_blocks_of_the_codec():
  for name in reference.NAMES:
    assert Codec(name, 2).padded(3) == 4
    assert Codec(name, 2).num_scales(3) == 2
  assert Codec("int8").block == 256
  assert not Codec("int8").stochastic
  assert [Codec(name).bits for name in reference.NAMES] == [8, 4, 4, 8]
  with pytest.raises(ValueError, match="block=1: elements per scale must be"):
    Codec("int8", 1)


@pytest.mark.parametrize(("chunk", "k", "message"), [
  (0, 4, r"chunk=0 must lie in \[1, 65536\]"), (65537, 4, "chunk=65537"),
  (8, 0, "k=0"), (8, 6, "multiple of 4"), (8, 12, r"in \[4, chunk=8\]"),
])
def test_top_k_names_its_limits(chunk, k, message):
  with pytest.raises(ValueError, match=message):
    top_k.encode_top_k(jnp.ones(8), chunk, k)


def test_all_elements_of_a_chunk_may_be_kept():
  x = np.array([3, -3, 1, -1], np.float32)
  encode = jax.jit(lambda x: top_k.encode_top_k(x, 4, 4))
  decode = jax.jit(lambda encoded: top_k.decode_top_k(encoded, 4, 4))
  np.testing.assert_array_equal(decode(encode(x)), x)


def test_float32_halves_are_rounded_to_even_with_23_bits():
  """Equals ``reduce_precision``; ties have the last bit set."""
  bits = np.arange(0x3F800000, 0x3F800010, dtype="u4")
  x = np.concatenate([bits, bits | 1 << 31]).view("f4")
  wanted = jax.jit(lambda x: jax.lax.reduce_precision(x, 8, 22))(x)
  np.testing.assert_array_equal(jax.jit(reference.to_23_bits)(x), wanted)
  assert len({*np.asarray(wanted).tolist()}) == 16 + 2


@pytest.mark.parametrize(("width", "padded", "waste"), [
  (1, 1, 2048), (3, 4, 2048 / 3), (128, 128, 16), (129, 256, 2048 / 129),
  (2048, 2048, 1), (2049, 4096, 4096 / 2049),
])
def test_rows_are_padded_to_divisors_or_multiples_of_a_block(
  width, padded, waste
):
  assert gather_order.padded_width(width) == padded
  assert gather_order.waste(width, "tpu") == pytest.approx(waste)
  assert gather_order.waste(width, "gpu") == 1
  blocks = -(-3 * padded // 2048)
  assert gather_order.stored_shape(3, width, "tpu") == (blocks, 8, 256)
  assert gather_order.stored_shape(3, width, "gpu") == (3 * width,)
  assert gather_order.stored_shape(3, width, "reference") == (3, width)


@pytest.mark.parametrize(("n", "most", "powers", "found"), [
  (12, 12, False, 12), (12, 11, False, 6), (12, 5, False, 4),
  (12, 12, True, 4), (7, 6, False, 1), (8, 0, False, 1), (8, 8, True, 8),
])
def test_largest_divisor(n, most, powers, found):
  assert library._divisor(n, most, powers) == found


@pytest.mark.parametrize(("name", "pages", "shape", "scale"), [
  ("heads", (3, 16, 2, 64), (2, 3, 16, 64), (2, 3, 1, 16)),
  ("packed", (3, 16, 2, 64), (2, 3, 8, 128), (2, 3, 2, 8)),
  ("packed", (3, 16, 2, 96), (2, 3, 16, 96), (2, 3, 1, 16)),
  ("packed", (3, 16, 2, 256), (2, 3, 16, 256), (2, 3, 1, 16)),
  ("interleaved", (3, 16, 2, 64), (3, 16, 4, 64), (3, 16, 4)),
])
def test_pages_have_the_shapes_of_their_order(name, pages, shape, scale):
  num_pages, page_size, heads, width = pages
  for dtype in ("bfloat16", "int8"):
    found = order.shapes(name, *pages, dtype)
    assert {x.shape for x in found.data} == {shape}
    assert len(found.data) == (1 if name == "interleaved" else 2)
    assert {x.shape for x in found.scales} == ({scale} & {
      scale if dtype == "int8" else None
    })
    assert found.coded == (dtype == "int8")
    assert (found.num_pages, found.page_size) == (num_pages, page_size)
    assert (found.num_kv_heads, found.head_width) == (heads, width)


@pytest.mark.parametrize("width", [1, 2, 97, 98, 400])
def test_programs_of_a_gather_have_a_warp_per_line(width):
  """The lanes of a row with its offset in a line, at most four warps."""
  jaxpr = str(jax.make_jaxpr(
    functools.partial(gather_gpu.gather, width=width)
  )(jnp.zeros(4 * width), jnp.arange(3)))
  lanes = 1 << (width + 31 - 1).bit_length()
  assert f"num_warps={min(4, lanes // 32)}" in jaxpr


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
    assert ("odd" in name) == bool(
      not case.codec.stochastic and case.shape[-1] % case.codec.block
      and case.senders != 4
    )
    count = re.search(r"(\d+) rows", name)
    assert not count or int(count[1]) == math.prod(case.shape[:-1])
  for name, case in codec_cases.LARGE.items():
    elements = 8192**2 if name.startswith("8192") else 2048**2
    assert math.prod(case.shape) == elements
    assert case.senders == 2
  for name, case in ring_cases.CASES.items():
    count = {"two": 2, "four": 4, "eight": 8}[name.split()[0]]
    assert case.devices == count
    segments = case.rows // (2 * count * (case.chunk or case.rows))
    if "segments" in name:
      assert segments == (3 if "three" in name else 2)


@pytest.mark.parametrize(("case", "forward", "backward"), [
  # float32: 4 and 4 elements per channel; the gain, and its cotangent.
  (add_norm_cases.Case(2, 3, 5), 4 * 4 * 16 + 32, 4 * 4 * 16 + 64),
  (add_norm_cases.Case(2, 3, 5, private_scale=2.0), 288, 320 + 4 * 2 * 5),
  (add_norm_cases.Case(2, 3, 5, "bfloat16"), 2 * 64 + 32, 2 * 64 + 64),
  (add_norm_cases.Case(2, 3, 5, update=False), 2 * 4 * 16 + 32, 320),
  (add_norm_cases.Case(2, 3, 5, private_scale=2.0, update=False), 160, 320),
])
def test_minimum_bytes_of_a_norm(case, forward, backward):
  assert case.forward_bytes == forward
  assert case.backward_bytes == backward


@pytest.mark.parametrize(("case", "forward"), [
  # Per row: three arrays, the private update, and the partial sums.
  (reduce_cases.Case(2, 4, 6, 3), 2 * (2 * 36 + 3 * 2 * 4) + 40),
  (reduce_cases.Case(2, 4, 6, 3, "float32"), 2 * (4 * 36 + 3 * 4 * 4) + 40),
  (reduce_cases.Case(2, 4, 6, 3, block=2), 2 * (2 * 36 + 3 * (4 + 8)) + 40),
])
def test_minimum_bytes_of_a_sum_and_norm(case, forward):
  assert case.forward_bytes == forward
  assert case.private_scale**2 == pytest.approx(8)


def test_nearest_measured_share_decides_between_kernel_and_reference(
  monkeypatch
):
  """p = 1 has other operands, so it is never near another p."""
  monkeypatch.setitem(
    evidence.STEP_WITH_KERNEL, ("chip", "op"),
    {1.0: 1.2, 0.5: 0.9, 0.125: 1.1, 0.25: 1.0},
  )
  for p, found in (
    (1.0, False), (0.99, True), (0.5, True), (0.4, True), (0.35, False),
    (0.25, False), (0.1, False),
  ):
    assert evidence.helps("chip", "op", p) == found
  monkeypatch.setitem(evidence.STEP_WITH_KERNEL, ("chip", "op"), {0.5: 1.2})
  assert evidence.helps("chip", "op", 1.0)
  assert not evidence.helps("chip", "op", 0.1)
  assert evidence.helps("other chip", "op", 0.5)
  assert evidence.helps("chip", "other op", 0.5)


def test_preferences_expand_to_names():
  kernels = {"tpu": ("a", "b"), "gpu": ("c",)}
  expand = functools.partial(selection.preference, kernels=kernels)
  assert expand("auto", "tpu") == ("a", "b", "reference")
  assert expand("auto", "rocm") == ("reference",)
  assert expand("auto") == ("reference",)  # on CPUs
  assert expand("c_interpret") == ("c_interpret",)
  assert expand(["b", "reference"]) == ("b", "reference")
  every = ("a", "b", "c", "a_interpret", "b_interpret", "c_interpret")
  assert expand([*every, "reference"]) == (*every, "reference")
  for wrong in ([], "d", ["a", "d"], "reference_interpret"):
    with pytest.raises(ValueError, match="one or more of a, b, c, a_interpret"):
      expand(wrong)


def test_choice_names_every_refused_kernel():
  kernels = {"tpu": ("a", "b"), "gpu": ("c",)}
  reasons = {"a": "too wide", "b": None, "c": "no rows"}

  def choose(*names):
    return selection.choose("op", names, reasons.get, kernels)

  found = choose("a_interpret", "b_interpret", "reference")
  assert found == ("b_interpret", {"a_interpret": "too wide"})
  assert (found.kind, found.interpret) == ("b", True)
  found = choose("c", "reference", "b")
  assert found == ("reference", {"c": "no rows"})
  assert (found.kind, found.interpret) == ("reference", False)
  with pytest.raises(
    ValueError, match=r"op: no implementation is left \(a: too wide; c: no row"
  ):
    choose("a", "c")


def test_rows_and_their_shapes():
  x, y, z = jnp.ones((2, 3, 4)), jnp.ones((2, 3, 0)), jnp.ones((2, 3, 1))
  assert calls.leading(x) == 6
  rows = calls.as_rows(x, z)
  assert [r.shape for r in rows] == [(6, 4), (6, 1)]
  back = calls.as_arrays(rows, (x, y, z))
  assert [r.shape for r in back] == [x.shape, y.shape, z.shape]
  sends = calls.Sends("data", 3, 5, jnp.bfloat16)
  assert sends.metadata == {
    "sends_over": "data", "messages": "3", "elements": "5", "dtype": "bfloat16"
  }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scaled_value_is_rounded_as_a_product_of_its_dtype(dtype):
  x = jnp.asarray(np.random.default_rng(0).normal(size=50), dtype)
  scale = float(np.asarray(3**0.5, dtype))
  found = calls.scaled(x.astype("float32"), scale, dtype)
  assert found.dtype == "float32"
  wanted = x * jnp.asarray(scale, dtype)
  np.testing.assert_array_equal(found, wanted.astype("float32"))
  assert calls.scaled(found, 1.0, dtype) is found


@pytest.mark.parametrize("table", [
  np.zeros((2, 3), np.int32), np.zeros((1, 2, 5), np.int32),
  np.zeros((1, 2, 4), np.int64),
])
def test_arrays_that_are_no_tables_are_refused(table):
  with pytest.raises(ValueError, match=r"must be int32 \[rounds, devices, 4\]"):
    schedule.senders(table)
