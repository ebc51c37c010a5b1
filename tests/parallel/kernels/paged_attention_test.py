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
from parallel.kernels.calls import compiles_loops
from parallel.kernels.paged_attention import api, order, tpu
from parallel.kernels.paged_attention.cases import CASES, AttentionCase
from tests.parallel.kernels.compare import KERNELS, assert_close
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
  case = AttentionCase(3, 4, 6, 2, 32, 8, 4)
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
  case = AttentionCase(1, 7, 4, 2, 16, 4, 5)
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


@pytest.mark.parametrize("case", [
  AttentionCase(5, 1, 6, 2, 32, 16, 3, window=18),
  AttentionCase(3, 1, 2, 2, 64, 8, 4),
  AttentionCase(4, 1, 3, 1, 32, 8, 3, stored="int8", window=9),
])
def test_compiled_loops_match_the_reference(case):
  """Includes padding, vmapped lanes, and tasks that pieces do not divide."""
  if not compiles_loops():
    pytest.skip("needs numba")
  q, pages, tables, first, _ = draw(case, "heads", padding=[1])
  arguments = tables, first, case.window
  ours = run(q, pages, *arguments, "cpu")
  assert not ours[1].any()
  assert_close(ours, run(q, pages, *arguments, "reference"), "float32", 4)
  lanes = jnp.stack([q, -2 * q]), jax.tree.map(lambda x: jnp.stack([x] * 2),
                                               pages)
  found = jax.vmap(lambda q, pages: run(q, pages, *arguments, "cpu"))(*lanes)
  twice = run(-2 * q, pages, *arguments, "reference")
  assert_close(found[1], twice, "float32", 4)


@pytest.mark.rotated
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_kernels_match_the_reference(name, kernel):
  """Includes padding sequences, and padding rows at the end of a chunk."""
  case = CASES[name]
  padding = range(case.seqs - 1)
  dead = case.rows // 3
  kind = kernel.removesuffix("_interpret")
  *operands, _ = draw(case, api.ORDERS[kind], padding=padding, dead=dead)
  q, pages, tables, first = operands
  lengths = first + case.rows - dead
  theirs = run(*operands, case.window, "reference", lengths)
  if kernel != "tpu_interpret":
    ours = run(*operands, case.window, kernel, lengths)
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
  case = AttentionCase(3, 5, 4, 2, 32, 8, 3)
  *operands, _ = draw(case, "heads", padding=(0, 1), dead=2)
  q, pages, tables, first = operands
  ours = run(*operands, 0, "reference", first + case.rows - 2)
  assert np.isfinite(ours).all()
  alone = [x[2:] for x in (tables, first)]
  theirs = run(q[2:, :-2], pages, *alone, 0, "reference")
  assert_close(ours[2:, :-2], theirs, case.dtype)


def test_attention_on_codes_equals_attention_on_decoded_pages():
  case = AttentionCase(2, 2, 4, 2, 32, 8, 3, stored="int8")
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


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("implementation", ["reference", "tpu_interpret"])
def test_ranks_attend_with_their_own_heads(implementation):
  """Runs under ``shard_map`` with checked varying axes and ``vmap``."""
  case = AttentionCase(2, 2, 2, 1, 64, 16, 2)
  # All ranks share one table: a sequence uses the same page numbers on each.
  q, pages, tables, first, _ = draw(case, "packed")
  ranks = [
    (q * c, jax.tree.map(lambda x, c=c: x * c, pages)) for c in (1, -1, 2, 3)
  ]
  q, pages = jax.tree.map(lambda *x: jnp.stack(x), *ranks)
  mesh = make_mesh({"tensor": Axis("tensor", 4, 2)})

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
  for ours, (q, pages) in zip(found, ranks, strict=True):
    theirs = run(q, pages, tables, first, 0, "reference")
    assert_close(ours, theirs, case.dtype, rounds=4)


def test_lanes_of_replicas_are_one_kernel_call():
  """Each replica has its page tables, shared by the replica's lanes."""
  case = AttentionCase(2, 2, 2, 1, 64, 16, 2)
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
    (
      "jax_gpu_paged", "heads",
      AttentionCase(2, 1, 4, 1, 32, 16, 3, stored="int8"),
    ),
    (
      "jax_tpu_paged", "packed",
      AttentionCase(2, 1, 2, 1, 128, 16, 2, dtype="bfloat16"),
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
  case = AttentionCase(1, 3, 4, 2, 128, 8, 3, window=5)
  operands = draw(case, "interleaved", fill=0.0)[:4]
  ours = api.paged_attention(
    *operands, window=5, finite=True, implementation="jax_tpu_ragged"
  )
  assert_close(ours, run(*operands, 5, "reference"), case.dtype, rounds=4)
  with pytest.raises(ValueError, match="interpreter does not support"):
    api.paged_attention(
      *operands, finite=True, implementation="jax_tpu_ragged_interpret"
    )
