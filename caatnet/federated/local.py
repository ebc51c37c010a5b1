"""Local training of a client: H steps of the model on its own examples.

The steps are those that ``launch.train`` runs (`caatnet.train.step`), for one
worker. A round begins with a new inner optimizer, so a client has no state
between rounds: its update depends on the received model, the round, and the
seed. The learning rate continues over rounds.

With FedProx (Li et al., arXiv 1812.06127) the gradient has the additional term
``mu (theta - phi)``, with phi the received parameters. Gradients are clipped
before it is added.
"""

from collections.abc import Callable
import copy
import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from caatnet.federated.client import TrainingResult, digest
from caatnet.federated.splits import Examples
from caatnet.train.evaluate import make_evaluate, put_batch
from caatnet.train.experiment import Experiment
from caatnet.train.state import TrainState, state_shardings
from caatnet.train.step import make_train_step
from parallel.outer.base import stack_copies


class ProximalState(NamedTuple):
  """State of `proximal`: the received parameters, its anchor."""

  anchor: Any


def proximal(weight: float) -> optax.GradientTransformation:
  """Returns FedProx's transformation: adds ``weight * (params - anchor)``."""

  def update(grads: Any, state: ProximalState, params: Any) -> Any:
    return jax.tree.map(
      lambda g, p, a: g + weight * (p - a), grads, params, state.anchor
    ), state

  return optax.GradientTransformation(ProximalState, update)


class ParamsFlattener:
  """Converts an experiment's tree of parameters to one vector, and back.

  Attributes:
    num: n, the number of parameters.
    digest: Hex digest of their names, shapes and dtypes.
  """

  def __init__(self, experiment: Experiment) -> None:
    self._experiment = experiment
    shapes = experiment.program.stored_shapes
    if experiment.program.has_explicit_state:
      raise ValueError(
        "a server's optimizer would train the model's explicit training state "
        "(Parameter.update); use a model without it"
      )
    leaves, self._tree = jax.tree.flatten(shapes)
    self._shapes = [x.shape for x in leaves]
    self._sizes = [x.size for x in leaves]
    self.num = sum(self._sizes)
    self.digest = digest(
      (jax.tree_util.keystr(path), x.shape, str(x.dtype))
      for path, x in jax.tree.leaves_with_path(shapes)
    )

  def tree(self, vector: jax.Array) -> Any:
    """Returns a vector ``[n]`` as a tree of parameters."""
    parts = jnp.split(vector, np.cumsum(self._sizes)[:-1].tolist())
    return self._tree.unflatten(
      [x.reshape(s) for x, s in zip(parts, self._shapes, strict=True)]
    )

  def vector(self, tree: Any) -> jax.Array:
    """Returns a tree of parameters as a vector ``[n]``."""
    return jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(tree)])

  def initial(self) -> np.ndarray:
    """Returns the initial parameters of the experiment's seed, ``[n]``."""
    params = self._experiment.init_state().params
    return np.asarray(self.vector(jax.tree.map(lambda x: x[0], params)))


class LocalTrainer:
  """Local training of a client with a model; see `client.Trainer`.

  Attributes:
    examples: Number of training examples.
    num_params: n, the number of parameters.
    digest: Hex digest of the model's parameters.
  """

  def __init__(
    self, experiment: Experiment, examples: Examples, client: int,
    local_steps: int, weight: float = 0.0, validate: bool = True,
    test: bool = True,
  ) -> None:
    """Creates a trainer; programs are compiled by `warm_up` or at first use.

    Args:
      experiment: Model and inner optimizer, for one worker. Its batch size is
        that of the client.
      examples: Examples of the client.
      client: Id of the client, a part of the seed of its batches.
      local_steps: H, the number of local steps per round.
      weight: mu, the weight of FedProx' term; 0 for none.
      validate: Whether received parameters are evaluated.
      test: Whether trained parameters are evaluated.
    """
    self._experiment, self._data = experiment, examples
    self._client, self._local_steps = client, local_steps
    self._validate, self._test = validate, test
    self.examples = examples.num
    self.vectors = ParamsFlattener(experiment)
    self.num_params, self.digest = self.vectors.num, self.vectors.digest
    optimizer = experiment.optimizer
    if weight:
      optimizer = optax.chain(proximal(weight), optimizer)
    program, outer = experiment.program, experiment.outer
    shardings = state_shardings(program, optimizer, outer)
    self._start = jax.jit(
      functools.partial(_init_train_state, self.vectors, optimizer, experiment),
      out_shardings=shardings,
    )
    self._move = jax.jit(
      functools.partial(_replace_params, self.vectors, experiment),
      out_shardings=shardings,
    )
    step = make_train_step(
      program, optimizer, outer, experiment.clip_norm,
      experiment.train.accumulation, outer.plan(0).variant,
    )
    # Compiled at its first call, with the options of a step of `launch.train`.
    self._step = jax.jit(
      step, donate_argnums=0,
      compiler_options=program.layout.compiler_options(),
    )
    self._numbers = outer.plan(0).numbers
    self._vector = jax.jit(lambda state: self.vectors.vector(state.params))
    self._tree = jax.jit(self.vectors.tree)
    self._evaluate = make_evaluate(program, experiment.data.batch_size)

  def for_client(self, examples: Examples, client: int) -> "LocalTrainer":
    """Returns a trainer for another client, with the same compiled programs.

    Args:
      examples: Examples of the client.
      client: Id of the client.
    """
    other = copy.copy(self)
    other._data, other._client = examples, client
    other.examples = examples.num
    return other

  def warm_up(self) -> None:
    """Compiles the jitted functions, so that no round includes compilation."""
    if self.examples:
      steps, self._local_steps = self._local_steps, 1
      self.train(self.vectors.initial(), 0, lambda: False)
      self._local_steps = steps

  def batch(self, round: int, step: int) -> Any:
    """Returns the batch of a local step, a tree of arrays ``[B, ...]``.

    Each pass over the examples has a new order, drawn from the seed, the client
    and the round.
    """
    size = self._experiment.data.batch_size
    found: list[np.ndarray] = []
    first, last = step * size, (step + 1) * size
    for number in range(first // self.examples, -(-last // self.examples)):
      draw = np.random.RandomState(
        [self._experiment.seed, self._client, round, number]
      )
      found.append(draw.permutation(self.examples))
    skipped = first % self.examples
    places = np.concatenate(found)[skipped:skipped + size]
    return jax.tree.map(lambda x: x[places], self._data.train)

  def train(
    self, params: np.ndarray, round: int, stops: Callable[[], bool]
  ) -> TrainingResult | None:
    """Trains for one round; see `client.Trainer`."""
    start = time.monotonic()
    loss, validated = self._loss(params, self._validate)
    validated_s = time.monotonic()
    state = self.steps(
      self.begin(params, round), round, range(self._local_steps), stops
    )
    if state is None:
      return None
    trained = self.params(state)
    trained_s = time.monotonic()
    test_loss, _ = self._loss(trained, self._test)
    return TrainingResult(
      trained, loss, validated, test_loss, trained_s - validated_s,
      time.monotonic() - trained_s, validated_s - start,
    )

  def begin(self, params: np.ndarray, round: int) -> TrainState:
    """Returns the state before the steps of a round.

    Args:
      params: Received parameters, float32 ``[n]``.
      round: Number of the round.
    """
    # Not a Python number: its weak type would give the next state another type,
    # and the step would be compiled twice.
    return self._start(params, np.int32(round * self._local_steps))

  def steps(
    self, state: TrainState, round: int, steps: range,
    stops: Callable[[], bool] = lambda: False,
  ) -> TrainState | None:
    """Returns the state after the given steps; None if ``stops()`` is True."""
    for step in steps:
      if stops():
        return None
      batch = put_batch(
        self._experiment.program.layout, self.batch(round, step)
      )
      state, _ = self._step(state, batch, self._numbers)
    return state

  def params(self, state: TrainState) -> np.ndarray:
    """Returns the parameters of a state, float32 ``[n]``."""
    return np.asarray(self._vector(state))

  def moved(self, state: TrainState, params: np.ndarray) -> TrainState:
    """Returns ``state`` with ``params``, float32 ``[n]``, as parameters."""
    return self._move(state, params)

  def _loss(
    self, params: np.ndarray, wanted: bool
  ) -> tuple[float | None, int]:
    """Returns (mean validation loss, number of examples), or (None, 0)."""
    examples = self._data.validation
    num = len(jax.tree.leaves(examples)[0])
    if not wanted or not num:
      return None, 0
    loss = self._evaluate(self._tree(params), examples).loss
    # A diverged model has no loss; the server refuses its update.
    return (loss, num) if np.isfinite(loss) else (None, 0)


def _replace_params(
  vectors: ParamsFlattener, experiment: Experiment, state: TrainState,
  vector: jax.Array,
) -> TrainState:
  """Returns ``state`` with its parameters replaced by those of ``vector``."""
  return state._replace(
    params=stack_copies(vectors.tree(vector), experiment.program.layout.worker)
  )


def _init_train_state(
  vectors: ParamsFlattener, optimizer: optax.GradientTransformation,
  experiment: Experiment, vector: jax.Array, first: jax.Array,
) -> TrainState:
  """Returns the state at a round's start; ``first`` is its global step."""
  params, worker = vectors.tree(vector), experiment.program.layout.worker

  def is_schedule(x: Any) -> bool:
    return isinstance(x, optax.ScaleByScheduleState)

  opt_state = jax.tree.map(
    lambda x: x._replace(count=first) if is_schedule(x) else x,
    optimizer.init(params), is_leaf=is_schedule,
  )
  _, key = jax.random.split(jax.random.key(experiment.seed))
  return TrainState(
    step=first,
    params=stack_copies(params, worker),
    opt_state=stack_copies(opt_state, worker),
    outer=experiment.outer.init(params),
    key=jax.random.key_data(key),
  )
