"""Pictures of runs, compared with the numbers of these runs."""

import pytest

from caatnet.show import pictures

pytest.importorskip("matplotlib")


def row(p, tensor, loss, scale="forward"):
  return {"p": p, "tensor": tensor, "private_scale": scale,
          "validation_loss": loss, "bytes": 10 * p}


def points(figure):
  (panel,) = figure.panels
  return {
    mark.label: [list(point) for point in zip(mark.x, mark.y, strict=True)]
    for mark in panel.marks
  }


def test_lines_of_a_sweep_have_one_number_of_ranks(tmp_path):
  """p = 1 has no private channels: it ends the lines of all their scales."""
  figure = pictures.plot_sweep([
    row(1.0, 2, 1.0), row(0.5, 2, 2.0), row(0.5, 2, 4.0),
    row(0.5, 2, 5.0, "none"), row(1.0, 4, 7.0), row(0.5, 4, 8.0),
  ], "bytes", "bytes", tmp_path / "x.png")
  assert points(figure) == {
    "r=2, private scale: forward": [[5.0, 3.0], [10.0, 1.0]],
    "r=2, private scale: none": [[5.0, 5.0], [10.0, 1.0]],
    "r=4, private scale: forward": [[5.0, 8.0], [10.0, 7.0]],
  }


def test_marks_are_means_of_one_point_of_a_sweep(tmp_path):
  rows = [
    {"point": f"outer.algorithm={name}", "validation_loss": loss, "sent": sent}
    for name, loss, sent in (("diloco", 1.0, 3.0), ("diloco", 2.0, 3.0),
                             ("noloco", 5.0, 4.0))
  ]
  figure = pictures.plot_points(
    rows, lambda r: r["sent"], "sent", tmp_path / "x.png"
  )
  assert points(figure) == {"diloco": [[3.0, 1.5]], "noloco": [[4.0, 5.0]]}


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
  assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
