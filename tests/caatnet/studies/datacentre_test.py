"""The study of datacentres: its report and its interactive page."""

import itertools
import json
import re

import numpy as np
import pytest

from caatnet.show import render
from caatnet.studies import registry
from caatnet.studies.datacentre import closed_forms, known, page, report
from caatnet.studies.datacentre.knobs import KNOBS
from caatnet.studies.utilisation import predictor
from configs.datacentre import hundred_billion
from configs.planner import gpt_11b
from parallel.plans.hardware.devices import DEVICES


def run(**changes):
  config = hundred_billion.get_config("test")
  for key, value in changes.items():
    *path, last = key.split("__")
    section = config
    for name in path:
      section = section[name]
    section[last] = value
  config = config.to_dict()
  return registry.find(config).run(config)


def brief(**changes):
  """Returns a result with few bandwidths between sites, which take longest."""
  few = {"knobs__layers": 12.0, "round_steps": 6, "targets": (0.5,)}
  return run(**few | changes)


@pytest.fixture(scope="module")
def result():
  return run()


def test_config_has_all_knobs_except_site_power():
  assert set(hundred_billion.get_config().knobs) == set(KNOBS) - {"site_w"}


def test_result_is_plain_data(result):
  assert json.loads(json.dumps(result))["study"] == "datacentre"


def test_figures_of_the_paper_are_fitted_or_predicted(result):
  for row in result["paper"]:
    if row["verdict"] == "fitted":
      assert abs(row["error"]) < 0.01
    else:
      assert row["verdict"] == "predicted"
      assert 0.1 < abs(row["error"]) < 0.2
      assert "as sold" in row["inputs"]


# Published figure -> largest relative error.
KNOWN = {
  "Llama 3 405B, FLOPs": 0.01, "Llama 3 405B, GPU-hours": 0.15,
  "Llama 3, effective training time, over": 0.0, "PaLM 540B, FLOPs": 0.01,
  "PaLM 540B, chip-hours on TPU v4 pods": 0.35, "Frontier, peak": 0.06,
  "Frontier, power under load": 0.11,
}


def test_existing_machines_are_predicted_within_their_tolerance(result):
  assert {row["what"] for row in result["known"]} == set(KNOWN)
  for row in result["known"]:
    assert abs(row["error"]) <= KNOWN[row["what"]], row


def test_figures_of_the_same_source_are_within_the_tolerance(result):
  rows = [*result["paper"], *result["known"]]
  assert {row["verdict"] for row in rows} == set(known.VERDICTS)
  for row in rows:
    if row["verdict"] == "same source":
      assert abs(row["error"]) <= known.TOLERANCE, row
    if row["verdict"] == "differs":
      assert abs(row["error"]) > known.TOLERANCE, row


def test_comparisons_have_units_inputs_and_sources(result):
  for row in (*result["paper"], *result["known"]):
    assert row["unit"] in ("", "FLOP", "FLOP/s", "W", "h"), row
    assert row["verdict"] in known.VERDICTS, row
    assert row["inputs"] not in (*known.VERDICTS, row["source"]), row
    assert any(word in row["source"] for word in (
      "arXiv", "recalled", "TOP500"
    )), row
    assert not any(word in row["inputs"] for word in ("arXiv", "TOP500")), row


def test_error_is_relative_to_the_nearer_end():
  row = known.Comparison("x", (2.0, 4.0), 5.0, "", "same source", "")
  assert row.plain()["error"] == 0.25
  assert row.plain()["verdict"] == "differs"
  for ours, error, verdict in (
    (1.0, -0.5, "differs"), (3.0, 0.0, "same source"),
    (4.16, 0.04, "same source"), (1.92, -0.04, "same source"),
    (4.24, 0.06, "differs"),
  ):
    found = row._replace(ours=ours).plain()
    assert found["error"] == pytest.approx(error)
    assert found["verdict"] == verdict
  assert row._replace(verdict="predicted").plain()["verdict"] == "predicted"


def test_bandwidth_falls_with_lower_targets_and_better_methods(result):
  rows = [list(row["bit_s"].values()) for row in result["between"]["rows"]]
  for row in rows:
    assert row == sorted(row)
  for worse, better in itertools.pairwise(rows):
    assert all(b <= w for w, b in zip(worse, better, strict=True))
  assert rows[0][0] > 200 * rows[-1][0]


def test_least_bandwidth_reaches_its_target_and_a_lower_one_does_not():
  """A reduction arrives half a round trip, here 0.15 s, after it was sent."""
  result = brief(knobs__distance_km=2e4)
  found = result["between"]
  plan = {row["name"]: row["value"] for row in result["results"]}
  knobs = {row["name"]: row["value"] for row in result["knobs"]}
  model = predictor.Model(
    knobs["parameters"], found["layers"], found["step_s"]
  )
  methods = predictor.paper_methods(found["layers"], found["round_steps"])
  count = found["sites"]
  for row in found["rows"]:
    target, bit_s = next(
      (float(t), b) for t, b in row["bit_s"].items() if b is not None
    )
    reached = predictor.simulate(
      model, methods[row["method"]], np.array([0.98 * bit_s, bit_s]),
      volume_factor=2 * (count - 1) / count, latency_s=plan["rtt_s"] / 2,
    ).utilisation
    assert reached[0] < target <= reached[1] + 1e-9, row["method"]


def test_lost_link_costs_its_share_if_all_links_are_used(result):
  rows = {row["router"]: row for row in result["multipath"]["rows"]}
  assert rows["spray"]["whole"] == 1
  assert rows["spray"]["without_one"] == pytest.approx(16 / 15)
  assert rows["ecmp"]["whole"] > 2


def test_utilisation_of_a_planned_pod_sets_the_days(result):
  assert result["pod"] is None
  config = hundred_billion.get_config("test")
  config.pod = gpt_11b.get_config("test")
  config.targets = (0.5,)
  config = config.to_dict()
  planned = registry.find(config).run(config)
  assert "whatever its memory" in "\n".join(report.notes(planned))
  share, pod = planned["pod"]["utilisation"], planned["pod"]
  assert 0 < share < 0.5
  tokens = np.prod([
    config["pod"]["data"][key] for key in ("batch_size", "seq_len")
  ])
  peak = DEVICES["h100"].peak(config["pod"]["model"]["dtype"]) * pod["devices"]
  assert share * pod["step_s"] * peak == pytest.approx(
    6 * pod["parameters"] * tokens
  )
  days = {
    row["name"]: row["value"] for row in planned["results"]
  }["days"]
  found = closed_forms.plan({"utilisation": share})
  assert days == pytest.approx(found["days"])


@pytest.mark.parametrize(("changes", "words"), [
  ({"sites": ("here",)}, "config.sites='here' must be NAME:WATTS"),
  ({"sites": ("here:-1",)}, "here has -1 W"),
  ({"sites": ("shed:1e5",)}, "a rack takes 185.4 kW"),
  ({"sites": ("east", "east")}, "must not have the site 'east' twice"),
  ({"round_steps": 20}, "config.round_steps=20 must be more than a third"),
  ({"knobs__layers": 2.5}, "config.knobs.layers=2.5 must be an integer"),
  ({"knobs__budget": 0.0}, "config.knobs.budget=0 must be positive"),
  ({"knobs__accelerators": 64.0}, "config.knobs.accelerators has no effect"),
  ({"given": "luck"}, "config.given='luck'"),
  ({"rack": "gb300"}, "config.rack='gb300'"),
  ({"cooling": "ice"}, "config.cooling='ice'"),
  ({"rack": "h100", "precision": "fp4"}, "config.precision='fp4'"),
  ({"tornado": "day"}, "config.tornado: target='day'"),
])
def test_invalid_value_is_named(changes, words):
  with pytest.raises(ValueError) as error:
    run(**changes)
  assert words in str(error.value)


def test_sites_that_are_too_small_are_reported(capsys):
  found = brief(sites=("ohio:1e9",))
  assert found["sites"]["missing_w"] == pytest.approx(3.31982e9)
  render.show(report.report(found))
  assert "the sites are too small by 3.32 GW" in capsys.readouterr().out


def test_failures_by_cause_add_up(result):
  of = {row["name"]: row["value"] for row in result["results"]}
  per_day = sum(result["causes"].values())
  assert per_day == pytest.approx(86400 / of["mtbf_s"])
  assert result["causes"]["faulty GPU"] == pytest.approx(148 / 419 * per_day)


def test_cooling_sets_the_power(result):
  def power(found):
    return next(
      r["value"] for r in found["results"] if r["name"] == "facility_w"
    )

  assert power(brief(cooling="air")) == pytest.approx(
    power(result) * 1.57 / 1.2
  )
  assert power(brief(cooling="air", knobs__pue=1.2)) == power(result)


def test_report_of_a_small_machine(capsys):
  found = brief(
    given="accelerators", knobs__accelerators=1.0, knobs__parameters=1e9
  )
  render.show(report.report(found))
  out = capsys.readouterr().out
  assert "this config" in out
  assert "predicted" in out
  small = brief(given="accelerators", knobs__accelerators=64.0)
  render.show(report.report(small))
  assert "the model does not fit" in capsys.readouterr().out


def test_round_trip_between_sites_is_shown_in_milliseconds():
  """Light takes 5 us per km of fibre, one way."""
  found = brief()
  (title,) = (
    table.title for table in report.report(found).tables
    if "there and back" in " ".join(table.title.split())
  )
  shown = re.search(r"([\d.]+) ms there", title)
  knobs = {row["name"]: row["value"] for row in found["knobs"]}
  km = knobs["distance_km"] * knobs["detour"]
  assert float(shown[1]) == pytest.approx(0.01 * km, rel=0.02)


def test_sites_are_counted_as_they_are_used():
  found = brief(sites=("a:3e9", "b:1e9", "c:1e9"))
  of = {row["name"]: row["value"] for row in found["results"]}
  assert list(found["sites"]["used_w"]) == ["a", "b", "c"]
  assert of["sites_needed"] == found["between"]["sites"] == 3


def test_knobs_have_the_sources_of_their_values():
  found = brief(rack="h100", cooling="air", knobs__fill=0.6)
  of = {row["name"]: row for row in found["knobs"]}
  assert "DGX H100" in of["rack_w"]["source"]
  assert of["rack_price"]["mark"] == "unverified"
  assert "Uptime" in of["pue"]["source"]
  assert of["fill"]["source"] == "this config"
  assert of["restart_s"]["source"] == "ours"


def test_lack_of_progress_is_reported():
  found = brief(knobs__restart_s=1e7)
  assert "there is no progress" in "\n".join(report.notes(found))


def test_notes_name_sites_and_reached_share_of_peak(result):
  text = "\n".join(report.notes(result))
  assert "sites: east 2.4 GW of 2.4 GW, west 1.92 GW" in text
  assert "at most 24% of the peak are reached, not 40%" in text
  # A plan that assumes the reachable share has nothing to say about it.
  share, = (
    row["value"] for row in result["results"] if row["name"] == "layout_share"
  )
  knobs = [
    row | {"value": share} if row["name"] == "utilisation" else row
    for row in result["knobs"]
  ]
  assert "of the peak" not in "\n".join(report.notes(result | {"knobs": knobs}))


@pytest.mark.parametrize(("x", "unit", "text"), [
  (None, "W", "-"), (2.5e24, "FLOP", "2.5e+24 FLOP"), (0.25, "", "0.25"),
  (999.0, "", "999"), (1000.0, "", "1,000"), (-1234.5, "", "-1,234"),
  (9.9e9, "", "9,900,000,000"), (1e10, "", "1e+10"), (1500.0, "h", "1,500 h"),
  (0.5, "W", "0.5 W"), (1.0, "W", "1 W"), (999.0, "W", "999 W"),
  (1000.0, "W", "1 kW"), (1.5e9, "W", "1.5 GW"), (-2e6, "W", "-2 MW"),
  (100e9, "$", "$100B"), (3.0042e6, "$", "$3.004M"), (4000, "km", "4,000 km"),
  (7.456e13, "bit/s", "74.56 Tbit/s"), (1_677_600, "", "1,677,600"),
  (3e24, "B", "3 YB"), (3e27, "B", "3000 YB"), (5e9, "$", "$5B"),
  (5e6, "$", "$5M"), (12.0, "$", "$12"),
])
def test_quantities_have_prefixes_where_their_unit_does(x, unit, text):
  assert report.format_quantity(x, unit) == text


@pytest.mark.parametrize("given", closed_forms.GIVEN_QUANTITIES)
def test_page_computes_the_same_plan_as_python(given):
  """Evaluates its function in a JavaScript engine for drawn settings."""
  dukpy = pytest.importorskip("dukpy", reason="the extra test has it")
  text = page.render_html(brief(given=given))
  function = re.search(r"^function plan\(v\) \{.*?^\}", text, re.S | re.M)[0]
  rng = np.random.default_rng(closed_forms.GIVEN_QUANTITIES.index(given))
  settings = [
    {
      key: float((np.floor if knob.whole else float)(
        rng.uniform(knob.low, knob.high)
      ))
      for key, knob in KNOBS.items()
    }
    for _ in range(50)
  ]
  found = dukpy.evaljs(
    f"{function}; dukpy['settings'].map(plan)", settings=settings
  )
  for values, theirs in zip(settings, found, strict=True):
    ours = closed_forms.plan(values, given)
    for key in closed_forms.result_specs(given):
      assert theirs[key] == pytest.approx(float(ours[key]), rel=1e-9), key


def test_page_loads_nothing_else(result):
  text = page.render_html(result)
  assert not re.search(r"""(src|href)=["'](?!data:)|@import|url\(|fetch\(|"""
                       r"XMLHttpRequest|https?://", text.split("var result")[0])
  assert text.count("</script>") == 1
  data = re.search(r"^var result = (.*);$", text, re.M)[1]
  there = json.loads(data)
  assert there.pop("notes") == report.notes(result)
  assert there == json.loads(json.dumps(result))
  for place in ("/*FUNCTION*/", "/*RESULT*/", "<!--TITLE-->"):
    assert place not in text


def test_page_escapes_its_inputs():
  found = brief(
    given="accelerators", knobs__accelerators=64.0, rack="h100",
    sites=("</script><b>:1e9",),
  )
  text = page.render_html(found)
  assert "</script><b>" not in text
  assert text.count("</script>") == 1
