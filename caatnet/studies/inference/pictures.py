"""Draws the study of prefill and decode; needs the ``plot`` extra."""

from collections.abc import Mapping
import pathlib
from typing import Any

from caatnet.show import pictures


def plot(result: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws what policies save of decoding, by the number of sequences.

  A band reaches from the least latency to the greatest, a dashed line has none.

  Args:
    result: What `caatnet.studies.inference.study.run` returned.
    path: The PNG to write.
  """
  plt = pictures.pyplot()
  curves = [c for c in result["curves"] if c["sequences"]]
  models = list(dict.fromkeys(c["model"] for c in curves))
  policies = list(dict.fromkeys(c["policy"] for c in curves))
  machines = list(dict.fromkeys(c["machine"] for c in curves))
  figure, axes = plt.subplots(
    len(models), len(policies),
    figsize=(1.4 + 2.7 * len(policies), 1.2 + 2.6 * len(models)),
    sharex=True, sharey=True, squeeze=False, layout="constrained",
  )
  for curve in curves:
    panel = axes[models.index(curve["model"]), policies.index(curve["policy"])]
    colour = f"C{machines.index(curve['machine'])}"
    low, high = zip(*(s["saved_with"] for s in curve["saved"]), strict=True)
    x = curve["sequences"]
    panel.fill_between(x, low, high, color=colour, alpha=0.3, linewidth=0)
    for end in (low, high):
      panel.plot(x, end, color=colour, linewidth=1)
    panel.plot(
      x, [s["saved_without"] for s in curve["saved"]], "--", color=colour,
      linewidth=1,
    )
  for row, model in zip(axes, models, strict=True):
    row[0].set(ylabel=f"{model}: part of a step that is saved")
    for panel in row:
      panel.set_xscale("log", base=2)
      panel.grid(alpha=0.3)
  for panel, policy in zip(axes[0], policies, strict=True):
    panel.set(title=policy)
  for panel in axes[-1]:
    panel.set(xlabel="sequences that decode")
  handles = [
    plt.Line2D([], [], color=f"C{i}", label=name)
    for i, name in enumerate(machines)
  ]
  handles.append(
    plt.Line2D([], [], color="gray", ls="--", label="bytes alone, no latency")
  )
  figure.legend(handles=handles, loc="outside lower center", ncols=3)
  pictures.save(figure, path)
