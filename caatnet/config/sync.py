"""Builder of ``config.sync``: sync policies of row-parallel projections."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from etils import epy
import jax

from caatnet.config.context import ModelContext
from caatnet.schema import sync as schema
from parallel.base.checks import known
from parallel.collectives import Reduction
from parallel.kernels import evidence
from parallel.tensor.partial_sync import (
  FUSED_ROUTES,
  PROJECTION_ROUTES,
  PartialSync,
)

# Imported lazily, since schedules need networkx and scipy, which take 0.2 s to
# import and which other all-reduces do not need.
with epy.lazy_imports():
  from parallel.kernels.schedule_all_reduce import api as schedule_kernels
  from parallel.plans.schedules import builders, table
  from parallel.plans.topology import builders as topologies
  from parallel.schedules import run


@dataclasses.dataclass(frozen=True)
class Sync:
  """Sync policies of a language model.

  Attributes:
    policies: For each layer, the policies of the two row-parallel projections:
      of attention (or recurrence), and of the MLP.
    carry: Whether the next layer's norm may do the all-reduce of an MLP.
  """

  policies: tuple[tuple[PartialSync, PartialSync], ...]
  carry: bool


def build_sync(
  section: schema.Sync, context: ModelContext, num_layers: int, remat: str
) -> Sync:
  """Builds a `PartialSync` for each row-parallel projection.

  Args:
    section: The section.
    context: The parts of the experiment on which a model depends.
    num_layers: ``config.model.num_layers``.
    remat: ``config.model.remat``.

  Raises:
    ValueError: If a value is not allowed, or would have no effect.
  """
  p, carry, route = section.p, section.carry, section.route
  if carry == "on" and route not in FUSED_ROUTES:
    raise ValueError(
      f"carry={carry!r} has no effect with route={route!r}; it is for "
      f"{', '.join(FUSED_ROUTES)}"
    )
  # "auto" is off on TPUs, where XLA splits the product itself. The barrier of a
  # split projection would let less of the all-reduce overlap with compute
  # (log/2026-11-21-reductions-under-compute.md).
  on_gpu = context.platform == "gpu"
  overlap = section.overlap
  overlaps = overlap == "on" or (overlap == "auto" and on_gpu)
  if p != 1.0 and section.p_attention and section.p_mlp:
    raise ValueError(
      f"p={p} has no effect, since p_attention={section.p_attention} and "
      f"p_mlp={section.p_mlp} set the value of all row-parallel projections"
    )
  reduction = _build_reduction(route, section.topology, context)

  def policies_of(key: str) -> list[PartialSync]:
    values = getattr(section, key) or (p,)
    values = values * (num_layers if len(values) == 1 else 1)  # per layer
    if len(values) != num_layers:
      raise ValueError(
        f"{key}={values} has {len(values)} values; it must have none, one, or "
        f"one per layer (config.model.num_layers={num_layers})"
      )
    return [
      PartialSync(
        float(value),
        section.private_scale,
        section.forward_dtype or None,
        section.backward_dtype or None,
        overlaps,
        reduction,
      )
      for value in values
    ]

  attention, mlp = policies_of("p_attention"), policies_of("p_mlp")
  # With rematerialisation, the backward would repeat the all-reduce of an MLP's
  # output that is carried into the next layer.
  carries = carry == "on" or (carry == "auto" and remat == "none")
  return Sync(tuple(zip(attention, mlp, strict=True)), carries)


def kernels_of_norms(context: ModelContext, sync: Sync) -> tuple[str, ...]:
  """Returns the norms' implementations, without kernels measured as slower.

  They are equal for all layers; p, the fraction of channels that tensor ranks
  sum, decides by its mean over all projections. If the config selects an
  all-reduce that is fused with norms, it uses its kernel in any case.
  """
  policies = [policy for layer in sync.policies for policy in layer]
  p = sum(policy.p for policy in policies) / len(policies)
  asked = context.evidence_of is None or policies[0].route in FUSED_ROUTES
  if asked or evidence.is_step_faster(context.evidence_of, "add_norm", p):
    return context.kernels
  return ("reference",)


def _build_reduction(
  route: str, topology: str, context: ModelContext
) -> str | Reduction:
  """Returns the all-reduce of a route "schedule:NAME" on a topology.

  Any other route is returned unchanged.
  """
  kind, _, name = route.partition(":")
  if kind != "schedule":
    if route not in PROJECTION_ROUTES:
      schedules = (f"schedule:{name}" for name in builders.BUILDERS)
      known("route=", route, (*PROJECTION_ROUTES, *schedules))
    if topology:
      raise ValueError(
        f"topology={topology!r} has no effect with route={route!r}, which is "
        "not a schedule"
      )
    return route
  # A schedule sends between devices; ranks on one device are added first.
  topology, devices = topology or "torus", context.tensor.devices
  try:
    name, options = builders.parse_builder(name)
    return _executor(
      name, (*sorted(options.items()),), topology, devices, context.kernels
    )
  except ValueError as error:
    raise ValueError(
      f"route={route!r} with topology={topology!r} on {devices} devices: "
      f"{error}"
    ) from error


# Cached so that equal configs give equal models: functions are compared by
# identity.
@functools.cache
def _executor(
  name: str, options: tuple[tuple[str, Any], ...], topology: str, devices: int,
  kernels: tuple[str, ...],
) -> Reduction:
  """Returns an all-reduce that executes a collective schedule.

  ``name``, ``options``: The schedule, as for `builders.build`.

  It uses one kernel for arrays that the kernel supports, and `lax.ppermute` for
  all other arrays.
  """
  network = topologies.of_size(topology, devices)
  schedule = builders.build(name, network, **dict(options))
  by_permutes = run.executor(schedule)
  if kernels == ("reference",):
    return by_permutes
  steps = table.table(schedule)

  def reduce(x: jax.Array, axis_name: str) -> jax.Array:
    if schedule_kernels.select_kernel(x, steps, kernels).name == "reference":
      return by_permutes(x, axis_name)
    return schedule_kernels.schedule_all_reduce(
      x, steps, axis_name=axis_name, implementation=kernels
    )

  return reduce
