"""Tensor rank of `caatnet.benchmarks.serving.nanobatches`, one per process."""

import functools
import time
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from caatnet.benchmarks.elastic import ring_peer
from caatnet.benchmarks.harness.sockets import LIMIT_S
from caatnet.models.nanobatches import even, split
from caatnet.models.paged import Batch, Cache, CacheShape
from caatnet.models.transformer.config import TransformerConfig
from caatnet.models.transformer.module import Transformer
from parallel.axes import Axis
from parallel.elastic.ring import link_collectives
from parallel.tensor.partial_sync import PartialSync
from parallel.tensor.stream import Stream, Update

_PAGE = 16


class Rank(ring_peer.Peer):
  """One of two ranks: half of the heads and of the MLP of each layer."""

  def build(
    self, model: dict[str, int], decodes: int, context: int
  ) -> None:
    """Draws this rank's layers, and decodes with a full context.

    Args:
      model: Sizes of the whole model.
      decodes: Sequences of a step.
      context: Positions that each of them attends to.
    """
    jax.config.update("jax_platforms", "cpu")
    sync = PartialSync()
    config = TransformerConfig(
      **model | {
        "num_heads": model["num_heads"] // 2,
        "num_kv_heads": model["num_kv_heads"] // 2,
        "ffn_width": model["ffn_width"] // 2,
      },
      head_width=model["width"] // model["num_heads"],
      syncs=((sync, sync),) * model["num_layers"],
    )
    seed = int(self.me.removeprefix("p"))
    self.module = Transformer(config, Axis("tensor", 1), nnx.Rngs(seed))
    graph, stacked = nnx.split(self.module.blocks)
    self.layers = [
      jax.tree.map(lambda x, i=i: x[i], stacked)
      for i in range(config.num_layers)
    ]
    pages = -(-context // _PAGE)
    shape = CacheShape(
      config.num_layers, decodes * pages, _PAGE, config.num_kv_heads,
      config.head_width, "float32", "heads",
    )
    self.cache = Cache(
      jax.tree.map(lambda x: jnp.zeros((1, *x.shape), x.dtype), shape.pages()),
      shape,
    )
    tables = np.arange(decodes * pages, dtype=np.int32).reshape(decodes, pages)
    last = np.full(decodes, context - 1, np.int32)
    each = np.arange(decodes, dtype=np.int32)
    self.batch = Batch(
      each, last, tables[:, -1] * _PAGE + last % _PAGE, tables, each, each,
      decodes,
    )
    self.x = np.random.default_rng(0).normal(
      size=(1, decodes, config.width)
    ).astype(np.float32)

    @functools.partial(jax.jit, static_argnames="half", donate_argnums=2)
    def run(layer, x, cache, index, piece, half):
      block = nnx.merge(graph, layer)
      halves = block.halves(config.syncs[0])
      x, y, (cache, _) = halves[half].columns(
        x, (cache, index), self.module.mixer(piece)
      )
      return x, halves[half].rows(y), cache

    self.run = run

  def step(self, what: str, cut: int) -> dict[str, float]:
    """Runs a step.

    Args:
      what: "products" without sums, "sums" without products, or "step".
      cut: Number of pieces, whose sizes differ by at most one token.

    Returns:
      Seconds of the step, and of the halves of its layers; and the sum of the
      magnitudes of its result.
    """
    sizes = even(self.batch.tokens.shape[0], cut)
    pieces = split(self.batch, sizes)
    ends = np.cumsum(sizes)
    parts = [self.x[:, e - n : e] for n, e in zip(sizes, ends, strict=True)]
    none = [jnp.zeros((1, *p.shape[:2], 0)) for p in parts]
    xs = [
      Stream(p, private, Update(np.zeros_like(p), private))
      for p, private in zip(parts, none, strict=True)
    ]
    seconds, way = [0.0, 0.0], None
    start = time.perf_counter()
    for index, layer in enumerate(self.layers):
      for half in range(2):
        for i, piece in enumerate(pieces):
          if way is not None and cut == 1:
            xs[way[0]], way = self._added(xs, *way), None
          before = time.perf_counter()
          made = Update(parts[i], none[i])
          if what != "sums":
            xs[i], made, self.cache = self.run(
              layer, xs[i], self.cache, index, piece, half
            )
          summand = np.asarray(made.shared)
          seconds[half] += time.perf_counter() - before
          if way is not None:
            xs[way[0]] = self._added(xs, *way)
          way = i, made.private, summand if what == "products" else (
            link_collectives.all_reduce(self.links, 0, summand)
          )
    xs[way[0]] = self._added(xs, *way)
    total = time.perf_counter() - start
    end = sum(float(jnp.abs(x.resolved().shared).sum()) for x in xs)
    return {
      "seconds": total, "attention": seconds[0], "mlp": seconds[1],
      "end": end if what == "step" else 0.0,
    }

  def _added(
    self, xs: list[Stream], i: int, private: Any, under_way: Any
  ) -> Stream:
    """Returns piece i's stream with an update, after its sum has ended."""
    if not isinstance(under_way, np.ndarray):
      under_way = under_way.result(LIMIT_S)
    return Stream(xs[i].shared, xs[i].private, Update(under_way, private))
