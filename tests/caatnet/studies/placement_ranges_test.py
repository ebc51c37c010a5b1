"""Speeds over the ranges of rates, and rates that give a speed."""

import importlib

import pytest

from caatnet.studies.placement import ranges, report, study
from caatnet.studies.planner.study import training_step
from parallel.plans import placement
from parallel.plans.hardware.devices import DEVICES
from parallel.plans.hardware.tiers import HOSTS
from parallel.plans.placement import problem

CONFIG = importlib.import_module("configs.memory.12b_32k")
STEP = training_step(CONFIG.get_config().to_dict())
CARDS, DRAM = HOSTS["two-cxl"], HOSTS["large-dram"]


def made(seq_len=4096, on=CARDS):
  return problem.training_step(
    STEP.model, batch_size=1, seq_len=seq_len, device=DEVICES["h200"], host=on
  )


def test_needed_rate_gives_the_speed():
  rows = ranges.needed(made, CARDS, DRAM, (0.9, 1.0), (4096, 8192))
  assert [(r["seq_len"], r["target"]) for r in rows] == [
    (4096, 0.9), (4096, 1.0), (8192, 0.9), (8192, 1.0)
  ]
  for row in rows:
    speeds = [
      ranges.relative(
        made(row["seq_len"], on=ranges._at(CARDS, "cxl", x * row["rate"])),
        made(row["seq_len"], on=DRAM), "latency_first",
      ) for x in (1, 0.99)
    ]
    assert speeds[0] >= row["target"] > speeds[1]
    assert speeds[0] == pytest.approx(row["target"], rel=1e-6)


@pytest.mark.parametrize(("host", "target"), [
  (CARDS, 9.0),  # not reached at any rate
  (DRAM, 0.5),  # no cards
])
def test_no_rate_gives_an_impossible_speed(host, target):
  (row,) = ranges.needed(made, host, DRAM, (target,), (4096,))
  assert row["rate"] is None


def test_speeds_of_a_context_have_both_ends_of_each_range():
  rows = ranges.scanned(
    made, CARDS, DRAM, ("interleave", "latency_first"), (4096, 8192)
  )
  assert [row["changed"] for row in rows] == 2 * [
    "nothing", "dram low", "cxl low"
  ]
  for row in rows:
    first, even = row["speeds"]["latency_first"], row["speeds"]["interleave"]
    assert row["gain"] == first / even - 1
  # Slower DRAM slows the baseline, too.
  assert rows[1]["speeds"]["interleave"] > rows[0]["speeds"]["interleave"]
  assert rows[2]["speeds"]["interleave"] < rows[0]["speeds"]["interleave"]
  (alone,) = ranges.scanned(made, DRAM, DRAM, ("dram_only",), (4096,))[:1]
  assert alone["speeds"] == {"dram_only": 1}
  assert alone["gain"] is None


def test_update_and_copies_on_one_tier_are_bytes_over_its_rate():
  rows = {
    (row["changed"], row["tier"]): row for row in ranges.alone(made, CARDS)
  }
  count = STEP.model.num_params
  # The CPU reads 14 and writes 14 bytes, and the device reads 2 staged ones.
  dram, card = rows["nothing", "dram"], rows["nothing", "cxl0"]
  assert dram["update_s"] == pytest.approx(30 * count / 307.2e9)
  rate = CARDS.tiers[1].read.value
  assert card["update_s"] == pytest.approx(16 * count / rate)  # duplex
  assert card["slower"] == card["update_s"] / dram["update_s"]
  both = rows["cxl low", "cxl0, cxl1"]
  assert both["update_s"] == pytest.approx(16 * count / 56e9)
  # Copies cross the link to the device, too.
  link = CARDS.device_link.read.value
  assert dram["to_device"] == pytest.approx(link)
  assert both["to_device"] == pytest.approx(56e9)
  assert rows["cxl low", "cxl1"]["from_device"] == pytest.approx(28e9)
  # Copies to the device read the tier, those from it write the tier.
  card = CARDS.tiers[1]
  slow = card.model_copy(update={
    "write": card.write.model_copy(update=dict.fromkeys(
      ("value", "low", "high"), card.read.value / 7
    ))
  })
  host = CARDS.model_copy(update={"tiers": (CARDS.tiers[0], slow)})
  row = next(x for x in ranges.alone(made, host) if x["tier"] == slow.name)
  assert row["to_device"] == pytest.approx(7 * row["from_device"])


def test_each_tier_has_one_row():
  # DRAM and one card.
  one = CARDS.model_copy(update={"tiers": CARDS.tiers[:2]})
  for host, count in ((one, 2), (CARDS, 4)):  # two cards: also both
    rows = ranges.alone(made, host)
    tiers = [row["tier"] for row in rows if row["changed"] == "nothing"]
    assert len(set(tiers)) == len(tiers) == count


def test_optimum_lists_where_each_tensor_is():
  rows = study._optimum(made())["tensors"]
  assert {row["tensor"] for row in rows} >= {
    "weights", "gradients", "master weights", "first moments", "second moments",
  }
  for row in rows:
    assert 0 < sum(row["tiers"].values()) < 1 + 1e-6
    assert row["bytes"] > 0


@pytest.mark.parametrize(("fits", "most", "low", "high"), [
  (1000, 9999, 985, 1000), (37, 9999, 37, 37), (9999, 700, 690, 700),
  (2, 2, 2, 2), (0, 9, None, None),
])
def test_the_largest_number_that_fits_is_found_within_a_64th(
  fits, most, low, high
):
  found = study._most(lambda n: n <= fits, most)
  assert found is high if high is None else low <= found <= high


def test_memory_over_a_step_starts_and_ends_with_what_stays():
  step = made(8192)
  best = placement.place(step, "optimum")
  found = placement.cost(step, best)
  start, *middle, end = study._timeline(step, best, found)
  assert start["bytes"] == end["bytes"]
  # Weights in two bytes; master weights and two moments in four.
  assert sum(start["bytes"].values()) == pytest.approx(
    14 * STEP.model.num_params
  )
  assert end["seconds"] == pytest.approx(found.step_s)
  for row, instant in zip(middle, problem.INSTANTS, strict=True):
    held = found.occupied[instant] | {problem.DEVICE: (
      found.occupied[instant][problem.DEVICE] + step.reserved[instant]
    )}
    assert row["bytes"] == pytest.approx(held)
  assert middle[1]["seconds"] == pytest.approx(
    found.seconds["forward"] + found.seconds["backward"]
  )


def test_a_policy_that_does_not_fit_names_what_would():
  row = {"policy": "p", "error": "dram lacks 2.0 GB", "longest": 4096,
         "largest": 2_500_000_000}
  for change, words in (
    ({}, "4,096 tokens of context or a model of 2.5B parameters"),
    ({"longest": "none"}, "a model of 2.5B parameters"),
    ({"longest": "none", "largest": "none"}, "nothing"),
  ):
    assert report._unfit(row | change) == (
      f"p: dram lacks 2.0 GB; what would fit: {words}"
    )
