"""Knobs of a datacentre plan: its components, workload and assumptions."""

from collections.abc import Mapping
import dataclasses
import math

from parallel.base.checks import known
from parallel.plans.hardware import sites

# Evidence for a value: read in the "paper" itself or its abstract, in another
# "published" document, in secondary sources ("reported"), computed from a
# paper's results ("derived"), recalled ("unverified"), or our own "choice".
EVIDENCE_MARKS = (
  "paper", "published", "reported", "derived", "unverified", "choice"
)


@dataclasses.dataclass(frozen=True)
class Quantity:
  """Uncertain number with its range and source.

  Attributes:
    value: Value that the plan uses.
    low: Lower end of the likely range.
    high: Upper end of the likely range.
    unit: Unit; "" for a plain number.
    meaning: Short description.
    source: Publication or assumption behind the value.
    mark: Confidence in the source, one of ``EVIDENCE_MARKS``.
    least: Smallest valid value.
    most: Largest valid value.
    whole: Whether the value must be an integer.
  """

  value: float
  low: float
  high: float
  unit: str
  meaning: str
  source: str = "ours"
  mark: str = "choice"
  least: float = 0.0
  most: float = math.inf
  whole: bool = False

  def __post_init__(self) -> None:
    known("mark=", self.mark, EVIDENCE_MARKS)
    if not self.least <= self.low <= self.value <= self.high <= self.most:
      raise ValueError(
        f"{self.meaning}: {self.least:g} <= low={self.low:g} <= "
        f"value={self.value:g} <= high={self.high:g} <= {self.most:g} must hold"
      )


_PAPER = "arXiv 2407.12819, its abstract and overviews of it"
_OBSERVED_GPU_HOURS = sites.OBSERVED_GPUS * sites.OBSERVED_HOURS
_NETWORK_FAILURES = sum(
  sites.INTERRUPTIONS[cause] for cause in sites.NETWORK_CAUSES
)
_GB200 = sites.RACKS["gb200"]
_LIQUID_PUE, _LIQUID_SOURCE = sites.COOLING["liquid"]


def _rack_knob(
  key: str, low: float, high: float, unit: str, meaning: str, **bounds: float
) -> Quantity:
  """Returns a knob that depends on the rack, with the value of a GB200."""
  value = _GB200.flops["bf16"] if key == "peak" else getattr(_GB200, key)
  return Quantity(
    value, low, high, unit, meaning, *_GB200.sources[key], **bounds
  )


KNOBS: dict[str, Quantity] = {
  "budget": Quantity(
    100e9, 80e9, 120e9, "$", "budget", f"{_PAPER}; range: ours", "paper"),
  "accelerators": Quantity(
    1_677_600, 1, 2e6, "", "accelerators", f"72 in 23,300 racks, {_PAPER}",
    "derived", least=1, whole=True),
  "days_allowed": Quantity(
    365, 90, 540, "days", "days that training may take", least=1),
  "compute_share": Quantity(
    0.7, 0.6, 0.8, "", "share of the budget for racks",
    f"{_PAPER}; range: ours", "paper", most=1),
  "rack_price": _rack_knob("rack_price", 2.5e6, 4e6, "$", "price of a rack"),
  "per_rack": _rack_knob(
    "per_rack", 72, 72, "", "accelerators of a rack", least=1, whole=True),
  "per_domain": _rack_knob(
    "per_domain", 72, 72, "", "accelerators of a scale-up domain", least=1,
    whole=True),
  "rack_w": _rack_knob("rack_w", 115e3, 132e3, "W", "power of a rack as sold"),
  "overhead": _rack_knob(
    "overhead", 1.05, 1.35, "", "IT power over that of racks as sold", least=1),
  "pue": Quantity(
    _LIQUID_PUE, 1.1, 1.31, "", "total power over IT power", *_LIQUID_SOURCE,
    least=1),
  "site_w": Quantity(
    2.4e9, 1e9, 3e9, "W", "power of a site", most=sites.MAX_W),
  "energy_price": Quantity(50, 30, 90, "$/MWh", "price of energy"),
  "peak": _rack_knob(
    "peak", 2.5e15, 2.5e15, "FLOP/s", "peak of an accelerator"
  ),
  "utilisation": Quantity(
    0.4, 0.3, 0.5, "", "share of the peak that a step reaches", most=1),
  "availability": Quantity(
    1, 0.95, 1, "", "share of the accelerators that work", most=1),
  "memory_bytes": _rack_knob(
    "memory_bytes", 180e9, 192e9, "B", "memory of an accelerator"),
  "fill": Quantity(
    0.5, 0.3, 0.7, "", "share of the memory for state", most=1),
  "parameters": Quantity(
    50e12, 25e12, 100e12, "", "parameters", _PAPER, "paper", least=1),
  "active_share": Quantity(
    1, 0.05, 1, "", "share of the parameters that a token uses", most=1),
  "tokens_per_parameter": Quantity(
    20, 5, 40, "", "tokens per active parameter", "arXiv 2203.15556",
    "unverified"),
  "state_bytes": Quantity(16, 12, 18, "B", "training state of a parameter"),
  "batch_tokens": Quantity(60e6, 16e6, 120e6, "", "tokens of a step", least=1),
  "microbatch_tokens": Quantity(
    8192, 4096, 16384, "", "tokens of a microbatch", least=1, whole=True),
  "layers": Quantity(
    120, 100, 240, "", "layers of the model", least=1, whole=True),
  "chunks": Quantity(1, 1, 4, "", "chunks of a stage", least=1, whole=True),
  "step_share": Quantity(
    1, 0.2, 1, "", "share of a step in which a message may travel", most=1),
  "scale_up_bits": _rack_knob(
    "scale_up_bits", 7.2e12, 7.2e12, "bit/s",
    "rate of an accelerator inside its domain, each way"),
  "scale_out_bits": _rack_knob(
    "scale_out_bits", 400e9, 800e9, "bit/s",
    "rate of an accelerator to other domains, each way"),
  "radix": Quantity(
    128, 64, 512, "", "ports of a switch", least=4, whole=True),
  "gradient_bits": Quantity(
    16, 4, 32, "bit", "bits of a parameter between sites"),
  "sync_every": Quantity(
    1, 1, 500, "", "steps between exchanges of sites", least=1, whole=True),
  "distance_km": Quantity(
    4000, 100, 5000, "km", "distance between sites", "coast to coast"),
  "detour": Quantity(
    1.5, 1, 2, "", "length of the fibre over the distance",
    "1.5: 60 ms from coast to coast, recalled", "unverified", least=1),
  "mtbf_h": Quantity(
    _OBSERVED_GPU_HOURS / sum(sites.INTERRUPTIONS.values()), 25_000, 100_000,
    "h", "hours between failures, per accelerator with its share of a machine",
    f"{sites.INTERRUPTIONS_SOURCE}; range: ours", "reported"),
  "network_mtbf_h": Quantity(
    _OBSERVED_GPU_HOURS / _NETWORK_FAILURES, 250_000, 1e6, "h",
    "hours between failures of one accelerator's links",
    f"{sites.INTERRUPTIONS_SOURCE}; range: ours", "reported"),
  "save_rate": Quantity(
    5e9, 6e6, 50e9, "B/s", "rate at which an accelerator copies its state",
    "a tenth of its link, to a neighbour's memory; 6e6: storage of 10 TB/s"),
  "restart_s": Quantity(60, 10, 600, "s", "time to resume after a failure"),
  "repair_h": Quantity(24, 4, 72, "h", "time to repair a failed accelerator"),
}

# Knobs that are decisions; all others are given by technology or environment.
DECISIONS = (
  "budget", "accelerators", "days_allowed", "compute_share", "per_rack",
  "per_domain", "site_w", "fill", "parameters", "active_share",
  "tokens_per_parameter",
  "batch_tokens", "microbatch_tokens", "layers", "chunks", "step_share",
  "radix", "gradient_bits", "sync_every", "distance_km", "save_rate",
)


def scaled_range(key: str, value: float) -> tuple[float, float]:
  """Returns the range of a knob whose value was changed.

  It has the same width relative to the value as the range in ``KNOBS``.
  """
  knob = KNOBS[key]
  low, high = (end * value / knob.value for end in (knob.low, knob.high))
  return max(low, knob.least), min(high, knob.most)


def of_rack(kind: str, precision: str) -> dict[str, float]:
  """Returns the knobs that a rack of ``sites.RACKS`` sets."""
  rack = sites.RACKS[kind]
  return {
    key: rack.flops[precision] if key == "peak" else getattr(rack, key)
    for key in rack.sources
  }


def of_cooling(kind: str) -> Mapping[str, float]:
  """Returns the knob that a kind of ``sites.COOLING`` sets."""
  return {"pue": sites.COOLING[kind][0]}
