"""Helpers of the programs with planted faults: meshes, data, and layers.

A program is a function ``NAME(layout, faulty)`` that returns a jitted step and
its arguments. The step maps a state and a batch to the next state and metrics.
The faulty program and its corrected twin differ in one expression, on the line
with the comment ``# FAULT``, and are equal on one device.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
import numpy as np

Layout = Mapping[str, int]
Program = tuple[Callable, tuple]


@dataclasses.dataclass(frozen=True)
class Fault:
  """A program with a planted fault.

  Attributes:
    build: Function of a layout and of whether the fault is planted. Returns
      the step and its arguments, the state and the batch, as global arrays.
    layout: Sizes of the mesh axes with which the fault has an effect.
    small: Whether the loss of the first step differs by less than 0.1%.
  """

  build: Callable[[Layout, bool], Program]
  layout: Layout
  small: bool


def registrar(faults: dict[str, Fault]) -> Callable:
  """Returns a decorator factory that adds programs to a table by their names.

  Its keyword arguments are `small` and the sizes of the layout.
  """
  def register(*, small: bool = False, **layout: int) -> Callable:
    def add(build):
      faults[build.__name__] = Fault(build, layout, small)
      return build

    return add

  return register


def mesh_of(layout: Layout, *names: str) -> Mesh:
  """Returns a mesh over the first devices; missing axes have size 1."""
  sizes = tuple(layout.get(name, 1) for name in names)
  return jax.make_mesh(
    sizes, names, axis_types=(AxisType.Auto,) * len(names),
    devices=jax.devices()[: math.prod(sizes)],
  )


def spmd(
  step: Callable, mesh: Mesh, in_specs: Any, out_specs: Any, *,
  check_vma: bool = True,
) -> Callable:
  """Returns a jitted step that runs on each device's part of the arguments."""
  return jax.jit(jax.shard_map(
    step, mesh=mesh, in_specs=in_specs, out_specs=out_specs,
    check_vma=check_vma,
  ))


def normal(seed: int, *shape: int) -> np.ndarray:
  """Returns samples with deviation 1, float32."""
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def weight(seed: int, *shape: int) -> np.ndarray:
  """Returns matrices `[..., inputs, outputs]` with deviation inputs**-.5."""
  return normal(seed, *shape) / np.float32(math.sqrt(shape[-2]))


def tokens(seed: int, vocabulary: int, *shape: int) -> np.ndarray:
  """Returns uniform token ids, int32."""
  return np.random.default_rng(seed).integers(
    vocabulary, size=shape, dtype=np.int32
  )


def regression(rows: int, width: int = 16) -> tuple[np.ndarray, np.ndarray]:
  """Returns inputs and targets `[rows, width]`: a noisy nonlinear map."""
  x = normal(1, rows, width)
  return x, np.tanh(x @ weight(2, width, width)) + 0.1 * normal(3, rows, width)


def mlp_params(width: int = 16, hidden: int = 32) -> dict[str, np.ndarray]:
  """Returns two matrices: `w_in` `[width, hidden]`, `w_out` transposed."""
  return {
    "w_in": weight(4, width, hidden), "w_out": weight(5, hidden, width)
  }


def mlp(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
  return jax.nn.gelu(x @ params["w_in"]) @ params["w_out"]


def squared(prediction: jax.Array, target: jax.Array) -> jax.Array:
  """Returns the squared error of each row, averaged over the last dim."""
  return jnp.mean((prediction - target) ** 2, axis=-1)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Returns the loss of each token; `labels` lacks the last dim of `logits`."""
  logs = jax.nn.log_softmax(logits)
  return -jnp.take_along_axis(logs, labels[..., None], axis=-1)[..., 0]


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
  """Normalizes the rows of `x` `[rows, width]`."""
  square = jnp.mean(x**2, axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(square + 1e-6) * gain[None]


def attend(
  q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns attention of one head; `mask` `[queries, keys]` permits pairs."""
  scores = q @ k.T / math.sqrt(q.shape[-1])
  return jax.nn.softmax(jnp.where(mask, scores, -1e30)) @ v


def sgd(params: Any, grads: Any, rate: float = 0.1) -> Any:
  return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def adamw_state(params: Any) -> dict[str, Any]:
  """Returns the state of AdamW after many steps, with a large second moment."""
  return {
    "params": params,
    "mean": jax.tree.map(lambda p: 1e-3 * np.sign(p), params),
    "square": jax.tree.map(lambda p: np.full_like(p, 1e-3), params),
  }


def adamw(state: dict[str, Any], grads: Any, rate: float = 1e-2) -> Any:
  """Updates with decoupled weight decay, without correction of the bias."""
  mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], grads)
  square = jax.tree.map(
    lambda s, g: 0.95 * s + 0.05 * g**2, state["square"], grads
  )
  params = jax.tree.map(
    lambda p, m, s: p - rate * (m / (jnp.sqrt(s) + 1e-6) + 0.1 * p),
    state["params"], mean, square,
  )
  return {"params": params, "mean": mean, "square": square}
