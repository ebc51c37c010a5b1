"""Rates of devices and links, fitted to profiles of compiled programs.

The result is a cluster (`parallel.plans.hardware.link_matrix`), which
`launch.plan` and `launch.compile` read, with the rates of the roofline
(`parallel.ledger.roofline`):

- Matrix rate, memory bandwidth and overhead per instruction minimise the sum of
  (model - measured)^2 / measured, a compromise between absolute and relative
  errors. An instruction is bound by its matrix products if its FLOPs per byte
  reach a threshold, else by memory; the threshold is the one with the least
  sum. The rates are then scaled so that the modelled total time of all
  instructions equals the measured one.
- Latency and bandwidth of a link are fitted to the transfers of the smallest
  group of devices that contains it.
- Time in which a device waits for other devices or for the host is counted as
  compute: both rates and the overhead are scaled by one factor. Virtual devices
  share processors, so they mostly wait for the compute of other devices.
"""

import collections
from collections.abc import Sequence
import dataclasses
import itertools
import statistics
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize

from parallel.ledger import link_times, profiles, roofline
from parallel.ledger.overlap import ScheduledProgram
from parallel.ledger.profiles import Events
from parallel.ledger.reading import Reading
from parallel.plans.hardware import cluster_files, devices, link_matrix
from parallel.plans.hardware.devices import DEVICES
from parallel.plans.hardware.link_matrix import LinkMatrix

_MAX_RATE = cluster_files.MAX_RATE  # rate that replaces an infinite fitted one


class InstructionWork(NamedTuple):
  """Mean work of one execution of an instruction that does not communicate.

  Attributes:
    flops: FLOPs of its matrix products.
    bytes: Bytes read from and written to main memory.
    seconds: Time on a device.
    count: Executions on a device in a step.
  """

  flops: float
  bytes: float
  seconds: float
  count: float


class Rates(NamedTuple):
  """Fitted rates of a device.

  Attributes:
    matrix: FLOP/s of matrix products.
    memory: Bytes per second of main memory.
    overhead_s: Seconds that each instruction takes in addition.
  """

  matrix: float
  memory: float
  overhead_s: float

  def seconds(self, work: InstructionWork) -> float:
    """Returns the seconds of one execution of an instruction with this work."""
    return self.overhead_s + max(
      work.flops / self.matrix, work.bytes / self.memory
    )


class CollectiveSample(NamedTuple):
  """Measured collective instruction.

  Attributes:
    over: Mesh axes, joined by ",".
    groups: Device numbers of each group.
    hops: Number of messages that follow one another in a ring.
    bytes: Bytes that a device sends per execution.
    seconds: Transfer time of one execution, without waiting.
    count: Executions in a step.
  """

  over: str
  groups: tuple[tuple[int, ...], ...]
  hops: int
  bytes: float
  seconds: float
  count: float


@dataclasses.dataclass(frozen=True)
class ProgramProfile:
  """Profile of a program.

  Attributes:
    reading: Result of `parallel.ledger.read` for the compiled program: its
      collectives and instructions.
    steps: Executions of the program in the trace.
    step_s: Seconds from the start of one execution to that of the next.
    work: Instructions of the program that do not communicate.
    messages: Collectives of the program.
    dtype: Dtype with the most FLOPs of matrix products; "" if there are none.
  """

  reading: Reading
  steps: int
  step_s: float
  work: tuple[InstructionWork, ...]
  messages: tuple[CollectiveSample, ...]
  dtype: str


class CalibrationResult(NamedTuple):
  """Result of `calibrate`.

  Attributes:
    links: The devices with their fitted rates, and the links between them.
    rows: Table with a row for each fitted rate, and one for whole steps.
      ``what`` names the subject, such as "memory"; ``samples`` is the number of
      measured instructions, collectives or programs; ``rate`` is in FLOP/s or
      bytes per second; ``latency_s`` is the latency of a link or the overhead
      of an instruction; ``share`` is the fraction of the seconds of all steps;
      and ``residual`` is the median of |model / measured - 1| over samples.
  """

  links: LinkMatrix
  rows: list[dict[str, Any]]


def join_profile(reading: Reading, events: Events) -> ProgramProfile:
  """Joins a program with its events in a profile.

  Args:
    reading: Result of `parallel.ledger.read` for the compiled program.
    events: Events of the same program, of complete executions.

  Raises:
    ValueError: The program has no events.
  """
  module, num_devices = reading.module, len(events)
  entry = module.computations[module.entry]
  counts = [
    len(of_device[i.name]) for of_device in events.values()
    for i in entry.instructions if i.name in of_device
  ]
  if not counts:
    raise ValueError(
      f"the profile has no events of the program {module.name}; profile a run "
      "of this program"
    )
  steps = statistics.mode(counts)
  every = [
    x for of_device in events.values() for found in of_device.values()
    for x in found
  ]
  span_s = (max(x.end for x in every) - min(x.start for x in every)) / 1e9
  program = _scheduled_program(
    reading, DEVICES["a100"]
  )  # for counts only: any device
  work = []
  flops: collections.Counter[str] = collections.Counter()  # by dtype
  for computation in {c.name: c for c, _ in module.runs()}.values():
    for instruction in computation.instructions:
      cost = program.cost(computation, instruction)
      found = [
        x for of_device in events.values()
        for x in of_device.get(instruction.name, ())
      ]
      if found and (cost.flops or cost.bytes):
        dtype = roofline.product_flops_and_dtype(
          module, computation, instruction
        )[1]
        flops[dtype] += cost.flops * len(found)
        work.append(InstructionWork(
          cost.flops, cost.bytes,
          sum(x.end - x.start for x in found) / 1e9 / len(found),
          len(found) / num_devices / steps,
        ))
  first = {e.instruction: e.entry for e in reversed(reading.executed)}
  messages = []
  for m in profiles.measure_collectives(reading, events):
    groups = link_times.groups(reading.mesh, first[m.instruction])
    messages.append(CollectiveSample(
      first[m.instruction].over, tuple(map(tuple, groups.tolist())),
      first[m.instruction].ring_hops, m.bytes, m.transfer_s,
      m.executions / steps,
    ))
  return ProgramProfile(
    reading, steps, span_s / steps, tuple(work), tuple(messages),
    max(flops, key=flops.__getitem__, default=""),
  )


def calibrate(
  observed: Sequence[ProgramProfile], name: str, memory_bytes: int
) -> CalibrationResult:
  """Fits the rates of devices and links to profiles of programs.

  Args:
    observed: Profiles of programs on the same devices.
    name: Name of device and cluster.
    memory_bytes: Bytes of memory that all devices share.

  Raises:
    ValueError: No instruction is a matrix product, or all of them are.
  """
  work = [w for o in observed for w in o.work if w.seconds > 0]
  fitted = fit_rates(work)
  steps = sum(o.steps for o in observed)
  source = f"profile of {steps} steps of {len(observed)} programs"
  messages = [m for o in observed for m in o.messages if m.seconds > 0]
  # A program of one device has no mesh.
  num_devices = max(1, *(o.reading.mesh.size for o in observed))
  latency, per_s = _fit_link_matrices(messages, num_devices)

  def cluster(factor: float) -> LinkMatrix:
    matrix, memory = (
      min(_MAX_RATE, rate / factor) for rate in (fitted.matrix, fitted.memory)
    )
    return LinkMatrix(
      name, devices.make_measured_device(
        name, {observed[0].dtype: matrix}, memory_bytes // num_devices,
        memory, source, fitted.overhead_s * factor,
      ), (0,) * num_devices, per_s, latency, source, "measured",
    )

  # One factor slows down all compute, so that it includes the time of waiting.
  wanted = predicted = 0.0
  for o in observed:
    compute_s, exposed_s = _compute_and_exposed_s(o.reading, cluster(1.0))
    wanted += o.step_s - exposed_s
    predicted += compute_s
  links = cluster(max(wanted / predicted, 1e-3))
  total_s = sum(o.step_s for o in observed)
  return CalibrationResult(links, [
    *_work_rows(work, fitted, total_s),
    *_message_rows(messages, links, total_s),
    {
      "what": "steps", "samples": len(observed), "rate": None,
      "latency_s": None, "share": 1.0,
      "residual": float(np.median([
        abs(
          sum(_compute_and_exposed_s(o.reading, links)) / o.step_s - 1
        ) for o in observed
      ])),
    },
  ])


def fit_rates(work: Sequence[InstructionWork]) -> Rates:
  """Fits the rates of the roofline to the seconds of instructions.

  Raises:
    ValueError: No instruction is a matrix product, or all of them are.

  Example:
    >>> true = Rates(2e10, 1e9, 1e-5)
    >>> made = [InstructionWork(f, b, 0.0, 1) for f, b in (
    ...   (2e9, 1e6), (4e9, 1e6), (0.0, 1e6), (1e3, 4e6))]
    >>> found = fit_rates([w._replace(seconds=true.seconds(w)) for w in made])
    >>> print(*(f"{x:.3g}" for x in found))
    2e+10 1e+09 1e-05
  """
  flops, size, seconds, count = np.array(work, float).reshape(-1, 4).T
  by_products = flops > 0
  if by_products.all() or not by_products.any():
    raise ValueError(
      "rates can be fitted only to a profile that has both matrix products and "
      "other instructions"
    )
  weight, fits = np.sqrt(count / seconds), []
  intensity = flops / np.maximum(size, 1.0)
  for least in np.unique(intensity[by_products]):
    bound = intensity >= least
    rows = np.stack([
      np.where(bound, flops, 0), np.where(bound, 0, size), np.ones(len(work))
    ], 1)
    scale = rows.max(0)  # columns of similar magnitude
    found, error = optimize.nnls(
      rows / scale * weight[:, None], seconds * weight
    )
    fits.append((error, tuple(found / scale)))
  # A rate that the fit leaves infinite must stay finite in files.
  per_flop, per_byte, overhead = np.maximum(
    min(fits)[1], [1 / _MAX_RATE, 1 / _MAX_RATE, 0]
  )
  made = Rates(*(float(x) for x in (1 / per_flop, 1 / per_byte, overhead)))
  factor = float(np.sum(count * seconds)) / sum(
    w.count * made.seconds(w) for w in work
  )
  return Rates(made.matrix / factor, made.memory / factor, overhead * factor)


def fit_link(messages: Sequence[CollectiveSample]) -> tuple[float, float]:
  """Returns latency in seconds and bandwidth in bytes/s of a ring's links.

  Both are scaled so that the modelled total time of all messages equals the
  measured one. If larger messages take no longer, the latency is 0.
  """
  try:
    latency_s, bandwidth = link_matrix.fit(
      [m.bytes / m.hops for m in messages],
      [m.seconds / m.hops for m in messages],
    )
  except ValueError:
    latency_s, bandwidth = 0.0, 1.0
  measured = sum(m.count * m.seconds for m in messages)
  modelled = sum(
    m.count * (m.hops * latency_s + m.bytes / bandwidth) for m in messages
  )
  factor = measured / modelled
  return latency_s * factor, bandwidth / factor


def _scheduled_program(
  reading: Reading, device: devices.Device, links: LinkMatrix | None = None
) -> ScheduledProgram:
  return ScheduledProgram(
    reading.module, reading.mesh, device,
    link_times.build_time_model(
      links, reading.mesh
    ) if links else lambda _: 0.0,
  )


def _compute_and_exposed_s(
  reading: Reading, links: LinkMatrix
) -> tuple[float, float]:
  """Returns a step's seconds of compute, and of exposed communication.

  ``links`` has the rates of the device and of the links.
  """
  program = _scheduled_program(reading, links.device, links)
  exposed_s = sum(
    (t.wire_seconds - t.hidden_seconds * t.asynchronous) * (t.count or 1)
    for t in program.collectives()
  )
  return program.total().seconds, exposed_s


def _fit_link_matrices(
  messages: Sequence[CollectiveSample], num_devices: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns latency (s) and bandwidth (bytes/s) of device pairs, ``[N, N]``.

  ``messages`` are the measured collectives. Pairs of the N devices that none of
  them contains get the slowest fitted rates.
  """
  latency = np.full((num_devices, num_devices), np.nan)
  bandwidth = latency.copy()
  # Smallest groups first: a pair gets the rates of the smallest group it is in.
  by_group = sorted(_by_group(messages).items(), key=lambda x: len(x[0][0]))
  for groups, found in by_group:
    fitted = fit_link(found)
    for group in groups:
      for pair in itertools.permutations(group, 2):
        if np.isnan(latency[pair]):
          latency[pair], bandwidth[pair] = fitted
  # Pairs that were not measured have the slowest rates. Without collectives,
  # no link is used.
  slowest = (
    (np.nanmax(latency), np.nanmin(bandwidth)) if by_group else (0.0, _MAX_RATE)
  )
  missing = np.isnan(latency)
  latency[missing], bandwidth[missing] = slowest
  return latency, bandwidth


def _by_group(
  messages: Sequence[CollectiveSample],
) -> dict[tuple[tuple[int, ...], ...], list[CollectiveSample]]:
  found: dict[tuple[tuple[int, ...], ...], list[CollectiveSample]] = {}
  for message in messages:
    found.setdefault(message.groups, []).append(message)
  return found


def _work_rows(
  work: Sequence[InstructionWork], fitted: Rates, total_s: float
) -> list[dict[str, Any]]:
  """Returns a table row each for matrix products and memory accesses.

  ``fitted`` are the rates before they are scaled so that they include waiting.
  ``total_s`` are the measured seconds of all steps.
  """
  rows = []
  for what, rate, products in (("products", fitted.matrix, True),
                               ("memory", fitted.memory, False)):
    some = [
      w for w in work
      if (w.flops / fitted.matrix > w.bytes / fitted.memory) == products
    ]
    rows.append({
      "what": what, "samples": len(some), "rate": rate,
      "latency_s": fitted.overhead_s,
      "share": sum(w.seconds * w.count for w in some) / total_s,
      "residual": _residual(
        [fitted.seconds(w) for w in some], [w.seconds for w in some]
      ),
    })
  return rows


def _message_rows(
  messages: Sequence[CollectiveSample], links: LinkMatrix, total_s: float
) -> list[dict[str, Any]]:
  rows = []
  for groups, found in _by_group(messages).items():
    pair = groups[0][:2]
    latency_s, rate = links.latency_s[pair], links.bandwidth[pair]
    rows.append({
      "what": f"links over {found[0].over}, {len(groups[0])} devices",
      "samples": len(found), "rate": float(rate),
      "latency_s": float(latency_s),
      "share": sum(m.seconds * m.count for m in found) / total_s,
      "residual": _residual(
        [m.hops * latency_s + m.bytes / rate for m in found],
        [m.seconds for m in found],
      ),
    })
  return rows


def _residual(modelled: Sequence[float], measured: Sequence[float]) -> float:
  errors = np.array(modelled) / np.maximum(measured, 1e-12) - 1
  return float(np.median(np.abs(errors))) if len(errors) else 0.0
