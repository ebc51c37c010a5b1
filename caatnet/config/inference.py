"""Builds what ``config.inference`` describes of a run's language model."""

from collections.abc import Mapping
import dataclasses
import os
from typing import Any

import jax
import ml_collections

from caatnet.config import experiments, sections
from caatnet.config.data import DATA
from caatnet.config.override import override
from caatnet.config.schema import inference as schema
from caatnet.config.schema import tree
from caatnet.config.zero import Zero
from caatnet.inference.decoder import Capacity, Decoder
from caatnet.inference.scoring import Scorer
from caatnet.inference.weights import Weights, abstract_weights, make_weights
from caatnet.models.paged import CacheShape, CacheSizes
from caatnet.models.protocol import continues_text
from caatnet.program import Program
from caatnet.train import files, records
from caatnet.train.checkpoint import evaluated
from parallel.kernels.paged_attention import api
from parallel.zero.partition import Level, Partition


@dataclasses.dataclass(frozen=True)
class Inference:
  """A language model on a mesh, and how it continues text.

  Attributes:
    program: The model on a mesh, with one worker and no partition.
    capacity: How much each replica holds.
    cache_shape: One rank's cache.
    layers_apart: Whether each layer has arrays of its own.
    coded: Whether matrices are kept as int8 codes.
  """

  program: Program
  capacity: Capacity
  cache_shape: CacheShape
  layers_apart: bool
  coded: bool

  def decoder(self, params: Any) -> Decoder:
    """Makes a decoder.

    Args:
      params: float32 parameters ``[..., ranks, ...]``, which are donated.
    """
    return self.decoder_of(self.weights(params))

  def decoder_of(self, weights: Weights) -> Decoder:
    """Makes a decoder of `weights`."""
    return Decoder(self.program, weights, self.capacity, self.cache_shape)

  def scorer_of(self, weights: Weights) -> Scorer:
    """Makes a scorer of `weights`."""
    capacity = self.capacity
    return Scorer(self.program, weights, capacity.context, capacity.batch)

  def weights(self, params: Any) -> Weights:
    """Converts float32 parameters ``[..., ranks, ...]``, which are donated."""
    return make_weights(self.program, params, self.layers_apart, self.coded)

  def abstract_weights(self) -> Any:
    """Returns the weights with shapes and shardings in place of arrays."""
    return abstract_weights(self.program, self.layers_apart, self.coded)


def build(
  config: ml_collections.ConfigDict,
  requested_mesh: Mapping[str, int] | None = None,
  devices: list[jax.Device] | None = None,
) -> Inference:
  """Checks a run's config and builds what continues text with its model.

  The model is that of the run with all tensor ranks. There is one worker, whose
  data-parallel ranks are replicas, no partition, and one stage.

  Args:
    config: The config of a run. Without a section ``inference``, that of older
      runs, it has the section's defaults.
    requested_mesh: Devices per axis (``--mesh``); None lets the sizes decide.
    devices: The devices to use; None for all of this machine's.

  Raises:
    ValueError: A value does not fit, or the model does not continue text.
  """
  config = with_inference(config)
  experiments.check(config)
  options: schema.Inference = tree.section_of("inference", config.inference)
  with config.unlocked():
    config.parallel.worker = config.parallel.stage = 1
    config.model.dtype = options.dtype or config.model.dtype
    if "remat" in config.model:
      config.model.remat = "none"
    if "sync" in config:
      config.sync.carry = "off"
  levels = (Level("data", config.parallel.data),)
  data = sections.choose("data", DATA, config.data)
  program = experiments.build_program(
    config, Zero(Partition(levels), False, False), data, requested_mesh, devices
  )
  if not continues_text(program.model):
    raise ValueError(
      f"config.model.name={config.model.name!r} does not continue text: it is "
      "no LanguageModel (caatnet/models/protocol.py)"
    )
  capacity = Capacity(
    options.batch, options.context, options.page_size, options.chunk
  )
  layout = program.layout
  platform = layout.mesh.devices.flat[0].platform
  axes = (layout.tensor, *layout.data)
  mapped = any(axis.lanes > 1 for axis in axes)
  shape = program.model.cache_shape(
    CacheSizes(
      options.pages or capacity.batch * capacity.pages_per_sequence,
      options.page_size,
      options.batch,
      "int8" if options.cache == "int8" else "",
      api.preferred(platform, mapped),
    )
  )
  if not shape.paged:  # a sequence never needs a second page
    capacity = dataclasses.replace(capacity, page_size=capacity.context)
    shape = dataclasses.replace(
      shape, num_pages=capacity.batch, page_size=capacity.context
    )
  return Inference(
    program,
    capacity,
    shape,
    layers_apart=platform != "tpu",
    coded=options.weights == "int8",
  )


def with_inference(
  config: ml_collections.ConfigDict,
) -> ml_collections.ConfigDict:
  """Returns a copy of a config that has the section ``inference``."""
  config = config.copy_and_resolve_references()
  if "inference" not in config:
    with config.unlocked():
      config.inference = tree.defaults("inference")
  return config


def from_folder(
  workdir: str | os.PathLike[str],
  requested_mesh: Mapping[str, int] | None = None,
  overrides: str = "",
  step: int | None = None,
) -> tuple[Inference, Any, int]:
  """Builds the inference of a run's folder and reads its parameters.

  Args:
    workdir: The run's folder.
    requested_mesh: Devices per axis; None lets the sizes decide.
    overrides: Keys of the config and values, ``"inference.batch=4 ..."``.
    step: The step of the checkpoint; None for the newest one.

  Returns:
    The inference, the run's float32 parameters on its mesh, and the step of
    the checkpoint.

  Raises:
    FileNotFoundError: The folder holds no run, or no such checkpoint.
    ValueError: Something in it is damaged, or a value does not fit.
  """
  workdir = files.folder(workdir)
  config = ml_collections.ConfigDict(records.read_config(workdir))
  inference = build(override(with_inference(config), overrides), requested_mesh)
  experiment = experiments.from_folder(workdir)
  params, step = evaluated.read(experiment, workdir, step)
  program = inference.program
  shardings = program.layout.shardings(program.whole_specs)
  return inference, jax.device_put(params, shardings), step
