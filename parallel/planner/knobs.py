"""The knobs of a datacentre: what it is made of, and what is asked of it."""

import math

from parallel.hardware import sites
from parallel.hardware.quantities import Quantity

_PAPER = "arXiv 2407.12819"
_BACKED_OUT = f"backed out of the outputs of {_PAPER}"
_HOURS = sites.INTERRUPTED_GPUS * sites.INTERRUPTED_HOURS
_NETWORK = sum(sites.INTERRUPTIONS[cause] for cause in sites.NETWORK_CAUSES)
_GB200 = sites.RACKS["gb200"]


def _knob(
  value: float, low: float, high: float, unit: str, meaning: str, source: str,
  mark: str = "choice", most: float = math.inf, least: float = 0.0,
) -> Quantity:
  return Quantity(value, low, high, unit, meaning, source, mark, least, most)


KNOBS: dict[str, Quantity] = {
  "budget": _knob(
    100e9, 80e9, 120e9, "$", "budget", _PAPER, "paper"),
  "accelerators": _knob(
    1_677_600, 1, 2e6, "", "accelerators", f"23,300 racks of {_PAPER}", "paper",
    least=1),
  "days_allowed": _knob(
    365, 90, 540, "days", "days that training may take", "ours", least=1),
  "compute_share": _knob(
    0.7, 0.6, 0.8, "", "share of the budget for racks", _PAPER, "paper", 1),
  "rack_price": _knob(
    3.0042e6, 2.5e6, 4e6, "$", "price of a rack", _BACKED_OUT, "derived"),
  "per_rack": _knob(
    72, 72, 72, "", "accelerators of a rack", _GB200.source, "published",
    least=1),
  "rack_w": _knob(
    120e3, 115e3, 132e3, "W", "power of a rack as sold", _GB200.source,
    "reported"),
  "overhead": _knob(
    1.2875, 1.05, 1.35, "", "IT power over that of racks: hosts, network, "
    "storage", f"154.5 kW per rack, {_BACKED_OUT}, over 120", "derived",
    least=1),
  "pue": _knob(
    1.2, 1.1, 1.31, "", "total power over IT power", _BACKED_OUT, "derived",
    least=1),
  "site_w": _knob(
    2.4e9, 1e9, 3e9, "W", "power of the largest site", "ours"),
  "energy_price": _knob(
    50, 30, 90, "$/MWh", "price of energy", "ours"),
  "peak": _knob(
    2.5e15, 2.5e15, 2.5e15, "FLOP/s", "peak of an accelerator",
    _GB200.source, "published"),
  "utilisation": _knob(
    0.4, 0.3, 0.5, "", "share of the peak that a step reaches", "ours", most=1),
  "availability": _knob(
    1, 0.95, 1, "", "share of the accelerators that work", "ours", most=1),
  "memory_bytes": _knob(
    186e9, 180e9, 192e9, "B", "memory of an accelerator", _GB200.source,
    "published"),
  "fill": _knob(
    0.5, 0.3, 0.7, "", "share of the memory for state", "ours", most=1),
  "parameters": _knob(
    50e12, 25e12, 100e12, "", "parameters", _PAPER, "paper", least=1),
  "active_share": _knob(
    1, 0.05, 1, "", "share of the parameters that a token uses", "ours",
    most=1),
  "tokens_per_parameter": _knob(
    20, 5, 40, "", "tokens per active parameter", "arXiv 2203.15556",
    "unverified"),
  "state_bytes": _knob(
    16, 12, 18, "B", "training state of a parameter", "ours"),
  "batch_tokens": _knob(
    60e6, 16e6, 120e6, "", "tokens of a step", "ours", least=1),
  "microbatch_tokens": _knob(
    8192, 4096, 16384, "", "tokens of a microbatch", "ours", least=1),
  "layers": _knob(120, 100, 240, "", "layers of the model", "ours", least=1),
  "chunks": _knob(1, 1, 4, "", "chunks of a stage", "ours", least=1),
  "step_share": _knob(
    1, 0.2, 1, "", "share of a step in which a message may travel", "ours",
    most=1),
  "radix": _knob(
    128, 64, 512, "", "ports of a switch", "ours", least=4),
  "gradient_bits": _knob(
    16, 4, 32, "bit", "bits of a parameter between sites", "ours"),
  "sync_every": _knob(
    1, 1, 500, "", "steps between exchanges of sites", "ours", least=1),
  "distance_km": _knob(
    4000, 100, 5000, "km", "distance between sites", "coast to coast"),
  "detour": _knob(
    1.5, 1, 2, "", "length of the fibre over the distance",
    "1.5: 60 ms from coast to coast, recalled", "unverified", least=1),
  "mtbf_h": _knob(
    _HOURS / sum(sites.INTERRUPTIONS.values()), 25_000, 100_000, "h",
    "hours between failures of one accelerator and its share of the rest",
    sites.INTERRUPTIONS_SOURCE, "reported"),
  "network_mtbf_h": _knob(
    _HOURS / _NETWORK, 250_000, 1e6, "h",
    "hours between failures of one accelerator's links",
    sites.INTERRUPTIONS_SOURCE, "reported"),
  "save_rate": _knob(
    5e9, 6e6, 50e9, "B/s", "rate at which an accelerator copies its state",
    "a tenth of its link, to a neighbour's memory; 6e6: storage of 10 TB/s"),
  "restart_s": _knob(
    60, 10, 600, "s", "time to go on after a failure", "ours"),
  "repair_h": _knob(
    24, 4, 72, "h", "time until what has failed is back", "ours"),
}

# Knobs that somebody decides; the others are as the world is.
DECISIONS = (
  "budget", "accelerators", "days_allowed", "compute_share", "per_rack",
  "site_w", "fill", "parameters", "active_share", "tokens_per_parameter",
  "batch_tokens", "microbatch_tokens", "layers", "chunks", "step_share",
  "radix", "gradient_bits", "sync_every", "distance_km", "save_rate",
)
