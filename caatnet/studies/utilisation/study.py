"""Study of compute utilisation over slow links.

It computes table 4 of Streaming DiLoCo (arXiv 2501.18512) for comparison with
the paper, and the same table for larger models and for a model in the config.
For the latter it recommends a setting on a given link. Utilisations are
predicted by `caatnet.studies.utilisation.predictor`.
"""

from collections.abc import Iterator, Mapping
import dataclasses
from typing import Any

import numpy as np

from caatnet.studies.utilisation import predictor, published, recommend
from caatnet.studies.utilisation.predictor import Model
from parallel.base.checks import known
from parallel.base.naming import prefix_error_keys
from parallel.plans.hardware import links as hardware_links


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Computes the study.

  Args:
    config: Config like configs/diloco/utilisation.py, as nested dicts.

  Returns:
    Plain data: "table" (table 4), "models" (bandwidths that other models
    need), "curves" (utilisation at all bandwidths of the grid) and
    "recommendation". Bandwidths are in Gbit/s.

  Raises:
    ValueError: The link is unknown, or a number is out of its range.
  """
  own = _own_model(config["recommend"])  # raises if the config is invalid
  recommended = _recommend(config["recommend"], own)
  fitted = config["fitted_factor"]
  factor = published.FITTED_VOLUME_FACTOR if fitted else 1.0
  cells = published.compare_with_table_4(factor)
  distances = [abs(c.notches) for c in cells if c.notches is not None]  # points
  grid = predictor.bandwidth_grid() / 1e9
  own_factor = config["recommend"]["volume_factor"]
  # The fitted factor applies only to the models of the fitted table.
  others = [(m, 1.0) for m in published.LARGE_MODELS] + [(own, own_factor)]
  curves = {
    model.name: _curves(model, f)
    for model, f in [*((m, factor) for m in published.PAPER_MODELS), *others]
  }
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
    "models": [
      {
        **dataclasses.asdict(model),
        "volume_factor": f,
        "cells": list(_lowest_bandwidths(curves[model.name], grid)),
      }
      for model, f in others
    ],
    "models_source": published.LARGE_SOURCE,
    "curves": {
      "gbit_s": grid.tolist(),
      "utilisation": {
        name: {method: x.tolist() for method, x in lines.items()}
        for name, lines in curves.items()
      },
    },
    "recommendation": recommended,
  }


def _own_model(config: Mapping[str, Any]) -> Model:
  """Builds the model in ``config.recommend``."""
  keys = ("parameters", "num_layers", "step_seconds")
  with prefix_error_keys("config.recommend", keys):
    return Model(
      *(config[key] for key in keys), f"yours, {config['parameters'] / 1e9:g}B"
    )


def _curves(model: Model, volume_factor: float) -> dict[str, np.ndarray]:
  """Returns each method's utilisation at all bandwidths of the grid."""
  grid = predictor.bandwidth_grid()
  with prefix_error_keys("config.recommend", ("volume_factor",)):
    return {
      name: predictor.simulate(
        model, method, grid, volume_factor=volume_factor
      ).utilisation
      for name, method in predictor.paper_methods(model.num_layers).items()
    }


def _lowest_bandwidths(
  curves: Mapping[str, np.ndarray], gbit_s: np.ndarray
) -> Iterator[dict[str, Any]]:
  """Yields the lowest of `gbit_s` by method and target utilisation, or None."""
  for name, values in curves.items():
    for target in published.TARGETS:
      reached = gbit_s[values >= target]
      yield {
        "method": name,
        "target": target,
        "gbit_s": float(reached[0]) if len(reached) else None,
      }


def _recommend(config: Mapping[str, Any], model: Model) -> dict[str, Any]:
  """Returns the recommended setting, and table 4's methods on the same link."""
  known("config.recommend.link=", config["link"], hardware_links.KINDS)
  link = hardware_links.KINDS[config["link"]]
  bandwidth = 8 * link.bandwidth  # from bytes to bits per second
  factors = {
    "volume_factor": config["volume_factor"],
    "latency_s": link.latency_s or 0.0,  # 0 if not published
  }
  choices = {k: config[k] for k in ("sync_every", "overlap_steps", "bits")}
  target = config["target"]
  try:
    methods = predictor.paper_methods(model.num_layers)
  except ValueError as error:
    raise ValueError(
      f"config.recommend.num_layers={model.num_layers} is too many for the "
      f"methods to compare: {error}"
    ) from error
  with prefix_error_keys("config.recommend", config):
    found = recommend.recommend(
      model, bandwidth, target, **choices, **factors
    )
  rows = {}
  for name, method in methods.items():
    timeline = predictor.simulate(model, method, bandwidth, **factors)
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
      str(bits): recommend.fewest_steps(
        model, bandwidth, target, bits, factors["volume_factor"]
      )
      for bits in choices["bits"]
    },
  }


def _setting(method: predictor.SyncMethod, value: float) -> dict[str, Any]:
  return {**dataclasses.asdict(method), "utilisation": float(value)}
