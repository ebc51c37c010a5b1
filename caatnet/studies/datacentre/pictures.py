"""Draws what would have to be built between two sites, and what decides.

Needs the ``plot`` extra.
"""

from collections.abc import Mapping
import pathlib
from typing import Any

import numpy as np

from caatnet.show import pictures


def plot(result: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws bandwidths between sites, and a tornado.

  Args:
    result: What `caatnet.studies.datacentre.study.run` returned.
    path: The PNG to write.
  """
  plt = pictures.pyplot()
  figure, (left, right) = plt.subplots(
    1, 2, figsize=(12, 4.5), layout="constrained"
  )
  for row in result["between"]["rows"]:
    points = [
      (float(target), bits / 1e12)
      for target, bits in row["bit_s"].items() if bits is not None
    ]
    if points:
      left.plot(*zip(*points, strict=True), marker="o", label=row["method"])
  left.set(
    xlabel="share of the time that compute is to take", yscale="log",
    ylabel="Tbit/s of a site, each way",
  )
  left.legend(fontsize="small", frameon=False)
  tornado = result["tornado"]
  bars = tornado["bars"][:10][::-1]
  places, value = np.arange(len(bars)), tornado["value"]
  for end in ("low", "high"):
    right.barh(
      places, [bar[end] - value for bar in bars], left=value,
      label=f"at the knob's {end} end",
    )
  of = {row["name"]: row for row in result["results"]}[tornado["target"]]
  right.set(xlabel=f"{of['meaning']} ({of['unit'] or 'a number'})")
  right.set_yticks(places, [bar["knob"] for bar in bars], fontsize="small")
  right.axvline(value, color="k", linewidth=0.8)
  right.legend(fontsize="small", frameon=False)
  for panel in (left, right):
    panel.spines[["top", "right"]].set_visible(False)
  figure.suptitle("predicted from assumptions, not measured")
  pictures.save(figure, path)
