"""The range of every number in a config, in one table.

What depends on other values, such as that a rank's share is whole, is checked
where these meet. Here is what a number must be whatever the others are.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import math
import numbers
from typing import Any

import numpy as np

_TINY = float(np.finfo(np.float32).tiny)
_HUGE = float(np.finfo(np.float32).max)
# Sizes and counts are int32 in compiled programs.
_LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Range:
  """Numbers between two bounds, finite and as float32 has them.

  A rate that float32 takes for 0 trains nothing, and a decay that it takes for
  1 divides by 0.

  Attributes:
    low: The lower bound.
    high: The upper bound; infinity for none.
    above: Whether the lower bound itself is refused.
    below: Whether the upper bound itself is refused.
    whole: Whether only integers are in the range.
  """

  low: float
  high: float = math.inf
  above: bool = False
  below: bool = False
  whole: bool = False

  def __contains__(self, value: Any) -> bool:
    kind = numbers.Integral if self.whole else numbers.Real
    if not isinstance(value, kind) or isinstance(value, bool):
      return False
    if not self.whole:
      if not abs(value) <= _HUGE:
        return False
      value = np.float32(value) if abs(value) >= _TINY else 0
    return (
      (self.low < value if self.above else self.low <= value)
      and (value < self.high if self.below else value <= self.high)
    )

  def __str__(self) -> str:
    """Says what a number must, as in "be an integer from 1 to 9"."""
    if self.whole:
      return f"be an integer from {self.low} to {self.high}"
    if self.high == math.inf:
      bound = "positive" if self.above else f"at least {self.low}"
      return f"be {bound} and finite (float32)"
    left, right = "(" if self.above else "[", ")" if self.below else "]"
    return f"lie in {left}{self.low}, {self.high}{right}"


COUNT = Range(1, _LARGEST, whole=True)
COUNT_OR_NONE = Range(0, _LARGEST, whole=True)
BYTES = Range(1, 2**53, whole=True)  # times are computed in float64
SEED = Range(0, 2**32 - 1, whole=True)
POSITIVE = Range(0, above=True)
NOT_NEGATIVE = Range(0)
FRACTION = Range(0, 1)
POSITIVE_FRACTION = Range(0, 1, above=True)
DECAY = Range(0, 1, below=True)

# Keys without their choices: equal keys of two models, optimizers or outer
# loops have equal ranges. All values of a tuple must be in its range. For "*"
# stand the names that a config gives to sections which are alike.
RANGES = {
  "seed": SEED,
  "model.vocab_size": COUNT,
  "model.width": COUNT,
  "model.num_layers": COUNT,
  "model.num_heads": COUNT,
  "model.num_kv_heads": COUNT,
  "model.ffn_width": COUNT,
  "model.head_width": COUNT_OR_NONE,
  "model.sliding_window": COUNT_OR_NONE,
  "model.rope_base": Range(1),
  "model.norm_eps": POSITIVE,
  "model.init_std": POSITIVE,
  "model.unroll": COUNT,
  "model.rnn_width": COUNT,
  "model.conv_width": Range(2, _LARGEST, whole=True),
  "model.widths": COUNT,
  "model.blocks": COUNT,
  "model.groups": COUNT,
  "sync.p": FRACTION,
  "sync.p_attention": FRACTION,
  "sync.p_mlp": FRACTION,
  "parallel.worker": COUNT,
  "parallel.data": COUNT,
  "parallel.stage": COUNT,
  "parallel.tensor": COUNT,
  "parallel.device_order": COUNT_OR_NONE,
  "pipeline.chunks": COUNT,
  "outer.every": COUNT,
  "outer.learning_rate": POSITIVE,
  "outer.momentum": DECAY,
  "outer.block": COUNT_OR_NONE,
  "outer.outlier_factor": NOT_NEGATIVE,
  "outer.weights": POSITIVE,
  "outer.clients": COUNT_OR_NONE,
  "outer.fragment_layers": COUNT_OR_NONE,
  "outer.overlap": COUNT_OR_NONE,
  "outer.keep": FRACTION,
  "outer.pieces": COUNT,
  "outer.compensation": NOT_NEGATIVE,
  "outer.chunk": COUNT,
  "outer.top_k": COUNT,
  "outer.error_decay": FRACTION,
  # A pull of 2 or more drives pairs apart (`parallel.outer.noloco`).
  "outer.pull": Range(0, 2, below=True),
  "zero.block": COUNT_OR_NONE,
  "zero.coded_blocks": COUNT_OR_NONE,
  "data.seq_len": COUNT,
  "data.batch_size": COUNT,
  "data.validation_percent": Range(0, 100, above=True, below=True),
  "data.validation_windows": COUNT_OR_NONE,
  "data.shape": COUNT,
  "data.num_classes": COUNT,
  "data.num_features": COUNT,
  "data.fanouts": COUNT,
  "data.validation_nodes": COUNT_OR_NONE,
  "data.threads": COUNT_OR_NONE,
  "data.cache_rows": COUNT_OR_NONE,
  "data.ahead": COUNT_OR_NONE,
  "optimizer.learning_rate": POSITIVE,
  "optimizer.warmup_steps": COUNT_OR_NONE,
  "optimizer.decay_steps": COUNT_OR_NONE,
  "optimizer.final_fraction": FRACTION,
  "optimizer.beta_1": DECAY,
  "optimizer.beta_2": DECAY,
  "optimizer.eps": POSITIVE,
  "optimizer.weight_decay": NOT_NEGATIVE,
  "optimizer.clip_norm": NOT_NEGATIVE,
  "optimizer.momentum": DECAY,
  "train.num_steps": COUNT,
  "train.accumulation": COUNT,
  "elastic.alone_s": POSITIVE,
  "elastic.lanes": COUNT,
  "train.log_every": COUNT,
  "train.eval_every": COUNT,
  "train.checkpoint_every": COUNT,
  "train.keep_checkpoints": COUNT,
  "inference.batch": COUNT,
  "inference.context": COUNT,
  "inference.page_size": COUNT,
  "inference.pages": COUNT_OR_NONE,
  "inference.chunk": COUNT,
  "serving.host_pages": COUNT_OR_NONE,
  "serving.growth": COUNT,
  "serving.wait_s": NOT_NEGATIVE,
  "serving.queue": COUNT_OR_NONE,
  "serving.choices": COUNT,
  "serving.max_tokens": COUNT_OR_NONE,
  "serving.body_bytes": COUNT,
  "serving.read_s": POSITIVE,
  "serving.write_s": POSITIVE,
  "serving.drain_s": NOT_NEGATIVE,
  "sweep.seeds": SEED,
  "benchmark.workers": COUNT,
  "benchmark.replaced": COUNT,
  "benchmark.num_programs": COUNT,
  "benchmark.seed": SEED,
  "benchmark.events": COUNT,
  "benchmark.minutes": NOT_NEGATIVE,
  "benchmark.seeds": SEED,
  "benchmark.gap_s": POSITIVE,
  "benchmark.pause_s": NOT_NEGATIVE,
  "benchmark.silence_s": POSITIVE,
  "benchmark.limit_s": POSITIVE,
  "benchmark.parameters": COUNT,
  "benchmark.samples": COUNT,
  "benchmark.rounds": COUNT,
  "benchmark.windows": COUNT,
  "benchmark.chunk": COUNT,
  "benchmark.head_widths": COUNT,
  "benchmark.kv_heads": COUNT,
  "benchmark.batches": COUNT,
  "benchmark.prompt": COUNT,
  "benchmark.tokens": COUNT,
  "benchmark.threads": COUNT,
  "benchmark.size_bytes": BYTES,
  "benchmark.buffers": COUNT,
  "benchmark.tori": COUNT,
  "benchmark.meshes": COUNT,
  "benchmark.num_random": COUNT,
  "benchmark.max_nodes": COUNT,
  "benchmark.processes": COUNT,
  "benchmark.running": COUNT,
  "benchmark.waiting": COUNT,
  "benchmark.streams": COUNT,
  "benchmark.pages.*": COUNT,
  "benchmark.warm_up": COUNT_OR_NONE,
  "benchmark.steps": COUNT,
  "benchmark.frequency": FRACTION,
  "benchmark.stay": FRACTION,
  "benchmark.clients": COUNT,
  "benchmark.requests": COUNT,
  "benchmark.slots": COUNT,
  "benchmark.load": POSITIVE,
  "benchmark.megabytes": COUNT,
  "benchmark.peers": COUNT,
  "benchmark.lanes": COUNT,
  "benchmark.block_bytes": COUNT,
  "benchmark.send_buffer": COUNT_OR_NONE,
  "benchmark.shaped_rounds": COUNT,
  "benchmark.shaped_block_bytes": COUNT,
  "benchmark.most": COUNT,
  "benchmark.stages": COUNT,
  "benchmark.microbatches": COUNT,
  "benchmark.layers": COUNT,
  "benchmark.width": COUNT,
  "benchmark.chunks": COUNT,
  "benchmark.timed": COUNT,
  "benchmark.exact": COUNT,
  "benchmark.solved": COUNT,
  "benchmark.certified": COUNT,
  "benchmark.premise": COUNT,
  "benchmark.regret": COUNT,
  "benchmark.sizes": Range(2, 8, whole=True),
  "benchmark.batch_size": COUNT,
  "benchmark.drawn": COUNT,
  "benchmark.within": Range(1),
  "benchmark.rates": POSITIVE,
  "benchmark.flops": POSITIVE,
  "benchmark.quota": FRACTION,
  "benchmark.positions": COUNT,
  "benchmark.grids": COUNT,
  "benchmark.large": COUNT,
  "benchmark.examples": COUNT,
  "benchmark.scale": Range(1, 30, whole=True),
  "benchmark.num_edges": COUNT,
  "benchmark.num_features": COUNT,
  "benchmark.fanouts": COUNT,
  "benchmark.shares": FRACTION,
  "benchmark.large.scale": Range(1, 30, whole=True),
  "benchmark.large.num_edges": COUNT,
  "benchmark.large.num_features": COUNT,
  "benchmark.large.steps": COUNT,
  "benchmark.large.limit_mb": COUNT,
  "benchmark.predicted.gather": POSITIVE,
  "benchmark.predicted.memory": POSITIVE,
  "benchmark.predicted.link_share": POSITIVE_FRACTION,
  "benchmark.predicted.utilisation": POSITIVE_FRACTION,
  "benchmark.predicted.hidden": COUNT,
  "benchmark.predicted.distinct": POSITIVE_FRACTION,
  "graph.scale": Range(1, 30, whole=True),
  "graph.num_edges": COUNT_OR_NONE,
  "graph.num_nodes": COUNT,
  "graph.mean_degree": NOT_NEGATIVE,
  "graph.num_features": COUNT,
  "graph.num_classes": COUNT,
  "graph.inside": FRACTION,
  "graph.quarters": FRACTION,
  "graph.signal": NOT_NEGATIVE,
  "graph.seed": SEED,
  # Studies have their keys at the top, or in sections of their own.
  "features": COUNT,
  "num_rows": COUNT,
  "num_ids": COUNT,
  "offset": COUNT_OR_NONE,
  "largest": COUNT,
  "num_requests": COUNT_OR_NONE,
  "server.slots": COUNT,
  "server.tokens": COUNT,
  "server.page_size": COUNT,
  "server.pages": Range(2, _LARGEST, whole=True),
  "server.steps_ahead": COUNT,
  "percentiles": Range(0, 100, whole=True),
  "tolerance": FRACTION,
  "change": Range(0, 1, below=True),
  "arm.growth": COUNT,
  "arm.wait_s": NOT_NEGATIVE,
  "arms.*.growth": COUNT,
  "arms.*.wait_s": NOT_NEGATIVE,
  "clients.*.requests": COUNT,
  "clients.*.rate": NOT_NEGATIVE,
  "clients.*.prompt": COUNT,
  "clients.*.output": COUNT,
  "clients.*.shared": COUNT,
  "clients.*.priority": COUNT_OR_NONE,
  "hardware.utilisation": POSITIVE_FRACTION,
  "hardware.memory_fraction": POSITIVE_FRACTION,
  "hardware.memory_share": POSITIVE_FRACTION,
  "hardware.page_size": COUNT,
  "hardware.pages": COUNT_OR_NONE,
  "hardware.copy_rate": POSITIVE,
  "hardware.copy_call_s": NOT_NEGATIVE,
  "hardware.host_bytes": NOT_NEGATIVE,
  "limits.slots": COUNT,
  "limits.tokens": COUNT,
  "limits.steps_ahead": COUNT,
  "priorities.frequency": FRACTION,
  "priorities.levels": COUNT,
  "sessions.num_sessions": COUNT,
  "sessions.rate": POSITIVE,
  "sessions.turns": Range(1),
  "sessions.think_s": NOT_NEGATIVE,
  "sessions.seed": SEED,
  "sessions.longest_answer": COUNT,
  "loads": POSITIVE,
  "seeds": SEED,
  "ranks": Range(2, _LARGEST, whole=True),
  "shares": FRACTION,
  "shares_rate": POSITIVE,
  "size_bytes": BYTES,
  "picture_round": COUNT_OR_NONE,
  "pipeline.stages": COUNT,
  "pipeline.microbatches": COUNT,
  "work.forward_s": POSITIVE,
  "work.input_s": POSITIVE,
  "work.weight_s": POSITIVE,
  "work.factors": POSITIVE,
  "boundary_bytes": BYTES,
  "activation_bytes": BYTES,
  "planner.utilisation": POSITIVE_FRACTION,
  "planner.chunks": COUNT,
  "planner.most_microbatches": COUNT,
  "planner.top": COUNT,
  "planner.ordered": COUNT,
  "planner.second.best": COUNT_OR_NONE,
  "planner.second.p": DECAY,
  "planner.second.every": COUNT,
  "planner.second.overlap": COUNT_OR_NONE,
  "batch_size": COUNT,
  "annealed": COUNT,
  "steps": COUNT,
  "pieces": COUNT_OR_NONE,
  "failed_uplinks": COUNT_OR_NONE,
  # Sizes of messages in MSCCL files, which are int64.
  "export.min_bytes": Range(0, 2**63 - 1, whole=True),
  "export.max_bytes": Range(0, 2**63 - 1, whole=True),
  "round_steps": COUNT,
  "targets": Range(0, 1, above=True, below=True),
  "num_draws": COUNT,
  "p": FRACTION,
  "every": COUNT,
  "batch": COUNT,
  "context": COUNT,
  "prompt": COUNT_OR_NONE,
  "compute_factor": POSITIVE,
  "threshold": FRACTION,
  "memory_gb": POSITIVE,
  "utilisation": POSITIVE_FRACTION,
  "parameters": POSITIVE,
  "num_layers": COUNT,
  "tokens": COUNT,
  "accumulation": COUNT,
  "accumulations": COUNT,
  "weight_bytes": COUNT,
  "gradient_bytes": COUNT,
  "recommend.parameters": POSITIVE,
  "recommend.num_layers": COUNT,
  "recommend.step_seconds": POSITIVE,
  "recommend.target": Range(0, 1, above=True, below=True),
  "recommend.volume_factor": POSITIVE,
  "recommend.sync_every": COUNT,
  "recommend.overlap_steps": COUNT_OR_NONE,
  "recommend.bits": POSITIVE,
}


def check(config: Mapping[str, Any]) -> None:
  """Refuses numbers that are out of their range.

  Args:
    config: A config, or its sections as nested dicts. Keys that the table does
      not have are left to whoever reads them.

  Raises:
    ValueError: A number is not in its range, or is no number; the message has
      key, value and range.
  """
  for key, value in _leaves(config):
    allowed = RANGES.get(general(key))
    for number in () if allowed is None else _flat(value):
      if number not in allowed:
        raise ValueError(f"config.{key}={number!r} must {allowed}")


def general(key: str) -> str:
  """Returns a key as the table has it, with "*" for a name of the config's."""
  parts = key.split(".")
  for place in range(1, len(parts)):
    found = ".".join([*parts[:place], "*", *parts[place + 1 :]])
    if found in RANGES:
      return found
  return key


def _leaves(
  config: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
  """Yields all values of a config with their keys, dots between sections."""
  for key, value in config.items():
    if hasattr(value, "items"):
      yield from _leaves(value, f"{prefix}{key}.")
    else:
      yield prefix + key, value


def _flat(value: Any) -> Iterator[Any]:
  """Yields a number, or all numbers of a tuple or of tuples in it."""
  if isinstance(value, tuple | list):
    for part in value:
      yield from _flat(part)
  else:
    yield value
