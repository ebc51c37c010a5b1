"""Figures of a 5G testbed (Hayek et al., arXiv 2504.04678), and predictions.

The paper gives three ratios and, in a later version, two fractions of trials,
but neither times nor rates. `predict_uplink_ratios` predicts the ratios with
the links of `parallel.plans.hardware.client_links`. `find_feasible_region`
models the time of an uplink as o + size / rate with a fixed time o per message.
For a range of WiFi rates it returns the o and the 5G rate that give the
published ratios, which are thus inputs of a fit.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from caatnet.studies.federated import rounds
from parallel.plans.hardware import client_links as records
from parallel.plans.hardware.client_links import Link

# Published ratios of the uplink time on 5G to that on Ethernet and on WiFi.
UPLINK_RATIO_ETHERNET, UPLINK_RATIO_WIFI = 33.3, 17.8
UPLINK_SHARE = 0.23  # uplink time / time of a round with all clients
CONSISTENT_TRIAL_SHARE = 0.7  # share of trials with one consistent straggler


def predict_uplink_ratios(config: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns uplink times on each 5G link, relative to Ethernet and WiFi.

  Args:
    config: Config like configs/federated/links.py, as nested dicts; the model
      is ``config.published_parameters``.
  """
  size = 4 * config["published_parameters"]
  clients, cells = config["published_clients"], _cellular(config)
  rows = {
    name: rounds.predict_round(config, name, clients, size)
    for name in ("ethernet", "wifi", *cells)
  }
  return [
    {
      "link": name, "clients": clients, "t_u": rows[name]["t_u"],
      "over_ethernet": rows[name]["t_u"] / rows["ethernet"]["t_u"],
      "over_wifi": rows[name]["t_u"] / rows["wifi"]["t_u"],
      "share_up": rows[name]["share_up"],
      "straggler_s": rows[name]["straggler_s"],
      "ethernet_straggler_s": rows["ethernet"]["straggler_s"],
      # Bytes per second of a client while all clients of its cell send.
      "rate": link.up / (clients if link.shared else 1),
      # Compute time at which the uplink has its published share of a round.
      "compute_s": (
        rows[name]["t_u"] / UPLINK_SHARE - rows[name]["t_u"]
        - rows[name]["t_d"] - config["aggregation_s"]
      ),
    }
    for name, link in cells.items()
  ]


def find_feasible_region(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns fixed times and 5G rates that give the published uplink ratios.

  Returns:
    "points": for each WiFi rate, the only fixed time and 5G rate that give both
    ratios. "rates": 5G rates in bytes/s; "low" and "high": for each of them the
    range of fixed times, in seconds, at which both ratios are within
    ``config.tolerance`` of the published ones for some WiFi rate in the range
    of ``config.wifi``; None if there is no such time.
  """
  size = 4 * config["published_parameters"]
  ethernet = records.LINKS["ethernet"].up
  slack = 1 + config["tolerance"]
  # Rates per client of 0.1 to 100 Mbit/s, in bytes per second.
  rates = np.geomspace(0.1, 100, config["region_points"]) * 1e6 / 8
  wifi = [rate * 1e6 / 8 for rate in config["wifi"]]
  low, high = [], []
  for rate in rates:
    # `solve_fixed_s` decreases with the ratio and increases with the WiFi rate.
    least = max(
      0.0, solve_fixed_s(size, rate, ethernet, UPLINK_RATIO_ETHERNET * slack),
      solve_fixed_s(size, rate, min(wifi), UPLINK_RATIO_WIFI * slack),
    )
    most = min(
      solve_fixed_s(size, rate, ethernet, UPLINK_RATIO_ETHERNET / slack),
      solve_fixed_s(size, rate, max(wifi), UPLINK_RATIO_WIFI / slack),
    )
    low.append(least if least <= most else None)
    high.append(most if least <= most else None)
  return {
    "points": [
      _solve_both_ratios(config, size, ethernet, rate) for rate in wifi
    ],
    "rates": rates.tolist(), "low": low, "high": high,
  }


def solve_fixed_s(size: int, rate: float, other: float, ratio: float) -> float:
  """Solves o + size / rate = ratio (o + size / other) for o, in seconds.

  o is the fixed time of a message of `size` bytes; `rate` and `other` are the
  rates of two links in bytes/s, `ratio` that of their times.
  """
  return (size / rate - ratio * size / other) / (ratio - 1)


def _solve_both_ratios(
  config: Mapping[str, Any], size: int, ethernet: float, wifi: float
) -> dict[str, Any]:
  """Returns the fixed time and 5G rate that give both published ratios.

  `size` is in bytes, the rates `ethernet` and `wifi` in bytes/s.
  """
  # Solves o + size / rate = a (o + size / ethernet) = b (o + size / wifi) for
  # `fixed`, that is o. It is negative if no fixed time gives both ratios.
  a, b = UPLINK_RATIO_ETHERNET, UPLINK_RATIO_WIFI
  fixed = size * (b / wifi - a / ethernet) / (a - b)
  uplink_s = a * (fixed + size / ethernet)
  round_s = uplink_s / UPLINK_SHARE
  return {
    "wifi": wifi, "fixed_s": fixed, "uplink_s": uplink_s,
    "rate": size / (uplink_s - fixed), "round_s": round_s,
    "cell": config["published_clients"] * size / (uplink_s - fixed),
  }


def simulate_stragglers(config: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns the fraction of random trials with one consistent straggler.

  A client's time in a round is a sum of two normal deviates: one is drawn once
  per trial, the other in each round. The fraction depends on the ratio of their
  standard deviations and on the numbers of clients and rounds. A straggler is
  consistent if it is slowest in a fraction ``config.consistent`` of rounds.
  """
  draw = np.random.RandomState(config["seed"])
  shape = (config["trials"], config["trial_rounds"])
  found = []
  for clients in config["clients"]:
    lasting = draw.standard_normal((shape[0], 1, clients))
    each = draw.standard_normal((*shape, clients))
    for ratio in config["lasting"]:
      slowest = np.argmax(ratio * lasting + each, axis=-1)
      most = np.max(
        [(slowest == k).mean(axis=1) for k in range(clients)], axis=0
      )
      found.append({
        "clients": clients, "ratio": ratio,
        "consistent": float(np.mean(most >= config["consistent"])),
      })
  return found


def fitted_ratios(
  rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
  """Returns, by number of clients, the ratio that fits the published trials.

  Args:
    rows: Result of `simulate_stragglers`, with ascending ratios. They are
      interpolated to the published fraction `CONSISTENT_TRIAL_SHARE`.
  """
  found = []
  for clients in dict.fromkeys(row["clients"] for row in rows):
    mine = [row for row in rows if row["clients"] == clients]
    shares = [row["consistent"] for row in mine]
    within = shares[0] <= CONSISTENT_TRIAL_SHARE <= shares[-1]
    found.append({
      "clients": clients,
      "ratio": float(np.interp(
        CONSISTENT_TRIAL_SHARE, shares, [row["ratio"] for row in mine]
      )) if within else None,
    })
  return found


def _cellular(config: Mapping[str, Any]) -> dict[str, Link]:
  """Returns the config's 5G links, whose ``Link.name`` begins with "5g"."""
  found = {name: records.link(name) for name in config["links"]}
  return {k: link for k, link in found.items() if link.name.startswith("5g")}
