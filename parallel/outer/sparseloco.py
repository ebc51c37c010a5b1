"""SparseLoCo: DiLoCo with a few large elements, and error feedback as momentum.

    e_m <- decay * e_m + (phi - theta_m)
    c_m  = the k largest of each chunk of e_m, two bits each;  e_m <- e_m - c_m
    phi <- phi - rate * mean over m of c_m;  theta_m <- phi

Payloads go by all-gather, uint16 positions (12 bits would do at the usual
chunk of 4096), 2-bit values and two float32 magnitudes per chunk; sums are in
the order of workers.

Source: Sarfi et al., "Communication efficient LLM pre-training with
SparseLoCo", arXiv 2508.15706.
"""

import dataclasses
import math
from typing import Any

import jax
import optax

from parallel import quantize
from parallel.kernels.codec import top_k
from parallel.outer.base import (
  OuterLoop,
  Params,
  Plan,
  State,
  at_path,
  stacked_zeros,
  to_workers,
)


@dataclasses.dataclass(frozen=True)
class SparseLoCo(OuterLoop):
  """Sparse exchange every ``every`` steps.

  Attributes:
    every: H, inner steps per round.
    rate: Outer learning rate.
    block_dims: In the shape of the parameters: how many leading dims of each no
      chunk crosses.
    decay: What remains of e_m in each round.
    chunk: Elements per chunk.
    top_k: Kept elements per chunk.
  """

  every: int
  rate: float
  block_dims: Any
  decay: float
  chunk: int
  top_k: int

  def __post_init__(self) -> None:
    if not 4 <= self.top_k <= self.chunk <= 65536 or self.top_k % 4:
      raise ValueError(
        f"top_k={self.top_k} must be a multiple of 4 in "
        f"[4, chunk={self.chunk}], and the chunk at most 65536"
      )

  @property
  def period(self) -> int:
    return self.every

  def init(self, params: Params) -> State:
    return {
      "params": params,
      "workers": {"residual": stacked_zeros(params, self.worker)},
    }

  def plan(self, step: int) -> Plan:
    return Plan((step + 1) % self.every == 0)

  def finish(
    self, params: Params, updates: Params, state: State, plan: Plan
  ) -> tuple[Params, State]:
    params = optax.apply_updates(params, updates)
    if not plan.variant:
      return params, state
    outer = state["params"]
    total = jax.tree.map(
      lambda e, phi, theta: self.decay * e + (phi - theta),
      state["workers"]["residual"], outer, params,
    )
    leaves, treedef = jax.tree.flatten_with_path(total)
    means, left = [], []
    for path, leaf in leaves:
      mean, own = self._mean(leaf, at_path(self.block_dims, path))
      means.append(mean)
      left.append(leaf - own)
    outer = jax.tree.map(
      lambda phi, mean: phi - self.rate * mean, outer, treedef.unflatten(means)
    )
    workers = {"residual": treedef.unflatten(left)}
    state = state | {"params": outer, "workers": workers}
    return to_workers(outer, self.worker), state

  def _mean(
    self, x: jax.Array, block_dims: int
  ) -> tuple[jax.Array, jax.Array]:
    """``[W, ...]`` -> what all hear on average, and what of each is heard."""
    n = math.prod(x.shape[1 + block_dims :])
    rows = x.reshape(*x.shape[: 1 + block_dims], n)
    encoded = top_k.encode_top_k(rows, self.chunk, self.top_k)

    def decode(encoded):
      return top_k.decode_top_k(encoded, n, self.chunk)

    total = quantize.mean_of_encoded(encoded, self.worker, decode)
    own = decode(encoded)
    return total.reshape(x.shape[1:]), own.reshape(x.shape)

  def evaluated(self, params: Params, state: State) -> Params:
    return state["params"]

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    if self.worker.devices == 1:
      return {}
    chunks = 0
    for path, leaf in jax.tree.leaves_with_path(shapes):
      dims = at_path(self.block_dims, path)
      row = math.prod(leaf.shape[dims:])
      chunks += math.prod(leaf.shape[:dims]) * -(-row // self.chunk)
    chunks *= self.worker.lanes
    return {
      "uint16": chunks * self.top_k * 2,
      "uint8": chunks * self.top_k // 4,
      "float32": chunks * 2 * 4,
    }
