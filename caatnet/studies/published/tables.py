"""Prints what published configurators choose, and how long that takes."""

from collections.abc import Mapping
from typing import Any

from caatnet.show import tables


def show(result: Mapping[str, Any]) -> None:
  """Prints choices, speed-ups and assumptions.

  Args:
    result: What `caatnet.studies.published.study.run` returned.
  """
  tables.table(
    "predicted, not measured; in vain: what it would rather have had, and "
    "does not fit; says: what its own model says",
    ["cluster", "links", "model", "chooser", "configuration", "s / step",
     "says", "in vain"],
    [
      [
        row["cluster"], row["links"], row["model"], row["chooser"],
        row["configuration"], f"{row['seconds']:.4g}",
        "" if row["said_s"] is None else f"{row['said_s']:.4g}",
        f"{row['in_vain']}",
      ]
      for row in result["rows"]
    ],
  )
  if result["speed_ups"]:
    tables.table(
      "how many times as long as Pipette's choice others' take, over all "
      "clusters, links and models; published: recalled from the paper, not "
      "verified, of its own clusters and models",
      ["chooser", "cases", "least", "median", "most", "published",
       "its model says, median"],
      [
        [row["over"], f"{row['cases']}", f"{row['least']:.3g}",
         f"{row['median']:.3g}", f"{row['most']:.3g}", row["recalled"],
         "" if row["said"] is None else f"{row['said']:.0%} of it"]
        for row in result["speed_ups"]
      ],
    )
  for name, text in result["assumptions"].items():
    print(f"{name}: {text}")
