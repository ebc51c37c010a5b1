"""The residual stream of tensor ranks: shared and private channels.

Shared channels are stored once for all lanes of a device, private ones per
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
  """How an update's partial sums are still to be reduced.

  Attributes:
    axis: The tensor axis.
    sync: The policy of the door that the update came out of.
  """

  axis: Axis
  sync: PartialSync


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Update:
  """What a row door adds to the stream.

  Attributes:
    shared: ``[B, T, K]``, the sum over ranks; of a pending update this rank's
      own summand.
    private: ``[R, B, T, H - K]``, a rank's own; of a pending update without
      the factor of `PartialSync.scale`.
    pending: How it is still to be reduced, by the column door that adds it;
      None: it has been.
  """

  shared: jax.Array
  private: jax.Array
  pending: Pending | None = dataclasses.field(
    default=None, metadata={"static": True}
  )

  def reduced(self) -> "Update":
    """The update with its sums over ranks."""
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

  The next column door adds it, since a kernel may do that in one pass with the
  door's norm.

  Attributes:
    shared: ``[B, T, K]``, equal on all ranks, stored once per device.
    private: ``[R, B, T, H - K]``, a rank's own.
    update: What is to be added; None: nothing.
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
    """Whether adding the update means to reduce it over ranks."""
    return self.update is not None and self.update.pending is not None

  def narrow(self, num_shared: int) -> "Stream":
    """Makes all but the first ``num_shared`` channels private."""
    if num_shared == self.shared.shape[-1]:
      return self
    moved = self.shared[..., num_shared:]
    moved = jnp.broadcast_to(moved, (self.private.shape[0], *moved.shape))
    return Stream(
      self.shared[..., :num_shared],
      jnp.concatenate([moved, self.private], axis=-1),
      self.update,
    )

  def aligned(self, update: Update) -> tuple["Stream", "Stream"]:
    """Stream and update with the shared channels that both have."""
    num_shared = min(self.shared.shape[-1], update.shared.shape[-1])
    other = Stream(update.shared, update.private)
    return self.narrow(num_shared), other.narrow(num_shared)

  def __add__(self, update: Update) -> "Stream":
    x = self.resolved()
    return Stream(x.shared, x.private, update)

  def resolved(self) -> "Stream":
    """The stream with its update reduced and added."""
    if self.update is None:
      return self
    x, y = self.aligned(self.update.reduced())
    return Stream(x.shared + y.shared, x.private + y.private)

  def per_rank(self) -> jax.Array:
    """``[R, B, T, H]``: each lane's whole stream, for looking at."""
    return self.resolved().narrow(0).private


def enter(x: jax.Array, axis: Axis, sync: PartialSync) -> Stream:
  """Starts a residual stream from activations equal on all ranks.

  The one full-width backward all-reduce of a block stack happens here: the
  ranks' partial cotangents are summed.

  Args:
    x: ``[B, T, H]``, equal on all ranks.
    axis: The tensor axis.
    sync: Decides the number of shared channels and the backward's dtype.

  Returns:
    The stream that every rank starts with.
  """
  with jax.named_scope("stack_entry"):
    x = cast_to_ranks(x, axis.name, sync.backward_dtype)
  whole = Stream(x, jnp.zeros((axis.lanes, *x.shape[:-1], 0), x.dtype))
  whole = Stream(x, varying(whole.private, *varying_axes(x)))
  return whole.narrow(sync.num_shared(x.shape[-1]))
