"""Report of placements: policies, the optimum's tensors, tiers over time."""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

from parallel.base import labels, plot
from parallel.base.report import Column, Report, Table
from parallel.plans.placement.problem import INSTANTS, PHASES

Row = Mapping[str, Any]
# Tensor -> memory that holds it in a run with ``config.memory.placement``.
_MEMORY_IN_RUN = {
  "master weights": "these tiers", "first moments": "these tiers",
  "second moments": "these tiers", "activations": "device or pinned",
  "layer inputs": "device or pinned", "weights": "device",
  "gradients": "these tiers", "staged weights": "any node",
  "arrived gradients": "any node",
  "moments": "device or pinned, all",
}
# ``config.placement.state`` -> description of the state of a step.
_STATES = {
  "mixed": "weights and gradients in the dtype of activations, on the device "
  "or on the host",
  "run": "as in launch.train: float32 weights and gradients on the device",
}


def report(result: Mapping[str, Any]) -> Report:
  """Returns tables of policies, tensors and tiers' rates, and the figure."""
  host = result["host"]
  tensors = [
    row | {
      "tiers": {t: x / sum(row["tiers"].values())
                for t, x in row["tiers"].items()},
      "elsewhere": {t: x if x is None else f"{1e3 * x:+.1f}"
                    for t, x in row["elsewhere"].items()},
      "executed": _MEMORY_IN_RUN[row["tensor"]],
    } for row in result["tensors"]
  ]
  return Report("Placement of a training step on memory tiers", [
    Table(
      f"{result['parameters'] / 1e9:.2f}B parameters, batch of "
      f"{result['batch_size']} sequences of {result['seq_len']:,} tokens, on "
      f"one {result['device']} and the tiers of {host['name']}: predicted, not "
      f"measured\n{_STATES[result['state']]}\n"
      "-: does not fit; relative: speed relative to the first row; above: "
      "seconds above the lower bound of all placements; longest context "
      f"(within 1/64, up to {result['config']['placement']['longest']:,}) and "
      "largest model (same width, more layers) with this policy",
      "policy | step_s:.3f=s / step | relative:.1% | above:.1% | forward | "
      "backward | update | longest | largest=largest model",
      [
        row | {
          phase: f"{row[phase]['seconds']:.3f} ({row[phase]['binding']})"
          for phase in PHASES if phase in row
        } for row in result["policies"]
      ],
    ),
    *(_unfit(row) for row in result["policies"] if row["error"]),
    *(f"warning: {text}" for text in result["warnings"]),
    Table(
      "speed relative to dram_only on the baseline, if both hosts have rates "
      "at an end of their range\n-: does not fit; gain: latency_first over "
      "interleave",
      "seq_len=tokens | changed | rates | speeds.*:.1% | gain:+.1%",
      result["scanned"],
    ),
    Table(
      "least rate of a CXL card for a speed of latency_first; -: none",
      "seq_len=tokens | target:.0%=speed | rate/1e9:.1f=GB/s",
      result["needed"],
    ),
    Table(
      "all host tensors on one tier, whatever its capacity: the CPU's update, "
      "and copies in GB/s",
      "changed | rates | tier | update_s | slower:.2f=times the first | "
      "to_device/1e9:.1f=to the device | from_device/1e9:.1f=from it",
      result["alone"],
    ),
    Table(
      "the optimum, by tensor\nelsewhere: by how many ms a step is longer if "
      "the tensor may be on that tier only; -: does not fit\n"
      "executed: memory in a run with config.memory.placement; pinned: host "
      "memory of any node",
      ["tensor", "way", "bytes/1e9:.2f=GB", Column(
        "tiers", "tiers", functools.partial(labels.text, key="share")
      ), "elsewhere", "executed"],
      tensors,
    ),
    f"the optimum with whole layers only: {labels.text(result['whole'])}",
    Table(
      "rates and capacities that the predictions use; latencies have no effect",
      "name | value:.4g | low:.4g | high:.4g | source", _quantities(host),
    ),
  ], (lambda: _figure(result)) if result["occupied"] else None)


def _unfit(row: Row) -> str:
  """Returns a line on the memory that a policy lacks, and on what would fit."""
  text = f"{row['policy']}: {row['error']}"
  if "longest" not in row:  # a row of the baseline
    return text
  fits = []
  if row["longest"] != "none":
    fits.append(f"{row['longest']:,} tokens of context")
  if row["largest"] != "none":
    fits.append(f"a model of {row['largest'] / 1e9:.1f}B parameters")
  return f"{text}; what would fit: {' or '.join(fits) or 'nothing'}"


def _quantities(host: Mapping[str, Any]) -> list[Row]:
  """Returns a row for each rate and capacity of a host's links and tiers."""
  places = [host["device_link"] | {"name": "link to the device"}]
  places += [*host["links"], *host["tiers"]]
  return [
    {"name": f"{fields['name']}, {key}"} | value
    for fields in places for key, value in fields.items()
    if isinstance(value, Mapping) and key != "latency_s"
  ]


def _figure(result: Mapping[str, Any]) -> plot.Figure:
  """Plots bytes by memory tier after forward and backward, and over time."""
  capacity = {"device": result["device_bytes"]} | {
    tier["name"]: tier["capacity_bytes"]["value"]
    for tier in result["host"]["tiers"]
  }
  tensors = list(dict.fromkeys(row["tensor"] for row in result["occupied"]))
  held: dict[tuple[str, str], dict[str, Any]] = {
    (instant, tier): {"instant": instant, "tier": tier,
                      "of": dict.fromkeys(tensors, 0.0)}
    for instant in INSTANTS for tier in capacity
  }
  for row in result["occupied"]:
    place = held[row["instant"], row["tier"]]["of"]
    place[row["tensor"]] += row["bytes"]
  panels = plot.stacked_bar_panels(
    list(held.values()), "tier", "of/1e9", label="GB", each="instant",
    title="optimum, predicted",
  )
  for panel in panels:
    panel.marks.append(plot.Line(
      [size / 1e9 for size in capacity.values()], range(len(capacity)),
      "capacity", "", "|", "black", size=24,
    ))
  return plot.figure([*panels, _over_time(result["timeline"], capacity)])


def _over_time(
  rows: Sequence[Row], capacity: Mapping[str, float]
) -> plot.Panel:
  """Plots bytes by memory tier over a step, with the tiers' capacities."""
  (panel,) = plot.lines(
    rows, "seconds=s", *(f"bytes.{tier}/1e9={tier}" for tier in capacity),
    label="GB", title=f"{', '.join(PHASES)}; dotted: capacity", marker="",
  )
  panel.marks.extend(
    plot.Rule(size / 1e9, style=":", colour=f"C{i}")
    for i, size in enumerate(capacity.values())
  )
  panel.marks.extend(
    plot.Rule(row["seconds"], vertical=True, style="-", width=0.5)
    for row in rows[1:-1]
  )
  return panel
