"""Results of sweeps, results/*.csv, for pictures and tables.

The commands that made the files are in log/README.md.
"""

from collections.abc import Sequence
import csv
import dataclasses
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
BLACK, BLUE, ORANGE, GREEN = "#1a1a1a", "#0072b2", "#d55e00", "#009e73"

# Values in configs/diloco/sweep.py of keys that a point does not set.
DEFAULT_SYNC_EVERY, DEFAULT_WORKERS = "30", "2"
ROUND_ALGORITHMS = (
  "local_sgd", "diloco", "streaming", "eager", "sparseloco", "noloco"
)
# Algorithm -> name and colour in pictures.
LOOP_STYLES = {
  "data_parallel": ("data parallelism", BLACK),
  "local_sgd": ("local SGD", "#e69f00"),
  "diloco": ("DiLoCo", BLUE),
  "streaming": ("Streaming DiLoCo", ORANGE),
  "eager": ("eager DiLoCo", "#56b4e9"),
  "sparseloco": ("SparseLoCo", GREEN),
  "noloco": ("NoLoCo", "#cc79a7"),
  "dc_s3gd": ("DC-S3GD", "#8c6d1f"),
}


@dataclasses.dataclass(frozen=True)
class SweepPoint:
  """Runs of one point of a sweep.

  Attributes:
    overrides: Overrides of the point, as in "outer.algorithm=diloco".
    kilobytes: Operand kB that a device sends per step: over the worker axis and
      the data axis where the sweep has them, else over the tensor axis, forward
      and backward.
    losses: Validation loss of each seed, nats per byte.
  """

  overrides: str
  kilobytes: float
  losses: tuple[float, ...]

  def get(self, key: str, default: str = "") -> str:
    """Returns the value of a key at this point."""
    found = dict(part.split("=", 1) for part in self.overrides.split())
    return found.get(key, default)

  @property
  def algorithm(self) -> str:
    """Name of the outer loop in configs."""
    return self.get("outer.algorithm")


def read(name: str) -> list[SweepPoint]:
  """Returns the points of results/NAME.csv in the order of the file."""
  with (ROOT / "results" / f"{name}.csv").open() as file:
    rows = list(csv.DictReader(file))
  found: dict[str, list[dict[str, str]]] = {}
  for row in rows:
    found.setdefault(row["point"], []).append(row)

  def kilobytes(row: dict[str, str]) -> float:
    over_tensor = ("forward_bytes", "backward_bytes")
    over_others = [k for k in ("worker_bytes", "data_bytes") if k in row]
    return sum(float(row[key]) for key in over_others or over_tensor) / 1e3

  return [
    SweepPoint(
      overrides,
      kilobytes(runs[0]),
      tuple(float(run["validation_loss"]) for run in runs),
    )
    for overrides, runs in found.items()
  ]


def loop_name(point: SweepPoint) -> str:
  """Returns a point's outer loop with its settings: "DiLoCo, H = 30"."""
  words = [LOOP_STYLES[point.algorithm][0]]
  if point.algorithm in ROUND_ALGORITHMS:
    words.append(f"H = {point.get('outer.sync_every', DEFAULT_SYNC_EVERY)}")
  if point.get("outer.overlap"):
    assert point.get("outer.overlap") == "(1,)"
    words.append("1 step late")
  if point.get("outer.codec"):
    assert point.get("outer.codec") == "e3m0"
    words.append("4 bit")
  if point.get("outer.compensation") == "0.0":
    words.append("not compensated")
  if point.get("optimizer.name") == "sgd":
    words.append("inner SGD")
  if point.get("parallel.worker", DEFAULT_WORKERS) != DEFAULT_WORKERS:
    words.append(f"{point.get('parallel.worker')} workers")
  return ", ".join(words)


def loss_differences(
  point: SweepPoint, baseline: SweepPoint
) -> tuple[float, ...]:
  """Returns the loss minus that of the baseline, per seed."""
  pairs = zip(point.losses, baseline.losses, strict=True)
  return tuple(a - b for a, b in pairs)


def mean(values: Sequence[float]) -> float:
  """Returns the arithmetic mean."""
  return sum(values) / len(values)


def format_mean_and_range(differences: Sequence[float], digits: int = 3) -> str:
  """Formats the mean and the range of differences of losses."""
  middle, least, most = (
    format_signed(f(differences), digits) for f in (mean, min, max)
  )
  return f"{middle} ({least} to {most})"


def format_signed(number: float, digits: int = 3) -> str:
  """Formats a number with its sign; one that is rounded to zero has none."""
  text = f"{number:+.{digits}f}"
  return text if float(text) else text[1:]
