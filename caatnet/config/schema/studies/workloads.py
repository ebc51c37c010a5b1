"""Configs of studies of rows, outer loops, partitions and decoding."""

from caatnet.config.schema.fields import (
  COUNT,
  COUNT_OR_NONE,
  FRACTION,
  INNER_FRACTION,
  POSITIVE,
  POSITIVE_FRACTION,
  SEED,
  field,
  section,
)
from caatnet.config.schema.studies.shared import Study, study_key


@section
class Alignment(Study):
  """Alignment of feature rows that do not fill whole memory sectors."""

  name: str = field("alignment", "Name of the config.")
  study: str = study_key("alignment")
  features: tuple[int, ...] = field(
    (32, 50, 100, 128, 256, 300, 513, 602, 768, 1024),
    "Float32 features of a row: ogbn-products has 100, papers100M 128, Reddit "
    "602, MAG240M 768.", COUNT,
  )
  num_rows: int = field(1_000_000, "Rows of the table.", COUNT)
  num_ids: int = field(
    100_000, "Number of gathered rows, drawn at random.", COUNT
  )
  offset: int = field(0, "Byte address of row 0.", COUNT_OR_NONE)
  seed: int = field(0, "Seed of the rows.", SEED)
  largest: int = field(
    700, "Largest number of features in the plot.", COUNT
  )


@section
class Utilisation(Study):
  """Compute utilisation between sites, and a recommended outer loop."""

  @section
  class Recommend:
    """Model that is trained across sites, and candidate outer loops."""

    link: str = field(
      "wide_area_10g", "Name of a link in parallel/plans/hardware/links.py, in "
      "lower case.",
    )
    parameters: float = field(10e9, "Parameters of the model.", POSITIVE)
    num_layers: int = field(48, "Layers of the model.", COUNT)
    step_seconds: float = field(
      0.8, "Time of a step without communication, in seconds.", POSITIVE
    )
    target: float = field(
      0.95, "Target compute utilisation.", INNER_FRACTION
    )
    volume_factor: float = field(
      1.0,
      "Bits sent per replica and bit of its parameters: 2 (M - 1) / M in a "
      "ring of M replicas; M - 1 for an all-gather, as for codes of 4 bits.",
      POSITIVE,
    )
    sync_every: tuple[int, ...] = field(
      (1, 10, 30, 50, 100, 200, 500),
      "Candidates for H. Smaller H is preferred, then smaller overlap, then "
      "more bits.",
      COUNT,
    )
    overlap_steps: tuple[int, ...] = field(
      (0, 1, 2, 5), "Candidates for the overlap, in steps.", COUNT_OR_NONE
    )
    bits: tuple[float, ...] = field(
      (16, 8, 4), "Candidates for the bits of an element; codes may have a "
      "fraction of a bit on average.", POSITIVE,
    )

  name: str = field("utilisation", "Name of the config.")
  study: str = study_key("utilisation")
  fitted_factor: bool = field(
    False, "Whether the published tables are predicted with a fitted volume "
    "factor.",
  )
  recommend: Recommend = field(
    Recommend, "Model for which an outer loop is recommended."
  )


@section
class Partitions(Study):
  """Partitions of the training state, with memory, bytes and time."""

  @section
  class Ranks:
    """Ranks of a training run."""

    data: int = field(384, "Data-parallel ranks.", COUNT)

  @section
  class Levels:
    """Levels and blocks of a training run."""

    levels: str = field(
      "node:48,gpu:4,gcd:2", "Levels of the data-parallel ranks, outermost "
      "first.",
    )
    block: int = field(256, "Elements per block of codes.", COUNT_OR_NONE)

  name: str = field("zero_frontier", "Name of the config.")
  study: str = study_key("partitions")
  cluster: str = field(
    "frontier", "A cluster of parallel/plans/hardware/clusters.py."
  )
  parallel: Ranks = field(Ranks, "Ranks, as in a training run.")
  zero: Levels = field(Levels, "Levels, as in a training run.")
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
    "Achieved share of the bfloat16 peak of compute alone, an assumption.",
    POSITIVE_FRACTION,
  )
  parameters: float = field(20e9, "Parameters of the model.", POSITIVE)
  num_layers: int = field(
    50,
    "Layers, which are partitioned separately; only padding depends on their "
    "number.",
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
    ("none", "int8"), "Codecs of the second copy to try; () for no second "
    "copy.", empty=True,
  )
  accumulations: tuple[int, ...] = field(
    (1, 2, 4, 8, 16), "Microbatches per step for which the best partition is "
    "reported.", COUNT,
  )


@section
class Inference(Study):
  """Bounds of prefill and decoding, and the saving of partial sync."""

  name: str = field("decode", "Name of the config.")
  study: str = study_key("inference")
  models: tuple[str, ...] = field(
    ("7b", "70b"), "Names of `caatnet.studies.inference.study.MODELS`."
  )
  machines: tuple[str, ...] = field(
    ("gpu:h200:1x8", "gpu:a100:1x8", "gpu:a100-pcie:1x8", "tpu:v5p:2x2x2",
     "tpu:v6e:2x4"),
    "Devices of one node or slice, as in --target of launch.compile; each "
    "device is a tensor rank.",
  )
  p: tuple[float, ...] = field(
    (1.0, 0.75, 0.5, 0.25), "Fractions of the channels that all row-parallel "
    "projections reduce over ranks.", FRACTION,
  )
  every: tuple[int, ...] = field(
    (2,), "Alternative to p: in one of every N layers both projections reduce "
    "all channels, in other layers none.", COUNT, empty=True,
  )
  batch: tuple[int, ...] = field(
    (1, 32, 256), "Concurrently decoding sequences.", COUNT
  )
  context: int = field(2048, "Cached positions of each sequence.", COUNT)
  prompt: int = field(
    2048, "Tokens of a prefilled prompt; 0 for none.", COUNT_OR_NONE
  )
  compute_factor: float = field(
    1.0, "Factor of the roofline's time. Measured layers take 1.4 to 2.3 times "
    "as long (the table of layers), which reduces the saving.", POSITIVE,
  )
  threshold: float = field(
    0.05, "Smallest relative saving of a step that counts as an improvement.",
    FRACTION,
  )
