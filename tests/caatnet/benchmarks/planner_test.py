"""Benchmark of the planner: device orders, compared with the best ones."""

import os
import sys
import time

import numpy as np
import pytest

from caatnet.benchmarks.planner import planner
from configs.benchmark import planner as config_of
from parallel.plans.planner.message_costs import Grid
from tests.caatnet.benchmarks.printed import rows_of


def test_grids_have_as_many_devices_as_can_be_searched():
  """All 8! orders of small grids, and proofs for 16 devices."""
  for grids, most in ((planner._EXACT_GRIDS, 8), (planner._SOLVED_GRIDS, 16)):
    sizes = [grid.size for grid in grids]
    assert max(sizes) == most
    assert min(sizes) > most / 2
  # Of the clusters with uneven links.
  assert {grid.size for grid in planner._UNEVEN_GRIDS} == {64}


def test_orders_are_compared_with_the_best_and_with_ours():
  found = planner._ratio_row([1.0, 1.02, 1.01, 1.5], [1.0, 3.0, 2.0, 4.0])
  assert found == {
    "clusters": 4, "ours / best, worst": 1.5, "within 1%": 2,
    "own / best, median": 2.5,
  }
  found = planner._percentile_row("own", [1.0, 0.8, 1.0 + 1e-12, 1.2, 1.6])
  assert found == {
    "order": "own", "clusters": 5, "0%": 0.8, "5%": pytest.approx(0.84),
    "25%": 1.0, "50%": pytest.approx(1.0), "75%": 1.2,
    "95%": pytest.approx(1.52), "100%": 1.6, "slower than ours": 2,
  }
  assert planner._gaps("all", [0.3, 0.1, 0.5]) == {
    "grid": "all", "clusters": 3, "gap, median": 0.3, "least": 0.1, "most": 0.5,
  }


def test_device_orders_are_near_the_best(capsys):
  config = config_of.get_config("test")
  start = time.perf_counter()
  result = planner.run(config)
  passed = time.perf_counter() - start
  (all_orders,) = result["against all orders"]
  assert all_orders["clusters"] == all_orders["within 1%"] == 1
  assert 1 - 1e-9 <= all_orders["ours / best, worst"] <= 1.01
  assert all_orders["own / best, median"] >= 1
  assert result["against CP-SAT"] == []
  for row in result["certified"]:
    assert 0 <= row["least"] <= row["gap, median"] <= row["most"] < 0.1
  of_grid, everyone = result["certified"]
  assert 0 <= of_grid["of a step, median"] <= of_grid["gap, median"]
  assert (everyone["grid"], everyone["clusters"]) == ("all", 1)
  (large,) = result["large"]
  assert large["own / ours"] >= 1 - 1e-9
  assert large["gap"] >= -1e-9
  assert 0 < large["s"] < passed
  # Processor time of the search alone, which began after this process.
  assert 0 < large["s of processors"] < 1.1 * os.cpu_count() * large["s"]
  own, annealed = result["uneven links"]
  assert (own["order"], annealed["order"]) == ("own", "pipette")
  for row in (own, annealed):
    assert row["0%"] <= row["50%"] <= row["100%"]
    assert row["slower than ours"] == (row["100%"] > 1 + 1e-9)
  assert len(result["regret"]) == config.benchmark.regret_clusters
  for row in result["regret"]:
    assert row["regret"] == pytest.approx(
      row["plan, s"] / row["best, s"] - 1, abs=1e-12
    )
    assert row["regret"] >= -1e-9
    assert row["devices"] == 4
    assert row["orders"] > row["configurations"] > 1
  printed = capsys.readouterr().out
  regrets = [row["regret"] for row in result["regret"]]
  assert (
    f"regret of 2 clusters: median {np.median(regrets):.2%}, most "
    f"{max(regrets):.2%}; below 2% in {sum(x < 0.02 for x in regrets)}"
  ) in printed
  # All rows of all parts, with four digits.
  for part in ("certified", "large", "uneven links"):
    for row in result[part]:
      assert [
        f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()
      ] in rows_of(printed)


# Instead of a solver: checks the cost of the hint, and returns it.
SOLVER = """
import json, sys
import numpy as np
problem = json.loads(sys.stdin.readline())
hint, total = problem["hint"], 0.0
assert sorted(hint) == list(range(problem["size"]))
for kind in problem["kinds"]:
  seconds = np.array(kind["seconds"])
  costs = [seconds[hint[a], hint[b]]
           for a, b in zip(kind["source"], kind["target"], strict=True)]
  assert sorted(i for group in kind["sums"] for i in group) == (
    list(range(len(costs)))
  )
  total += max(sum(costs[i] for i in group) for group in kind["sums"])
assert abs(total / problem["known"] - 1) < 1e-9, (total, problem["known"])
print(json.dumps({"order": hint if problem["limit_s"] else None,
                  "bound": problem["known"] / 2, "proven": False,
                  "seconds": 3.0}))
"""


@pytest.mark.parametrize("limit_s", [0, 7])
def test_solver_receives_the_costs_of_an_order(limit_s, monkeypatch, tmp_path):
  (tmp_path / "solver.py").write_text(SOLVER)
  monkeypatch.setattr(planner, "_CP_SAT", tmp_path / "solver.py")
  config = config_of.get_config("test")
  config.benchmark.python_path = sys.executable
  config.benchmark.limit_s = limit_s
  monkeypatch.setattr(planner, "_SOLVED_GRIDS", (Grid(2, 2, 2),))  # quick
  (row,) = planner._compare_cp_sat(config)
  assert row["grid"] == str(Grid(2, 2, 2))
  assert row["ours / CP-SAT"] == pytest.approx(1.0 if limit_s else 0)
  assert row["CP-SAT's gap"] == pytest.approx(0.5 if limit_s else 1)
  assert row["ours above its bound"] == pytest.approx(1)
  assert row["above our bound"] >= -1e-9
  assert (row["its s"], row["proven"]) == (3.0, False)


def test_links_are_drawn_from_1_to_20_gigabytes_per_second():
  links = planner.draw_links(3, 60)
  assert (links.num_devices, links.mark) == (60, "drawn")
  assert links.nodes == tuple(range(60))
  pairs = ~np.eye(60, dtype=bool)
  rates = links.bandwidth[pairs]
  assert 1e9 <= rates.min() < 1.1e9
  assert 19e9 < rates.max() <= 20e9
  # Logarithmic: half of the rates are below the square root of 20.
  assert np.median(rates) == pytest.approx(20**0.5 * 1e9, rel=0.1)
  assert (links.latency_s[pairs] == 1e-5).all()
  assert (planner.draw_links(4, 60).bandwidth[pairs] != rates).any()
