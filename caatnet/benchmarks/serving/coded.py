"""Benchmark of the loss of a model with int8 weights and an int8 cache."""

from typing import Any

import jax
import numpy as np

from caatnet.config import experiments, inference
from caatnet.inference.decoder import empty_state, make_forward, state_specs
from caatnet.models.paged import Batch
from caatnet.show import tables
from caatnet.train.records import environment


def run(config: Any) -> dict[str, Any]:
  """Measures, prints a table, and returns it as plain data.

  Args:
    config: Config like configs/benchmark/coded.py.
  """
  options = config.benchmark
  experiment = experiments.from_folder(options.workdir)
  data = experiment.data.load(experiment.seed)
  windows = np.asarray(data.validation)[: options.windows]
  rows = []
  for weights in ("float", "int8"):
    for cache in ("float", "int8"):
      made, params, step = inference.from_folder(
        options.workdir, None,
        f"inference.batch=1 inference.context={windows.shape[1] - 1} "
        f"inference.chunk={options.chunk} inference.weights={weights} "
        f"inference.cache={cache}",
      )
      stored = made.weights(params)
      rows.append({
        "weights": weights,
        "cache": cache,
        "loss": _loss(made, stored, windows),
        "weight_bytes": sum(
          x.nbytes for x in jax.tree.leaves(stored.params)
        ),
        "cache_bytes_per_token": made.cache_shape.size_bytes
        * made.program.layout.tensor.size
        / (made.cache_shape.num_pages * made.cache_shape.page_size),
      })
  first = rows[0]["loss"]
  tables.table(
    f"{options.workdir}, step {step}: {windows[:, 1:].size} tokens, read in "
    f"chunks of {options.chunk} through the cache, all ranks' bytes",
    ["weights", "cache", "nats per token", "difference", "weights, MB",
     "cache, bytes per token"],
    [
      [r["weights"], r["cache"], f"{r['loss']:.5f}",
       f"{r['loss'] - first:+.5f}", f"{r['weight_bytes'] / 1e6:.3f}",
       f"{r['cache_bytes_per_token']:,.0f}"]
      for r in rows
    ],
  )
  return {"environment": environment(made.program.layout.mesh), "rows": rows}


def _loss(made: Any, stored: Any, windows: np.ndarray) -> float:
  """Returns the mean loss of windows ``[N, T + 1]`` in nats, one at a time."""
  program, capacity = made.program, made.capacity
  if program.layout.num_data_ranks > 1:
    raise ValueError("config.parallel.data of the run must be 1")
  forward = make_forward(program, stored, made.cache_shape)
  cache = jax.jit(
    lambda: empty_state(program, capacity, made.cache_shape)[0],
    out_shardings=program.layout.shardings(
      state_specs(program, made.cache_shape)[0]
    ),
  )()
  size, total = capacity.chunk, 0.0
  table = np.arange(capacity.pages_per_sequence)
  for window in windows:
    for start in range(0, len(window) - 1, size):
      tokens = window[start : min(start + size, len(window) - 1)]
      targets = window[start + 1 : start + 1 + len(tokens)]
      padding = (0, size - len(tokens))
      positions = start + np.arange(size)
      batch = Batch(
        tokens=np.pad(tokens, padding),
        positions=positions,
        # Sequence 0 has its pages in order, so positions equal places.
        places=np.pad(
          positions[: len(tokens)], padding, constant_values=-1
        ),
        tables=table[None],
        rows=np.arange(size),
        sequences=np.array([-1]),
        num_decodes=0,
      )
      batch = jax.tree.map(lambda x: x[None].astype(np.int32), batch)
      logits, cache = forward(stored.params, cache, batch)
      # [1, ranks, chunk, V] -> [chunk, vocabulary]
      joined = np.moveaxis(np.asarray(logits)[0], 0, 1).reshape(size, -1)
      joined = joined[: len(tokens)].astype(np.float64)
      joined -= joined.max(axis=1, keepdims=True)
      found = joined[np.arange(len(tokens)), targets]
      total += float(np.sum(np.log(np.exp(joined).sum(axis=1)) - found))
  return total / windows[:, 1:].size
