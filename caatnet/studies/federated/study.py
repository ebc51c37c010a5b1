"""Study of federated rounds over links.

Rounds are predicted in `caatnet.studies.federated.rounds`, the figures of a 5G
testbed are in `figures`, scheduled transfers in `schedules`, and coded, late
and streamed updates in `beyond`.
"""

from collections.abc import Mapping
from typing import Any

from caatnet.studies.federated import beyond, figures, rounds, schedules
from parallel.plans.hardware import client_links as links

_COPIED_KEYS = (
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
    values of the config. An empty ``config.parameters`` leaves "rounds" empty,
    ``apart`` "schedules" and "ordered", and ``fragments`` "variants".

  Raises:
    ValueError: A link is unknown.
  """
  chosen = {n: links.link(n, "config.links=") for n in config["links"]}
  links.link(config["cell"], "config.cell=")
  trials = figures.simulate_stragglers(config)
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
    "rounds": rounds.predict_rounds(config),
    "ratios": figures.predict_uplink_ratios(config),
    "region": figures.find_feasible_region(config),
    "stragglers": trials,
    "fitted_ratios": figures.fitted_ratios(trials),
    "schedules": schedules.compare_schedules(config),
    "ordered": schedules.simulate_rounds(config) if config["apart"] else [],
    "variants": beyond.compare_variants(config) if config["fragments"] else [],
    "most_clients": max(config["clients"]),
    **{key: config[key] for key in _COPIED_KEYS},
  }
