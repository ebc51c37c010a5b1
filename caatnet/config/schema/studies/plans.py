"""Configs of planning studies: datacentres and 3D configurations."""

from caatnet.config.schema.fields import (
  COUNT,
  COUNT_OR_NONE,
  DECAY,
  INNER_FRACTION,
  NOT_NEGATIVE,
  POSITIVE,
  POSITIVE_FRACTION,
  SEED,
  Config,
  Range,
  field,
  section,
)
from caatnet.config.schema.studies.shared import (
  EXECUTIONS,
  TIERS,
  UTILISATION,
  Study,
  study_key,
)

_KNOBS = (
  "budget", "accelerators", "days_allowed", "compute_share", "rack_price",
  "per_rack", "per_domain", "rack_w", "overhead", "pue", "energy_price",
  "peak", "utilisation", "availability", "memory_bytes", "fill", "parameters",
  "active_share", "tokens_per_parameter", "state_bytes", "batch_tokens",
  "microbatch_tokens", "layers", "chunks", "step_share", "scale_up_bits",
  "scale_out_bits", "radix", "gradient_bits", "sync_every", "distance_km",
  "detour", "mtbf_h", "network_mtbf_h", "save_rate", "restart_s", "repair_h",
)


@section
class Datacentre(Study):
  """Datacentre for training."""

  name: str = field("hundred_billion", "Name of the config.")
  study: str = study_key("datacentre")
  given: str = field(
    "budget",
    'Quantity from which the size follows: "budget", "accelerators" or '
    '"model", the last one with days_allowed.',
  )
  rack: str = field(
    "gb200", "Key of RACKS in parallel/plans/hardware/sites.py."
  )
  precision: str = field("bf16", "One of the rack's number formats.")
  cooling: str = field(
    "liquid",
    "Key of COOLING in parallel/plans/hardware/sites.py: total power over IT "
    "power.",
  )
  sites: tuple[str, ...] = field(
    ("east", "west"), "NAME:WATTS, or names of SITES in "
    "parallel/plans/hardware/sites.py.",
  )
  knobs: dict[str, float | None] = field(
    lambda: dict.fromkeys(_KNOBS), "Values of knobs; units and meanings are in "
    "caatnet/studies/datacentre/knobs.py. None for the default value of the "
    "knob or the rack.", NOT_NEGATIVE,
  )
  round_steps: int = field(
    100, "Steps of a round between sites.", Range(1, 100_000, whole=True)
  )
  targets: tuple[float, ...] = field(
    (0.5, 0.8, 0.9, 0.95, 0.99), "Target shares of time spent on compute.",
    INNER_FRACTION,
  )
  num_draws: int = field(10_000, "Number of plans with random knobs.", COUNT)
  seed: int = field(0, "Seed of the random knobs.", SEED)
  tornado: str = field(
    "",
    'Result of the tornado plot; "" for replica_days, or accelerators if their '
    "number follows from a model.",
  )
  pod: Config = field(
    dict,
    "Config of a planner study whose utilisation is used; {} for none.",
  )


@section
class Second:
  """Second pass: variants of the best configurations that change training."""

  best: int = field(
    3,
    "Number of best configurations to vary, one change at a time; 0 for none.",
    COUNT_OR_NONE,
  )
  p: tuple[float, ...] = field(
    (0.5, 0.25), "Fractions of the stream that tensor ranks synchronise; see "
    "config.sync.p.", DECAY, empty=True,
  )
  outer: tuple[str, ...] = field(
    ("diloco", "streaming"), "Outer loops; data-parallel ranks, or groups of "
    "them, become workers.", empty=True,
  )
  sync_every: int = field(
    30, "Steps of a round; as published: H = 30 (arXiv 2501.18512).", COUNT
  )
  overlap: int = field(
    1, 'Steps from send to receipt, for "streaming"; as published.',
    COUNT_OR_NONE,
  )
  outer_codec: str = field("e3m0", 'Codec, for "streaming"; as published.')
  zero_codecs: tuple[str, ...] = field(
    ("int8/int4",), 'Codecs of a partition, "WEIGHTS/GRADIENTS", each "none", '
    '"int8" or "int4"; int8 and int4 as in ZeRO++ (arXiv 2306.10209).',
    empty=True,
  )


@section
class PlannerOptions:
  """Search space of a plan, and assumptions of its predictions."""

  cluster: str = field(
    "pipette-a100:16",
    "File of a cluster, or NAME:GROUPS of parallel/plans/hardware/clusters.py, "
    'with ",uneven=SEED" for links between nodes with reduced bandwidth.',
  )
  execution: str = field(
    "lockstep",
    'Execution model of stages: "lockstep", as in launch.train, with ticks as '
    'long as their longest action and transfer; or "events", with each stage '
    "starting as soon as its inputs are present.",
    EXECUTIONS,
  )
  utilisation: float = field(
    0.5, f"{UTILISATION} (parallel/plans/workload.py)", POSITIVE_FRACTION
  )
  schedules: tuple[str, ...] = field(
    ("1f1b", "gpipe", "eager_1f1b", "interleaved_1f1b", "zb_h1"),
    "Pipeline schedules to try, with all degrees of stages, data and tensor "
    "ranks.",
  )
  chunks: tuple[int, ...] = field((1, 2), "Chunks per stage to try.", COUNT)
  schemes: tuple[str, ...] = field(
    ("ddp", "zero1", "zero2", "zero3"), "Partitions to try."
  )
  routes: tuple[str, ...] = field(
    ("psum", "one_shot"), "Routes of the tensor axis to try."
  )
  remats: tuple[str, ...] = field(
    ("none", "reduced", "full"), "Values of config.model.remat to try."
  )
  offload: bool = field(
    True, "Whether to try config.memory.moments='pinned_host'."
  )
  tiers: str = field(
    "dgx-a100", f"{TIERS}, for an offloaded optimizer state.",
  )
  keeps: tuple[str, ...] = field(
    ("residuals", "inputs"), "Values of config.pipeline.keep to try."
  )
  most_microbatches: int = field(
    256, "Largest number of microbatches to try.", COUNT
  )
  least_devices: int = field(
    0, "Fewest devices of the cluster to use; 0 for half of them.",
    COUNT_OR_NONE,
  )
  top: int = field(5, "Number of reported configurations.", COUNT)
  ordered: int = field(
    10, "Number of configurations whose device order is optimised.", COUNT
  )
  why_not: tuple[str, ...] = field(
    (),
    "Configurations to compare with the best one, each as in "
    '"parallel.stage=8 parallel.tensor=8"; other keys have the values of the '
    "best one.",
  )
  second: Second = field(
    Second, "Second pass: variants that change training."
  )


@section
class Planner:
  """Plan for the training run in the other sections of the config."""

  study: str = study_key("planner")
  planner: PlannerOptions = field(
    PlannerOptions, "Search space, and assumptions of predictions."
  )


@section
class PlacementOptions:
  """Memory tiers of a placement, and assumptions of its predictions."""

  tiers: str = field(
    "two-cxl", f"{TIERS}.",
  )
  baseline: str = field(
    "large-dram", f"{TIERS}, on which dram_only is the baseline.",
  )
  device: str = field(
    "h200", "Key of DEVICES in parallel/plans/hardware/devices.py."
  )
  policies: tuple[str, ...] = field(
    ("dram_only", "interleave", "largest_first", "latency_first", "optimum"),
    "Keys of POLICIES in parallel/plans/placement/policies.py.",
  )
  state: str = field(
    "mixed", 'State of the step: "mixed" for weights and gradients in the '
    "dtype of activations, which may be on the host, and for updates of a part "
    'of the parameters on each processor; "run" for the state of launch.train '
    "with config.parallel, config.zero, config.model.remat and "
    "config.memory.optimizer.", ("mixed", "run"),
  )
  utilisation: float = field(0.5, UTILISATION, POSITIVE_FRACTION)
  fill: float = field(
    0.9, "Share of the device's memory that may be used, an assumption.",
    POSITIVE_FRACTION,
  )
  longest: int = field(
    2**20, "Longest context that the search considers, in tokens.", COUNT
  )
  contexts: tuple[int, ...] = field(
    (), "Further contexts of the scan of rates, in tokens.", COUNT
  )
  targets: tuple[float, ...] = field(
    (0.97, 0.99, 1.0), "Speeds relative to the baseline; the least rate of CXL "
    "cards for each of them is searched.", POSITIVE,
  )


@section
class Placement:
  """Placement of the training step in the other sections of the config."""

  study: str = study_key("placement")
  placement: PlacementOptions = field(
    PlacementOptions, "Memory tiers, and assumptions of predictions."
  )


@section
class Published(Study):
  """Step times of configurations chosen by published configurators."""

  name: str = field("published", "Name of the config.")
  study: str = study_key("published")
  clusters: tuple[str, ...] = field(
    ("pipette-v100:16", "pipette-a100:16"),
    "Names of parallel/plans/hardware/clusters.py, with a number of nodes.",
  )
  even: bool = field(True, "Whether to include links with published bandwidth.")
  seeds: tuple[int, ...] = field(
    (1, 2, 3), "Seeds of links that are randomly slower than published.", SEED,
    empty=True,
  )
  models: tuple[str, ...] = field(
    ("3.1B", "11.1B"), "Keys of MODELS in caatnet/studies/published/study.py."
  )
  batch_size: int = field(512, "Sequences of a step.", COUNT)
  choosers: tuple[str, ...] = field(
    ("rule", "megatron", "trials", "amp", "pipette", "same", "whole"),
    "Keys of CHOOSERS in caatnet/studies/published/choosers.py.",
  )
  annealed: int = field(
    10, "Configurations whose node order Pipette anneals.", COUNT
  )
  steps: int = field(1000, "Steps of the simulated annealing.", COUNT)
  execution: str = field(
    "events", "Execution model of stages, as in configs/planner/gpt_11b.py.",
    EXECUTIONS,
  )
  utilisation: float = field(0.5, UTILISATION, POSITIVE_FRACTION)
