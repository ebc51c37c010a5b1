"""Builder of an experiment from a config.

The built objects take frozen dataclasses and do not depend on ml_collections.
Each other file of this folder builds the section of a config that has its name.
"""

from collections.abc import Mapping
import dataclasses
import json
import os
from typing import Any

import jax
from jax.sharding import Mesh
import ml_collections

from caatnet.config import sections
from caatnet.config.context import ModelContext
from caatnet.config.data import DATA
from caatnet.config.memory import (
  activations,
  build_update,
  describe_unexecuted,
  moments_memory_kind,
)
from caatnet.config.model import MODELS
from caatnet.config.optimizer import OPTIMIZERS, InnerOptimizer
from caatnet.config.outer import OUTER
from caatnet.config.zero import Zero, build_zero
from caatnet.data.protocol import Data
from caatnet.data.text import TextData
from caatnet.models.protocol import Model
from caatnet.program import Layout, Program
from caatnet.schema import fields, tree
from caatnet.schema.inference import Inference
from caatnet.schema.memory import FROM_PLACEMENT, Memory
from caatnet.schema.parallel import Parallel, Pipeline
from caatnet.schema.train import Elastic, Train
from caatnet.stages import Stages
from caatnet.train import records, tokenizer
from caatnet.train.experiment import Experiment
from parallel.axes import Axis, assign_devices, make_mesh
from parallel.base import files
from parallel.base.naming import prefix_error_keys
from parallel.kernels import selection
from parallel.ledger import compiler_options
from parallel.memory.offload import ON_DEVICE
from parallel.outer.joining import elastic_adapter
from parallel.plans.axis_kinds import axis_sizes
from parallel.plans.pipeline import builders

_SECTIONS = (
  "name", "seed", "kernels", "model", "sync", "parallel", "pipeline", "outer",
  "zero", "memory", "data", "optimizer", "train", "inference", "elastic",
)
# Sections of some configs only: of models with sync policies, pipeline stages
# or text generation, and of runs in a swarm.
_OPTIONAL_SECTIONS = ("sync", "pipeline", "inference", "elastic")
# Name of the launch script for each key that no training config has.
_SCRIPT_OF_KEY = {
  "study": "simulate", "sweep": "sweep", "kinds": "sweep",
  "benchmark": "benchmark", "federated": "federate",
}


def build(
  config: ml_collections.ConfigDict,
  requested_mesh: Mapping[str, int] | None = None,
  devices: list[jax.Device] | None = None,
) -> Experiment:
  """Checks a config and builds its experiment.

  Args:
    config: A config with the sections of ``configs/caatnet/base.py``.
    requested_mesh: Devices per axis (``--mesh``); None for the assignment that
      uses the largest number of devices.
    devices: The devices to use; None for all devices of this machine.

  Returns:
    The experiment, before its first step.

  Raises:
    ValueError: If a value is not allowed; the message has the key and the
      allowed values.
  """
  check(config)
  # The partition is built first, since its levels are axes of the mesh.
  zero: Zero = sections.build_section(
    "zero", build_zero, config.zero, config.parallel
  )
  data = sections.build_selected("data", DATA, config.data)
  train: Train = tree.parse_section("train", config.train)
  _check_batch(
    data, train, config.parallel.worker * zero.partition.num_ranks
  )
  program = build_program(config, zero, data, requested_mesh, devices)
  told = {
    "vocab_size": config.model.get("vocab_size"),
    "kernels": program.layout.kernels,
  }
  # Fields of the data whose values are keys of other sections.
  data = dataclasses.replace(data, **{
    f.name: told[f.name] for f in dataclasses.fields(data) if f.name in told
  })
  inner: InnerOptimizer = sections.build_selected(
    "optimizer", OPTIMIZERS, config.optimizer, train.num_steps,
    program.decays,
  )
  outer = sections.build_selected(
    "outer", OUTER, config.outer, program, config.seed
  )
  if "elastic" in config and program.has_explicit_state:
    raise ValueError(
      "config.elastic: members of a swarm do not exchange explicit training "
      f"state, which config.model.name={config.model.name!r} has"
    )
  if "elastic" in config:  # without a coordinator too: checkpoints depend on it
    outer = elastic_adapter(outer).elastic()
  return Experiment(
    config=json.loads(config.to_json()),
    program=program,
    optimizer=inner.optimizer,
    outer=outer,
    learning_rate=inner.learning_rate,
    clip_norm=inner.clip_norm,
    data=data,
    train=train,
    seed=config.seed,
    update=build_update(config),
    unexecuted=describe_unexecuted(tree.parse_section("memory", config.memory)),
  )


def build_program(
  config: ml_collections.ConfigDict,
  zero: Zero,
  data: Data,
  requested_mesh: Mapping[str, int] | None = None,
  devices: list[jax.Device] | None = None,
) -> Program:
  """Builds a config's model and its layout on a mesh; see `build`.

  Args:
    config: The config, which has been checked.
    zero: The ZeRO partition.
    data: The training data.
    requested_mesh: Devices per axis; None for the default assignment.
    devices: The devices to use; None for all devices of this machine.

  Raises:
    ValueError: If a value is not allowed.
  """
  devices = devices or jax.devices()
  platform = devices[0].platform
  parallel: Parallel = tree.parse_section("parallel", config.parallel)
  axes = _axes(parallel, zero, len(devices), requested_mesh)
  kernels = _kernels(config.kernels, platform)
  pipeline = _pipeline(config)
  # With "sharded", embedding and head are split over stages and tensor ranks.
  together = pipeline is not None and pipeline.vocabulary == "sharded"
  context = ModelContext(
    platform,
    axes["tensor"],
    kernels,
    # Only "auto" depends on measurements of the device kind.
    devices[0].device_kind if config.kernels == "auto" else None,
    data,
    config.get("sync", None),
    axes["stage"] if together else None,
  )
  model = sections.build_selected("model", MODELS, config.model, context)
  memory: Memory = tree.parse_section("memory", config.memory)
  layout = Layout(
    tuple(axes.values()),
    _mesh(parallel, axes, devices),
    zero.partition,
    kernels,
    zero.prefetch,
    moments_memory_kind(memory),
    activations(memory),
    None if pipeline is None else _stages(
      pipeline, axes["stage"], model, config.train.accumulation
    ),
    _xla_options(parallel),
  )
  _check_residuals(layout, config)
  _check_offloaded(layout, config)
  optimizer = tree.parse_section("optimizer", config.optimizer)
  with prefix_error_keys("config.model", tuple(config.model)):
    return Program(model, layout, tuple(optimizer.moments.items()))


def from_folder(
  workdir: str | os.PathLike[str],
  requested_mesh: Mapping[str, int] | None = None,
) -> Experiment:
  """Builds the experiment in a run's folder, with the run's stored tokenizer.

  Args:
    workdir: The run's folder.
    requested_mesh: Devices per axis; None for the default assignment.

  Raises:
    FileNotFoundError: If the folder holds no run.
    ValueError: If the config is damaged or of an incompatible version, or the
      run's tokenizer is damaged, missing or changed.
  """
  workdir = files.parse_folder(workdir)
  config = read_run_config(workdir)
  try:
    experiment = build(config, requested_mesh)
  except (AttributeError, LookupError, TypeError, ValueError) as error:
    raise ValueError(f"{workdir / 'config.json'}: {error}") from error
  data = experiment.data
  if isinstance(data, TextData):
    data = dataclasses.replace(data, kept=tokenizer.load(workdir))
  return dataclasses.replace(experiment, data=data)


def read_run_config(
  workdir: str | os.PathLike[str]
) -> ml_collections.ConfigDict:
  """Returns the config in a run's folder; machine-specific keys are reset."""
  config = ml_collections.ConfigDict(
    records.read_config(files.parse_folder(workdir))
  )
  config.parallel.device_order, config.parallel.xla_options = (), ""
  return config


def check(config: ml_collections.ConfigDict) -> None:
  """Checks sections, keys and values of a training config.

  Raises:
    ValueError: If a section or key is unknown or missing, or a value is out of
      range; the message names the key.
  """
  for key, script in _SCRIPT_OF_KEY.items():
    if key in config:
      raise ValueError(
        f"config.{key} has no effect on a training run; for this config there "
        f"is python -m launch.{script}"
      )
  for key in config:
    if key not in _SECTIONS:
      raise ValueError(
        f"config.{key} has no effect on a training run; its sections are "
        f"{', '.join(_SECTIONS)}"
      )
  for key in _SECTIONS:
    if key not in config and key not in _OPTIONAL_SECTIONS:
      raise ValueError(
        f"config.{key} is missing, so this is not the config of a training "
        "run, or it is from an older version"
      )
  tree.check(config)
  if "inference" in config:
    check_cache(config.inference)


def check_cache(section: Mapping[str, Any]) -> None:
  """Raises ValueError if a cache cannot hold one sequence of full length."""
  with prefix_error_keys("config.inference", ("context",)):
    options: Inference = tree.parse_section("inference", section)
    held = options.pages * options.page_size
    if 0 < held < options.context:
      raise ValueError(
        f"context={options.context} must be at most {held}, the positions of "
        f"pages={options.pages} with page_size={options.page_size}"
      )


def swarm_options(config: ml_collections.ConfigDict) -> Elastic:
  """Returns ``config.elastic``, or its defaults if there is no section."""
  return tree.parse_section("elastic", config.get("elastic", {}))


def _axes(
  parallel: Parallel,
  zero: Zero,
  num_devices: int,
  requested_mesh: Mapping[str, int] | None,
) -> dict[str, Axis]:
  """Returns all axes by name, outermost first, with one axis per ZeRO level."""
  sizes = axis_sizes(vars(parallel), zero.partition.levels)
  try:
    return assign_devices(sizes, num_devices, requested_mesh)
  except ValueError as error:
    raise ValueError(
      f"--mesh: {error}; sizes come from config.parallel and "
      "config.zero.levels"
    ) from error


def _mesh(
  parallel: Parallel, axes: Mapping[str, Axis], devices: list[jax.Device]
) -> Mesh:
  """Returns the mesh, in the config's device order if it has one."""
  with prefix_error_keys("config.parallel", ("device_order",)):
    return make_mesh(axes, devices, parallel.device_order)


def _xla_options(parallel: Parallel) -> tuple[tuple[str, bool | str], ...]:
  """Parses ``config.parallel.xla_options`` to pairs (name, value)."""
  try:
    return tuple(compiler_options.parse(parallel.xla_options).items())
  except ValueError as error:
    raise ValueError(f"config.parallel.xla_options: {error}") from error


def _pipeline(config: ml_collections.ConfigDict) -> Pipeline | None:
  """Returns ``config.pipeline``; None if there is only one stage."""
  if config.parallel.get("stage", 1) == 1:
    return None
  if "pipeline" not in config:
    raise ValueError(
      f"config.parallel.stage={config.parallel.stage} needs the section "
      "config.pipeline, which is missing (caatnet/schema/parallel.py)"
    )
  return tree.parse_section("pipeline", config.pipeline)


def _stages(
  pipeline: Pipeline, axis: Axis, model: Model, microbatches: int
) -> Stages:
  """Builds the pipeline stages of a model.

  Raises:
    ValueError: If the model cannot be split into stages, the pipeline schedule
      is unknown or does not support the numbers of stages, microbatches and
      chunks, or there are too few layers.
  """
  with (
    prefix_error_keys("config.model", ("widths",)),
    prefix_error_keys("config.sync", ("p_attention", "p_mlp", "carry")),
  ):
    stack = model.parts().stack
  # The layers are split into stages x chunks parts.
  num_layers, chunks = model.stacks[stack], pipeline.chunks
  with prefix_error_keys("config.pipeline", fields.keys(Pipeline)):
    if pipeline.schedule == "forward":
      raise ValueError(
        'schedule="forward" has no backward, so it cannot train; use another '
        "schedule"
      )
    size = (pipeline.schedule, axis.size, microbatches, chunks)
    builders.check_supported(*size)
    # Checked before `build`, whose time grows with the number of stages.
    if axis.size * chunks > num_layers:
      raise ValueError(
        f"chunks={chunks} x config.parallel.stage={axis.size} must be at most "
        f"{num_layers}, the number of layers of the model"
      )
    schedule = builders.build(*size)
    return Stages(
      axis, schedule, builders.build_evaluation(schedule),
      pipeline.keep == "residuals",
    )


def _check_residuals(
  layout: Layout, config: ml_collections.ConfigDict
) -> None:
  """Rejects pipelines in which storing residuals costs more than it saves.

  Raises:
    ValueError: If a schedule splits backwards and the first half of a backward
      would have to store weight gradients, or if each backward would create the
      secondary copy of ZeRO weights again.
  """
  stages, partition = layout.stages, layout.partition
  if stages is None or not stages.keeps:
    return
  kept = "config.pipeline.keep='residuals'"
  if stages.schedule.splits:
    # A split backward computes the cotangents of inputs in its first half and
    # those of weights in its second half. Rematerialised functions and gathers
    # of weight shards cannot be split: the first half would also compute their
    # weight gradients, and store them until the second half.
    kept += f" with schedule={stages.schedule.name!r}"
    if config.model.get("remat", "none") != "none":
      raise ValueError(
        f"{kept} needs config.model.remat='none', not {config.model.remat!r}"
      )
    if layout.shards is not None:
      raise ValueError(
        f"{kept} needs config.zero.scheme='ddp', not {config.zero.scheme!r}"
      )
  if partition.secondary is not None:
    raise ValueError(
      f"{kept} would create the secondary copy of weights again in each "
      "backward: it needs config.zero.secondary='none'"
    )


def _check_offloaded(
  layout: Layout, config: ml_collections.ConfigDict
) -> None:
  """Rejects configs whose saved activations cannot be in host memory.

  Raises:
    ValueError: If no names select the saved activations, or a stage of a
      pipeline saves residuals, whose buffer is in device memory.
  """
  if layout.activations == ON_DEVICE:
    return
  key = f"config.memory.activations={config.memory.activations!r}"
  if config.model.get("remat", "none") == "none":
    raise ValueError(
      f"{key} needs a language model with config.model.remat='full', 'reduced' "
      "or 'named', since other activations have no name"
    )
  if layout.stages is not None and layout.stages.keeps:
    raise ValueError(
      f"{key} needs config.pipeline.keep='inputs', since residuals of stages "
      "must stay in device memory"
    )
  if config.memory.activations == FROM_PLACEMENT and layout.prefetch:
    raise ValueError(
      f"{key} cannot be combined with config.zero.prefetch=True, which needs "
      "equal layers"
    )


def _kernels(value: str, platform: str) -> tuple[str, ...]:
  """Returns kernel implementations by preference for ``config.kernels``."""
  if value == "interpret":
    return ("tpu_interpret", "reference")
  # The builders of models may also exclude kernels if the value is "auto".
  return selection.preference("auto" if value == "pallas" else value, platform)


def _check_batch(data: Data, train: Train, num_ranks: int) -> None:
  """Raises ValueError unless all ranks get equal, whole microbatches."""
  unit = num_ranks * train.accumulation
  if data.batch_size % unit:
    raise ValueError(
      f"config.data.batch_size={data.batch_size} must be a multiple of "
      "config.parallel.worker x config.parallel.data x "
      f"config.train.accumulation = {unit}"
    )
