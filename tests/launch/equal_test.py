"""Comparison of layouts on the command line."""

import json

import pytest

from caatnet.config import equality
from caatnet.config.override import override
from configs.caatnet import tiny

PROGRAM = "docs/examples/mlp.py:layouts"


def test_program_is_compared_on_each_layout(launch, tmp_path):
  path = tmp_path / "found.json"
  ended = launch(
    "equal", PROGRAM, "--layouts=data:2 data:3", "--steps=1",
    f"--output={path}",
  )
  assert ended.returncode == 0, ended.stderr
  assert "data:2: rounding: largest relative difference" in ended.stdout
  assert "data:3: refused: the step cannot be compiled" in ended.stdout
  found = json.loads(path.read_text())["layouts"]
  assert [x["verdict"] for x in found] == ["rounding", "refused"]


@pytest.mark.parametrize(("flags", "message"), [
  ([PROGRAM], "--layouts is required"),
  (["--layouts=data:2"], "give either a PROGRAM or --config"),
  ([PROGRAM, "--layouts=data:x"], "'data:x' must be AXIS:DEVICES"),
  (["docs/examples/mlp.py:step", "--layouts=data:2"], "function of a layout"),
])
def test_bad_flags_get_one_line(launch, flags, message):
  ended = launch("equal", *flags)
  assert ended.returncode == 2
  assert message in ended.stderr
  assert len(ended.stderr.splitlines()) == 1


def test_layouts_of_a_config_have_the_same_ranks():
  config = override(tiny.get_config("test"), (
    "model.width=16 model.num_heads=8 model.num_kv_heads=8 model.ffn_width=16 "
    "model.num_layers=1 data.seq_len=4 data.batch_size=6 parallel.tensor=1"
  ))
  layouts = [{"data": 2}, {"data": 3, "tensor": 2}]
  build = equality.builder(config, layouts)
  for layout in ({}, *layouts):
    _, (state, batch, _) = build(layout)
    assert batch.shape == (1, 6, 1, 5)  # worker, data, examples, tokens
    assert state.params["blocks"]["w_out"].shape[:3] == (1, 1, 2)
  assert config.parallel.data == 1  # unchanged
