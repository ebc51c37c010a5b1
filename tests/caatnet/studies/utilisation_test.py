"""The study of utilisation: plain data, its tables and its picture."""

import json

import pytest

from caatnet.studies import registry
from caatnet.studies.utilisation import pictures, tables
from configs.diloco import utilisation as config_file


def run(**recommend):
  config = config_file.get_config().to_dict()
  config["recommend"] |= recommend
  return registry.find(config).run(config)


def test_the_result_is_json_and_its_setting_reaches_the_target():
  result = json.loads(json.dumps(run()))
  assert result["table"]["num_cells"] == 75
  assert result["recommendation"]["setting"]["utilisation"] >= 0.95
  assert result["recommendation"]["link"]["gbit_s"] == 10  # not GB/s


@pytest.mark.parametrize("fitted", [False, True])
def test_the_tables_say_what_is_fitted(fitted, capsys):
  config = config_file.get_config().to_dict() | {"fitted_factor": fitted}
  study = registry.find(config)
  study.show(study.run(config))
  printed = capsys.readouterr().out
  assert ("FITTED on this table" in printed) == fitted
  assert ("nothing fitted" in printed) != fitted
  counts = "70 of 75 cells are equal, 75" if fitted else "3 of 75"
  assert counts in printed
  assert "recommended" in printed


def test_it_says_that_no_setting_reaches(capsys):
  result = run(link="lte_uplink")
  tables.show(result)
  assert result["recommendation"]["setting"] is None
  assert "No setting reaches 95.0%" in capsys.readouterr().out


def test_the_picture_is_written(tmp_path):
  pictures.plot(run(), tmp_path / "new" / "u.png")
  assert (tmp_path / "new" / "u.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_study_or_link_is_named():
  with pytest.raises(ValueError, match=r"config.study='x' must be one of coll"):
    registry.find({"study": "x"})
  with pytest.raises(ValueError, match="did you mean ethernet_1g"):
    run(link="ethernet1g")
