"""Figure of the benchmark of schedules."""

from caatnet.benchmarks.training import schedules
from caatnet.show import drawing


def test_figure_has_a_line_per_kind_of_grid_and_of_graph():
  scaling = [
    {"topology": f"{kind} {n}x{n}", "ranks": n * n, "seconds": n * factor}
    for kind, factor in (("torus", 1e-3), ("mesh", 2e-3)) for n in (4, 32)
  ]
  drawn = [
    {"nodes": 6, "ranks": 6, "seconds": 0.5},
    {"nodes": 9, "ranks": 7, "seconds": 0.25},
  ]
  figure = schedules.figure(scaling, drawn)
  grids, graphs = figure.panels
  assert {m.label: (m.x, m.y) for m in grids.marks} == {
    "torus": ([16, 1024], [0.004, 0.032]), "mesh": ([16, 1024], [0.008, 0.064])
  }
  assert grids.x.ticks == [(16, "16"), (1024, "1,024")]
  assert {m.label: (m.x, m.y) for m in graphs.marks} == {
    "ranks only": ([6], [0.5]), "with switches": ([9], [0.25])
  }
  assert drawing.png(figure).startswith(b"\x89PNG")
