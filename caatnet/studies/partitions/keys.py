"""Config of the study of partitions."""

from caatnet.schema import register
from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_ZERO,
  POSITIVE,
  POSITIVE_FRACTION,
  field,
  section,
)
from caatnet.studies.keys import study_key


@register.study
class Partitions:
  """Partitions of the training state, with memory, bytes and time."""

  @section
  class Ranks:
    """Ranks of a training run."""

    data: int = field(384, "Data-parallel ranks.", COUNT)

  @section
  class Levels:
    """Levels of the ranks of a training run, and blocks of its codecs."""

    levels: str = field(
      "node:48,gpu:4,gcd:2", "Levels of the data-parallel ranks, outermost "
      "first.",
    )
    block: int = field(256, "Elements per scale of a codec.", COUNT_OR_ZERO)

  name: str = field("zero_frontier", "Name of the config.")
  study: str = study_key("partitions")
  cluster: str = field(
    "frontier", "A cluster of parallel/plans/hardware/clusters.py."
  )
  parallel: Ranks = field(Ranks, "Ranks, as in the config of a training run.")
  zero: Levels = field(Levels, "Levels, as in the config of a training run.")
  bandwidths: str = field(
    "",
    "Receive bandwidth of a device over a level in GB/s, instead of the "
    'cluster\'s, as in "gpu:100".',
  )
  memory_gb: float = field(
    64.0, "Memory of a device for the training state, in GB; activations are "
    "not included.", POSITIVE,
  )
  utilisation: float = field(
    0.4,
    "Assumed fraction of the bfloat16 peak that compute alone achieves.",
    POSITIVE_FRACTION,
  )
  parameters: float = field(20e9, "Parameters of the model.", POSITIVE)
  num_layers: int = field(
    50,
    "Number of layers, which are partitioned separately; it affects only "
    "padding.",
    COUNT,
  )
  tokens: int = field(
    2048, "Tokens of a microbatch on a device, an assumption.", COUNT
  )
  accumulation: int = field(
    4,
    "Microbatches per step, an assumption; with 384 devices a step has 3.1e6 "
    "tokens.",
    COUNT,
  )
  weight_bytes: int = field(2, "Bytes of a gathered weight.", COUNT)
  gradient_bytes: int = field(
    4, "Bytes of an accumulated gradient. The trainer accumulates and reduces "
    "gradients in float32; papers count 2 bytes.", COUNT,
  )
  overlap: bool = field(
    False, "Whether gathers and scatters of microbatches run concurrently with "
    "their compute.",
  )
  weight_codecs: tuple[str, ...] = field(
    ("none", "int8", "int4"), "Codecs of weights to try."
  )
  gradient_codecs: tuple[str, ...] = field(
    ("none", "int8", "int4"), "Codecs of gradients to try."
  )
  secondary_codecs: tuple[str, ...] = field(
    ("none", "int8"), "Codecs to try for a second copy of the weights; () for "
    "no second copy.", empty=True,
  )
  accumulations: tuple[int, ...] = field(
    (1, 2, 4, 8, 16), "Microbatches per step for which the best partition is "
    "reported.", COUNT,
  )
