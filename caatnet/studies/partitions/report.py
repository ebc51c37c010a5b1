"""Report of the study of partitions."""

from collections.abc import Mapping, Sequence
from typing import Any

from parallel.base import plot
from parallel.base.report import Column, Report, Table, keyed

Row = Mapping[str, Any]

_MARKS = "osD^v<>pPX"
_WAYS = ("reuse", "no reuse")
# Columns that describe a partition: degrees, secondary copy and codecs.
_WORDS = [
  Column("degrees_text", "w / g / o over"), Column("copy", "copy over"),
  Column("codecs", "coded w, g"),
]


def report(result: Mapping[str, Any]) -> Report:
  """Returns assumptions, schemes, fronts, the paper's figures, and curves."""
  return Report(
    "Partitions of the training state",
    [
      _assumptions(result["assumptions"]), *_schemes(result),
      *_fronts(result), _best(result["best"]),
      *(_published(result["published"]) if result["published"] else ()),
    ],
    lambda: _figure(result),
  )


def _assumptions(a: Row) -> str:
  lines = [
    f"{a['parameters'] / 1e9:g}e9 parameters in {a['num_layers']} equal "
    f"layers, {a['devices']} devices of {a['cluster']}, "
    f"{a['memory_bytes'] / 1e9:g} GB each for the training state",
    "Predicted, nothing is measured. Assumed:",
    f"- {a['accumulation']} microbatches of {a['tokens']} tokens per device "
    "and step; 6 FLOP per parameter and token",
    f"- compute alone reaches {a['utilisation']:.0%} of "
    f"{a['peak_flops'] / 1e12:g} TFLOP/s ({a['peak_confidence']}: "
    f"{a['peak_source']}): {a['compute_seconds']:.2f} s a step",
    f"- bytes: {a['weight_bytes']} a gathered weight, {a['gradient_bytes']} a "
    "gradient, 12 a stored parameter (float32 weight, two moments)",
    "- memory leaves out activations and gathered layers; time leaves out "
    "latency, encoding and the optimizer",
    "- exchanges of microbatches run "
    + ("under their compute" if a["overlap"] else "apart from compute")
    + "; those once a step always do apart",
  ]
  for level in a["levels"]:
    words = (
      "config.bandwidths" if level["overridden"]
      else f"{level['confidence']}: {level['source']}"
    )
    lines.append(
      f"- {level['name']}: {level['size']} ranks, "
      f"{level['bandwidth'] / 1e9:g} GB/s into each device ({words})"
    )
  return "\n".join(lines)


def _in_words(row: Row) -> dict[str, Any]:
  """Returns a partition's row with the texts of its cells."""
  copy = str(row["secondary"] or "")
  if row["secondary_codec"] != "none":
    copy += f", {row['secondary_codec']}"
  codecs = (row["weight_codec"], row["gradient_codec"])
  # A star marks a total that exceeds the memory.
  total = f"{row['memory']['total'] / 1e9:.2f}" + ("" if row["fits"] else "*")
  return row | row["memory"] | {
    "degrees_text": " / ".join(map(str, row["degrees"])), "copy": copy,
    "codecs": "" if set(codecs) == {"none"} else ", ".join(codecs),
    "total": total, "seconds_text": _pair(row["seconds"]),
  }


def _pair(
  values: Mapping[str, Any], unit: float = 1.0, level: str | None = None
) -> str:
  """Formats a number with reuse and its counterpart without."""
  numbers = [v if level is None else v[level] for v in values.values()]
  return " / ".join(f"{number / unit:.2f}" for number in numbers)


def _schemes(result: Row) -> list[Table]:
  a = result["assumptions"]
  cap, gb = a["memory_bytes"] / 1e9, {"form": ".2f", "unit": 1e9}
  levels = [level["name"] for level in a["levels"]]
  rows = [
    _in_words(row) | {
      "scheme": name, "node_text": _pair(row["node"], 1e9),
    } | {level: _pair(row["received"], 1e9, level) for level in levels}
    for name, row in result["schemes"].items()
  ]
  return [
    Table(
      f"memory of a device, GB; * over {cap:g} GB; 1e9 parameters of the "
      f"largest model in {cap:g} GB",
      [
        "scheme", *_WORDS, Column("stored", "stored", **gb),
        Column("weights", "weights", **gb),
        Column("gradients", "gradients", **gb),
        Column("secondary", "2nd copy", **gb), "total",
        Column("largest_model", "largest", ".1f", unit=1e9),
      ],
      rows,
    ),
    Table(
      "GB that a device receives per step over each level, and that enter a "
      "node; seconds of a step\nwith reuse in the node / without",
      ["scheme", *levels, Column("node_text", "into a node"),
       Column("seconds_text", "s")],
      rows,
    ),
  ]


def _fronts(result: Row) -> list[Table | str]:
  a = result["assumptions"]
  head = (
    f"fronts of {len(result['candidates'])} partitions, fastest first: each is "
    "the fastest for models up to so many 1e9 parameters\nand too large for "
    f"the line above; GB (* over {a['memory_bytes'] / 1e9:g}) and seconds, "
    f"with reuse / without, are for {a['parameters'] / 1e9:g}e9"
  )
  return [head, *(
    Table(
      key,
      [*_WORDS, Column("total", "GB"), Column("seconds_text", "s"),
       Column("largest_model", "up to", ".1f", unit=1e9)],
      list(map(_in_words, rows)),
    )
    for key, rows in result["fronts"].items()
  )]


def _best(best: Sequence[Row]) -> Table:
  def cell(row: Row | None) -> str:
    if row is None:
      return "none fits"
    of = _in_words(row)
    details = [f"copy {of['copy']}" if of["copy"] else "", of["codecs"]]
    return "\n".join([
      of["degrees_text"], ", ".join(filter(None, details)) or "plain",
      f"{of['total']} GB, {of['seconds_text']} s",
    ])

  return Table(
    "the fastest that fits, by microbatches per step: w / g / o over; GB; "
    "s with reuse / without",
    [Column("accumulation", ""), *keyed(best[0]["answers"], cell)],
    [row | row["answers"] for row in best],
  )


def _published(published: Row) -> list[Table | str]:
  rows = published["rows"]
  found: list[Table | str] = [
    Table(
      "throughput per device, as a ratio: the paper's "
      f"({published['source']}) and ours, by microbatches m per step",
      ["ratio", Column("accumulation", "m"),
       Column("paper", "paper", "g"), *keyed(rows[0]["ours"], ".2f")],
      [row | row["ours"] for row in rows],
    ),
    "frontier3_quantised has levels and codecs as recalled; the paper's m, "
    "overlap and fewest nodes are not known: a ratio that comes near is no "
    "reproduction.",
  ]
  for label, paper in {row["ratio"]: row["paper"] for row in rows}.items():
    ours = [
      v for row in rows if row["ratio"] == label for v in row["ours"].values()
    ]
    low, high = min(ours), max(ours)
    place = "within" if low <= paper <= high else "OUTSIDE"
    found.append(
      f"- {label}: {paper:g} is {place} our {low:.2f} to {high:.2f}, at the "
      "assumed compute rate and tokens"
    )
  return found


def _figure(result: Row) -> plot.Figure:
  """Returns step time against memory, and against the size of the model.

  One column of panels is with reuse in the node, the other without. Each panel
  has the named schemes and the fronts.
  """
  a = result["assumptions"]
  return plot.Figure(
    [panel(result, way) for panel in (_memory, _size) for way in _WAYS],
    (13, 9), len(_WAYS),
    f"{a['devices']} devices of {a['cluster']}, {a['accumulation']} "
    f"microbatches, compute at {a['utilisation']:.0%} of peak",
    "outside right upper", share_x="row", share_y="row",
  )


def _time(label: str, way: str) -> plot.Axis:
  if way != _WAYS[0]:
    return plot.Axis("", "log")  # shared with the first panel of the row
  # The margin leaves room for labels.
  return plot.Axis(label, "log", plain=True, margin=(0.8, 1.4))


def _memory(result: Row, way: str) -> plot.Panel:
  """Returns seconds of a step against the memory of a device."""
  a = result["assumptions"]

  def line(
    rows: Sequence[Row], label: str, style: str, **options: Any
  ) -> plot.Line:
    return plot.Line(
      [row["memory"]["total"] / 1e9 for row in rows],
      [row["seconds"][way] for row in rows], label, style, **options,
    )

  return plot.Panel(
    [
      line(result["candidates"], "all partitions", "", marker="o",
           colour="lightgray", size=2.4),
      *(
        line(result["fronts"][f"{way}, {codecs}"], f"front, {codecs}", style,
             marker=".", colour="black", width=1, steps="pre")
        for codecs, style in (("coded or not", "-"), ("not coded", "--"))
      ),
      *(
        line([row], name, "", marker=mark, alpha=0.8)
        for mark, (name, row) in zip(
          _MARKS, result["schemes"].items(), strict=False
        )
      ),
      plot.Rule(
        a["memory_bytes"] / 1e9, vertical=True, style=":", colour="gray",
        label="memory of a device", width=1.5,
      ),
    ],
    f"{a['parameters'] / 1e9:g}e9 parameters, {way} in the node",
    plot.Axis("GB of training state on a device", "log", plain=True),
    _time("predicted seconds of a step", way), grid=True,
  )


def _size(result: Row, way: str) -> plot.Panel:
  """Returns the slowdown of a step against the largest model that fits.

  All times are proportional to the size of the model, so a partition is a
  horizontal line up to its largest model.
  """
  a = result["assumptions"]

  def slowdown(row: Row) -> float:
    return row["seconds"][way] / a["compute_seconds"]

  marks = [
    plot.Line([row["largest_model"] / 1e9], [slowdown(row)], name, "", mark,
         alpha=0.8)
    for mark, (name, row) in zip(
      _MARKS, result["schemes"].items(), strict=False
    )
  ]
  for codecs, style in (("coded or not", "-"), ("not coded", "--")):
    front = result["fronts"][f"{way}, {codecs}"]
    ends = [row["largest_model"] / 1e9 for row in front]
    heights = list(map(slowdown, front))
    starts, above = [1.0, *ends[:-1]], codecs == "not coded"
    # Separate pieces: None interrupts the line.
    marks.append(plot.Line(
      [x for pair in zip(starts, ends, strict=True) for x in (*pair, None)],
      [y for height in heights for y in (height, height, None)], style=style,
      colour="black",
    ))
    marks.append(plot.Texts(
      ["/".join(map(str, row["degrees"])) for row in front], ends, heights,
      (-8, 3) if above else (0, -3),
      ("left", "bottom") if above else ("right", "top"), 7, 60,
    ))
  return plot.Panel(
    marks, f"fastest for each model size, {way} in the node",
    plot.Axis(
      "1e9 parameters of the largest model in "
      f"{a['memory_bytes'] / 1e9:g} GB; labels: shards of w / g / o", "log",
      plain=True,
    ),
    _time("predicted time of a step / its compute alone", way), grid=True,
  )
