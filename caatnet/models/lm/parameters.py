"""Parameters of language models, and their slices on tensor ranks.

Every parameter is initialised in its *dense* form and then cut into one slice
per rank. So at p = 1, where all channels are synchronised, the model does not
depend on the number of ranks.

Shape legend: L = layers, R = tensor ranks, H = width.
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
  """Parameter with one slice per tensor rank, ``[R, ...]``."""


class Bias(Sharded):
  """`Sharded` parameter without weight decay, such as a bias."""


class Float32Bias(Bias):
  """`Bias` that functions read in float32, not in the dtype of activations."""


def cut_size(size: int, ranks: int) -> int:
  """Returns the size of a rank's slice, ceil(size / ranks)."""
  return math.ceil(size / ranks)


def has_little_padding(size: int, ranks: int) -> bool:
  """Returns whether equal slices for all ranks are less than half padding."""
  return ranks * cut_size(size, ranks) < 2 * size


def cut_columns(dense: jax.Array, ranks: int, cut: int) -> jax.Array:
  """Cuts ``[H, features]`` into ``[R, H, cut]``, zero-padded at the end.

  Example:
    >>> dense = jnp.arange(1, 6, dtype=jnp.int32)[None]  # H = 1, 5 features
    >>> cut_columns(dense, ranks=2, cut=cut_size(5, 2)).tolist()
    [[[1, 2, 3]], [[4, 5, 0]]]
  """
  padding = ranks * cut - dense.shape[1]
  padded = jnp.pad(dense, ((0, 0), (0, padding)))  # [H, R * cut]
  return jnp.moveaxis(padded.reshape(-1, ranks, cut), 1, 0)


def cut_rows(dense: jax.Array, ranks: int, cut: int) -> jax.Array:
  """Cuts ``[features, H]`` into ``[R, cut, H]``, zero-padded at the end."""
  return jnp.swapaxes(cut_columns(dense.T, ranks, cut), 1, 2)


@dataclasses.dataclass(frozen=True)
class ProjectionInitializer:
  """Initialiser of a layer's column- and row-parallel projections.

  Attributes:
    config: Sizes of the model.
    ranks: The number of tensor ranks.
    rngs: The random streams.
  """

  config: StackConfig
  ranks: int
  rngs: nnx.Rngs

  def columns(self, *sizes: tuple[int, int]) -> jax.Array:
    """Draws matrices ``[H, size]`` of one column-parallel projection.

    Every matrix is cut over ranks before the slices are concatenated, so that a
    rank has columns of every matrix.

    Args:
      *sizes: For each matrix, its number of columns in total and per rank.

    Returns:
      float32 ``[R, H, sum of a rank's columns]``.
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
    """Draws a matrix ``[size, H]`` of a row-parallel projection.

    Args:
      size: Rows of the matrix.
      cut: Rows of a rank.
      scale: ``[H]``, factors of the columns, see `row_scales`.

    Returns:
      float32 ``[R, cut, H]``.
    """
    config = self.config
    # The stream sums 2 L updates; the factor keeps its variance independent of
    # L, as in GPT-2.
    std = config.init_std / math.sqrt(2 * config.num_layers)
    draws = jax.random.normal(self.rngs.params(), (size, config.width))
    return cut_rows(std * draws * scale[None], self.ranks, cut)


def row_scales(
  syncs: Sequence[tuple[PartialSync, PartialSync]], width: int, axis: Axis
) -> np.ndarray:
  """Returns initial scales of the columns of row-parallel projections.

  Args:
    syncs: For each layer, the sync policies of its two row-parallel
      projections.
    width: H.
    axis: The tensor axis.

  Returns:
    float32 ``[L, 2, H]``: sqrt(ranks) for private channels of projections whose
    `PartialSync.private_scale` is "init", else 1.
  """
  scales = np.ones((len(syncs), 2, width), np.float32)
  for layer, policies in enumerate(syncs):
    for projection, sync in enumerate(policies):
      if sync.private_scale == "init":
        first_private = sync.num_shared(width)
        scales[layer, projection, first_private:] = math.sqrt(axis.size)
  return scales


def check_padding(size: int, key: str, ranks: int) -> None:
  """Checks that padding to equal slices adds fewer zeros than there are values.

  A rank may have only padding, whose outputs and gradients are zero.

  Args:
    size: Value of the key.
    key: Key of ``config.model``.
    ranks: The number of tensor ranks.

  Raises:
    ValueError: If padding adds as many zeros as values or more; the message
      lists numbers of ranks that fit.
  """
  if has_little_padding(size, ranks):
    return
  fitting = [r for r in range(1, 2 * size) if has_little_padding(size, r)]
  raise ValueError(
    f"config.model.{key}={size} would be padded to "
    f"{ranks * cut_size(size, ranks)} on config.parallel.tensor={ranks}, "
    f"with at least half of it zeros; use a tensor size in {fitting[:16]}, or "
    f"config.model.{key} a multiple of {ranks}"
  )
