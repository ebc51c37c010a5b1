"""Our training steps and decoding, and those of other projects, in turns.

Each other project runs in a process of its own, which waits while others run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import os
import pathlib
import sys
from typing import Any

import jax
import numpy as np

from caatnet.benchmarks.harness import environments, processes, setup, timing
from caatnet.benchmarks.peers import over_http
from caatnet.benchmarks.serving import decoders, decoding
from caatnet.benchmarks.training import train_step
from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.show import tables
from caatnet.train.throughput import matmul_rate
from parallel.memory import rates

_HERE = pathlib.Path(__file__).parent
# Elements of the array whose read bandwidth is measured: 512 MB, far more than
# caches.
_READ = 2**27
_KEY = "config.benchmark.python"

# Function that runs a turn, and returns its measure.
Turn = Callable[[], float]


def run(config: Any) -> dict[str, Any]:
  """Measures, prints tables, and returns them as plain data.

  Args:
    config: Config like configs/benchmark/peers.py.

  Raises:
    ValueError: An environment cannot be made, or a peer does not run.
  """
  options = config.benchmark
  python = options.python
  if not python and options.packages:
    python = str(environments.create(
      pathlib.Path(options.folder), options.packages
    ))
  training = _training(config, python)
  decoded = [
    row for batch in options.batches for row in _decoding(config, python, batch)
  ]
  served = over_http.rows(config) if options.vllm else []
  limits = {
    "matmul_flops_per_second": matmul_rate(
      experiments.build(
        setup.without_benchmark(config), None, jax.devices()[:1]
      ).program.layout.mesh, "float32",
    ),
    "read_bytes_per_second": _read_rate(options.threads),
  }
  _print(config, training, decoded, limits)
  if served:
    over_http.show(served)
  return {
    "environment": setup.one_device(), "load": os.getloadavg(),
    "limits": limits, "training": training, "decoding": decoded,
    "http": served,
  }


def _read_rate(threads: int) -> float:
  """Returns the bytes per second of reads of an array in memory."""
  array = np.ones(_READ, np.float32)
  return rates.measure([array, array, array], threads, ["read"])["read"]


def _training(config: Any, python: str) -> list[dict[str, Any]]:
  """Returns a row for each training step."""
  options = config.benchmark
  tokens = setup.token_batch(config)
  base = setup.without_benchmark(config)
  turns: dict[str, Turn] = {}
  facts: dict[str, dict[str, Any]] = {}
  with contextlib.ExitStack() as stack:
    for label, overrides in options.variants:
      ours = experiments.build(
        override(base, overrides), None, jax.devices()[:1]
      )
      step = train_step.our_runner(ours, tokens).step
      turns[label] = functools.partial(_steps_s, step, options.steps)
      facts[label] = {
        "num_params": ours.program.model.num_params,
        "flops": ours.flops_per_step,
      }
    for command, needs, environment, sizes in _peers(config, python):
      ask = stack.enter_context(processes.answering(
        _KEY, command, needs, environment=environment
      ))
      found = ask(sizes)
      turns[found["name"]] = functools.partial(_asked_s, ask, options.steps)
      facts[found["name"]] = found
    seconds = timing.in_turns(
      turns, options.rounds, warm_up=1, label="training steps"
    )
  count = tokens[:, 1:].size
  return [
    {
      "by": name, **facts[name], "seconds": found,
      "tokens_per_second": [count / s for s in found],
    }
    for name, found in seconds.items()
  ]


def _peers(
  config: Any, python: str
) -> Iterator[tuple[list[str], str, dict[str, str], dict[str, Any]]]:
  """Yields command, needs, environment and first line of each peer."""
  options, model, data = config.benchmark, config.model, config.data
  batch = {"batch": data.batch_size, "length": data.seq_len}
  if python:
    # -P: the script's directory is not searched for modules to import.
    yield (
      [python, "-P", str(_HERE / "torch_step.py")], "torch and transformers",
      {},
      batch | {
        "threads": options.threads,
        "model": decoding.llama_sizes(model, data.seq_len),
      },
    )
  if options.nanodo:
    yield (
      [sys.executable, "-P", str(_HERE / "nanodo_step.py")],
      "nanodo in config.benchmark.nanodo, flax and optax",
      {"PYTHONPATH": os.path.abspath(options.nanodo), "JAX_PLATFORMS": "cpu"},
      batch | {"model": {
        "D": model.width, "H": model.num_heads, "L": data.seq_len,
        "N": model.num_layers, "V": model.vocab_size,
        # Two matrices instead of three.
        "F": model.ffn_width * 3 // 2,
      }},
    )


def _steps_s(step: Callable[[], None], count: int) -> float:
  """Returns the mean seconds of our steps."""
  return timing.seconds(lambda: [step() for _ in range(count)]) / count


def _asked_s(ask: Callable[[Any], Any], count: int) -> float:
  """Returns the mean seconds of a peer's steps."""
  return float(ask({"steps": count})["seconds"])


def _decoding(
  config: Any, python: str, batch: int
) -> Iterator[dict[str, Any]]:
  """Yields a row for our decoding, and one for each peer's."""
  options = config.benchmark
  decoder = decoders.decoder(decoders.built(
    config, batch=batch, context=options.prompt + options.tokens
  ))
  asked = {"batch": batch, "prompt": options.prompt, "tokens": options.tokens}
  vocab_size = config.model.vocab_size
  turns: dict[str, Turn] = {
    "caatnet": lambda: decoding.generate(
      decoder, vocab_size, asked
    )["tokens_per_second"],
  }
  with contextlib.ExitStack() as stack:
    if python:
      ask, facts = stack.enter_context(
        decoding.hugging_face(_KEY, python, config)
      )
      drawn = batch * (options.tokens - 1)  # the first token is the prefill's
      turns[
        f"transformers {facts['transformers']}, torch {facts['torch']}"
      ] = lambda: drawn / ask(asked)["decode_seconds"]
    found = timing.in_turns(
      turns, options.rounds, warm_up=1, label=f"decoding, {batch} at a time"
    )
  params = decoder.weights.params
  weights = sum(x.nbytes for x in jax.tree.leaves(params))
  weights -= params["embedding"].nbytes  # of which a step reads rows
  for name, rate in found.items():
    yield {
      "batch": batch, "by": name, "tokens_per_second": rate,
      # A step reads all weights once.
      "weight_bytes_per_second": [weights * r / batch for r in rate],
    }


def _print(
  config: Any, training: Sequence[Mapping[str, Any]],
  decoded: Sequence[Mapping[str, Any]], limits: Mapping[str, float],
) -> None:
  products = limits["matmul_flops_per_second"]
  read = limits["read_bytes_per_second"]
  first = training[0]

  def ratio(row: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    return timing.range_text(
      np.array(base["tokens_per_second"]) / row["tokens_per_second"], ".2f"
    )

  tables.table(
    f"training step, {config.data.batch_size} x {config.data.seq_len} tokens, "
    f"float32; products {products / 1e9:.0f} GFLOP/s; median (range)",
    ["by", "parameters", "tokens/s", f"{first['by']} is x times as fast",
     "of products"],
    [
      [
        row["by"], f"{row['num_params'] / 1e6:.1f}M",
        timing.range_text(row["tokens_per_second"]), ratio(row, first),
        f"{row['flops'] / np.median(row['seconds']) / products:.0%}"
        if "flops" in row else "",
      ]
      for row in training
    ],
  )
  tables.table(
    f"decoding, float32; reads of memory {read / 1e9:.1f} GB/s",
    ["sequences", "by", "tokens/s", "caatnet is x times as fast",
     "weights, GB/s"],
    [
      [
        str(row["batch"]), row["by"],
        timing.range_text(row["tokens_per_second"]),
        ratio(row, next(r for r in decoded if r["batch"] == row["batch"])),
        timing.range_text(
          np.array(row["weight_bytes_per_second"]) / 1e9, ".1f"
        ),
      ]
      for row in decoded
    ],
  )
