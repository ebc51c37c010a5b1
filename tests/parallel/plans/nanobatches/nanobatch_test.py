"""Properties of the planner of nano-batches."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from parallel.plans.nanobatches import nanobatch
from parallel.plans.nanobatches.nanobatch import Costs, NanobatchPlan, Reduction
from parallel.plans.nanobatches.nanobatch_timing import (
  NanoOperation,
  step_seconds,
)

WAYS = (Reduction(), Reduction("one_shot"), Reduction("all_reduce", 0.5, 8))


def drawn(rng, tokens, ways=1, attend=True):
  """Costs that are not monotone, with reductions that can be free."""
  def times(low, high):
    scale = np.exp(rng.uniform(np.log(low), np.log(high)))
    each = rng.uniform(0, 1) + np.arange(tokens + 1) / tokens
    each *= scale * rng.uniform(0.5, 1.5, tokens + 1)
    each[0] = 0
    return each

  return Costs(
    "drawn", int(rng.integers(1, 6)), times(1e-4, 1e-3), times(1e-4, 1e-3),
    {way: times(1e-5, 3e-3) * rng.choice([0, 1, 1]) for way in WAYS[:ways]},
    times(1e-6, 1e-4).cumsum() if attend else None, rng.uniform(0, 1e-4),
  )


def reference(costs, way, sizes, interference):
  """Time of a step by the simulator of operations, layer by layer."""
  count, total = len(sizes), 0.0
  ends = list(itertools.accumulate(sizes))
  ranges = list(zip([0, *ends], ends, strict=False))

  def attention(j):
    start, stop = ranges[j]
    found = costs.attention[sizes[j]]
    if costs.attend is not None:
      found += costs.attend[stop] - costs.attend[start]
    return found

  sums = costs.reductions[way]
  for layer in range(costs.num_layers):
    made = [NanoOperation(
      "pending", "network", *ranges[-1], sums[sizes[-1]] if layer else 0.0
    )]
    for kind, parents, cost in (
      ("attention", ("pending",), attention),
      ("mlp", ("sum_1",), lambda j: costs.mlp[sizes[j]]),
    ):
      number = "1" if kind == "attention" else "2"
      for j in range(count):
        made.append(
          NanoOperation(kind, "compute", *ranges[j], cost(j), parents)
        )
      for j in range(count if number == "1" else count - 1):
        made.append(NanoOperation(
          f"sum_{number}", "network", *ranges[j], sums[sizes[j]], (kind,)
        ))
    total += step_seconds(made, 1, interference)
  return costs.fixed_s + total + sums[sizes[-1]]


def single_seconds(costs, way, tokens):
  """Time of one batch: a sum."""
  whole = costs.attention[tokens] + costs.mlp[tokens]
  if costs.attend is not None:
    whole += costs.attend[tokens]
  whole += 2 * costs.reductions[way][tokens]
  return costs.fixed_s + costs.num_layers * whole


def compositions(tokens, max_pieces):
  """Yields the sizes of 2, 3, ... pieces, ``[plans, pieces]``."""
  for cuts in range(1, max_pieces):
    chosen = [*itertools.combinations(range(1, tokens), cuts)]
    yield np.diff(chosen, prepend=0, append=tokens)


@pytest.mark.parametrize("seed", range(25))
def test_plan_equals_brute_force_over_pieces_order_and_reductions(seed):
  rng = np.random.default_rng(seed)
  tokens, interference = int(rng.integers(1, 9)), rng.choice([0, 0.3, 1])
  costs = drawn(rng, tokens, 3, attend=bool(seed % 2))
  found = nanobatch.plan(
    costs, tokens, granularity=1, interference=interference
  )
  times = {
    (sizes, way): reference(costs, way, sizes, interference)
    for pieces in range(1, 5)
    for sizes in itertools.product(range(1, tokens + 1), repeat=pieces)
    if sum(sizes) == tokens
    for way in costs.reductions
  }
  assert found.step_s == pytest.approx(min(times.values()), rel=1e-8)
  assert times[found.sizes, found.reduction] == pytest.approx(found.step_s)
  # The number of candidates is that of ordered compositions.
  assert found.considered == 3 * sum(
    math.comb(tokens - 1, k) for k in range(4)
  )
  assert found.simulated <= found.considered


def test_plan_is_never_slower_than_one_batch_for_5000_profiles():
  rng = np.random.default_rng(0)
  pieces = []
  # Tables are drawn once and shuffled: the draws are most of the time.
  costs = [drawn(rng, 4096, 2) for _ in range(50)]
  for i in range(5000):
    tokens = int(np.exp(rng.uniform(0, np.log(4097))))
    drawn_costs = costs[i % 50]
    way = WAYS[i % 2]
    mine = dataclasses.replace(
      drawn_costs, attention=drawn_costs.attention * rng.uniform(0.1, 10),
      reductions={way: drawn_costs.reductions[way]},
    )
    plan = nanobatch.plan(
      mine, tokens, max_pieces=3, granularity=math.ceil(tokens / 10),
      interference=rng.choice([0, 0.3, 1]),
    )
    single = single_seconds(mine, way, tokens)
    assert plan.single_s == pytest.approx(single)
    assert plan.step_s <= single * (1 + 1e-12)
    assert sum(plan.sizes) == tokens
    pieces.append(len(plan.sizes))
  # Neither answer is trivial.
  assert 0.1 < np.mean(np.array(pieces) == 1) < 0.9


@pytest.mark.parametrize("seed", range(5))
def test_predicted_time_is_that_of_the_simulator(seed):
  rng = np.random.default_rng(seed)
  costs = drawn(rng, 200)
  for interference in (0, 0.3, 1):
    sizes = [50, 20, 100, 30][:1 + seed % 4]
    assert nanobatch.step_seconds(
      costs, WAYS[0], sizes, interference
    ) == pytest.approx(reference(costs, WAYS[0], sizes, interference))


@pytest.mark.parametrize("seed", range(20))
def test_bounds_are_below_the_times_of_all_plans(seed):
  """Otherwise the search would discard the fastest plan."""
  rng = np.random.default_rng(seed)
  costs = drawn(rng, 12)
  for sizes in compositions(12, 4):
    for layers, interference in itertools.product((1, 2, 9), (0, 0.3, 1)):
      own = dataclasses.replace(costs, num_layers=layers)
      bounds = nanobatch._lower_bounds(own, WAYS[0], sizes, interference)
      times = nanobatch.step_seconds(own, WAYS[0], sizes, interference)
      assert (bounds <= times).all()


@pytest.mark.parametrize("seed", range(10))
def test_no_plan_below_the_limit_is_dropped_with_its_first_pieces(seed):
  rng = np.random.default_rng(seed)
  costs, interference = drawn(rng, 12, attend=seed % 2), rng.choice([0, 0.3, 1])
  dropped = 0
  for sizes in compositions(12, 5):
    bounds = nanobatch._lower_bounds(costs, WAYS[0], sizes, interference)
    limit = np.quantile(bounds, 0.2)
    kept = nanobatch._candidates(
      costs, WAYS[0], np.arange(13), sizes.shape[1], interference, limit
    ).tolist()
    assert kept == [x for x in sizes.tolist() if x in kept]  # in their order
    assert all(x in kept for x in sizes[bounds < limit].tolist())
    dropped += len(sizes) - len(kept)
  assert dropped > 100


def test_bounds_are_at_least_the_longest_path_of_a_layer():
  """Attention up to a piece, its reduction, and the MLP from it on."""
  longest = 0
  for seed in range(5):
    costs = drawn(np.random.default_rng(seed), 12)
    costs = dataclasses.replace(costs, num_layers=1, fixed_s=0.0)
    for sizes in compositions(12, 4):
      bounds = nanobatch._lower_bounds(costs, WAYS[0], sizes, 0.0)
      for bound, attention, mlp, sums in zip(
        bounds, *nanobatch._operation_seconds(costs, WAYS[0], sizes),
        strict=True
      ):
        path = max(
          sum(attention[: j + 1]) + sums[j] + sum(mlp[j:])
          for j in range(len(sums))
        )
        busy = max(sum(attention) + sum(mlp), 2 * sum(sums) - sums[-1])
        assert bound == pytest.approx(max(path, busy) + sums[-1])
        longest += path > busy
  assert longest  # a path is the larger bound at least once


@pytest.mark.parametrize("seed", range(3))
def test_bounds_are_exact_at_full_interference(seed):
  """Neither resource is ever idle then: times are sums."""
  costs = drawn(np.random.default_rng(seed), 12)
  for sizes in compositions(12, 4):
    np.testing.assert_allclose(
      nanobatch._lower_bounds(costs, WAYS[0], sizes, 1.0),
      nanobatch.step_seconds(costs, WAYS[0], sizes, 1.0), rtol=2e-9,
    )


@pytest.mark.parametrize(("tokens", "steps"), [(64, 64), (65, 33), (4096, 64)])
def test_default_grid_has_at_most_64_steps(tokens, steps):
  found = nanobatch.plan(linear(0.3e-6), tokens)
  assert found.considered == sum(math.comb(steps - 1, k) for k in range(4))


def test_no_overlap_is_gained_at_full_interference():
  """Pieces that run one after another take as long."""
  costs = drawn(np.random.default_rng(3), 100)
  sizes = [40, 60]
  alone = nanobatch.step_seconds(costs, WAYS[0], sizes, 1.0)
  layer = sum(
    costs.attention[n] + costs.mlp[n] + 2 * costs.reductions[WAYS[0]][n]
    for n in sizes
  ) + costs.attend[100]
  assert alone == pytest.approx(costs.fixed_s + costs.num_layers * layer)


def linear(per_token, weights=100e-6, latency=20e-6):
  """Costs of a device that reads its weights again for each piece."""
  tokens = np.arange(4097)
  attention = np.maximum(weights, 0.3e-6 * tokens) * (tokens > 0)
  sums = (latency + per_token * tokens) * (tokens > 0)
  return Costs("linear", 10, attention, 2 * attention, {WAYS[0]: sums})


def test_few_tokens_are_one_batch_and_many_are_cut():
  costs = linear(0.3e-6)
  sizes = [nanobatch.plan(costs, n).sizes for n in (1, 2, 64, 256, 4096)]
  assert sizes[:4] == [(1,), (2,), (64,), (256,)]
  assert len(sizes[4]) > 1


def test_step_outside_of_layers_and_optimum_are_zero_by_default():
  costs = linear(0.3e-6)
  found = nanobatch.plan(costs, 64)
  layer = costs.attention[64] + costs.mlp[64] + 2 * costs.reductions[WAYS[0]][
    64]
  assert found.step_s == pytest.approx(10 * layer)
  assert found.optimum_s == 0
  assert NanobatchPlan((1,), "m", WAYS[0], 1.0, 1.0).optimum_s == 0


def test_bounds_exclude_most_plans():
  few, many = (nanobatch.plan(linear(0.3e-6), n) for n in (64, 1000))
  assert (few.simulated, few.considered) == (1, 41_728)
  six = nanobatch.plan(linear(0.5e-6, 20e-6, 5e-6), 513, max_pieces=6)
  assert six.simulated < six.considered / 1000 == 4216.423
  assert many.simulated < many.considered / 100


def test_nothing_is_cut_without_reductions_or_with_full_interference():
  assert nanobatch.plan(linear(0.0, latency=0.0), 4096).sizes == (4096,)
  assert nanobatch.plan(linear(0.3e-6), 4096, interference=1).sizes == (4096,)


def test_sizes_are_multiples_of_the_granularity_except_for_the_last():
  plan = nanobatch.plan(linear(0.3e-6), 1000, granularity=128)
  assert len(plan.sizes) > 1
  assert all(size % 128 == 0 for size in plan.sizes[:-1])
  assert sum(plan.sizes) == 1000
  assert len(nanobatch.plan(linear(0.3e-6), 4096, max_pieces=2).sizes) == 2
  # Few tokens have few plans, however many pieces are allowed.
  assert nanobatch.plan(linear(1e-6), 8, max_pieces=2**31 - 1).considered < 999


def test_gain_is_relative_to_one_batch_and_a_plan_fits_its_step():
  plan = NanobatchPlan((3, 1, 2), "m", WAYS[0], 1.0, 1.5)
  assert plan.gain == 1.5
  assert (plan.considered, plan.simulated) == (1, 1)
  plan.check("m", 6)


@pytest.mark.parametrize(("call", "message"), [
  (lambda: nanobatch.plan(linear(1e-6), 0), "num_tokens=0 must be at least"),
  (lambda: nanobatch.plan(linear(1e-6), 5000), "must be at most 4096, the"),
  (lambda: nanobatch.plan(linear(1e-6), 8, max_pieces=0), "max_pieces=0"),
  (lambda: nanobatch.plan(linear(1e-6), 4096, max_pieces=2**31 - 1),
   "max_pieces=2147483647 leads to more than 10,000,000 plans of 4096"),
  (lambda: nanobatch.plan(linear(1e-6), 8, granularity=0), "granularity=0"),
  (lambda: nanobatch.plan(linear(1e-6), 8, interference=2), "interference=2"),
  (lambda: NanobatchPlan((4, 0), "m", WAYS[0], 1.0, 1.0), r"sizes=\(4, 0\)"),
  (lambda: NanobatchPlan((4,), "m", WAYS[0], 1.0, 1.0).check("n", 4),
   "the plan is for the model m and cannot run n"),
  (lambda: NanobatchPlan((4,), "m", WAYS[0], 1.0, 1.0).check("m", 5),
   "the plan is for 4 tokens and cannot run 5"),
  (lambda: dataclasses.replace(linear(1e-6), reductions={}), "one reduction"),
  (lambda: dataclasses.replace(linear(1e-6), num_layers=0), "num_layers=0"),
  (lambda: dataclasses.replace(linear(1e-6), mlp=np.zeros(4097)),
   "mlp of 1 tokens takes 0.0 s"),
  (lambda: dataclasses.replace(linear(1e-6), mlp=np.ones(4097)),
   "mlp of 0 tokens takes 1.0 s"),
  (lambda: dataclasses.replace(linear(1e-6), attention=np.zeros(9)),
   "attention has times up to 8 tokens; it must have times up to 4096"),
  (lambda: dataclasses.replace(linear(1e-6), attend=np.full(4097, np.nan)),
   "attend of 0 tokens takes nan s"),
  (lambda: dataclasses.replace(
    linear(1e-6), reductions={WAYS[0]: -np.arange(4097.0)}
  ), "of 1 tokens takes -1.0 s"),
])
def test_invalid_arguments_are_one_line(call, message):
  with pytest.raises(ValueError, match=message) as error:
    call()
  assert "\n" not in str(error.value)
