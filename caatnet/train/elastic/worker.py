"""Worker in a swarm with elastic membership: its steps and rounds.

A round (`caatnet.train.elastic.single_process.CommunicationRound`) computes the
next revision of the shared part of the outer loop's state. All contributors
run the same computation (`parallel.peers`): the outer loop's `begin` or
`finish` or, if the outer loop averages gradients, the update by their mean. The
number of a revision determines the next round, and so the step of a worker.
Between two rounds each worker updates its copy of the shared state by itself;
all copies stay equal.

A round at the beginning of a step runs in a separate thread while the worker
executes further steps, until a step reads the result. The samples of these
steps are leased before the round starts. If the worker dies during the steps,
their samples count as used and are not leased again.

The private state of a worker is updated once its contribution has been counted.
A worker that joins, or whose contribution was not counted, starts from the
shared state: it takes the common parameters and loses its unsent update. A
joining worker has a new inner optimizer at the run's schedule step, with zero
moments and matching bias correction. A late contribution counts in a later
round; it is shifted by the change of the common parameters between the round
for which it was computed and this later round.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
import contextlib
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from caatnet.train.elastic.single_process import (
  NO_EXCHANGE,
  CommunicationRound,
  Programs,
)
from caatnet.train.state import TrainState
from parallel.peers.membership.leases import Spans


class Swarm(Protocol):
  """Interface of `parallel.peers.swarm.Swarm` that a worker uses."""

  revision: int
  state: Mapping[str, Any]
  samples: Spans
  counted: bool

  def give(self, part: Any, combine: Any, weight: float = 1.0) -> Any:
    """Contributes ``part`` to a round, whose result ``combine`` computes.

    Returns when the next contribution is due.
    """
    ...


class RoundContribution(NamedTuple):
  """Contribution of a worker to a round.

  Attributes:
    round: The number of the round.
    args: Arguments of the round's hook: "params", "outer" and, depending on the
      hook, "updates" or gradients.
  """

  round: int
  args: dict[str, Any]


class StepJump(Exception):
  """Raised if the worker's next step does not follow the last one it made."""


class SwarmWorker:
  """Worker of a swarm; all methods are called from one thread.

  Attributes:
    state: The training state of this worker.
    step: The number of the next step.
    idle: Whether no round is in progress, so that the state is complete.
  """

  def __init__(
    self, programs: Programs, swarm: Swarm, state: TrainState,
    read: Callable[[list[int]], Any], *, kept: bool = False,
    order: str = "direct",
  ) -> None:
    """Creates the training worker of a process that is a member of a swarm.

    Args:
      programs: The experiment's programs.
      swarm: The swarm, of which the worker is a member.
      state: An initial or restored state; it is donated.
      read: Reads examples by index as a batch on devices.
      kept: Whether ``state`` is a checkpoint at the swarm's current revision;
        if not, the worker starts from the shared state.
      order: Order of floating-point sums: "direct" or "ring".
    """
    self._programs, self._swarm, self._read = programs, swarm, read
    self._order = order
    self._thread = ThreadPoolExecutor(1, "round")
    self._flight: Future[Any] | None = None
    self._outcome: tuple[int, Any] = (-1, None)
    self._next = 0  # the first round without a contribution of this worker
    self._steps = 0  # steps since the worker started from the shared state
    self._numbers: Iterator[int] = iter(())
    self.state, self.step = state, int(state.step)
    self._told = jax.tree.map(jnp.copy, state.outer.get("workers", {}))
    if kept:
      self._next, self._steps = swarm.revision, self.step
      self._use_leased_samples()
      return
    with contextlib.suppress(StepJump):  # `start` may contribute to a round
      self.start()

  @property
  def idle(self) -> bool:
    return self._flight is None

  def advance(self) -> Any:
    """Makes a step; returns its metrics ``[1]``.

    Raises:
      StepJump: If the worker's contribution was not counted, or was counted in
        a later round. No step was made, and ``step`` has changed.
      PeerHalted: If the coordinator has ended.
    """
    programs, step = self._programs, self.step
    plan = programs.experiment.outer.plan(step)
    begins = self._next_round_is_at(step, "begin")
    if begins:
      self.finish_round()
      self._start_round({})
    ends = self._next_round_is_at(step, "finish")
    examples = programs.experiment.data.batch_size
    batch = self._read([next(self._numbers) for _ in range(examples)])
    if self._next_round_is_at(step, "gradients"):
      return self._advance_data_parallel(batch)
    awaits = ends or programs.joining.awaits(plan)
    if not begins and not ends and (self.idle or not awaits):
      self.state, metrics = programs.step(plan, self.state, batch)
      self.step += 1
      self._steps += 1
      return metrics
    state = self.state
    if programs.changes_gradients:
      found = programs.gradients(state.params, batch)
      self.finish_round()
      found = programs.update_from_gradients(self.state, found)
    else:
      found = programs.update(state, batch)
      if awaits:
        self.finish_round()
    self._update_state({"opt_state": found["opt_state"]})
    updates = found["updates"]
    self._steps += 1
    if ends:
      self._start_round({"updates": updates})
      self.finish_round()
    else:
      self._update_state(programs.hook(
        "finish", plan, NO_EXCHANGE, params=state.params, updates=updates,
        outer=self.state.outer,
      ))
    return {"loss": found["loss"]} | found["norms"] | self._end_step()

  def _advance_data_parallel(self, batch: Any) -> Any:
    """Makes a step with the mean of all workers' gradients; see `advance`."""
    self._steps += 1
    found = self._programs.gradients(self.state.params, batch)
    self._start_round(found | {"opt_state": self.state.opt_state})
    self.finish_round()
    _, found = self._outcome
    return {"loss": found["loss"]} | found["norms"] | self._end_step()

  def finish_round(self) -> None:
    """Waits for the round in progress, and applies its result.

    Raises:
      StepJump: See `advance`.
    """
    if self._flight is None:
      return
    flight, self._flight = self._flight, None
    flight.result()
    number, found = self._outcome
    if not self._swarm.counted or number != self._swarm.revision - 1:
      self.start()
      raise StepJump
    self._update_state(found)
    if number == self._next - 1:
      self._use_leased_samples()
      return
    # The contribution was late. Parameters after "begin" include later steps,
    # so they are shifted like the contribution.
    if "params" not in found:
      params = jax.tree.map(jnp.add, self.state.params, found["moved"])
      self._update_state({"params": params})
    self._resume_after_round(number)
    raise StepJump

  def close(self) -> None:
    """Ends the thread in which rounds run."""
    self._thread.shutdown(wait=False)

  # Position of the worker.

  def _next_round_is_at(self, step: int, hook: str) -> bool:
    """Returns whether the next round is at a hook of a step."""
    return self._programs.event(self._next)[:2] == (step, hook)

  def _use_leased_samples(self) -> None:
    """Makes `advance` read the samples leased for the next contribution."""
    self._numbers = (
      number for start, stop in self._swarm.samples
      for number in range(start, stop)
    )

  def _update_state(self, found: Mapping[str, Any]) -> None:
    """Replaces fields of the training state by the entries of ``found``."""
    self.state = self.state._replace(
      **{k: v for k, v in found.items() if k in TrainState._fields}
    )

  def _end_step(self) -> Any:
    """Ends a step; returns the outer loop's metrics of the worker."""
    state = self.state
    opt_state, told = self._programs.end(
      state.params, state.opt_state, state.outer, self._told
    )
    self._told = jax.tree.map(jnp.copy, state.outer.get("workers", {}))
    self.step += 1
    self.state = state._replace(
      step=jax.device_put(np.int32(self.step), state.step.sharding),
      opt_state=opt_state,
    )
    return told

  def start(self) -> None:
    """Starts from the shared state, like a worker that joins.

    An inner optimizer that has made steps is kept, unless it is shared.
    """
    experiment, swarm = self._programs.experiment, self._swarm
    fresh = experiment.init_state()
    opt_state = self.state.opt_state if self.step else fresh.opt_state
    self.state = fresh._replace(opt_state=opt_state)
    self._update_state(self._programs.with_shared(
      fresh.outer, _outer_entries(swarm.state), starts=True
    ))
    self._resume_after_round(swarm.revision - 1, newcomer=True)

  def _resume_after_round(self, number: int, newcomer: bool = False) -> None:
    """Continues with the first step after the steps of a round.

    Args:
      number: The round's number; -1 for none.
      newcomer: Whether the worker starts from the common parameters.
    """
    self._next = number + 1
    self.step = self._programs.start(self._next)
    if number >= 0:
      event = self._programs.event(number)
      outer, params = self._state_after(
        event, event.until, self.state.outer, self.state.params
      )
      self.state = self.state._replace(outer=outer, params=params)
    if newcomer:
      self._steps = 0
      # For equal workers `_update_state` has replaced the parameters, and the
      # outer state has no "params".
      if (common := self.state.outer.get("params")) is not None:
        self._update_state({"params": jax.tree.map(
          lambda x, y: jax.device_put(x[None], y.sharding), common,
          self.state.params,
        )})
    self.state = self.state._replace(
      step=jax.device_put(np.int32(self.step), self.state.step.sharding),
      opt_state=_with_schedule_step(self.state.opt_state, self.step),
    )
    self._told = jax.tree.map(
      jnp.copy, self.state.outer.get("workers", {})
    )
    self._use_leased_samples()
    following = self._programs.event(self._next)
    # The next round is at the end of a step that other workers have begun. This
    # worker contributes no update to it.
    if following.step < self.step:
      self._start_round({"updates": _zeros(self.state.params)})
      self.finish_round()

  def _state_after(
    self, event: CommunicationRound, until: int, outer: Any, params: Any
  ) -> tuple[Any, Any]:
    """Returns outer state and parameters after a round, before step ``until``.

    The worker's own updates in these steps count as zero.
    """
    plan = self._programs.experiment.outer.plan
    for step in range(event.step + (event.hook != "begin"), until):
      if "finish" in self._programs.communicating_hooks(plan(step)):
        break  # the next round takes place in this step
      found = self._programs.hook(
        "finish", plan(step), NO_EXCHANGE, params=params,
        updates=_zeros(params), outer=outer,
      )
      outer, params = found["outer"], found["params"]
    return outer, params

  # Rounds.

  def _start_round(self, more: dict[str, Any]) -> None:
    """Contributes the current state to the next round.

    ``more`` has further arguments of the round's hook.
    """
    # Copied, since the following steps donate their arguments.
    args = {"params": self.state.params, "outer": self.state.outer} | more
    part = RoundContribution(self._next, jax.tree.map(jnp.copy, args))
    self._next += 1
    self._flight = self._thread.submit(
      self._swarm.give, part, self._combine, self._weight()
    )
    # Processes of one worker must run the same programs in the same order.
    if jax.process_count() > 1:
      wait([self._flight])

  def _weight(self) -> float:
    """Returns the weight of a contribution: its number of examples.

    Usually the worker has made all steps of a round. A worker that has started
    from the shared state during the round has made fewer of them, or none.
    """
    experiment = self._programs.experiment
    every = getattr(experiment.outer, "sync_every", 1)  # steps between rounds
    return float(min(self._steps, every) * experiment.data.batch_size)

  def _combine(
    self, exchange: Any, shared: Mapping[str, Any], part: RoundContribution
  ) -> dict[str, Any]:
    """Returns the shared state after a round (`parallel.peers.exchange`).

    ``shared`` is the state before it, ``part`` this worker's contribution.
    """
    number = exchange.round
    event, args = self._programs.event(number), part.args
    late: dict[str, Any] = {}
    if number != part.round:
      args = self._adapt_late_args(number, _outer_entries(shared), part)
      late["moved"] = jax.tree.map(
        jnp.subtract, args["params"], part.args["params"]
      )
    found = self._programs.hook(
      event.hook, self._programs.experiment.outer.plan(event.step),
      _OrderedExchange(exchange, self._order), **args,
    )
    self._outcome = number, found | late
    rest = {k: v for k, v in shared.items() if k.startswith(ELASTIC_PREFIX)}
    return self._programs.shared(found) | rest

  def _adapt_late_args(
    self, number: int, shared: Mapping[str, Any], part: RoundContribution
  ) -> dict[str, Any]:
    """Returns a late contribution's arguments for round ``number``."""
    args, events = part.args, self._programs.event
    state = self._programs.with_shared(args["outer"], shared)
    if "grads" in args:  # a stale gradient, applied to the current parameters
      return args | state
    params = args["params"]
    if "updates" in args:
      params = optax.apply_updates(params, args["updates"])
    outer, _ = self._state_after(
      events(number - 1), events(number).step, state["outer"], params
    )
    said, now = events(part.round), events(number)
    params, outer = self._programs.joining.late(
      params, args["outer"], outer, (said.hook, now.hook),
      (said.step, now.step),
    )
    if now.hook == "begin":
      return {"params": params, "outer": outer}
    # Expressed as parameters and updates relative to the common parameters,
    # since `finish` of an outer loop may read either.
    common = jax.tree.map(
      lambda x, y: jax.device_put(y[None], x.sharding), params,
      outer["params"],
    )
    updates = jax.tree.map(jnp.subtract, params, common)
    return {"params": common, "outer": outer, "updates": updates}


# Prefix of names in the shared state that are not the outer loop's.
ELASTIC_PREFIX = "elastic/"


class _OrderedExchange:
  """Exchange with other workers, with a fixed order of floating-point sums."""

  def __init__(self, exchange: Any, order: str) -> None:
    self._exchange, self._order = exchange, order
    self.contributors, self.rank = exchange.contributors, exchange.rank
    self.weights, self.gather = exchange.weights, exchange.gather

  def sum(self, x: np.ndarray) -> np.ndarray:
    return self._exchange.sum(x, self._order)


def _outer_entries(shared: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the outer loop's entries in the shared state."""
  return {k: v for k, v in shared.items() if not k.startswith(ELASTIC_PREFIX)}


def _zeros(tree: Any) -> Any:
  return jax.tree.map(jnp.zeros_like, tree)


def _with_schedule_step(opt_state: Any, step: int) -> Any:
  """Returns an optimizer's state with another step of the schedule."""

  def is_schedule(x: Any) -> bool:
    return isinstance(x, optax.ScaleByScheduleState)

  def moved(x: Any) -> Any:
    if not is_schedule(x):
      return x
    count = np.full(x.count.shape, step, x.count.dtype)
    return x._replace(count=jax.device_put(count, x.count.sharding))

  return jax.tree.map(moved, opt_state, is_leaf=is_schedule)
