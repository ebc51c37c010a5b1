"""README.md and ARCHITECTURE.md: paths, commands, examples and pictures."""

import html
import json
import pathlib
import re
import subprocess
import sys

from PIL import Image
import pytest

from docs import draw
from tests.claims_test import commands as commands_of
from tests.claims_test import faults

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
PROJECTIONS = (ROOT / "docs/projections.md").read_text()
# Without the recipes, whose files do not exist yet.
YOUR_OWN = re.sub(
  "<!-- table.*?<!-- end", "", (ROOT / "docs/your_own.md").read_text(),
  flags=re.DOTALL,
)
SERVING = (ROOT / "docs/serving.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))
STRATEGIES = (ROOT / "docs/strategies.md").read_text()
COMMANDS = (ROOT / "docs/commands.md").read_text()
FOLDERS = (
  "parallel", "caatnet", "configs", "launch", "docs", "colabs", "results",
  "log", "tests",
)
# Placeholders in the tables of paths.
PLACEHOLDERS = r"\b(NAME|OP|SUBJECT|FOLDER)"


def test_example_runs_and_sends_half():
  (example,) = re.findall(r"```python\n(.*?)```", PROJECTIONS, re.DOTALL)
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
    line = f"{phase} all_reduce ('tensor',) float32 (4, 16, 32) {half}"
    assert line in lines
    assert line in PROJECTIONS


@pytest.mark.quick
def test_documents_are_short():
  assert len(README.splitlines()) <= 120
  assert len(ARCHITECTURE.splitlines()) < 450


def paths(text: str) -> set[str]:
  """Returns the paths of this repository that a text names."""
  found = re.findall(rf"\b(?:{'|'.join(FOLDERS)})/[\w./-]*", text)
  return {
    path.rstrip(".") for path in found if not re.search(PLACEHOLDERS, path)
  }


@pytest.mark.quick
@pytest.mark.parametrize(
  ("text", "folder"),
  [(README, "."), (ARCHITECTURE, "."), (STRATEGIES, "docs"),
   (COMMANDS, "docs"), (YOUR_OWN, "docs"), (PROJECTIONS, "docs"),
   (SERVING, "docs")],
  ids=["readme", "architecture", "strategies", "commands", "your_own",
       "projections", "serving"],
)
def test_every_named_file_exists(text, folder):
  assert len(paths(text)) >= 3
  missing = {
    path for path in paths(text)
    if not (ROOT / path).exists()
    and not (ROOT / f"configs/{path}.py").exists()  # short name of a config
  }
  for name in re.findall(r"\]\((?!http)([^)#]+)", text):  # links, pictures
    if not (ROOT / folder / name).exists():
      missing.add(name)
  assert not missing


def test_every_strategy_has_a_config_and_a_file():
  rows = re.findall(r"^\|.*`(configs/\S+)` \| `(\S+)` \|$", STRATEGIES, re.M)
  assert len(rows) == len(re.findall(r"^\| ", STRATEGIES, re.M)) - 1  # head
  for config, file in rows:
    assert "get_config" in (ROOT / config).read_text(), config
    assert (ROOT / file).is_file(), file


def test_file_tree_lists_the_folders():
  short = README.split("## Files")[1]
  names = re.findall(r"^    (\w+)/", short, re.M)
  assert set(names) == set(FOLDERS)


def commands() -> list[str]:
  """Returns the commands of README and docs/commands.md, each once."""
  found = re.findall(r"`(python -m launch\.[^`]+)`", README + COMMANDS)
  return sorted({" ".join(command.split()) for command in found})


def test_commands_of_readme_can_be_parsed():
  """Parses flags and config keys without running the command."""
  scripts = {command.split(".")[1].split()[0] for command in commands()}
  assert scripts >= {
    "train", "evaluate", "sweep", "compile", "simulate", "benchmark"
  }
  found = [c for c in commands_of(README) if "-m launch." in c]
  assert faults("\n".join(f"    {command}" for command in found)) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands_of_a_page_can_be_parsed(path):
  text = path.read_text()
  for new, known in (("easgd", "diloco"), ("hypercube", "ring")):  # of recipes
    text = text.replace(new, known)
  found = [c for c in commands_of(text) if "-m launch." in c]
  assert faults("\n".join(f"    {command}" for command in found)) == []


def description(path: pathlib.Path) -> object:
  """Returns the content of a picture that `docs.draw` stores as metadata."""
  if path.suffix == ".png":
    return json.loads(Image.open(path).text["Description"])
  (text,) = re.findall(
    r"<dc:description>(.*?)</dc:description>", path.read_text(), re.S
  )
  return json.loads(html.unescape(text))


def test_pictures_show_the_results(tmp_path):
  draw.main(tmp_path)
  written = {p.relative_to(tmp_path) for p in tmp_path.rglob("*.*")}
  assert written == set(map(pathlib.Path, draw.PICTURES))
  for name in draw.PICTURES:
    shown = description(tmp_path / name)
    assert shown
    assert description(ROOT / name) == shown, f"{name}: python -m docs.draw"
    beside = f"]({pathlib.Path(name).name})"
    assert f"]({name})" in README or beside in PROJECTIONS, name


@pytest.mark.parametrize("name", [
  "docs/loss_against_bytes.svg", "results/outer_loops.png",
])
def test_marks_are_means_of_seeds_and_bars_their_range(name, monkeypatch):
  """Metadata hold the numbers; points with equal bytes are moved apart."""
  kept = []
  monkeypatch.setattr(draw, "save", lambda *of: kept.append(of))
  draw.PICTURES[name](pathlib.Path(name))
  ((figure, _, data),) = kept
  panels = data.values() if "loss_against" in name else [data]
  for axes, rows in zip(figure.axes, panels, strict=True):
    assert len(axes.containers) == len(rows)
    for drawn, (x, *losses) in zip(axes.containers, rows.values(), strict=True):
      line, _, (bar,) = drawn.lines
      assert line.get_xdata().item() == pytest.approx(x, rel=0.5)
      assert line.get_ydata().item() == (
        pytest.approx(sum(losses) / len(losses), abs=1e-4)
      )
      (ends,) = bar.get_segments()
      assert ends[:, 1] == pytest.approx([min(losses), max(losses)], abs=1e-4)
  draw.plt.close(figure)
