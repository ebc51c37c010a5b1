"""Parser of topology strings in configs, such as ``torus:4x4``.

Example:
  >>> from parallel.plans.topology import text
  >>> net = text.parse("ring:8,bandwidth=nvlink_4,failed=0-1")
  >>> net.name, len(net.links), net.hops(0, 1)
  ('ring 8 without 2 links', 14, 7)
"""

import inspect
import re

from parallel.base import checks
from parallel.plans.hardware import links as hardware
from parallel.plans.topology.builders import BUILDERS, GRID_TOPOLOGIES, build
from parallel.plans.topology.files import from_file
from parallel.plans.topology.graph import Topology


def parse(
  text: str,
  *,
  bandwidth: float | str | None = None,
  latency_s: float | str | None = None,
) -> Topology:
  """Builds the topology that a string like ``torus:4x4`` describes.

  Args:
    text: Name of a builder and its sizes, in the order of the builder's
      arguments, as in ``torus:4x4`` or ``leaf_spine:4x2x8``; or ``file:PATH``.
      Keyword arguments of the builder follow, as in
      ``dgx:2x8,bandwidth=nvlink_5``. ``failed=0-1+2>3`` removes both links
      between nodes 0 and 1, and the link from 2 to 3.
    bandwidth: Default bandwidth in bytes per second, or a name in
      `parallel.plans.hardware.links.KINDS`; None for the builder's default.
      Explicit values in the text or in a file take precedence.
    latency_s: Default latency in seconds, or the name of a link that has one.

  Raises:
    ValueError: The text does not have this form, or the builder rejects it.
  """
  head, options = checks.parse_options(text)
  name, _, argument = head.partition(":")
  checks.known("topology ", name, BUILDERS)
  # "failed" is not an option of builders: links are removed after the build.
  failed = options.pop("failed", None)
  # Options that the builder accepts: its keyword-only arguments.
  taken = [
    p.name for p in inspect.signature(BUILDERS[name]).parameters.values()
    if p.kind == p.KEYWORD_ONLY
  ]
  for option in options:
    checks.known(f"{name}'s option ", option, [*taken, "failed"])
  given = {"bandwidth": bandwidth, "latency_s": latency_s}
  # Options in the text override the defaults.
  options = {k: v for k, v in given.items() if v is not None} | options
  options = {
    option: parse_quantity(option, value) for option, value in options.items()
  }
  # A path may contain "x", so it is not split into sizes.
  if name == "file":
    net = from_file(argument, **options)
  else:
    try:
      sizes = tuple(int(part) for part in argument.split("x"))
    except ValueError as error:
      raise ValueError(
        f"{text!r} is not NAME:SIZExSIZE as in torus:4x4 or leaf_spine:4x2x8"
      ) from error
    net = build(
      name, *((sizes,) if name in GRID_TOPOLOGIES else sizes), **options
    )
  return net if failed is None else net.without(
    *_parse_failed_links(net, str(failed))
  )


def parse_quantity(key: str, value: float | str) -> float:
  """Returns a bandwidth or latency from a number or the name of a link.

  Args:
    key: Name of a builder's argument, such as "network_bandwidth". For
      "latency_s", a link's name stands for its latency, otherwise for its
      bandwidth.
    value: A number, its text, or a key of
      `parallel.plans.hardware.links.KINDS`.

  Returns:
    Bytes per second or seconds.

  Raises:
    ValueError: The value is neither a number nor a known link, or the link has
      no published latency.

  Example:
    >>> from parallel.plans.topology.text import parse_quantity
    >>> [parse_quantity("bandwidth", x) for x in ("1e9", "infiniband_ndr")]
    [1000000000.0, 50000000000.0]
  """
  if not isinstance(value, bool):  # float(True) would be 1.0
    try:
      return float(value)
    except (TypeError, ValueError):
      pass
    except OverflowError as error:
      raise ValueError(f"{key}={value} is too large") from error
  checks.known(
    f"{key}={value} is not a number, and the kind of link ", str(value),
    hardware.KINDS,
  )
  kind = hardware.KINDS[str(value)]
  if key != "latency_s":
    return kind.bandwidth
  if kind.latency_s is None:
    raise ValueError(
      f"{key}={value} has no default, since {kind.name} has no published "
      "latency; give a number"
    )
  return kind.latency_s


def _parse_failed_links(net: Topology, text: str) -> list[tuple[int, int]]:
  """Returns (source, destination) of the failed links that a text lists.

  ``0-1`` is both directions, ``0>1`` is one.
  """
  pairs = []
  for part in text.split("+"):
    match = re.fullmatch(r"\s*(\d{1,9})\s*([->])\s*(\d{1,9})\s*", part)
    if not match:
      raise ValueError(
        f"failed={text}: {part!r} is not NODE-NODE or NODE>NODE, as in 0-1"
      )
    pair = (int(match[1]), int(match[3]))
    pairs.append(pair)
    # One-way links have no reverse direction to remove.
    if match[2] == "-" and pair[::-1] in net.links_by_pair:
      pairs.append(pair[::-1])
  return pairs
