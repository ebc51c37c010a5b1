"""Update by the inner optimizers, with clipped gradients.

The inner optimizer works elementwise on each rank's slices. Clipping needs the
norm over all ranks' slices, so it is not a part of the optimizer. Moments in
host memory are copied to the device and back one layer after another
(`caatnet.train.host_moments`), so that device memory holds those of few layers
at a time.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from caatnet.program import Program
from caatnet.train import host_moments
from caatnet.train.norms import gradient_norms
from parallel.collectives import each_lane

Metrics = dict[str, jax.Array]


def make_update(
  program: Program, optimizer: optax.GradientTransformation, clip_norm: float
) -> Callable[[Any, Any, Any], tuple[Any, Any, Metrics]]:
  """Returns a function that clips gradients and computes updates.

  Args:
    program: The model on a mesh.
    optimizer: The inner optimizer, elementwise, without clipping.
    clip_norm: The gradient norm of a worker above which gradients are clipped;
      0 disables clipping.

  Returns:
    A function ``(gradients, optimizer state, parameters) -> (updates, optimizer
    state, gradient norms)`` of W workers' arrays, inside ``jax.shard_map``.
  """
  layout = program.layout
  measure = functools.partial(_clip_factor_and_norms, program, clip_norm)

  # Clips within the update, so that the update of one part of the state can
  # overwrite its gradients. Clipping them all first would need a copy of them.
  def of_worker(factor, grads, opt_state, params):
    return optimizer.update(_scaled(grads, factor), opt_state, params)

  def at_once(grads, opt_state, params):
    factor, norms = measure(grads)
    return *of_worker(factor, grads, opt_state, params), norms

  # XLA:CPU copies the moments if their worker dim is removed and restored. It
  # updates them in place if `vmap` keeps that dim.
  in_place = layout.on_cpu and layout.worker.lanes == 1

  def of_workers(factor, grads, opt_state, params):
    arguments = factor, grads, opt_state, params
    if in_place:
      return jax.vmap(of_worker)(*arguments)
    return each_lane(of_worker, layout.worker, *arguments)

  def update(grads, opt_state, params):
    on_device = layout.moments == "device"
    if on_device and not in_place:
      return each_lane(at_once, layout.worker, grads, opt_state, params)
    factor, norms = each_lane(measure, layout.worker, grads)
    if on_device:
      return *of_workers(factor, grads, opt_state, params), norms
    changed = host_moments.apply(
      program,
      lambda changed, params: of_workers(factor, *changed, params),
      (grads, opt_state), params,
    )
    return *changed, norms

  return update


def make_clip(
  program: Program, clip_norm: float
) -> Callable[[Any], tuple[Any, Metrics]]:
  """Returns a function that clips gradients, inside ``jax.shard_map``.

  Args:
    program: The model on a mesh.
    clip_norm: The gradient norm of a worker above which gradients are clipped;
      0 disables clipping.

  Returns:
    A function of one worker's gradients. It returns the clipped gradients, and
    the gradient norms before clipping, by metric name.
  """

  def clip(grads):
    factor, norms = _clip_factor_and_norms(program, clip_norm, grads)
    return _scaled(grads, factor), norms

  return clip


def _clip_factor_and_norms(
  program: Program, clip_norm: float, grads: Any
) -> tuple[jax.Array | None, Metrics]:
  """Returns the factor that clips gradients (or None), and gradient norms."""
  groups = gradient_norms(grads, program)
  norm = jnp.sqrt(sum(jnp.square(n) for n in groups.values()))
  # 1e-12 keeps the quotient finite if all gradients are 0.
  factor = (
    jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12)) if clip_norm
    else None
  )
  norms = {f"grad_norm/{group}": n for group, n in groups.items()}
  return factor, {"grad_norm": norm} | norms


def _scaled(grads: Any, factor: jax.Array | None) -> Any:
  """Returns gradients times a factor; unchanged if the factor is None."""
  if factor is None:
    return grads
  return jax.tree.map(lambda g: g * factor, grads)
