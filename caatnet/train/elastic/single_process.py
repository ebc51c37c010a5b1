"""Compiled programs and communication points of a single-process worker.

A step in which workers do not communicate is one program, the same as in a run
with one worker. In other steps `begin`, gradients, update and `finish` of the
outer loop are separate programs. `begin` and `finish` are further split at each
collective, which the host executes (`parallel.outer.apart`). A worker has
parameters ``[1, ...]`` and its private part of the outer loop's state. The rest
of that state is shared by all workers.

If an outer loop averages gradients, workers stay equal and also share
parameters and inner optimizer. They communicate between gradients and update,
in the hook "gradients", which then returns the next parameters.
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
from caatnet.train.gradients import worker_gradients
from caatnet.train.inner import make_update
from caatnet.train.state import TrainState, reset_left_out, specs_like_outer
from caatnet.train.step import outer_metrics
from parallel.collectives import (
  all_gather,
  each_lane,
  order_after,
  ranks_here,
  varying,
)
from parallel.outer.apart import (
  LoopbackCollectives,
  StagedFunction,
  counting_axis,
  to_host_array,
)
from parallel.outer.base import (
  PER_WORKER_KEYS,
  WORKER_DIM_KEYS,
  OuterLoop,
  Plan,
)
from parallel.outer.joining import elastic_adapter, with_worker_axis

NO_EXCHANGE = LoopbackCollectives()
_HOOKS = ("begin", "gradients", "finish")
_EQUAL_WORKER_FIELDS = (
  "params", "opt_state"
)  # fields that are also shared if all workers stay equal


class CommunicationRound(NamedTuple):
  """Round of a worker: one point at which it communicates.

  Attributes:
    step: The number of the step, from 0.
    hook: The hook in which the outer loop communicates: "begin", "gradients" or
      "finish".
    until: The step after the one in which the result is received. All steps
      before ``until`` belong to this round or to earlier ones.
  """

  step: int
  hook: str
  until: int


class Programs:
  """Programs of an experiment for one worker; any thread may run them.

  Attributes:
    experiment: The experiment, with one worker.
    joining: Adapter of the outer loop to workers that join and leave.
    options: XLA compiler options of all programs.
  """

  def __init__(
    self, experiment: Experiment, options: Mapping[str, Any] | None = None
  ) -> None:
    """Checks the outer loop; programs are compiled at first use.

    Args:
      experiment: The experiment, with one worker.
      options: XLA compiler options of all programs, in addition to those of
        the layout.

    Raises:
      ValueError: If the outer loop does not support elastic membership.
    """
    self._outer, self._program = experiment.outer, experiment.program
    layout = self._program.layout
    self.experiment, self.joining = experiment, elastic_adapter(
      experiment.outer
    )
    self.options = layout.compiler_options() | dict(options or {})
    worker = layout.worker
    name = type(self._outer).__name__
    if worker.size != 1:
      raise ValueError(
        f"config.parallel.worker={worker.size} must be 1, since each process "
        "is one worker"
      )
    if not self._outer.averages:
      raise ValueError(
        f"workers of {name} exchange parameters in pairs instead of averaging "
        "them, so they cannot join and leave; use another "
        "config.outer.algorithm"
      )
    self._like = jax.eval_shape(self._outer.init, self._program.trained_shapes)
    self._each = [key for key in PER_WORKER_KEYS if key in self._like]
    if self._outer.equal:
      first = experiment.abstract_state()
      self._like |= {"params": first.params, "opt_state": first.opt_state}
    if "params" not in self._like:
      raise ValueError(
        f"workers of {name} share no parameters from which a new worker could "
        "start: add a section config.elastic to the config, as in "
        "configs/elastic/diloco.py"
      )
    self._whole: dict[Any, Any] = {}
    self._sends: dict[Any, tuple[str, ...]] = {}
    self._events: list[CommunicationRound] = []
    self._more = self._iterate_rounds()
    self._lock = threading.RLock()
    for step in self._outer.steady_round:  # raises for unsupported exchanges
      self.communicating_hooks(self._outer.plan(step))

  # Communication points.

  def event(self, number: int) -> CommunicationRound:
    """Returns the communication round with this number, counted from 0."""
    with self._lock:
      while len(self._events) <= number:
        self._events.append(next(self._more))
      return self._events[number]

  def start(self, number: int) -> int:
    """Returns the first step of a round."""
    return self.event(number - 1).until if number else 0

  def num_steps(self, number: int) -> int:
    """Returns the number of steps of a round."""
    return self.event(number).until - self.start(number)

  def num_rounds(self, steps: int) -> int:
    """Returns the number of rounds that begin in the first ``steps`` steps."""
    return next(n for n in itertools.count() if self.event(n).step >= steps)

  def num_samples(self, number: int) -> int:
    """Returns the number of examples that a worker reads in a round."""
    return self.num_steps(number) * self.experiment.data.batch_size

  def _iterate_rounds(self) -> Iterator[CommunicationRound]:
    """Yields all rounds in order."""
    waiting = None  # step of a "begin" whose result has not been received
    for step in itertools.count():
      plan = self._outer.plan(step)
      hooks = self.communicating_hooks(plan)
      if "begin" in hooks:
        if waiting is not None:  # only one exchange may be in progress
          yield CommunicationRound(waiting, "begin", step)
        waiting = step
      ends = [hook for hook in hooks if hook != "begin"]
      if waiting is not None and (ends or self.joining.awaits(plan)):
        yield CommunicationRound(waiting, "begin", step + 1)
        waiting = None
      for hook in ends:
        yield CommunicationRound(step, hook, step + 1)

  def communicating_hooks(self, plan: Plan) -> tuple[str, ...]:
    """Returns the outer loop's hooks that communicate in a step, in order.

    They are found by tracing all hooks with an axis that counts collectives.
    """
    if plan.variant in self._sends:
      return self._sends[plan.variant]
    layout, found = self._program.layout, []

    def look(args):
      axis, count = counting_axis(layout.worker.name)
      loop, params = with_worker_axis(self._outer, axis), args["params"]
      numbered = Plan(plan.variant, args["numbers"])
      state = args["outer"] | {
        key: jnp.ones(axis.size) for key in self._each
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
        raise ValueError(
          "an outer loop that exchanges gradients must keep workers equal"
        )
      return varying(jnp.zeros(1), *layout.mesh.axis_names)

    state = self.experiment.abstract_state()
    args = self._with_plan_numbers(plan, params=state.params, outer=state.outer)
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
    """Makes a step without communication between workers; donates the state."""
    with self._lock:
      if plan.variant not in self._whole:
        lowered = self.experiment.lower_step(plan)
        self._whole[plan.variant] = lowered.compile(self.options)
    numbers = jax.tree.map(np.int32, plan.numbers)
    return self._whole[plan.variant](state, batch, numbers)

  @property
  def changes_gradients(self) -> bool:
    """Whether the outer loop changes gradients before the update."""
    return type(self._outer).gradients is not OuterLoop.gradients

  def update(self, state: TrainState, batch: Any) -> dict[str, Any]:
    """Returns "loss", "updates", "opt_state" and gradient "norms" of a batch.

    This is one program, for outer loops that do not change gradients.
    """
    return self._fused_program(NO_EXCHANGE, {
      "params": state.params, "batch": batch, "opt_state": state.opt_state,
    })

  def gradients(self, params: Any, batch: Any) -> dict[str, Any]:
    """Returns a batch's "loss" ``[1]`` and gradients, "grads"."""
    return self._gradients_program(
      NO_EXCHANGE, {"params": params, "batch": batch}
    )

  def update_from_gradients(
    self, state: TrainState, found: Any
  ) -> dict[str, Any]:
    """Returns the result of `update`, computed from that of `gradients`."""
    return self._update_program(NO_EXCHANGE, found | {
      "params": state.params, "opt_state": state.opt_state,
      "outer": state.outer,
    })

  def hook(self, hook: str, plan: Plan, exchange: Any, **args: Any) -> Any:
    """Runs a hook of a step with its exchanges.

    Args:
      hook: "begin", "gradients" or "finish".
      plan: The plan of the step.
      exchange: Exchange with other workers; `NO_EXCHANGE` if the hook does not
        communicate.
      **args: "params" and "outer"; for "finish" also "updates"; for "gradients"
        also "loss", "grads" and "opt_state".

    Returns:
      A dict with "outer"; after "finish" also "params"; after "gradients" also
      "params", "opt_state", "loss" and "norms".
    """
    return self._hook_program(hook, plan.variant)(
      exchange, self._with_plan_numbers(plan, **args)
    )

  def end(
    self, params: Any, opt_state: Any, outer: Any, before: Any
  ) -> tuple[Any, Any]:
    """Ends a step; resets the inner optimizer of a worker that was excluded.

    Args:
      params: The worker's parameters after the step.
      opt_state: The inner optimizer's state after the step.
      outer: The outer loop's state after the step.
      before: The entry "workers" of the outer loop's state before the step.

    Returns:
      The optimizer's state, and the outer loop's metrics of the step.
    """
    found = self._end_program(NO_EXCHANGE, {
      "params": params, "opt_state": opt_state, "outer": outer,
      "before": before,
    })
    return found["opt_state"], found["told"]

  @functools.cached_property
  def _gradients_program(self) -> StagedFunction:
    """Program of `gradients`."""
    program, accumulation = self._program, self.experiment.train.accumulation

    def run(args):
      loss, grads = each_lane(
        functools.partial(worker_gradients, program, accumulation),
        program.layout.worker, args["params"], args["batch"],
      )
      return {"loss": loss, "grads": grads}

    return self._make_program(lambda *_: run)

  @functools.cached_property
  def _update_program(self) -> StagedFunction:
    return self._make_program(lambda *_: self._make_update(self._outer))

  def _make_update(self, loop: OuterLoop) -> Callable[[Any], Any]:
    """Returns a function that computes updates from loss and gradients."""
    layout = self._program.layout
    update = make_update(
      self._program, self.experiment.optimizer, self.experiment.clip_norm
    )

    def run(args):
      loss, grads = args["loss"], args["grads"]
      if "outer" in args:
        grads = loop.gradients(grads, args["outer"])
      updates, opt_state, norms = update(
        grads, args["opt_state"], args["params"]
      )
      updates = order_after(updates, (loss, norms), layout.on_cpu)
      return {
        "loss": loss, "updates": updates, "opt_state": opt_state,
        "norms": norms,
      }

    return run

  @functools.cached_property
  def _fused_program(self) -> StagedFunction:
    """Program of `update`, which computes gradients and updates."""
    gradients, update = (
      self._gradients_program.alone,
      self._update_program.alone,
    )
    return self._make_program(
      lambda *_: lambda args: update(args | gradients(args))
    )

  @functools.cached_property
  def _end_program(self) -> StagedFunction:
    def run(args):
      told = outer_metrics(
        self._outer, args["outer"], {"workers": args["before"]}
      )
      opt_state = reset_left_out(
        self._program, self.experiment.optimizer, args["opt_state"],
        args["params"], told,
      )
      return {"opt_state": opt_state, "told": told}

    return self._make_program(lambda *_: run)

  @functools.cache  # noqa: B019
  def _hook_program(self, hook: str, variant: Any) -> StagedFunction:
    """Returns the program of a hook of the outer loop, split at collectives.

    It is the program of all steps whose plan has ``variant``.
    """

    def make(axis, weights):
      loop = with_worker_axis(self._outer, axis, weights)

      def begin(args):
        outer = args["outer"]
        # Values of each worker, gathered from all contributors.
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

      # Loops that exchange gradients do not communicate in `finish`.
      def gradients(args):
        found = self._make_update(loop)(args)
        return found | finish(args | {"updates": found.pop("updates")})

      return {"begin": begin, "gradients": gradients, "finish": finish}[hook]

    each = self._each
    return self._make_program(make)

  def _make_program(self, make: Callable[..., Any]) -> StagedFunction:
    layout = self._program.layout
    return StagedFunction(
      make, layout.mesh, layout.worker.name, self._specs, self.options
    )

  def _with_plan_numbers(self, plan: Plan, **args: Any) -> dict[str, Any]:
    return args | {"numbers": jax.tree.map(np.int32, plan.numbers)}

  def _specs(self, args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tree of ``PartitionSpec``s for a program's arguments."""
    program, layout = self._program, self._program.layout

    def of(key: str, tree: Any) -> Any:
      if key == "numbers":
        return P()
      if key == "batch":
        return layout.batch_spec
      if key != "outer":
        return layout.add_worker_dim(program.specs_like_params(tree))
      specs = specs_like_outer(program, self._outer, tree)
      each = {k: specs[k] for k in PER_WORKER_KEYS if k in specs}
      return specs | layout.add_worker_dim(each)

    return {key: of(key, tree) for key, tree in args.items()}

  # Shared state.

  def shared(self, state: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the arrays of a training state that all workers share, by name.

    Args:
      state: "outer", the outer loop's state; if all workers stay equal, also
        "params" and "opt_state".
    """
    own = {*WORKER_DIM_KEYS, *PER_WORKER_KEYS}
    part = {k: tree for k, tree in state["outer"].items() if k not in own}
    if self._outer.equal:
      part |= {key: state[key] for key in _EQUAL_WORKER_FIELDS}
    return {
      _key_path_name(path): np.array(to_host_array(x))
      for path, x in jax.tree.leaves_with_path(part)
    }

  def with_shared(
    self, outer: Any, shared: Mapping[str, Any], starts: bool = False
  ) -> dict[str, Any]:
    """Returns a worker's state, as `shared` takes it, with new shared arrays.

    Args:
      outer: A worker's state of the outer loop.
      shared: Result of `shared`, of this or another worker.
      starts: Whether to initialise the worker's private part from the shared
        state.
    """
    own = {*WORKER_DIM_KEYS, *PER_WORKER_KEYS}
    found = {key: tree for key, tree in outer.items() if key in own}
    names = {name.split("/")[0] for name in shared}
    # Keys of ``_like`` are included, since an optimizer without state has no
    # arrays in ``shared``.
    for key in sorted(names | self._like.keys() - own):
      # Entries that a step adds, such as a mean in transit, have the structure
      # of the parameters.
      like = self._like.get(key, self._like["params"])
      found[key] = jax.tree.map_with_path(
        lambda path, x, key=key: np.array(
          shared[f"{key}/{_key_path_name(path)}" if path else key]
        ),
        like,
      )
    state = {
      key: found.pop(key) for key in _EQUAL_WORKER_FIELDS if self._outer.equal
    }
    state["outer"] = self.joining.started(found) if starts else found
    specs = self._program.layout.shardings(self._specs(state))
    return jax.device_put(state, specs)


def _key_path_name(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")
