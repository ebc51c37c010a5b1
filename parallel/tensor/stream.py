"""Residual stream of tensor ranks: shared and private channels.

The first K channels are shared: they are equal on all ranks and stored once for
all lanes (ranks) of a device. The others are private: they differ between ranks
and are stored per lane.

Shape legend: R = lanes (ranks on this device), B = batch, T = position, H =
width (stream channels), K = shared channels.
"""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp

from parallel.axes import Axis
from parallel.collectives import varying, varying_axes
from parallel.tensor.partial_sync import PartialSync
from parallel.tensor.reductions import cast_to_ranks, sum_over_ranks


@dataclasses.dataclass(frozen=True)
class PendingReduction:
  """Sum of an update over ranks that has not been computed yet.

  Attributes:
    axis: The tensor axis.
    sync: Options of the row-parallel projection that made the update.
  """

  axis: Axis
  sync: PartialSync


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Update:
  """Output of a row-parallel projection, to be added to the stream.

  An update is pending if its sum over ranks is deferred to the column-parallel
  projection that adds it, where one kernel reduces, adds and normalises.

  Attributes:
    shared: ``[B, T, K]``, the sum over ranks; in a pending update, the summand
      of this rank.
    private: ``[R, B, T, H - K]``, private channels of the R ranks on this
      device, multiplied by `PartialSync.scale` unless the update is pending.
    pending: Sum that has not been computed yet; None if it has.
  """

  shared: jax.Array
  private: jax.Array
  pending: PendingReduction | None = dataclasses.field(
    default=None, metadata={"static": True}
  )

  def reduced(self) -> "Update":
    """Returns the update summed over ranks, so that it is not pending."""
    if self.pending is None:
      return self
    axis, sync = self.pending.axis, self.pending.sync
    scale = jnp.asarray(sync.scale(axis), self.private.dtype)
    shared = sum_over_ranks(self.shared, axis.name, sync)
    return Update(shared, self.private * scale)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
  """Residual stream, optionally with an update that is not added yet.

  The next column-parallel projection adds the update, since a kernel can do
  that in one pass with the projection's norm: the stream is then read from
  memory once.

  Attributes:
    shared: ``[B, T, K]``, equal on all ranks, stored once per device.
    private: ``[R, B, T, H - K]``, private channels of the R ranks on this
      device.
    update: Update that is not added yet; None if there is none.

  Example:
    A narrower stream stores fewer channels once per device, and more per rank.

    >>> stream = Stream(jnp.ones((1, 2, 8)), jnp.ones((4, 1, 2, 0)))
    >>> narrow = stream.narrow(num_shared=6)
    >>> narrow.shared.shape, narrow.private.shape, narrow.width
    ((1, 2, 6), (4, 1, 2, 2), 8)
  """

  shared: jax.Array
  private: jax.Array
  update: Update | None = None

  @property
  def width(self) -> int:
    """H, the number of channels."""
    return self.shared.shape[-1] + self.private.shape[-1]

  @property
  def is_pending(self) -> bool:
    """Whether the update must be reduced over ranks before it is added."""
    return self.update is not None and self.update.pending is not None

  def narrow(self, num_shared: int) -> "Stream":
    """Makes all but the first ``num_shared`` channels private.

    Layers may share different fractions. Channels that are equal on all ranks
    can be stored per rank, but the converse is not possible, so the number of
    shared channels of a stream can only decrease.
    """
    if num_shared == self.shared.shape[-1]:
      return self
    moved = self.shared[..., num_shared:]
    # The order of channels is kept: channels that become private come first.
    moved = jnp.broadcast_to(moved, (self.private.shape[0], *moved.shape))
    return Stream(
      self.shared[..., :num_shared],
      jnp.concatenate([moved, self.private], axis=-1),
      self.update,
    )

  def narrow_both(self, update: Update) -> tuple["Stream", "Stream"]:
    """Returns stream and update with the fewer of their shared channels.

    The others become private.
    """
    num_shared = min(self.shared.shape[-1], update.shared.shape[-1])
    other = Stream(update.shared, update.private)
    return self.narrow(num_shared), other.narrow(num_shared)

  def __add__(self, update: Update) -> "Stream":
    """Returns the stream with ``update``, which the next projection adds."""
    x = self.resolved()  # a stream carries at most one update
    return Stream(x.shared, x.private, update)

  def resolved(self) -> "Stream":
    """Returns the stream with its update reduced and added."""
    if self.update is None:
      return self
    x, y = self.narrow_both(self.update.reduced())
    return Stream(x.shared + y.shared, x.private + y.private)

  def take(self, positions: jax.Array) -> "Stream":
    """Returns the stream ``[B, t, H]`` at some positions, int ``[t]``."""
    x = self.resolved()
    return Stream(x.shared[:, positions], x.private[:, :, positions])

  def per_rank(self) -> jax.Array:
    """Returns all channels of the R ranks on this device, for inspection.

    The shape is ``[R, B, T, H]``.
    """
    return self.resolved().narrow(0).private


def concatenate(xs: Sequence[Stream]) -> Stream:
  """Concatenates streams ``[B, T, H]`` along T."""
  xs = [x.resolved() for x in xs]
  return Stream(
    jnp.concatenate([x.shared for x in xs], axis=1),
    jnp.concatenate([x.private for x in xs], axis=2),
  )


def enter(x: jax.Array, axis: Axis, sync: PartialSync) -> Stream:
  """Starts a residual stream from activations that are equal on all ranks.

  The backward of this function contains the only full-width all-reduce of a
  stack of blocks: the ranks' streams have different cotangents, and the
  cotangent of their common input is the sum of these.

  Args:
    x: ``[B, T, H]``, equal on all ranks.
    axis: The tensor axis.
    sync: Defines the number of shared channels, and the all-reduce's dtype.

  Returns:
    The initial stream of every rank.
  """
  with jax.named_scope("stack_entry"):
    x = cast_to_ranks(x, axis.name, sync.backward_dtype)
  whole = Stream(x, jnp.zeros((axis.lanes, *x.shape[:-1], 0), x.dtype))
  # Both parts must vary over the same mesh axes, since they are concatenated.
  whole = Stream(x, varying(whole.private, *varying_axes(x)))
  return whole.narrow(sync.num_shared(x.shape[-1]))
