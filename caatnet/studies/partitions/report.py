"""Report of the study of partitions."""

from collections.abc import Iterator, Mapping
import dataclasses
from typing import Any

from parallel.base import plot
from parallel.base.report import Report, Table

Row = Mapping[str, Any]

# Columns of a partition: sharding degrees, second copy, codecs.
_PARTITION_COLUMNS = (
  "degrees=w, g, o over | secondary=copy | "
  "{weight_codec}, {gradient_codec}, {secondary_codec}=codecs"
)
# Cells of a row for which no partition fits.
_EMPTY_CELLS = dict.fromkeys(
  ("weight_codec", "gradient_codec", "secondary_codec")
)
_COST_COLUMNS = (
  "memory.total/1e9:.2f=GB | fits | seconds.reuse:.2f=s, reuse | "
  "seconds.no reuse:.2f=s, no reuse"
)


def report(result: Mapping[str, Any]) -> Report:
  """Returns assumptions, tables of schemes, fronts and ratios, and a figure."""
  schemes = [row | {"scheme": name} for name, row in result["schemes"].items()]
  return Report(
    "Partitions of the training state",
    [
      _assumptions(result["assumptions"]),
      Table(
        "memory of a device in GB, and 1e9 parameters of the largest model "
        "that "
        "fits; w, g, o, copy: weights, gradients,\noptimizer, second copy of "
        "the "
        "weights; over: number of devices; codecs: of w, g, copy",
        f"scheme | {_PARTITION_COLUMNS} | memory.*/1e9:.2f | fits | "
        "largest_model/1e9:,.1f=largest",
        schemes,
      ),
      Table(
        "GB that a device receives per step over each level, and that enter a "
        "node; reuse: ranks of a node forward them",
        "scheme | way | of.*/1e9:.2f | node/1e9:,.2f=into a node | s:.2f",
        [
          {
            "scheme": row["scheme"], "way": way, "of": sizes,
            "node": row["node"][way], "s": row["seconds"][way],
          }
          for row in schemes
          for way, sizes in row["received"].items()
        ],
      ),
      f"fronts of {len(result['candidates'])} partitions, fastest first: each "
      "is "
      "the fastest for models up to so many 1e9 parameters\nand too large for "
      "the line above",
      *(
        Table(
          key,
          f"{_PARTITION_COLUMNS} | {_COST_COLUMNS} | "
          "largest_model/1e9:,.1f=up to",
          rows,
        )
        for key, rows in result["fronts"].items()
      ),
      Table(
        "the fastest that fits, by microbatches per step",
        f"accumulation=m | among | {_PARTITION_COLUMNS} | {_COST_COLUMNS}",
        [
          {"accumulation": row["accumulation"], "among": key}
          | (answer or _EMPTY_CELLS)
          for row in result["best"]
          for key, answer in row["answers"].items()
        ],
      ),
      *(_published(result["published"]) if result["published"] else ()),
    ],
    lambda: _figure(result, schemes),
  )


def _assumptions(a: Row) -> str:
  """Returns a text with the sizes of the run and the assumptions."""
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


def _published(published: Row) -> list[Table | str]:
  """Returns tables of the ratios of Xu et al. and of the predicted ones."""
  rows, ranges = published["rows"], {}
  for row in rows:
    ours = ranges.setdefault(row["ratio"], row | {"all": []})["all"]
    ours += row["ours"].values()
  return [
    Table(
      "throughput per device, as a ratio: the paper's "
      f"({published['source']}) and ours, by microbatches m per step",
      "ratio | accumulation=m | paper:g | ours.*:.2f", rows,
    ),
    Table(
      "frontier3_quantised has levels and codecs as recalled; the paper's m, "
      "overlap and fewest nodes are not known: a ratio that comes near is no "
      "reproduction",
      "ratio | paper:g | least:.2f=our least | most:.2f=our greatest | within",
      [
        row | {"least": min(row["all"]), "most": max(row["all"]),
               "within": min(row["all"]) <= row["paper"] <= max(row["all"])}
        for row in ranges.values()
      ],
    ),
  ]


def _figure(result: Row, schemes: list[dict[str, Any]]) -> plot.Figure:
  """Plots step time against memory of candidates, fronts and schemes."""
  a = result["assumptions"]

  def panels() -> Iterator[plot.Panel]:
    for way in ("reuse", "no reuse"):
      axes = (
        "memory.total/1e9=GB of training state on a device",
        f"seconds.{way}=predicted seconds of a step",
      )
      fronts = [
        row | {"front": f"front, {codecs}"}
        for codecs in ("coded or not", "not coded")
        for row in result["fronts"][f"{way}, {codecs}"]
      ]
      (found,) = plot.lines(
        result["candidates"], *axes, log="xy", joined=False,
        title=f"{a['parameters'] / 1e9:g}e9 parameters, {way} in the node",
      )
      found = dataclasses.replace(found, marks=[
        dataclasses.replace(mark, colour="lightgray", label="all partitions")
        for mark in found.marks
      ])
      for rows, by in (fronts, "front"), (schemes, "scheme"):
        (panel,) = plot.lines(rows, *axes, by=by, joined=by == "front")
        found.marks.extend(
          dataclasses.replace(mark, steps="pre") for mark in panel.marks
        )
      found.marks.append(plot.Rule(
        a["memory_bytes"] / 1e9, vertical=True, label="memory of a device"
      ))
      yield dataclasses.replace(found, legend="")

  return plot.figure(
    list(panels()), f"{a['devices']} devices of {a['cluster']}, "
    f"{a['accumulation']} microbatches, compute at {a['utilisation']:.0%} of "
    "peak", legend="outside right upper",
  )
