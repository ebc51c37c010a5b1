"""Parameters of language models, and how they are cut over tensor ranks.

Every parameter is drawn in its *dense* form and then cut into one slice per
rank. So at p = 1 the number of ranks is only a layout of the same model.

Shape legend: L = layers, R = lanes (ranks outside shard_map), H = width.
"""

from collections.abc import Sequence
import dataclasses
import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from caatnet.models.lm.config import StackConfig
from parallel.axes import Axis
from parallel.tensor.partial_sync import PartialSync


class Sharded(nnx.Param):
  """A parameter with one slice per tensor rank, ``[R, ...]``."""


class Bias(Sharded):
  """A parameter like `Sharded` that weight decay leaves alone, as a bias."""


class Wide(Bias):
  """A parameter like `Bias` that functions read in float32."""


def cut_size(size: int, ranks: int) -> int:
  """Returns the slice of each rank when ``size`` is padded to divide."""
  return math.ceil(size / ranks)


def cut_columns(dense: jax.Array, ranks: int, cut: int) -> jax.Array:
  """Cuts ``[H, features]`` into ``[R, H, cut]``, zero-padded at the end."""
  padding = ranks * cut - dense.shape[1]
  padded = jnp.pad(dense, ((0, 0), (0, padding)))  # [H, R * cut]
  return jnp.moveaxis(padded.reshape(-1, ranks, cut), 1, 0)


def cut_rows(dense: jax.Array, ranks: int, cut: int) -> jax.Array:
  """Cuts ``[features, H]`` into ``[R, cut, H]``, zero-padded at the end."""
  return jnp.swapaxes(cut_columns(dense.T, ranks, cut), 1, 2)


@dataclasses.dataclass(frozen=True)
class Drawing:
  """Draws a layer's projections from and to the residual stream.

  Attributes:
    config: The sizes.
    ranks: The number of tensor ranks.
    rngs: The random streams.
  """

  config: StackConfig
  ranks: int
  rngs: nnx.Rngs

  def columns(self, *sizes: tuple[int, int]) -> jax.Array:
    """Draws matrices ``[H, size]``, cut each, then joined: ``[R, H, cuts]``.

    Cut before they are joined, a rank's slice has its own part of each.

    Args:
      *sizes: For each matrix its columns, and those of a rank.
    """
    width, std = self.config.width, self.config.init_std
    return jnp.concatenate(
      [
        cut_columns(
          std * jax.random.normal(self.rngs.params(), (width, size)),
          self.ranks, cut,
        )
        for size, cut in sizes
      ],
      axis=-1,
    )

  def rows(self, size: int, cut: int, scale: jax.Array) -> jax.Array:
    """Draws a matrix ``[size, H]`` of an output projection: ``[R, cut, H]``.

    Args:
      size: Its rows.
      cut: The rows of a rank.
      scale: ``[H]``, by which its columns are multiplied.
    """
    config = self.config
    std = config.init_std / math.sqrt(2 * config.num_layers)
    draws = jax.random.normal(self.rngs.params(), (size, config.width))
    return cut_rows(std * draws * scale, self.ranks, cut)


def row_scales(
  syncs: Sequence[tuple[PartialSync, PartialSync]], width: int, axis: Axis
) -> np.ndarray:
  """Returns the factors of the columns of output projections when drawn.

  Args:
    syncs: For each layer how its two row doors synchronise.
    width: H.
    axis: The tensor axis.

  Returns:
    ``[L, 2, H]``: sqrt(ranks) for private channels of doors whose
    `PartialSync.private_scale` is "init", else 1.
  """
  scales = np.ones((len(syncs), 2, width), np.float32)
  for layer, doors in enumerate(syncs):
    for door, sync in enumerate(doors):
      if sync.private_scale == "init":
        first_private = sync.num_shared(width)
        scales[layer, door, first_private:] = math.sqrt(axis.size)
  return scales


def check_every_rank_owns(size: int, key: str, ranks: int) -> None:
  """Refuses numbers of ranks that leave a rank with nothing but padding.

  The ranks before the last have ceil(size / ranks) each, which may be all.
  """
  if cut_size(size, ranks) * (ranks - 1) < size:
    return
  fitting = [
    r for r in range(1, size + 1) if cut_size(size, r) * (r - 1) < size
  ]
  raise ValueError(
    f"config.model.{key}={size} leaves a rank of "
    f"config.parallel.tensor={ranks} with nothing but padding; use a tensor "
    f"size in {fitting[:16]}, or config.model.{key} a multiple of {ranks}"
  )
