"""Outer optimizers: what is done with the mean of the workers' differences.

An outer optimizer takes a step in one of two ways. `update` is given a mean,
as optax' optimizers are. `step` is given the exchange that makes the mean, and
may fuse its arithmetic with the exchange's decoding (`parallel.quantize`).
"""

from collections.abc import Callable
import dataclasses
from typing import Any, Protocol

import jax
import optax

from parallel.outer.base import Params, State
from parallel.wire import NesterovStep

# Takes one `Use` per parameter (None: the mean itself); returns the
# tree of what these make of the mean, and the exchange's own new state.
MeanExchange = Callable[[Any], tuple[Any, State]]


class OuterOptimizer(Protocol):
  """An optimizer of the parameters that all workers share."""

  def init(self, params: Params) -> State:
    """The optimizer's first state."""
    ...

  def update(
    self, mean: Params, state: State, params: Params
  ) -> tuple[Params, State]:
    """Updates to add to the parameters, and the new state, from a mean."""
    ...

  def step(
    self, params: Params, state: State, exchange: MeanExchange
  ) -> tuple[Params, State, State]:
    """Exchanges, and takes the outer step with the mean.

    Returns:
      New parameters, the optimizer's new state, and the exchange's.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Optax:
  """Any optax optimizer; its step follows the exchange.

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
  """SGD with Nesterov momentum; its step is taken where the mean is decoded.

  Attributes:
    learning_rate: Of the outer step.
    momentum: The decay of the momentum.
  """

  learning_rate: float
  momentum: float

  @property
  def _optax(self) -> optax.GradientTransformation:
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
        p, m, self.learning_rate, self.momentum
      ),
      params, momentum,
    )
    pairs, rest = exchange(uses)
    outer, inner = jax.tree.structure(params), jax.tree.structure((0, 0))
    params, momentum = jax.tree.transpose(outer, inner, pairs)
    return params, optax.tree_utils.tree_set(state, trace=momentum), rest
