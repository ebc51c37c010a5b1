"""Report of a composition: losses, router accuracy, and stored differences."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from parallel.base.report import Report, Table, columns_of_keys

# Name of a model in the result -> its name in the table of losses.
_MODELS = {
  "base": "base", "same": "one model, parameters of router and expert",
  "union": "base trained further, tokens of all experts",
  "random": "experts, random routing", "routed": "experts, routed",
  "oracle": "experts, routed by the true kind",
}
_MIN_CLAIM_SEEDS = 3  # a claim about loss needs at least this many seeds


def report(result: Mapping[str, Any]) -> Report:
  """Returns the report of a sweep.

  Args:
    result: The result of `caatnet.composition.training.run`.
  """
  kinds, seeds = result["kinds"], result["seeds"]
  models = [name for name in _MODELS if name in seeds[0]["losses"]]
  parts: list[Table | str] = [
    _losses(kinds, seeds, models), _differences(kinds, seeds, models),
    _router(kinds, seeds),
  ]
  if seeds[0]["forms"]:
    parts.append(_forms(seeds[0]["forms"]))
  if len(seeds) < _MIN_CLAIM_SEEDS:
    parts.append(
      f"{len(seeds)} seeds: no claim about loss rests on fewer than "
      f"{_MIN_CLAIM_SEEDS}"
    )
  return Report("composition of experts", [*parts, *result["left_out"]])


def _mean(
  seeds: Sequence[Mapping[str, Any]], value: Callable[[Any], float]
) -> float:
  return float(np.mean([value(seed) for seed in seeds]))


def _losses(
  kinds: Sequence[str], seeds: Sequence[Mapping[str, Any]],
  models: Sequence[str],
) -> Table:
  """Returns the table of losses by model and kind of text."""
  rows = []
  for name in models:
    row = {
      kind: _mean(seeds, lambda s, k=kind: s["losses"][name][k])  # noqa: B023
      for kind in kinds
    }
    rows.append({
      "model": _MODELS[name], **row, "mean": float(np.mean([*row.values()])),
    })
  sizes = seeds[0]["parameters"]
  return Table(
    f"loss on held-out text in nats per byte, mean of {len(seeds)} seeds; "
    f"parameters: expert {sizes['base']:,}, router {sizes['router']:,}"
    + (f", one model {sizes['same']:,}" if "same" in sizes else ""),
    ["model", *columns_of_keys((*kinds, "mean"), ".3f")],
    rows,
  )


def _differences(
  kinds: Sequence[str], seeds: Sequence[Mapping[str, Any]],
  models: Sequence[str],
) -> Table:
  """Returns the table of routed experts' losses minus other models' losses."""
  rows = []
  for name in models:
    if name == "routed":
      continue
    each = [
      float(np.mean([
        seed["losses"]["routed"][kind] - seed["losses"][name][kind]
        for kind in kinds
      ]))
      for seed in seeds
    ]
    rows.append({
      "model": _MODELS[name], "mean": float(np.mean(each)),
      "least": min(each), "most": max(each),
    })
  return Table(
    "loss of the routed experts minus that of other models, mean over kinds, "
    "seed by seed",
    "model=compared with | mean:+.4f | {least:+.4f} to {most:+.4f}="
    "range of seeds",
    rows,
  )


def _router(
  kinds: Sequence[str], seeds: Sequence[Mapping[str, Any]]
) -> Table:
  """Returns the table of the router's accuracy by length of the prompt."""
  rows = []
  # JSON stores the lengths as strings; they are sorted as numbers.
  for length in sorted(seeds[0]["accuracy"], key=int):
    row = {
      kind: _mean(seeds, lambda s, k=kind: s["accuracy"][length][k])  # noqa: B023
      for kind in kinds
    }
    rows.append(
      {"length": str(length), **row, "mean": float(np.mean([*row.values()]))}
    )
  routed = {
    kind: _mean(seeds, lambda s, k=kind: s["routed_right"][k]) for kind in kinds
  }
  rows.append({
    "length": "prompts of the losses", **routed,
    "mean": float(np.mean([*routed.values()])),
  })
  return Table(
    "share of held-out prompts that the router assigns to their kind",
    ["length=bytes of the prompt", *columns_of_keys((*kinds, "mean"), ".0%")],
    rows,
  )


def _forms(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Returns the table of sizes and losses of experts in each stored form."""
  whole = rows[0]
  return Table(
    "experts stored as differences from the base, first seed: size of one in "
    "files and host memory, experts per 10^9 bytes in addition to the base, "
    "and loss of the true kind's expert after reconstruction",
    "form | size_bytes/1e3:,.0f=kB | per_gb:,.0f=experts per GB | loss:.4f | "
    "change:+.4f",
    [
      {
        **row,
        "change": row["loss"] - whole["loss"],
        "per_gb": (1e9 - (0 if row is whole else whole["size_bytes"]))
        / row["size_bytes"],
      }
      for row in rows
    ],
  )
