"""The study of utilisation: plain data, its tables and its picture."""

import functools
import json
import re

import pytest

from caatnet.show import render
from caatnet.studies import registry
from caatnet.studies.utilisation import published, report
from configs.diloco import utilisation as config_file


@functools.cache
def run(fitted_factor=False, **recommend):
  """Returns the study's result, which no test may modify."""
  config = config_file.get_config().to_dict()
  config["fitted_factor"] = fitted_factor
  config["recommend"] |= recommend
  return registry.find(config).run(config)


def test_result_is_json_and_its_setting_reaches_the_target():
  result = json.loads(json.dumps(run()))
  assert result["table"]["num_cells"] == 75
  assert result["recommendation"]["setting"]["utilisation"] >= 0.95
  assert result["recommendation"]["link"]["gbit_s"] == 10  # not GB/s


def test_custom_model_has_the_table_and_curves_of_the_paper():
  """Uses the sizes of a model of the paper: equal rows of our table 4."""
  result = run(parameters=1e9, num_layers=24, step_seconds=0.1)
  own = result["models"][-1]
  theirs = [c["ours"] for c in result["table"]["cells"] if c["model"] == "1B"]
  got = [published.printed_gbit_s(c["gbit_s"] * 1e9) for c in own["cells"]]
  assert got == theirs
  curves = result["curves"]["utilisation"]
  assert curves[own["name"]] == curves["1B"]
  assert len(curves) == 6
  twice = run(
    parameters=1e9, num_layers=24, step_seconds=0.1, volume_factor=2.0
  )["models"][-1]
  assert all(
    b["gbit_s"] is None or b["gbit_s"] > a["gbit_s"]
    for a, b in zip(own["cells"], twice["cells"], strict=True)
  )


def test_deepseek_bandwidths_are_near_the_paper_s():
  """Near 100 % at 4 Gbit/s, where data parallelism needs 1 Tbit/s."""
  model = next(m for m in run()["models"] if m["name"] == "DeepSeek-V3")
  cells = {(c["method"], c["target"]): c["gbit_s"] for c in model["cells"]}
  assert 3.5 < cells["+ 4 bit", 0.95] < 5
  least = cells["data parallel", 0.99]
  assert least is None or least > 800


@pytest.mark.parametrize("fitted", [False, True])
def test_tables_name_fitted_values(fitted, capsys):
  render.show(report.report(run(fitted)))
  printed = capsys.readouterr().out
  assert ("FITTED on this table" in printed) == fitted
  assert ("nothing fitted" in printed) != fitted
  counts = "70 of 75 cells are equal, 75" if fitted else "3 of 75"
  assert counts in printed
  assert "recommended" in printed
  assert "yours, 10B, + 4 bit" in printed
  assert re.search(r"Llama-405B .* 4.05e\+11 .* 126 .* 26.9 ", printed)


def test_cells_and_points_have_the_bandwidths_of_the_paper():
  made = report.report(run())
  cells = dict(zip(made.tables[0].headings, made.tables[0].cells()[0],
                   strict=True))
  for target, gbit_s in (("50%", 86.8), ("99%", 569.0)):
    assert cells[target].startswith(f"{gbit_s} / ")
  points = [x for x in made.figure().panels[0].marks if x.marker]
  assert (points[0].x[0], points[0].y[0]) == (86.8, 0.5)


def test_report_states_that_no_setting_reaches_the_target(capsys):
  result = run(link="lte_uplink")
  render.show(report.report(result))
  assert result["recommendation"]["setting"] is None
  assert "No setting reaches 95.0%" in capsys.readouterr().out


def test_unknown_study_or_link_is_named():
  with pytest.raises(ValueError, match=r"config.study='x' must be one of .*u"):
    registry.find({"study": "x"})
  with pytest.raises(ValueError, match="did you mean ethernet_1g"):
    run(link="ethernet1g")


@pytest.mark.parametrize("num_layers", [1000, 2**31 - 1])
def test_too_many_layers_for_the_methods_are_refused_by_their_key(num_layers):
  words = rf"config\.recommend\.num_layers={num_layers} is too many"
  with pytest.raises(ValueError, match=words):
    run(num_layers=num_layers)
