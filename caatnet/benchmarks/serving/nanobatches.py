"""Steps in nano-batches, on the engine and between two processes.

On the engine the reductions are in the program. XLA:CPU runs nothing during
them, so pieces only cost.

Two processes have a tensor rank each, and no common program: the host runs the
halves of a layer as programs, and sums their results in threads of
`parallel.elastic`, during the half of another piece.

Finished caches are copied to the host in parts, during steps.
"""

from collections.abc import Mapping
import os
from typing import Any

import numpy as np

from caatnet.benchmarks.elastic import ring
from caatnet.benchmarks.harness import namespaces, setup, timing
from caatnet.benchmarks.serving import decoders, engine, host_copies
from caatnet.config import inference
from caatnet.models.nanobatches import even
from caatnet.show import tables
from parallel.nanobatches.nanobatch import Costs, Reduction, step_seconds

_KIND = "caatnet.benchmarks.serving.nanobatch_peer:Rank"


def run(config: Any) -> dict[str, Any]:
  """Measures, prints tables, and returns them as plain data.

  Args:
    config: Config like configs/benchmark/nanobatches.py.

  Raises:
    ValueError: A step has fewer decodes than pieces.
  """
  options = config.benchmark
  try:
    even(options.decodes, max(options.cuts, default=1))
  except ValueError as error:
    raise ValueError(
      f"config.benchmark.cuts={options.cuts}: {error}: "
      f"config.benchmark.decodes={options.decodes}"
    ) from error
  rates = _rates(config) if options.pieces else []
  if rates:
    tables.table(
      "tokens per second of the engine: median (range) of rounds, and the "
      "ratio to the first row within a round",
      ["nano-batches", "tokens/s", "ratio"],
      [
        [str(r["nanobatches"]), timing.range_text(r["rate"]),
         timing.range_text(r["ratio"], ".3f")]
        for r in rates
      ],
    )
  rows = []
  links = options.mbit if options.cuts else ()
  if links and os.geteuid():
    print("links are shaped by root only: left out")
  else:
    rows = [row for mbit in links for row in _linked(config, mbit)]
  if rows:
    _show_linked(rows, options.decodes)
  return {
    "environment": setup.one_device(), "load_average": os.getloadavg(),
    "rates": rates, "linked": rows,
    "copies": host_copies.run(config) if options.parts else [],
  }


def _show_linked(rows: list[dict[str, Any]], decodes: int) -> None:
  tables.table(
    f"ms of a step of {decodes} decodes by two processes: median (range)",
    ["Mbit/s", "nano-batches", "products alone", "sums alone", "step",
     "predicted", "predicted / step", "one batch / this"],
    [
      [str(r["mbit"]), str(r["pieces"]),
       *(timing.range_text(1e3 * np.array(r[key]), ".1f")
         for key in ("products", "sums", "step", "predicted")),
       timing.range_text(
         np.array(r["predicted"]) / np.array(r["step"]), ".2f"
       ), timing.range_text(r["gain"], ".2f")]
      for r in rows
    ],
  )


def _rates(config: Any) -> list[dict[str, Any]]:
  """Times the engine with each number of pieces, in alternation."""
  options = config.benchmark
  prompts = np.random.default_rng(0).integers(
    config.model.vocab_size, size=(options.batch, options.prompt)
  )
  measures = {}
  for value in options.pieces:
    own = setup.without_benchmark(config)
    with own.unlocked():
      own.inference.update({
        "batch": options.batch, "context": options.prompt + options.tokens,
        "nanobatches": value,
      })
    decoder = decoders.decoder(inference.build(own))
    measures[value] = lambda decoder=decoder: engine.driven(
      decoder, prompts, options
    )
  found = timing.in_turns(measures, options.rounds)
  seconds = {key: np.array(each)[:, 0] for key, each in found.items()}
  first = next(iter(seconds.values()))
  return [
    {"nanobatches": key, "rate": (options.batch / each).tolist(),
     "ratio": (first / each).tolist()}
    for key, each in seconds.items()
  ]


def _linked(config: Any, mbit: int) -> list[dict[str, Any]]:
  """Returns the rows of a link, one for each number of pieces."""
  options = config.benchmark
  with namespaces.long_link(mbit, 0) as (hosts, prefixes), ring.Peers(
    hosts, prefixes, _KIND
  ) as peers:
    peers.do("arrays", lambda _: {"size": 1})
    peers.connect(1)
    peers.do("build", lambda _: {
      "model": {
        key: config.model[key]
        for key in ("vocab_size", "width", "num_layers", "num_heads",
                    "num_kv_heads", "ffn_width")
      }, "decodes": options.decodes, "context": options.context,
    })
    found = timing.in_turns(
      {
        (what, cut): lambda what=what, cut=cut: _checked(
          peers.do("step", lambda _: {"what": what, "cut": cut}).found
        )
        for cut in options.cuts for what in ("products", "sums", "step")
      },
      options.rounds, label=f"{mbit} Mbit/s",
    )
  return [{"mbit": mbit, **row} for row in _rows(config, found)]


def _rows(
  config: Any, found: Mapping[tuple[str, int], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
  """Returns the seconds of each number of pieces, round by round.

  Args:
    config: Config of the benchmark.
    found: (what, number of pieces) -> results of `_checked`, one per round.

  Raises:
    RuntimeError: Pieces change the result of a step by more than a thousandth.
  """
  cuts = config.benchmark.cuts
  ends = {cut: found["step", cut][0]["end"] for cut in cuts}
  if np.ptp(list(ends.values())) > 1e-3 * max(ends.values()):
    raise RuntimeError(f"pieces change the result of a step: {ends}")
  rows = []
  for cut in cuts:
    predicted = [
      _predicted(config, cut, products, sums)
      for products, sums in zip(
        found["products", cut], found["sums", cut], strict=True
      )
    ]
    first, step = (
      np.array([each["seconds"] for each in found["step", c]])
      for c in (cuts[0], cut)
    )
    rows.append({
      "pieces": cut, "step": step.tolist(), "predicted": predicted,
      "gain": (first / step).tolist(),
      **{
        what: [each["seconds"] for each in found[what, cut]]
        for what in ("products", "sums")
      },
    })
  return rows


def _checked(found: list[dict[str, Any]]) -> dict[str, Any]:
  """Returns the slower rank's times; the ranks' results must be equal.

  Raises:
    RuntimeError: They are not.
  """
  if len({each["end"] for each in found}) > 1:
    raise RuntimeError(f"the ranks have different results: {found}")
  return max(found, key=lambda each: each["seconds"])


def _predicted(
  config: Any, cut: int, products: dict[str, Any], sums: dict[str, Any]
) -> float:
  """Returns the step time of the plan's model, in seconds."""
  layers, tokens = config.model.num_layers, config.benchmark.decodes
  # Times of a piece of the mean size; `nanobatch_peer` cuts evenly.
  at = np.array([0, tokens // cut, tokens + 1])

  def table(seconds: float) -> np.ndarray:
    each = seconds / (layers * cut)
    return np.interp(np.arange(tokens + 1), at, [0, each, each])

  reduction = Reduction(bits=32)
  costs = Costs(
    "rank", layers, table(products["attention"]), table(products["mlp"]),
    {reduction: table(sums["seconds"] / 2)},
  )
  return float(step_seconds(costs, reduction, [tokens // cut] * cut, 0.0))
