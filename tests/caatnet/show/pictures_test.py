"""Pictures of runs, compared with the numbers of these runs."""

import numpy as np
import pytest

from caatnet.show import pictures
from parallel.base.plot import Axis

pytest.importorskip("matplotlib")


@pytest.fixture
def saved(monkeypatch):
  """Axes of the figures that are saved, which are not rendered."""
  found = []
  monkeypatch.setattr(
    "matplotlib.figure.Figure.savefig",
    lambda figure, out, **_: found.extend(figure.axes),
  )
  return found


def places(axis):
  """Returns the horizontal coordinates of each mark with error bars."""
  return [list(mark.lines[0].get_xdata()) for mark in axis.containers]


def row(p, tensor, loss, scale="forward"):
  return {"p": p, "tensor": tensor, "private_scale": scale,
          "validation_loss": loss, "bytes": 10 * p}


def points(figure):
  (panel,) = figure.panels
  return {
    mark.label: [list(point) for point in zip(mark.x, mark.y, strict=True)]
    for mark in panel.marks
  }


def test_lines_of_a_sweep_have_one_number_of_ranks():
  """p = 1 has no private channels: it ends the lines of all their scales."""
  figure = pictures.plot_sweep([
    row(1.0, 2, 1.0), row(0.5, 2, 2.0), row(0.5, 2, 4.0),
    row(0.5, 2, 5.0, "none"), row(1.0, 4, 7.0), row(0.5, 4, 8.0),
  ], "bytes", "bytes")
  assert points(figure) == {
    "r=2, private scale: forward": [[5.0, 3.0], [10.0, 1.0]],
    "r=2, private scale: none": [[5.0, 5.0], [10.0, 1.0]],
    "r=4, private scale: forward": [[5.0, 8.0], [10.0, 7.0]],
  }
  (panel,) = figure.panels
  assert figure.size == (7, 4.4)
  # Error bars are the range over seeds.
  assert panel.marks[0].errors == ([2.0, 1.0], [4.0, 1.0])
  assert panel.axes == (
    Axis("bytes"), Axis("validation loss [nats per byte]")
  )
  assert panel.legend == "best"


def sent_row(name, seed, loss, sent, **more):
  return {"point": f"outer.algorithm={name}", "seed": seed, "sent": sent,
          "validation_loss": loss, **more}


def test_marks_are_means_of_one_point_above_the_baseline():
  """Seed by seed; seeds that the baseline lacks are left out."""
  figure = pictures.plot_points([
    sent_row("diloco", 0, 1.0, 3.0), sent_row("diloco", 1, 2.0, 3.0),
    sent_row("noloco", 1, 2.5, 4.0), sent_row("noloco", 0, 1.25, 4.0),
    sent_row("noloco", 7, 9.0, 4.0), sent_row("eager", 8, 9.0, 5.0),
  ], lambda r: r["sent"], "sent")
  (panel,) = figure.panels
  *marks, zero = panel.marks
  assert [(m.label, m.x, m.y, m.errors) for m in marks] == [
    ("diloco", [3.0], [0.0], ([0.0], [0.0])),
    ("noloco", [4.0], [0.375], ([0.25], [0.5])),
  ]
  assert zero.at == 0
  assert [(mark.marker, mark.style) for mark in marks] == [
    ("o", ""), ("s", "")
  ]
  assert panel.axes[1].label == (
    "validation loss above that of diloco\n[nats per byte]"
  )
  assert figure.legend == "outside lower left"


def test_losses_of_a_single_point_are_its_own():
  figure = pictures.plot_points(
    [sent_row("diloco", 0, 1.0, 3.0), sent_row("diloco", 1, 2.0, 3.0)],
    lambda r: r["sent"], "sent",
  )
  assert points(figure) == {"diloco": [[3.0, 1.5]]}
  assert figure.panels[0].axes[1].label == "validation loss [nats per byte]"


@pytest.mark.parametrize(("amounts", "scale"), [
  ((0.0, 1.0), "symlog"), ((1.0, 10.0), "linear"), ((1.0, 10.01), "log"),
  ((3.0, 3.0), "linear"), ((30.0, 40_000.0), "log"),
])
def test_scale_is_logarithmic_beyond_a_factor_of_ten(amounts, scale):
  rows = [
    sent_row(a, 0, 1.0, a, loss_label="nats per token") for a in amounts
  ]
  figure = pictures.plot_points(rows, lambda r: r["sent"], "sent")
  (panel,) = figure.panels
  axis = panel.axes[0]
  assert (axis.label, axis.scale) == ("sent", scale)
  if scale == "log":
    (first, _), *_, (last, text) = axis.ticks
    low, high = axis.limits
    assert low <= first <= 2.5 * low
    assert high / 2.5 <= last <= high
    assert text == {10.01: "10", 40_000.0: "50,000"}[amounts[1]]
    assert low < amounts[0] < amounts[1] < high
  assert panel.axes[1].label.endswith("[nats per token]")
  # Each entry of the legend below adds a line to the height.
  one = pictures.plot_points(rows[:1], lambda r: r["sent"], "sent")
  lines = len(set(amounts)) - 1
  assert one.size == pytest.approx((8, 4.77))
  assert figure.size == pytest.approx((8, 4.77 + 0.17 * lines))


def study_row(**changes):
  return {
    "point": "a", "seed": 1, "validation_loss": 2.0, "p": 1.0, "tensor": 2,
    "private_scale": "none", "worker": 1, "worker_bytes": 0.0,
    "data_bytes": 0.0, "backward_bytes": 8.0, "units_per_step": 4,
    "unit": "tokens", **changes,
  }


@pytest.mark.parametrize(("changes", "names"), [
  ([{}, {}], []),
  ([{}, {"data_bytes": 3.0}], ["data_bytes"]),
  ([{}, {"worker": 2, "worker_bytes": 5.0, "data_bytes": 3.0}],
   ["worker_bytes"]),
  ([{"worker": 2}, {"p": 0.5}], ["p", "worker_bytes"]),
  ([{}, {"p": 0.5, "backward_bytes": 6.0}], ["backward_bytes", "p"]),
])
def test_study_is_plotted_against_each_quantity_that_varies(
  tmp_path, saved, changes, names
):
  """Traffic of workers takes precedence over that of the data axes."""
  written = pictures.plot_study(
    [study_row(**more) for more in changes], tmp_path
  )
  assert sorted(path.name for path in tmp_path.iterdir()) == [
    f"loss_against_{name}.{suffix}" for name in names
    for suffix in ("pdf", "png", "svg")
  ]
  assert {*written} == {*tmp_path.glob("*.png")}


def test_bytes_of_workers_are_counted_per_worker_and_token(tmp_path, saved):
  """All tensor ranks of a worker send; the workers share a step's tokens."""
  pictures.plot_study([
    study_row(worker=4, worker_bytes=1000.0, tensor=2, units_per_step=64)
  ], tmp_path)
  axis = saved[0]
  assert places(axis) == [[1000 * 2 / (64 / 4)]]
  assert axis.get_xlabel() == (
    "operand bytes per worker and token of its own (worker axis)"
  )


def test_other_axes_of_a_study_have_their_units(tmp_path, saved):
  pictures.plot_study([
    study_row(data_bytes=7.0),
    study_row(point="b", p=0.5, backward_bytes=6.0),
  ], tmp_path)
  assert {axis.get_xlabel(): places(axis)[0] for axis in saved} == {
    "operand bytes per device and step (data axes)": [7.0],
    "p, the synchronised share of the stream": [0.5, 1.0],
    "operand bytes of the backward pass, per device and step (tensor axis)":
    [6.0, 8.0],
  }


def test_losses_of_positions_are_plotted_from_one(tmp_path):
  figure = pictures.plot_positions(
    np.array([3.0, 2.0, 1.5]), tmp_path / "x.png", "nats per token"
  )
  (panel,) = figure.panels
  (line,) = panel.marks
  assert (line.width, figure.size) == (1, (7, 4))
  assert (list(line.x), line.y) == ([1, 2, 3], [3.0, 2.0, 1.5])
  assert panel.axes == (
    Axis("tokens of context", "log"), Axis("loss [nats per token]")
  )


def test_losses_are_plotted_over_steps(tmp_path):
  (tmp_path / "metrics.jsonl").write_text(
    '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n'
    '{"step": 2, "validation_loss": 2.5}\n'
  )
  figure = pictures.plot_losses({"a": tmp_path}, tmp_path / "x.png", {"b": 1.5})
  (panel,) = figure.panels
  training, validation, reference = panel.marks
  assert (training.x, training.y) == ((1, 2), (3.0, 2.0))
  assert (validation.x, validation.y) == ((2,), (2.5,))
  assert (reference.at, reference.text) == (1.5, "b")
  assert not reference.vertical
  assert validation.label == "a (validation)"
  # The training loss is drawn thin and pale, in the same colour.
  assert training.colour == validation.colour == "C0"
  assert training.label == ""
  assert (training.width, training.alpha) == (1, 0.35)
  assert validation.alpha == 1
  assert panel.axes == (Axis("step"), Axis("loss [nats per byte]"))
  assert panel.legend == "best"
  assert figure.size == (7, 4.2)
  assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("text", "label"), [
  ('{"step": 1, "loss": 3.0}\n', "a"),
  ('{"step": 1, "validation_loss": 3.0}\n', "a (validation)"),
  ("", None),
])
def test_run_without_a_loss_has_no_line_for_it(text, label, tmp_path):
  (tmp_path / "metrics.jsonl").write_text(text)
  figure = pictures.plot_losses({"a": tmp_path}, tmp_path / "x.png")
  (panel,) = figure.panels
  assert [mark.label for mark in panel.marks] == [label] * bool(text)


def test_each_run_has_a_colour(tmp_path, saved):
  (tmp_path / "metrics.jsonl").write_text(
    '{"step": 1, "loss": 3.0}\n{"step": 1, "validation_loss": 2.0}\n'
  )
  runs = {"a": tmp_path, "b": tmp_path}
  figure = pictures.plot_losses(runs, tmp_path / "x.png", label="nats")
  (panel,) = figure.panels
  assert [mark.colour for mark in panel.marks] == ["C0", "C0", "C1", "C1"]
  assert panel.y == Axis("loss [nats]")
