"""Draws the study of flows; needs the ``plot`` extra."""

from collections.abc import Mapping
import pathlib
from typing import Any

from caatnet.show import pictures


def plot(result: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws the fullest uplinks, and how many pieces flows are sent in.

  Args:
    result: What `caatnet.studies.flows.study.run` returned.
    path: The PNG to write.
  """
  plt = pictures.pyplot()
  rows = result["patterns"]
  if result["failed_uplinks"]:
    rows = rows + result["failures"]
  groups = list(dict.fromkeys((r["topology"], r["pattern"]) for r in rows))
  routers = list(dict.fromkeys(r["router"] for r in rows))
  figure, (left, right) = plt.subplots(
    2, 1, figsize=(2.2 + 1.5 * len(groups), 6.4), sharex=True,
    layout="constrained",
  )
  width = 0.8 / len(routers)
  for index, router in enumerate(routers):
    own = {(r["topology"], r["pattern"]): r for r in rows
           if r["router"] == router}
    at = [i + (index + 0.5) * width - 0.4 for i, g in enumerate(groups)
          if g in own]
    mine = [own[g] for g in groups if g in own]
    left.bar(at, [r["over_bound"] for r in mine], width, label=router)
    right.bar(at, [r["num_sent"] / r["num_flows"] for r in mine], width)
  left.axhline(1, color="black", lw=1, ls="--")
  left.set(ylabel="fullest uplink / bound")
  right.set(ylabel="pieces per flow", yscale="log")
  right.set_xticks(
    range(len(groups)),
    [f"{net.replace(' without', chr(10) + 'without')}\n{pattern}"
     for net, pattern in groups],
    fontsize=8,
  )
  figure.legend(*left.get_legend_handles_labels(), loc="outside upper center",
                ncols=3)
  pictures.save(figure, path)
