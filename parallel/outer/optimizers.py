"""Outer optimizers, which apply the mean delta to the outer parameters.

An outer optimizer has two methods for a step. `update` takes the mean, as optax
optimizers do. `step` takes the function that computes the mean, so that an
optimizer can fuse its arithmetic into the decoder (`parallel.quantize`); then
the mean is never written to memory.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, Protocol

import jax
import optax

from parallel.kernels.codec.reference import OuterOptions
from parallel.outer.base import Params, State
from parallel.wire import NesterovStep

# Maps a tree of `Epilogue`, one operation on the mean of each parameter (None:
# return the means), to the tree of their results and the exchange's new state.
MeanExchange = Callable[[Any], tuple[Any, State]]


class OuterOptimizer(Protocol):
  """Interface of optimizers of the outer parameters."""

  def init(self, params: Params) -> State:
    """Returns the initial state of the optimizer."""
    ...

  def update(
    self, mean: Params, state: State, params: Params
  ) -> tuple[Params, State]:
    """Computes an outer step.

    Args:
      mean: Outer gradient, the mean over the workers.
      state: State of the optimizer.
      params: Outer parameters.

    Returns:
      The update to add to the parameters, and the new state.
    """
    ...

  def step(
    self, params: Params, state: State, exchange: MeanExchange
  ) -> tuple[Params, State, State]:
    """Runs the exchange and takes the outer step with its mean.

    Args:
      params: Outer parameters.
      state: State of the optimizer.
      exchange: Averages over the workers and applies the given epilogues to the
        means.

    Returns:
      The new parameters, the optimizer's new state and the exchange's new
      state.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Optax:
  """Any optax optimizer, applied after the exchange.

  Attributes:
    optimizer: The optax optimizer.
  """

  optimizer: optax.GradientTransformation

  def init(self, params: Params) -> State:
    return self.optimizer.init(params)

  def update(
    self, mean: Params, state: State, params: Params
  ) -> tuple[Params, State]:
    return self.optimizer.update(mean, state, params)

  def step(
    self, params: Params, state: State, exchange: MeanExchange
  ) -> tuple[Params, State, State]:
    mean, rest = exchange(None)
    updates, state = self.optimizer.update(mean, state, params)
    return optax.apply_updates(params, updates), state, rest


@dataclasses.dataclass(frozen=True)
class Nesterov:
  """SGD with Nesterov momentum, fused into the decoder of the means.

  Attributes:
    learning_rate: Outer learning rate.
    momentum: Decay of the momentum.

  Example:
    The first step moves by learning_rate * (1 + momentum) * mean.

    >>> optimizer = Nesterov(learning_rate=0.5, momentum=0.5)
    >>> params = {"w": jax.numpy.array([1.0])}
    >>> mean = {"w": jax.numpy.array([2.0])}
    >>> update, _ = optimizer.update(mean, optimizer.init(params), params)
    >>> update["w"].tolist()
    [-1.5]
  """

  learning_rate: float
  momentum: float

  @property
  def _optax(self) -> optax.GradientTransformation:
    # `update` and `step` keep the momentum in the same field of optax' state.
    return optax.sgd(self.learning_rate, self.momentum, nesterov=True)

  def init(self, params: Params) -> State:
    return self._optax.init(params)

  def update(
    self, mean: Params, state: State, params: Params
  ) -> tuple[Params, State]:
    return self._optax.update(mean, state, params)

  def step(
    self, params: Params, state: State, exchange: MeanExchange
  ) -> tuple[Params, State, State]:
    momentum = optax.tree_utils.tree_get(state, "trace")
    # One fused decode-and-step per parameter: (mean, p, m) -> (p, m).
    epilogues = jax.tree.map(
      lambda p, m: NesterovStep(
        p, m, OuterOptions(self.learning_rate, self.momentum)
      ),
      params, momentum,
    )
    pairs, rest = exchange(epilogues)
    # Tree of (params, momentum) pairs -> pair of trees.
    outer, inner = jax.tree.structure(params), jax.tree.structure((0, 0))
    params, momentum = jax.tree.transpose(outer, inner, pairs)
    return params, optax.tree_utils.tree_set(state, trace=momentum), rest
