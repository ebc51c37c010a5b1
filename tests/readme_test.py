"""The example in the README runs, and says what the text around it says."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def test_the_example_runs_and_sends_half():
  text = (ROOT / "README.md").read_text()
  (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
  result = subprocess.run(
    [sys.executable, "-c", example],
    cwd=ROOT,
    env={"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
    capture_output=True,
    text=True,
    check=True,
  )
  lines = result.stdout.splitlines()
  half = 4 * 16 * 32 * 4  # batch, position, half of 64 channels, float32
  for phase in ("forward", "backward"):
    assert f"{phase} all_reduce ('tensor',) float32 (4, 16, 32) {half}" in (
      lines
    )


def test_the_tree_names_what_is_there():
  text = (ROOT / "README.md").read_text()
  tree = text.split("## The tree")[1].split("[ARCHITECTURE.md]")[0]
  for name in re.findall(r"^    (\w+/)", tree, re.MULTILINE):
    assert (ROOT / name).is_dir(), name
  for name in re.findall(r"^      (?:xla/)?(\w+\.py)", tree, re.MULTILINE):
    assert list(ROOT.glob(f"*/**/{name}")), name
