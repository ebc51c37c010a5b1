"""Figures as plain data: panels of lines, bars and matrices.

`lines` and `stacked_bar_panels` make panels from the rows of a table, `figure`
arranges panels, and `caatnet.show.drawing` writes figures as PNG. The contents
of a panel, such as a `Line`, are called marks. Legend locations, markers and
colours are named as in matplotlib.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any, Literal

from parallel.base import labels

Numbers = Sequence[float | None]
Row = Mapping[str, Any]
_STYLES = ("-", "--", ":")
_MARKERS = "osD^v<>pPX"


@dataclasses.dataclass(frozen=True)
class Axis:
  """Axis of a panel.

  Attributes:
    label: Label with the unit.
    scale: "linear", "log" or "symlog".
    limits: Minimum and maximum; computed from the marks if None.
    ticks: Coordinates and texts of ticks; None for ticks with numbers.
    reverse: Whether values increase to the left or downwards.
    plain: Whether a logarithmic scale has numbers like 20, not powers of ten.
  """

  label: str = ""
  scale: Literal["linear", "log", "symlog"] = "linear"
  limits: tuple[float, float] | None = None
  ticks: Sequence[tuple[float, str]] | None = None
  reverse: bool = False
  plain: bool = False


@dataclasses.dataclass(frozen=True)
class Line:
  """Points, joined by a line unless ``style`` is "".

  Attributes:
    x, y: Coordinates of the points; None interrupts the line.
    label: Label in the legend; "" for none.
    style: "-", "--", ":" or "" for points alone.
    marker: Marker as matplotlib names it; "" for none.
    colour: Colour; the next of the cycle if None.
    width, size: Width of the line and size of the markers, in points.
    fill: Colour of the markers' faces; that of the line if None.
    alpha: Opacity.
    steps: Position of steps between points: "pre", "post", or "" for none.
    errors: Lower and upper ends of error bars.
    texts: Texts next to the points; None for none.
  """

  x: Numbers
  y: Numbers
  label: str = ""
  style: str = "-"
  marker: str = ""
  colour: str | None = None
  width: float = 1.5
  size: float = 6.0
  fill: str | None = None
  alpha: float = 1.0
  steps: Literal["", "pre", "post"] = ""
  errors: tuple[Numbers, Numbers] | None = None
  texts: "Texts | None" = None


@dataclasses.dataclass(frozen=True)
class Texts:
  """Texts at points.

  Attributes:
    texts: Texts, one per point.
    x, y: Coordinates of the points; None for those of the line with the texts.
    offset: Distance from the point, in points (1/72 inch).
    align: Horizontal and vertical alignment.
    size: Font size.
    rotation: Degrees.
  """

  texts: Sequence[str]
  x: Numbers | None = None
  y: Numbers | None = None
  offset: tuple[float, float] = (3, 3)
  align: tuple[str, str] = ("left", "baseline")
  size: float = 8.0
  rotation: float = 0.0


@dataclasses.dataclass(frozen=True)
class Band:
  """Area between two lines.

  Attributes:
    x: Horizontal coordinates.
    low, high: Vertical coordinates of the two lines.
    colour: Colour of the area.
  """

  x: Numbers
  low: Numbers
  high: Numbers
  colour: str


@dataclasses.dataclass(frozen=True)
class Bars:
  """Bars of a bar chart, of a stacked bar chart, or of a Gantt chart.

  Attributes:
    places: Middle of each bar, on the axis perpendicular to the bars.
    lengths: Length of each bar.
    starts: Start of each bar; 0 if None.
    label: Label in the legend; "" for none.
    colour: Colour of all bars, colour of each bar, or its shade in [0, 1].
    thickness: Width of the bars, on the axis perpendicular to them.
    horizontal: Whether bars are horizontal.
    edge: Width of the white edge, in points.
    texts: Text in each bar, in a font size that fits; () for none.
  """

  places: Sequence[float]
  lengths: Sequence[float]
  starts: Sequence[float] | None = None
  label: str = ""
  colour: str | Sequence[str] | Sequence[float] | None = None
  thickness: float = 0.8
  horizontal: bool = True
  edge: float = 0.0
  texts: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Rule:
  """Line across the whole panel.

  Attributes:
    at: Coordinate.
    vertical: Whether the line is vertical.
    label: Label in the legend; "" for none.
    style, colour, width: Attributes of the line, as in `Line`.
    text: Text at the right end of the line.
  """

  at: float
  vertical: bool = False
  label: str = ""
  style: str = "--"
  colour: str = "black"
  width: float = 1.0
  text: str = ""


@dataclasses.dataclass(frozen=True)
class Heat:
  """Matrix as colours, with a colour bar.

  Attributes:
    values: Values ``[row, column]``.
  """

  values: Sequence[Numbers]


@dataclasses.dataclass(frozen=True)
class Arrows:
  """Curved arrows between points, such as messages over a network's links.

  Attributes:
    tails, heads: Coordinates of the ends.
    shades: Shade of each arrow in [0, 1].
    gap: Distance of an arrow's ends from the points, in points (1/72 inch).
  """

  tails: Sequence[tuple[float, float]]
  heads: Sequence[tuple[float, float]]
  shades: Sequence[float]
  gap: float = 0.0


Mark = Line | Texts | Band | Bars | Rule | Heat | Arrows


@dataclasses.dataclass(frozen=True)
class Panel:
  """Panel of a figure: marks in one coordinate system.

  Attributes:
    marks: Marks, drawn in this order.
    title: Title.
    x, y: Axes; a string is a linear axis with that label. Among adjacent
      panels with the same label, only the leftmost and the lowest show it.
    legend: Location of a legend as matplotlib names it; "" for none.
    grid: Whether a grid is drawn.
    frame: "full", "open" (without the upper and right edges) or "none"
      (without axes).
  """

  marks: Sequence[Mark]
  title: str = ""
  x: Axis | str = ""
  y: Axis | str = ""
  legend: str = ""
  grid: bool = False
  frame: Literal["full", "open", "none"] = "full"

  @property
  def axes(self) -> tuple[Axis, Axis]:
    """Horizontal and vertical axis."""
    return tuple(
      Axis(a) if isinstance(a, str) else a for a in (self.x, self.y)
    )


@dataclasses.dataclass(frozen=True)
class Figure:
  """Figure of panels in rows of equal length.

  Attributes:
    panels: Panels, row by row.
    size: Width and height of the whole figure, in inches.
    columns: Number of panels in a row.
    title: Title.
    legend: Location of a common legend as matplotlib names it; "" for none.
    legend_columns: Number of columns of that legend.
    share_x, share_y: Panels with a common axis: "all", "row", "col" or "none".
  """

  panels: Sequence[Panel]
  size: tuple[float, float]
  columns: int = 1
  title: str = ""
  legend: str = ""
  legend_columns: int = 1
  share_x: str = "none"
  share_y: str = "none"


def stacked_bars(
  parts: Mapping[str, Sequence[float]], **options: Any
) -> list[Bars]:
  """Returns stacked bars, one series per part.

  Args:
    parts: Label of each part -> its length in each bar.
    **options: Further attributes of `Bars`.
  """
  found: list[Bars] = []
  starts: list[float] = []
  for label, lengths in parts.items():
    starts = starts or [0.0] * len(lengths)
    found.append(
      Bars(range(len(lengths)), lengths, starts, label, **options)
    )
    # The next part begins at the end of this one.
    starts = [a + b for a, b in zip(starts, lengths, strict=True)]
  return found


def _parse_spec(spec: str) -> tuple[str, float, str]:
  """Returns (key, unit, label) of a text "key/unit=label".

  The unit is the number by which values are divided.
  """
  spec, _, label = spec.partition("=")
  key, _, unit = spec.partition("/")
  return key, float(unit or 1), label or labels.heading(key)


def _value(row: Row, spec: str) -> float | None:
  """Returns the value of a key "key/unit" in a row, divided by the unit."""
  key, unit, _ = _parse_spec(spec)
  found = labels.find(row, key)
  return None if found is None else found / unit


def _groups(
  rows: Sequence[Row], keys: str
) -> dict[tuple[Any, ...], list[Row]]:
  """Groups rows by the values of some keys, which are separated by spaces."""
  found: dict[tuple[Any, ...], list[Row]] = {}
  for row in rows:
    found.setdefault(tuple(row[key] for key in keys.split()), []).append(row)
  return found


def _axis(label: str, values: Sequence[float | None], is_log: bool) -> Axis:
  """Returns an axis; a logarithmic one has plain numbers if max / min < 30."""
  if not is_log:
    return Axis(label)
  found = [value for value in values if value]
  is_short = bool(found) and max(found) < 30 * min(found)
  return Axis(label, "log", plain=is_short)


def lines(
  rows: Sequence[Row], x: str, *y: str, by: str = "", each: str = "",
  log: str = "", label: str = "", title: str = "", marker: str = "o",
  legend: str = "best", joined: bool = True,
) -> list[Panel]:
  """Returns panels with a line for each group of rows and each key of ``y``.

  Args:
    rows: Rows, in the order of the points.
    x: Key of the horizontal axis, as "key" or "key/unit=label"; values are
      divided by the number ``unit``, and "a.b" is item b of the mapping a.
    *y: Keys of the vertical axis, in the same form. Their lines differ in style
      if rows are grouped, and otherwise in colour.
    by: Keys, separated by spaces, whose values group the rows.
    each: Keys, separated by spaces, whose values select the panel of a row.
    log: Axes with a logarithmic scale: "", "x", "y" or "xy".
    label: Label of the vertical axis; that of the first key if "".
    title: Beginning of the panels' titles; the values of ``each`` follow.
    marker: Marker of the points.
    legend: Location of the legend of the first panel.
    joined: Whether points are joined by lines. If not, each group has a
      different marker.

  Example:
    >>> rows = [{"p": 0.5, "rate": 2}, {"p": 1, "rate": 1}]
    >>> (panel,) = lines(rows, "p", "rate/2=half")
    >>> panel.marks[0].x, panel.marks[0].y, panel.axes[1].label
    ([0.5, 1.0], [1.0, 0.5], 'half')
  """
  number = {key: i for i, key in enumerate(_groups(rows, by))}
  found = []
  for panel, chosen in _groups(rows, each).items():
    marks = [
      Line(
        [_value(row, x) for row in own], [_value(row, key) for row in own],
        _words((*group, _parse_spec(key)[2] if len(y) > 1 or not by else "")),
        # The eleventh group has the colour of the first, and another style.
        _STYLES[(i + number[group] // 10) % 3 if by else 0] * joined,
        marker if joined else _MARKERS[number[group] % len(_MARKERS)],
        size=6 if by and not joined else 4,
        colour=f"C{number[group] % 10 if by else i}",
      )
      for group, own in _groups(chosen, by).items() for i, key in enumerate(y)
    ]
    ends = (
      _axis(text, [v for mark in marks for v in getattr(mark, name)],
            name in log)
      for name, text in (
        ("x", _parse_spec(x)[2]), ("y", label or _parse_spec(y[0])[2])
      )
    )
    found.append(Panel(
      marks, _words((title, *panel)), *ends, "" if found else legend, grid=True,
    ))
  return found


def _words(values: Iterable[Any]) -> str:
  """Returns the texts of values, separated by commas."""
  return ", ".join(filter(None, map(labels.text, values)))


def stacked_bar_panels(
  rows: Sequence[Row], name: str, parts: Mapping[str, str] | str, *,
  label: str = "", each: str = "", title: str = "",
) -> list[Panel]:
  """Returns panels with a horizontal stacked bar for each row.

  Args:
    rows: Rows.
    name: Keys of the bars' names, separated by spaces.
    parts: Label of each part -> its key as in `lines`, or the key of a mapping
      whose items are the parts; parts that are 0 in all rows are left out.
    label: Label of the axis.
    each: Keys, separated by spaces, whose values select the panel of a row.
    title: Beginning of the panels' titles; the values of ``each`` follow.
  """
  keys = parts
  if isinstance(keys, str):
    key, unit, _ = _parse_spec(keys)
    keys = {part: f"{key}.{part}/{unit}" for part in rows[0][key]
            if any(row[key][part] for row in rows)}
  found = []
  for panel, chosen in _groups(rows, each).items():
    names = [_words(group) for row in chosen for group in _groups([row], name)]
    found.append(Panel(
      stacked_bars({
        part: [_value(row, key) or 0.0 for row in chosen]
        for part, key in keys.items()
      }),
      _words((title, *panel)), label,
      Axis(ticks=list(enumerate(names)), reverse=True),
      "best" if len(keys) > 1 and not found else "", frame="open",
    ))
  return found


def figure(
  panels: Sequence[Panel], title: str = "", columns: int = 3, **options: Any
) -> Figure:
  """Arranges panels in a figure, whose size follows from their number.

  Args:
    panels: Panels, row by row.
    title: Title.
    columns: Largest number of panels in a row.
    **options: Further attributes of `Figure`.
  """
  columns = min(columns, len(panels))
  # Panels of figures with many columns are smaller, to fit the page's width.
  width, height = (4.5, 3.8) if columns < 3 else (3.2, 2.9)
  size = 1 + width * columns, 0.6 + height * -(-len(panels) // columns)
  return Figure(panels, size, columns, title, **options)
