"""Detection of copies and slices of arrays that should be updated in place."""

import jax
from jax import lax
import jax.numpy as jnp
import pytest

from parallel.ledger import hlo, in_place
from tests import users

# Layers in pages of 8 rows: [layers * pages, page, width].
LAYERS, PAGES, PAGE, WIDTH = 3, 16, 8, 32
CACHE = jax.ShapeDtypeStruct((LAYERS * PAGES, PAGE, WIDTH), jnp.float32)
ROWS = jax.ShapeDtypeStruct((4, WIDTH), jnp.float32)
SLOTS = jax.ShapeDtypeStruct((4,), jnp.int32)


def write(cache, layer, rows, slots):
  flat = cache.reshape(-1, WIDTH)
  flat = flat.at[slots + layer * PAGES * PAGE].set(rows, mode="drop")
  return flat.reshape(cache.shape)


def layers(f):
  """Returns a loop that writes rows of each layer, then reads by ``f``."""

  def step(cache, rows, slots):
    def layer(carry, index):
      cache, rows = carry
      cache = write(cache, index, rows, slots)
      cache, read = f(cache, index, slots)
      return (cache, rows + read), None

    return lax.scan(layer, (cache, rows), jnp.arange(LAYERS))[0]

  return step


def pages(cache, index, slots):
  return cache, cache[slots % PAGES + index * PAGES].sum(1)


def whole_layer(cache, index, slots):
  layer = lax.dynamic_slice_in_dim(cache, index * PAGES, PAGES)
  return cache, jnp.sort(layer.reshape(-1, WIDTH), axis=0)[:4]


def one_page(cache, index, slots):
  page = lax.dynamic_slice_in_dim(cache, index * PAGES + slots[0] % PAGES, 1)
  return cache, jnp.sort(page[0], axis=0)[:4]


def twice(cache, index, slots):
  return cache * 2, cache[slots].sum(1)


def turned(cache, rows, slots):
  return write(cache, 0, rows, slots).transpose(1, 0, 2).reshape(cache.shape)


def kept_from_before(cache, rows, slots):
  """Reads the cache from before the write, which requires a copy."""
  return write(cache, 0, rows, slots), jnp.cumsum(cache, axis=0)[:, 0]


def uses(f, donate=True, dtype=None):
  cache = CACHE if dtype is None else jax.ShapeDtypeStruct(CACHE.shape, dtype)
  rows = ROWS if dtype is None else jax.ShapeDtypeStruct(ROWS.shape, dtype)
  f = jax.jit(f, donate_argnums=0 if donate else ())
  compiled = users.compiled(f.lower(cache, rows, SLOTS))
  array = hlo.Shape(str(cache.dtype), cache.shape, 8 * cache.dtype.itemsize)
  return in_place.uses(hlo.parse(compiled.as_text()), [array], LAYERS)


@pytest.mark.parametrize("read", [pages, one_page])
def test_pages_are_read_and_rows_written_in_place(read):
  found = uses(layers(read))
  assert not found.faults
  assert bool(found.gathers) == (read is pages)


@pytest.mark.parametrize(
  ("f", "word"),
  [
    (layers(whole_layer), "a slice: "),
    (layers(twice), "a copy (multiply in a fusion): "),
    (turned, "a copy (copy): "),  # another memory layout
    (kept_from_before, "a copy (copy): "),
  ],
)
def test_copies_and_slices_are_named(f, word):
  faults = uses(f).faults
  assert any(f.startswith(word) for f in faults), faults


def test_array_without_donation_is_copied():
  found = uses(layers(pages), donate=False)
  assert found.faults[0] == (
    "no result reuses the memory of a parameter float32[48, 8, 32]"
  )
  assert any(f.startswith("a copy (copy)") for f in found.faults)


def test_cpu_widens_16_bits_to_write_a_row():
  """XLA:CPU scatters in float32: two passes over the whole array."""
  found = uses(layers(pages), dtype=jnp.bfloat16)
  assert not found.faults
  assert any("convert in a fusion" in f for f in found.widened)
  assert not uses(layers(pages)).widened


@pytest.mark.parametrize("f", [layers(whole_layer), layers(twice)])
def test_copies_of_16_bits_are_not_conversions(f):
  found = uses(f, dtype=jnp.bfloat16)
  assert found.widened
  assert found.faults


KERNEL = """HloModule m, is_scheduled=true, input_output_alias={ {0}: (0, {}) }

ENTRY %main (cache: f32[48,8,32], rows: f32[4,32]) -> f32[48,8,32] {
  %cache = f32[48,8,32]{2,1,0} parameter(0)
  %rows = f32[4,32]{1,0} parameter(1)
  %half = f32[4,32]{1,0} custom-call(%rows), metadata={op_name="halve"}
  %out = f32[4,32]{1,0} custom-call(%half, %cache), metadata={op_name="read"}
  ROOT %new = f32[48,8,32]{2,1,0} custom-call(%cache, %out)ALIASES
}
"""


@pytest.mark.parametrize("aliases", [True, False])
def test_kernel_may_write_into_an_aliased_operand(aliases):
  text = ', metadata={op_name="write"}'
  if aliases:
    text += ", output_to_operand_aliasing={{}: (0, {})}"
  found = in_place.uses(
    hlo.parse(KERNEL.replace("ALIASES", text)),
    [hlo.Shape("float32", CACHE.shape, 32)],
  )
  assert found.faults == (() if aliases else (
    "a kernel's new array: new (write)",
  ))
  assert found.kernels == ("read", "write")  # those with the cache
  assert not found.gathers


# XLA:TPU copies bytes to its vector memory in two slices.
PREFETCH = """HloModule m, is_scheduled=true, input_output_alias={ {}: (0, {}) }

ENTRY %main (cache: f32[48,8,32]) -> f32[48,8,32] {
  %cache = f32[48,8,32]{2,1,0} parameter(0)
  %bytes = s8[49152]{0} bitcast(%cache)
  %start = ((s8[49152]{0}), s8[24576]{0MEMORY}, s32[]{:S(2)}) slice-start(%bytes), slice={[0:24576]}
  %start.1 = ((s8[49152]{0}), s8[24576]{0MEMORY}, s32[]{:S(2)}) slice-start(%bytes), slice={[24576:49152]}
  %done = s8[24576]{0MEMORY} slice-done(%start)
  %done.1 = s8[24576]{0MEMORY} slice-done(%start.1)
  %here = f32[48,8,32]{2,1,0:S(1)} custom-call(%done, %done.1), custom_call_target="ConcatBitcast"
  %back = (f32[48,8,32]{2,1,0}, f32[48,8,32]{2,1,0:S(1)}, u32[]{:S(2)}) copy-start(%here)
  ROOT %end = f32[48,8,32]{2,1,0} copy-done(%back)
}
"""  # noqa: E501


@pytest.mark.parametrize(("memory", "faults"), [
  (":S(1)", ()), ("", ("a slice: start", "a slice: start.1")),
])
def test_array_may_be_copied_to_vector_memory_in_slices(memory, faults):
  found = in_place.uses(
    hlo.parse(PREFETCH.replace("MEMORY", memory)),
    [hlo.Shape("float32", CACHE.shape, 32)], LAYERS,
  )
  assert found.faults == faults
