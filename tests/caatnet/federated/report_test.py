"""Table of the times of a federated run."""

from caatnet.federated import report


def test_long_runs_are_shown_by_medians():
  rows = [
    {"round": k, "client": 7, "t_tr": 1e-3 * k, "bytes_up": 2_000}
    for k in range(49)
  ]
  shown = report.table(rows[:48])
  assert (len(shown.rows), shown.headings[0]) == (48, "round")
  shown = report.table(rows)
  assert shown.headings == ["client", "t_tr", "kB down", "kB up"]
  assert shown.cells() == [["7", "24.0", "-", "2.0"]]
