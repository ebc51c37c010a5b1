"""The study of compute utilisation over slow links.

It computes table 4 of Streaming DiLoCo (arXiv 2501.18512) beside the paper's,
and recommends a setting for a model on a link. Utilisations are predicted by
`parallel.network.utilisation`.
"""

from collections.abc import Mapping
import dataclasses
import difflib
from typing import Any

from caatnet.studies.utilisation import published
from parallel.hardware import links as hardware_links
from parallel.network import utilisation
from parallel.planner import links

LINKS = {
  name.lower(): link
  for name, link in vars(hardware_links).items()
  if isinstance(link, hardware_links.LinkKind)
}


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Computes the study.

  Args:
    config: A config like configs/diloco/utilisation.py, as nested dicts.

  Returns:
    Plain data: "table", "curves" (utilisation at all bandwidths of the grid)
    and "recommendation". Bandwidths are in Gbit/s.

  Raises:
    ValueError: The link is unknown, or a number is out of its range.
  """
  recommended = _recommend(config["recommend"])  # may refuse the config
  fitted = config["fitted_factor"]
  factor = published.FITTED_VOLUME_FACTOR if fitted else 1.0
  cells = published.compare(factor)
  distances = [abs(c.notches) for c in cells if c.notches is not None]
  grid = utilisation.bandwidth_grid()
  return {
    "study": "utilisation",
    "source": published.PUBLISHED_SOURCE,
    "volume_factor": factor,
    "fitted_on_this_table": fitted,
    "table": {
      "cells": [dataclasses.asdict(cell) for cell in cells],
      "num_cells": len(cells),
      "exact": distances.count(0),
      "within_one_notch": sum(d <= 1 for d in distances),
    },
    "curves": {
      "gbit_s": (grid / 1e9).tolist(),
      "utilisation": {
        model.name: {
          name: utilisation.simulate(
            model, method, grid, volume_factor=factor
          ).utilisation.tolist()
          for name, method in utilisation.paper_methods(
            model.num_layers
          ).items()
        }
        for model in published.PAPER_MODELS
      },
    },
    "recommendation": recommended,
  }


def find_link(name: str) -> hardware_links.LinkKind:
  """Returns a link of `parallel.hardware.links` by its name in lower case."""
  if name not in LINKS:
    near = difflib.get_close_matches(name, LINKS, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(
      f"config.recommend.link={name!r} must be one of {', '.join(LINKS)}{hint}"
    )
  return LINKS[name]


def _recommend(config: Mapping[str, Any]) -> dict[str, Any]:
  """Recommends a setting, and prices the paper's methods on the same link."""
  link = find_link(config["link"])
  bandwidth = 8 * link.bandwidth  # from bytes to bits per second
  factors = {
    "volume_factor": config["volume_factor"],
    "latency_s": link.latency_s or 0.0,
  }
  choices = {k: config[k] for k in ("sync_every", "overlap_steps", "bits")}
  target = config["target"]
  try:
    model = utilisation.Model(
      config["parameters"], config["num_layers"], config["step_seconds"]
    )
    found = links.recommend(
      model, bandwidth, target, **choices, **factors
    )
  except ValueError as error:  # its names are the config's keys
    raise ValueError(f"config.recommend.{error}") from error
  rows = {}
  for name, method in utilisation.paper_methods(model.num_layers).items():
    timeline = utilisation.simulate(model, method, bandwidth, **factors)
    rows[name] = _setting(method, timeline.utilisation[0])
  return {
    "model": {
      k: config[k] for k in ("parameters", "num_layers", "step_seconds")
    },
    "link": {
      "name": link.name,
      "gbit_s": bandwidth / 1e9,
      "latency_s": link.latency_s,
      "source": link.source,
    },
    "volume_factor": factors["volume_factor"],
    "target": target,
    "candidates": {key: list(values) for key, values in choices.items()},
    "paper_methods": rows,
    "setting": found and _setting(found.method, found.utilisation),
    "fewest_steps": {
      str(bits): links.fewest_steps(
        model, bandwidth, target, bits, factors["volume_factor"]
      )
      for bits in choices["bits"]
    },
  }


def _setting(method: utilisation.Method, value: float) -> dict[str, Any]:
  return {**dataclasses.asdict(method), "utilisation": float(value)}
