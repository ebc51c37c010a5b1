"""Properties of datacentre plans: arithmetic, monotonicity and errors."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from caatnet.studies.datacentre import (
  closed_forms,
  expressions,
  knobs,
  uncertainty,
)
from caatnet.studies.datacentre.closed_forms import plan
from caatnet.studies.datacentre.knobs import KNOBS, Quantity
from parallel.plans.hardware import sites
from parallel.plans.pipeline import cost
from parallel.plans.pipeline.builders import PipelineSize
from parallel.plans.workload import Transformer

LLAMA = {
  **knobs.of_rack("h100", "bf16"), "accelerators": 16_384,
  "parameters": 405e9, "batch_tokens": 16e6, "layers": 126,
}


# Computed by hand from the inputs that the module lists.
GOLDEN = [
  ("racks", 23_300, 0), ("accelerators", 1_677_600, 0),
  ("it_w", 23_300 * 154.5e3, 1e-9), ("facility_w", 4.31982e9, 1e-9),
  ("speed", 1.6776e21, 1e-12), ("flops", 3e29, 1e-12),
  ("days", 2069.8, 1e-4), ("state", 800e12, 1e-12), ("state_share", 26e-4, .02),
  ("largest", 21.0e12, 1e-3), ("ratio_allowed", 3.527, 1e-3),
  ("step_s", 10.73, 1e-3), ("cross_bits", 74.56e12, 1e-3),
  ("in_flight", 0.559e12, 1e-3), ("rtt_s", 0.06, 1e-12),
  ("stages", 120, 0), ("replicas", 194, 0),
  ("microbatches", 37, 0), ("bubble", 119 / 156, 1e-12),
  ("gradient_bytes", 11.574e9, 1e-3), ("data_bits", 17.17e9, 1e-3),
  ("tokens_of_tenth", 1071 * 8192 * 194, 1e-12), ("mtbf_s", 108.75, 1e-3),
  ("memory", 312.03e15, 1e-4), ("energy_year_wh", 37.84e12, 1e-4),
  ("energy_year_cost", 1.892e9, 1e-3), ("layout_share", 0.2370, 1e-3),
  # 618 in repair: 24 h of 326 of 419 failures; the standard deviation is 24.9.
  ("spares", 693, 0), ("stage_bits", 168.4e9, 1e-3),
  # 17.17 and 168.4 of 400 Gbit/s, 664.4 of 7,200.
  ("scale_out_share", 0.4640, 1e-3), ("scale_up_share", 0.09228, 1e-3),
  ("links", 4 * 838_800, 0), ("uplink_share", 1 / 64, 0),
  # 42 of the network in 54 days of 16,384.
  ("link_failures_day", 42 / 54 * 1_677_600 / 16_384, 1e-12),
  ("replica_mtbf_s", 21_115, 1e-3), ("replica_goodput", 0.956, 1e-3),
]


@pytest.mark.parametrize(("key", "value", "tolerance"), GOLDEN)
def test_default_plan_equals_the_values_by_hand(key, value, tolerance):
  assert plan()[key] == pytest.approx(value, rel=tolerance)


@pytest.mark.parametrize(("peak", "largest"), [
  (2.5e15, 14.7e12), (5e15, 20.9e12), (10e15, 29.5e12),
])
def test_largest_model_of_half_a_year(peak, largest):
  found = plan({"peak": peak, "days_allowed": 180})["largest"]
  assert found == pytest.approx(largest, rel=5e-3)


@pytest.mark.parametrize(("save_s", "interval", "loss"), [
  (1, 14.7, 0.136), (10, 46.6, 0.429), (80, 131.9, 1.213),
])
def test_checkpoint_interval_and_loss(save_s, interval, loss):
  """First-order loss; where it is above 1, Daly's goodput is near 0."""
  found = plan({"save_rate": 800e12 / 1_677_600 / save_s})
  assert found["save_s"] == pytest.approx(save_s)
  assert found["interval_s"] == pytest.approx(interval, rel=5e-3)
  assert found["loss"] == pytest.approx(loss, rel=5e-3)
  assert 0 < found["goodput"] < 1


def test_goodput_equals_a_simulation_of_failures():
  """Compares failures of a Poisson process with Daly's closed form."""
  found = plan(LLAMA | {"save_rate": 1e7, "restart_s": 300}, "accelerators")
  mtbf, interval = found["mtbf_s"], found["interval_s"]
  rng = np.random.default_rng(0)
  clock, done = 0.0, 0
  while done < 4000:  # intervals of work
    left, wanted = rng.exponential(mtbf), interval + found["save_s"]
    while left < wanted:  # resumes once a restart has succeeded
      clock += left
      while (left := rng.exponential(mtbf)) < 300:
        clock += left
      clock += 300
      left = rng.exponential(mtbf)
    clock, done = clock + wanted, done + 1
  assert done * interval / clock == pytest.approx(found["goodput"], rel=0.01)


RISING = [
  ("budget", "accelerators"), ("budget", "facility_w"), ("pue", "facility_w"),
  ("budget", "largest"), ("days_allowed", "largest"), ("parameters", "days"),
  ("save_rate", "goodput"), ("mtbf_h", "goodput"), ("distance_km", "in_flight"),
  ("gradient_bits", "cross_bits"), ("site_w", "-sites_needed"),
  ("utilisation", "-days"), ("restart_s", "-goodput"), ("chunks", "-bubble"),
  ("batch_tokens", "-bubble"), ("sync_every", "-cross_bits"),
]


@settings(max_examples=40)
@given(st.sampled_from(RISING), st.floats(0, 1), st.floats(0, 1))
def test_results_are_monotonic_in_their_knobs(pair, one, other):
  key, result = pair
  knob = KNOBS[key]
  ends = [knob.low + x * (knob.high - knob.low) for x in sorted((one, other))]
  if knob.whole:
    ends = [float(np.floor(x)) for x in ends]
  first, second = (float(plan({key: x})[result.strip("-")]) for x in ends)
  if result[0] == "-":
    first, second = second, first
  assert first <= second * (1 + 1e-12)


def test_scaling_identities_of_plans():
  base, more = plan(), plan({"parameters": 100e12})
  assert more["days"] == pytest.approx(4 * base["days"])
  assert more["cross_bits"] == pytest.approx(base["cross_bits"])
  few = plan({"sync_every": 100, "gradient_bits": 4})
  assert few["cross_bits"] == pytest.approx(base["cross_bits"] * 4 / 1600)
  assert plan({"site_w": 5e9})["cross_bits"] == 0
  three = plan({"site_w": 1.5e9})
  assert three["sites_needed"] == 3
  assert three["cross_bits"] == pytest.approx(4 / 3 * base["cross_bits"])


def test_ways_to_set_the_size_are_inverses_of_each_other():
  base = plan()
  count = base["accelerators"]
  by_count = plan({"accelerators": count}, "accelerators")
  assert by_count["racks"] == base["racks"]
  assert by_count["budget"] == pytest.approx(100e9, rel=1e-4)
  by_model = plan({"days_allowed": base["days"]}, "model")
  assert by_model["accelerators"] == pytest.approx(count, abs=1)
  found = closed_forms.solve("tokens_per_parameter", "days", 365)
  assert found == pytest.approx(base["ratio_allowed"])
  for key, target, words in (
    ("pue", "dayz", "target='dayz'"), ("pue", "days", "no pue from"),
    ("accelerators", "days", "'accelerators'"),
  ):
    with pytest.raises(ValueError) as error:
      closed_forms.solve(key, target, 365)
    assert words in str(error.value)


@pytest.mark.parametrize("count", [1, 8, 64, 16_384, 1_677_600])
def test_plans_of_all_sizes_are_finite_with_the_fewest_tiers(count):
  found = plan({"accelerators": count}, "accelerators")
  assert found["racks"] == -(-count // 72)
  for key, result in closed_forms.result_specs("accelerators").items():
    assert math.isfinite(found[key]), (key, result)
  assert 2 * 64 ** found["tiers"] >= found["endpoints"]
  assert found["tiers"] == 1 or (
    2 * 64 ** (found["tiers"] - 1) < found["endpoints"]
  )


def test_full_fat_tree_needs_no_further_tier():
  for tiers in (1, 2, 3, 4):
    count = 2 * 64**tiers
    full = plan({"accelerators": count, "site_w": 1e12}, "accelerators")
    assert full["tiers"] == tiers


def test_bytes_and_bubble_equal_those_of_the_cost_models():
  """Uses the project's closed forms, at a size within their range."""
  found = plan(LLAMA | {"chunks": 2}, "accelerators")
  stages, microbatches = int(found["stages"]), int(found["microbatches"])
  assert found["bubble"] == pytest.approx(
    cost.bubble(
      "interleaved_1f1b", PipelineSize(stages, microbatches, 2), 1, 1, 1
    )
  )
  width = float(found["width"])
  model = Transformer(1, int(width), 126, 1, 1, 4 * int(width))
  hop = model.residual_stream_bytes(8192) * width / int(width)
  sent = 2 * microbatches * hop  # forward and back
  assert found["stage_bits"] * found["step_s"] / 8 == pytest.approx(sent)
  layers, t = 126 / stages, 8  # NVLink connects the eight GPUs of a node
  assert found["tensor"] == t
  reduced = 4 * layers * microbatches * hop * 2 * (t - 1) / t
  assert found["tensor_bits"] * found["step_s"] / 8 == pytest.approx(reduced)


@pytest.mark.parametrize("kind", [int, np.int64, np.array])
def test_integers_give_the_results_of_floats(kind):
  """6 * 405e9^2 * 20 exceeds 64 bits."""
  exact = {"parameters": 405_000_000_000, "tokens_per_parameter": 20}
  for size in closed_forms.GIVEN_QUANTITIES:
    expected = plan({k: float(v) for k, v in exact.items()}, size)
    found = plan({k: kind(v) for k, v in exact.items()}, size)
    assert found["days"] > 0
    for key, value in expected.items():
      assert float(found[key]) == value, key


def test_tensor_ranks_fill_a_scale_up_domain_not_a_rack():
  """Four nodes of 8 H100 form a rack, but NVLink connects only a node."""
  rack = knobs.of_rack("h100", "bf16")
  assert (rack["per_rack"], rack["per_domain"]) == (32, 8)
  assert plan({**rack, "parameters": 405e9})["tensor"] == 8
  assert plan()["tensor"] == 72


@pytest.mark.parametrize(("values", "words"), [
  ({"site_w": 1e300}, "site_w=1e+300 must be positive and finite, at most"),
  ({"budget": -1.0}, "budget=-1 must be positive"),
  ({"budget": 1e6}, "must pay for at least one rack"),
  ({"budget": math.inf}, "budget=inf must be"),
  ({"budget": math.nan}, "budget=nan must be"),
  ({"pue": 0.9}, "pue=0.9 must be positive and finite, at least 1"),
  ({"utilisation": 1.2}, "at most 1"),
  ({"site_w": 1.8e5}, "a rack takes 185.4 kW"), ({"rtt_s": 1.0}, "'rtt_s'"),
  ({"money": 1.0}, "knob 'money'"), ({"layers": 2.5}, "must be an integer"),
])
def test_invalid_knob_is_named(values, words):
  with pytest.raises(ValueError) as error:
    plan(values)
  assert words in str(error.value)


def test_sites_are_filled_in_order_of_size():
  used, left = closed_forms.distribute_power(5.0, {"a": 2.0, "b": 4.0})
  assert (used, left) == ({"b": 4.0, "a": 1.0}, 0.0)
  used, left = closed_forms.distribute_power(7.0, {"a": 2.0, "b": 4.0})
  assert (used, left) == ({"b": 4.0, "a": 2.0}, 1.0)
  with pytest.raises(ValueError, match="at least one site"):
    closed_forms.distribute_power(1.0, {})
  with pytest.raises(ValueError, match="site a has 0 W"):
    closed_forms.distribute_power(1.0, {"a": 0.0})


def test_draws_are_plans():
  drawn = uncertainty.draws({"parameters": 10e12}, num_draws=50, seed=3)
  assert set(drawn["parameters"]) == {10e12}  # fixed, not drawn
  assert len(set(drawn["utilisation"])) == 50
  names = set(KNOBS) - {"budget", "accelerators"}
  for i in (0, 49):
    alone = plan({key: float(drawn[key][i]) for key in names})
    for key in closed_forms.result_specs():
      assert drawn[key][i] == pytest.approx(float(alone[key]), rel=1e-12)
  again = uncertainty.draws({"parameters": 10e12}, num_draws=50, seed=3)
  np.testing.assert_array_equal(drawn["days"], again["days"])


RACKS = [("gb200", "bf16"), ("gb200", "fp4"), ("h100", "fp8")]


@pytest.mark.parametrize(("kind", "precision"), RACKS)
def test_draws_are_around_the_plan(kind, precision):
  """Ranges scale with the values of any rack."""
  values = knobs.of_rack(kind, precision) | {"utilisation": 0.2}
  base, drawn = plan(values), uncertainty.draws(values, num_draws=400)
  busy = uncertainty.draws(values | {"utilisation": 0.9}, num_draws=50)
  assert busy["utilisation"].max() <= 1
  for key in ("days", "facility_w", "largest"):
    assert np.median(drawn[key]) == pytest.approx(base[key], rel=0.15)
  assert set(drawn["peak"]) == {values["peak"]}


def test_draws_of_a_small_budget_buy_at_least_one_rack():
  drawn = uncertainty.draws({"budget": 5e6}, num_draws=200)
  assert 20 < len(drawn["racks"]) < 200
  assert set(drawn["racks"]) == {72 / 72}
  with pytest.raises(ValueError, match="none of num_draws"):
    uncertainty.draws({"budget": 2e6}, num_draws=20)


def test_models_that_do_not_fit_or_fit_one_stage():
  small = plan({"accelerators": 64}, "accelerators")
  assert small["fit"] == 64 / (135 * 64)
  assert small["tensor"] == 64
  one = plan({"accelerators": 64, "parameters": 7e9}, "accelerators")
  assert (one["stages"], one["stage_bits"]) == (1, 0)
  assert one["layout_share"] == 1
  # Replicas are limited to microbatches: most of the machine would idle.
  many = plan({"parameters": 7e9})
  assert many["replicas"] == 60_000_000 // 8192
  assert many["layout_share"] == pytest.approx(7324 * 72 / 1_677_600)
  memory = plan({"accelerators": 1}, "accelerators")["largest"]
  assert memory == pytest.approx(0.5 * 186e9 / 16)


def test_checkpoint_traffic_includes_the_time_of_saving():
  found = plan({"save_rate": 800e12 / 1_677_600 / 80})
  period = found["interval_s"] + found["save_s"]
  assert found["save_traffic"] == pytest.approx(800e12 / period)
  assert found["replica_save_s"] == pytest.approx(
    found["save_s"] * 1_677_600 / 8640
  )


def test_goodput_of_ever_faster_copies_approaches_that_without_loss():
  """The shorter the interval, the smaller is what a failure destroys."""
  for save_rate in np.geomspace(1e12, 1e38, 300):
    found = closed_forms.plan({"save_rate": save_rate, "restart_s": 1e-30})
    lost = (2 * found["save_s"] / found["mtbf_s"]) ** 0.5  # first order
    assert -1e-15 <= 1 - found["goodput"] <= 2 * lost + 1e-15


def test_results_are_finite_without_progress():
  found = plan({"mtbf_h": 0.01, "restart_s": 1e9, "parameters": 1e30})
  for key in closed_forms.result_specs():
    assert math.isfinite(found[key]), key


def test_tornado_has_all_knobs_that_matter_by_span():
  bars = uncertainty.tornado("days", {})
  assert {bar.knob for bar in bars} == {
    "compute_share", "rack_price", "utilisation", "availability", "parameters",
    "active_share", "tokens_per_parameter",
  }
  spans = [abs(bar.high - bar.low) for bar in bars]
  assert spans == sorted(spans, reverse=True)
  with pytest.raises(ValueError, match=r"target='day'.*days"):
    uncertainty.tornado("day", {})


@pytest.mark.parametrize("kind", closed_forms.GIVEN_QUANTITIES)
def test_formulas_read_knobs_and_earlier_results(kind):
  known = set(KNOBS)
  if kind == "budget":
    known.remove("accelerators")
  if kind == "model":
    known -= {"accelerators", "budget"}
  for key, formula in closed_forms.formulas(kind).items():
    assert set(formula.names()) <= known, key
    known.add(key)
  if kind in closed_forms.GIVEN_QUANTITIES[:2]:
    assert kind in closed_forms.knobs_of(kind)


def test_formula_is_printed_and_evaluated():
  a, b = expressions.variable("a"), expressions.variable("b")
  tree = (a - (b - 1)) / (a * b) + expressions.ceil(2 / (a / b))
  assert str(tree) == "(a - (b - 1)) / (a * b) + ceil(2 / (a / b))"
  values = {"a": 3.0, "b": np.array([1.0, 2.0])}
  np.testing.assert_allclose(
    tree.value(values), [3 / 3 + 1, 2 / 6 + 2]
  )


def test_published_interruptions_add_up():
  assert sum(sites.INTERRUPTIONS.values()) == 419


def test_quantity_must_be_in_its_range():
  with pytest.raises(ValueError, match="low=2"):
    Quantity(1, 2, 3, "", "a size", "nobody", "choice")
  with pytest.raises(ValueError, match="mark='sure'"):
    Quantity(1, 0, 3, "", "a size", "nobody", "sure")


UNITS = {"", "$", "$/MWh", "B", "B/s", "FLOP", "FLOP/s", "W", "Wh", "bit",
         "bit/s", "days", "h", "km", "s"}
COUNTS = {"accelerators", "chunks", "layers", "microbatch_tokens", "per_domain",
          "per_rack", "radix", "sync_every"}


def test_knobs_have_units_bounds_and_sources():
  """Shares are at most 1, ratios to a minimum at least 1, counts whole."""
  for key, knob in KNOBS.items():
    assert knob.unit in UNITS, key
    assert knob.source not in ("", *knobs.EVIDENCE_MARKS, knob.meaning), key
    assert (knob.most == 1) == knob.meaning.startswith("share "), key
    assert knob.whole == (key in COUNTS), key
    if knob.whole:
      assert float(knob.value).is_integer(), key
      assert knob.least >= 1, key
  assert {k for k, knob in KNOBS.items() if knob.least not in (0, 1)} == {
    "radix"  # a switch of fewer ports joins nothing
  }
  assert set(knobs.DECISIONS) < set(KNOBS)


def test_range_of_a_changed_knob_has_its_relative_width():
  """Ranges end at the bounds of the knob."""
  assert knobs.scaled_range("budget", 200e9) == (160e9, 240e9)
  assert knobs.scaled_range("utilisation", 0.8) == pytest.approx((0.6, 1.0))
  assert knobs.scaled_range("pue", 1.2) == pytest.approx((1.1, 1.31))
  assert knobs.scaled_range("chunks", 1) == (1, 4)
  assert knobs.scaled_range("pue", 1.0)[0] == 1.0


@pytest.mark.parametrize("given", closed_forms.GIVEN_QUANTITIES)
def test_results_have_units_and_meanings(given):
  found = closed_forms.result_specs(given)
  meanings = [result.meaning for result in found.values()]
  assert len(set(meanings)) == len(meanings)
  for key, result in found.items():
    assert result.unit in UNITS, key
    assert len(result.meaning) > len(result.unit), key


def test_knob_outside_of_its_bounds_is_refused():
  for key, value, message in (
    ("radix", 3, "radix=3 must be positive and finite, at least 4"),
    ("fill", 1.5, "fill=1.5 must be positive and finite, at most 1"),
    ("budget", math.inf, "budget=inf must be positive and finite"),
    ("layers", 2.5, "layers=2.5 must be an integer"),
    ("layers", 0, "layers=0 must be positive and finite, at least 1"),
  ):
    with pytest.raises(ValueError) as error:
      closed_forms.with_defaults({key: value})
    assert str(error.value).startswith(message)
    assert ("at most" in str(error.value)) == (key == "fill")
  for key, value in (("radix", 4), ("fill", 1.0), ("layers", 1)):
    assert closed_forms.with_defaults({key: value})[key] == value
