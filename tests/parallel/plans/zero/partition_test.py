"""Partitions and levels: validation, texts, and costs in closed form."""

import collections
import dataclasses
import itertools

import pytest

from parallel.kernels.codec.reference import Codec
from parallel.plans.outer.cost import BLOCK_SIZE
from parallel.plans.zero import cost
from parallel.plans.zero.partition import (
  HOPS,
  SCHEMES,
  Level,
  Partition,
  enumerate_partitions,
  named,
  parse_levels,
)
from parallel.wire import Wire

LEVELS = tuple(map(Level, ("pod", "node", "gpu"), (2, 3, 4)))
CODED = {"weight_codec": "int8", "gradient_codec": "int4"}
PARTITIONS = [
  Partition(LEVELS, 0, 0, 0), Partition(LEVELS, 1, 2, 3),
  Partition(LEVELS, 3, 3, 3), Partition(LEVELS, 3, 3, 3, 1),
  Partition(LEVELS, 0, 1, 2), Partition(LEVELS, 3, 3, 3, 2, **CODED),
  Partition(LEVELS, 3, 3, 3, gradient_hops="two", **CODED),
]


@pytest.mark.parametrize(("text", "ranks", "levels"), [
  ("", 6, (("data", 6),)), ("gpu:4", 4, (("gpu", 4),)),
  ("node:2,gpu:4", 8, (("node", 2), ("gpu", 4))),
  (" pod:1 , node : 3 ,gpu:2", 6, (("pod", 1), ("node", 3), ("gpu", 2))),
])
def test_levels_are_parsed_from_text(text, ranks, levels):
  assert parse_levels(text, ranks) == tuple(Level(*x) for x in levels)


@pytest.mark.parametrize(("text", "ranks", "message"), [
  ("node:0,gpu:4", 0, "'node:0' is not name:size"),
  ("node,gpu:4", 4, "'node' is not name:size"),
  ("node:2:2", 4, "is not name:size"), ("2:2", 2, "is not name:size"),
  ("node:-2", 2, "is not name:size"), ("node:2,", 2, "'' is not name:size"),
  ("gpu:2,gpu:2", 4, "names must differ"),
  ("node:²", 2, "is not name:size"),
  ("node:2,gpu:4", 7, "have 8 ranks, not the 7"),
])
def test_invalid_texts_are_refused(text, ranks, message):
  with pytest.raises(ValueError, match=message):
    parse_levels(text, ranks)


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_received_bytes_follow_from_operands(partition):
  """Bandwidth-optimal: each byte of another rank is received once.

  An all-gather receives the operands of all other ranks, a reduce-scatter and
  an all-to-all their part of each other operand, an all-reduce both.
  """
  for e in cost.level_collectives(
    partition, [cost.Parameter(24 * 512, 3), cost.Parameter(100)]
  ):
    others = e.ranks - 1
    factor = {
      "all_gather": others, "reduce_scatter": others / e.ranks,
      "all_to_all": others / e.ranks, "all_reduce": 2 * others / e.ranks,
    }[e.kind]
    assert e.received_bytes == pytest.approx(factor * e.operand_bytes), e


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_costs_of_parameters_are_additive(partition, accumulation):
  """Two functions read three tensors: the cost is the sum of the parts."""
  def found(parameters):
    total = collections.Counter()
    for e in cost.level_collectives(
      partition, parameters, accumulation=accumulation
    ):
      key = e.levels, e.ranks, e.kind, e.when, e.dtype
      total[key, "operand"] += e.operand_bytes
      total[key, "received"] += e.received_bytes
    return total

  a, b = cost.Parameter(24 * 512), cost.Parameter(24 * 256, uses=2)
  many = found([cost.Parameter(24 * 512, 3), b])
  alone = found([a]), found([b])
  assert set(many) == set(alone[0]) | set(alone[1])
  for key, value in many.items():
    assert value == pytest.approx(3 * alone[0][key] + alone[1][key]), key


def test_codecs_have_equal_default_blocks():
  """Closed forms of outer loops and partitions rely on it."""
  assert (
    Partition(LEVELS, 0, 0, 0).block == Wire("int8").block
    == Codec("int8").block == BLOCK_SIZE
  )


# States of three levels in the order weights, gradients, optimizer; depth of
# the second copy; codecs of weights, gradients and second copy.
NONE, QUANTISED = ("none", "none", "none"), ("int8", "int4", "none")
EXPECTED = {
  "ddp": ((0, 0, 0), None, NONE), "zero1": ((0, 0, 3), None, NONE),
  "zero2": ((0, 3, 3), None, NONE), "zero3": ((3, 3, 3), None, NONE),
  "hsdp": ((2, 2, 2), None, NONE), "mics": ((2, 2, 2), None, NONE),
  "hpz": ((3, 3, 3), 2, NONE), "zeropp": ((3, 3, 3), 2, QUANTISED),
  "zeropp_by_level": ((3, 3, 3), 2, QUANTISED),
  "frontier3": ((1, 2, 3), None, NONE),
  "frontier3_quantised": ((1, 2, 3), 2, ("int8", "int4", "int8")),
}


def test_named_schemes_are_those_of_their_papers():
  assert tuple(EXPECTED) == SCHEMES
  for scheme, (depths, secondary, codecs) in EXPECTED.items():
    found = named(scheme, LEVELS)
    assert (found.weights, found.gradients, found.optimizer) == depths, scheme
    assert found.secondary == secondary, scheme
    assert codecs == (
      found.weight_codec, found.gradient_codec, found.secondary_codec
    ), scheme
    assert found.gradient_hops == ("two" if scheme == "zeropp" else "by_level")
    assert (found.levels, found.coded_blocks) == (LEVELS, 1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scheme_that_names_levels_needs_two(scheme):
  states, secondary, _ = EXPECTED[scheme]
  one = [Level("gpu", 4)]
  if {*states} <= {0, 3} and secondary is None:
    assert named(scheme, one).num_ranks == 4
  else:
    with pytest.raises(ValueError, match="needs two levels or more"):
      named(scheme, one)
  assert named(scheme, [Level("node", 2), *one]).num_ranks == 8


def test_unknown_scheme_is_an_error():
  with pytest.raises(ValueError, match="scheme='zero4' must be one of ddp, "):
    named("zero4", LEVELS)


# Valid fields, invalid ones and the message.
FIELDS = [
  ({"optimizer": 3}, {"optimizer": 4}, "must not decrease"),
  ({"gradients": 1, "optimizer": 1}, {"gradients": 1}, "must not decrease"),
  ({"weights": 1, "gradients": 1, "optimizer": 1},
   {"weights": 2, "gradients": 1, "optimizer": 2}, "must not decrease"),
  ({}, {"weights": -1}, "weights=-1, gradients=0 and optimizer=0 must lie"),
  ({"weight_codec": "int8", "optimizer": 1}, {"weight_codec": "int8"},
   "weight_codec='int8' has no effect, since no weights are gathered"),
  ({"gradient_codec": "int4", "optimizer": 1}, {"gradient_codec": "int4"},
   "gradient_codec='int4' has no effect"),
  ({"weight_codec": "int4", "optimizer": 1},
   {"weight_codec": "int2", "optimizer": 1}, "must be one of none, int8, int4"),
  ({"gradient_hops": "two"}, {"gradient_hops": "three"},
   "must be one of by_level, two"),
  ({"coded_blocks": 0}, {"coded_blocks": -1}, "must be at least 0"),
  ({"block": 2}, {"block": 1}, "block=1 must be even"),
  ({"block": 6}, {"block": 7}, "block=7 must be even"),
  ({"block": 4}, {"block": 0}, "block=0 must be even"),
]
COPY = {"weights": 1, "gradients": 1, "optimizer": 2}
FIELDS += [
  (COPY | {"secondary": 1}, COPY | {"secondary": 0},
   "secondary=0 must lie in .1, 2"),
  (COPY | {"secondary": 2}, COPY | {"secondary": 3},
   "secondary=3 must lie in .1, 2"),
  (COPY | {"secondary": 1, "secondary_codec": "int8"},
   COPY | {"secondary_codec": "int8"}, "has no effect without a second copy"),
  (COPY | {"secondary": 2}, {"optimizer": 2, "secondary": 2},
   "weights that are not sharded need no copy"),
]


@pytest.mark.parametrize(("valid", "invalid", "message"), FIELDS)
def test_field_without_effect_or_out_of_range_is_an_error(
  valid, invalid, message
):
  Partition(LEVELS, **valid)
  with pytest.raises(ValueError, match=message):
    Partition(LEVELS, **invalid)


def test_partition_without_fields_is_data_parallelism():
  assert Partition(LEVELS) == named("ddp", LEVELS)
  assert [axis.name for axis in Partition(LEVELS).inner] == [
    "gpu", "node", "pod"
  ]
  assert [Partition(LEVELS).degree(depth) for depth in range(4)] == [
    1, 4, 12, 24
  ]


def test_triples_are_all_nondecreasing_depths():
  found = [
    (t.weights, t.gradients, t.optimizer) for t in enumerate_partitions(LEVELS)
  ]
  assert found == [
    t for t in itertools.product(range(4), repeat=3) if list(t) == sorted(t)
  ]
  assert {t.levels for t in enumerate_partitions(list(LEVELS))} == {LEVELS}


@pytest.mark.parametrize(("fields", "text"), [
  ({}, "weights / 1, gradients / 1, optimizer / 1"),
  ({"weights": 1, "gradients": 2, "optimizer": 3},
   "weights / 4, gradients / 12, optimizer / 24"),
  ({**COPY, "secondary": 2},
   "weights / 4, gradients / 4, optimizer / 12, second copy / 12"),
  ({**COPY, "secondary": 1, "secondary_codec": "int8", "weight_codec": "int4"},
   "weights / 4, gradients / 4, optimizer / 12, second copy / 4 in int8, "
   "weights sent as int4"),
  ({"optimizer": 2, "gradient_codec": "int8", "gradient_hops": "two"},
   "weights / 1, gradients / 1, optimizer / 12, gradients sent as int8 in two "
   "hops"),
])
def test_text_names_what_differs_from_the_defaults(fields, text):
  assert str(Partition(LEVELS, **fields)) == text
  # With two levels, the two hops are one per level.
  if "hops" in text:
    two = Partition((Level("node", 3), Level("gpu", 4)), **fields)
    assert str(two) == text.removesuffix(" in two hops")


@pytest.mark.parametrize("hops", HOPS)
@pytest.mark.parametrize("coded", [False, True])
def test_hops_cover_the_levels_between_two_depths(hops, coded):
  drawn = Partition(LEVELS, gradient_hops=hops)
  for lower, upper in itertools.combinations_with_replacement(range(4), 2):
    found = drawn.hops(lower, upper, coded)
    assert [j for hop in found for j in hop] == list(range(lower, upper))
    if coded and hops == "two":
      # All levels but the outermost, then the outermost.
      assert all(list(hop) == [2] or 2 not in hop for hop in found)
      assert len(found) == (lower < min(upper, 2)) + (upper == 3 > lower)
    else:
      assert all(len(hop) == 1 for hop in found)
  assert drawn.hops(0, 3) == drawn.hops(0, 3, True)


def by_phase(partition, accumulation=1, **fields):
  """Returns operand bytes by kind, phase and dtype of one parameter."""
  found = collections.Counter()
  parameter = cost.Parameter(**{"size": 24 * 512} | fields)
  for e in cost.level_collectives(
    partition, [parameter], accumulation=accumulation
  ):
    found[e.kind, e.when, e.dtype] += e.operand_bytes
  return found


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_microbatches_and_uses_multiply_what_they_repeat(partition):
  """Functions that read a parameter gather it each, and reduce its gradient."""
  once = by_phase(partition)
  assert {when for _, when, _ in once} <= {"step", "forward", "backward"}
  for changes, times in (
    ({"accumulation": 3}, {"forward": 3, "backward": 3}),
    ({"uses": 2}, {"forward": 2, "reduced": 2}),
    ({"regathered": 2}, {"regathered": 2}),
    ({"regathered": 0}, {"regathered": 0}),
    ({"count": 5}, {"step": 5, "forward": 5, "backward": 5}),
  ):
    found = by_phase(partition, **changes)
    for (kind, when, dtype), size in once.items():
      part = when
      if when == "backward" and part not in times:
        part = "regathered" if kind == "all_gather" else "reduced"
      expected = times.get(part, 1) * size
      assert found[kind, when, dtype] == expected, (changes, kind, when)


def test_defaults_of_a_parameter():
  """One float32 tensor that one function reads, in forward and backward."""
  assert cost.Parameter(7) == cost.Parameter(7, 1, 4, 1, 1, 4)
  zero3 = Partition(LEVELS, 3, 3, 3)
  assert by_phase(zero3) == by_phase(zero3, wire_bytes=4, gradient_bytes=4)


def test_narrow_weights_and_gradients_send_half_of_the_bytes():
  for drawn in PARTITIONS[:5]:
    wide, narrow = by_phase(drawn), by_phase(
      drawn, wire_bytes=2, gradient_bytes=2
    )
    assert {dtype for _, _, dtype in wide} == {"float32"}
    assert narrow == {
      (kind, when, "bfloat16"): size // 2
      for (kind, when, _), size in wide.items()
    }
  found = by_phase(PARTITIONS[2], wire_bytes=2)
  assert {(kind, dtype) for kind, _, dtype in found} == {
    ("all_gather", "bfloat16"), ("reduce_scatter", "float32")
  }


@pytest.mark.parametrize(("size", "blocks"), [
  (24 * 256, 1), (24 * 256 + 1, 2), (24 * 512, 2), (24 * 300, 2),
])
def test_encoded_bytes_are_those_of_whole_blocks(size, blocks):
  """ZeRO-3 of one level, whose int4 code has half a byte per element."""
  drawn = Partition((Level("gpu", 24),), 1, 1, 1, **CODED)
  found = by_phase(drawn, size=size)
  for when in ("forward", "backward"):
    assert found["all_gather", when, "uint8"] == 256 * blocks
    assert found["all_gather", when, "float32"] == 4 * blocks
  assert found["all_to_all", "backward", "uint8"] == 24 * 128 * blocks
  assert found["all_to_all", "backward", "float32"] == 24 * 4 * blocks
  # A shard with fewer elements than a block is sent as without codecs.
  plain = dataclasses.replace(drawn, weight_codec="none", gradient_codec="none")
  small = {"size": 24 * 255}
  assert by_phase(drawn, **small) == by_phase(plain, **small)


def test_merged_collectives_are_equal_in_level_kind_phase_and_dtype():
  a = cost.LevelCollective(("gpu",), 4, "all_gather", "step", "float32", 8, 24.)
  others = [
    dataclasses.replace(a, **change) for change in (
      {"levels": ("node",)}, {"kind": "all_reduce"}, {"when": "forward"},
      {"dtype": "uint8"},
    )
  ]
  assert cost.merged([a, *others, a, a]) == [
    dataclasses.replace(a, operand_bytes=24, received_bytes=72.0), *others
  ]


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
@pytest.mark.parametrize("inside", ["pod", "node", "gpu"])
def test_levels_within_a_device_send_nothing(partition, inside):
  """Ranks receive as before; a device sends for all of its lanes."""
  parameters = [cost.Parameter(24 * 512, 3)]
  apart = cost.level_collectives(partition, parameters)
  sizes = {level.name: level.size for level in LEVELS}
  assert cost.level_collectives(partition, parameters, lanes=sizes) == []
  together = cost.level_collectives(
    partition, parameters, lanes={inside: sizes[inside]}
  )
  expected = [e for e in apart if e.levels != (inside,)]
  assert [dataclasses.replace(e, operand_bytes=0) for e in together] == [
    dataclasses.replace(e, operand_bytes=0) for e in expected
  ]


def test_copy_of_a_tensor_is_cut_like_its_weights_if_it_were_whole():
  """Experts are not cut over the innermost level, over which the copy is."""
  hpz = named("hpz", [Level("data", 4), Level("expert", 2)])
  assert hpz.secondary == 1
  own = hpz.of_tensor(apart=["expert"])
  assert (own.secondary, own.weights, own.num_ranks) == (1, 1, 4)
  whole = hpz.of_tensor("whole")
  assert (whole.secondary, whole.weights, whole.optimizer) == (None, 0, 0)
  assert hpz.of_tensor() is hpz
