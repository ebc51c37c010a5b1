"""Outer optimizers: what is done with the mean of the workers' differences.

An outer optimizer takes a step in one of two ways. `update` is given a mean, as
optax' optimizers are. `step` is given the exchange that makes the mean. It may
hand its arithmetic to the pass that decodes (`parallel.quantize`), so that the
mean is never written to memory.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, Protocol

import jax
import optax

from parallel.kernels.codec.reference import OuterStep
from parallel.outer.base import Params, State
from parallel.wire import NesterovStep

# Takes a tree with one `Use` per parameter (None: the mean itself). Returns the
# tree of what these make of the means, and the exchange's own new state.
MeanExchange = Callable[[Any], tuple[Any, State]]


class OuterOptimizer(Protocol):
  """An optimizer of outer parameters."""

  def init(self, params: Params) -> State:
    """Returns the optimizer's first state."""
    ...

  def update(
    self, mean: Params, state: State, params: Params
  ) -> tuple[Params, State]:
    """Computes an outer step.

    Args:
      mean: The outer gradient.
      state: The optimizer's state.
      params: The outer parameters.

    Returns:
      What is to be added to the parameters, and the new state.
    """
    ...

  def step(
    self, params: Params, state: State, exchange: MeanExchange
  ) -> tuple[Params, State, State]:
    """Exchanges, and takes the outer step with the mean.

    Args:
      params: The outer parameters.
      state: The optimizer's state.
      exchange: Averages over the workers, and applies what it is given to the
        means.

    Returns:
      The new parameters, the optimizer's new state, and the exchange's.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Optax:
  """Any optax optimizer, which takes its step after the exchange.

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
  """SGD with Nesterov momentum, which takes its step where means are decoded.

  Attributes:
    learning_rate: The outer learning rate.
    momentum: The decay of the momentum.
  """

  learning_rate: float
  momentum: float

  @property
  def _optax(self) -> optax.GradientTransformation:
    # Both ways to take a step keep the momentum where optax keeps it.
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
    uses = jax.tree.map(
      lambda p, m: NesterovStep(
        p, m, OuterStep(self.learning_rate, self.momentum)
      ),
      params, momentum,
    )
    pairs, rest = exchange(uses)
    # A tree of pairs -> a pair of trees.
    outer, inner = jax.tree.structure(params), jax.tree.structure((0, 0))
    params, momentum = jax.tree.transpose(outer, inner, pairs)
    return params, optax.tree_utils.tree_set(state, trace=momentum), rest
