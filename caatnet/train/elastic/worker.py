"""Worker in a swarm with elastic membership: its steps and rounds.

A round (`caatnet.train.elastic.single_process.Event`) computes the next
revision of the shared part of the outer loop's state. The computation is the
loop's `begin` or `finish`, executed on all contributors by `parallel.peers`;
for workers that stay equal (averaged gradients) it is the update by the mean
gradient. The number of a revision determines the next round, and so the step of
a worker. Between two rounds each worker updates the shared state by itself,
which is deterministic.

A round at the beginning of a step runs in a separate thread while the host
continues with steps, until a step reads the result. A round's lease, which
precedes it, includes the samples of these steps. So if the worker dies during
them, their samples count as used and are not leased again.

Private state of a worker is kept separately, and updated once its contribution
has been counted. A worker that joins, or whose contribution was not counted,
starts from the shared state: from the common parameters, without the update
that it has not sent. A joining worker has a new inner optimizer at the run's
schedule step, with zero moments and matching bias correction. A late
contribution counts in a later round: it is shifted by the change of the common
parameters since its round.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
import contextlib
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from caatnet.train.elastic.single_process import ALONE, Event, Programs
from caatnet.train.state import TrainState
from parallel.peers.membership.leases import Spans


class Swarm(Protocol):
  """Interface of `parallel.peers.swarm.Swarm` that a worker uses."""

  revision: int
  state: Mapping[str, Any]
  samples: Spans
  counted: bool

  def give(self, part: Any, combine: Any, weight: float = 1.0) -> Any:
    """Contributes a part to a round; returns when the next one is requested."""
    ...


class WorkerPart(NamedTuple):
  """Contribution of a worker to a round.

  Attributes:
    round: The number of the round.
    args: Arguments of the round's hook: "params", "outer" and, depending on the
      hook, "updates" or gradients.
  """

  round: int
  args: dict[str, Any]


class Moved(Exception):
  """Signal: the worker is now at a step that does not follow its last one."""


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
      self._lease()
      return
    with contextlib.suppress(Moved):  # `start` may contribute to a round
      self.start()

  @property
  def idle(self) -> bool:
    return self._flight is None

  def advance(self) -> Any:
    """Makes a step; returns its metrics ``[1]``.

    Raises:
      Moved: If the worker's contribution was not counted, or was counted in a
        later round. The worker is then at another step and has made none.
      Halted: If the coordinator has ended.
    """
    programs, step = self._programs, self.step
    plan = programs.experiment.outer.plan(step)
    begins = self._is_next(step, "begin")
    if begins:
      self.land()
      self._launch({})
    ends = self._is_next(step, "finish")
    examples = programs.experiment.data.batch_size
    batch = self._read([next(self._numbers) for _ in range(examples)])
    if self._is_next(step, "gradients"):
      return self._advance_equally(batch)
    awaits = ends or programs.joining.awaits(plan)
    if not begins and not ends and (self.idle or not awaits):
      self.state, metrics = programs.step(plan, self.state, batch)
      self.step += 1
      self._steps += 1
      return metrics
    state = self.state
    if programs.reads_gradients:
      found = programs.gradients(state.params, batch)
      self.land()
      found = programs.updated(self.state, found)
    else:
      found = programs.update(state, batch)
      if awaits:
        self.land()
    self._take({"opt_state": found["opt_state"]})
    updates = found["updates"]
    self._steps += 1
    if ends:
      self._launch({"updates": updates})
      self.land()
    else:
      self._take(programs.hook(
        "finish", plan, ALONE, params=state.params, updates=updates,
        outer=self.state.outer,
      ))
    return {"loss": found["loss"]} | found["norms"] | self._ended()

  def _advance_equally(self, batch: Any) -> Any:
    """Makes a step with the mean of all workers' gradients; see `advance`."""
    self._steps += 1
    found = self._programs.gradients(self.state.params, batch)
    self._launch(found | {"opt_state": self.state.opt_state})
    self.land()
    _, found = self._outcome
    return {"loss": found["loss"]} | found["norms"] | self._ended()

  def land(self) -> None:
    """Waits for the round in progress, and applies its result.

    Raises:
      Moved: See `advance`.
    """
    if self._flight is None:
      return
    flight, self._flight = self._flight, None
    flight.result()
    number, found = self._outcome
    if not self._swarm.counted or number != self._swarm.revision - 1:
      self.start()
      raise Moved
    self._take(found)
    if number == self._next - 1:
      self._lease()
      return
    # The contribution was late. Parameters after "begin" include later steps,
    # so they are shifted like the contribution.
    if "params" not in found:
      params = jax.tree.map(jnp.add, self.state.params, found["moved"])
      self._take({"params": params})
    self._go_on(number)
    raise Moved

  def close(self) -> None:
    """Ends the thread in which rounds run."""
    self._thread.shutdown(wait=False)

  # Position of the worker.

  def _is_next(self, step: int, hook: str) -> bool:
    """Returns whether the next round is at a hook of a step."""
    return self._programs.event(self._next)[:2] == (step, hook)

  def _lease(self) -> None:
    """Continues with the samples that are leased for the next contribution."""
    self._numbers = (
      number for start, stop in self._swarm.samples
      for number in range(start, stop)
    )

  def _take(self, found: Mapping[str, Any]) -> None:
    """Replaces those fields of the training state that ``found`` has."""
    self.state = self.state._replace(
      **{k: v for k, v in found.items() if k in TrainState._fields}
    )

  def _ended(self) -> Any:
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
    self._take(self._programs.with_shared(
      fresh.outer, _ours(swarm.state), starts=True
    ))
    self._go_on(swarm.revision - 1, newcomer=True)

  def _go_on(self, number: int, newcomer: bool = False) -> None:
    """Continues after a round, at the step where its samples end.

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
      # For equal workers `_take` has replaced the parameters, and the outer
      # state has no "params".
      if (common := self.state.outer.get("params")) is not None:
        self._take({"params": jax.tree.map(
          lambda x, y: jax.device_put(x[None], y.sharding), common,
          self.state.params,
        )})
    self.state = self.state._replace(
      step=jax.device_put(np.int32(self.step), self.state.step.sharding),
      opt_state=_at(self.state.opt_state, self.step),
    )
    self._told = jax.tree.map(
      jnp.copy, self.state.outer.get("workers", {})
    )
    self._lease()
    following = self._programs.event(self._next)
    # The next round is at the end of a step that other workers have begun. This
    # worker contributes no update to it.
    if following.step < self.step:
      self._launch({"updates": _zeros(self.state.params)})
      self.land()

  def _state_after(
    self, event: Event, until: int, outer: Any, params: Any
  ) -> tuple[Any, Any]:
    """Returns state and parameters after an event and before step ``until``."""
    plan = self._programs.experiment.outer.plan
    for step in range(event.step + (event.hook != "begin"), until):
      if "finish" in self._programs.communicating_hooks(plan(step)):
        break  # the next round takes place in this step
      found = self._programs.hook(
        "finish", plan(step), ALONE, params=params, updates=_zeros(params),
        outer=outer,
      )
      outer, params = found["outer"], found["params"]
    return outer, params

  # Rounds.

  def _launch(self, more: dict[str, Any]) -> None:
    """Contributes the current state to the next round."""
    # Copied, since the following steps donate their arguments.
    args = {"params": self.state.params, "outer": self.state.outer} | more
    part = WorkerPart(self._next, jax.tree.map(jnp.copy, args))
    self._next += 1
    self._flight = self._thread.submit(
      self._swarm.give, part, self._combine, self._weight()
    )
    # Processes of one worker must run the same programs in the same order.
    if jax.process_count() > 1:
      wait([self._flight])

  def _weight(self) -> float:
    """Returns the weight of a contribution: its number of examples.

    These are the examples of a round's steps. A new worker may have made fewer
    steps since it started from the shared state, or none.
    """
    experiment = self._programs.experiment
    every = getattr(experiment.outer, "sync_every", 1)  # steps between rounds
    return float(min(self._steps, every) * experiment.data.batch_size)

  def _combine(
    self, exchange: Any, shared: Mapping[str, Any], part: WorkerPart
  ) -> dict[str, Any]:
    """Computes the next revision; see `parallel.peers.exchange.Combine`."""
    number = exchange.round
    event, args = self._programs.event(number), part.args
    late: dict[str, Any] = {}
    if number != part.round:
      args = self._later(number, _ours(shared), part)
      late["moved"] = jax.tree.map(
        jnp.subtract, args["params"], part.args["params"]
      )
    found = self._programs.hook(
      event.hook, self._programs.experiment.outer.plan(event.step),
      _Ordered(exchange, self._order), **args,
    )
    self._outcome = number, found | late
    rest = {k: v for k, v in shared.items() if k.startswith(PREFIX)}
    return self._programs.shared(found) | rest

  def _later(
    self, number: int, shared: Mapping[str, Any], part: WorkerPart
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
PREFIX = "elastic/"


class _Ordered:
  """Exchange with a fixed order of floating-point sums."""

  def __init__(self, exchange: Any, order: str) -> None:
    self._exchange, self._order = exchange, order
    self.contributors, self.rank = exchange.contributors, exchange.rank
    self.weights, self.gather = exchange.weights, exchange.gather

  def sum(self, x: np.ndarray) -> np.ndarray:
    return self._exchange.sum(x, self._order)


def _ours(shared: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the outer loop's part of the shared state."""
  return {k: v for k, v in shared.items() if not k.startswith(PREFIX)}


def _zeros(tree: Any) -> Any:
  return jax.tree.map(jnp.zeros_like, tree)


def _at(opt_state: Any, step: int) -> Any:
  """Returns an inner optimizer's state with the schedule at a given step."""

  def is_schedule(x: Any) -> bool:
    return isinstance(x, optax.ScaleByScheduleState)

  def moved(x: Any) -> Any:
    if not is_schedule(x):
      return x
    count = np.full(x.count.shape, step, x.count.dtype)
    return x._replace(count=jax.device_put(count, x.count.sharding))

  return jax.tree.map(moved, opt_state, is_leaf=is_schedule)
