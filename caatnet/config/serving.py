"""Builder of a server's engine for a run's language model."""

from collections.abc import Mapping
import contextlib
import dataclasses
import math
import os
from typing import Any

import jax
import ml_collections

from caatnet.config import inference, sections
from caatnet.config.inference import Inference
from caatnet.config.override import override
from caatnet.inference.decoder import Decoder
from caatnet.program import Program
from caatnet.schema import tree
from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import Pages
from caatnet.serving.engine import warm_up
from caatnet.serving.engine.device import DecoderExecutor
from caatnet.serving.engine.engine import Engine
from caatnet.serving.engine.expert_weights import ExpertWeights
from caatnet.serving.options import ServingOptions
from caatnet.serving.scheduler.limits import Limits
from caatnet.serving.scheduler.policies import registry
from caatnet.serving.scheduler.policies.base import Policy
from caatnet.serving.scheduler.scheduler import Scheduler
from caatnet.serving.server.catalog import OneModel
from caatnet.serving.server.served import ServerParts
from caatnet.train import tokenizer
from parallel.base import available, files

# Ratio of consecutive batch sizes of decoding programs. Each batch size needs a
# program per chunk size; with a smaller ratio, compiling them takes too long.
BATCH_SIZE_FACTOR = 16
# Largest fractions of free memory for the device cache and for the host cache.
_CACHE_SHARE, _HOST_SHARE = 0.5, 0.25
_SECTION = "serving."


def split_overrides(overrides: str) -> tuple[ServingOptions, str]:
  """Splits overrides into those of ``config.serving`` and all others.

  Args:
    overrides: Keys of a config and values, ``"serving.queue=4 ..."``.

  Returns:
    The options of ``config.serving``, and the overrides of other sections.

  Raises:
    ValueError: If a key is unknown, or a value is not allowed.

  Example:
    >>> chosen, rest = split_overrides("serving.queue=4 inference.batch=8")
    >>> chosen.queue, chosen.reuse, rest
    (4, True, 'inference.batch=8')
  """
  parts = overrides.split()
  mine = [part for part in parts if part.startswith(_SECTION)]
  config = override(
    ml_collections.ConfigDict({"serving": tree.defaults("serving")}),
    " ".join(mine),
  )
  found = sections.build_section(
    "serving", lambda section: ServingOptions(**vars(section)), config.serving
  )
  return found, " ".join(part for part in parts if part not in mine)


def from_folder(
  workdir: str | os.PathLike[str],
  requested_mesh: Mapping[str, int] | None = None,
  overrides: str = "",
  step: int | None = None,
  progress: warm_up.Progress | None = None,
) -> tuple[Decoder, ServingOptions]:
  """Reads a run's model, with a cache for a server.

  Args:
    workdir: The run's folder.
    requested_mesh: Devices per axis; None for the default assignment.
    overrides: Keys of the config and values, including ``serving``.
    step: The step of the checkpoint; None for the newest one.
    progress: Argument of `warm_up.compile_in_background`, to compile all
      programs while the weights are read; None to compile none.

  Returns:
    The decoder, and the options of ``config.serving``.

  Raises:
    FileNotFoundError: If the folder holds no run, or no such checkpoint.
    ValueError: If a file is damaged, or a value is not allowed.
  """
  chosen, rest = split_overrides(overrides)
  made = inference.build_from_folder(
    workdir, requested_mesh, f"{rest} parallel.data=1"
  )
  made = fit_cache(made, _param_bytes(made.program))
  decoder = made.decoder_of(made.abstract_weights())
  with contextlib.ExitStack() as stack:
    if progress is not None:
      stack.enter_context(
        warm_up.compile_in_background(decoder, BATCH_SIZE_FACTOR, progress)
      )
    # No variable refers to the float32 parameters, so that their memory is
    # released.
    decoder.weights = made.weights(
      inference.read_params(made, workdir, step)[0]
    )
  return decoder, chosen


def _param_bytes(program: Program) -> float:
  """Returns the size in bytes of float32 parameters in a device's memory.

  For CPUs this is the sum over all devices, which share the host's memory.
  """
  leaves = jax.tree.leaves(program.local_shapes)
  on_device = sum(x.dtype.itemsize * math.prod(x.shape) for x in leaves)
  devices = program.layout.mesh.devices.flat
  return on_device * (len(devices) if devices[0].platform == "cpu" else 1)


def build_server(
  workdir: str | os.PathLike[str],
  name: str = "",
  requested_mesh: Mapping[str, int] | None = None,
  overrides: str = "",
  step: int | None = None,
  progress: warm_up.Progress | None = None,
) -> ServerParts:
  """Returns a server of a run's model; see `from_folder`.

  Args:
    name: Name of the model; "" for that of the folder.
  """
  tokens = tokenizer.load(workdir)
  decoder, chosen = from_folder(
    workdir, requested_mesh, overrides, step, progress
  )
  models = OneModel(name or files.parse_folder(workdir).name)
  return ServerParts(engine(decoder, chosen), decoder, models, tokens, chosen)


def fit_cache(made: Inference, reserved_bytes: float = 0.0) -> Inference:
  """Returns an `Inference` whose cache fits into free memory.

  If the config sets the number of pages, it is not changed. The cache always
  has enough pages for one sequence.

  Args:
    made: The model, with a cache for a whole batch of the longest sequences.
    reserved_bytes: Free bytes of a device that the cache must not use.
  """
  capacity, shape = made.capacity, made.cache_shape
  full = capacity.batch * capacity.pages_per_sequence  # the default of `pages`
  if not shape.paged or shape.num_pages != full:  # set by the config
    return made
  layout = made.program.layout
  lanes = layout.tensor.lanes
  page_bytes = lanes * shape.components[0].block_bytes  # on one device
  device = layout.mesh.devices.flat[0]
  room = max(0.0, free_bytes(device) - reserved_bytes)
  most = int(_CACHE_SHARE * room / page_bytes)
  num_pages = max(capacity.pages_per_sequence, min(full, most))
  return dataclasses.replace(
    made, cache_shape=dataclasses.replace(shape, num_pages=num_pages)
  )


def free_bytes(device: jax.Device) -> float:
  """Returns the free memory of a device in bytes; for a CPU, of the host."""
  stats = device.memory_stats() if device.platform != "cpu" else None
  if stats and "bytes_limit" in stats:
    return float(stats["bytes_limit"] - stats["bytes_in_use"])
  return float(available.available_bytes())


def page_bytes(decoder: Decoder) -> int:
  """Returns the size in bytes of a cache page over all layers and ranks."""
  arrays = jax.tree.leaves(decoder.cache.pages)
  return sum(x.nbytes for x in arrays) // decoder.cache_shape.num_pages


def engine(
  decoder: Decoder, chosen: ServingOptions,
  weights: ExpertWeights | None = None, policy: Policy | None = None,
) -> Engine:
  """Builds an engine without requests.

  Args:
    decoder: The model, with an empty cache.
    chosen: The options of ``config.serving``.
    weights: Weights of the experts; None for one model.
    policy: Scheduling policy with an empty queue; None for the one in `chosen`.
  """
  capacity, shape = decoder.capacity, decoder.cache_shape
  host_pages = chosen.host_pages
  # Without these options nothing is copied to the host cache, which may then
  # have no pages.
  swaps = chosen.preempt != "recompute" or chosen.keep_turns
  if swaps and not host_pages:
    cpu = jax.devices("cpu")[0]
    size = page_bytes(decoder) + decoder.state_bytes
    most = int(_HOST_SHARE * free_bytes(cpu) / size)
    host_pages = min(shape.num_pages, most)
  limits = Limits(
    slots=capacity.batch, tokens=capacity.step_tokens,
    chunks=decoder.chunk_limits,
    growth=chosen.growth, preempt=chosen.preempt, wait_s=chosen.wait_s,
    keep_turns=chosen.keep_turns,
  )
  executor = DecoderExecutor(
    decoder, host_pages, BATCH_SIZE_FACTOR, filters=True, top=True,
    weights=weights
  )
  # A recurrent state cannot be reused for a prefix of its sequence.
  reuse = chosen.reuse and shape.shares_prefixes
  pages = Pages(shape.num_pages, shape.page_size, reuse)
  if policy is None:
    policy = registry.make(chosen.policy, pages)
  scheduler = Scheduler(
    limits, policy, pages,
    HostCache(
      host_pages, shape.page_size, reserve=True, paged=shape.paged,
      states=bool(shape.states),
    ),
    executor.costs,
  )
  return Engine(scheduler, executor)


def reuse_notice(decoder: Decoder, chosen: ServingOptions) -> str:
  """Returns a notice to users if ``reuse`` is set but has no effect, else "".

  It is not an error, since ``reuse`` is set by default, and a model with
  recurrent states can be served without a change of its config.

  Args:
    decoder: The model.
    chosen: The options of ``config.serving``.
  """
  if not chosen.reuse or decoder.cache_shape.shares_prefixes:
    return ""
  name = type(decoder.program.model).__name__
  return (
    f"config.serving.reuse=True has no effect: {name} has one state per "
    "sequence, which sequences with a common prefix cannot share"
  )


def describe(decoder: Decoder, made: Engine) -> dict[str, Any]:
  """Returns the numbers of slots, pages and states and their sizes in GB."""
  shape, scheduler = decoder.cache_shape, made.scheduler
  page, state = page_bytes(decoder), decoder.state_bytes
  host = scheduler.swapping.host
  size = shape.num_pages * page + shape.num_states * state
  return {
    "slots": decoder.capacity.batch, "context": decoder.capacity.context,
    "pages": shape.num_pages if shape.paged else 0,
    "page_size": shape.page_size, "states": shape.num_states,
    "cache_gb": size / 1e9, "host_pages": host.num_pages,
    "host_gb": host.num_pages * (page + state) / 1e9,
  }
