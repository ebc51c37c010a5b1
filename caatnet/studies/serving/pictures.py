"""Draws the study of serving; needs the ``plot`` extra."""

from collections.abc import Mapping
import pathlib
from typing import Any

import numpy as np

from caatnet.show import pictures


def plot(result: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws running and waiting requests and the cache over time, with the log's.

  The log's series began up to a quarter of a second before the first request.

  Args:
    result: What `caatnet.studies.serving.study.run` returned.
    path: The PNG to write.
  """
  plt = pictures.pyplot()
  figure, axes = plt.subplots(
    3, 1, figsize=(8, 7), sharex=True, layout="constrained"
  )
  ours, log = np.array(result["series"]), result["log_series"]
  parts = (
    ("running requests", 1, "running"),
    ("waiting requests", 2, "waiting"),
    ("used pages (%)", 3, "kv_cache_pct"),
  )
  for panel, (label, column, name) in zip(axes, parts, strict=True):
    panel.plot(log["t"], log[name], color="C1", linewidth=2, label="vLLM's log")
    panel.step(
      ours[:, 0], ours[:, column], color="C0", linewidth=0.8, where="post",
      label="simulated",
    )
    panel.set(ylabel=label)
    panel.grid(alpha=0.3)
  axes[0].legend()
  axes[-1].set(xlabel="s")
  pictures.save(figure, path)
