"""Order of a layer in nano-batches: that which the planner times."""

import types

import numpy as np
import pytest

from caatnet.models.lm import pieces
from parallel.plans.nanobatches import nanobatch
from parallel.plans.nanobatches.nanobatch import Costs, Reduction
from parallel.plans.nanobatches.nanobatch_timing import (
  NanoOperation,
  step_seconds,
)

# Tokens, and times of attention, MLP and reduction, of up to four pieces.
SIZES = (30, 50, 20, 40)
TIMES = {"attention": 3e-6, "mlp": 5e-6, "sum": 4e-6}


class Recorder:
  """Executor's operations in their order, as those of the planner's timing."""

  def __init__(self, sizes):
    self.sizes, self.made, self.ordered = sizes, [], []

  def record(self, kind, resource, piece, parents):
    start = sum(self.sizes[:piece])
    size = self.sizes[piece]
    self.made.append(NanoOperation(
      kind, resource, start, start + size,
      TIMES["sum" if "sum" in kind else kind] * size, parents,
    ))

  def after(self, tree, results):
    self.ordered.append(tree)
    return tree, results

  def sum(self, update, sync):
    """Records the reduction of a piece's update."""
    piece, half = update
    assert sync == f"policy of {half}"
    pending = not any(o.kind == half for o in self.made)
    kind = f"{'pending ' if pending else ''}sum of {half}"
    self.record(kind, "network", piece, () if pending else (half,))
    return kind

  def half(self, name):
    def columns(x, state, mix):
      self.record(name, "compute", mix, tuple(x.sums))
      cache, index = state
      operand = types.SimpleNamespace(update=(mix, name))
      return Stream(), operand, (cache, index)

    return pieces.Sublayer(name, columns, lambda y: y.update)


class Stream:
  """Stream of a piece: the reductions that it waits for."""

  def __init__(self, sums=()):
    self.sums = sums

  def __add__(self, kind):
    return Stream((*self.sums, kind))

  def resolved(self):
    return self


def executed(sizes, pending=True):
  """Operations of one layer, after another one if ``pending``."""
  recorder = Recorder(sizes)
  last = len(sizes) - 1
  xs, left, (_, index) = pieces._layer(
    [recorder.half(name) for name in ("attention", "mlp")],
    ([Stream() for _ in sizes], (last, "mlp") if pending else None, (None, 6)),
    range(len(sizes)), ("policy of attention", "policy of mlp"), recorder,
  )
  assert (left, index) == ((last, "mlp"), 7)
  # Each stream but the last has the update of its MLP.
  assert [x.sums for x in xs] == [("sum of mlp",)] * last + [()]
  return recorder.made


@pytest.mark.parametrize("num_pieces", [2, 3, 4])
@pytest.mark.parametrize("interference", [0.0, 0.3, 1.0])
def test_planner_times_the_operations_of_the_executor(num_pieces, interference):
  sizes = SIZES[:num_pieces]
  counts = np.arange(sum(sizes) + 1)
  costs = {
    layers: Costs(
      "m", layers, TIMES["attention"] * counts, TIMES["mlp"] * counts,
      {Reduction(): TIMES["sum"] * counts},
    ) for layers in (1, 2)
  }
  first, both = (
    nanobatch.step_seconds(costs[n], Reduction(), sizes, interference)
    for n in (1, 2)
  )
  assert step_seconds(executed(sizes), 1, interference) == pytest.approx(
    both - first
  )
  # The last reduction follows the scan.
  alone = step_seconds(executed(sizes, pending=False), 1, interference)
  assert alone + TIMES["sum"] * sizes[-1] == pytest.approx(first)


def test_row_products_follow_the_end_of_the_reduction_before():
  """The operand of the product waits for the reduction."""
  recorder = Recorder(SIZES)
  pieces._layer(
    [recorder.half("attention"), recorder.half("mlp")],
    ([Stream() for _ in SIZES], None, (None, 0)), range(4),
    ("policy of attention", "policy of mlp"), recorder,
  )
  waiting = [x for x in recorder.ordered if not isinstance(x, Stream)]
  assert [x.update for x in waiting] == [
    (i, half) for half in ("attention", "mlp") for i in range(4)
  ]


def test_layer_has_the_order_of_the_planner():
  made = executed(SIZES[:3])

  def of(resource):
    return [
      (o.kind, SIZES.index(o.stop - o.start)) for o in made
      if o.resource == resource
    ]

  assert of("compute") == [
    *(("attention", i) for i in range(3)), *(("mlp", i) for i in range(3)),
  ]
  assert of("network") == [
    ("pending sum of mlp", 2), *(("sum of attention", i) for i in range(3)),
    ("sum of mlp", 0), ("sum of mlp", 1),
  ]
  waits = [o.parents for o in made if o.resource == "compute"]
  assert waits == [
    (), (), ("pending sum of mlp",), *([("sum of attention",)] * 3),
  ]
