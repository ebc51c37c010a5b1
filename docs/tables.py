"""Updates the tables of README, CLAIMS and log/ from the files in results/.

  python -m docs.tables
  python -m docs.tables --check    # exits with 2 if a table differs

Markers in the documents enclose the tables (`docs/documents.py`), whose texts
are in this module. CLAIMS.md is written as a whole, from docs/claims/.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import io
import json
import re
from typing import Any

from absl import flags
from rich.console import Console

from caatnet.benchmarks.programs import calibration
from caatnet.show.render import grid, markdown_table
from configs.benchmark import calibration as calibration_config
from docs import claims, documents, log, papers
from docs.documents import TableFunction
from docs.points import (
  ROOT,
  SweepPoint,
  format_mean_and_range,
  format_signed,
  loop_name,
  loss_differences,
  mean,
  read,
)
from launch import options
from parallel.base import files
from parallel.tensor.partial_sync import FUSED_ROUTES

FLAGS = flags.FLAGS

# Paths of the documents with tables.
DOCUMENTS = (
  "README.md", "ARCHITECTURE.md", "CLAIMS.md", "docs/map.md",
  "docs/strategies.md", "docs/ledger.md", "docs/papers.md", "docs/your_own.md",
  "parallel/kernels/evidence.py",
  *log.documents_with_tables(),
)

# Kinds of faults that are planted in programs of other projects, in tests.
FAULTS = ("dtype", "gather", "remat", "all_reduce", "axis")

# Documents that are generated as a whole, except for their tables.
GENERATED: dict[str, Callable[[], str]] = {"CLAIMS.md": claims.page}


def result(name: str) -> dict[str, Any]:
  """Returns the content of results/NAME.json."""
  return json.loads((ROOT / "results" / f"{name}.json").read_text())


def points_by_name(points: Sequence[SweepPoint]) -> dict[str, SweepPoint]:
  """Returns the points of a sweep of outer loops by name."""
  return {loop_name(point): point for point in points}


def _losses(
  points: Sequence[SweepPoint], name: Callable[[SweepPoint], str],
  digits: int = 3
) -> str:
  """Returns a table of losses by seed, and minus those of the first point."""
  first, *_ = points
  return markdown_table(
    ["", *(f"seed {i}" for i in range(len(first.losses))), "mean",
     f"minus {name(first)}", "operand kB"],
    [
      [
        name(point),
        *(f"{loss:.4f}" for loss in point.losses),
        f"{mean(point.losses):.4f}",
        "" if point is first else format_mean_and_range(
          loss_differences(point, first), digits
        ),
        f"{point.kilobytes:,.1f}",
      ]
      for point in points
    ],
  )


def outer_loops(_: str) -> str:
  return _losses(read("outer_loops"), loop_name)


def outer_loops_long(_: str) -> str:
  return _losses(read("outer_loops_long"), loop_name, 4)


def zero(_: str) -> str:
  def name(point: SweepPoint) -> str:
    words = [point.get("zero.scheme")]
    words += [
      f"{point.get(f'zero.{part}_codec')} {part}s"
      for part in ("weight", "gradient") if point.get(f"zero.{part}_codec")
    ]
    return ", ".join(words)

  return _losses(read("zero"), name)


def rounding(_: str) -> str:
  def name(point: SweepPoint) -> str:
    words = [point.get("outer.codec")]
    if point.get("outer.stochastic_rounding"):
      words.append("stochastic rounding")
    if rate := point.get("outer.learning_rate"):
      words.append(f"outer rate {rate}")
    return ", ".join(words)

  return _losses(read("rounding"), name)


def _partial_sync(points: Sequence[SweepPoint], ranks: str) -> str:
  """Returns a table of losses by tensor ranks, p and private scale.

  p is the fraction of channels that tensor ranks sum; p = 1 is first.
  """
  first, *_ = points
  scales = {"forward": "sqrt(r)", "none": "none"}
  rows = []
  for point in points:
    p = float(point.get("sync.p"))
    scale = scales[point.get("sync.private_scale", "forward")]
    rows.append([
      point.get("parallel.tensor", ranks), f"{p:g}",
      "-" if p == 1 else scale,
      f"{mean(point.losses):.4f}",
      f"{min(point.losses):.3f} to {max(point.losses):.3f}",
      "" if point is first else format_mean_and_range(
        loss_differences(point, first), 4
      ),
      f"{point.kilobytes / 1e3:.2f}",
    ])
  return markdown_table(
    ["r", "p", "private scale", "mean", "range", "minus p = 1", "MB"], rows
  )


def partial_sync(_: str) -> str:
  return _partial_sync(read("partial_sync"), "")


def partial_sync_480_steps(_: str) -> str:
  return _partial_sync(read("partial_sync_480_steps"), "4")


def zero_step(_: str) -> str:
  return markdown_table(
    ["variant", "median, s", "range, s",
     "ratio to automatic, median of rounds"],
    [
      [row["variant"], f"{row['median_s']:.3f}",
       f"{row['min_s']:.3f} to {row['max_s']:.3f}", f"{row['relative']:.3f}"]
      for row in result("zero_step")["rows"]
    ],
  )


def training_step(_: str) -> str:
  return markdown_table(
    ["variant", "dtype", "median s", "range s", "x plain", "tokens/s",
     "of products"],
    [
      [
        row["variant"], row["dtype"], f"{row['median_s']:.3f}",
        f"{row['min_s']:.3f} to {row['max_s']:.3f}", f"{row['relative']:.3f}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['fraction_of_matmul_rate']:.1%}",
      ]
      for row in result("train_step")["rows"]
    ],
  )


def _describe_overrides(overrides: str) -> str:
  """Describes overrides of a program: "p = 0.5, route = one_shot"."""
  words = re.sub(r"sync\.|model\.|\.0\b", "", overrides)
  return words.replace(" ", ", ").replace("=", " = ")


def _format_step_bounds(row: Mapping[str, Any]) -> str:
  bounds = row["roofline"]
  return " / ".join(
    f"{bounds[key]:.2f}" for key in (
      "step_if_none_overlaps", "step_as_scheduled", "step_if_all_overlaps"
    )
  )


def _tensor_axis_share(row: Mapping[str, Any], key: str) -> str:
  """Formats the bytes under a key as a fraction of all on the tensor axis."""
  (axis,) = [r for r in row["overlap"] if r["axes"] == ["tensor"]]
  return f"{axis[key] / axis['bytes']:.1%}"


def overlap(_: str) -> str:
  """Returns the table of the programs of a 7B step compiled for TPUs."""
  return markdown_table(
    ["target", "program", "kernels", "asynchronous", "hidden",
     "main memory, GB", "step, s: none / as scheduled / all overlapped"],
    [
      [
        row["target"].removeprefix("tpu:"),
        _describe_overrides(row["overrides"]),
        "on" if row["kernels"] == "pallas" else "off",
        _tensor_axis_share(row, "asynchronous"),
        _tensor_axis_share(row, "hidden"),
        f"{row['roofline']['memory_bytes'] / 1e9:,.0f}",
        _format_step_bounds(row),
      ]
      for row in result("programs")["rows"]
    ],
  )


def _kernel_step_ratios() -> Iterator[tuple[tuple[str, str], float, float]]:
  """Yields (kind of device, op), p, and step time with kernels over without.

  p is the fraction of channels that tensor ranks sum.

  All-reduces that are kernels themselves are chosen by name, not by evidence.
  """
  seconds = {
    (row["device"], row["overrides"], row["kernels"]):
      row["roofline"]["step_as_scheduled"]
    for row in result("programs")["rows"]
  }
  for (device, overrides, kernels), alone in seconds.items():
    with_kernel = seconds.get((device, overrides, "pallas"))
    keys = dict(part.split("=") for part in overrides.split())
    if (
      kernels == "reference" and with_kernel is not None
      and keys.get("sync.route") not in FUSED_ROUTES
    ):
      yield (device, "add_norm"), float(keys["sync.p"]), with_kernel / alone


def kernels(_: str) -> str:
  """Returns the source text of the dict in parallel/kernels/evidence.py."""
  found: dict[tuple[str, str], dict[float, float]] = {}
  for key, p, ratio in _kernel_step_ratios():
    found.setdefault(key, {})[p] = round(ratio, 3)
  lines = [
    f'  ("{device}", "{op}"): {ratios},\n'
    for (device, op), ratios in found.items()
  ]
  head = "STEP_WITH_KERNEL: dict[tuple[str, str], Mapping[float, float]] = {\n"
  return head + "".join(lines) + "}\n"


def _auto_kernel_rows() -> dict[tuple[str, float], Mapping[str, Any]]:
  """Returns the rows of programs that `config.kernels="auto"` selects.

  Keys are (target, p), p being the fraction of channels that tensor ranks sum.
  """
  slower = {
    (device, p) for (device, _), p, ratio in _kernel_step_ratios() if ratio >= 1
  }
  found = {}
  for row in result("programs")["rows"]:
    key, _, p = row["overrides"].partition("=")
    if key == "sync.p" and " " not in p:
      on = (row["device"], float(p)) not in slower
      if on == (row["kernels"] == "pallas"):
        found[row["target"].removeprefix("tpu:"), float(p)] = row
  return found


def bounds_of_a_step(_: str) -> str:
  """Returns the table of claim 1.5: bounds on a step from its program."""
  return markdown_table(
    ["64 chips", "p", "hidden",
     "step, s: none / as scheduled / all overlapped"],
    [
      [
        target, f"{p:g}", _tensor_axis_share(row, "hidden"),
        _format_step_bounds(row)
      ]
      for (target, p), row in sorted(
        _auto_kernel_rows().items(), key=lambda item: (item[0][0], -item[0][1])
      )
    ],
  )


# Op of the benchmark of kernels -> its name in the log, and the cases there.
_LOGGED_CASES = {
  "add_norm": ("add_norm", ("7B, p=.5", "8192 x 8192")),
  "add_norm_backward": (
    "add_norm, forward and backward", ("7B, p=.5", "8192 x 8192")
  ),
  "reduce_add_norm": (
    "reduce_add_norm", ("7B, p=.5", "7B, p=.5, int8", "8192 x 8192")
  ),
  "encode": (
    "codec, delta with feedback", ("int4", "int8, vector", "8192 x 8192")
  ),
  "mean": ("codec, mean of 2", ("int4", "8192 x 8192")),
  "nesterov": ("codec, outer update of 2", ("int4", "8192 x 8192")),
}


def kernels_bytes(_: str) -> str:
  h200, v5p = (
    {
      (row["op"], row["case"]): row
      for row in result(f"kernels_bytes_{target}")["rows"]
    }
    for target in ("h200", "v5p")
  )
  rows = []
  for op, (name, cases) in _LOGGED_CASES.items():
    for case in cases:
      least = h200[op, case]["least_bytes"]
      rows.append([f"{name}: {case}", f"{least / 1e6:,.1f}"] + [
        f"{target[op, case][f'{key}_bytes'] / least:.{digits}f}"
        for target in (h200, v5p) for key, digits in (("kernel", 3), ("xla", 2))
      ])
  return markdown_table(
    ["op: case", "least, MB", "H200, kernel / least", "XLA / least",
     "v5p, kernel / least", "XLA / least"],
    rows,
  )


def strategies(_: str) -> str:
  """Returns the table of strategies, with figures from results/."""
  return papers.strategy_table(dict(_strategy_figures()))


def _strategy_figures() -> Iterator[tuple[str, tuple[str, str]]]:
  """Yields the name of a strategy, its savings and its costs."""
  full, half, quarter, *_ = read("partial_sync_480_steps")
  yield (
    "partial synchronisation, p = .5; .25",
    (
      "50%; 75% of a block's all-reduces",
      f"{format_mean_and_range(loss_differences(half, full))}; "
      f"{format_mean_and_range(loss_differences(quarter, full))} [a]",
    ),
  )
  yield from _loops()
  yield from _partitions()
  yield from _collectives()
  alone = [
    row["xla_bytes"] / row["kernel_bytes"]
    for target in ("h200", "v5p")
    for row in result(f"kernels_bytes_{target}")["rows"]
    if row["op"] == "reduce_add_norm"
  ]
  times = [
    row["of_fused"] for row in result("kernels_h100")["rows"]
    if row["op"] == "reduce_add_norm"
  ]
  yield "reduce, add and norm in one kernel", (
    f"XLA's fusion moves {min(alone):.2f} to {max(alone):.1f}x its memory "
    f"bytes [i]; {min(times):.2f} to {max(times):.2f} of its time on one H100 "
    "[j]",
    "-",
  )


def _loops() -> Iterator[tuple[str, tuple[str, str]]]:
  """Yields `_strategy_figures` of outer loops and their codecs."""
  loops = points_by_name(read("outer_loops"))
  base = loops["data parallelism"]

  def fewer(name: str) -> str:
    return f"{base.kilobytes / loops[name].kilobytes:,.0f}x"

  def cost(name: str, against: str = "data parallelism") -> str:
    return format_mean_and_range(loss_differences(loops[name], loops[against]))

  yield "local SGD, H = 30", (
    f"{fewer('local SGD, H = 30')} fewer bytes",
    f"{cost('local SGD, H = 30')} [b]",
  )
  yield "DiLoCo, H = 30; 100", (
    f"{fewer('DiLoCo, H = 30')}; {fewer('DiLoCo, H = 100')}",
    f"{cost('DiLoCo, H = 30')}; {cost('DiLoCo, H = 100')} [b]",
  )
  late = "Streaming DiLoCo, H = 30, 1 step late"
  long = read("outer_loops_long")
  yield (
    "Streaming DiLoCo, 1 step late, 4 bit",
    (
      f"{fewer(f'{late}, 4 bit')}; hidden on H200, not on v5p (claim 3.11)",
      f"{cost(f'{late}, 4 bit')} [b]; "
      f"{format_mean_and_range(loss_differences(long[1], long[0]))} after "
      "100 rounds [c]",
    ),
  )
  yield "eager DiLoCo", (
    f"{fewer('eager DiLoCo, H = 30')}, under a round's compute",
    f"{cost('eager DiLoCo, H = 30')} [b]",
  )
  yield "SparseLoCo", (
    fewer("SparseLoCo, H = 30"), f"{cost('SparseLoCo, H = 30')} [b]"
  )
  yield "NoLoCo", (
    f"{fewer('NoLoCo, H = 30')}, pairs instead of an all-reduce",
    f"{cost('NoLoCo, H = 30')} [b]",
  )
  sgd = "data parallelism, inner SGD"
  yield "DC-S3GD", (
    "no bytes; all under the next step's compute",
    f"{cost('DC-S3GD, inner SGD', sgd)} against data parallelism with the same "
    "SGD [b]",
  )
  times = loops[late].kilobytes / loops[f"{late}, 4 bit"].kilobytes
  yield "block codecs: int8, fp8, int4, E3M0", (
    f"{times:.1f}x of an exchange, by E3M0",
    f"{cost(f'{late}, 4 bit', late)} against Streaming in float32 [b]",
  )


def _partitions() -> Iterator[tuple[str, tuple[str, str]]]:
  """Yields `_strategy_figures` of partitions of the training state."""
  ddp, zero3, _, _, zeropp, frontier3 = read("zero")

  def state(scheme: str) -> str:
    size = result("partitions")["schemes"][scheme]["memory"]["total"] / 1e9
    return f"{size:.2g}" if size < 10 else f"{size:.0f}"

  yield "ZeRO-1; 2; 3 (FSDP)", (
    f"{state('ddp')} GB of state become {state('zero1')}; {state('zero2')}; "
    f"{state('zero3')} [d]",
    f"zero3: {format_signed(mean(loss_differences(zero3, ddp)))}, with "
    f"{zero3.kilobytes / ddp.kilobytes:.1f}x the operand bytes of ddp, three "
    "levels added up [e]",
  )
  yield "HSDP, MiCS", (
    f"{state('ddp')} GB become {state('hsdp')}, gathers stay in a node [d]", "-"
  )
  part = zeropp.kilobytes / zero3.kilobytes
  yield (
    "ZeRO++ (hpZ, qwZ, qgZ)",
    (
      f"{state('zeropp')} GB [d]; {part:.0%} of zero3's operand bytes, by "
      "level "
      "[e]",
      f"{format_mean_and_range(loss_differences(zeropp, ddp))} by level; in "
      "two hops, as published: not "
      "run [e]",
    ),
  )
  yield "three levels; quantised", (
    f"{state('frontier3')}; {state('frontier3_quantised')} GB [d]",
    f"-; {format_mean_and_range(loss_differences(frontier3, ddp))} [e]",
  )


def _collectives() -> Iterator[tuple[str, tuple[str, str]]]:
  """Yields `_strategy_figures` of collectives and flows, all predicted."""
  predicted = result("multitree")
  ring, others, optimal = (
    predicted["speedups"]["events_us"][f"over {key}"]
    for key in ("ring", "the best other", "optimal")
  )
  yield "MultiTree", (
    f"{ring['mean']:.1f}x faster than a ring one way ({ring['least']:.1f}x to "
    f"{ring['most']:.0f}x), predicted [f]",
    f"{others['least']:.2f}x to {others['most']:.2f}x the speed of the best "
    f"other; {optimal['least']:.2f}x to {optimal['most']:.2f}x that of optimal "
    "trees [f]",
  )
  us = {
    (row["topology"], row["algorithm"]): row["events_us"]
    for row in predicted["rows"] if row["size_bytes"] == 2**26
  }

  def over_ring(name: str, net: str = "torus 4x4", digits: int = 1) -> str:
    return f"{us[net, 'ring'] / us[net, name]:.{digits}f}x"

  yield "bucket rings, 2D rings", (
    f"{over_ring('bucket')}; {over_ring('ring_2d')} the speed of a ring, "
    "predicted: torus 4x4, 64 MiB [f]",
    "-",
  )
  yield "Swing, halving-doubling, HDRM", (
    f"{over_ring('swing')}; {over_ring('halving_doubling')} on the same torus; "
    f"{over_ring('hdrm', 'BiGraph 2x8')} on BiGraph 2x8 [f]",
    "-",
  )
  yield "double binary tree", (
    f"{over_ring('double_tree', digits=2)} on the same torus, predicted [f]",
    "-",
  )
  trees = result("schedules_events")
  kinds = trees["summary"].values()
  worst = max(kind["worst"] for kind in kinds)
  events = [kind["events"] for kind in kinds]
  yield "throughput-optimal trees", (
    f"busiest link within {worst - 1:.1%} of the cut bound on "
    f"{sum(map(len, trees['random'].values()))} random graphs [g]",
    f"time of 64 MiB, predicted: {max(e['median'] for e in events):.2f}x the "
    f"bound (median), at most {max(e['worst'] for e in events):.2f}x [g]",
  )
  sent = {
    row["router"]: row["num_sent"] for row in result("spraying")["patterns"]
    if (row["topology"], row["pattern"]) == (
      "leaf-spine 16x16x16", "all_to_all"
    )
  }
  yield "whole flows, not sprayed packets", (
    f"spraying's loads with {sent['ethereal']:,} flows, not "
    f"{sent['spray']:,} pieces: all-to-all, 256 hosts; one path per "
    "destination sends as many [h]",
    "-",
  )


def _foreign_rows(key: str) -> list[dict[str, Any]]:
  """Returns ``key`` of foreign_programs.json and foreign_frameworks.json."""
  return [
    row for name in ("programs", "frameworks")
    for row in result(f"foreign_{name}")[key]
  ]


def foreign_programs(_: str) -> str:
  """Returns a table: bytes read from other projects' programs, and expected."""

  def sizes(sent: Mapping[str, int]) -> str:
    return "; ".join(f"{k} {v:,}" for k, v in sent.items()) or "nothing"

  return markdown_table(
    ["packages", "program", "mesh", "read, bytes", "closed form",
     "not understood"],
    [
      [
        ", ".join(f"{p} {v}" for p, v in row["versions"].items()),
        row["program"],
        ", ".join(f"{a} {n}" for a, n in row["axes"].items() if n > 1),
        sizes(row["read"]),
        "equal" if row["equal"] else sizes(row["expected"]),
        "; ".join(row["unknown"]) or "nothing",
      ]
      for row in _foreign_rows("rows")
    ],
  )


def foreign_targets(_: str) -> str:
  """Returns a table: whether bytes are as expected, by program and target."""
  found: dict[tuple[str, str], dict[str, str]] = {}
  rows = [
    row for name in ("512", "v5p", "v5p_512", "h200")
    for row in result(f"foreign_programs_{name}")["rows"]
  ]
  for row in rows:
    if "error" in row:
      cell = "not compiled"
    elif row["equal"]:
      cell = "equal"
    else:
      cell = ", not ".join(
        "; ".join(
          f"{k} {v:,}" for k, v in row[name].items() if row[other].get(k) != v
        ) or "nothing"
        for name, other in (("read", "expected"), ("expected", "read"))
      )
    cells = found.setdefault((row["project"], row["program"]), {})
    cells[row["target"]] = cell
  targets = [*dict.fromkeys(row["target"] for row in rows)]
  return markdown_table(
    ["project", "program", *targets],
    [
      [*program, *(cells.get(target, "-") for target in targets)]
      for program, cells in found.items()
    ],
  )


def foreign_faults(_: str) -> str:
  """Returns a table: source lines blamed, by program and planted fault."""
  programs: dict[tuple[str, str], dict[str, str]] = {}
  for row in _foreign_rows("faults"):
    lines = programs.setdefault((row["project"], row["program"]), {})
    expected, named = row["lines"], row["blamed"]
    lines[row["fault"]] = ", ".join([
      *(x for x in named if x in expected),
      *(f"also {x}" for x in named if x not in expected),
      *(f"not {x}" for x in expected if x not in named),
    ])
  return markdown_table(
    ["project", "program", *FAULTS],
    [
      [*program, *(lines.get(kind, "-") for kind in FAULTS)]
      for program, lines in programs.items()
    ],
  )


def demo(_: str) -> str:
  """Returns the table that `make demo` printed last, as a code block."""
  printed = result("demo")
  out = io.StringIO()
  Console(file=out, width=130).print(
    grid(printed["title"], printed["columns"], printed["rows"])
  )
  lines = [line.rstrip() for line in out.getvalue().splitlines()]
  return "```\n" + "\n".join(lines) + "\n```\n"


def coverage(_: str) -> str:
  """Returns a table: intervals that contain the step's time, by feature."""
  rows = result("calibration")["rows"]
  values = calibration.features(calibration_config.get_config(), rows)
  return markdown_table(
    ["key", "intervals that contain the time"],
    [[*row.values()] for row in calibration.coverage(rows, values)],
  )


def recipe(kind: str) -> str:
  """Returns a recipe's text; a test adds its files to a copy of the tree."""
  text = (ROOT / "tests" / "recipes" / f"{kind}.md").read_text()
  return text.partition("\n\n")[2]


TABLES: dict[str, TableFunction] = {
  "coverage": coverage,
  "demo": demo,
  "experiments": log.index_table,
  "strategies": strategies,
  "claims": claims.overview,
  "papers": papers.paper_table,
  "verdicts": papers.verdict_table,
  "recipe_outer_loop": lambda _: recipe("outer_loop"),
  "recipe_route": lambda _: recipe("route"),
  "modules": papers.module_map,
  "directories": papers.directory_table,
  "outer_loops": outer_loops,
  "outer_loops_long": outer_loops_long,
  "rounding": rounding,
  "zero": zero,
  "zero_step": zero_step,
  "partial_sync": partial_sync,
  "partial_sync_480_steps": partial_sync_480_steps,
  "training_step": training_step,
  "overlap": overlap,
  "kernels_bytes": kernels_bytes,
  "bounds_of_a_step": bounds_of_a_step,
  "kernels": kernels,
  "foreign_programs": foreign_programs,
  "foreign_faults": foreign_faults,
  "foreign_targets": foreign_targets,
}


def main() -> None:
  """Writes the documents whose tables differ, or names these tables."""
  stale = []
  for name in DOCUMENTS:
    path = ROOT / name
    try:
      old = path.read_text()
      source = GENERATED.get(name, lambda old=old: old)()
      text, changed = documents.rewrite_tables(source, TABLES)
    except ValueError as error:
      raise ValueError(f"{name}: {error}") from error
    if name in GENERATED:
      changed = ["text"] if text != old else []
    stale += [f"{table} in {name}" for table in changed]
    if changed and not FLAGS.check:
      files.replace(path, text)
  if stale and FLAGS.check:
    raise ValueError(
      f"the tables {', '.join(stale)} differ from results/; run make tables"
    )
  print("\n".join(stale) or "all tables match results/")


if __name__ == "__main__":
  options.run(main, uses=("check",), required=(), devices=False)
