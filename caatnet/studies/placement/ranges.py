"""Speeds of a step by memory tiers' bandwidths, and bandwidths by speed.

Papers publish speeds without the bandwidths ("rates") of their memory tiers.
`scan_rates` returns speeds at both ends of each rate's range,
`find_needed_rates` the lowest rate of CXL cards for a speed,
`evaluate_single_tiers` times of update and copies with all tensors on one tier.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from parallel.plans import placement
from parallel.plans.hardware.tiers import Host, Quantity
from parallel.plans.placement import greedy
from parallel.plans.placement.costs import Placement, resource_seconds
from parallel.plans.placement.problem import Problem, Tensor, TensorAccess

# Bisection for a card's rate: its ends in bytes/s, and its number of steps.
_SLOWEST, _FASTEST, _HALVINGS = 1e9, 1e12, 30
# Name of the row in which all rates have their default values.
UNCHANGED = "nothing"


def scan_rates(
  made: Callable[..., Problem], host: Host, baseline: Host,
  policies: Sequence[str], contexts: Sequence[int],
) -> list[dict[str, Any]]:
  """Returns step speeds relative to ``baseline``, by context and changed rate.

  Args:
    made: Returns the placement problem of a training step, given its context
      (``seq_len``) and host (``on``).
    host: The host.
    baseline: Host with all its memory in DRAM.
    policies: Names of placement policies.
    contexts: Numbers of tokens of a sequence.

  Returns:
    Rows with "speeds" by policy, None if its placement does not fit, and
    "gain", the relative gain of "latency_first" over "interleave".
  """
  rows = []
  for tokens in contexts:
    for name, rates, one, other in _hosts_at_range_ends(host, baseline):
      speeds = {
        policy: relative_speed(
          made(seq_len=tokens, on=one), made(seq_len=tokens, on=other), policy
        ) for policy in policies
      }
      first, even = (speeds.get(p) for p in ("latency_first", "interleave"))
      gain = first / even - 1 if first and even else None
      rows.append({
        "seq_len": tokens, "changed": name, "rates": rates, "speeds": speeds,
        "gain": gain,
      })
  return rows


def find_needed_rates(
  made: Callable[..., Problem], host: Host, baseline: Host,
  targets: Sequence[float], contexts: Sequence[int],
) -> list[dict[str, Any]]:
  """Returns the lowest rate of a card at which "latency_first" reaches a speed.

  Args:
    made, host, baseline, contexts: See `scan_rates`.
    targets: Speeds relative to the baseline.

  Returns:
    Rows with "rate", bytes per second of reads and of writes; None if the speed
    is not reached, or the host has no cards.
  """
  return [
    {
      "seq_len": tokens,
      "target": target,
      "rate": _bisect_rate(
        lambda rate, target=target, tokens=tokens: (
          target
          <= (
            relative_speed(
              made(seq_len=tokens, on=_with_tier_rates(host, "cxl", rate)),
              made(seq_len=tokens, on=baseline), "latency_first"
            )
            or 0.0
          )
        )
      )
      if greedy.tiers(made(on=host), "cxl")
      else None,
    }
    for tokens in contexts
    for target in targets
  ]


def _bisect_rate(holds: Callable[[float], bool]) -> float | None:
  """Returns the lowest rate in bytes/s at which ``holds`` is true, or None."""
  low, high = _SLOWEST, _FASTEST
  if not holds(high):
    return None
  for _ in range(_HALVINGS):
    middle = (low * high) ** 0.5
    low, high = (low, middle) if holds(middle) else (middle, high)
  return high


def evaluate_single_tiers(
  made: Callable[..., Problem], host: Host
) -> list[dict[str, Any]]:
  """Returns times of the update and of copies with all tensors on one tier.

  Capacities are ignored. With several CXL cards, the last row of each rate
  stripes the tensors over all of them.

  Returns:
    Rows by changed rate and tier: "update_s", seconds of the CPU's update;
    "to_device" and "from_device", rates of copies in bytes per second; and
    "slower", update_s relative to the first row with the same rates.
  """
  rows = []
  for name, rates, changed, _ in _hosts_at_range_ends(host, host):
    step = made(on=changed)
    cards = {t: changed.tier(t).read.value for t in greedy.tiers(step, "cxl")}
    places = [{tier.name: 1.0} for tier in changed.tiers]
    places += [cards] if len(cards) > 1 else []
    first_s = None
    for place in places:
      shares = {t: rate / sum(place.values()) for t, rate in place.items()}
      seconds = _update_s(step, shares)
      first_s = first_s or seconds
      rows.append({
        "changed": name, "rates": rates, "tier": ", ".join(shares),
        "update_s": seconds, "slower": seconds / first_s,
        "to_device": _rate(
          step, shares, TensorAccess("forward", "device", read=1)
        ),
        "from_device": _rate(
          step, shares, TensorAccess("forward", "device", written=1)
        ),
      })
  return rows


def _update_s(step: Problem, shares: Mapping[str, float]) -> float:
  """Returns the seconds of the update with host tensors on some tiers.

  `shares` maps a tier to the fraction of each tensor that it holds.
  """
  room, host, ways = greedy.zero_offload_layout(step)
  for key, tensor in host:
    for tier, share in shares.items():
      room.put(key, tensor, tier, share * tensor.size_bytes)
  found = placement.cost(step, Placement(ways, room.tiers))
  return found.seconds["update"]


def _rate(
  step: Problem, shares: Mapping[str, float], use: TensorAccess
) -> float:
  """Returns bytes per second of the access `use` to data on some tiers.

  `shares` maps a tier to the fraction of the data that it holds.
  """
  busy: dict[str, float] = {}
  for tier, share in shares.items():
    seconds = resource_seconds(
      step, Tensor("byte", 1.0, (), (use,), "host"), tier
    )
    for (_, resource), one_s in seconds.items():
      busy[resource] = busy.get(resource, 0.0) + share * one_s
  return 1 / max(busy.values())


def relative_speed(
  step: Problem, baseline: Problem, policy: str
) -> float | None:
  """Returns a policy's speed relative to "dram_only" on ``baseline``.

  The result is None if one of the two steps does not fit.
  """
  seconds = [
    _seconds(*x) for x in ((baseline, "dram_only"), (step, policy))
  ]
  return None if None in seconds else seconds[0] / seconds[1]


def _seconds(step: Problem, policy: str) -> float | None:
  """Returns a step's seconds if placed by `policy`; None if it does not fit."""
  try:
    found = placement.cost(step, placement.place(step, policy))
  except ValueError:
    return None
  return found.step_s if found.fits else None


def _hosts_at_range_ends(
  host: Host, baseline: Host
) -> Iterator[tuple[str, str, Host, Host]]:
  """Yields both hosts unchanged, then with rates at an end of their range.

  Reads and writes of all tiers of a kind change together; capacities and links
  do not change. An item is the changed kind and end ("cxl low"), the rates
  ("28.0 GB/s"), the host and the baseline.
  """
  yield UNCHANGED, "", host, baseline
  for kind in dict.fromkeys(tier.kind for tier in host.tiers):
    of_kind = [t for t in host.tiers if t.kind == kind]
    for end in ("low", "high"):
      rates = [rate for t in of_kind for rate in (t.read, t.write)]
      if any(getattr(rate, end) != rate.value for rate in rates):
        values = [getattr(rate, end) / 1e9 for rate in rates]
        span = dict.fromkeys(f"{x:.1f}" for x in (min(values), max(values)))
        yield (
          f"{kind} {end}", f"{' to '.join(span)} GB/s",
          _with_tier_rates(host, kind, end),
          _with_tier_rates(baseline, kind, end),
        )


def _with_tier_rates(host: Host, kind: str, rate: str | float) -> Host:
  """Returns a host whose tiers of a kind have other rates.

  Args:
    host: The host.
    kind: Kind of tier.
    rate: An end of the range, "low" or "high", or bytes per second.
  """

  def value(found: Quantity) -> float:
    return getattr(found, rate) if isinstance(rate, str) else rate

  return host.model_copy(update={"tiers": tuple(
    tier.at(value(tier.read), value(tier.write)) if tier.kind == kind else tier
    for tier in host.tiers
  )})
