"""Pictures show the numbers of the runs that they name."""

import numpy as np
import pytest

from caatnet.show import pictures

pytest.importorskip("matplotlib")


@pytest.fixture
def drawn(monkeypatch):
  """The axes of what is drawn, which no file is written of."""
  found = []
  monkeypatch.setattr(
    pictures, "save", lambda figure, path: found.append(figure.axes[0])
  )
  return found


def row(p, tensor, loss, scale="forward"):
  return {"p": p, "tensor": tensor, "private_scale": scale,
          "validation_loss": loss, "bytes": 10 * p}


def points(axes):
  return {
    container.get_label(): container.lines[0].get_xydata().tolist()
    for container in axes.containers
  }


def test_a_line_is_of_one_number_of_ranks(drawn, tmp_path):
  """p = 1 has no private channels: it ends the lines of all their scales."""
  pictures.plot_sweep([
    row(1.0, 2, 1.0), row(0.5, 2, 2.0), row(0.5, 2, 4.0),
    row(0.5, 2, 5.0, "none"), row(1.0, 4, 7.0), row(0.5, 4, 8.0),
  ], "bytes", "bytes", tmp_path / "x.png")
  assert points(drawn[0]) == {
    "r=2, private scale: forward": [[5.0, 3.0], [10.0, 1.0]],
    "r=2, private scale: none": [[5.0, 5.0], [10.0, 1.0]],
    "r=4, private scale: forward": [[5.0, 8.0], [10.0, 7.0]],
  }


def test_a_mark_is_of_one_point_of_a_sweep(drawn, tmp_path):
  rows = [
    {"point": f"outer.algorithm={name}", "validation_loss": loss, "sent": sent}
    for name, loss, sent in (("diloco", 1.0, 3.0), ("diloco", 2.0, 3.0),
                             ("noloco", 5.0, 4.0))
  ]
  pictures.plot_points(
    rows, lambda r: r["sent"], "sent", tmp_path / "x.png"
  )
  assert points(drawn[0]) == {"diloco": [[3.0, 1.5]], "noloco": [[4.0, 5.0]]}


def test_losses_lie_over_their_steps(drawn, tmp_path):
  (tmp_path / "metrics.jsonl").write_text(
    '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n'
    '{"step": 2, "validation_loss": 2.5}\n'
  )
  pictures.plot_losses({"a": tmp_path}, tmp_path / "x.png", {"b": 1.5})
  training, validation, reference = drawn[0].lines
  assert training.get_xydata().tolist() == [[1.0, 3.0], [2.0, 2.0]]
  assert validation.get_xydata().tolist() == [[2.0, 2.5]]
  assert set(np.asarray(reference.get_ydata())) == {1.5}
