"""Selection, sums and multisets of ledger entries; memory of a program."""

import dataclasses
import fractions
import itertools
import types

import jax
import numpy as np
import pytest

from parallel.ledger import entries, memory

BASE = entries.Collective(
  "all_reduce", ("data", "tensor"), 8, "float32", (2, 3), 5, "forward", False,
  "add", "blocks",
)
OTHERS = {
  "kind": "permute", "axis": ("tensor",), "phase": "backward",
  "dtype": "bfloat16", "rematted": True,
}


def test_selection_matches_every_given_argument():
  """One entry per value of each field: an argument keeps the matching half."""
  every = []
  for changed in itertools.product([False, True], repeat=len(OTHERS)):
    fields = {
      "axes" if name == "axis" else name: value
      for (name, value), used in zip(OTHERS.items(), changed, strict=True)
      if used
    }
    every.append(dataclasses.replace(BASE, **fields))
  assert entries.select(every) == every
  for name, value in OTHERS.items():
    attribute = "axes" if name == "axis" else name
    kept = entries.select(every, **{name: value})
    assert kept == [e for e in every if getattr(e, attribute) == value]
    assert len(kept) == len(every) // 2
  assert entries.select(every, **OTHERS) == every[-1:]
  assert all(not e.rematted for e in entries.select(every, rematted=False))


@pytest.mark.parametrize(("axis", "kept"), [
  ("data", [0]), ("tensor", [0, 1]), ("stage", []), (("data",), []),
  (("tensor",), [1]), (("tensor", "data"), [0]), ((), [2]), (None, [0, 1, 2]),
])
def test_name_selects_any_set_of_axes_and_tuple_selects_one(axis, kept):
  every = [dataclasses.replace(BASE, axes=axes)
           for axes in (("data", "tensor"), ("tensor",), ())]
  assert entries.select(every, axis=axis) == [every[i] for i in kept]


def test_total_multiplies_bytes_by_counts():
  unknown = dataclasses.replace(BASE, count=None)
  alone = dataclasses.replace(unknown, group_size=1)
  assert BASE.elements == 6
  assert BASE.bytes == 24
  assert entries.total([BASE, BASE, alone]) == 2 * 5 * 24
  assert entries.total([BASE, unknown], dtype="int8") == 0
  with pytest.raises(ValueError, match="2 collectives run an unknown number"):
    entries.total([BASE, unknown, alone, unknown])


@pytest.mark.parametrize(("kind", "times"), [
  ("all_reduce", 2 * 3 / 4), ("all_gather", 3), ("reduce_scatter", 3 / 4),
  ("all_to_all", 3 / 4), ("permute", 1), ("broadcast", 1),
])
def test_ring_bytes_are_multiples_of_the_operand(kind, times):
  entry = dataclasses.replace(BASE, kind=kind, group_size=4)
  assert entry.wire_bytes_ring == times * 24


def test_shares_are_listed_from_the_outermost_scope():
  half, third = fractions.Fraction(1, 2), fractions.Fraction(1, 3)
  assert entries.branch_run_shares(
    "a/runs_1_of_2/b/runs_2_of_6"
  ) == [half, third]
  assert entries.branch_run_shares("overruns_1_of_2/runs_1_of") == []


def test_branches_are_alike_up_to_order_and_scopes():
  other = dataclasses.replace(BASE, kind="permute")
  elsewhere = dataclasses.replace(BASE, where="head")
  assert entries.branches_are_equal([[BASE, other], [other, elsewhere]])
  assert not entries.branches_are_equal([[BASE, other], [BASE]])
  assert not entries.branches_are_equal([[BASE], [BASE], [other]])
  # Multisets: the number of equal collectives matters.
  assert not entries.branches_are_equal(
    [[BASE, BASE, other], [BASE, other, other]]
  )


def test_total_memory_is_the_sum_of_its_parts():
  """Arguments in host memory occupy no device memory."""
  parts = memory.ProgramMemory({"params": 1, "batch": 2}, 4, 8, 16, 32)
  assert parts.host == 0
  assert parts.total == 63
  assert dataclasses.replace(parts, host=3).total == 60


def test_padding_is_the_difference_to_the_logical_sizes():
  """Sizes of an analysis whose layout pads 24 of 1,000 bytes."""
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  x, y = (
    jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    for shape, dtype in (((200,), np.float32), ((2, 50), np.int16))
  )
  analysis = types.SimpleNamespace(
    argument_size_in_bytes=900, host_argument_size_in_bytes=124,
    host_temp_size_in_bytes=60,
    output_size_in_bytes=70, alias_size_in_bytes=30, temp_size_in_bytes=500,
    generated_code_size_in_bytes=6,
  )
  found = memory.memory(
    types.SimpleNamespace(memory_analysis=lambda: analysis),
    {"x": {"a": x}, "y": [y]},
  )
  assert found == memory.ProgramMemory(
    {"x": 800, "y": 200}, 24, 40, 500, 6, 124, 60
  )
