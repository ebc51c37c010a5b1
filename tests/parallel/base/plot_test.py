"""Panels of rows."""

import doctest

import pytest

from parallel.base import plot

ROWS = [
  {"way": f"way {i % 11}", "net": net, "n": 10**n, "of": {"a": i, "b": None}}
  for net in "xy" for i in range(1, 12) for n in (1, 2)
]


def test_lines_of_eleven_groups_can_be_told_apart():
  """Panels have one colour and style for each group, and one legend."""
  panels = plot.lines(
    ROWS, "n/10=tens", "of.a=A", by="way", each="net", log="x"
  )
  assert [panel.title for panel in panels] == ["x", "y"]
  assert [bool(panel.legend) for panel in panels] == [True, False]
  looks = [[(x.colour, x.style) for x in panel.marks] for panel in panels]
  assert looks[0] == looks[1]
  assert len(set(looks[0])) == 11
  labels = [line.label for line in panels[0].marks]
  assert labels == [f"way {i % 11}" for i in range(1, 12)]
  assert panels[0].marks[2].x == [1, 10]
  assert panels[0].marks[2].y == [3, 3]
  assert panels[0].axes == (
    plot.Axis("tens", "log", plain=True), plot.Axis("A")
  )


def test_keys_of_a_group_differ_in_style_and_points_in_markers():
  two = plot.lines(ROWS[:4], "n", "of.a", "of.b", by="way")[0]
  assert [line.style for line in two.marks] == ["-", "--"] * 2
  assert [line.label for line in two.marks[:2]] == [
    "way 1, of.a", "way 1, of.b"
  ]
  assert two.marks[1].y == [None, None]
  plain = plot.lines(ROWS[:1], "n", "of.a", "of.b")[0]
  assert [x.colour for x in plain.marks] == ["C0", "C1"]
  points = plot.lines(ROWS[:8], "n", "of.a", by="way", joined=False)[0]
  assert not any(line.style for line in points.marks)
  assert len({line.marker for line in points.marks}) == 4


def test_titles_and_labels_precede_those_of_the_keys():
  (panel,) = plot.lines(
    ROWS[:2], "n", "of.a", "n", "of.a/2=half", by="way", each="net",
    title="all", label="both",
  )
  assert (panel.title, panel.axes[1].label) == ("all, x", "both")
  assert [line.style for line in panel.marks] == ["-", "--", ":"]
  assert [line.y for line in panel.marks] == [[1, 1], [10, 100], [0.5, 0.5]]
  assert [line.label for line in panel.marks][1:] == ["way 1, n", "way 1, half"]
  rows = [{"name": "a", "kind": "k", "one": None, "two": 2.0}]
  (bars,) = plot.stacked_bar_panels(
    rows, "name", {"A": "one", "B": "two"}, each="kind", title="all"
  )
  assert (bars.title, bars.legend) == ("all, k", "best")
  assert [mark.lengths for mark in bars.marks] == [[0.0], [2.0]]


@pytest.mark.parametrize(("largest", "plain"), [(29, True), (30, False)])
def test_short_logarithmic_axes_have_numbers(largest, plain):
  rows = [{"x": x, "y": 1} for x in (0, 1, largest)]
  (panel,) = plot.lines(rows, "x", "y", log="x")
  assert panel.axes == (
    plot.Axis("x", "log", plain=plain), plot.Axis("y", "linear")
  )


def test_numbers_of_a_long_logarithmic_axis_are_powers():
  rows = [{"x": 0, "y": 1}, {"x": 1, "y": 1e6}]
  (panel,) = plot.lines(rows, "x", "y", log="xy")
  assert [axis.plain for axis in panel.axes] == [True, False]
  (empty,) = plot.lines([{"x": 1, "y": None}], "x", "y", log="xy")
  assert not empty.axes[1].plain


def test_stacks_leave_out_parts_without_length():
  rows = [
    {"name": "a", "kind": k, "parts": {"one": one, "two": 0, "three": 2e3}}
    for k, one in (("k", 0), ("l", 1e3))
  ]
  panels = plot.stacked_bar_panels(
    rows, "name", "parts/1e3", label="kB", each="kind"
  )
  assert [panel.title for panel in panels] == ["k", "l"]
  one, three = panels[1].marks  # the same parts in all panels
  assert (one.label, one.lengths, three.starts) == ("one", [1.0], [1.0])
  assert [mark.label for mark in panels[0].marks] == ["one", "three"]
  assert panels[0].axes[1].ticks == [(0, "a")]
  (single,) = plot.stacked_bar_panels(rows, "name kind", {"": "parts.three"})
  assert single.axes[1].ticks == [(0, "a, k"), (1, "a, l")]
  assert not single.legend


def test_figures_grow_with_their_panels():
  panels = plot.lines(ROWS, "n", "of.a", each="way")
  small, large = (plot.figure(panels[:n], "t", 4) for n in (2, 11))
  assert (small.columns, large.columns) == (2, 4)
  assert small.size == pytest.approx((1 + 2 * 4.5, 0.6 + 3.8))
  # Panels of wide figures are smaller.
  assert large.size == pytest.approx((1 + 4 * 3.2, 0.6 + 3 * 2.9))


def test_examples_run():
  assert doctest.testmod(plot) == (0, 3)
