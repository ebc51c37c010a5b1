"""Config of the study of published configurators."""

from caatnet.schema import register
from caatnet.schema.fields import COUNT, POSITIVE_FRACTION, SEED, field
from caatnet.studies.keys import EXECUTION_MODELS, UTILISATION_DOC, study_key


@register.study
class Published:
  """Step times of configurations chosen by published configurators."""

  name: str = field("published", "Name of the config.")
  study: str = study_key("published")
  clusters: tuple[str, ...] = field(
    ("pipette-v100:16", "pipette-a100:16"),
    "Clusters: NAME:NODES, with a name in parallel/plans/hardware/clusters.py.",
  )
  even: bool = field(True, "Whether to try links with published bandwidth.")
  seeds: tuple[int, ...] = field(
    (1, 2, 3), "Seeds of randomly reduced bandwidths; each one is another "
    "cluster to try.", SEED, empty=True,
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
    EXECUTION_MODELS,
  )
  utilisation: float = field(0.5, UTILISATION_DOC, POSITIVE_FRACTION)
