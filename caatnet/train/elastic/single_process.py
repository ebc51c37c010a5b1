"""A worker that is alone in its process: its programs, and when it speaks.

A step without a word to others is one program, that of a run with one worker.
Else it is cut where the outer loop speaks: `begin`, gradients, their update and
`finish` are programs of their own, of which `begin` and `finish` are run in
stages (`parallel.outer.apart`). A worker has parameters ``[1, ...]``, and its
part of the outer loop's state. The rest of that state all workers share.

Workers whose gradients are averaged stay equal, and share parameters and inner
optimizer. They speak between the gradients and the update, which is a hook of
its own here: its exchange makes the next parameters.
"""

from collections.abc import Callable, Iterator, Mapping
import functools
import itertools
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from caatnet.train.experiment import Experiment
from caatnet.train.state import TrainState, restarted, specs_like_outer
from caatnet.train.step import make_update, told_of, worker_gradients
from parallel.collectives import (
  after,
  all_gather,
  each_lane,
  ranks_here,
  varying,
)
from parallel.outer.apart import Alone, Apart, listening, whole
from parallel.outer.base import OuterLoop, Plan

ALONE = Alone()
_HOOKS = ("begin", "gradients", "finish")
_EQUAL = ("params", "opt_state")  # of workers that are equal


class Event(NamedTuple):
  """A round: what a worker says to the others at a time.

  Attributes:
    step: The number of the step, from 0.
    hook: "begin", "gradients" or "finish", where the outer loop speaks in it.
    until: The first step after that for which what was said is known to have
      arrived. All steps before it belong to this round, or to earlier ones.
  """

  step: int
  hook: str
  until: int


class Programs:
  """An experiment's programs for one worker; any thread may run them.

  Attributes:
    experiment: The experiment, of one worker.
    options: XLA's, for all programs.
  """

  def __init__(
    self, experiment: Experiment, options: Mapping[str, Any] | None = None
  ) -> None:
    """Compiles nothing yet.

    Args:
      experiment: The experiment, of one worker.
      options: XLA's, for all programs.

    Raises:
      ValueError: The outer loop cannot run so.
    """
    self.experiment, self.options = experiment, dict(options or {})
    self._outer, self._program = experiment.outer, experiment.program
    worker = self._program.layout.worker
    name = type(self._outer).__name__
    if worker.size != 1:
      raise ValueError(
        f"config.parallel.worker={worker.size} must be 1: each process is one "
        "worker"
      )
    if not self._outer.averages:
      raise ValueError(
        f"the workers of {name} exchange no mean, but in pairs, so they cannot "
        "come and go"
      )
    self._like = jax.eval_shape(self._outer.init, self._program.stored_shapes)
    if self._outer.equal:
      first = experiment.abstract_state()
      self._like |= {"params": first.params, "opt_state": first.opt_state}
    if "params" not in self._like:
      raise ValueError(
        f"the workers of {name} share no parameters from which one that comes "
        "could start: give the config a section config.elastic, as "
        "configs/elastic/diloco.py does"
      )
    self._whole: dict[Any, Any] = {}
    self._sends: dict[Any, tuple[str, ...]] = {}
    self._events: list[Event] = []
    self._more = self._enumerate()
    self._lock = threading.RLock()
    for step in self._outer.steady_round:  # refuses what cannot be carried
      self.speaks(self._outer.plan(step))

  # When the worker speaks.

  def event(self, number: int) -> Event:
    """Returns a round, by its number from 0."""
    with self._lock:
      while len(self._events) <= number:
        self._events.append(next(self._more))
      return self._events[number]

  def start(self, number: int) -> int:
    """Returns the first step whose samples are of a round."""
    return self.event(number - 1).until if number else 0

  def steps_of(self, number: int) -> int:
    """Returns for how many steps a round's samples are."""
    return self.event(number).until - self.start(number)

  def num_rounds(self, steps: int) -> int:
    """Returns how many rounds begin in the first steps."""
    return next(n for n in itertools.count() if self.event(n).step >= steps)

  def num_samples(self, number: int) -> int:
    """Returns how many examples a worker reads for a round."""
    return self.steps_of(number) * self.experiment.data.batch_size

  def _enumerate(self) -> Iterator[Event]:
    waiting = None
    for step in itertools.count():
      plan = self._outer.plan(step)
      hooks = self.speaks(plan)
      if "begin" in hooks:
        if waiting is not None:  # two at a time would be mixed up
          yield Event(waiting, "begin", step)
        waiting = step
      ends = [hook for hook in hooks if hook != "begin"]
      if waiting is not None and (ends or self._outer.awaits(plan)):
        yield Event(waiting, "begin", step + 1)
        waiting = None
      for hook in ends:
        yield Event(step, hook, step + 1)

  def speaks(self, plan: Plan) -> tuple[str, ...]:
    """Returns which hooks of a step say something, in their order."""
    if plan.variant in self._sends:
      return self._sends[plan.variant]
    layout, found = self._program.layout, []

    def look(args):
      axis, count = listening(layout.worker.name)
      loop, params = self._outer.over(axis), args["params"]
      numbered = Plan(plan.variant, args["numbers"])
      state = args["outer"] | {
        key: jnp.ones(axis.size) for key in self._outer.of_each
      }
      counts = [count()]
      state = loop.begin(params, state, numbered)
      counts.append(count())
      updates = loop.gradients(params, state)
      counts.append(count())
      loop.finish(params, updates, state, numbered)
      counts.append(count())
      said = [x < y for x, y in itertools.pairwise(counts)]
      found.append(tuple(itertools.compress(_HOOKS, said)))
      if "gradients" in found[-1] and not loop.equal:
        raise ValueError("gradients that are exchanged make no workers equal")
      return varying(jnp.zeros(1), *layout.mesh.axis_names)

    state = self.experiment.abstract_state()
    args = self._args(plan, params=state.params, outer=state.outer)
    jax.eval_shape(jax.shard_map(
      look, mesh=layout.mesh, in_specs=(self._specs(args),),
      out_specs=P(layout.mesh.axis_names),
    ), args)
    self._sends[plan.variant] = found[-1]
    return found[-1]

  # The programs.

  def step(
    self, plan: Plan, state: TrainState, batch: Any
  ) -> tuple[TrainState, Any]:
    """Makes a step in which nothing is said; donates the state."""
    with self._lock:
      if plan.variant not in self._whole:
        lowered = self.experiment.lower_step(plan)
        self._whole[plan.variant] = lowered.compile(self.options)
    numbers = jax.tree.map(np.int32, plan.numbers)
    return self._whole[plan.variant](state, batch, numbers)

  @property
  def reads_gradients(self) -> bool:
    """Whether the outer loop changes gradients, by what has arrived."""
    return type(self._outer).gradients is not OuterLoop.gradients

  def update(self, state: TrainState, batch: Any) -> dict[str, Any]:
    """Returns "loss", "updates", "opt_state" and "norms" of gradients.

    One program makes all of them, in which the outer loop reads nothing.
    """
    return self._both(ALONE, {
      "params": state.params, "batch": batch, "opt_state": state.opt_state,
    })

  def gradients(self, params: Any, batch: Any) -> dict[str, Any]:
    """Returns a batch's "loss" ``[1]`` and gradients, "grads"."""
    return self._gradients(ALONE, {"params": params, "batch": batch})

  def updated(self, state: TrainState, found: Any) -> dict[str, Any]:
    """Returns what `update` does, of what `gradients` has returned."""
    return self._update(ALONE, found | {
      "params": state.params, "opt_state": state.opt_state,
      "outer": state.outer,
    })

  def hook(self, hook: str, plan: Plan, exchange: Any, **args: Any) -> Any:
    """Runs a hook of a step, and what it says by an exchange.

    Args:
      hook: "begin", "gradients" or "finish".
      plan: The step's.
      exchange: By which it speaks; `ALONE` if it says nothing.
      **args: "params" and "outer", and "updates" for "finish"; for "gradients"
        "loss", "grads" and "opt_state".

    Returns:
      A dict with "outer", and with "params" after "finish"; after "gradients"
      with all that the step makes.
    """
    return self._hook(hook, plan.variant)(exchange, self._args(plan, **args))

  def end(
    self, params: Any, opt_state: Any, outer: Any, before: Any
  ) -> tuple[Any, Any]:
    """Ends a step; a worker that was left out gets a new inner optimizer.

    Args:
      params: The worker's parameters after the step.
      opt_state: The inner optimizer's state after the step.
      outer: The outer loop's state after the step.
      before: What the outer loop told of the worker before.

    Returns:
      The optimizer's state, and what is told now.
    """
    found = self._end(ALONE, {
      "params": params, "opt_state": opt_state, "outer": outer,
      "before": before,
    })
    return found["opt_state"], found["told"]

  @functools.cached_property
  def _gradients(self) -> Apart:
    program, accumulation = self._program, self.experiment.train.accumulation

    def run(args):
      loss, grads = each_lane(
        functools.partial(worker_gradients, program, accumulation),
        program.layout.worker, args["params"], args["batch"],
      )
      return {"loss": loss, "grads": grads}

    return self._apart(lambda *_: run)

  @functools.cached_property
  def _update(self) -> Apart:
    return self._apart(lambda *_: self._updating(self._outer))

  def _updating(self, loop: OuterLoop) -> Callable[[Any], Any]:
    """Returns the update of gradients, "grads", that a loop changes first."""
    layout = self._program.layout
    update = make_update(
      self._program, self.experiment.optimizer, self.experiment.clip_norm
    )

    def run(args):
      loss, grads = args["loss"], args["grads"]
      if "outer" in args:
        grads = loop.gradients(grads, args["outer"])
      updates, opt_state, norms = each_lane(
        update, layout.worker, grads, args["opt_state"], args["params"]
      )
      updates = after(updates, (loss, norms), layout.on_cpu)
      return {
        "loss": loss, "updates": updates, "opt_state": opt_state,
        "norms": norms,
      }

    return run

  @functools.cached_property
  def _both(self) -> Apart:
    gradients, update = self._gradients.alone, self._update.alone
    return self._apart(lambda *_: lambda args: update(args | gradients(args)))

  @functools.cached_property
  def _end(self) -> Apart:
    def run(args):
      told = told_of(self._outer, args["outer"], {"workers": args["before"]})
      opt_state = restarted(
        self.experiment.optimizer, args["opt_state"], args["params"], told
      )
      return {"opt_state": opt_state, "told": told}

    return self._apart(lambda *_: run)

  @functools.cache  # noqa: B019
  def _hook(self, hook: str, variant: Any) -> Apart:
    def make(axis, weights):
      loop = self._outer.over(axis, weights)

      def begin(args):
        outer = args["outer"]
        told = {key: all_gather(outer[key][:, None], axis) for key in each}
        state = loop.begin(
          args["params"], outer | told, Plan(variant, args["numbers"])
        )
        return {"outer": state | {key: outer[key] for key in each}}

      def finish(args):
        outer = args["outer"]
        params, state = loop.finish(
          args["params"], args["updates"],
          {k: v for k, v in outer.items() if k not in each},
          Plan(variant, args["numbers"]),
        )
        mine = {
          key: state[key][ranks_here(axis)] if key in state else outer[key]
          for key in each
        }
        return {"params": params, "outer": state | mine}

      def gradients(args):  # such loops say nothing in `finish`
        found = self._updating(loop)(args)
        return found | finish(args | {"updates": found.pop("updates")})

      return {"begin": begin, "gradients": gradients, "finish": finish}[hook]

    each = self._outer.of_each
    return self._apart(make)

  def _apart(self, make: Callable[..., Any]) -> Apart:
    layout = self._program.layout
    return Apart(
      make, layout.mesh, layout.worker.name, self._specs, self.options
    )

  def _args(self, plan: Plan, **args: Any) -> dict[str, Any]:
    return args | {"numbers": jax.tree.map(np.int32, plan.numbers)}

  def _specs(self, args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how the arguments or values of programs lie on the mesh."""
    program, layout = self._program, self._program.layout

    def of(key: str, tree: Any) -> Any:
      if key == "numbers":
        return P()
      if key == "batch":
        return layout.batch_spec
      if key != "outer":
        return layout.per_worker(program.specs_like_params(tree))
      specs = specs_like_outer(program, self._outer, tree)
      each = {k: specs[k] for k in self._outer.of_each if k in specs}
      return specs | layout.per_worker(each)

    return {key: of(key, tree) for key, tree in args.items()}

  # What is shared.

  def shared(self, state: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the arrays of a training state that all share, by name.

    Args:
      state: "outer", the outer loop's state; and "params" and "opt_state",
        which are read of equal workers only.
    """
    own = {*self._outer.own, *self._outer.of_each}
    part = {k: tree for k, tree in state["outer"].items() if k not in own}
    if self._outer.equal:
      part |= {key: state[key] for key in _EQUAL}
    return {
      _name(path): np.array(whole(x))
      for path, x in jax.tree.leaves_with_path(part)
    }

  def with_shared(
    self, outer: Any, shared: Mapping[str, Any], starts: bool = False
  ) -> dict[str, Any]:
    """Returns what `shared` takes, with what all share replaced.

    Args:
      outer: A worker's state of the outer loop.
      shared: What `shared` returned, of this worker or of another.
      starts: Whether the worker's own part starts from what all share.
    """
    own = {*self._outer.own, *self._outer.of_each}
    found = {key: tree for key, tree in outer.items() if key in own}
    names = {name.split("/")[0] for name in shared}
    # An optimizer without a state has no arrays.
    for key in sorted(names | self._like.keys() - own):
      # What a step adds, such as a mean on its way, is like the parameters.
      like = self._like.get(key, self._like["params"])
      found[key] = jax.tree.map_with_path(
        lambda path, x, key=key: np.array(shared[f"{key}/{_name(path)}"])
        if path else np.array(shared[key]),
        like,
      )
    state = {key: found.pop(key) for key in _EQUAL if self._outer.equal}
    state["outer"] = self._outer.started(found) if starts else found
    specs = self._program.layout.shardings(self._specs(state))
    return jax.device_put(state, specs)


def _name(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")
