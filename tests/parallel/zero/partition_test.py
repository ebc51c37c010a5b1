"""Levels parsed from text, and received bytes of a partition's collectives."""

import collections

import pytest

from parallel.kernels.codec.reference import Codec
from parallel.outer.cost import BLOCK
from parallel.wire import Wire
from parallel.zero import cost
from parallel.zero.partition import Level, Partition, parse_levels

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
    == Codec("int8").block == BLOCK
  )
