"""Figures drawn by matplotlib, compared with their data."""

import struct

import numpy as np
import pytest

from caatnet.show import drawing
from parallel.base import plot

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


SMALL, MEDIUM = 8.33, 10  # font sizes, in points


def shades(*values):
  return matplotlib.colormaps["turbo"](np.array(values, float)).tolist()


def sizes(texts):
  return {round(text.get_fontsize(), 2) for text in texts}


def attributes(artist, *names):
  return {name: getattr(artist, f"get_{name}")() for name in names}


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
  assert [text.xy for text in axis.texts[::2]] == [(1, 4), (3, 6)]
  assert {cap.get_markersize() for cap in container.lines[1]} == {6}
  assert [x.get_text() for x in axis.get_legend().get_texts()] == ["a"]


@pytest.mark.parametrize("horizontal", [True, False])
def test_stacked_bars_begin_at_the_end_of_the_last_part(draw, horizontal):
  parts = {"a": [1.0, 2.0], "b": [3.0, 4.0], "c": [5.0, 6.0]}
  bars = plot.stacked_bars(parts, horizontal=horizontal)
  axis = draw(plot.Panel(bars)).axes[0]
  boxes = [
    (box.get_x(), box.get_width()) if horizontal
    else (box.get_y(), box.get_height()) for box in axis.patches
  ]
  assert boxes == [(0, 1), (0, 2), (1, 3), (2, 4), (4, 5), (6, 6)]


def test_texts_inside_bars_fit(draw):
  bars = plot.Bars([0, 0], [1.0, 9.0], [0.0, 1.0], texts=["12345", "x"])
  axis = draw(plot.Panel([bars], x=plot.Axis("s", limits=(0, 10)))).axes[0]
  narrow, wide = axis.texts
  assert narrow.get_position() == (0.5, 0)
  assert wide.get_position() == (5.5, 0)
  assert narrow.get_fontsize() < wide.get_fontsize() == 8
  assert all(text.get_clip_on() for text in (narrow, wide))
  assert narrow.get_ha() == "center"


@pytest.mark.parametrize(("length", "text", "size"), [
  (1.0, "12345", 7.95),  # 90% of 0.368 inches for 5 characters of 0.6 sizes
  (1.0, "1234567890", 3.97), (1.6, "1234567890", 6.36), (0.2, "x", 4.77),
  (0.252, "1234567890", 1.002), (0.251, "1234567890", None),
])
def test_size_of_a_text_is_proportional_to_its_bar(draw, length, text, size):
  """The axes take 92% of 4 inches; texts below 1 point are omitted."""
  bars = plot.Bars([0], [length], texts=[text])
  axis = draw(plot.Panel([bars], x=plot.Axis(limits=(-3, 7)))).axes[0]
  assert [t.get_fontsize() for t in axis.texts] == (
    [] if size is None else [pytest.approx(size, rel=2e-3)]
  )
  assert [t.get_position() for t in axis.texts] == (
    [] if size is None else [(length / 2, 0)]
  )


def test_line_without_attributes_is_that_of_matplotlib(draw):
  axis = draw(plot.Panel([plot.Line([1, 2], [3, 4])])).axes[0]
  axis.set_prop_cycle(None)  # the next line has the first colour, too
  other, = axis.plot([1, 2], [3, 4])
  names = ("color", "linestyle", "linewidth", "marker", "markersize",
           "markerfacecolor", "drawstyle")
  assert attributes(axis.lines[0], *names) == attributes(other, *names)
  assert axis.lines[0].get_alpha() == 1
  assert axis.get_legend_handles_labels() == ([], [])


def test_line_has_its_attributes(draw):
  axis = draw(plot.Panel([plot.Line(
    [1, 2], [3, 4], "a", style="", marker="s", colour="C3", width=2.5, size=4.5,
    fill="white", alpha=0.5, steps="post",
  ), plot.Line([1], [1], style=":", steps="pre")])).axes[0]
  assert attributes(
    axis.lines[0], "label", "linestyle", "marker", "color", "linewidth",
    "markersize", "markerfacecolor", "alpha", "drawstyle",
  ) == {
    "label": "a", "linestyle": "None", "marker": "s", "color": "C3",
    "linewidth": 2.5, "markersize": 4.5, "markerfacecolor": "white",
    "alpha": 0.5, "drawstyle": "steps-post",
  }
  assert attributes(axis.lines[1], "linestyle", "drawstyle") == {
    "linestyle": ":", "drawstyle": "steps-pre"
  }


def test_texts_have_their_place_and_style(draw):
  plain, styled = plot.Texts(["a"], [1], [2]), plot.Texts(
    ["b", "c"], [3, 4], [5, 6], offset=(-7, 8), align=("right", "top"),
    size=9.5, rotation=30,
  )
  first, second, third = draw(plot.Panel([plain, styled])).axes[0].texts
  names = ("text", "fontsize", "rotation", "ha", "va")
  assert list(attributes(first, *names).values()) == [
    "a", 8, 0, "left", "baseline"
  ]
  assert (first.xy, first.xyann, first.anncoords) == (
    (1, 2), (3, 3), "offset points"
  )
  assert list(attributes(third, *names).values()) == [
    "c", 9.5, 30, "right", "top"
  ]
  assert (second.xy, third.xy, third.xyann) == ((3, 5), (4, 6), (-7, 8))


@pytest.mark.parametrize("horizontal", [True, False])
def test_bars_have_their_extent_and_colours(draw, horizontal):
  axis = draw(plot.Panel([
    plot.Bars([0, 1], [2, 3], [1, 0], "a", "C2", 0.5, horizontal, 1.5),
    plot.Bars([2, 3], [1, 1], colour=["C0", "C1"], horizontal=horizontal),
    plot.Bars([4, 5], [1, 1], colour=(0.25, 1.0), horizontal=horizontal),
    plot.Bars([6], [1], colour=np.array([0.5]), horizontal=horizontal),
    plot.Bars([], [], colour=[], horizontal=horizontal),
  ], legend="best")).axes[0]
  first, second, third, fourth, _ = axis.containers
  along, across = ("x", "y") if horizontal else ("y", "x")
  extents = ("width", "height") if horizontal else ("height", "width")
  names = (along, across, *extents)
  assert list(attributes(first[0], *names).values()) == [1, -0.25, 2, 0.5]
  assert list(attributes(second[1], *names).values()) == (
    pytest.approx([0, 2.6, 1, 0.8])
  )
  assert [box.get_linewidth() for box in (*first, *second)] == [1.5] * 2 + [
    0
  ] * 2
  white = matplotlib.colors.to_rgba("white")
  assert {box.get_edgecolor() for box in (*first, *second)} == {white}
  assert [list(box.get_facecolor()) for box in (*third, *fourth)] == shades(
    0.25, 1.0, 0.5
  )
  assert [box.get_facecolor() for box in (*first, *second)] == [
    matplotlib.colors.to_rgba(name) for name in ("C2", "C2", "C0", "C1")
  ]
  assert [x.get_text() for x in axis.get_legend().get_texts()] == ["a"]


def test_axes_have_their_scales_limits_and_ticks(draw):
  line = plot.Line([1, 10, 100], [1, 2, 4])
  for scale, name, attribute, value in (
    ("log", "log", "base", 10),
    ("symlog", "symlog", "linthresh", 1),
    ("linear", "linear", "is_affine", True),
  ):
    axis = draw(plot.Panel([line], x=plot.Axis("x", scale))).axes[0]
    assert axis.get_xscale() == name
    assert getattr(axis.xaxis.get_transform(), attribute) == value
    assert axis.get_xlabel() == "x"
    assert axis.get_yscale() == "linear"
  axis = draw(plot.Panel(
    [line], x=plot.Axis(limits=(0, 50), reverse=True),
    y=plot.Axis(ticks=[(1, "one"), (4, "four")]),
  )).axes[0]
  assert axis.get_xlim() == (50, 0)
  assert [t.get_text() for t in axis.get_yticklabels()] == ["one", "four"]
  assert axis.get_ylim() == pytest.approx((0.85, 4.15))
  assert sizes(axis.get_yticklabels()) == {SMALL}
  assert list(axis.get_yticks()) == [1, 4]
  axis = draw(plot.Panel([line], x=plot.Axis(ticks=[]), y=plot.Axis(
    limits=(9, 1), reverse=True
  ))).axes[0]
  assert (list(axis.get_xticks()), axis.get_ylim()) == ([], (9, 1))


@pytest.mark.parametrize("ticks", [[(2, "two"), (3, "three")], None])
def test_given_ticks_are_the_only_numbers_of_a_logarithmic_axis(draw, ticks):
  line = plot.Line([1, 2, 3], [1, 2, 4])
  axis = draw(plot.Panel([line], x=plot.Axis("x", "log", ticks=ticks))).axes[0]
  minor = [text.get_text() for text in axis.get_xticklabels(minor=True)]
  assert any(minor) == (ticks is None)


def test_numbers_of_a_plain_axis_are_written_out(draw):
  """Minor ticks of the vertical axis have numbers, too."""
  line = plot.Line([1, 100_000], [1, 40])
  plain, default = draw(*(
    plot.Panel([line], x=plot.Axis("x", "log", plain=plain),
               y=plot.Axis("y", "log", plain=plain)) for plain in (True, False)
  )).axes
  for axis in (plain.xaxis, plain.yaxis):
    assert axis.get_major_formatter()(100_000) == "100000"
  assert plain.yaxis.get_minor_formatter()(20) == "20"
  for axis in (default.xaxis, default.yaxis):
    assert "10^{" in axis.get_major_formatter()(100_000)
  for axis in (plain.xaxis, default.yaxis):
    assert axis.get_minor_formatter()(200) != "200"


@pytest.mark.parametrize(("largest", "exponent"), [
  (2e5, "1e5"), (2e4, ""), (2e-2, ""), (2e-3, "1e\N{MINUS SIGN}3"),
])
def test_large_and_small_numbers_share_an_exponent(draw, largest, exponent):
  drawn = draw(plot.Panel([plot.Line([0, 1], [0, largest])]))
  drawn.canvas.draw()
  (axis,) = drawn.axes
  assert axis.yaxis.get_offset_text().get_text() == exponent


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
  assert [axis.get_visible() for axis in axes] == [True] * 5 + [False]
  (legend,) = drawn.legends
  assert [x.get_text() for x in legend.get_texts()] == ["a"]


def test_labels_are_compared_with_the_next_panels_only(draw):
  """Rows of two: a label remains if the panel below or to the left differs."""
  drawn = draw(*(
    plot.Panel([plot.Line([1], [1])], x=x, y=y)
    for x, y in (("a", "p"), ("b", "p"), ("b", "q"), ("b", "p"), ("b", "p"))
  ), columns=2)
  assert [axis.get_xlabel() for axis in drawn.axes[:5]] == [
    "a", "", "", "b", "b"
  ]
  assert [axis.get_ylabel() for axis in drawn.axes[:5]] == [
    "p", "", "q", "p", "p"
  ]


def test_figure_has_its_size_grid_titles_and_legend(draw):
  panels = [plot.Panel([
    plot.Line([1], [1], label), plot.Line([1], [2], "b")
  ], title=label.upper()) for label in ("a", "c")]
  drawn = draw(
    *panels, columns=3, title="all", legend="outside right upper",
    legend_columns=2, share_x="all",
  )
  assert drawn.get_size_inches().tolist() == [4, 3]
  assert drawn.axes[0].get_gridspec().get_geometry() == (1, 2)
  assert drawn.get_layout_engine().__class__.__name__ == (
    "ConstrainedLayoutEngine"
  )
  assert [axis.get_title() for axis in drawn.axes] == ["A", "C"]
  assert drawn.get_suptitle() == "all"
  assert sizes([*(a.title for a in drawn.axes), drawn._suptitle]) == {MEDIUM}
  (legend,) = drawn.legends
  assert [x.get_text() for x in legend.get_texts()] == ["a", "b", "c"]
  assert sizes(legend.get_texts()) == {SMALL}
  assert (legend._ncols, legend.get_frame_on()) == (2, False)
  first, second = drawn.axes
  assert first.get_shared_x_axes().joined(first, second)
  assert not first.get_shared_y_axes().joined(first, second)


def test_figure_has_one_column_and_no_legend_by_default(draw):
  line = plot.Line([1], [1], "a")
  drawn = draw(plot.Panel([line]), plot.Panel([line]))
  assert drawn.axes[0].get_gridspec().get_geometry() == (2, 1)
  assert not drawn.legends
  assert not drawn.get_suptitle()
  first, second = drawn.axes
  assert not first.get_shared_x_axes().joined(first, second)
  assert not first.get_shared_y_axes().joined(first, second)
  assert first.get_legend() is None
  lines = [plot.Line([1], [1], label) for label in "ab"]
  drawn = draw(plot.Panel(lines), legend="outside lower left")
  (legend,) = drawn.legends
  assert legend._ncols == 1


def test_frames_and_grids_are_drawn_on_request(draw):
  line = plot.Line([0, 10], [0, 20])
  full, open_, none = draw(
    plot.Panel([line], grid=True), plot.Panel([line], frame="open"),
    plot.Panel([line], frame="none"),
  ).axes
  edges = {
    axis: {k for k, spine in axis.spines.items() if spine.get_visible()}
    for axis in (full, open_)
  }
  assert edges == {
    full: {"left", "right", "top", "bottom"}, open_: {"left", "bottom"}
  }
  assert [axis.axison for axis in (full, open_, none)] == [True, True, False]
  assert [axis.xaxis.get_gridlines()[0].get_visible()
          for axis in (full, open_)] == [True, False]
  assert full.xaxis.get_gridlines()[0].get_alpha() == 0.3
  # Curved arrows need a wider margin.
  assert full.get_xlim() == pytest.approx((-0.5, 10.5))
  assert none.get_xlim() == pytest.approx((-1, 11))
  assert none.get_ylim() == pytest.approx((-2, 22))


def test_picture_has_150_dots_per_inch_and_is_closed(tmp_path):
  figure = plot.Figure([plot.Panel([plot.Line([1], [1])])], (2, 1))
  opened = drawing.pyplot().get_fignums()
  data = drawing.render_figure(figure)
  assert struct.unpack(">II", data[16:24]) == (300, 150)
  assert drawing.pyplot().get_fignums() == opened
  for name, form in (("x.png", "png"), ("x", "png"), ("x.svg", "svg"),
                     ("x.pdf", "pdf")):
    drawing.write(figure, tmp_path / name)
    assert (tmp_path / name).read_bytes() == drawing.render_figure(figure, form)
  assert (tmp_path / "x.png").read_bytes() == data
  assert (tmp_path / "x.pdf").read_bytes().startswith(b"%PDF-")
  assert "<svg" in (tmp_path / "x.svg").read_text()


def test_ticks_are_numbers_of_their_axis(draw):
  """Not differences from a number at the end of the axis."""
  figure = draw(plot.Panel([plot.Line([0, 1], [1.20001, 1.20002])]))
  figure.canvas.draw()
  (axis,) = figure.axes
  texts = [label.get_text() for label in axis.get_yticklabels()]
  assert all(1.2 <= float(text) < 1.2001 for text in texts)
  assert axis.yaxis.get_offset_text().get_text() == ""


def test_no_display_is_needed(monkeypatch):
  matplotlib.use("svg")
  drawing.pyplot()
  assert matplotlib.get_backend().lower() == "agg"


def test_unknown_mark_is_an_error(draw):
  with pytest.raises(TypeError, match="unknown mark: 7"):
    draw(plot.Panel([7]))


def test_rules_bands_matrices_and_arrows_are_drawn(draw):
  arrows = plot.Arrows([(0, 0), (1, 1)], [(1, 0), (0, 1)], [0.0, 1.0], 4.5)
  drawn = draw(
    plot.Panel([plot.Rule(2, text="two"), plot.Rule(
      3, vertical=True, label="r", style=":", colour="C1", width=2.5
    )]),
    plot.Panel([plot.Band([0, 1], [1, 2], [3, 5], "C3")]),
    plot.Panel([plot.Heat([[1, None], [3, 4]])]),
    plot.Panel([arrows], frame="none"), columns=2,
  )
  rules, band, heat, graph, bar = drawn.axes
  across, upright = rules.lines
  assert list(across.get_ydata()) == [2, 2]
  assert list(upright.get_xdata()) == [3, 3]
  names = ("linestyle", "color", "linewidth")
  assert list(attributes(across, *names).values()) == ["--", "black", 1]
  assert list(attributes(upright, *names).values()) == [":", "C1", 2.5]
  assert rules.get_legend_handles_labels() == ([upright], ["r"])
  (text,) = rules.texts
  assert list(attributes(text, "text", "color", "ha").values()) == [
    "two", "black", "right"
  ]
  # Its end is 4 points left of the right edge, 3 above the line.
  assert (text.xy, text.xyann) == ((1, 2), (-4, 3))
  assert (text.xycoords, text.anncoords) == (
    ("axes fraction", "data"), "offset points"
  )
  (area,) = band.collections
  assert area.get_datalim(band.transData).bounds == (0, 1, 1, 4)
  colour = matplotlib.colors.to_rgba("C3", 0.3)
  assert tuple(area.get_facecolor()[0]) == colour
  assert area.get_linewidth() == [0]
  (image,) = heat.images
  np.testing.assert_array_equal(
    image.get_array().filled(np.nan), [[1, np.nan], [3, 4]]
  )
  assert image.get_interpolation() == "nearest"
  assert bar.get_label() == "<colorbar>"
  ends = [(text.xyann, text.xy) for text in graph.texts]
  assert ends == [((0, 0), (1, 0)), ((1, 1), (0, 1))]
  patches = [text.arrow_patch for text in graph.texts]
  assert [list(patch.get_edgecolor()) for patch in patches] == shades(0, 1)
  for patch in patches:
    assert (patch.shrinkA, patch.shrinkB) == (4.5, 4.5)
    assert (patch.get_linewidth(), patch.get_mutation_scale()) == (1.6, 9)
    assert patch.get_connectionstyle().rad == 0.12
  assert plot.Arrows([], [], []).gap == 0
