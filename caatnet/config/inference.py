"""Builder of ``config.inference``: decoders and scorers of a run's model."""

from collections.abc import Mapping
import dataclasses
import os
from typing import Any

import jax
import ml_collections

from caatnet.config import experiments, nanobatches, sections
from caatnet.config.data import DATA
from caatnet.config.model import check_positions
from caatnet.config.override import override
from caatnet.config.zero import Zero
from caatnet.inference.decoder import Capacity, Decoder
from caatnet.inference.scoring import Scorer
from caatnet.inference.weights import Weights, abstract_weights, make_weights
from caatnet.models.nanobatches import NanobatchRule
from caatnet.models.paged import CacheShape, CacheSizes
from caatnet.models.protocol import continues_text
from caatnet.program import Program
from caatnet.schema import inference as schema
from caatnet.schema import tree
from caatnet.train.checkpoint import export
from parallel.base import files
from parallel.kernels.paged_attention import api
from parallel.plans.axis_kinds import AXES, data_levels
from parallel.plans.zero.partition import Level, Partition

# Smallest cache for which numba compiles attention on CPUs. With a smaller one,
# the calls of the compiled code cost more time than they save.
_MIN_COMPILED_BYTES = 1 << 22


@dataclasses.dataclass(frozen=True)
class Inference:
  """Factory of decoders and scorers of a language model on a mesh.

  Attributes:
    program: The model on a mesh, with one worker and without a ZeRO partition.
    capacity: Sizes of the batch and of a sequence, for each replica.
    cache_shape: Shape of the cache of one rank.
    layers_apart: Whether each layer has its own arrays instead of stacked ones.
    coded: Whether matrices are stored as int8 codes.
    nanobatches: Rule that splits a step into nano-batches; None for no split.
  """

  program: Program
  capacity: Capacity
  cache_shape: CacheShape
  layers_apart: bool
  coded: bool
  nanobatches: NanobatchRule | None = None

  def decoder(self, params: Any) -> Decoder:
    """Returns a decoder with given parameters.

    Args:
      params: float32 parameters ``[..., ranks, ...]``, which are donated.
    """
    return self.decoder_of(self.weights(params))

  def decoder_of(self, weights: Weights) -> Decoder:
    """Returns a decoder with `weights`."""
    return Decoder(
      self.program, weights, self.capacity, self.cache_shape, self.nanobatches
    )

  def scorer_of(self, weights: Weights) -> Scorer:
    """Returns a scorer with `weights`."""
    capacity = self.capacity
    return Scorer(self.program, weights, capacity.context, capacity.batch)

  def weights(self, params: Any) -> Weights:
    """Converts float32 parameters ``[..., ranks, ...]``, which are donated."""
    return make_weights(self.program, params, self.layers_apart, self.coded)

  def abstract_weights(self) -> Any:
    """Returns the shapes and shardings of the weights."""
    return abstract_weights(self.program, self.layers_apart, self.coded)


def build(
  config: ml_collections.ConfigDict,
  requested_mesh: Mapping[str, int] | None = None,
  devices: list[jax.Device] | None = None,
  machine: str = "",
) -> Inference:
  """Checks a run's config and builds its model for inference.

  The model has all tensor ranks of the run, one worker, no ZeRO partition and
  one pipeline stage. Data-parallel ranks are replicas.

  Args:
    config: The config of a run. If it is from an older run and has no section
      ``inference``, the section's defaults are used.
    requested_mesh: Devices per axis (``--mesh``); None for the default
      assignment.
    devices: The devices to use; None for all devices of this machine.
    machine: Name of the devices' machine, such as gpu:h200:1x8, if
      ``config.inference.machine`` is ""; it is used to plan nano-batches.

  Raises:
    ValueError: If a value is not allowed, or the model is not a language model.
  """
  config = with_inference(config)
  experiments.check(config)
  options: schema.Inference = tree.parse_section("inference", config.inference)
  check_positions(
    "inference.context", options.context,
    getattr(config.model, "max_positions", 0),
  )
  with config.unlocked():
    for kind in AXES:  # one model, whose layers are all on each device
      if kind.parameters == "own" or kind.resizable:
        config.parallel[kind.name] = 1
    # Keys that affect only training get neutral values.
    config.model.dtype = options.dtype or config.model.dtype
    if "remat" in config.model:
      config.model.remat = "none"
    if "sync" in config:
      config.sync.carry = "off"
    config.memory = tree.defaults("memory")
  levels = data_levels(
    config.parallel, [Level("data", config.parallel.data)]
  )
  data = sections.build_selected("data", DATA, config.data)
  program = experiments.build_program(
    config, Zero(Partition(levels), False), data, requested_mesh, devices
  )
  if not continues_text(program.model):
    raise ValueError(
      f"config.model.name={config.model.name!r} does not continue text: it is "
      "not a LanguageModel (caatnet/models/protocol.py)"
    )
  capacity, shape = _capacity_and_shape(options, program)
  return Inference(
    program,
    capacity,
    shape,
    layers_apart=_platform(program) != "tpu",
    coded=options.weights == "int8",
    nanobatches=nanobatches.build(
      options.nanobatches, options.machine or machine, program, shape,
      capacity.batch,
    ),
  )


def _capacity_and_shape(
  options: schema.Inference, program: Program
) -> tuple[Capacity, CacheShape]:
  """Returns the capacity of a replica and the shape of its cache."""
  capacity = Capacity(
    options.batch, options.context, options.page_size,
    options.batch if options.batch_invariant else options.chunk,
    options.batch_invariant,
  )
  if options.batch_invariant and options.nanobatches != "1":
    raise ValueError(
      f"config.inference.nanobatches={options.nanobatches!r} must be '1' with "
      "batch_invariant, since rounding may depend on the nano-batch of a row"
    )
  if options.pages * options.page_size >= 2**31:
    raise ValueError(
      f"config.inference.pages={options.pages} with "
      f"page_size={options.page_size} must be fewer than 2,147,483,648 "
      "positions, since positions are int32"
    )
  layout = program.layout
  # With several ranks (lanes) on one device, `vmap` maps the kernels.
  mapped = any(axis.lanes > 1 for axis in (layout.tensor, *layout.data))
  shape = program.model.cache_shape(
    CacheSizes(
      # By default, every sequence of the batch can reach the full context.
      options.pages or capacity.batch * capacity.pages_per_sequence,
      options.page_size,
      options.batch,
      "int8" if options.cache == "int8" else "",
      api.preferred_kernels(_platform(program), mapped),
    )
  )
  if "cpu" in shape.kernels and shape.size_bytes < _MIN_COMPILED_BYTES:
    shape = dataclasses.replace(shape, kernels=("reference",))
  if not shape.paged:  # one page per sequence, which takes no memory
    capacity = dataclasses.replace(capacity, page_size=capacity.context)
    shape = dataclasses.replace(
      shape, num_pages=capacity.batch, page_size=capacity.context
    )
  return capacity, shape


def _platform(program: Program) -> str:
  return program.layout.mesh.devices.flat[0].platform


def with_inference(
  config: ml_collections.ConfigDict,
) -> ml_collections.ConfigDict:
  """Returns a copy of a config, with the default ``inference`` if missing."""
  config = config.copy_and_resolve_references()
  if "inference" not in config:
    with config.unlocked():
      config.inference = tree.defaults("inference")
  return config


def build_from_folder(
  workdir: str | os.PathLike[str],
  requested_mesh: Mapping[str, int] | None = None,
  overrides: str = "",
) -> Inference:
  """Builds the `Inference` of a run's folder without reading its parameters.

  Arguments and errors are those of `from_folder`.
  """
  config = experiments.read_run_config(files.parse_folder(workdir))
  return build(override(with_inference(config), overrides), requested_mesh)


def read_params(
  made: Inference, workdir: str | os.PathLike[str], step: int | None = None
) -> tuple[Any, int]:
  """Reads the parameters of a run's folder.

  Args:
    made: The run's `Inference`, whose mesh receives the parameters.
    workdir: The run's folder.
    step: The step of the checkpoint; None for the newest one.

  Returns:
    The run's float32 parameters, and the step of the checkpoint.

  Raises:
    FileNotFoundError: If there is no such checkpoint.
    ValueError: If a file is damaged.
  """
  workdir = files.parse_folder(workdir)
  experiment = experiments.from_folder(workdir)
  params, step = export.read_params(experiment, workdir, step)
  program = made.program
  shardings = program.layout.shardings(program.unpartitioned_specs)
  return jax.device_put(params, shardings), step


def from_folder(
  workdir: str | os.PathLike[str],
  requested_mesh: Mapping[str, int] | None = None,
  overrides: str = "",
  step: int | None = None,
) -> tuple[Inference, Any, int]:
  """Builds the `Inference` of a run's folder and reads its parameters.

  Args:
    workdir: The run's folder.
    requested_mesh: Devices per axis; None for the default assignment.
    overrides: Keys of the config and values, ``"inference.batch=4 ..."``.
    step: The step of the checkpoint; None for the newest one.

  Returns:
    The `Inference`, the run's float32 parameters on its mesh, and the step of
    the checkpoint.

  Raises:
    FileNotFoundError: If the folder holds no run, or no such checkpoint.
    ValueError: If a file is damaged, or a value is not allowed.
  """
  made = build_from_folder(workdir, requested_mesh, overrides)
  return made, *read_params(made, workdir, step)
