"""``config.outer``: one section per outer loop."""

from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_ZERO,
  DECAY,
  FRACTION,
  NOT_NEGATIVE,
  POSITIVE,
  Range,
  field,
  section,
)


@section
class Rounds:
  """Key of outer loops whose workers exchange every H steps."""

  sync_every: int = field(30, "Inner steps between exchanges (H).", COUNT)


@section
class OuterStep:
  """Keys of outer loops with an outer optimizer."""

  optimizer: str = field(
    "nesterov", 'Outer optimizer: "nesterov", "sgd" (with momentum=0) or '
    '"adam".', ("nesterov", "sgd", "adam"),
  )
  learning_rate: float = field(0.7, "Outer learning rate.", POSITIVE)
  momentum: float = field(0.9, "Outer momentum.", DECAY)


@section
class OutlierExclusion:
  """Key of outer loops that exclude diverged workers from an exchange."""

  outlier_factor: float = field(
    10.0, "A worker is excluded from an exchange if the norm of its update "
    "exceeds this multiple of the median over workers; 0 excludes only workers "
    "whose update is not finite.", NOT_NEGATIVE,
  )


@section
class Weighted:
  """Key of outer loops with weighted means over workers."""

  weights: tuple[float, ...] = field(
    (), "One weight per worker, such as its number of tokens; () for equal "
    "weights.", POSITIVE,
  )


@section
class Exchanging(OutlierExclusion, Weighted):
  """Keys of outer loops that exchange a mean, possibly in low precision."""

  codec: str = field(
    "float32", 'Format of exchanged values: "float32" or "bfloat16" for an '
    'all-reduce; or "int8", "fp8", "int4" or "e3m0" for blocks of codes with '
    'one float32 scale each. With rounding to nearest in blocks of 256, "e3m0" '
    "shrinks Gaussian differences by 3.5%.",
  )
  block: int = field(
    0, "Elements per block of codes with one scale; 0 for 256.", COUNT_OR_ZERO
  )
  route: str = field(
    "all_gather", 'Collective that exchanges blocks: "all_gather" (each '
    'difference is rounded once) or "all_to_all" (means are rounded, too).',
  )
  stochastic_rounding: bool = field(
    False, "Whether codes are rounded stochastically, without bias, instead of "
    "to nearest.",
  )
  error_feedback: bool = field(
    False, "Whether a worker adds its rounding error to its next difference."
  )


@section
class DataParallel:
  """Data parallelism: gradients are averaged in every step; no keys."""


@section
class LocalSGD(Rounds, Exchanging):
  """Local SGD: averaged parameters, i.e. DiLoCo with outer SGD at rate 1."""


@section
class FedAvg(Rounds, Exchanging):
  """FedAvg: weighted averages of the parameters of sampled workers."""

  clients: int = field(
    0, "Number of workers that are sampled for each round; 0 for all.",
    COUNT_OR_ZERO,
  )


@section
class DiLoCo(Rounds, OuterStep, Exchanging):
  """DiLoCo: an outer optimizer on the workers' averaged differences."""


@section
class Streaming(DiLoCo):
  """Streaming DiLoCo: exchanges of one fragment of the model at a time."""

  fragment_layers: int = field(
    1, "Layers per fragment; 0 for one fragment of all parameters.",
    COUNT_OR_ZERO,
  )
  pattern: str = field(
    "strided", 'Layers of a fragment: evenly spread ("strided") or consecutive '
    '("sequential").', ("strided", "sequential"),
  )
  overlap: tuple[int, ...] = field(
    (0,), "Steps between sending a fragment and receiving its mean (tau): one "
    "number, or one per worker.", COUNT_OR_ZERO,
  )
  keep: float = field(
    0.0, "Weight (alpha) of a worker's own parameters in their average with "
    "the new outer parameters, when a mean is received.", FRACTION,
  )
  pieces: int = field(
    1, "Number of steps over which a fragment's exchange is spread.", COUNT
  )


@section
class Eager(DiLoCo):
  """Eager updates: DiLoCo with means that are delayed by one round."""


@section
class DCS3GD(Exchanging):
  """DC-S3GD: delay-compensated stale-synchronous SGD."""

  compensation: float = field(
    0.2, "Delay compensation (lambda_0): norm of a gradient's correction "
    "divided by the norm of the gradient; 0 for none.", NOT_NEGATIVE,
  )


@section
class SparseLoCo(Rounds, OutlierExclusion, Weighted):
  """SparseLoCo: DiLoCo with top-k differences and error feedback."""

  learning_rate: float = field(0.7, "Outer learning rate.", POSITIVE)
  chunk: int = field(4096, "Elements per chunk; top_k of them are sent.", COUNT)
  top_k: int = field(64, "Elements of each chunk that are sent.", COUNT)
  error_decay: float = field(
    0.95, "Factor by which unsent differences decay in each round.", FRACTION
  )


@section
class NoLoCo(Rounds, OutlierExclusion):
  """NoLoCo: workers average in random pairs, without a global reduction.

  The defaults are those of arXiv 2506.10911, section 4, and its authors' code.
  With a momentum of 0.9 and a pull of 0.5, 6 workers diverge.
  """

  learning_rate: float = field(0.7, "Outer learning rate.", POSITIVE)
  momentum: float = field(0.5, "Outer momentum.", DECAY)
  # With a pull of 2 or more, pairs diverge (`parallel.outer.noloco`).
  pull: float = field(
    0.7, "Strength of the attraction between a pair's outer parameters.",
    Range(0, 2, below=True),
  )


OUTER = {
  "data_parallel": DataParallel,
  "local_sgd": LocalSGD,
  "fedavg": FedAvg,
  "diloco": DiLoCo,
  "streaming": Streaming,
  "eager": Eager,
  "dc_s3gd": DCS3GD,
  "sparseloco": SparseLoCo,
  "noloco": NoLoCo,
}
