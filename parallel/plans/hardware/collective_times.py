"""All-reduce times including latency: measured for GPUs, by hops for TPUs.

The bandwidth of a link (`parallel.plans.hardware.links`) determines the time of
large messages. This module gives the times of small ones, as a `Span` from the
smallest to the largest plausible time.

GPUs: Microsoft's Vidur publishes measured times of PyTorch all-reduces over
NCCL by size, number of workers and machine. ``collective_times.csv`` is a
sample of its medians (`resample_times`). Messages of nearly the same size can
take 7 us or 60 us: if the host launches kernels more slowly than they run, the
measurement contains the launch time. A program without host overhead, e.g. with
CUDA graphs, is close to the lower end.

The measurements do not cover all machines:

- 8 workers of "a100_dgx" reach 22 GB/s at 64 MiB, which matches InfiniBand and
  is a tenth of their NVLink bandwidth. They were on several machines, so these
  times do not describe an NVLink switch, and are not used.
- For PCI Express there are only the 4 workers of "a100_pairwise_nvlink": NVLink
  connects them in pairs, and a ring of four passes over PCI Express.

`times_between_gpus` returns the times for a kind of link. It marks times that
it derives from measurements of another configuration as assumptions.

TPUs: we know of no published measurements. The time of a collective is a number
of hops times an assumed time per hop (`HOP_S`), plus the time of its bytes.

Example:
  >>> from parallel.plans.hardware import collective_times
  >>> from parallel.plans.hardware.links import ICI_V5E
  >>> hops = collective_times.on_torus("v5e", ICI_V5E, (4, 4), (4, 4))
  >>> hops.hops  # to the farthest chip; around a ring of 16
  (6, 30)
  >>> hops.all_reduce(0).least  # seconds, at 1 us per hop
  6e-06
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import csv
import dataclasses
import functools
import math
import pathlib
from typing import NamedTuple

import numpy as np

from parallel.plans.hardware.links import NVLINK_3, NVLINK_4, PCIE_4, LinkKind
from parallel.plans.hardware.slices import SLICE_RULES

MEASURED, ASSUMPTION = "measured", "assumption"
SOURCE = "microsoft/vidur (MIT), data/profiling/network/{}/all_reduce.csv"
HOP_S = 1e-6
HOP_SOURCE = (
  'Austin et al., "How to Scale Your Model", 2025, chapter on TPUs: 1 us per '
  "hop of v5e in an exercise; for other TPUs an assumption"
)

_SAMPLE_PATH = pathlib.Path(__file__).with_suffix(".csv")
_COLUMNS = ("network", "num_workers", "size_bytes", "least_us", "greatest_us")


class Span(NamedTuple):
  """Interval of plausible times.

  Attributes:
    least, greatest: Smallest and largest time, in seconds.
  """

  least: float
  greatest: float

  def stretched(self, least: float, greatest: float) -> "Span":
    """Returns the interval with its ends multiplied by these two factors."""
    return Span(self.least * least, self.greatest * greatest)


@dataclasses.dataclass(frozen=True)
class Sample:
  """All-reduce times by message size, for a fixed number of workers.

  Attributes:
    sizes: Message sizes in bytes, ascending.
    spans: Smallest and largest time of each size.
    source: Source of the times.
    mark: ``MEASURED``, or ``ASSUMPTION`` if derived from another machine.
  """

  sizes: tuple[int, ...]
  spans: tuple[Span, ...]
  source: str
  mark: str = MEASURED

  def all_reduce(self, size_bytes: float) -> Span:
    """Returns the smallest and largest time of an all-reduce, in seconds.

    Between two measured sizes, the logarithm of the time is interpolated
    linearly in the logarithm of the size. Below the smallest measured size the
    time is constant.

    Args:
      size_bytes: Operand bytes per worker.

    Raises:
      ValueError: The message is larger than the largest measured one.
    """
    # No extrapolation: large messages follow the bandwidth, not this table.
    if size_bytes > self.sizes[-1]:
      raise ValueError(
        f"an all-reduce of {size_bytes:,.0f} bytes is larger than the largest "
        f"measured size, {self.sizes[-1]:,} bytes ({self.source})"
      )
    return Span(*(
      _interpolated(size_bytes, list(zip(self.sizes, ends, strict=True)))
      # Both ends of the interval are interpolated separately.
      for ends in zip(*self.spans, strict=True)
    ))

  def derived(self, time: Callable[[int], Span], why: str) -> "Sample":
    """Returns assumed times of another configuration at the same sizes.

    Args:
      time: Function from a size in bytes to its time.
      why: Derivation of the times, appended to `source`.
    """
    spans = tuple(map(time, self.sizes))
    return Sample(self.sizes, spans, f"{self.source}; {why}", ASSUMPTION)


@dataclasses.dataclass(frozen=True)
class TorusTimeModel:
  """Model of all-reduce times on a torus: time of hops plus time of bytes.

  Attributes:
    hops: Smallest and largest number of sequential hops.
    num_workers: Number of participating chips.
    rate: Aggregate bytes per second of the links that a chip sends over.
    source: Source of the time per hop.
    mark: Always ``ASSUMPTION``.
  """

  hops: tuple[int, int]
  num_workers: int
  rate: float
  source: str = HOP_SOURCE
  mark: str = ASSUMPTION

  def all_reduce(self, size_bytes: float) -> Span:
    """Returns smallest and largest seconds, given operand bytes per chip."""
    n = self.num_workers
    # Bandwidth-optimal: each chip sends 2 (n - 1) / n of the operand.
    bytes_s = 2 * (n - 1) / n * size_bytes / self.rate
    return Span(*(h * HOP_S + bytes_s for h in self.hops))


AllReduceTimes = Sample | TorusTimeModel


def times_between_gpus(link: LinkKind, num_workers: int) -> Sample:
  """Returns all-reduce times between GPUs of one machine.

  - NVLink 4: measured on "h100_dgx"; H200s have the same links and switches.
  - NVLink 3: measured for two A100s. For more workers, the lower bound is the
    NVLink 4 time, and the upper bound is the NVLink 4 time multiplied by
    (bandwidth of NVLink 4 / bandwidth of NVLink 3).
  - PCI Express 4: measured for four workers. For more, the lower bound scales
    with the bytes that a worker sends in a ring. The upper bound scales with
    the ring's steps, each as long as one of four workers with equal chunks.

  Args:
    link: Kind of link between the GPUs.
    num_workers: Number of GPUs.

  Raises:
    ValueError: No times were measured for this link and number of GPUs, and
      none can be derived.
  """
  measured = read_measured_tables()
  # Measured directly.
  if link == NVLINK_4 and ("h100_dgx", num_workers) in measured:
    return measured["h100_dgx", num_workers]
  if link == NVLINK_3 and num_workers == 2:
    return measured["a100_pairwise_nvlink", 2]
  # Derived from H100: equal latency at best, lower bandwidth at worst.
  if link == NVLINK_3 and ("h100_dgx", num_workers) in measured:
    faster = measured["h100_dgx", num_workers]
    return faster.derived(
      lambda size: faster.all_reduce(size).stretched(
        1, NVLINK_4.bandwidth / NVLINK_3.bandwidth
      ),
      "for A100s between this time and this time multiplied by the ratio of "
      "the bandwidths of NVLink 4 and NVLink 3",
    )
  # Derived from a ring of four workers.
  if link == PCIE_4 and num_workers >= 4:
    four, n = measured["a100_pairwise_nvlink", 4], num_workers
    steps = (n - 1) / 3  # ratio of ring steps: 2 (n - 1) to four workers' 2 * 3
    return four if n == 4 else four.derived(
      lambda size: Span(
        # Bytes per worker: 2 (n - 1) / n of the message, relative to 2 * 3 / 4.
        steps * 4 / n * four.all_reduce(size).least,
        # A step sends size / n bytes, as with four workers and a message of
        # 4 size / n bytes.
        steps * four.all_reduce(size * 4 / n).greatest,
      ),
      f"for a ring of {n}, scaled at least by the bytes that a worker sends, "
      "and at most by the number of steps",
    )
  known = sorted({workers for _, workers in measured})
  raise ValueError(
    f"all-reduces of {num_workers} workers over {link.name} were not measured; "
    f"measured are NVLink 3, NVLink 4 and PCIe 4.0 x16 with workers in {known}"
  )


def on_torus(
  generation: str, link: LinkKind, slice_shape: Sequence[int],
  shape: Sequence[int],
) -> TorusTimeModel:
  """Returns all-reduce times among neighbouring TPUs of a slice.

  The smallest number of hops is the distance between the two chips farthest
  apart, since each chip's summand must reach all others. The largest number is
  2 (n - 1), that of a ring of all n chips (reduce-scatter and all-gather).

  Args:
    generation: Key of `parallel.plans.hardware.slices.SLICE_RULES`.
    link: Kind of link between chips.
    slice_shape: Number of chips of the slice along each dim.
    shape: Number of participating chips along each dim.
  """
  farthest, links = 0, 0
  for whole, size in zip(slice_shape, shape, strict=True):
    # A part of a dim is a line even if the whole dim is a ring.
    closed = size == whole and SLICE_RULES[generation].wraps_around(whole)
    farthest += size // 2 if closed else size - 1  # hops in this dim
    # Links per chip in this dim: two in a ring, one at the end of a line.
    links += (size > 1) * (1 + closed)
  n = math.prod(shape)
  # max: a single chip has no links, and no bytes to send.
  return TorusTimeModel(
    (farthest, 2 * (n - 1)), n, max(1, links) * link.bandwidth
  )


@functools.cache
def read_measured_tables() -> Mapping[tuple[str, int], Sample]:
  """Returns the measured times: (network, number of workers) -> sample."""
  with _SAMPLE_PATH.open(newline="") as file:
    rows = list(csv.DictReader(x for x in file if not x.startswith("#")))
  found: dict[tuple[str, int], list[tuple[int, Span]]] = {}
  for row in rows:
    key = row["network"], int(row["num_workers"])
    span = Span(*(float(row[c]) / 1e6 for c in _COLUMNS[3:]))  # us to s
    found.setdefault(key, []).append((int(row["size_bytes"]), span))
  return {
    (network, n): Sample(
      *zip(*spans, strict=True), f"{SOURCE.format(network)}, {n} workers"
    )
    for (network, n), spans in found.items()
  }


def resample_times(
  rows: Iterable[tuple[str, int, int, float]],
) -> list[tuple[str, int, int, float, float]]:
  """Returns the rows of ``collective_times.csv``, at powers of two in bytes.

  The smallest times are interpolated between those measurements that no larger
  message undercut, since a small message can be padded to the larger size. The
  largest times are interpolated between those measurements that no smaller
  message exceeded.

  Args:
    rows: (network, number of workers, operand bytes, milliseconds) of each
      measurement.

  Returns:
    (network, number of workers, bytes, smallest and largest time in
    microseconds) for each power of two between the smallest and the largest
    message.
  """
  # (network, workers) -> (bytes, microseconds).
  groups: dict[tuple[str, int], list[tuple[int, float]]] = {}
  for network, workers, size, milliseconds in rows:
    groups.setdefault((network, workers), []).append((size, milliseconds * 1e3))
  found = []
  for key, times in groups.items():
    times.sort()
    # Lower envelope: scan from the largest size; upper: from the smallest.
    fast, slow = [times[-1]], [times[0]]
    for size, t in reversed(times[:-1]):
      if t <= fast[0][1]:
        fast.insert(0, (size, t))
    for size, t in times[1:]:
      if t >= slow[-1][1]:
        slow.append((size, t))
    powers = range(
      math.ceil(math.log2(times[0][0])), math.floor(math.log2(times[-1][0])) + 1
    )
    for size in (2**power for power in powers):
      least, greatest = (_interpolated(size, ends) for ends in (fast, slow))
      # The envelopes may cross between measured sizes.
      found.append((*key, size, least, max(least, greatest)))
  return found


def _interpolated(size: float, points: Sequence[tuple[int, float]]) -> float:
  """Interpolates between ``points`` (size, value) linearly on log-log scales.

  Beyond both ends the value is constant.
  """
  sizes, values = zip(*points, strict=True)
  return float(np.exp(np.interp(np.log(size), np.log(sizes), np.log(values))))


def write_sample(
  rows: Iterable[tuple[str, int, int, float]], path: pathlib.Path = _SAMPLE_PATH
) -> None:
  """Writes ``collective_times.csv`` from measured times.

  Args:
    rows: Measurements, as for `resample_times`.
    path: Path of the file.
  """
  with path.open("w", newline="") as file:
    file.write(
      f"# {SOURCE.format('*')}, reduced: https://github.com/microsoft/vidur\n"
      "# MIT License, Copyright (c) Microsoft\n"
    )
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for *key, least, greatest in resample_times(rows):
      writer.writerow([*key, f"{least:.0f}", f"{greatest:.0f}"])
