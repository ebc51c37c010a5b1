"""`launch.sends`, as users run it."""

import json

from tests.launch.conftest import ROOT

EXAMPLE = "docs/examples/mlp.py:step"


def test_program_without_a_config(launch, tmp_path):
  page = tmp_path / "page.html"
  ended = launch("sends", EXAMPLE, "--devices=8", "--json", f"--report={page}")
  assert ended.returncode == 0, ended.stderr
  (found,) = json.loads(ended.stdout).values()
  assert found["axes"] == {"data": 2, "fsdp": 2, "tensor": 2}
  lines = {r["source"].removeprefix(f"{ROOT}/") for r in found["collectives"]}
  assert lines == {
    "docs/examples/mlp.py:17", "docs/examples/mlp.py:18",
  }
  assert "docs/examples/mlp.py:17" in page.read_text()


def test_mistakes_are_one_line(launch, tmp_path):
  module = tmp_path / "module.py"  # with a mesh of more devices
  module.write_text(
    "import jax, numpy\nMESH = numpy.array(jax.devices()).reshape(2, 4)\n"
    "def step():\n  pass\n"
  )
  for arguments, message in (
    ((EXAMPLE, "--devices=4"),
     "step with --devices=4: Number of devices 4 must be >= the product"),
    ((EXAMPLE, "--devices=8", "--rates=h1000"),
     "--rates='h1000' must be one of "),
    ((f"{module}:step",), "--devices=1: cannot reshape array of size 1"),
    ((str(tmp_path),), "--xla_dump_to"),
    ((), "--program is required"),
    ((EXAMPLE, "second"), "unexpected argument 'second'"),
    ((EXAMPLE, "--devices=0"), "--devices"),
  ):
    ended = launch("sends", *arguments)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1
