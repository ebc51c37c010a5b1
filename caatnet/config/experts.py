"""Builder of a server of experts: library, weight slots, scheduler, engine."""

from collections.abc import Callable, Mapping
import contextlib
import os
from typing import Any

from etils import epath
import jax
import ml_collections
import numpy as np

from caatnet.config import experiments, inference, sections, serving
from caatnet.schema import tree
from caatnet.schema.experts import Experts as Options
from caatnet.serving.engine.device_weights import WeightUploader
from caatnet.serving.engine.expert_weights import ExpertWeights
from caatnet.serving.experts import INDEX, WHOLE_FORM, Library
from caatnet.serving.options import ServingOptions
from caatnet.serving.router import FILE, Router
from caatnet.serving.scheduler.policies.experts import ExpertsPolicy
from caatnet.serving.server.catalog import Catalog, ExpertChanger, refuse_change
from caatnet.serving.server.served import ServerParts
from caatnet.train import records, tokenizer
from parallel.base.checks import known
from parallel.plans.placement.slots import Slots

# Largest fraction of a device's free memory for slots; the cache has the rest.
_SLOTS_SHARE = 0.8


def build(
  config: ml_collections.ConfigDict,
  requested_mesh: Mapping[str, int] | None = None,
  say: Callable[[str], None] = print,
  change: ExpertChanger = refuse_change,
) -> ServerParts:
  """Builds a server of a library of experts, and loads the first experts.

  Args:
    config: Config with the sections ``experts``, ``inference`` and ``serving``,
      and with those of a model if ``experts.random`` is not 0.
    requested_mesh: Devices per axis; None for the default assignment.
    say: Prints a warning about an expert that cannot be loaded.
    change: Adds or replaces an expert at run time.

  Raises:
    ValueError: If there is no library, no expert can be loaded, there is no
      free memory for the device's slots of weights, or a value is not allowed.
  """
  options: Options = tree.parse_section("experts", config.experts)
  chosen = sections.build_section(
    "serving", lambda section: ServingOptions(**vars(section)), config.serving
  )
  known("serving.policy=", chosen.policy, ("experts",))
  library = _open_library(config, options)
  for name in options.pinned:
    known("experts.pinned=", name, library.names)
  made = _build_inference(library, config, requested_mesh)
  device = WeightUploader(made.program, made.layers_apart, made.coded)
  num_devices = made.program.layout.mesh.size
  base_bytes = device.base_bytes / num_devices * _has_delta_experts(library)
  reserved = options.slots * device.size_bytes / num_devices + base_bytes
  free = serving.free_bytes(made.program.layout.mesh.devices.flat[0])
  if reserved > _SLOTS_SHARE * free:
    raise ValueError(
      f"config.experts.slots={options.slots} take "
      f"{reserved / 1e9:,.1f} GB of a device, more than {_SLOTS_SHARE:.0%} of "
      f"the free {free / 1e9:,.1f} GB: a slot takes "
      f"{device.size_bytes / num_devices / 1e9:,.2f} GB"
      + (f", the base {base_bytes / 1e9:,.2f} GB" if base_bytes else "")
    )
  router = None
  if (library.path / FILE).exists():
    router = Router.read(library.path)
  catalog = Catalog(library, router, options.pinned, change)
  weights = ExpertWeights(
    device, options.slots, options.host_experts, catalog.read
  )
  slots = _preload_experts(options, catalog, weights, say)
  policy = ExpertsPolicy(
    slots, options.switch_s or (lambda: weights.load_s), options.deadline_s,
    options.prefetch, options.patience,
  )
  decoder = serving.fit_cache(made, reserved).decoder_of(device.abstract)
  engine = serving.engine(decoder, chosen, weights, policy)
  tokens = tokenizer.load(library.path)
  return ServerParts(engine, decoder, catalog, tokens, chosen)


def _open_library(
  config: ml_collections.ConfigDict, options: Options
) -> Library:
  """Opens the library; creates it if ``options.random`` is not 0."""
  if options.random:
    return create_random(options.path, config, options.random)
  if not os.path.exists(os.path.join(options.path, INDEX)):
    raise ValueError(
      f"config.experts.path={options.path}: there are no experts; python -m "
      "launch.sweep --config=configs/experts/kinds.py trains them, and "
      "--config=configs/serving/experts.py:random has random ones"
    )
  library = Library(options.path)
  if not library.names:
    raise ValueError(
      f"config.experts.path={options.path} must have at least one expert"
    )
  return library


def _has_delta_experts(library: Library) -> bool:
  """Returns whether any expert is stored as a difference from the base."""
  for name in library.names:
    with contextlib.suppress(ValueError):  # a damaged file
      if library.form(name) != WHOLE_FORM:
        return True
  return False


def _build_inference(
  library: Library, config: ml_collections.ConfigDict,
  requested_mesh: Mapping[str, int] | None,
) -> inference.Inference:
  """Builds the model of a library's experts."""
  run = experiments.read_run_config(library.path)
  run.inference = config.inference
  run.parallel.data = 1
  return inference.build(run, requested_mesh)


def _preload_experts(
  options: Options, catalog: Catalog, weights: ExpertWeights,
  say: Callable[[str], None],
) -> Slots:
  """Loads pinned experts, and others until no weight slot is free.

  Returns the slots, each of which holds one expert's weights on the device.
  """
  slots = Slots(
    options.slots, options.eviction, [*map(catalog.key, options.pinned)]
  )
  for name in dict.fromkeys((*options.pinned, *catalog.library.names)):
    if slots.counts.loads == len(slots):
      break
    try:
      key = catalog.key(name)
    except ValueError as error:  # its requests will fail with this error
      say(f"warning: {error}")
      continue
    slot = slots.reserve(key)
    assert slot is not None
    if error := weights.load(key, slot):
      say(f"warning: {error}")
      slots.failed(slot)
    else:
      slots.loaded(slot)
  if not slots.counts.loads:
    raise ValueError(
      f"{catalog.library.path} has no expert that could be loaded"
    )
  return slots


def create_random(
  path: str | os.PathLike[str], config: ml_collections.ConfigDict, count: int
) -> Library:
  """Creates or completes a library of experts with random parameters.

  Experts are named random-000, random-001 and so on. The kind of text of each
  expert is its name, so that a router of prompts can select it.

  Args:
    path: Directory of the library.
    config: Config of a run, which defines the model of the experts.
    count: Number of experts.
  """
  library = Library.create(path)
  folder = epath.Path(path)
  if not (folder / "config.json").exists():
    plain = config.to_dict()
    run = {k: v for k, v in plain.items() if k not in _SERVER_SECTIONS}
    records.write_json(folder / "config.json", run)
  made = _build_inference(library, config, None)
  draw = jax.jit(made.program.model.init)
  for number in range(count):
    name = f"random-{number:03}"
    if name not in library.names:
      params: Any = jax.tree.map(np.asarray, draw(jax.random.key(number)))
      library.add(
        name, params, kind=name, origin="seed", description="random parameters"
      )
  return library


# Sections of a server's config that a run's config does not have.
_SERVER_SECTIONS = ("experts", "serving", "inference", "benchmark")
