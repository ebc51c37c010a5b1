"""Links between clients and the server of a federated run, with sources.

Any other link is described by a JSON file with the fields of `Link`; its path
takes the place of a name.

Example:
  >>> from parallel.plans.hardware import client_links
  >>> wifi, cell = client_links.assign_links(("wifi", "5g-40mhz"), 2)
  >>> cell.up == 81e6 / 8, cell.shared
  (True, True)
  >>> client_links.assign_links(("wify",), 2)
  Traceback (most recent call last):
  ValueError: links='wify' must be one of ...; did you mean wifi?
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
import statistics
from types import MappingProxyType

from parallel.base import checks, schema

_MIN_RATE_FACTOR = 0.1  # smallest factor of `normal_rate_factors`


@dataclasses.dataclass(frozen=True)
class Link:
  """Link between a client and the server.

  Attributes:
    name: Name of the record.
    down: Bytes per second from the server to the client.
    up: Bytes per second from the client to the server.
    rtt_s: Round trip in seconds, without queues.
    jitter_s: Standard deviation of the delay of one direction, in seconds.
    loss: Probability that a packet is lost, in each direction.
    spread: Relative standard deviation of rates between clients; 0 if the link
      is shared.
    shared: Whether all clients with this name share both rates, as in a radio
      cell.
    source: Source of the numbers; "assumed" and "unverified" mark numbers
      without a source.

  Raises:
    ValueError: A value is out of range.
  """

  name: str
  down: float
  up: float
  rtt_s: float
  jitter_s: float
  loss: float
  spread: float
  shared: bool
  source: str

  def __post_init__(self) -> None:
    for key in ("down", "up"):
      checks.positive(key, getattr(self, key))
    for key in ("rtt_s", "jitter_s", "loss", "spread"):
      checks.not_negative(key, getattr(self, key))
    if self.loss >= 1:
      raise ValueError(f"loss={self.loss:g} must be below 1")
    if self.shared and self.spread:
      raise ValueError(
        f"spread={self.spread:g} must be 0 for a shared link, which has one "
        "rate"
      )


class _File(schema.Schema):
  """JSON file that describes a link, with the fields of `Link`."""

  name: str
  down: schema.AnyRate
  up: schema.AnyRate
  rtt_s: schema.AnySeconds
  jitter_s: schema.AnySeconds
  loss: float
  spread: float
  shared: bool
  source: str


def _record(
  name: str, down_mbit: float, up_mbit: float, rtt_ms: float, jitter_ms: float,
  source: str, spread: float = 0.0, shared: bool = False,
) -> Link:
  """Returns a link without packet loss from rates in Mbit/s, times in ms."""
  return Link(
    name, down_mbit * 1e6 / 8, up_mbit * 1e6 / 8, rtt_ms / 1e3, jitter_ms / 1e3,
    0.0, spread, shared, source,
  )


_OAI_SOURCE = (
  "throughput in the repository of OpenAirInterface, for its 5G standalone "
  "base station and one layer, the uplink in an uplink-heavy slot pattern; "
  "round trip (10 to 20 ms) unverified, jitter assumed"
)
LINKS: Mapping[str, Link] = MappingProxyType({link.name: link for link in (
  _record("ethernet", 941, 941, 0.5, 0.0,
          "iperf3 on Gigabit Ethernet of a Raspberry Pi 4; unverified"),
  _record("wifi", 100, 100, 3.5, 1.0,
          "802.11ac of a Raspberry Pi: rate and round trip (2 to 5 ms) "
          "unverified, jitter and spread assumed, access point not limiting: "
          "assumed", spread=0.1),
  _record("5g-20mhz", 72, 39, 15, 3, _OAI_SOURCE, shared=True),
  _record("5g-40mhz", 152, 81, 15, 3, _OAI_SOURCE, shared=True),
  _record("5g-100mhz", 400, 101, 15, 3, _OAI_SOURCE, shared=True),
  _record("5g-b210", 77.5, 46, 15, 3,
          "OpenAirInterface's terminal on a USRP B210 at 40 MHz (69 to 86 "
          "Mbit/s down); round trip and jitter assumed", shared=True),
  _record("5g-fr2", 500, 86, 4.5, 1,
          "OpenAirInterface in the millimetre bands (FR2); jitter assumed",
          shared=True),
  _record("5g-public", 203, 21, 30, 10,
          "Ookla's medians of public 5G: down in Q3 2023, up in Q3 2021, each "
          "of one user in a cell with other users; round trip, jitter and "
          "spread assumed", spread=0.2),
  _record("5g-bad", 15.6, 0.56, 40, 10,
          "report of a software radio, srsRAN#49; round trip and jitter "
          "assumed", shared=True),
)})


def link(name: str, what: str = "links=") -> Link:
  """Returns a link of `LINKS` by name, or one that a JSON file describes.

  Args:
    name: Key of `LINKS`, or a path that ends in .json.
    what: Prefix of the name in error messages.

  Raises:
    ValueError: The name is unknown, or the file does not describe a link.
    FileNotFoundError: The file does not exist.
  """
  if name.endswith(".json"):
    return schema.read(
      _File, pathlib.Path(name), then=lambda found: Link(**found.model_dump())
    )
  checks.known(what, name, LINKS)
  return LINKS[name]


def assign_links(names: Sequence[str], num: int) -> tuple[Link, ...]:
  """Returns the link of each client.

  If a link has a `spread`, the rates of the clients that use it are quantiles
  of a normal distribution, in ascending order.

  Args:
    names: One name or path for all clients, or one per client.
    num: Number of clients.

  Raises:
    ValueError: A name is unknown, a file is invalid, or the number of names is
      neither 1 nor ``num``.
    FileNotFoundError: A file does not exist.
  """
  if len(names) not in (1, num):
    raise ValueError(
      f"links={tuple(names)} must have one name, or one for each of {num} "
      "clients"
    )
  found = [link(name) for name in names]
  if len(found) == 1:
    found *= num
  counts = collections.Counter(each.name for each in found)
  factors = {
    each.name: iter(normal_rate_factors(counts[each.name], each.spread))
    for each in found
  }
  spread = []
  for each in found:
    factor = next(factors[each.name])
    spread.append(dataclasses.replace(
      each, down=factor * each.down, up=factor * each.up
    ))
  return tuple(spread)


def normal_rate_factors(num: int, spread: float) -> list[float]:
  """Returns quantiles of a normal distribution with mean 1, ascending.

  Quantiles below 0.1 are replaced by 0.1.

  Args:
    num: Number of quantiles.
    spread: Standard deviation.

  Example:
    >>> [round(factor, 2) for factor in normal_rate_factors(3, 0.1)]
    [0.9, 1.0, 1.1]
  """
  quantile = statistics.NormalDist().inv_cdf
  return [
    max(
      _MIN_RATE_FACTOR, 1 + spread * quantile((k + 0.5) / num)
    ) for k in range(num)
  ]
