"""Arithmetic of a federated server: optimizer, validation, downlink codec.

The server's optimizers move the parameters against the negative mean update
(Reddi et al., arXiv 2003.00295): FedAvg is SGD with rate 1, FedAvgM SGD with
momentum, FedAdam Adam. They are implemented by optax: Adam corrects the bias of
its moments, which the paper does not.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from caatnet.federated.vector_codec import Plain, VectorCodec
from parallel.outer import health

OPTIMIZERS = ("fedavg", "fedavgm", "fedadam")
# Minimum number of norms to reject an outlier: of two, either may be wrong.
_MIN_NORMS_TO_REJECT = 3


def optimizer(
  name: str, rate: float, momentum: float, beta_2: float, eps: float
) -> optax.GradientTransformation:
  """Returns the optax optimizer that applies a round's mean update.

  Args:
    name: One of `OPTIMIZERS`.
    rate: Learning rate; "fedavg" with 1 takes the mean of the clients' models.
    momentum: Momentum of "fedavgm", and beta_1 of "fedadam".
    beta_2: Decay of the second moment of "fedadam".
    eps: Epsilon of "fedadam", tau in Reddi et al.
  """
  if name == "fedadam":
    return optax.adam(rate, momentum, beta_2, eps)
  return optax.sgd(rate, momentum if name == "fedavgm" else None)


class VectorArithmetic:
  """Computations on vectors with JAX; implements `server.Arithmetic`."""

  def __init__(
    self, transformation: optax.GradientTransformation,
    downlink: VectorCodec, outlier_factor: float = 0.0,
  ) -> None:
    """Creates the arithmetic of a run.

    Args:
      transformation: The server's optimizer, which must act elementwise.
      downlink: Codec of the differences between revisions, whose rounding must
        be deterministic.
      outlier_factor: Largest norm of a valid update, as a multiple of the
        median of at least three norms; 0 allows any finite norm.
    """
    self._downlink, self._factor = downlink, outlier_factor
    self._transformation = transformation
    self._update = jax.jit(self._updated)

  def warm_up(self, params: np.ndarray) -> None:
    """Compiles the jitted functions, so that no round includes compilation."""
    zeros = np.zeros_like(params)
    self.update(zeros, self.init(params), params)
    self.healthy([1.0] * _MIN_NORMS_TO_REJECT)
    self.publish(zeros)

  def init(self, params: np.ndarray) -> tuple[np.ndarray, ...]:
    state = self._transformation.init(jnp.asarray(params))
    return tuple(np.asarray(x) for x in jax.tree.leaves(state))

  def update(
    self, mean: np.ndarray, state: tuple[np.ndarray, ...], params: np.ndarray
  ) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    params, leaves = jax.device_get(self._update(mean, state, params))
    return params, tuple(leaves)

  def _updated(self, mean: Any, leaves: Any, params: Any) -> Any:
    structure = jax.tree.structure(
      jax.eval_shape(self._transformation.init, params)
    )
    # Optimizers subtract gradients, but the mean update is to be added.
    updates, state = self._transformation.update(
      -mean, structure.unflatten(leaves), params
    )
    return optax.apply_updates(params, updates), jax.tree.leaves(state)

  def healthy(self, norms: list[float]) -> list[bool]:
    if not norms:
      return []
    # Padded to a multiple of 16 norms, so that few sizes are compiled. The
    # padding, NaN, does not change the median.
    padded = np.full(-(-len(norms) // 16) * 16, np.nan)
    padded[: len(norms)] = norms
    # Norms above float32's range become infinite, and count as outliers.
    with np.errstate(over="ignore"):
      found = padded.astype(np.float32)
    judged = np.isfinite(found).sum() >= _MIN_NORMS_TO_REJECT
    factor = self._factor if judged else 0.0
    return health.healthy(found, factor).tolist()[: len(norms)]

  def publish(self, difference: np.ndarray) -> tuple[bytes, np.ndarray] | None:
    if isinstance(self._downlink, Plain):
      return None
    data = self._downlink.encode(difference, jax.random.key(0))
    return data, self._downlink.decode(data, difference.size)
