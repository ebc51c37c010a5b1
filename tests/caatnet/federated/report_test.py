"""Table of the times of a federated run."""

import pytest

from caatnet.federated import report
from parallel.plans.hardware import client_links as links


def test_long_runs_are_shown_by_medians():
  rows = [
    {"round": k, "client": 7, "t_tr": 1e-3 * k, "bytes_up": 2_345_600}
    for k in range(49)
  ]
  shown = report.table(rows[:48])
  assert (len(shown.rows), shown.headings[0]) == (48, "round")
  shown = report.table(rows)
  assert shown.headings == ["client", "t_tr", "kB down", "kB up"]
  assert shown.cells() == [["7", "24.0", "-", "2,345.6"]]
  # A time that the first row lacks has a column, too.
  rows += [{"round": 0, "client": 8, "t_d": 0.5, "t_tr": 2.0,
            "bytes_down": 12_300}]
  shown = report.table(rows)
  assert shown.headings == ["client", "t_d", "t_tr", "kB down", "kB up"]
  assert shown.cells()[1] == ["8", "500.0", "2,000.0", "12.3", "-"]


def _row(round, client, t_tr, t_u):
  return {"round": round, "client": client, "t_a": 0.0, "t_d": 0.25, "t_v": 0.0,
          "t_tr": t_tr, "t_te": 0.0, "t_u": t_u}


def test_interfaces_have_medians_and_costs_of_stragglers():
  rows = [
    _row(0, 0, 1.0, 1.0), _row(0, 1, 2.0, 0.5), _row(0, 2, 1.0, 4.75),
    {"round": 0, "client": 3, "t_a": 0.0},  # has not answered
    _row(1, 0, 1.0, 1.0), _row(1, 1, 3.0, 2.0), _row(1, 2, 1.0, 4.75),
    _row(2, 0, 1.0, 1.0), _row(2, 1, 1.0, 1.0), _row(2, 2, 1.0, 4.75),
  ]
  names = ("wifi", "wifi", "5g-bad", "wifi")
  found = report.report(rows, [links.LINKS[name] for name in names])
  wifi, bad = found.parts[1].rows
  assert (wifi["interface"], bad["interface"]) == ("wifi", "5g-bad")
  assert (wifi["t_tr"], wifi["t_u"]) == (1.0, 1.0)
  assert wifi["slowest"] == 2.75  # of 2.75, 5.25 and 2.25
  assert wifi["stragglers"] == 0.25  # of 0.25, 1.5 and 0
  assert (bad["slowest"], bad["stragglers"]) == (6.0, 0.0)
  assert bad["share"] == 4.75 / 6
  assert wifi["share"] == pytest.approx(6.5 / 6 / (10.25 / 3))
  assert "79%" in found.parts[1].cells()[1]
  panels = found.figure().panels
  assert [panel.title for panel in panels] == ["wifi", "5g-bad"]
  assert [len(panel.marks[0].lengths) for panel in panels] == [3, 1]
  # Bars begin where the phase before ends; client 1 has a t_tr of 2 s.
  bars = {bar.label: bar for bar in panels[0].marks}
  assert bars["t_tr"].starts[1] == 0.25
  assert bars["t_u"].starts[1] == 2.25


def test_run_without_links_has_one_panel_and_an_empty_one_none():
  found = report.report([_row(0, 0, 1.0, 1.0)])
  assert len(found.parts) == len(found.figure().panels) == 1
  assert report.report([]).figure is None
