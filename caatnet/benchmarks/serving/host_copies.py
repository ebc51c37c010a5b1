"""Steps of an executor while pages are copied to the host in parts."""

from collections.abc import Mapping, Sequence
import math
from typing import Any

import numpy as np

from caatnet.benchmarks.harness import timing
from caatnet.benchmarks.serving import decoders
from caatnet.inference.copies import make_copies
from caatnet.serving.engine import calibration
from caatnet.serving.engine.device import DecoderExecutor
from caatnet.serving.engine.executor import Copy
from caatnet.show import tables

# At least this many steps are timed, in all turns.
_STEPS = 32
_WHAT = "none", "out", "in", "during"
_HEAD = [
  "KiB per part", "parts", "KiB staged", "out alone", "in alone",
  "out during steps", "longest step / median", "steps / without copies",
]


def run(config: Any) -> list[dict[str, Any]]:
  """Measures copies of one sequence's pages, prints a table and returns it.

  Args:
    config: Config like configs/benchmark/nanobatches.py.
  """
  options = config.benchmark
  made = decoders.built(
    config, batch=options.batch, context=options.copied, chunk=1
  )
  executor = DecoderExecutor(
    decoders.decoder(made), made.capacity.pages_per_sequence
  )
  found = timing.in_turns({
    (size, what): lambda size=size, what=what: measure(executor, what, size)
    for size in options.parts for what in _WHAT
  }, options.rounds, label="copies to the host")
  executor.close()
  rows = [
    {"kib": size, **_staged(executor, size)}
    | summary({what: found[size, what] for what in _WHAT})
    for size in options.parts
  ]
  tables.table(
    f"ms of a copy of {executor.host.num_pages} pages, alone and during steps "
    f"of {options.batch} decodes: median (range)", _HEAD,
    [
      [f"{r['kib']:,}", str(r["parts"]), f"{r['staged_bytes'] / 1024:,.0f}",
       *(timing.range_text(1e3 * np.array(r[k]), ".1f")
         for k in ("out", "in", "during")),
       *(timing.range_text(r[k], ".3f") for k in ("longest", "slower"))]
      for r in rows
    ],
  )
  return rows


def summary(
  found: Mapping[str, Sequence[tuple[float, Sequence[float]]]]
) -> dict[str, list[float]]:
  """Returns seconds of copies, and ratios of steps, of each round.

  Args:
    found: Results of `measure` of each round, by `what`.
  """
  none, during = found["none"], found["during"]
  return {
    **{what: [x[0] for x in found[what]] for what in ("out", "in", "during")},
    "longest": [max(x[1]) / np.median(x[1]) for x in during],
    "slower": [
      np.mean(x[1]) / np.mean(y[1]) for x, y in zip(during, none, strict=True)
    ],
  }


def measure(
  executor: DecoderExecutor, what: str, kib: int
) -> tuple[float, list[float]]:
  """Returns the seconds of a copy, and those of the steps around it.

  Args:
    executor: Idle executor.
    what: "out" or "in" for a copy without steps, "during" for one to the host
      during steps, "none" for steps only.
    kib: Size of a part; 0 for one layer of a run.
  """
  _set_parts(executor, kib)
  pages = list(range(executor.host.num_pages))
  if what in ("out", "in"):
    copy = Copy(0, what, pages, pages, None)
    return calibration.await_copy(executor, copy), []
  step = calibration.example_step(
    executor, executor.decoder.capacity.batch, 0
  )
  begun = end = 0.0
  ends: list[float] = []
  num, copying = 0, False
  while num < _STEPS or copying:
    executor.submit(step)
    num += 1
    if num == 4 and what == "during":
      begun, copying = executor.now(), True
      executor.copy(Copy(0, "out", pages, pages, None))
    while len(ends) < num - 1:  # one is under way, as in serving
      for event in executor.wait(math.inf):
        if event.copy is None:
          ends.append(event.time_s)
        else:
          end, copying = event.time_s, False
  while len(ends) < num:
    ends += [event.time_s for event in executor.wait(math.inf)]
  return end - begun, np.diff(ends).tolist()


def _set_parts(executor: DecoderExecutor, kib: int) -> None:
  executor.host.part_bytes = 1024 * kib


def _staged(executor: DecoderExecutor, kib: int) -> dict[str, int]:
  """Returns the number of parts, and bytes of the compiled program's result."""
  _set_parts(executor, kib)
  pages = range(executor.host.num_pages)
  parts = executor.host.parts([(0, pages)])
  decoder, piece = executor.decoder, parts[0][0]
  read, _ = make_copies(decoder.program, decoder.cache_shape)
  memory = read.lower(
    decoder.cache, np.int32(0), np.int32(0), piece.num_layers, len(pages)
  ).compile().memory_analysis()
  return {
    "parts": len(parts),
    "staged_bytes": len(parts[0]) * memory.output_size_in_bytes,
  }
