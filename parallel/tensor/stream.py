"""The residual stream of tensor ranks: shared and private channels.

The first K channels are shared: they are equal on all ranks and stored once for
all lanes of a device. The others are private: each rank has its own, stored per
lane.

Shape legend: R = lanes, B = batch, T = position, H = width (stream channels),
K = shared channels.
"""

import dataclasses

import jax
import jax.numpy as jnp

from parallel.axes import Axis
from parallel.collectives import varying, varying_axes
from parallel.tensor.partial_sync import PartialSync
from parallel.tensor.reductions import cast_to_ranks, sum_over_ranks


@dataclasses.dataclass(frozen=True)
class Pending:
  """How an update is still to be reduced over ranks.

  Attributes:
    axis: The tensor axis.
    sync: How the row door that made the update synchronises.
  """

  axis: Axis
  sync: PartialSync


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Update:
  """What a row door adds to the stream.

  An update is pending if the reduction is left to the column door that adds it,
  where one kernel reduces, adds and normalises.

  Attributes:
    shared: ``[B, T, K]``, the sum over ranks; in a pending update this rank's
      own summand.
    private: ``[R, B, T, H - K]``, each rank's own channels; in a pending update
      without the factor of `PartialSync.scale`.
    pending: How a pending update is to be reduced; None if it is not pending.
  """

  shared: jax.Array
  private: jax.Array
  pending: Pending | None = dataclasses.field(
    default=None, metadata={"static": True}
  )

  def reduced(self) -> "Update":
    """Returns the update with its sums over ranks."""
    if self.pending is None:
      return self
    axis, sync = self.pending.axis, self.pending.sync
    scale = jnp.asarray(sync.scale(axis), self.private.dtype)
    shared = sum_over_ranks(self.shared, axis.name, sync)
    return Update(shared, self.private * scale)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
  """A residual stream, and perhaps an update that is not added yet.

  The next column door adds it, since a kernel can do that in one pass with the
  door's norm: the stream is then read from memory once.

  Attributes:
    shared: ``[B, T, K]``, equal on all ranks, stored once per device.
    private: ``[R, B, T, H - K]``, each rank's own channels.
    update: What is still to be added; None if there is nothing.
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
    may be kept per rank, but not the other way round, so a stream only narrows.
    """
    if num_shared == self.shared.shape[-1]:
      return self
    moved = self.shared[..., num_shared:]
    # The order of channels stays: shared ones that become private come first.
    moved = jnp.broadcast_to(moved, (self.private.shape[0], *moved.shape))
    return Stream(
      self.shared[..., :num_shared],
      jnp.concatenate([moved, self.private], axis=-1),
      self.update,
    )

  def aligned(self, update: Update) -> tuple["Stream", "Stream"]:
    """Narrows stream and update to the shared channels that both have."""
    num_shared = min(self.shared.shape[-1], update.shared.shape[-1])
    other = Stream(update.shared, update.private)
    return self.narrow(num_shared), other.narrow(num_shared)

  def __add__(self, update: Update) -> "Stream":
    """Returns the stream with an update that the next column door adds."""
    x = self.resolved()  # only one update waits at a time
    return Stream(x.shared, x.private, update)

  def resolved(self) -> "Stream":
    """Returns the stream with its update reduced and added."""
    if self.update is None:
      return self
    x, y = self.aligned(self.update.reduced())
    return Stream(x.shared + y.shared, x.private + y.private)

  def take(self, positions: jax.Array) -> "Stream":
    """Returns the stream at some positions, int ``[t]``: ``[B, t, H]``."""
    x = self.resolved()
    return Stream(x.shared[:, positions], x.private[:, :, positions])

  def per_rank(self) -> jax.Array:
    """Returns each lane's whole stream, ``[R, B, T, H]``, for inspection."""
    return self.resolved().narrow(0).private


def enter(x: jax.Array, axis: Axis, sync: PartialSync) -> Stream:
  """Starts a residual stream from activations that are equal on all ranks.

  The one full-width all-reduce in the backward of a stack of blocks happens
  here. The ranks' streams differ, so each has a cotangent of its own, and what
  all of them started from gets the sum.

  Args:
    x: ``[B, T, H]``, equal on all ranks.
    axis: The tensor axis.
    sync: Decides the number of shared channels and the dtype of the backward.

  Returns:
    The stream that every rank starts with.
  """
  with jax.named_scope("stack_entry"):
    x = cast_to_ranks(x, axis.name, sync.backward_dtype)
  whole = Stream(x, jnp.zeros((axis.lanes, *x.shape[:-1], 0), x.dtype))
  # Both parts must vary over the same mesh axes, since they are concatenated.
  whole = Stream(x, varying(whole.private, *varying_axes(x)))
  return whole.narrow(sync.num_shared(x.shape[-1]))
