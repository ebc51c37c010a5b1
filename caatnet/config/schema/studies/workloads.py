"""Configs of the studies of rows, outer loops, partitions and decoding."""

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
  """Features whose rows do not fill whole memory sectors."""

  name: str = field("alignment", "Name of the config.")
  study: str = study_key("alignment")
  features: tuple[int, ...] = field(
    (32, 50, 100, 128, 256, 300, 513, 602, 768, 1024),
    "Float32 features of a row: ogbn-products has 100, papers100M 128, Reddit "
    "602, MAG240M 768.", COUNT,
  )
  num_rows: int = field(1_000_000, "Rows of the table.", COUNT)
  num_ids: int = field(
    100_000, "Rows that are gathered, drawn at random.", COUNT
  )
  offset: int = field(0, "Byte address of row 0.", COUNT_OR_NONE)
  seed: int = field(0, "Seed of the rows.", SEED)
  largest: int = field(700, "Largest number of features of the curve.", COUNT)


@section
class Utilisation(Study):
  """Compute utilisation between sites, and a recommended outer loop."""

  @section
  class Recommend:
    """A model between sites and the candidates for it."""

    link: str = field(
      "wide_area_10g", "Name of a link in parallel/hardware/links.py, in lower "
      "case.",
    )
    parameters: float = field(10e9, "Parameters of the model.", POSITIVE)
    num_layers: int = field(48, "Layers of the model.", COUNT)
    step_seconds: float = field(
      0.8, "Seconds of a step that never waits.", POSITIVE
    )
    target: float = field(
      0.95, "Share of the time that compute is to reach.", INNER_FRACTION
    )
    volume_factor: float = field(
      1.0,
      "Bits that a replica sends for each bit of its parameters: 2 (M - 1) / M "
      "in a ring of M replicas, M - 1 if each sends its own to all others, as "
      "codes of 4 bits are sent.",
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
  """All partitions of the training state, with memory, bytes and time."""

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
    "frontier", "A cluster of parallel/hardware/clusters.py."
  )
  parallel: Ranks = field(Ranks, "Ranks, as in a training run.")
  zero: Levels = field(Levels, "Levels, as in a training run.")
  bandwidths: str = field(
    "",
    "GB/s that a device receives over a level, instead of the cluster's, as in "
    '"gpu:100".',
  )
  memory_gb: float = field(
    64.0, "Memory of a device in GB, all of it for the training state: "
    "activations are left out.", POSITIVE,
  )
  utilisation: float = field(
    0.4,
    "Share of the bfloat16 peak that compute alone reaches, an assumption.",
    POSITIVE_FRACTION,
  )
  parameters: float = field(20e9, "Parameters of the model.", POSITIVE)
  num_layers: int = field(
    50,
    "Layers, each of which is partitioned by itself; only padding depends on "
    "their number.",
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
    ("none", "int8", "int4"), "Codecs of weights that are tried."
  )
  gradient_codecs: tuple[str, ...] = field(
    ("none", "int8", "int4"), "Codecs of gradients that are tried."
  )
  secondary_codecs: tuple[str, ...] = field(
    ("none", "int8"), "Codecs of the second copy that are tried; with () no "
    "second copy is tried.",
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
    "Devices of one node or slice, each of which is a tensor rank, as in "
    "--target of launch.compile.",
  )
  p: tuple[float, ...] = field(
    (1.0, 0.75, 0.5, 0.25), "Fractions of the channels that all row-parallel "
    "projections sum over ranks.", FRACTION,
  )
  every: tuple[int, ...] = field(
    (2,), "Alternatively: both projections of one layer in so many sum all "
    "channels, others none.", COUNT,
  )
  batch: tuple[int, ...] = field(
    (1, 32, 256), "Sequences that decode at once.", COUNT
  )
  context: int = field(2048, "Positions that each of them attends to.", COUNT)
  prompt: int = field(
    2048, "Tokens of a prompt that is prefilled; 0 for none.", COUNT_OR_NONE
  )
  compute_factor: float = field(
    1.0, "Factor of the roofline's time. Measured layers take 1.4 to 2.3 times "
    "as long (the table of layers); with that, less is saved.", POSITIVE,
  )
  threshold: float = field(
    0.05, "Saving of a step, as a fraction, that counts as a help.", FRACTION
  )
