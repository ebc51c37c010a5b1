"""Reads topologies from texts, as configs have them: ``torus:4x4``."""

import inspect
import re

from parallel import checks
from parallel.hardware import links as hardware
from parallel.topology.builders import BUILDERS, SHAPED, build
from parallel.topology.files import from_file
from parallel.topology.graph import Topology


def parse(
  text: str,
  *,
  bandwidth: float | str | None = None,
  latency_s: float | str | None = None,
) -> Topology:
  """Builds the topology that a text like ``torus:4x4`` names.

  Args:
    text: A builder and its sizes, in the order of the builder's arguments, as
      in ``torus:4x4`` or ``leaf_spine:4x2x8``; or ``file:PATH``. Then come
      keyword arguments of the builder, as in ``dgx:2x8,bandwidth=nvlink_5``.
      ``failed=0-1+2>3`` takes the links between 0 and 1 away, and that from 2
      to 3.
    bandwidth: The bandwidth, if the text has none; None for the builder's own.
      As in the text, bytes per second or a name in
      `parallel.hardware.links.KINDS`. Links of a file keep theirs.
    latency_s: The latency, likewise. Not all kinds of links have one.

  Raises:
    ValueError: The text is not of this form, or the builder refuses it.
  """
  head, options = checks.options(text)
  name, _, argument = head.partition(":")
  checks.known("topology ", name, BUILDERS)
  failed = options.pop("failed", None)
  taken = [
    p.name for p in inspect.signature(BUILDERS[name]).parameters.values()
    if p.kind == p.KEYWORD_ONLY
  ]
  for option in options:
    checks.known(f"{name}'s option ", option, [*taken, "failed"])
  given = {"bandwidth": bandwidth, "latency_s": latency_s}
  options = {k: v for k, v in given.items() if v is not None} | options
  options = {
    option: quantity(option, value) for option, value in options.items()
  }
  if name == "file":
    net = from_file(argument, **options)
  else:
    try:
      sizes = tuple(int(part) for part in argument.split("x"))
    except ValueError as error:
      raise ValueError(
        f"{text!r} is not NAME:SIZExSIZE as in torus:4x4 or leaf_spine:4x2x8"
      ) from error
    net = build(name, *((sizes,) if name in SHAPED else sizes), **options)
  return net if failed is None else net.without(*_pairs(net, str(failed)))


def quantity(key: str, value: float | str) -> float:
  """Reads a number, or that of a kind of link.

  Args:
    key: The name of an argument of a builder, such as "network_bandwidth". In
      "latency_s" a kind stands for its latency, elsewhere for its bandwidth.
    value: A number, a text with one, or a key of
      `parallel.hardware.links.KINDS`.

  Raises:
    ValueError: It is neither, or the kind has no published latency.
  """
  if not isinstance(value, bool):
    try:
      return float(value)
    except (TypeError, ValueError):
      pass
    except OverflowError as error:
      raise ValueError(f"{key}={value} is too large") from error
  checks.known(
    f"{key}={value} is no number, and the kind of link ", str(value),
    hardware.KINDS,
  )
  kind = hardware.KINDS[str(value)]
  if key != "latency_s":
    return kind.bandwidth
  if kind.latency_s is None:
    raise ValueError(f"{key}={value}: {kind.name} has no published latency")
  return kind.latency_s


def _pairs(net: Topology, text: str) -> list[tuple[int, int]]:
  """Reads failed links: ``0-1`` is both directions, ``0>1`` is one."""
  pairs = []
  for part in text.split("+"):
    match = re.fullmatch(r"\s*(\d{1,9})\s*([->])\s*(\d{1,9})\s*", part)
    if not match:
      raise ValueError(
        f"failed={text}: {part!r} is not NODE-NODE or NODE>NODE, as in 0-1"
      )
    pair = (int(match[1]), int(match[3]))
    pairs.append(pair)
    if match[2] == "-" and pair[::-1] in net.links_by_pair:
      pairs.append(pair[::-1])
  return pairs
