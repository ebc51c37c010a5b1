"""Builder of ``config.inference.nanobatches``."""

from collections.abc import Sequence
import functools

import jax.numpy as jnp

from caatnet.models.nanobatches import NanobatchRule, even_sizes
from caatnet.models.paged import Batch, CacheShape
from caatnet.program import Program
from parallel.plans.nanobatches import nanobatch, nanobatch_costs
from parallel.plans.network import inference


def build(
  value: str, machine: str, program: Program, cache_shape: CacheShape,
  most_sequences: int,
) -> NanobatchRule | None:
  """Returns the rule that splits steps into nano-batches; None for no split.

  Args:
    value: Number of nano-batches of equal size, or "plan" for sizes that
      `parallel.plans.nanobatches` computes for the machine.
    machine: Name of the machine, which "plan" needs; "" if unknown.
    program: The model on its mesh.
    cache_shape: Shape of the cache of one rank.
    most_sequences: Largest number of sequences that a step decodes.

  Raises:
    ValueError: If the value is unknown, there are more nano-batches than
      tokens, the model caches states other than keys and values, or the machine
      has another number of devices than the mesh's tensor axis.
  """
  name = f"config.inference.nanobatches={value!r}"
  if value == "1":
    return None
  if cache_shape.states:
    raise ValueError(
      f"{name} must be 1 for this model, since only models with cached keys "
      "and values can be split into nano-batches"
    )
  on_cpu = program.layout.on_cpu
  if value.isdecimal() and int(value):
    try:
      even_sizes(most_sequences, int(value))
    except ValueError as error:
      raise ValueError(
        f"{name}: {error}: config.inference.batch={most_sequences}"
      ) from error
    return NanobatchRule(
      functools.partial(_even_step_sizes, int(value)), on_cpu
    )
  if value != "plan":
    raise ValueError(f"{name} must be a number from 1 or 'plan'")
  tensor = program.layout.tensor
  if on_cpu or tensor.devices == 1:  # no all-reduce overlaps with compute
    return None
  if not machine:
    raise ValueError(
      f"{name} needs config.inference.machine, the machine to plan for"
    )
  try:
    devices = inference.machine(machine)
  except ValueError as error:
    raise ValueError(f"{name}, config.inference.machine: {error}") from error
  if devices.num_ranks != tensor.devices or tensor.lanes > 1:
    raise ValueError(
      f"{name}: {machine} has {devices.num_ranks} devices, but "
      f"{tensor.size} tensor ranks are on {tensor.devices}"
    )
  return NanobatchRule(
    functools.partial(_planned_sizes, devices, program, cache_shape.page_size)
  )


def _even_step_sizes(count: int, batch: Batch) -> Sequence[int]:
  tokens = batch.tokens.shape[0]
  return even_sizes(tokens, count) if count <= tokens else (tokens,)


def _planned_sizes(
  machine: inference.Machine, program: Program, page_size: int, batch: Batch
) -> Sequence[int]:
  """Returns the numbers of tokens of a step's nano-batches, as planned."""
  config = program.model.config
  sync = config.syncs[0][0]
  tokens, context = batch.tokens.shape[0], batch.tables.shape[1] * page_size
  mix = nanobatch_costs.TokenMix(
    batch.num_decodes, context, tokens - batch.num_decodes, context / 2
  )
  sent = sync.forward_dtype or config.dtype
  reduction = nanobatch.Reduction(
    p=sync.p, bits=8 * jnp.dtype(sent).itemsize
  )
  try:
    costs = nanobatch_costs.layer_costs(
      "config.model", config.workload,
      nanobatch_costs.profile_of(machine, config.workload, tokens), machine,
      mix, [reduction],
    )
  except ValueError as error:
    raise ValueError(
      f"config.inference.nanobatches='plan' with {tokens} tokens in a step "
      f"(config.inference.batch and chunk): {error}"
    ) from error
  return nanobatch.plan(costs, tokens).sizes
