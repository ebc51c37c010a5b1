"""How long all-reduces take, latency included: measured, or by hops.

Links have rates (`parallel.hardware.links`), which say what a large message
takes. What a small one takes is said here, as a `Span` from the least to the
greatest time that is known of it.

Between GPUs it was measured. Microsoft's Vidur publishes the times of PyTorch's
all-reduces over NCCL by size, workers and machine. ``collective_times.csv`` is
a sample of its medians (`reduced`). Of two messages of about the same size one
may take 7 us and the other 60: where the host cannot launch kernels as fast as
they run, its time is measured. A program whose kernels wait for no host, as
with CUDA graphs, is near the least.

Not all machines were measured:

- 8 workers of "a100_dgx" send 22 GB/s at 64 MiB, as they would over InfiniBand
  and a tenth of what their NVLink carries. They were on several machines, so
  this is no measurement of an NVLink switch.
- Of PCI Express there are the 4 workers of "a100_pairwise_nvlink": NVLink joins
  two and two of them, and a ring of four goes over PCI Express.

`between` says what follows for a link, and marks what is an assumption.

Between TPUs nothing was published that we know of. A collective takes a number
of hops, and a hop a time that is an assumption (`HOP_S`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import csv
import dataclasses
import functools
import math
import pathlib
from typing import NamedTuple

import numpy as np

from parallel.hardware.links import NVLINK_3, NVLINK_4, PCIE_4, LinkKind
from parallel.hardware.slices import SLICES

MEASURED, ASSUMPTION = "measured", "assumption"
SOURCE = "microsoft/vidur (MIT), data/profiling/network/{}/all_reduce.csv"
HOP_S = 1e-6
HOP_SOURCE = (
  'Austin et al., "How to Scale Your Model", 2025, chapter on TPUs: 1 us per '
  "hop of v5e in an exercise; for other TPUs an assumption"
)

_SAMPLE = pathlib.Path(__file__).with_suffix(".csv")
_COLUMNS = ("network", "num_workers", "size_bytes", "least_us", "greatest_us")


class Span(NamedTuple):
  """The least and the greatest of what is known of a time, in seconds."""

  least: float
  greatest: float

  def stretched(self, least: float, greatest: float) -> "Span":
    """Returns both ends, each multiplied by a factor of its own."""
    return Span(self.least * least, self.greatest * greatest)


@dataclasses.dataclass(frozen=True)
class Sample:
  """Measured times of all-reduces among some workers.

  Attributes:
    sizes: Bytes of the messages, ascending.
    spans: The time of each.
    source: Where they come from.
    mark: ``MEASURED``, or ``ASSUMPTION`` if they are those of another machine.
  """

  sizes: tuple[int, ...]
  spans: tuple[Span, ...]
  source: str
  mark: str = MEASURED

  def all_reduce(self, size_bytes: float) -> Span:
    """Returns the time of an all-reduce.

    Between two sizes that were measured the logarithm of the time is
    interpolated over that of the size. A message smaller than all of them takes
    as long as the smallest.

    Args:
      size_bytes: Operand bytes of each worker.

    Raises:
      ValueError: The message is larger than all that were measured.
    """
    if size_bytes > self.sizes[-1]:
      raise ValueError(
        f"an all-reduce of {size_bytes:,.0f} bytes was not measured, only up "
        f"to {self.sizes[-1]:,} ({self.source})"
      )
    return Span(*(
      _interpolated(size_bytes, list(zip(self.sizes, ends, strict=True)))
      for ends in zip(*self.spans, strict=True)
    ))

  def derived(self, time: Callable[[int], Span], why: str) -> "Sample":
    """Returns times of other workers at the same sizes, an assumption.

    Args:
      time: The time of a size, made of this sample's.
      why: What makes it so, for the source.
    """
    spans = tuple(map(time, self.sizes))
    return Sample(self.sizes, spans, f"{self.source}; {why}", ASSUMPTION)


@dataclasses.dataclass(frozen=True)
class Hops:
  """Times of all-reduces on a torus: hops, and bytes over links.

  Attributes:
    hops: The least and the greatest number of hops in a row.
    num_workers: Chips that reduce.
    rate: Bytes per second of all links that a chip sends over at once.
    source: Where the time of a hop comes from.
    mark: ``ASSUMPTION``.
  """

  hops: tuple[int, int]
  num_workers: int
  rate: float
  source: str = HOP_SOURCE
  mark: str = ASSUMPTION

  def all_reduce(self, size_bytes: float) -> Span:
    """Returns the time of an all-reduce of so many operand bytes per chip."""
    n = self.num_workers
    bytes_s = 2 * (n - 1) / n * size_bytes / self.rate
    return Span(*(h * HOP_S + bytes_s for h in self.hops))


Times = Sample | Hops


def between(link: LinkKind, num_workers: int) -> Sample:
  """Returns times of all-reduces between GPUs in a machine.

  - NVLink 4 is that of "h100_dgx"; H200s have the same links and switches.
  - NVLink 3 is that of two A100s for two workers. More take as long as with
    NVLink 4 at least, and as much longer at most as the link is slower.
  - PCI Express 4 is that of four workers. More of them take as much longer at
    least as a ring of them sends more bytes. At most each step of their ring
    takes as long as one of the four's with a message of the same size.

  Args:
    link: The kind of link that joins them.
    num_workers: How many there are.

  Raises:
    ValueError: Nothing was measured from which their time follows.
  """
  measured = samples()
  if link == NVLINK_4 and ("h100_dgx", num_workers) in measured:
    return measured["h100_dgx", num_workers]
  if link == NVLINK_3 and num_workers == 2:
    return measured["a100_pairwise_nvlink", 2]
  if link == NVLINK_3 and ("h100_dgx", num_workers) in measured:
    faster = measured["h100_dgx", num_workers]
    return faster.derived(
      lambda size: faster.all_reduce(size).stretched(
        1, NVLINK_4.bandwidth / NVLINK_3.bandwidth
      ),
      "for A100s as long at least, and as much longer at most as NVLink 3 is "
      "slower than NVLink 4",
    )
  if link == PCIE_4 and num_workers >= 4:
    four, n = measured["a100_pairwise_nvlink", 4], num_workers
    steps = (n - 1) / 3
    return four if n == 4 else four.derived(
      lambda size: Span(
        steps * 4 / n * four.all_reduce(size).least,
        steps * four.all_reduce(size * 4 / n).greatest,
      ),
      f"{n} in a ring take longer by its bytes at least; at most by its steps, "
      "each with a part of the message",
    )
  known = sorted({workers for _, workers in measured})
  raise ValueError(
    f"all-reduces of {num_workers} workers over {link.name} were not measured; "
    f"known: NVLink 3 and 4, PCIe 4.0 x16, with workers in {known}"
  )


def on_torus(
  generation: str, link: LinkKind, slice_shape: Sequence[int],
  shape: Sequence[int],
) -> Hops:
  """Returns times of all-reduces among neighbouring TPUs of a slice.

  At least they take the hops to the chip that is farthest, since its summand
  has to arrive everywhere. At most they take those of a ring of all chips, in
  which one chip after the other adds and then hands on.

  Args:
    generation: A key of `parallel.hardware.slices.SLICES`.
    link: The kind of link between chips.
    slice_shape: Chips of the slice along each dim.
    shape: Those of them that reduce, along each dim.
  """
  farthest, links = 0, 0
  for whole, size in zip(slice_shape, shape, strict=True):
    closed = size == whole and SLICES[generation].closes(whole)
    farthest += size // 2 if closed else size - 1
    links += (size > 1) * (1 + closed)
  n = math.prod(shape)
  return Hops((farthest, 2 * (n - 1)), n, max(1, links) * link.bandwidth)


@functools.cache
def samples() -> Mapping[tuple[str, int], Sample]:
  """Reads the sample: (network, number of workers) -> measured times."""
  with _SAMPLE.open(newline="") as file:
    rows = list(csv.DictReader(x for x in file if not x.startswith("#")))
  found: dict[tuple[str, int], list[tuple[int, Span]]] = {}
  for row in rows:
    key = row["network"], int(row["num_workers"])
    span = Span(*(float(row[c]) / 1e6 for c in _COLUMNS[3:]))
    found.setdefault(key, []).append((int(row["size_bytes"]), span))
  return {
    (network, n): Sample(
      *zip(*spans, strict=True), f"{SOURCE.format(network)}, {n} workers"
    )
    for (network, n), spans in found.items()
  }


def reduced(
  rows: Iterable[tuple[str, int, int, float]],
) -> list[tuple[str, int, int, float, float]]:
  """Reduces measured times to a few sizes, as the sample beside this file has.

  The least time of a size is read from those messages that no larger one was
  faster than, since a message can be sent as a larger one. The greatest is read
  from those that no smaller one was slower than.

  Args:
    rows: Network, number of workers, operand bytes and milliseconds of each.

  Returns:
    Network, number of workers, bytes, and the least and the greatest
    microseconds, for each power of two between the smallest and the largest
    message.
  """
  groups: dict[tuple[str, int], list[tuple[int, float]]] = {}
  for network, workers, size, milliseconds in rows:
    groups.setdefault((network, workers), []).append((size, milliseconds * 1e3))
  found = []
  for key, times in groups.items():
    times.sort()
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
      found.append((*key, size, least, max(least, greatest)))
  return found


def _interpolated(size: float, points: Sequence[tuple[int, float]]) -> float:
  """Reads a line through points on logarithmic scales, level at both ends."""
  sizes, values = zip(*points, strict=True)
  return float(np.exp(np.interp(np.log(size), np.log(sizes), np.log(values))))


def write_sample(
  rows: Iterable[tuple[str, int, int, float]], path: pathlib.Path = _SAMPLE
) -> None:
  """Writes the sample anew from measured times, as `reduced` takes them."""
  with path.open("w", newline="") as file:
    file.write(
      f"# {SOURCE.format('*')}, reduced: https://github.com/microsoft/vidur\n"
      "# MIT License, Copyright (c) Microsoft\n"
    )
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for *key, least, greatest in reduced(rows):
      writer.writerow([*key, f"{least:.0f}", f"{greatest:.0f}"])
