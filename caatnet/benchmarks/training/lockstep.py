"""Comparison of pipeline schedules in lockstep with two branch-free forms.

A pipeline schedule is a loop over ticks with a branch for each action
(`parallel.pipeline.run`). The other forms have no branches:

- *autodiff*: GPipe as the derivative of a loop over forwards. Each stage
  computes in every tick; results of the first and last ones are not used.
- *masked*: in every tick each stage does a forward and a backward, of
  microbatches with the distance of 1F1B; invalid microbatches are masked out.

All must return the same gradients.

Shape legend: S = stages; M = microbatches; T = tokens; H = width.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from caatnet.benchmarks.harness import timing
from caatnet.benchmarks.training.train_step import timed_in_turns
from caatnet.show import tables
from parallel.axes import Axis, make_mesh
from parallel.collectives import after, varying
from parallel.hardware.devices import DEVICES
from parallel.pipeline import builders, simulate
from parallel.pipeline.run import Functions, Params, Pipeline
from parallel.xla import hlo, overlap

Step = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def run(config: Any) -> dict[str, Any]:
  """Measures, prints a table, and returns it as plain data.

  Args:
    config: Config like configs/benchmark/lockstep.py.

  Raises:
    ValueError: Two forms return different gradients, or there are fewer devices
      than stages.
  """
  options = config.benchmark
  stages, count = options.stages, options.microbatches
  if len(jax.devices()) < stages:
    raise ValueError(
      f"config.benchmark.stages={stages} needs --cpu_devices={stages}"
    )
  axis = Axis("stage", stages, stages)
  mesh = make_mesh({"stage": axis})
  draw = np.random.default_rng(0)
  width = options.width
  w = draw.normal(size=(stages, options.layers, 2, width, width)) / width**0.5
  x = draw.normal(size=(count, options.tokens, width))
  args = w.astype(np.float32), x.astype(np.float32)
  runners, rows, first = {}, [], None
  for form in options.forms:
    make, schedule = form_of(form, axis, count)
    # Weights are sharded over stages; the batch and the loss are replicated.
    program = jax.jit(jax.shard_map(
      make, mesh=mesh, in_specs=(P("stage"), P()), out_specs=(P(), P("stage"))
    )).lower(*args).compile()
    result = jax.device_get(program(*args))
    first = first or result  # the reference result
    for ours, theirs in zip(result, first, strict=True):
      if not np.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.max(theirs)):
        raise ValueError(f"{form} returns other gradients than the first form")
    runners[form] = lambda p=program: jax.block_until_ready(p(*args))
    rows.append({"form": form} | _counted(program, mesh, schedule))
  product = 2 * options.tokens * width**2  # FLOPs of one matrix product
  seconds = timed_in_turns(runners, options.rounds)
  for row in rows:
    row["relative"] = timing.summary(
      seconds[row["form"]], seconds[options.forms[0]]
    )["relative"]
    # Unit: a stage's forward of one microbatch.
    for key in ("flops", "critical_flops"):
      row[key] /= product * 2 * options.layers
  tables.table(
    f"{stages} stages of {options.layers} layers of two products, {count} "
    "microbatches; work in forwards of a stage",
    ["form", "x time, processors shared", "work of a device",
     "work in turn, in lockstep", "MB of temporaries"],
    [
      [r["form"], f"{r['relative']:.2f}", f"{r['flops']:.1f}",
       f"{r['critical_flops']:.1f}", f"{r['temporaries'] / 1e6:.1f}"]
      for r in rows
    ],
  )
  return {"benchmark": "lockstep", "rows": rows}


def _counted(program: Any, mesh: Any, schedule: Any) -> dict[str, float]:
  """Counts a compiled program's products, and its temporaries."""
  # Rates of any device: only FLOPs are read.
  scheduled = overlap.ScheduledProgram(
    hlo.parse(program.as_text()), mesh, DEVICES["v5p"], lambda entry: 0.0
  )
  flops = scheduled.total().flops
  waiting = 0.0
  if schedule is not None:
    waiting = simulate.lockstep_waiting_s(
      schedule, {k: c.flops for k, c in scheduled.actions().items()}
    )
  found = program.memory_analysis()
  # Critical FLOPs: own work plus the wait for the longest action per tick.
  return {"flops": flops, "critical_flops": flops + waiting,
          "temporaries": found.temp_size_in_bytes}


def form_of(form: str, axis: Axis, count: int) -> tuple[Step, Any]:
  """Returns a step of a form, inside ``jax.shard_map``, and its schedule.

  Args:
    form: "autodiff", "masked", or the name of a pipeline schedule, with the
      suffix " +" if residuals are kept.
    axis: Axis of stages.
    count: M.

  Returns:
    ``(w [1, layers, 2, H, H], x [M, T, H]) -> (loss, gradients of w)``, and the
    pipeline schedule, if any.
  """
  if form == "autodiff":
    return functools.partial(autodiff, axis), None
  if form == "masked":
    return functools.partial(masked, axis), None
  name, _, keeps = form.partition(" ")
  schedule = builders.build(name, axis.size, count)
  pipeline = Pipeline(schedule, axis, True, bool(keeps))

  def step(w, x):
    loss, grads = pipeline.gradients(
      Functions(lambda _, x: x, lambda w, _, x: part(w, x),
                lambda _, x, __: judge(x)),
      Params(w[:, None], ()), (), x,
    )
    return loss, grads.parts[:, 0]

  return step, schedule


def part(w: jax.Array, x: jax.Array) -> jax.Array:
  """Applies a stage's layers, ``[layers, 2, H, H]``, to ``[T, H]``."""
  return lax.scan(
    lambda x, w: (x + jax.nn.silu(x @ w[0]) @ w[1], None), x, w
  )[0]


def judge(x: jax.Array) -> jax.Array:
  """Returns the loss, a mean square."""
  return jnp.mean(jnp.square(x))


def autodiff(
  axis: Axis, w: jax.Array, batch: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Differentiates a loop of forwards; types are as in `form_of`."""
  size, count = axis.size, len(batch)
  stage = lax.axis_index(axis.name)
  onward = [(s, (s + 1) % size) for s in range(size)]  # ring of stages

  def loss_of(w):
    def tick(carry, t):
      arriving, total = carry
      # Ticks after the last microbatch repeat it; their results are not used.
      x = jnp.where(stage == 0, batch[jnp.minimum(t, count - 1)], arriving)
      y = jax.checkpoint(part)(w[0], x)
      done = (stage == size - 1) & (t >= size - 1)  # valid outputs
      total += jnp.where(done, judge(y), 0.0)
      return (lax.ppermute(y, axis.name, onward), total), None

    nothing = varying(jnp.zeros_like(batch[0]), axis.name)
    start = nothing, varying(jnp.zeros(()), axis.name)
    (_, total), _ = lax.scan(tick, start, jnp.arange(count + size - 1))
    return lax.psum(total, axis.name)

  return jax.value_and_grad(loss_of)(w)


def masked(
  axis: Axis, w: jax.Array, batch: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Does a forward and a backward in each tick; types are as in `form_of`."""
  size, count = axis.size, len(batch)
  stage, last = lax.axis_index(axis.name), size - 1
  places = 2 * size - 1  # inputs that the first stage keeps

  def tick(carry, t):
    inputs, arriving, returning, loss, grads = carry
    # Microbatches of this tick's forward and backward, as far apart as in 1F1B.
    ahead, behind = t - stage, t - (2 * last - stage)
    x = jnp.where(stage == 0, batch[jnp.clip(ahead, 0, count - 1)], arriving)
    inputs = inputs.at[ahead % places].set(x)  # ring buffer
    y = part(w[0], x)
    one, of_loss = jax.vjp(judge, y)
    dy = jnp.where(stage == last, of_loss(jnp.ones_like(one))[0], returning)
    # Recomputes the forward.
    _, vjp = jax.vjp(part, w[0], inputs[behind % places])
    of_w, dx = vjp(dy)
    real = (stage == last) & (ahead >= 0) & (ahead < count)  # not masked
    loss += jnp.where(real, one, 0.0)
    grads += jnp.where((behind >= 0) & (behind < count), of_w, 0.0)
    arriving = lax.ppermute(
      y, axis.name, [(s, (s + 1) % size) for s in range(size)]
    )
    returning = lax.ppermute(
      after(dx, arriving, True), axis.name,
      [(s, (s - 1) % size) for s in range(size)],
    )
    return (inputs, arriving, returning, loss, grads), None

  nothing = varying(jnp.zeros_like(batch[0]), axis.name)
  start = (
    # Inputs, arriving, returning.
    jnp.stack(places * [nothing]), nothing, nothing,
    varying(jnp.zeros(()), axis.name), jnp.zeros_like(w[0]),
  )
  (*_, loss, grads), _ = lax.scan(tick, start, jnp.arange(count + 2 * last))
  return lax.psum(loss, axis.name), grads[None]
