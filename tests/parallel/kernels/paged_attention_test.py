"""Paged attention: reference and kernels compared with dense attention."""

import dataclasses
import functools

import jax
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as ragged
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
  kernel as ragged_kernel,
)
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.axes import Axis, make_mesh
from parallel.kernels import selection
from parallel.kernels.codec.reference import Codec, max_error
from parallel.kernels.paged_attention import api, library, order, tpu
from parallel.kernels.paged_attention.cases import CASES, LARGE, Case
from tests.parallel.kernels.compare import assert_close
from tests.parallel.kernels.races import races_found


def blank(types, value=np.nan):
  """Returns empty pages; codes cannot be NaN, so their scales are."""

  def fill(x):
    return jnp.full(x.shape, 0 if x.dtype == jnp.int8 else value, x.dtype)

  return jax.tree.map(fill, types)


def draw(case, name, seed=0, fill=np.nan, padding=(), dead=0):
  """Draws sequences, their pages in random order, and other slots of ``fill``.

  Args:
    case: The shapes.
    name: The order of the pages.
    seed: Seed of the random numbers.
    fill: Value of slots without a token.
    padding: Sequences that are padding.
    dead: Rows at the end of each sequence that are padding.

  Returns:
    q, pages, tables and first; and dense keys and values, ``[S, C, K, D]``.
  """
  rng = np.random.default_rng(seed)
  q, pages, *_ = case.types(name)
  page, positions = case.page_size, case.pages * case.page_size
  own = rng.permutation(case.num_pages)[: case.seqs * case.pages]
  tables = own.reshape(case.seqs, case.pages)
  # The last sequence fills its pages.
  first = rng.integers(0, positions - case.rows + 1, case.seqs)
  first[-1] = positions - case.rows
  first[list(padding)] = -1
  q, keys, values = (
    jnp.asarray(rng.normal(size=shape), case.dtype)
    for shape in (
      q.shape, *[(case.seqs, positions, case.kv_heads, case.width)] * 2
    )
  )
  place = np.arange(positions)
  slots = tables[:, place // page] * page + place % page  # [S, C]
  ends = np.where(first < 0, 0, first + case.rows - dead)
  slots = np.where(place < ends[:, None], slots, -1)
  flat = (-1, case.kv_heads, case.width)
  pages = WRITE(
    blank(pages, fill), keys.reshape(flat), values.reshape(flat),
    jnp.asarray(slots.ravel(), "i4"),
  )
  # Table entries past the last page are arbitrary.
  past = np.arange(case.pages) * page >= ends[:, None]
  tables = np.where(past, rng.choice([-7, 10**6], past.shape), tables)
  return (
    q, pages, jnp.asarray(tables, "i4"), jnp.asarray(first, "i4"),
    (keys, values),
  )


WRITE = jax.jit(order.write)
WITH_RACES = jax.jit(
  functools.partial(tpu.paged_attention, interpret=True, detect_races=True),
  static_argnames="window",
)


@functools.partial(jax.jit, static_argnums=(4, 5))
def run(q, pages, tables, first, window, implementation, lengths=None):
  return api.paged_attention(
    q, pages, tables, first, lengths, window=window,
    implementation=implementation,
  )


@pytest.mark.parametrize(
  ("name", "window"), [*((name, 5) for name in order.NAMES), ("heads", 0)]
)
def test_reference_equals_dense_attention(name, window):
  """Covers shuffled pages, grouped heads, and NaN in unattended slots."""
  case = Case(3, 4, 6, 2, 32, 8, 4)
  q, pages, tables, first, dense = draw(case, name)
  ours = run(q, pages, tables, first, window, "reference")
  place = np.arange(case.pages * case.page_size)
  row = np.asarray(first)[:, None, None] + np.arange(case.rows)[:, None]
  mask = place <= row
  if window:
    mask &= place > row - window
  theirs = jax.nn.dot_product_attention(
    q, *dense, mask=jnp.asarray(mask)[:, None]
  )
  np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 3])
def test_chunked_prefill_does_not_depend_on_the_chunk_size(size):
  """The last chunk is padded; keys of padding are not written."""
  case = Case(1, 7, 4, 2, 16, 4, 5)
  q, pages, tables, first, _ = draw(case, "heads")
  whole = run(q, pages, tables, first, 0, "reference")
  found = []
  for start in range(0, case.rows, size):
    rows = q[:, start : start + size]
    rows = jnp.pad(rows, ((0, 0), (0, size - rows.shape[1]), (0, 0), (0, 0)))
    found.append(run(
      rows, pages, tables, first + start, 0, "reference", first + case.rows
    ))
  found = jnp.concatenate(found, axis=1)
  assert np.isfinite(found).all()
  assert_close(found[:, : case.rows], whole, case.dtype)


@pytest.mark.rotated
@pytest.mark.parametrize("kernel", ["tpu", "gpu"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_match_the_reference(name, kernel):
  """Includes padding sequences, and padding rows at the end of a chunk."""
  case = CASES[name]
  padding = range(case.seqs - 1)
  dead = case.rows // 3
  *operands, _ = draw(case, api.ORDERS[kernel], padding=padding, dead=dead)
  q, pages, tables, first = operands
  lengths = first + case.rows - dead
  theirs = run(*operands, case.window, "reference", lengths)
  if kernel == "gpu":
    ours = run(*operands, case.window, "gpu_interpret", lengths)
  else:
    ours = WITH_RACES(
      q, pages, jnp.clip(tables, 0, pages.num_pages - 1), first,
      jnp.where(first < 0, 0, lengths), window=case.window,
    )
    jax.block_until_ready(ours)
    assert not races_found()
  assert np.isfinite(np.asarray(ours, "f4")).all()
  # Padding rows have undefined results.
  kept = slice(len(padding), None), slice(case.rows - dead)
  assert_close(ours[kept], theirs[kept], case.dtype, rounds=4)


def test_padding_does_not_affect_other_rows():
  """Covers padding sequences, and padding rows at the end of a chunk."""
  case = Case(3, 5, 4, 2, 32, 8, 3)
  *operands, _ = draw(case, "heads", padding=(0, 1), dead=2)
  q, pages, tables, first = operands
  ours = run(*operands, 0, "reference", first + case.rows - 2)
  assert np.isfinite(ours).all()
  alone = [x[2:] for x in (tables, first)]
  theirs = run(q[2:, :-2], pages, *alone, 0, "reference")
  assert_close(ours[2:, :-2], theirs, case.dtype)


@pytest.mark.parametrize("name", order.NAMES)
@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_written_keys_and_values_are_read_back(name, stored):
  """Codes are within the codec's error bound; other slots are unchanged."""
  n, k, d, page = 6, 2, 32, 8
  rng = np.random.default_rng(0)
  before = blank(order.shapes(name, n, page, k, d, stored), 1.0)
  slots = np.array([5, -1, 17, n * page, 30, -n * page, 47, 10**6])
  keys, values = (
    jnp.asarray(rng.normal(size=(slots.size, k, d)), "f4") for _ in range(2)
  )
  after = WRITE(before, keys, values, jnp.asarray(slots))
  assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, before)
  table = jnp.arange(n)
  inside = np.flatnonzero((slots >= 0) & (slots < n * page))
  bound = max_error(Codec("int8", block=d)) if stored == "int8" else 2.0**-8
  for new, old, x in zip(
    order.read(after, table), order.read(before, table), (keys, values),
    strict=True,
  ):
    assert new.shape == (k, n * page, d)
    x = np.asarray(x).swapaxes(0, 1)[:, inside]
    error = np.abs(np.asarray(new, "f4")[:, slots[inside]] - x)
    assert (error <= bound * np.abs(x).max(-1, keepdims=True)).all()
    others = np.setdiff1d(np.arange(n * page), slots[inside])
    np.testing.assert_array_equal(new[:, others], old[:, others])


def test_attention_on_codes_equals_attention_on_decoded_pages():
  case = Case(2, 2, 4, 2, 32, 8, 3, stored="int8")
  q, pages, tables, first, _ = draw(case, "heads", fill=0.0)
  every = jnp.arange(pages.num_pages)
  decoded = [
    x.reshape(*pages.data[0].shape) for x in order.read(pages, every)
  ]
  floats = dataclasses.replace(pages, data=tuple(decoded), scales=())
  np.testing.assert_allclose(
    run(q, pages, tables, first, 0, "reference"),
    run(q, floats, tables, first, 0, "reference"), rtol=1e-6, atol=1e-6,
  )


@pytest.mark.parametrize("name", order.NAMES)
def test_pages_are_written_in_place(name):
  """No layer of a loop allocates a copy of the pages."""
  layers, n, page, k, d = 3, 64, 8, 2, 64
  types = order.shapes(name, layers * n, page, k, d, "float32")
  tokens = jax.ShapeDtypeStruct((4, k, d), "float32")
  slots = jax.ShapeDtypeStruct((4,), "int32")

  def step(pages, keys, values, slots):
    def layer(pages, i):
      return order.write(pages, keys, values, slots + i * n * page), None

    return jax.lax.scan(layer, pages, jnp.arange(layers))[0]

  program = jax.jit(step, donate_argnums=0).lower(
    types, tokens, tokens, slots
  ).compile().memory_analysis()
  total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(types))
  assert program.alias_size_in_bytes == total
  assert program.temp_size_in_bytes < total / 10


@pytest.mark.parametrize(
  ("lanes", "devices", "implementation"),
  [
    (2, 1, "reference"), (1, 2, "reference"), (1, 2, "tpu_interpret"),
    (2, 1, "tpu_interpret"),
  ],
)
def test_ranks_attend_with_their_own_heads(lanes, devices, implementation):
  """Runs under ``shard_map`` with checked varying axes and ``vmap``."""
  case = Case(2, 2, 2, 1, 64, 16, 2)
  ranks = [draw(case, "packed", seed) for seed in range(2)]
  # All ranks share one table: a sequence uses the same page numbers on each.
  _, pages, tables, first = ranks[0][:4]
  ranks[1] = (ranks[1][0], jax.tree.map(lambda x: -x, pages), tables, first)
  q = jnp.stack([x[0] for x in ranks])
  pages = jax.tree.map(lambda *x: jnp.stack(x), *(x[1] for x in ranks))
  axis = Axis("tensor", lanes * devices, devices)
  mesh = make_mesh({"tensor": axis})

  def body(q, pages, tables, first):
    def rank(q, pages):
      return api.paged_attention(
        q, pages, tables, first, implementation=implementation
      )

    return jax.vmap(rank)(q, pages)

  found = jax.jit(jax.shard_map(
    body, mesh=mesh, in_specs=(P("tensor"), P("tensor"), P(), P()),
    out_specs=P("tensor"),
  ))(q, pages, tables, first)
  for ours, (q, pages, *_) in zip(found, ranks, strict=True):
    theirs = run(q, pages, tables, first, 0, "reference")
    assert_close(ours, theirs, case.dtype, rounds=4)


def test_lanes_of_replicas_are_one_kernel_call():
  """Each replica has its page tables, shared by the replica's lanes."""
  case = Case(2, 2, 2, 1, 64, 16, 2)
  drawn = []
  for seed in range(2):
    q, pages, *shared, _ = draw(case, "packed", seed)
    negative = jax.tree.map(lambda x: -x, pages)
    drawn.append([(q, pages, *shared), (q[::-1], negative, *shared)])
  q, pages, tables, first = jax.tree.map(
    lambda *x: jnp.stack(x).reshape(2, 2, *x[0].shape), *drawn[0], *drawn[1]
  )

  def replica(q, pages, tables, first):
    def lane(q, pages):
      return api.paged_attention(
        q, pages, tables, first, window=5, implementation="tpu_interpret"
      )

    return jax.vmap(lane)(q, pages)

  f = jax.jit(jax.vmap(replica))
  operands = q, pages, tables[:, 0], first[:, 0]
  assert str(f.trace(*operands).jaxpr).count("pallas_call[") == 1
  for ours, lanes in zip(f(*operands), drawn, strict=True):
    for one, lane in zip(ours, lanes, strict=True):
      assert_close(one, run(*lane, 5, "reference"), case.dtype, rounds=4)


@pytest.mark.parametrize(
  ("kernel", "name", "case"),
  [
    ("jax_gpu_paged", "heads", Case(2, 1, 4, 1, 32, 16, 3, stored="int8")),
    (
      "jax_tpu_paged", "packed",
      Case(2, 1, 2, 1, 128, 16, 2, dtype="bfloat16"),
    ),
  ],
)
def test_jax_kernels_match_the_reference(kernel, name, case):
  """Converts the arguments to jax's conventions; all slots are finite."""
  operands = draw(case, name, fill=0.0, padding=(1,))[:4]
  ours = api.paged_attention(
    *operands, finite=True, implementation=f"{kernel}_interpret"
  )
  assert_close(
    ours, run(*operands, 0, "reference"), case.dtype, rounds=4
  )


def test_arguments_of_the_ragged_kernel_follow_its_specification(monkeypatch):
  """Replaces the kernel by jax's reference; the interpreter cannot run it."""

  def specification(
    *operands, num_kv_pages_per_block, num_queries_per_block, **options
  ):
    return ragged_kernel.ref_ragged_paged_attention(*operands, **options)

  monkeypatch.setattr(ragged, "ragged_paged_attention", specification)
  case = Case(1, 3, 4, 2, 128, 8, 3, window=5)
  operands = draw(case, "interleaved", fill=0.0)[:4]
  ours = api.paged_attention(
    *operands, window=5, finite=True, implementation="jax_tpu_ragged"
  )
  assert_close(ours, run(*operands, 5, "reference"), case.dtype, rounds=4)
  with pytest.raises(ValueError, match="interpreter does not support"):
    api.paged_attention(
      *operands, finite=True, implementation="jax_tpu_ragged_interpret"
    )


def chosen(case, name, platform, **options):
  names = selection.preference("auto", platform, api.KERNELS)
  return api.choice(
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
    api.choice(
      *case._replace(stored="int8", page_size=64).types("packed")[:3],
      implementation="tpu",
    )
  with pytest.raises(ValueError, match=r"'mosaic' must be 'auto' or .*_ragged"):
    api.choice(*case.types("heads")[:3], implementation="mosaic")
  with pytest.raises(ValueError, match="order 'rows' must be one of heads"):
    order.shapes("rows", 1, 16, 1, 64, "float32")
  with pytest.raises(ValueError, match=r"page_size=3: a multiple of 2 .* 64"):
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
  names = api.preferred(platform, mapped)
  assert api.best_order(names, **options) == expected


def test_all_jax_kernels_are_known():
  compiled = [name for names in api.KERNELS.values() for name in names]
  assert {n for n in compiled if n.startswith("jax")} == set(library.NAMES)
  assert set(compiled) == set(api.ORDERS)
