"""Step time against memory: published arithmetic, properties of the search."""

import dataclasses
import itertools
import math

import pytest

from caatnet.studies.partitions import predictor as zero
from parallel.plans.hardware import clusters
from parallel.plans.zero import partition as partitions
from parallel.plans.zero.partition import (
  CODECS,
  SCHEMES,
  Level,
  Partition,
  named,
)

LEVELS = (Level("node", 48), Level("gpu", 4), Level("gcd", 2))
CAP = 64e9
MACHINE = zero.machine(
  clusters.FRONTIER, LEVELS, flops=76.6e12, memory_bytes=CAP
)
# 10M parameters, without padding at 384 shards of whole blocks; 2 + 2 + 12
# bytes per element, as in the papers.
EXACT = 384 * 256 * 2
PAPER = zero.Workload(
  50 * EXACT, 50, 2048, accumulation=1, weight_bytes=2, gradient_bytes=2
)
INT8, INT4 = 1 + 4 / 256, 1 / 2 + 4 / 256  # bytes per element, with scales
SPACE = tuple(zero.candidates(LEVELS))
both_ways = pytest.mark.parametrize("reuse", [True, False])


def of(parameters, accumulation=1, **changes):
  return dataclasses.replace(
    PAPER, parameters=parameters, accumulation=accumulation, **changes
  )


def triple(*depths, **more):
  return Partition(LEVELS, *depths, **more)


def predict(part, workload, **options):
  return zero.predict(part, MACHINE, workload, **options)


@pytest.mark.parametrize(
  ("part", "gigabytes", "billions"),
  [
    (named("ddp", LEVELS), 320, 4.0),
    (named("zero1", LEVELS), 80.6, 15.9),
    (named("zero2", LEVELS), 40.7, 31.4),
    (named("zero3", LEVELS), 0.83, 1536),
    (named("hpz", LEVELS), 5.83, 219),
    (triple(2, 2, 3), 10.6, 120),
    (triple(1, 2, 3), 25.6, 50),
    (triple(1, 2, 3, secondary=2, secondary_codec="int8"), 28.1, None),
    (named("hsdp", LEVELS), 40.0, 32),
  ],
  ids=str,
)
def test_memory_of_20b_parameters_and_the_largest_model(
  part, gigabytes, billions
):
  """2/w + 2/g + 12/o bytes per parameter, plus those of the copy."""
  total = predict(part, of(20e9)).memory.total
  assert total == pytest.approx(gigabytes * 1e9, rel=0.006)
  if billions:
    largest = zero.largest_model(part, PAPER, CAP)
    assert largest == pytest.approx(billions * 1e9, rel=0.006)
    assert predict(part, of(largest)).memory.total <= CAP
    assert predict(part, of(largest + 50)).memory.total > CAP


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_bytes_received_by_a_node(k):
  """Units of M = 2 P bytes, k microbatches, with reuse inside the node."""
  int8, int4 = INT8 / 2, INT4 / 2
  expected = {
    "ddp": 2,
    "zero1": 2,
    "zero2": k + 1,
    "zero3": 3 * k,
    "hpz": 2 * k,
    "zeropp": (int8 + int4) * k,
    "zeropp_by_level": (int8 + int4) * k,
    "hsdp": 2,
    "mics": 2,
    "frontier3": 2,
    "frontier3_quantised": int8 + int4,
  }
  assert set(expected) == set(SCHEMES)
  unit = 2 * PAPER.parameters * 47 / 48
  for scheme, count in expected.items():
    p = predict(named(scheme, LEVELS), of(PAPER.parameters, k))
    found = zero.node_bytes(p.received, MACHINE)
    assert found == pytest.approx(count * unit, rel=1e-12), scheme
  assert predict(triple(2, 2, 3), of(PAPER.parameters, k)).received[
    "node", "step"
  ] * 8 == pytest.approx(2 * unit)


def test_two_hops_send_more_between_the_devices_of_a_node():
  """One hop over both inner levels sends a part from each rank to each."""
  n = PAPER.parameters * INT4 / 2 * 2  # bytes of coded gradients
  both, by_level = (
    predict(named(s, LEVELS), of(PAPER.parameters)).received
    for s in ("zeropp", "zeropp_by_level")
  )
  for level, (two, three) in {
    "gcd": (n / 8, n / 2), "gpu": (n * 6 / 8, n / 2 * 3 / 4), "node": (0, 0)
  }.items():
    difference = both[level, "backward"] - by_level[level, "backward"]
    assert difference == pytest.approx(two - three, rel=1e-9)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_three_levels_beat_zeropp_from_two_microbatches(k):
  """Coded, both tie at k = 1 and three levels win from 2; in 16 bits from 3."""
  coded, plain, zeropp = (
    zero.node_bytes(
      predict(named(s, LEVELS), of(PAPER.parameters, k)).received, MACHINE
    )
    for s in ("frontier3_quantised", "frontier3", "zeropp")
  )
  assert coded == pytest.approx(zeropp / k, rel=1e-12)
  assert (plain < zeropp) == (k >= 3)


def test_node_without_reuse_receives_once_per_rank():
  """Gathers 20B parameters: 0.39 s with reuse, eight times that without."""
  zero3 = predict(named("zero3", LEVELS), of(20e9))
  seconds = [
    sizes["node", "forward"] / MACHINE.bandwidths["node"]
    for sizes in (zero3.received, zero3.direct)
  ]
  assert seconds == pytest.approx([0.39, 3.13], rel=0.01)
  unit = INT8 * PAPER.parameters * 48 / 384  # ranks of other nodes: 376
  zeropp, coded = (
    predict(named(s, LEVELS), PAPER) for s in ("zeropp", "frontier3_quantised")
  )
  assert zeropp.direct["node", "forward"] == pytest.approx(unit * 376 / 48)
  backward = ("node", "backward")  # coded gradients: two hops in both cases
  assert zeropp.direct[backward] == zeropp.received[backward]
  assert ("node", "forward") not in coded.direct
  gathered = coded.direct["node", "step"] - coded.received["node", "step"] / (
    INT8 + INT4
  ) * INT4  # except gradients, reduced level by level
  assert gathered == pytest.approx(unit * 376 / 48 / 2)


@pytest.mark.parametrize("k", [1, 3])
def test_reuse_moves_bytes_between_levels_and_adds_none(k):
  for part in SPACE:
    p = predict(part, of(PAPER.parameters, k))
    assert math.fsum(p.direct.values()) == pytest.approx(
      math.fsum(p.received.values()), rel=1e-12
    )
    afar = [sum(v for (level, _), v in sizes.items() if level == "node")
            for sizes in (p.received, p.direct)]
    assert afar[0] <= afar[1] * (1 + 1e-12)


def test_step_time_equals_the_value_by_hand():
  """Two levels, one bandwidth each; ZeRO-3 with float32 gradients."""
  levels = (Level("node", 3), Level("gpu", 2))
  machine = zero.Machine(levels, {"node": 1e9, "gpu": 4e9}, 6e12, CAP)
  work = zero.Workload(6e9, 1, 1000, accumulation=2)
  gather = 2 * (2e9 * 2 / 1e9 + 3 * 2e9 / 4e9)  # twice: 2/6 and 3/6 of 12 GB
  scatter = 2 * (2e9 * 4 / 1e9 + 3 * 4e9 / 4e9)
  forward, backward = 4.0, 8.0
  for overlap, expected in (
    (False, forward + gather + backward + gather + scatter),
    (True, max(forward, gather) + max(backward, gather + scatter)),
  ):
    p = zero.predict(named("zero3", levels), machine, work, overlap=overlap)
    assert p.seconds == pytest.approx(expected)
  flat = 2 * (4 * 2e9 / 1e9 + 2e9 / 4e9)
  assert p.direct["node", "forward"] == pytest.approx(2 * 4 * 2e9)
  p = zero.predict(named("zero3", levels), machine, work)
  assert p.direct_seconds == pytest.approx(12 + flat * 4)


def test_search_space_is_every_valid_partition():
  copies = [None, 1, 2, 3]
  found = set()
  for w, g, o, copy, *codecs in itertools.product(
    *[range(4)] * 3, copies, CODECS, CODECS, ("none", "int8")
  ):
    try:
      found.add(Partition(LEVELS, w, g, o, copy, *codecs))
    except ValueError:
      continue
  assert len(SPACE) == len(set(SPACE)) == 622
  assert set(SPACE) == found
  assert {
    dataclasses.replace(named(s, LEVELS), gradient_hops="by_level")
    for s in SCHEMES
  } <= found
  assert len(list(partitions.enumerate_partitions(LEVELS))) == 20


@pytest.mark.parametrize("weight_bytes", [2, 4])
@pytest.mark.parametrize("codec", CODECS)
def test_finer_shards_never_raise_memory(codec, weight_bytes):
  work = of(PAPER.parameters, weight_bytes=weight_bytes, gradient_bytes=4)

  def total(depths):
    codecs = {"weight_codec": codec} if depths[2] else {}
    return predict(triple(*depths, **codecs), work).memory.total

  for depths in itertools.combinations_with_replacement(range(4), 3):
    for place in range(3):
      finer = list(depths)
      finer[place] += 1
      if finer == sorted(finer) and finer[2] < 4 and depths[2]:
        assert total(finer) <= total(depths), (depths, finer)


@both_ways
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("k", [1, 4])
def test_best_partition_is_never_slower_than_a_named_scheme(k, overlap, reuse):
  work = of(20e9, k)
  everything = [predict(part, work, overlap=overlap) for part in SPACE]
  for cap in (1e9, 6e9, 30e9, CAP, 400e9):
    best = zero.best(everything, cap, reuse)
    schemes = [
      predict(named(s, LEVELS), work, overlap=overlap) for s in SCHEMES
    ]
    fastest = zero.best(schemes, cap, reuse)
    assert best.memory.total <= cap
    if reuse:
      assert best.seconds <= fastest.seconds * (1 + 1e-5)
    else:
      assert best.direct_seconds <= fastest.direct_seconds * (1 + 1e-5)
  assert zero.best(everything, 1e6, reuse) is None


@pytest.mark.parametrize(
  ("gradient_bytes", "billions", "after"),
  # Above 50B, float32 gradients across nodes cost more than weights inside.
  [(2, 50.0, (1, 3, 3)), (4, 41.8, (2, 2, 3))],
)
def test_best_triple_changes_at_50b(gradient_bytes, billions, after):
  """Both triples fit equally: weights over pairs, or gradients over nodes."""
  for factor, expected in ((0.995, (1, 2, 3)), (1.005, after)):
    work = of(factor * billions * 1e9, 8, gradient_bytes=gradient_bytes)
    best = zero.best(
      [predict(part, work) for part in partitions.enumerate_partitions(LEVELS)],
      CAP
    ).partition
    assert (best.weights, best.gradients, best.optimizer) == expected


@both_ways
def test_front_dominates_every_partition(reuse):
  everything = [predict(part, of(20e9, 4)) for part in SPACE]
  front = zero.pareto_front(everything, CAP, reuse)
  key = "seconds" if reuse else "direct_seconds"
  times = [getattr(p, key) for p in front]
  sizes = [p.memory.total for p in front]
  assert times == sorted(times)
  assert sizes == sorted(sizes, reverse=True)
  assert len(front) > 3
  for p in everything:
    if p.memory.total <= CAP:
      assert any(
        f.memory.total <= p.memory.total
        and getattr(f, key) <= getattr(p, key) * (1 + 1e-5)
        for f in front
      )


@both_ways
def test_front_of_one_size_holds_for_all_sizes(reuse):
  work = of(2000 * PAPER.parameters, 4)
  triples = list(partitions.enumerate_partitions(LEVELS))
  front = zero.pareto_front(
    [predict(t, work) for t in triples], math.inf, reuse
  )
  ends = [zero.largest_model(p.partition, work, CAP) for p in front]
  assert ends == sorted(ends)
  for low, high, p in zip([0, *ends], ends, front, strict=False):
    size = (low + high) // 2 // PAPER.parameters * PAPER.parameters
    middle = [predict(t, of(size, 4)) for t in triples]
    assert size > low
    assert zero.best(middle, CAP, reuse).partition == p.partition


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: zero.Workload(-1, 1, 1), "parameters=-1 must be positive"),
    (lambda: zero.Workload(1, 1, 1, weight_bytes=3), "weight_bytes=3 must be"),
    (lambda: zero.machine(clusters.FRONTIER, LEVELS[:2], flops=1,
                          memory_bytes=1), "48 x 4 ranks do not fit"),
    (lambda: zero.machine(clusters.FRONTIER, LEVELS, flops=0, memory_bytes=1),
     "flops=0 must be positive"),
    (lambda: zero.largest_model(triple(), PAPER, 10), "one parameter per"),
  ],
)
def test_invalid_number_is_named(call, message):
  with pytest.raises(ValueError, match=message):
    call()
