"""Validation of a model against `caatnet.models.protocol.Model`.

`check` compares shapes and initialises no parameters. `check_scores` checks the
types of scores while a program is traced. An error names the member of `Model`
that is wrong.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from caatnet.models.protocol import Model, Parameter
from parallel.axes import Axis
from parallel.collectives import varying_axes
from parallel.plans.zero.partition import FORMS


def is_parameter(x: Any) -> bool:
  """Returns whether ``x`` is a `Parameter`, a leaf of `Model.parameters`."""
  return isinstance(x, Parameter)


def check(model: Model, shapes: Any, axes: Sequence[Axis]) -> None:
  """Checks that a model's `parameters` and `stacks` match those of `init`.

  Args:
    model: The model.
    shapes: Shapes and dtypes of the parameters that its `init` returns.
    axes: Axes that the specs of parameters may name.

  Raises:
    ValueError: If two members contradict each other; the message names them.
  """
  name = type(model).__name__
  shapes = _by_path(shapes)
  parameters = _by_path(model.parameters)
  for path in parameters.keys() - shapes.keys():
    raise ValueError(
      f"{name}.parameters has {path!r}, which is not a parameter that "
      f"{name}.init returns: {_listed(shapes)}"
    )
  for path in shapes.keys() - parameters.keys():
    raise ValueError(
      f"{name}.parameters lacks {path!r}, which {name}.init returns"
    )
  for path, x in shapes.items():
    fault = next(_faults(parameters[path], x, axes), None)
    if fault is not None:
      raise ValueError(f"{name}.{fault[0]}: {path!r} {fault[1]}")
  tops = {path.split("/")[0] for path in shapes}
  for stack, layers in model.stacks.items():
    if stack not in tops:
      raise ValueError(
        f"{name}.stacks has {stack!r}, which is none of the top-level keys of "
        f"{name}.init: {_listed(tops)}"
      )
    for path, x in shapes.items():
      if path.split("/")[0] != stack:
        continue
      if x.shape[:1] != (layers,):
        raise ValueError(
          f"{name}.stacks: {stack!r} has {layers} layers, so the first dim of "
          f"{path!r} of {name}.init must be {layers}, but its shape is "
          f"{x.shape}"
        )
      if parameters[path].num_lead < 1:
        raise ValueError(
          f"{name}.parameters: {path!r} has num_lead=0, but its first dim is "
          f"the layers of {name}.stacks[{stack!r}]"
        )


def check_scores(model: Model, scores: Any, tensor: Axis) -> None:
  """Checks the types of a model's scores, within a trace.

  Args:
    model: The model.
    scores: Result of its `scores` inside ``jax.shard_map``.
    tensor: The tensor axis.

  Raises:
    ValueError: If there is no loss, or a score (also a sum or count of a
      `WeightedScore`) is not float32 or may differ between tensor ranks.
  """
  name = f"{type(model).__name__}.scores"
  if not isinstance(scores, dict) or "loss" not in scores:
    found = type(scores).__name__
    if isinstance(scores, dict):
      found = _listed(scores)
    raise ValueError(
      f"{name} must return a dict with the key 'loss', not {found}"
    )
  for path, x in jax.tree.leaves_with_path(scores):
    key = path[0].key
    if x.dtype != jnp.float32:
      raise ValueError(f"{name}: {key!r} is {x.dtype}, but must be float32")
    if tensor.name in varying_axes(x):
      raise ValueError(
        f"{name}: {key!r} differs between tensor ranks; sum it over the axis "
        f"with jax.lax.psum(x, {tensor.name!r})"
      )


def _faults(
  p: Any, x: jax.ShapeDtypeStruct, axes: Sequence[Axis]
) -> Iterator[tuple[str, str]]:
  """Yields ``(member of Model, fault)`` for each fault of one parameter.

  ``p`` is its entry in `Model.parameters`, ``x`` its shape from `Model.init`.
  """
  if not is_parameter(p):
    yield "parameters", f"is a {type(p).__name__}, not a Parameter"
    return
  if x.dtype != jnp.float32:
    yield "init", f"is {x.dtype}, but parameters are stored as float32"
  try:
    floating = jnp.issubdtype(p.dtype, jnp.floating)
  except TypeError:
    floating = False
  if not floating:
    yield "parameters", f"has dtype={p.dtype!r}, which is no floating dtype"
  if not 0 <= p.num_lead <= x.ndim:
    yield "parameters", (
      f"has num_lead={p.num_lead}, but its shape {x.shape} has {x.ndim} dims"
    )
  if len(p.spec) > p.num_lead:
    yield "parameters", (
      f"has num_lead={p.num_lead}, but its spec {p.spec} names a dim after "
      "these"
    )
  sizes = {axis.name: axis.size for axis in axes}
  for dim, entry in enumerate(p.spec):
    if entry is None:  # not cut
      continue
    if entry not in sizes:
      yield "parameters", (
        f"has the spec {p.spec}, which may name "
        f"{' and '.join(map(repr, sizes))} only"
      )
    elif x.shape[dim] != sizes[entry]:
      yield "parameters", (
        f"has the spec {p.spec}, but dim {dim} of its shape {x.shape} is not "
        f"the number of {entry} ranks, {sizes[entry]}"
      )
  if p.form not in FORMS:
    yield "parameters", f"has form={p.form!r}, not {' or '.join(FORMS)}"
  if p.update and p.dtype != "float32":
    yield "parameters", (
      f"has dtype={p.dtype!r}, but explicit training state is float32"
    )
  if p.stage_dim is not None and not 0 <= p.stage_dim < x.ndim:
    yield "parameters", (
      f"has stage_dim={p.stage_dim}, but its shape {x.shape} has {x.ndim} dims"
    )


def _by_path(tree: Any) -> dict[str, Any]:
  """Flattens a nested dict to leaves by path, ``{"blocks/w": leaf}``."""
  return {
    "/".join(str(getattr(key, "key", key)) for key in path): leaf
    for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_parameter)
  }


def _listed(names: Any) -> str:
  """Returns names in alphabetical order, or "none"."""
  return ", ".join(sorted(names)) or "none"
