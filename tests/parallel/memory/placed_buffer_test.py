"""Buffers over tiers: their pieces, what backs them, and their content."""

import ctypes
import errno
import os
import time
import types

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from parallel.memory import host_memory, placed_buffer
from parallel.memory.host_memory import PAGE
from parallel.memory.placed_buffer import Buffer, Piece, stripes

NODE = host_memory.nodes()[0]


@given(
  st.integers(1, 500 * PAGE),
  st.lists(st.floats(0, 1), min_size=1, max_size=4).filter(any),
  st.integers(1, 40), st.integers(0, 10),
)
def test_stripes_cover_all_pages_in_proportion(size, weights, unit, first):
  shares = {i: w / sum(weights) for i, w in enumerate(weights)}
  pieces = stripes(size, shares, first * PAGE, unit * PAGE)
  bounds = [piece.start for piece in pieces] + [pieces[-1].stop]
  assert bounds[0] == first * PAGE
  assert bounds[-1] == first * PAGE + placed_buffer.round_up_to_pages(size)
  assert bounds == sorted(set(bounds))
  assert all(b % PAGE == 0 for b in bounds)
  assert [p.stop for p in pieces] == bounds[1:]
  count = len(pieces)
  for tier, share in shares.items():
    pages = sum(p.stop - p.start for p in pieces if p.tier == tier) / PAGE
    assert abs(pages - share * -(-size // PAGE)) <= max(1, count)


def test_stripes_of_tiers_alternate():
  pieces = stripes(64 * PAGE, {0: 0.5, "a": 0.25, "b": 0.25}, 0, 4 * PAGE)
  assert [p.tier for p in pieces[:6]] == [0, "a", "b"] * 2
  assert {p.stop - p.start for p in pieces if p.tier == 0} <= {6 * PAGE,
                                                               7 * PAGE}


@settings(max_examples=20)
@given(st.lists(st.sampled_from([NODE, "a", "b"]), min_size=1, max_size=8),
       st.lists(st.sampled_from([NODE, "a", "b"]), min_size=1, max_size=8))
def test_a_move_changes_tiers_and_no_byte(tmp_path_factory, before, after):
  folder = tmp_path_factory.mktemp("tiers")
  for name in ("a", "b"):
    (folder / name).mkdir()

  def pieces(tiers):
    size = 840 // len(tiers) * PAGE  # 840 is divisible by 1 to 8
    return [
      Piece(i * size, (i + 1) * size,
            tier if tier == NODE else str(folder / tier))
      for i, tier in enumerate(tiers)
    ]

  buffer = Buffer(pieces(before))
  buffer.check()
  assert not buffer.array.any()
  content = np.random.default_rng(0).integers(
    256, size=len(buffer.array), dtype=np.uint8
  )
  buffer.array[:] = content
  buffer.move(pieces(after))
  buffer.check()
  np.testing.assert_array_equal(buffer.array, content)
  buffer.drop()
  np.testing.assert_array_equal(buffer.array, content)


def test_bytes_of_a_file_are_in_the_file(tmp_path):
  buffer = Buffer([Piece(0, PAGE, NODE), Piece(PAGE, 3 * PAGE, str(tmp_path))])
  buffer.array[:] = 7
  (file,) = buffer._files.values()
  assert os.pread(file.fileno(), 9 * PAGE, PAGE) == b"\x07" * 2 * PAGE
  assert not list(tmp_path.iterdir())  # it vanishes with the process


def test_all_pieces_of_a_folder_must_fit_together(tmp_path, monkeypatch):
  disk = types.SimpleNamespace(f_bavail=3, f_frsize=PAGE)
  monkeypatch.setattr(os, "statvfs", lambda path: disk)
  folder = str(tmp_path)
  Buffer([Piece(0, 3 * PAGE, folder)])
  with pytest.raises(ValueError, match="do not fit into the"):
    Buffer([Piece(0, 2 * PAGE, folder), Piece(2 * PAGE, 4 * PAGE, folder)])


def test_the_check_notices_another_tier(tmp_path):
  buffer = Buffer([Piece(0, PAGE, NODE), Piece(PAGE, 2 * PAGE, str(tmp_path))])
  buffer.check()
  right = buffer.pieces
  for wrong in (
    (right[0], Piece(PAGE, 2 * PAGE, NODE + 1)),
    (Piece(0, PAGE, str(tmp_path)), right[1]),
  ):
    buffer.pieces = wrong
    with pytest.raises((AssertionError, OSError)):
      buffer.check()


def resident(buffer):
  """Returns which pages of a buffer are in memory."""
  found = np.zeros(len(buffer.array) // PAGE, np.uint8)
  assert placed_buffer._load_libc().mincore(
    ctypes.c_void_p(buffer.array.ctypes.data),
    ctypes.c_size_t(len(buffer.array)), ctypes.c_void_p(found.ctypes.data),
  ) == 0
  return (found & 1).astype(bool)


def test_a_dropped_file_is_not_in_memory_until_it_is_requested(tmp_path):
  file = str(tmp_path)
  buffer = Buffer([Piece(0, 8 * PAGE, file), Piece(8 * PAGE, 16 * PAGE, NODE),
                   Piece(16 * PAGE, 32 * PAGE, file)])
  buffer.array[:] = 1
  buffer.drop()
  wanted = np.zeros(32, bool)
  wanted[8:16] = True
  assert (resident(buffer) == wanted).all()
  buffer.prefetch(4 * PAGE + 5, 20 * PAGE - 5)
  wanted[4:20] = True
  end = time.monotonic() + 10
  while not (resident(buffer) == wanted).all():  # it does not wait
    assert time.monotonic() < end, resident(buffer)
    time.sleep(0.01)


def test_a_file_that_does_not_fit_is_an_error(tmp_path):
  buffer = Buffer([Piece(0, PAGE, NODE)])
  large = [Piece(0, 10**15, str(tmp_path))]
  with pytest.raises(ValueError, match=r"1000000.0 GB do not fit into the"):
    buffer._check_space(large)


def test_pages_move_to_a_node_and_stay_bound_to_it():
  x = host_memory.allocate(20 * PAGE, NODE)
  with pytest.raises(OSError) as caught:  # a page that was not touched
    host_memory.move(x, NODE)
  assert caught.value.errno == errno.ENOENT
  x[:] = 3
  host_memory.move(x, NODE)
  assert set(host_memory.nodes_of(x)) == {NODE}
  assert (x == 3).all()
  with pytest.raises(ValueError, match="node=4096 does not exist"):
    host_memory.move(x, 4096)
