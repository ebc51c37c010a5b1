"""Output of figures as PNG, SVG or PDF; needs matplotlib (extra ``plot``)."""

import functools
import importlib.util
import io
import pathlib
from typing import Any

import numpy as np

from parallel.base import files, plot
from parallel.base.plot import Axis, Figure, Panel

_DPI = 150
# Minimum font size of texts inside bars, in points; smaller ones are omitted.
_MIN_FONT = 1.0


def is_available() -> bool:
  """Returns whether matplotlib is installed."""
  return importlib.util.find_spec("matplotlib") is not None


def pyplot() -> Any:
  """Imports matplotlib.pyplot for use without a display.

  Raises:
    ValueError: matplotlib is missing; the message names the extra.
  """
  try:
    import matplotlib
  except ImportError as error:
    raise ValueError(
      'plots need matplotlib: pip install "caatnet[plot]"'
    ) from error
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  return plt


def write(figure: Figure, path: pathlib.Path) -> None:
  """Writes a figure, replacing an existing file atomically.

  Args:
    figure: The figure.
    path: File to write: SVG or PDF if it has that suffix, otherwise PNG.
  """
  suffix = path.suffix[1:]
  data = render_figure(figure, suffix if suffix in ("svg", "pdf") else "png")
  with files.atomic_file(path) as temporary:
    temporary.write_bytes(data)


def render_figure(figure: Figure, form: str = "png") -> bytes:
  """Returns a figure as the bytes of a file; equal figures give equal bytes.

  Args:
    figure: The figure.
    form: "png", "svg" or "pdf".
  """
  out = io.BytesIO()
  drawn = draw(figure)
  dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
  # Texts of an SVG stay texts, and ids in it do not depend on the process.
  with pyplot().rc_context({"svg.fonttype": "none", "svg.hashsalt": "figure"}):
    drawn.savefig(out, dpi=_DPI, format=form, metadata=dates.get(form))
  pyplot().close(drawn)
  return out.getvalue()


def draw(figure: Figure) -> Any:
  """Returns a figure as a matplotlib figure, which the caller must close."""
  plt, panels = pyplot(), figure.panels
  columns = min(figure.columns, len(panels))
  # Large and small tick labels share an exponent at the end of the axis, but no
  # additive offset.
  with plt.rc_context({
    "axes.formatter.limits": (-3, 5), "axes.formatter.useoffset": False,
  }):
    drawn, axes = plt.subplots(
      -(-len(panels) // columns), columns, figsize=figure.size,
      sharex=figure.share_x, sharey=figure.share_y, squeeze=False,
      layout="constrained",
    )
  for axis in axes.flat[len(panels) :]:
    axis.set_visible(False)  # the last row may be incomplete
  # All marks are drawn before limits are set: panels may share their limits.
  for step in _draw_marks, _finish:
    for axis, panel in zip(axes.flat, panels, strict=False):
      step(axis, panel)
  for index, panel in enumerate(panels):
    x, y = panel.axes
    # A label that the neighbouring panel shows is not repeated.
    below = panels[index + columns : index + columns + 1]
    if not any(x.label == other.axes[0].label for other in below):
      axes.flat[index].set_xlabel(x.label)
    if index % columns == 0 or y.label != panels[index - 1].axes[1].label:
      axes.flat[index].set_ylabel(y.label)
  if figure.legend:
    # One entry per label over all panels.
    handles: dict[str, Any] = {}
    for axis in axes.flat:
      for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
        handles.setdefault(label, handle)
    drawn.legend(
      handles.values(), handles, loc=figure.legend, frameon=False,
      fontsize="small", ncols=figure.legend_columns,
    )
  if figure.title:
    drawn.suptitle(figure.title, fontsize="medium")
  return drawn


def _draw_marks(axis: Any, panel: Panel) -> None:
  """Draws the frame of a panel and its marks, such as lines and bars."""
  axis.set_title(panel.title, fontsize="medium")
  if panel.frame == "none":
    axis.set_axis_off()
    axis.margins(0.1)  # curved arrows extend beyond their end points
  elif panel.frame == "open":
    axis.spines[["top", "right"]].set_visible(False)
  if panel.grid:
    axis.grid(alpha=0.3)
  for name, of in zip("xy", panel.axes, strict=True):
    _set_scale(axis, name, of)
  for mark in panel.marks:
    _draw(mark, axis)


def _finish(axis: Any, panel: Panel) -> None:
  """Sets the limits and ticks of a panel, then draws texts and the legend."""
  for name, of in zip("xy", panel.axes, strict=True):
    _set_limits(axis, name, of)
  # The size of a text inside a bar depends on the limits.
  for mark in panel.marks:
    if isinstance(mark, plot.Bars) and mark.texts:
      _write_inside(axis, mark)
  if panel.legend:
    axis.legend(fontsize="small", loc=panel.legend)


def _set_scale(axis: Any, name: str, of: Axis) -> None:
  """Sets the scale of the axis "x" or "y", such as "log"."""
  if of.scale != "linear":  # setting the default would reset the formatter
    options = {"linthresh": 1.0} if of.scale == "symlog" else {}
    getattr(axis, f"set_{name}scale")(of.scale, **options)


def _set_limits(axis: Any, name: str, of: Axis) -> None:
  """Sets limits, direction and ticks of the axis "x" or "y"."""
  get, put = (getattr(axis, f"{verb}_{name}lim") for verb in ("get", "set"))
  if of.limits:
    put(of.limits)
  if of.reverse and not getattr(axis, f"{name}axis_inverted")():
    put(get()[::-1])
  if of.ticks is not None:
    # An empty list removes all ticks.
    places, texts = zip(*of.ticks, strict=True) if of.ticks else ((), ())
    getattr(axis, f"set_{name}ticks")(places, texts, fontsize="small")
    # Numbers of a logarithmic axis's minor ticks would overlap them.
    getattr(axis, f"{name}axis").minorticks_off()
  if of.plain:
    number = getattr(axis, f"{name}axis")
    number.set_major_formatter("{x:g}")
    if name == "y":  # labels of minor ticks do not overlap here
      number.set_minor_formatter("{x:g}")


@functools.singledispatch
def _draw(mark: plot.Mark, axis: Any) -> None:
  """Draws a mark, such as a line or bars, into a panel's axes."""
  raise TypeError(f"unknown mark: {mark}")


@_draw.register
def _(mark: plot.Line, axis: Any) -> None:
  # None becomes NaN, which interrupts the line.
  x, y = np.array(mark.x, float), np.array(mark.y, float)
  options = {
    "label": mark.label or None, "linestyle": mark.style or "none",
    "marker": mark.marker or None, "linewidth": mark.width,
    "markersize": mark.size, "color": mark.colour, "alpha": mark.alpha,
    "markerfacecolor": mark.fill,
    "drawstyle": f"steps-{mark.steps}" if mark.steps else None,
  }
  # matplotlib's defaults apply to attributes that are None.
  options = {k: v for k, v in options.items() if v is not None}
  if mark.errors:
    # matplotlib takes distances from the point, not coordinates.
    low, high = (np.array(end, float) for end in mark.errors)
    axis.errorbar(x, y, yerr=[y - low, high - y], capsize=3, **options)
  else:
    axis.plot(x, y, **options)
  if mark.texts:
    _draw_texts(axis, mark.texts, x, y)


@_draw.register
def _(mark: plot.Texts, axis: Any) -> None:
  _draw_texts(axis, mark, mark.x, mark.y)


@_draw.register
def _(mark: plot.Band, axis: Any) -> None:
  axis.fill_between(
    mark.x, mark.low, mark.high, color=mark.colour, alpha=0.3, linewidth=0
  )


@_draw.register
def _(mark: plot.Bars, axis: Any) -> None:
  colour = mark.colour
  if isinstance(colour, list | tuple | np.ndarray) and len(colour) and (
    not isinstance(colour[0], str)
  ):
    # Numbers are shades of the colour map.
    colour = _map_to_colours(colour)
  bar = axis.barh if mark.horizontal else axis.bar
  bar(
    mark.places, mark.lengths, mark.thickness,
    **{"left" if mark.horizontal else "bottom": mark.starts or 0},
    label=mark.label or None, color=colour, edgecolor="white",
    linewidth=mark.edge,
  )


@_draw.register
def _(mark: plot.Rule, axis: Any) -> None:
  line = axis.axvline if mark.vertical else axis.axhline
  line(
    mark.at, color=mark.colour, linestyle=mark.style, linewidth=mark.width,
    label=mark.label or None,
  )
  if mark.text:
    axis.annotate(
      mark.text, (1, mark.at), xycoords=("axes fraction", "data"),
      xytext=(-4, 3), textcoords="offset points", ha="right", color=mark.colour,
    )


@_draw.register
def _(mark: plot.Heat, axis: Any) -> None:
  # No interpolation: one square per matrix element.
  image = axis.imshow(
    np.array(mark.values, float), cmap="viridis", interpolation="nearest"
  )
  axis.figure.colorbar(image, ax=axis)


@_draw.register
def _(mark: plot.Arrows, axis: Any) -> None:
  for tail, head, colour in zip(
    mark.tails, mark.heads, _map_to_colours(mark.shades), strict=True
  ):
    axis.annotate("", head, tail, arrowprops={
      "arrowstyle": "-|>", "connectionstyle": "arc3,rad=0.12", "color": colour,
      "linewidth": 1.6, "shrinkA": mark.gap, "shrinkB": mark.gap,
      "mutation_scale": 9,
    })


def _draw_texts(axis: Any, mark: plot.Texts, x: Any, y: Any) -> None:
  """Writes texts at points."""
  horizontal, vertical = mark.align
  for text, *point in zip(mark.texts, x, y, strict=True):
    axis.annotate(
      text, point, xytext=mark.offset, textcoords="offset points",
      fontsize=mark.size, rotation=mark.rotation, ha=horizontal, va=vertical,
    )


def _write_inside(axis: Any, mark: plot.Bars) -> None:
  """Writes texts into horizontal bars, at font sizes that fit their lengths."""
  low, high = axis.get_xlim()
  # Inches per unit of x; axes take about 92 % of the figure's width.
  inch = axis.figure.get_size_inches()[0] * 0.92 / (high - low)
  starts = mark.starts or [0.0] * len(mark.lengths)
  for text, place, start, length in zip(
    mark.texts, mark.places, starts, mark.lengths, strict=True
  ):
    # A character is about 0.6 times as wide as the font size.
    room = 0.9 * 72 * inch * length / max(1, 0.6 * len(text))
    if room >= _MIN_FONT:
      axis.text(
        start + length / 2, place, text, ha="center", va="center_baseline",
        clip_on=True, fontsize=min(8.0, room),
      )


def _map_to_colours(values: Any) -> Any:
  """Returns the colours (RGBA) of numbers in [0, 1]."""
  pyplot()
  from matplotlib import colormaps

  return colormaps["turbo"](np.array(values, float))
