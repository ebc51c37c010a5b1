"""``config.model`` -> sizes of the transformer, how it syncs and computes."""

import functools
from typing import Any

import jax

from caatnet.checks import one_of, positive
from caatnet.models import attention
from caatnet.models.config import TransformerConfig
from parallel.collectives import Reduction
from parallel.door_reductions import DOOR_ROUTES, PartialSync
from parallel.kernels import selection
from parallel.kernels.schedule_all_reduce import api as schedule_kernels
from parallel.schedules import builders
from parallel.schedules.run import executor
from parallel.schedules.table import table
from parallel.topologies import of_size

DTYPES = ("float32", "bfloat16", "float16")


def build(
  model: Any, platform: str, tensor_devices: int
) -> TransformerConfig:
  """Checks ``config.model`` and builds what it describes.

  Args:
    model: ``config.model``.
    platform: "cpu", "gpu" or "tpu", of the devices that will run it.
    tensor_devices: Devices along the tensor axis.

  Raises:
    ValueError: A value that does not fit, with its key and what would.
  """
  fields = dict(model)
  for key in ("vocab_size", "width", "num_layers", "num_heads",
              "num_kv_heads", "ffn_width", "unroll"):
    positive(f"config.model.{key}", fields[key])
  one_of("config.model.dtype", model.dtype, DTYPES)
  for key in ("forward_dtype", "backward_dtype"):
    one_of(f"config.model.{key}", fields[key], ("", *DTYPES))
  one_of(
    "config.model.attention", model.attention, attention.IMPLEMENTATIONS
  )

  one_of("config.model.overlap", model.overlap, ("auto", "on", "off"))
  # On TPUs XLA itself finds more to run under a reduction (LOG.md).
  overlap = model.overlap == "on" or (
    model.overlap == "auto" and platform == "gpu"
  )

  kernels = _kernels("config.model.kernels", model.kernels, platform)
  route = _route(model, tensor_devices, kernels)

  def syncs(key: str) -> list[PartialSync]:
    values = fields.pop(key) or (model.p,)
    values = tuple(values) * (model.num_layers if len(values) == 1 else 1)
    if len(values) != model.num_layers:
      raise ValueError(
        f"config.model.{key} has {len(values)} values; give none, one, or "
        f"config.model.num_layers={model.num_layers}"
      )
    return [
      PartialSync(
        float(p),
        model.private_scale,
        model.forward_dtype or None,
        model.backward_dtype or None,
        overlap,
        route,
      )
      for p in values
    ]

  doors = tuple(zip(syncs("p_attention"), syncs("p_mlp"), strict=True))
  for key in ("p", "private_scale", "forward_dtype", "backward_dtype",
              "overlap", "route", "topology"):
    del fields[key]
  fields["attention"] = attention.resolve(
    model.attention, platform, model.dtype
  )
  fields["kernels"] = kernels
  return TransformerConfig(syncs=doors, **fields)


def _route(
  model: Any, devices: int, kernels: tuple[str, ...]
) -> str | Reduction:
  """``config.model.route``; a schedule's name becomes what runs it."""
  kind, _, name = model.route.partition(":")
  if kind != "schedule":
    schedules = (f"schedule:{name}" for name in builders.BUILDERS)
    allowed = (*DOOR_ROUTES, *schedules)
    one_of("config.model.route", model.route, allowed)
    return model.route
  try:
    return _executor(name, model.topology, devices, kernels)
  except ValueError as error:
    raise ValueError(
      f"config.model.route={model.route!r} with config.model.topology="
      f"{model.topology!r} on {devices} devices: {error}"
    ) from error


@functools.cache  # equal configs make equal models
def _executor(
  name: str, topology: str, devices: int, kernels: tuple[str, ...]
) -> Reduction:
  """By a kernel where one takes the array, else by permutes."""
  schedule = builders.build(name, of_size(topology, devices))
  by_permutes = executor(schedule)
  if kernels == ("reference",):
    return by_permutes
  steps = table(schedule)

  def reduce(x: jax.Array, axis_name: str) -> jax.Array:
    if schedule_kernels.choice(x, steps, kernels).name == "reference":
      return by_permutes(x, axis_name)
    return schedule_kernels.schedule_all_reduce(
      x, steps, axis_name=axis_name, implementation=kernels
    )

  return reduce


def _kernels(key: str, value: str, platform: str) -> tuple[str, ...]:
  """Implementations in order of preference, for a program's platform."""
  one_of(key, value, ("auto", "reference", "interpret"))
  if value == "interpret":
    return ("tpu_interpret", "reference")
  return selection.preference(value, platform)
