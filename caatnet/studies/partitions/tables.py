"""Prints tables of the study of partitions."""

from collections.abc import Mapping, Sequence
from typing import Any

from caatnet.show import tables


def show(result: Mapping[str, Any]) -> None:
  """Prints assumptions, schemes, fronts, the best partitions, and the paper.

  Args:
    result: What `caatnet.studies.partitions.study.run` returned.
  """
  _show_assumptions(result["assumptions"])
  _show_schemes(result)
  _show_fronts(result)
  _show_best(result["best"])
  if result["published"]:
    _show_published(result["published"])


def _show_assumptions(a: Mapping[str, Any]) -> None:
  print(
    f"{a['parameters'] / 1e9:g}e9 parameters in {a['num_layers']} equal "
    f"layers, {a['devices']} devices of {a['cluster']}, "
    f"{a['memory_bytes'] / 1e9:g} GB each for the training state\n"
    "Predicted, nothing is measured. Assumed:\n"
    f"- {a['accumulation']} microbatches of {a['tokens']} tokens per device "
    "and step; 6 FLOP per parameter and token\n"
    f"- compute alone reaches {a['utilisation']:.0%} of "
    f"{a['peak_flops'] / 1e12:g} TFLOP/s ({a['peak_confidence']}: "
    f"{a['peak_source']}): {a['compute_seconds']:.2f} s a step\n"
    f"- bytes: {a['weight_bytes']} a gathered weight, {a['gradient_bytes']} a "
    "gradient, 12 a stored parameter (float32 weight, two moments)\n"
    "- memory leaves out activations and gathered layers; time leaves out "
    "latency, encoding and the optimizer\n"
    "- exchanges of microbatches run "
    + ("under their compute" if a["overlap"] else "apart from compute")
    + "; those once a step always do apart"
  )
  for level in a["levels"]:
    words = (
      "config.bandwidths" if level["overridden"]
      else f"{level['confidence']}: {level['source']}"
    )
    print(
      f"- {level['name']}: {level['size']} ranks, "
      f"{level['bandwidth'] / 1e9:g} GB/s into each device ({words})"
    )


def _show_schemes(result: Mapping[str, Any]) -> None:
  a = result["assumptions"]
  cap = a["memory_bytes"] / 1e9
  parts = ("stored", "weights", "gradients", "2nd copy", "total")
  keys = ("stored", "weights", "gradients", "secondary")
  tables.table(
    f"memory of a device, GB; * over {cap:g} GB; 1e9 parameters of the "
    f"largest model in {cap:g} GB",
    ["scheme", "w / g / o over", "copy over", "coded w, g", *parts, "largest"],
    [
      [
        name, *_words(row),
        *(f"{row['memory'][key] / 1e9:.2f}" for key in keys),
        _total(row),
        f"{row['largest_model'] / 1e9:.1f}",
      ]
      for name, row in result["schemes"].items()
    ],
  )
  levels = [level["name"] for level in a["levels"]]
  tables.table(
    "GB that a device receives per step over each level, and that enter a "
    "node; seconds of a step\nwith reuse in the node / without",
    ["scheme", *levels, "into a node", "s"],
    [
      [
        name,
        *(_pair(row["received"], 1e9, level) for level in levels),
        _pair(row["node"], 1e9),
        _pair(row["seconds"]),
      ]
      for name, row in result["schemes"].items()
    ],
  )


def _show_fronts(result: Mapping[str, Any]) -> None:
  a = result["assumptions"]
  print(
    f"fronts of {len(result['candidates'])} partitions, fastest first: each is "
    "the fastest for models up to so many 1e9 parameters\nand too large for "
    f"the line above; GB (* over {a['memory_bytes'] / 1e9:g}) and seconds, "
    f"with reuse / without, are for {a['parameters'] / 1e9:g}e9"
  )
  for key, rows in result["fronts"].items():
    tables.table(
      key,
      ["w / g / o over", "copy over", "coded w, g", "GB", "s", "up to"],
      [
        [
          *_words(row),
          _total(row),
          _pair(row["seconds"]),
          f"{row['largest_model'] / 1e9:.1f}",
        ]
        for row in rows
      ],
    )


def _show_best(best: Sequence[Mapping[str, Any]]) -> None:
  def cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
      return "none fits"
    degrees, copy, codecs = _words(row)
    details = [f"copy {copy}" if copy else "", codecs]
    return "\n".join([
      degrees, ", ".join(filter(None, details)) or "plain",
      f"{_total(row)} GB, {_pair(row['seconds'])} s",
    ])

  tables.table(
    "the fastest that fits, by microbatches per step: w / g / o over; GB; "
    "s with reuse / without",
    ["", *best[0]["answers"]],
    [
      [str(row["accumulation"]), *map(cell, row["answers"].values())]
      for row in best
    ],
  )


def _show_published(published: Mapping[str, Any]) -> None:
  rows = published["rows"]
  tables.table(
    "throughput per device, as a ratio: the paper's "
    f"({published['source']}) and ours, by microbatches m per step",
    ["ratio", "m", "paper", *rows[0]["ours"]],
    [
      [
        row["ratio"],
        str(row["accumulation"]),
        f"{row['paper']:g}",
        *(f"{value:.2f}" for value in row["ours"].values()),
      ]
      for row in rows
    ],
  )
  print(
    "frontier3_quantised has levels and codecs as recalled; the paper's m, "
    "overlap and fewest nodes are not known: a ratio that comes near is no "
    "reproduction."
  )
  for label, paper in {row["ratio"]: row["paper"] for row in rows}.items():
    ours = [
      v for row in rows if row["ratio"] == label for v in row["ours"].values()
    ]
    low, high = min(ours), max(ours)
    place = "within" if low <= paper <= high else "OUTSIDE"
    print(
      f"- {label}: {paper:g} is {place} our {low:.2f} to {high:.2f}, at the "
      "assumed compute rate and tokens"
    )


def _words(row: Mapping[str, Any]) -> list[str]:
  """Describes a partition: its degrees, its second copy, its codecs."""
  copy = str(row["secondary"] or "")
  if row["secondary_codec"] != "none":
    copy += f", {row['secondary_codec']}"
  codecs = (row["weight_codec"], row["gradient_codec"])
  return [
    " / ".join(map(str, row["degrees"])),
    copy,
    "" if set(codecs) == {"none"} else ", ".join(codecs),
  ]


def _total(row: Mapping[str, Any]) -> str:
  """Formats the memory of a device in GB; a star marks what does not fit."""
  return f"{row['memory']['total'] / 1e9:.2f}" + ("" if row["fits"] else "*")


def _pair(
  values: Mapping[str, Any], unit: float = 1.0, level: str | None = None
) -> str:
  """Formats a number with reuse and the same without."""
  numbers = [v if level is None else v[level] for v in values.values()]
  return " / ".join(f"{number / unit:.2f}" for number in numbers)
