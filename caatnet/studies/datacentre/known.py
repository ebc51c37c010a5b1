"""Comparison of plans with figures of arXiv 2407.12819 and real machines."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from caatnet.studies.datacentre import closed_forms, knobs
from parallel.plans.hardware import sites

_PAPER = "arXiv 2407.12819"
# Relation of a result to the published figure. "fitted": an input was derived
# from that figure. "same source": an input is another figure of the same
# source, and the error is within `TOLERANCE`. "differs": such an input, but the
# error is larger. "same formula": the source uses the same formula.
# "predicted": none of these.
VERDICTS = ("fitted", "same source", "differs", "same formula", "predicted")
TOLERANCE = 0.05


class Comparison(NamedTuple):
  """Published figure and the plan's value.

  Attributes:
    what: Name of the quantity.
    published: Published value, or the ends of its range.
    ours: Value of the plan.
    inputs: Description of the plan's inputs.
    verdict: Relation between the two values, one of ``VERDICTS``.
    source: Source of the published value.
    unit: Unit of both values.
  """

  what: str
  published: tuple[float, ...]
  ours: float
  inputs: str
  verdict: str
  source: str
  unit: str = ""

  def plain(self) -> dict[str, Any]:
    """Returns the fields and the relative error, 0 within a published range.

    An error above `TOLERANCE` changes the verdict "same source" to "differs".
    """
    near = min(  # clamps `ours` to the range
      max(self.ours, min(self.published)), max(self.published)
    )
    error = self.ours / near - 1
    verdict = self.verdict
    if verdict == "same source" and abs(error) > TOLERANCE:
      verdict = "differs"
    return {**self._asdict(), "verdict": verdict, "error": error}


def compare_with_paper() -> list[dict[str, Any]]:
  """Compares figures of arXiv 2407.12819 with those of two plans.

  The first plan uses a rack's price and power derived from the paper's outputs.
  The second has the same number of racks, but uses the power of a rack as sold,
  10% more for network and storage, and a published PUE.
  """
  # Defaults include a price and power derived from the paper's outputs.
  backed = closed_forms.plan()
  pue, _ = sites.COOLING["fleet"]
  forward = closed_forms.plan({"overhead": 1.1, "pue": pue})
  price = "100e9 $, a share of 0.7, 3.0042e6 $ per rack (backed out)"
  own = (
    "23,300 racks (the paper's) of 120 kW as sold, 1.1 for network and storage "
    "(a choice)"
  )
  rows = [
    Comparison("racks", (23_300,), backed["racks"], price, "fitted", _PAPER),
    Comparison("accelerators", (1.67e6,), backed["accelerators"],
        f"{price}, 72 per rack", "fitted", _PAPER),
    Comparison("IT power", (3.6e9,), backed["it_w"],
        "154.5 kW per rack (backed out)", "fitted", _PAPER, "W"),
    Comparison("power with cooling", (4.16e9, 4.71e9), backed["facility_w"],
        "the same, PUE 1.2 (a choice)", "fitted", _PAPER, "W"),
    Comparison(
      "IT power", (3.6e9,), forward["it_w"], own, "predicted", _PAPER, "W"
    ),
    Comparison("power with cooling", (4.16e9, 4.71e9), forward["facility_w"],
        f"{own}, PUE {pue} (Google)", "predicted", _PAPER, "W"),
  ]
  return [row.plain() for row in rows]


def check_trainability(rack: str, values: Mapping[str, float]) -> list[
  dict[str, Any]
]:
  """Returns whether models of 50e12 and 100e12 parameters are trained in time.

  Args:
    rack: Key of ``sites.RACKS``.
    values: Knobs, including the number of accelerators. Each row of the result
      replaces parameters, their active fraction and the peak FLOP/s.
  """
  rows = []
  for precision, flops in sites.RACKS[rack].flops.items():
    for size in (50e12, 100e12):
      for active in (1.0, 0.1):
        found = closed_forms.plan({
          **values, "peak": flops, "parameters": size, "active_share": active,
        }, "accelerators")
        keys = (
          "tokens_per_parameter", "utilisation", "days", "days_allowed",
          "ratio_allowed", "layout_share",
        )
        rows.append({
          "parameters": size, "precision": precision, "active_share": active,
          "in_time": bool(found["days"] <= found["days_allowed"]),
        } | {key: float(found[key]) for key in keys})
  return rows


def compare_with_machines() -> list[dict[str, Any]]:
  """Compares published figures of existing machines with those of plans."""
  llama = closed_forms.plan({
    **knobs.of_rack("h100", "bf16"), "accelerators": 16_384,
    "parameters": 405e9, "tokens_per_parameter": 15.6e12 / 405e9,
    "utilisation": 400e12 / 989.4e12, "restart_s": 600, "save_rate": 1e9,
    "batch_tokens": 16e6, "layers": 126,
  }, "accelerators")
  hours = llama["days"] * 24 * 16_384
  herd = "The Llama 3 Herd of Models, arXiv 2407.21783"
  palm = closed_forms.plan({
    "per_rack": 64, "per_domain": 64, "peak": 275e12, "accelerators": 6144,
    "parameters": 540e9, "tokens_per_parameter": 780e9 / 540e9,
    "utilisation": 0.462, "memory_bytes": 32 * 2**30,
  }, "accelerators")
  chips = palm["days"] * 24 * 6144
  # A node of four MI250X counts as a rack. The published 8,730,112 cores are
  # 9,248 nodes of 944 cores.
  frontier = closed_forms.plan({
    "per_rack": 4, "per_domain": 4, "accelerators": 4 * 9248, "peak": 47.9e12,
    "utilisation": 1, "rack_w": 4 * 560 + 280, "overhead": 1,
    "memory_bytes": 128e9,
  }, "accelerators")
  of_palm = "PaLM, arXiv 2204.02311, reported"
  top500 = "TOP500 of June 2022, reported"
  rows = [
    Comparison(
      "Llama 3 405B, FLOPs", (3.8e25,), llama["flops"],
      "405e9 parameters, 15.6e12 tokens", "same formula", herd, "FLOP"
    ),
    Comparison(
      "Llama 3 405B, GPU-hours", (30.84e6,), hours,
      "400 TFLOP/s per GPU without any pause", "same source",
      "model card of Llama 3.1, recalled", "h"
    ),
    Comparison(
      "Llama 3 405B, GPU-hours", (30.84e6,), hours / llama["goodput"],
      "the same over the share of the next row", "same source",
      "model card of Llama 3.1, recalled", "h"
    ),
    Comparison(
      "Llama 3, effective training time, over",
      (0.9, 1.0),
      llama["goodput"],
      "a failure every 3.1 h, which is of the same 54 "
      "days; 10 minutes to restart, 1 GB/s per GPU to copy (choices)",
      "same source",
      f"{herd}, reported",
    ),
    Comparison(
      "PaLM 540B, FLOPs", (2.5272e24,), palm["flops"],
      "540e9 parameters, 780e9 tokens", "same formula", of_palm, "FLOP"
    ),
    Comparison(
      "PaLM 540B, chip-hours on TPU v4 pods",
      (6144 * 1200 + 3072 * 336,),
      chips,
      "46.2% of the peak as published; the published hours have "
      "pauses and repeated steps in them",
      "same source",
      of_palm,
      "h",
    ),
    Comparison(
      "Frontier, peak", (1.68565e18,), frontier["speed"],
      "36,992 MI250X of 47.9 TFLOP/s in float64 (datasheet)", "predicted",
      top500, "FLOP/s"
    ),
    Comparison(
      "Frontier, power under load", (21.1e6,), frontier["it_w"],
      "560 W per MI250X and 280 W per CPU (datasheets); no network, no memory",
      "predicted", top500, "W"
    ),
  ]
  return [row.plain() for row in rows]
