"""Study of federated rounds over links.

Rounds are predicted in `caatnet.studies.federated.rounds`, the figures of a 5G
testbed are in `figures`, scheduled transfers in `schedules`, and coded, late
and streamed updates in `beyond`.
"""

from collections.abc import Mapping
from typing import Any

from caatnet.studies.federated import beyond, figures, rounds, schedules
from parallel.plans.hardware import client_links as links

_KEPT = (
  "training_s", "validation_s", "test_s", "aggregation_s", "compute_spread",
  "fixed_s", "published_parameters", "published_clients", "cell", "consistent",
  "trial_rounds", "tolerance", "wifi", "deadline", "slow",
)


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Computes predictions and figures.

  Args:
    config: Config like configs/federated/links.py, as nested dicts.

  Returns:
    Plain data: "links" (their records) and "rounds"; of the testbed "ratios",
    "region", "stragglers" and "fitted_ratios"; "schedules" and "ordered"
    (scheduled transfers); "variants" (coded, late and streamed updates); and
    values of the config. "rounds" is empty if ``config.parameters`` is,
    "schedules" and "ordered" with ``apart``, "variants" with ``fragments``.

  Raises:
    ValueError: A link is unknown.
  """
  chosen = {n: links.link(n, "config.links=") for n in config["links"]}
  links.link(config["cell"], "config.cell=")
  trials = figures.stragglers(config)
  return {
    "study": "federated",
    "links": [
      {
        "name": name, "down": found.down, "up": found.up,
        "rtt_s": found.rtt_s, "loss": found.loss, "spread": found.spread,
        "shared": found.shared, "source": found.source,
      }
      for name, found in chosen.items()
    ],
    "rounds": rounds.table(config),
    "ratios": figures.ratios(config),
    "region": figures.region(config),
    "stragglers": trials,
    "fitted_ratios": figures.fitted_ratios(trials),
    "schedules": schedules.cases(config),
    "ordered": schedules.simulated(config) if config["apart"] else [],
    "variants": beyond.table(config) if config["fragments"] else [],
    "most_clients": max(config["clients"]),
    **{key: config[key] for key in _KEPT},
  }
