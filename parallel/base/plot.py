"""Figures as plain data: panels of lines, bars and matrices.

`caatnet.show.drawing` writes them as PNG. Marks have only the attributes
that the figures here need; legend locations, markers and colours are named as
in matplotlib.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, Literal

Numbers = Sequence[float | None]


@dataclasses.dataclass(frozen=True)
class Axis:
  """Axis of a panel.

  Attributes:
    label: Label with the unit.
    scale: "linear", "log", "log2" or "symlog".
    limits: Minimum and maximum; computed from the marks if None.
    ticks: Places and texts of ticks, instead of numbers.
    reverse: Whether values increase to the left or downwards.
    plain: Whether numbers of a logarithmic scale are written out.
    margin: Factor by which limits are widened on each side.
  """

  label: str = ""
  scale: Literal["linear", "log", "log2", "symlog"] = "linear"
  limits: tuple[float, float] | None = None
  ticks: Sequence[tuple[float, str]] | None = None
  reverse: bool = False
  plain: bool = False
  margin: tuple[float, float] = (1.0, 1.0)


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
    texts: Text next to each point.
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
    x, y: Points; those of the line that the texts belong to if None.
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
    low, high: Lower and upper ends.
    colour: Colour.
  """

  x: Numbers
  low: Numbers
  high: Numbers
  colour: str


@dataclasses.dataclass(frozen=True)
class Bars:
  """Bars: of a chart, of a stack, or the tasks of a schedule over time.

  Attributes:
    places: Coordinate of each bar's middle, across the bars.
    lengths: Length of each bar.
    starts: Start of each bar; 0 if None.
    label: Label in the legend; "" for none.
    colour: Colour of all bars, one per bar, or numbers in [0, 1] for shades.
    thickness: Extent across the bar.
    horizontal: Whether bars are horizontal.
    edge: Width of the white edge, in points.
    texts: Texts of the bars.
    inside: Whether the texts are in the bars, at a size that fits.
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
  inside: bool = False


@dataclasses.dataclass(frozen=True)
class Rule:
  """Line across the whole panel.

  Attributes:
    at: Coordinate.
    vertical: Whether the line is vertical.
    label: Label in the legend; "" for none.
    style, colour, width: Attributes of the line, as in `Line`.
    text: Text at the right end.
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
    legend: Location of a legend as matplotlib names it; "" for none, "below"
      for a row below the panel.
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
    legend_title: Title of that legend.
    share_x, share_y: Panels with a common axis: "all", "row", "col" or "none".
  """

  panels: Sequence[Panel]
  size: tuple[float, float]
  columns: int = 1
  title: str = ""
  legend: str = ""
  legend_columns: int = 1
  legend_title: str = ""
  share_x: str = "none"
  share_y: str = "none"


def stacked(
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
