"""Search space of the planner: keys, texts, and boundaries of constraints."""

import dataclasses
import itertools

import numpy as np
import pytest

from parallel.plans.outer.cost import OuterLoopConfig
from parallel.plans.pipeline import builders
from parallel.plans.planner import space
from parallel.plans.planner.message_costs import Grid
from parallel.plans.planner.space import Choices, Configuration
from parallel.plans.workload import TrainingStep, Transformer

MODEL = Transformer(512, 256, num_layers=8, num_heads=8, num_kv_heads=4,
                    ffn_width=512)
STEP = TrainingStep(MODEL, 64, 128)
CHOICES = Choices(max_microbatches=8)

PLAIN = {
  "parallel.stage": 1, "parallel.data": 2, "parallel.tensor": 2,
  "train.accumulation": 4, "zero.scheme": "zero1",
  "memory.moments": "pinned_host",
  "sync.route": "one_shot", "model.remat": "full",
}
PIPELINE = {"pipeline.schedule": "interleaved_1f1b", "pipeline.chunks": 2,
            "pipeline.keep": "residuals"}


@pytest.mark.parametrize(("changes", "keys"), [
  ({}, {}),
  ({"stages": 2}, PIPELINE | {"parallel.stage": 2, "sync.carry": "off"}),
  ({"stages": 2, "route": "psum"},
   PIPELINE | {"parallel.stage": 2, "sync.route": "psum"}),
  ({"p": 0.5}, {"sync.p": 0.5}),
  ({"weight_codec": "int8"}, {"zero.weight_codec": "int8"}),
  ({"gradient_codec": "int4"}, {"zero.gradient_codec": "int4"}),
  ({"data": 8, "outer": OuterLoopConfig("diloco", 4, 30)}, {
    "parallel.worker": 4, "outer.algorithm": "diloco", "outer.sync_every": 30,
    "outer.codec": "float32", "outer.route": "all_gather",
  }),
])
def test_keys_are_those_that_have_an_effect(changes, keys):
  c = dataclasses.replace(Configuration(
    1, 2, 2, 4, "interleaved_1f1b", 2, "zero1", "one_shot", "full", True,
    "residuals",
  ), **changes)
  assert c.keys() == PLAIN | keys
  assert c.overrides().split(" ") == [
    f"{key}={value}" for key, value in c.keys().items()
  ]


@pytest.mark.parametrize(("c", "text", "learned"), [
  (Configuration(1, 2, 4, 8),
   "stage 1 x data 2 x tensor 4, 8 microbatches, ddp, psum, remat none", ""),
  (Configuration(2, 2, 1, 4, "interleaved_1f1b", 2, "zero2", offload=True),
   "stage 2 x data 2 x tensor 1, 4 microbatches, interleaved_1f1b of 2 chunks, "
   "zero2, psum, remat none, inputs kept, offload", ""),
  (Configuration(1, 1, 2, 1, p=0.25, weight_codec="int8",
                 gradient_codec="int4"),
   "stage 1 x data 1 x tensor 2, 1 microbatches, ddp, psum, remat none",
   "p = 0.25, int8 weights, int4 gradients"),
  (Configuration(1, 4, 1, 1, outer=OuterLoopConfig("diloco", 2, 30)),
   "stage 1 x data 4 x tensor 1, 1 microbatches, ddp, psum, remat none",
   str(OuterLoopConfig("diloco", 2, 30))),
], ids=str)
def test_text_lists_what_differs_from_a_plain_run(c, text, learned):
  assert str(c) == text + (f"; {learned}" if learned else "")
  assert c.learned() == learned


def test_ranks_and_examples_divide_the_batch():
  c = Configuration(2, 8, 1, 4)
  assert (c.ranks, c.grid, c.grid.size) == (8, Grid(2, 8, 1), 16)
  assert c.examples(64) == 2
  assert dataclasses.replace(
    c, outer=OuterLoopConfig("diloco", 4, 30)
  ).ranks == 2


def test_all_device_counts_are_factored():
  for n in (1, 6, 8):
    expected = {
      x for x in itertools.product(range(1, n + 1), repeat=3)
      if np.prod(x) == n
    }
    found = [tuple(grid) for grid in space.grids(n)]
    assert sorted(found) == sorted(expected)


def test_every_combination_of_choices_occurs_once():
  """Choices without an effect along an axis of one rank have one value."""
  choices = Choices(
    ("1f1b", "interleaved_1f1b"), (1, 2, 3), ("ddp", "zero1"), keeps=("inputs",)
  )
  found = list(space.all_configurations(8, 4, choices))
  assert len(set(found)) == len(found)
  counts = {
    grid: sum(c.grid == grid for c in found) for grid in space.grids(4)
  }
  each = 3 * 2  # rematerializations, with and without offload
  assert counts == {
    Grid(1, 1, 4): 4 * 2 * each,  # divisors of 8, routes
    Grid(1, 2, 2): 3 * 2 * 2 * each,
    Grid(1, 4, 1): 2 * 2 * each,
    Grid(2, 1, 2): 4 * 3 * 2 * each,  # 1f1b; two and three chunks
    Grid(2, 2, 1): 3 * 3 * 2 * each,
    Grid(4, 1, 1): 4 * 3 * each,
  }
  for c in found:
    assert 8 % (c.data * c.microbatches) == 0
    assert builders.BUILDERS[c.schedule].chunked == (c.chunks > 1)
  assert {c.microbatches for c in space.all_configurations(2, 4, CHOICES)
          if c.data == 4} == {1}  # fewer examples than ranks: refused later
  kept = dataclasses.replace(choices, offload=False, keeps=space.KEEPS)
  keeps = {(c.stages > 1, c.keep) for c in space.all_configurations(8, 2, kept)}
  assert keeps == {(False, "inputs"), (True, "inputs"), (True, "residuals")}
  assert not any(c.offload for c in space.all_configurations(8, 2, kept))


@pytest.mark.parametrize(
  ("c", "expected"),
  [
    (Configuration(1, 8, 1, 8), None),
    (
      Configuration(1, 1, 1, 16),
      ("microbatches", "microbatches=16 are more than the limit, 8"),
    ),
    (
      Configuration(1, 3, 1, 1),
      ("batch", "a batch of 64 is not a multiple of data=3 x microbatches=1"),
    ),
    (
      Configuration(1, 16, 1, 8),
      ("batch", "a batch of 64 is not a multiple of data=16 x microbatches=8"),
    ),
    (Configuration(1, 1, 4, 1), None),
    (Configuration(1, 1, 3, 1), ("tensor", "tensor=3 does not divide 8 heads")),
    (
      Configuration(1, 1, 8, 1),
      ("tensor", "tensor=8 does not divide 4 key/value heads"),
    ),
    (Configuration(8, 1, 1, 8), None),
    (Configuration(4, 1, 1, 8, "interleaved_1f1b", 2), None),
    (
      Configuration(16, 1, 1, 8),
      ("layers", "stages=16 x chunks=1 are more than 8 layers"),
    ),
    (
      Configuration(8, 1, 1, 8, "interleaved_1f1b", 2),
      ("layers", "stages=8 x chunks=2 are more than 8 layers"),
    ),
    (Configuration(2, 1, 1, 2, "zb_h1", keep="residuals"), None),
    (Configuration(2, 2, 1, 2, "zb_h1", keep="inputs", scheme="zero1"), None),
    (Configuration(2, 2, 1, 2, keep="residuals", scheme="zero1"), None),
    *(
      (
        Configuration(2, 2, 1, 2, "zb_h1", keep="residuals", **changes),
        (
          "keep",
          "residuals kept for both halves of backwards need remat='none' and "
          f"scheme='ddp', not {remat!r} and {scheme!r}",
        ),
      )
      for changes, remat, scheme in (
        ({"remat": "full"}, "full", "ddp"),
        ({"scheme": "zero1"}, "none", "zero1"),
      )
    ),
    (
      Configuration(1, 1, 1, 1, scheme="zero1"),
      ("scheme", "scheme='zero1' shards nothing over data=1 ranks"),
    ),
    (
      Configuration(
        1, 4, 1, 1, scheme="zero1", outer=OuterLoopConfig("diloco", 4, 30)
      ),
      ("scheme", "scheme='zero1' shards nothing over data=1 ranks"),
    ),
  ],
  ids=str,
)
def test_constraints_name_their_values(c, expected):
  assert space.violated_constraint(c, STEP, CHOICES) == expected


def test_number_of_microbatches_has_a_default_maximum():
  step = dataclasses.replace(STEP, batch_size=512)
  for m, refused in ((256, False), (512, True)):
    found = space.violated_constraint(
      Configuration(1, 1, 1, m), step, Choices()
    )
    assert (found is not None) == refused


def test_channels_of_the_mlp_are_divided():
  step = dataclasses.replace(
    STEP, model=dataclasses.replace(MODEL, ffn_width=510)
  )
  assert space.violated_constraint(
    Configuration(1, 1, 4, 1), step, CHOICES
  ) == (
    "tensor", "tensor=4 does not divide 510 channels of the MLP"
  )
  assert space.violated_constraint(
    Configuration(1, 1, 2, 1), step, CHOICES
  ) is None


def test_schedules_state_their_own_constraints():
  c = Configuration(4, 1, 1, 6, "interleaved_1f1b", 2)
  name, reason = space.violated_constraint(
    c, dataclasses.replace(STEP, batch_size=6), CHOICES
  )
  with pytest.raises(ValueError) as error:
    builders.build("interleaved_1f1b", 4, 6, 2)
  assert (name, reason) == ("schedule", str(error.value))


@pytest.mark.parametrize("key", [
  "schedules", "schemes", "routes", "remats", "keeps",
])
def test_unknown_choices_are_refused(key):
  with pytest.raises(ValueError, match=f"{key}='other' must be one of"):
    Choices(**{key: ("other",)})
