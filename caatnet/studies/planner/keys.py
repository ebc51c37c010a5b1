"""Config of the planner's study."""

from caatnet.schema import register
from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_ZERO,
  DECAY,
  POSITIVE,
  POSITIVE_FRACTION,
  field,
  section,
)
from caatnet.studies.keys import (
  EXECUTION_MODELS,
  TIERS_DOC,
  UTILISATION_DOC,
  study_key,
)


@section
class SecondPass:
  """Second pass: changes of the best plans that alter what the model learns."""

  best: int = field(
    3,
    "Number of best configurations to vary, one change at a time; 0 for none.",
    COUNT_OR_ZERO,
  )
  p: tuple[float, ...] = field(
    (0.5, 0.25), "Fractions of the stream that tensor ranks synchronise; see "
    "config.sync.p.", DECAY, empty=True,
  )
  outer: tuple[str, ...] = field(
    ("diloco", "streaming"), "Outer loops to try; data-parallel ranks, or "
    "groups of them, become workers.", empty=True,
  )
  sync_every: int = field(
    30, "Inner steps of a round of the outer loop: 30 in arXiv 2501.18512.",
    COUNT
  )
  overlap: int = field(
    1, 'Steps from send to receipt with "streaming"; 1 in the same paper.',
    COUNT_OR_ZERO,
  )
  outer_codec: str = field(
    "e3m0", 'Codec of "streaming"; "e3m0" in the same paper.'
  )
  zero_codecs: tuple[str, ...] = field(
    ("int8/int4",), 'Codecs of ZeRO to try, "WEIGHTS/GRADIENTS", each "none", '
    '"int8" or "int4"; "int8/int4" is ZeRO++ (arXiv 2306.10209).',
    empty=True,
  )


@section
class PlannerOptions:
  """Search space of a plan, and assumptions of its predictions."""

  cluster: str = field(
    "pipette-a100:16",
    "File of a cluster, or NAME:GROUPS of parallel/plans/hardware/clusters.py; "
    'append ",uneven=SEED" for randomly reduced bandwidths between nodes or '
    '",slow=(DEVICE,FACTOR)" for a slow device. "h100:1+a100:1" has nodes of '
    "two kinds.",
  )
  execution: str = field(
    "lockstep",
    'Execution model of stages: "lockstep", as in launch.train, with ticks as '
    'long as their longest action and transfer; or "events", with each stage '
    "starting as soon as its inputs are present.",
    EXECUTION_MODELS,
  )
  utilisation: float = field(
    0.5, f"{UTILISATION_DOC} (parallel/plans/workload.py)", POSITIVE_FRACTION
  )
  schedules: tuple[str, ...] = field(
    ("1f1b", "gpipe", "eager_1f1b", "interleaved_1f1b", "zb_h1"),
    "Pipeline schedules to try, with all degrees of stages, data and tensor "
    "ranks.",
  )
  chunks: tuple[int, ...] = field((1, 2), "Chunks per stage to try.", COUNT)
  schemes: tuple[str, ...] = field(
    ("ddp", "zero1", "zero2", "zero3"), "Values of config.zero.scheme to try."
  )
  routes: tuple[str, ...] = field(
    ("psum", "one_shot"), "Reductions over the tensor axis to try."
  )
  remats: tuple[str, ...] = field(
    ("none", "reduced", "full"), "Values of config.model.remat to try."
  )
  offload: bool = field(
    True, "Whether to try config.memory.moments='pinned_host'."
  )
  tiers: str = field(
    "dgx-a100", f"{TIERS_DOC}, for an offloaded optimizer state.",
  )
  keeps: tuple[str, ...] = field(
    ("residuals", "inputs"), "Values of config.pipeline.keep to try."
  )
  max_microbatches: int = field(
    256, "Largest number of microbatches to try.", COUNT
  )
  min_devices: int = field(
    0, "Fewest devices to use; 0 for half of the cluster, or for the number of "
    "devices of the fastest kind minus 16 if that is less.", COUNT_OR_ZERO,
  )
  top: int = field(5, "Number of reported configurations.", COUNT)
  ordered: int = field(
    10, "Number of configurations whose device order is optimised.", COUNT
  )
  max_s: float = field(
    120.0, "Seconds after which no further search of a device order or of a "
    "smaller cluster starts; the report counts skipped searches.", POSITIVE
  )
  why_not: tuple[str, ...] = field(
    (),
    "Configurations to compare with the best one, each in the form "
    '"parallel.stage=8 parallel.tensor=8"; other keys have the values of the '
    "best one.",
  )
  second: SecondPass = field(
    SecondPass, "Second pass: variants that change training."
  )


@register.study
class Planner:
  """Plan for the training run that the config's other sections define."""

  study: str = study_key("planner")
  planner: PlannerOptions = field(
    PlannerOptions, "Search space, and assumptions of predictions."
  )
