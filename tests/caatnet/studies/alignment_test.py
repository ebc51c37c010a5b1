"""The study of alignment: counts by hand, and their curve."""

import pytest

from caatnet.studies import registry
from configs.graphs import alignment


def test_rows_and_curve_have_the_counts_by_hand():
  config = alignment.get_config().to_dict() | {
    "num_ids": 2_000, "largest": 200, "features": (100, 128, 602)
  }
  study = registry.find(config)
  result = study.run(config)
  hundred, power, reddit = result["rows"]
  # Rows are packed from byte 0: 400 bytes take 4 lines at any offset.
  assert hundred["lines_shifted"] == 4
  assert hundred["lines"] == pytest.approx(6.625, abs=0.1)
  assert reddit["lines_shifted"] == pytest.approx(19.75, abs=0.1)
  assert power["lines"] == power["lines_shifted"] == 4
  assert power["tpu_bytes_per_byte"] == 16
  spared = dict(zip(
    result["curve"]["row_bytes"], result["curve"]["lines_spared"], strict=True
  ))
  assert spared[400] == 1 - 4 / 6.625
  assert spared[128] == spared[256] == 0
  (panel,) = study.report(result).figure().panels
  lines, _, points = panel.marks  # in percent
  assert dict(zip(lines.x, lines.y, strict=True))[400] == 100 * spared[400]
  shown = dict(zip(points.x, points.y, strict=True))
  assert shown[400] == pytest.approx(
    100 * (1 - hundred["lines_shifted"] / hundred["lines"])
  )


def test_offset_moves_every_row():
  config = alignment.get_config().to_dict() | {
    "num_ids": 100, "largest": 2, "features": (32,), "offset": 4
  }
  (row,) = registry.find(config).run(config)["rows"]
  assert row["lines"] == row["lines_shifted"] == 2
