"""Report of placements: policies, the optimum's tensors, tiers over time."""

from collections.abc import Mapping, Sequence
from typing import Any

from parallel.base import plot
from parallel.base.report import Column, Report, Table
from parallel.plans.placement.problem import INSTANTS

Row = Mapping[str, Any]
# Tensor -> its memory in a run that executes the placement (`config.memory`).
_EXECUTED = {
  "master weights": "these tiers", "first moments": "these tiers",
  "second moments": "these tiers", "activations": "device or pinned",
  "layer inputs": "device or pinned", "weights": "device",
  "gradients": "device, then any node", "staged weights": "any node",
  "moments": "device or pinned, all",
}
# Sentence on the state of a step by ``config.placement.state``.
_STATES = {
  "mixed": "weights and gradients in the dtype of activations, on the device "
  "or on the host",
  "run": "as in launch.train: float32 weights and gradients on the device",
}


def report(result: Mapping[str, Any]) -> Report:
  """Returns the tables of policies, tensors and rates, and the figure."""
  host = result["host"]
  parts: list[Table | str] = [
    Table(
      f"{result['parameters'] / 1e9:.2f}B parameters, batch of "
      f"{result['batch_size']} sequences of {result['seq_len']:,} tokens, on "
      f"one {result['device']} and the tiers of {host['name']}: predicted, not "
      f"measured\n{_STATES[result['state']]}\n"
      "relative: speed relative to the first row; above: seconds above the "
      "lower bound of all placements; longest context "
      f"(within 1/64, up to {result['config']['placement']['longest']:,}) and "
      "largest model (same width, more layers) with this policy",
      [
        "policy", Column("step_s", "s / step", ".3f", default="does not fit"),
        Column("relative", "relative", ".1%", default=""),
        Column("above", "above", ".1%", default=""),
        *(Column(phase, phase, _phase, default="")
          for phase in ("forward", "backward", "update")),
        Column("longest", "longest", _count, default=""),
        Column("largest", "largest, B", _billions, default=""),
      ],
      result["policies"],
    ),
    *(_unfit(row) for row in result["policies"] if row["error"]),
    *(f"warning: {text}" for text in result["warnings"]),
  ]
  parts += _ranges(result)
  if result["tensors"]:
    parts += [
      Table(
        "the optimum, by tensor\nelsewhere: by how many ms a step is longer if "
        "the tensor may be on that tier only\nexecuted: memory in a run with "
        "config.memory.placement; pinned: host memory of any node",
        [
          "tensor", "way", Column("bytes", "GB", ".2f", unit=1e9),
          Column("tiers", "tiers", _shares),
          Column("elsewhere", "elsewhere", _gains),
          Column("tensor", "executed", _EXECUTED.__getitem__),
        ],
        result["tensors"],
      ),
      "with whole layers only: " + (
        f"{result['whole']['step_s']:.3f} s, {result['whole']['gap']:.2%} more"
        if result["whole"] else "no placement found"
      ),
    ]
  parts.append(Table(
    "rates and capacities that the predictions use; latencies have no effect",
    [
      "name", Column("value", "value", ".4g"), Column("low", "low", ".4g"),
      Column("high", "high", ".4g"), "source",
    ],
    _quantities(host),
  ))
  return Report(
    "Placement of a training step on memory tiers", parts,
    (lambda: _figure(result)) if result["occupied"] else None,
  )


def _ranges(result: Mapping[str, Any]) -> list[Table]:
  """Returns the tables of speeds and rates over the ranges of the tiers."""
  changed = ["changed", Column("rates", "rates")]
  tables = [
    Table(
      "speed relative to dram_only on the baseline, if both hosts have rates "
      "at an end of their range\ngain: latency_first over interleave",
      [
        Column("seq_len", "tokens", ","), *changed,
        *(Column(p, p, ".1%", default="does not fit")
          for p in result["scanned"][0]["speeds"]),
        Column("gain", "gain", "+.1%", default=""),
      ],
      [row | row["speeds"] for row in result["scanned"]],
    ),
    Table(
      "least rate of a CXL card, in GB/s, for a speed of latency_first",
      [
        Column("seq_len", "tokens", ","), Column("target", "speed", ".0%"),
        Column("rate", "GB/s", ".1f", unit=1e9, default="none"),
      ],
      result["needed"],
    ),
    Table(
      "all host tensors on one tier, whatever its capacity: the CPU's update, "
      "and copies in GB/s",
      [
        *changed, "tier", Column("update_s", "update, s", ".3f"),
        Column("slower", "times the first", ".2f"),
        Column("to_device", "to the device", ".1f", unit=1e9),
        Column("from_device", "from it", ".1f", unit=1e9),
      ],
      result["alone"],
    ),
  ]
  return [table for table in tables if table.rows]


def _unfit(row: Row) -> str:
  """Returns the bytes that a policy lacks, and what would fit."""
  text = f"{row['policy']}: {row['error']}"
  if "longest" not in row:  # of the baseline
    return text
  fits = []
  if row["longest"] != "none":
    fits.append(f"{row['longest']:,} tokens of context")
  if row["largest"] != "none":
    fits.append(f"a model of {_billions(row['largest'])}B parameters")
  return f"{text}; what would fit: {' or '.join(fits) or 'nothing'}"


def _count(found: int | str) -> str:
  return found if isinstance(found, str) else f"{found:,}"


def _billions(found: int | str) -> str:
  return found if isinstance(found, str) else f"{found / 1e9:.1f}"


def _phase(found: Row) -> str:
  return f"{found['seconds']:.3f} ({found['binding']})"


def _shares(shares: Mapping[str, float]) -> str:
  total = sum(shares.values())
  return ", ".join(f"{t} {x / total:.0%}" for t, x in shares.items())


def _gains(found: Mapping[str, float | None]) -> str:
  return ", ".join(
    f"{tier} " + ("does not fit" if x is None else f"{1e3 * x:+.1f}")
    for tier, x in found.items()
  )


def _quantities(host: Mapping[str, Any]) -> list[Row]:
  """Returns one row per quantity of the host."""
  rows = []
  places = [("link to the device", host["device_link"])]
  places += [(link["name"], link) for link in host["links"]]
  places += [(tier["name"], tier) for tier in host["tiers"]]
  for name, fields in places:
    rows += [
      {"name": f"{name}, {key}"} | value for key, value in fields.items()
      if isinstance(value, Mapping) and key != "latency_s"
    ]
  return rows


def _figure(result: Mapping[str, Any]) -> plot.Figure:
  """Returns memory by tier at both instants and over time, a panel each."""
  rows: Sequence[Row] = result["occupied"]
  host = result["host"]
  capacity = {
    tier["name"]: tier["capacity_bytes"]["value"] for tier in host["tiers"]
  }
  capacity = {"device": result["device_bytes"]} | capacity
  names = list(capacity)
  tensors = list(dict.fromkeys(row["tensor"] for row in rows))
  panels = []
  for instant in INSTANTS:
    sizes = {
      tensor: [
        sum(row["bytes"] for row in rows
            if (row["instant"], row["tier"], row["tensor"])
            == (instant, tier, tensor)) / 1e9
        for tier in names
      ]
      for tensor in tensors
    }
    bars = plot.stacked(sizes, horizontal=False)
    marks = [*bars, plot.Line(
      range(len(names)), [size / 1e9 for size in capacity.values()],
      "capacity", "",
      marker="_", colour="black", size=24,
    )]
    panels.append(plot.Panel(
      marks, f"{instant} (optimum, predicted)",
      plot.Axis("", ticks=list(enumerate(names))), "GB",
      legend="" if panels else "best", grid=True,
    ))
  panels.append(_over_time(result["timeline"], capacity))
  return plot.Figure(panels, (15, 4.6), columns=len(panels), share_y="all")


def _over_time(
  rows: Sequence[Row], capacity: Mapping[str, float]
) -> plot.Panel:
  """Returns bytes by tier over a step, with the capacity of each tier."""
  seconds = [row["seconds"] for row in rows]
  marks: list[plot.Mark] = []
  for i, tier in enumerate(capacity):
    colour = f"C{i}"  # of matplotlib's cycle
    marks += [
      plot.Line(
        seconds, [row["bytes"][tier] / 1e9 for row in rows], tier,
        colour=colour,
      ),
      plot.Rule(capacity[tier] / 1e9, style=":", colour=colour),
    ]
  marks += [plot.Rule(x, vertical=True, style="-", width=0.5)
            for x in seconds[1:-1]]
  return plot.Panel(
    marks, "forward, backward, update; dotted: capacity", "s", "GB",
    legend="best",
  )
