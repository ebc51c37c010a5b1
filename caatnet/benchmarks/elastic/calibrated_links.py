"""Sums between processes over shaped links, predicted from three of them.

The model is `parallel.elastic.ring.times` with the links' own rates and delays,
and three rates of this machine that are fitted to sums over one set of links.
Other sums, over other sets, give residuals and tests, as in
`caatnet.benchmarks.programs.calibration`.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import os
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize

from caatnet.benchmarks.elastic import ring_orders
from caatnet.benchmarks.elastic.ring import Peers
from caatnet.benchmarks.harness import namespaces, timing
from caatnet.benchmarks.programs import calibration
from caatnet.show import tables
from parallel.elastic.ring import times
from parallel.elastic.ring.link_collectives import ORDERS
from parallel.elastic.ring.times import Matrix


class Sum(NamedTuple):
  """Configuration of a sum.

  Attributes:
    links: Seed of its links.
    order: "direct" or "ring".
    peers: Numbers of the peers that take part, in the order of their ranks.
    nbytes: Bytes of the array.
    block_bytes: Bytes of a block.
  """

  links: int
  order: str
  peers: tuple[int, ...]
  nbytes: int
  block_bytes: int

  def __str__(self) -> str:
    return (
      f"links {self.links}, {self.order} of {len(self.peers)}, "
      f"{self.nbytes / 1e6:.2f} MB in blocks of {self.block_bytes >> 10} KiB"
    )


class Rates(NamedTuple):
  """Rates of a machine, equal for all links.

  Attributes:
    share: Payload per byte of a link's rate.
    byte_s: Seconds per byte in addition to those of the link.
    delay_s: Seconds in addition to a link's delay; negative if the shaper lets
      a link that was idle send some bytes at once.
  """

  share: float
  byte_s: float
  delay_s: float


def run(config: Any) -> dict[str, Any]:
  """Measures, prints tables, and returns them as plain data.

  Args:
    config: Config like configs/benchmark/calibration.py:links.

  Raises:
    ValueError: This machine or this user cannot shape links, or a key is wrong.
  """
  options = config.benchmark
  others = [drawn(i, options) for i in range(options.held_out + options.tested)]
  # The first set of links is only used for the fit.
  fitted = [Sum(0, *given) for given in options.fitted]
  if any(max(each.peers) >= options.peers for each in fitted):
    raise ValueError(
      f"config.benchmark.fitted={options.fitted} must have peers below "
      f"config.benchmark.peers={options.peers}"
    )
  blocks: dict[Sum, list[float]] = {}
  by_links: dict[int, list[Sum]] = {}
  for each in (*fitted, *others):
    by_links.setdefault(each.links, []).append(each)
  for seed in timing.progress(sorted(by_links), "sets of links"):
    with _peers(seed, options) as peers:
      for each in by_links[seed]:
        blocks[each] = _measured(each, peers, options.rounds)
  matrices = {seed: ring_orders.drawn(seed, options) for seed in by_links}
  rates = fit([(each, blocks[each]) for each in fitted], matrices)
  result = calibration.judged([
    {"configuration": str(each), "blocks_s": blocks[each],
     "predicted_s": predicted_s(each, matrices[each.links], rates)}
    for each in others
  ], options.held_out)
  _show_fit(rates, fitted, blocks, matrices)
  calibration.show(result)
  return {
    "benchmark": "calibrated_links", "load": timing.load(),
    "cores": os.cpu_count(), "rates": rates._asdict(), **result,
  }


def drawn(index: int, options: Any) -> Sum:
  """Returns a random sum over one of the sets of links."""
  rng = np.random.default_rng((options.seed, index))
  count = int(rng.integers(2, options.peers + 1))
  low, high = np.log(options.kilobytes)
  return Sum(
    int(rng.integers(1, options.links + 1)), str(rng.choice(ORDERS)),
    tuple(rng.permutation(options.peers)[:count].tolist()),
    4 * round(250 * float(np.exp(rng.uniform(low, high)))),  # whole float32
    int(rng.choice(options.block_bytes)),
  )


def predicted_s(each: Sum, links: Matrix, rates: Rates) -> float:
  """Returns the modelled seconds of a sum.

  Args:
    each: The sum.
    links: Nominal links of all peers.
    rates: Rates of the machine.
  """
  some = np.ix_(each.peers, each.peers)
  given = Matrix(
    1 / (1 / (rates.share * links.rates[some]) + rates.byte_s),
    links.delays[some] + rates.delay_s,
  )
  # A peer sends to another one once that one has opened the sum.
  opened_s = float(links.delays[some].max())
  if each.order == "direct":
    return opened_s + times.direct_seconds(
      given, each.nbytes, each.block_bytes
    )
  ranks = np.arange(len(each.peers))[None]
  return opened_s + float(
    times.ring_seconds(given, ranks, each.nbytes, each.block_bytes)[0]
  )


def fit(
  measured: Sequence[tuple[Sum, Sequence[float]]],
  matrices: Mapping[int, Matrix],
) -> Rates:
  """Fits rates to sums, with least squared logarithms of the errors.

  Args:
    measured: Sums, and the seconds of each round.
    matrices: Seed -> nominal links.
  """
  wanted = np.log([float(np.median(seconds)) for _, seconds in measured])

  def errors(x: np.ndarray) -> np.ndarray:
    found = [
      predicted_s(each, matrices[each.links], _rates(x))
      for each, _ in measured
    ]
    return np.log(np.maximum(found, 1e-6)) - wanted

  return _rates(optimize.least_squares(
    errors, [1.0, 1.0, 0.0], bounds=([0.3, 0.0, -5.0], [1.5, 100.0, 50.0])
  ).x)


def _rates(x: np.ndarray) -> Rates:
  """Returns rates of a fit's numbers, in ns per byte and ms."""
  return Rates(float(x[0]), float(x[1]) * 1e-9, float(x[2]) * 1e-3)


@contextlib.contextmanager
def _peers(seed: int, options: Any) -> Iterator[Peers]:
  """Starts peers with links between all pairs."""
  links = ring_orders.drawn(seed, options)
  with (
    namespaces.mesh(links.rates, links.delays) as there,
    Peers(there.hosts, there.prefixes) as peers,
  ):
    peers.do("arrays", lambda _: {"size": 1})
    peers.connect(1)
    yield peers


def _measured(each: Sum, peers: Peers, rounds: int) -> list[float]:
  """Returns the seconds of each round of a sum, after one more round."""
  names = [f"p{i}" for i in each.peers]

  def arguments(i: int) -> dict[str, Any]:
    # Other peers add their own array only, which sends nothing.
    ranks = names if i in each.peers else [f"p{i}"]
    return {"order": each.order, "block_bytes": each.block_bytes,
            "ranks": ranks}

  peers.do("arrays", lambda _: {"size": each.nbytes // 4})
  return [
    peers.do("sum", arguments).seconds for _ in range(1 + rounds)
  ][1:]


def _show_fit(
  rates: Rates, fitted: Sequence[Sum], blocks: Mapping[Sum, list[float]],
  matrices: Mapping[int, Matrix],
) -> None:
  print(
    f"fitted: payload {rates.share:.1%} of a link's rate, "
    f"{rates.byte_s * 1e9:.2f} ns per byte, {rates.delay_s * 1e3:+.2f} ms per "
    "message"
  )
  tables.table(
    "sums that the rates are fitted to, ms",
    ["configuration", "modelled", "measured"],
    [
      [str(each),
       f"{1e3 * predicted_s(each, matrices[each.links], rates):.1f}",
       f"{1e3 * float(np.median(blocks[each])):.1f}"]
      for each in fitted
    ],
  )
