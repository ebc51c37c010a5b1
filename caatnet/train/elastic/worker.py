"""A worker among others that come and go, from step to step.

A round (`caatnet.train.elastic.single_process.Event`) makes the next revision
of what all workers share of the outer loop's state. What makes it is the loop's
own `begin` or `finish`, run on all contributors at once by `parallel.elastic`;
of workers that are equal, their mean gradient and the update by it. A
revision's number says which round comes next, and so at which step a worker is.
Between two rounds each worker computes by itself how what is shared goes on,
since that depends on nothing else.

A round at a step's beginning is sent by a thread of its own while the host goes
on with steps, until one reads what arrives. Its samples were leased before: so
the steps made meanwhile belong to the same round's samples, and if the worker
dies in these steps, their samples are not drawn again.

What is a worker's own is kept apart, and taken over once the round counts. A
worker that comes, or whose part was not counted, starts from what is shared:
from the common parameters, without what it had left unsaid. One that comes has
a new inner optimizer at the run's place in the schedule, whose moments are zero
and corrected for that. A part that is late counts in a later round: it is moved
by as much as the common parameters have moved since.
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
from parallel.elastic.membership.leases import Spans


class Swarm(Protocol):
  """What a worker needs of `parallel.elastic.swarm.Swarm`."""

  revision: int
  state: Mapping[str, Any]
  samples: Spans
  counted: bool

  def give(self, part: Any, combine: Any, weight: float = 1.0) -> Any:
    """Gives a part to a round; returns when the next one is asked for."""
    ...


class Part(NamedTuple):
  """What a worker gives to a round.

  Attributes:
    round: Its number.
    args: What the round's hook is given: "params", "outer" and perhaps
      "updates".
  """

  round: int
  args: dict[str, Any]


class Moved(Exception):
  """The worker has come to another step than the one after its last."""


class Peer:
  """A worker; one thread calls its methods.

  Attributes:
    state: The training state, of this worker.
    step: The number of the next step.
    idle: Whether nothing is under way, so that the state is whole.
  """

  def __init__(
    self, programs: Programs, swarm: Swarm, state: TrainState,
    read: Callable[[list[int]], Any], *, kept: bool = False,
    order: str = "direct",
  ) -> None:
    """Takes a place in a swarm.

    Args:
      programs: The experiment's programs.
      swarm: Where the worker is a member.
      state: A first state; it is donated.
      read: Reads the examples of some numbers, laid out as a batch.
      kept: Whether the state is one of the swarm's present revision, as a
        checkpoint has it; if not, the worker starts from what is shared.
      order: In which order floats are added: "direct" or "ring".
    """
    self._programs, self._swarm, self._read = programs, swarm, read
    self._order = order
    self._thread = ThreadPoolExecutor(1, "round")
    self._flight: Future[Any] | None = None
    self._outcome: tuple[int, Any] = (-1, None)
    self._next = 0  # the round that is not given yet
    self._steps = 0  # since it has started from what is shared
    self._numbers: Iterator[int] = iter(())
    self.state, self.step = state, int(state.step)
    self._told = jax.tree.map(jnp.copy, state.outer.get("workers", {}))
    if kept:
      self._next, self._steps = swarm.revision, self.step
      self._lease()
      return
    with contextlib.suppress(Moved):  # it may have given a part already
      self.start()

  @property
  def idle(self) -> bool:
    return self._flight is None

  def advance(self) -> Any:
    """Makes a step; returns its metrics ``[1]``.

    Raises:
      Moved: The worker's part was not counted, or in a later round: it is at
        another step now, and has made none.
      Halted: There is no coordinator any more.
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
    awaits = ends or programs.experiment.outer.awaits(plan)
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
    """Makes a step by all workers' gradients, as `advance` says."""
    self._steps += 1
    found = self._programs.gradients(self.state.params, batch)
    self._launch(found | {"opt_state": self.state.opt_state})
    self.land()
    _, found = self._outcome
    return {"loss": found["loss"]} | found["norms"] | self._ended()

  def land(self) -> None:
    """Waits for what is under way, and takes over what has come of it.

    Raises:
      Moved: As `advance` says.
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
    if "params" not in found:  # it was late, and has trained meanwhile
      params = jax.tree.map(jnp.add, self.state.params, found["moved"])
      self._take({"params": params})
    self._go_on(number)
    raise Moved

  def close(self) -> None:
    """Ends the thread."""
    self._thread.shutdown(wait=False)

  # Where the worker is.

  def _is_next(self, step: int, hook: str) -> bool:
    return self._programs.event(self._next)[:2] == (step, hook)

  def _lease(self) -> None:
    """Goes on to the samples of the next part."""
    self._numbers = (
      number for start, stop in self._swarm.samples
      for number in range(start, stop)
    )

  def _take(self, found: Mapping[str, Any]) -> None:
    self.state = self.state._replace(
      **{k: v for k, v in found.items() if k in TrainState._fields}
    )

  def _ended(self) -> Any:
    """Ends a step; returns what the outer loop tells of the worker."""
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
    """Starts from what is shared, as a worker that comes.

    An inner optimizer that has made steps is kept, unless all share one.
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
    """Goes on after a round, at the step where its samples end.

    Args:
      number: The round's number; -1 for none.
      newcomer: Whether the worker takes the common parameters.
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
      # Equal workers have taken what all share, and the loop has no other.
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
    if following.step < self.step:  # it ends a step that has begun for others
      self._launch({"updates": _zeros(self.state.params)})
      self.land()

  def _state_after(
    self, event: Event, until: int, outer: Any, params: Any
  ) -> tuple[Any, Any]:
    """Returns state and parameters after an event and before step ``until``."""
    plan = self._programs.experiment.outer.plan
    for step in range(event.step + (event.hook != "begin"), until):
      if "finish" in self._programs.speaks(plan(step)):
        break  # there is the next round
      found = self._programs.hook(
        "finish", plan(step), ALONE, params=params, updates=_zeros(params),
        outer=outer,
      )
      outer, params = found["outer"], found["params"]
    return outer, params

  # Rounds.

  def _launch(self, more: dict[str, Any]) -> None:
    """Gives the next round what the worker has now."""
    # The steps that follow donate their arguments.
    args = {"params": self.state.params, "outer": self.state.outer} | more
    part = Part(self._next, jax.tree.map(jnp.copy, args))
    self._next += 1
    self._flight = self._thread.submit(
      self._swarm.give, part, self._combine, self._weight()
    )
    if jax.process_count() > 1:  # all run the same programs in the same order
      wait([self._flight])

  def _weight(self) -> float:
    """Returns what a part weighs: the examples that are in it.

    They are those of a round's steps. A newcomer may have made fewer since what
    is exchanged was the same on all, and none if it only ends a step.
    """
    experiment = self._programs.experiment
    every = getattr(experiment.outer, "every", 1)  # else in each step
    return float(min(self._steps, every) * experiment.data.batch_size)

  def _combine(
    self, exchange: Any, shared: Mapping[str, Any], part: Part
  ) -> dict[str, Any]:
    """Makes the next revision, as `parallel.elastic.exchange.Combine` says."""
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
    self, number: int, shared: Mapping[str, Any], part: Part
  ) -> dict[str, Any]:
    """Returns what is given to a later round than that of the part."""
    args, events = part.args, self._programs.event
    state = self._programs.with_shared(args["outer"], shared)
    if "grads" in args:  # an older gradient, for what all have now
      return args | state
    params = args["params"]
    if "updates" in args:
      params = optax.apply_updates(params, args["updates"])
    outer, _ = self._state_after(
      events(number - 1), events(number).step, state["outer"], params
    )
    said, now = events(part.round), events(number)
    params, outer = self._programs.experiment.outer.late(
      params, args["outer"], outer, (said.hook, now.hook),
      (said.step, now.step),
    )
    if now.hook == "begin":
      return {"params": params, "outer": outer}
    # As if it had trained from the common parameters: loops may read either.
    common = jax.tree.map(
      lambda x, y: jax.device_put(y[None], x.sharding), params,
      outer["params"],
    )
    updates = jax.tree.map(jnp.subtract, params, common)
    return {"params": common, "outer": outer, "updates": updates}


PREFIX = "elastic/"  # of what is shared beside the outer loop's state


class _Ordered:
  """An exchange with an order of sums."""

  def __init__(self, exchange: Any, order: str) -> None:
    self._exchange, self._order = exchange, order
    self.contributors, self.rank = exchange.contributors, exchange.rank
    self.weights, self.gather = exchange.weights, exchange.gather

  def sum(self, x: np.ndarray) -> np.ndarray:
    return self._exchange.sum(x, self._order)


def _ours(shared: Mapping[str, Any]) -> dict[str, Any]:
  return {k: v for k, v in shared.items() if not k.startswith(PREFIX)}


def _zeros(tree: Any) -> Any:
  return jax.tree.map(jnp.zeros_like, tree)


def _at(opt_state: Any, step: int) -> Any:
  """Returns an inner optimizer's state, at a step's place in the schedule."""

  def is_schedule(x: Any) -> bool:
    return isinstance(x, optax.ScaleByScheduleState)

  def moved(x: Any) -> Any:
    if not is_schedule(x):
      return x
    count = np.full(x.count.shape, step, x.count.dtype)
    return x._replace(count=jax.device_put(count, x.count.sharding))

  return jax.tree.map(moved, opt_state, is_leaf=is_schedule)
