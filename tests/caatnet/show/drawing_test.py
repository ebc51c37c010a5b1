"""Figures drawn by matplotlib, compared with their data."""

import numpy as np
import pytest

from caatnet.show import drawing, plot

matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture
def draw():
  """Function that draws a figure, and closes it after the test."""
  made = []

  def drawn(*panels, **options):
    made.append(drawing.draw(plot.Figure(panels, (4, 3), **options)))
    return made[-1]

  yield drawn
  for figure in made:
    drawing.pyplot().close(figure)


def test_line_has_its_gap_errors_and_texts(draw):
  line = plot.Line(
    [1, 2, 3], [4.0, None, 6.0], "a", marker="o",
    errors=([3.5, None, 5.0], [5.0, None, 6.5]),
    texts=plot.Texts(["p", "q", "r"]),
  )
  axis = draw(plot.Panel([line], legend="best")).axes[0]
  (container,) = axis.containers
  np.testing.assert_array_equal(
    container.lines[0].get_xydata(), [[1, 4], [2, np.nan], [3, 6]]
  )
  (bars,) = container.lines[2]
  first, _, last = bars.get_segments()
  assert first.tolist() == [[1, 3.5], [1, 5]]
  assert last.tolist() == [[3, 5], [3, 6.5]]
  assert [text.get_text() for text in axis.texts] == ["p", "q", "r"]
  assert [x.get_text() for x in axis.get_legend().get_texts()] == ["a"]


@pytest.mark.parametrize("horizontal", [True, False])
def test_stacked_bars_begin_at_the_end_of_the_last_part(draw, horizontal):
  parts = {"a": [1.0, 2.0], "b": [3.0, 4.0], "c": [5.0, 6.0]}
  bars = plot.stacked(parts, horizontal=horizontal)
  axis = draw(plot.Panel(bars)).axes[0]
  boxes = [
    (box.get_x(), box.get_width()) if horizontal
    else (box.get_y(), box.get_height()) for box in axis.patches
  ]
  assert boxes == [(0, 1), (0, 2), (1, 3), (2, 4), (4, 5), (6, 6)]


def test_texts_inside_bars_fit(draw):
  bars = plot.Bars([0, 0], [1.0, 9.0], [0.0, 1.0], texts=["12345", "x"],
                   inside=True)
  axis = draw(plot.Panel([bars], x=plot.Axis("s", limits=(0, 10)))).axes[0]
  narrow, wide = axis.texts
  assert narrow.get_position() == (0.5, 0)
  assert wide.get_position() == (5.5, 0)
  assert narrow.get_fontsize() < wide.get_fontsize() == 8


def test_axes_have_their_scales_limits_and_ticks(draw):
  line = plot.Line([1, 10, 100], [1, 2, 4])
  for scale, name in (("log", "log"), ("log2", "log"), ("symlog", "symlog"),
                      ("linear", "linear")):
    axis = draw(plot.Panel([line], x=plot.Axis("x", scale))).axes[0]
    assert axis.get_xscale() == name
    assert axis.get_xlabel() == "x"
  axis = draw(plot.Panel(
    [line], x=plot.Axis(limits=(0, 50), reverse=True),
    y=plot.Axis(ticks=[(1, "one"), (4, "four")], margin=(1.0, 2.0)),
  )).axes[0]
  assert axis.get_xlim() == (50, 0)
  assert [t.get_text() for t in axis.get_yticklabels()] == ["one", "four"]
  assert axis.get_ylim()[1] > 8


def test_shared_limits_are_those_of_all_panels(draw):
  """Limits of the first panel include the marks of the second."""
  first, second = (plot.Panel([plot.Line([0, 1], [0, y])], y=plot.Axis(
    margin=(1.0, 1.5) if y == 1 else (1.0, 1.0)
  )) for y in (1, 100))
  left, right = draw(first, second, columns=2, share_y="row").axes
  assert left.get_ylim() == right.get_ylim()
  assert left.get_ylim()[1] > 150


def test_adjacent_panels_with_equal_labels_show_one(draw):
  """Five panels in rows of three: no sixth, so the third keeps its label."""
  panel = plot.Panel([plot.Line([1], [1], "a")], x="x", y="y")
  drawn = draw(*[panel] * 5, columns=3, legend="outside right upper")
  axes = drawn.axes
  assert [bool(a.get_xlabel()) for a in axes[:5]] == [
    False, False, True, True, True
  ]
  assert [bool(a.get_ylabel()) for a in axes[:5]] == [
    True, False, False, True, False
  ]
  assert not axes[5].get_visible()
  (legend,) = drawn.legends
  assert [x.get_text() for x in legend.get_texts()] == ["a"]


def test_rules_bands_matrices_and_arrows_are_drawn(draw):
  shades = plot.Arrows([(0, 0), (1, 1)], [(1, 0), (0, 1)], [0.0, 1.0])
  drawn = draw(
    plot.Panel([plot.Rule(2, text="two"), plot.Rule(3, vertical=True)]),
    plot.Panel([plot.Band([0, 1], [1, 2], [3, 5], "C3")]),
    plot.Panel([plot.Heat([[1, None], [3, 4]])]),
    plot.Panel([shades], frame="none"), columns=2,
  )
  rules, band, heat, arrows, bar = drawn.axes
  assert list(rules.lines[0].get_ydata()) == [2, 2]
  assert list(rules.lines[1].get_xdata()) == [3, 3]
  assert rules.texts[0].get_text() == "two"
  (area,) = band.collections
  assert area.get_datalim(band.transData).bounds == (0, 1, 1, 4)
  (image,) = heat.images
  np.testing.assert_array_equal(
    image.get_array().filled(np.nan), [[1, np.nan], [3, 4]]
  )
  assert bar.get_label() == "<colorbar>"
  ends = [(text.xyann, text.xy) for text in arrows.texts]
  assert ends == [((0, 0), (1, 0)), ((1, 1), (0, 1))]
  first, second = (t.arrow_patch.get_edgecolor() for t in arrows.texts)
  assert first != second
