"""Draws the study of serving; needs the ``plot`` extra."""

from collections.abc import Mapping
import pathlib
from typing import Any

import numpy as np

from caatnet.show import pictures


def plot(result: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws what a subject of the study has found.

  Args:
    result: What `caatnet.studies.serving.study.run` returned.
    path: The PNG to write.
  """
  _PLOT[result["subject"]](result, path)


def _vllm_log(result: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws running and waiting requests and the cache over time, with the log's.

  The log's series began up to a quarter of a second before the first request.
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


def _fastswitch(result: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws tails of both latencies, copies and bytes, for the first setting."""
  plt = pictures.pyplot()
  kind = result["sessions"][0]["kind"]
  rows = [row for row in result["sessions"] if row["kind"] == kind]
  figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
  for panel, measure, name in zip(
    axes[0], ("ttft", "tbt"), ("TTFT", "TBT"), strict=True
  ):
    for row in rows:
      panel.plot(row[measure]["curve"], result["above"], label=row["arm"])
    panel.set(
      xscale="log", yscale="log", xlabel=f"{name} (s)",
      ylabel="share of samples above", ylim=(1e-4, 1),
      title=f"{name}, {kind} priorities",
    )
    panel.grid(alpha=0.3)
  axes[0][0].legend(fontsize="small")
  copied = [row for row in rows if row["ranges"]]
  names = [row["arm"] for row in copied]
  colours = [f"C{rows.index(row)}" for row in copied]
  bars = (
    ("copies (contiguous byte ranges)", "ranges", 1, "{:,.0f}"),
    ("GB", "bytes", 1e9, "{:,.1f}"),
  )
  for panel, (label, key, unit, form) in zip(axes[1], bars, strict=True):
    values = [row[key] / unit for row in copied]
    drawn = panel.barh(names, values, color=colours)
    panel.bar_label(drawn, fmt=form, padding=3, fontsize="small")
    panel.ticklabel_format(axis="x", scilimits=(0, 4))
    panel.set(xlabel=label, xlim=(0, 1.35 * max(values, default=1)))
    panel.invert_yaxis()
  pictures.save(figure, path)


def _fairness(result: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws each client's service over time, a panel for each policy."""
  plt = pictures.pyplot()
  rows = result["rows"]
  figure, axes = plt.subplots(
    1, len(rows), figsize=(3 * len(rows), 3.4), sharey=True, squeeze=False,
    layout="constrained",
  )
  for panel, row in zip(axes[0], rows, strict=True):
    for name, curve in row["service"].items():
      panel.plot(row["grid"], np.array(curve) / 1e3, label=name)
    panel.set(
      xlabel="s", title=f"{row['policy']}: {row['largest'] / 1e3:.0f}k",
    )
    panel.grid(alpha=0.3)
  axes[0][0].set(ylabel="service (1,000 tokens read)")
  axes[0][0].legend(fontsize="small")
  figure.suptitle(
    "service until a client's line is empty; in titles the largest difference, "
    f"bound of VTC {result['bound'] / 1e3:.0f}k", fontsize="medium",
  )
  pictures.save(figure, path)


_PLOT = {
  "fairness": _fairness, "fastswitch": _fastswitch, "vllm_log": _vllm_log
}
