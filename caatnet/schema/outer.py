"""``config.outer``: one section per outer loop."""

from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_NONE,
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
  """Key of loops that exchange every H steps."""

  sync_every: int = field(
    30, "Inner steps between exchanges (H).", COUNT
  )


@section
class OuterStep:
  """Keys of loops with an outer optimizer."""

  optimizer: str = field(
    "nesterov", 'Outer optimizer: "nesterov", "sgd" (with momentum=0) or '
    '"adam".', ("nesterov", "sgd", "adam"),
  )
  learning_rate: float = field(0.7, "Outer learning rate.", POSITIVE)
  momentum: float = field(0.9, "Outer momentum.", DECAY)


@section
class Judging:
  """Key of loops that mask diverged workers out of an exchange."""

  outlier_factor: float = field(
    10.0,
    "Norm of a worker's difference, as a multiple of the median over workers, "
    "above which the worker is masked out; 0 masks non-finite differences "
    "only.",
    NOT_NEGATIVE,
  )


@section
class Weighted:
  """Key of loops with weighted means."""

  weights: tuple[float, ...] = field(
    (), "One weight per worker, such as its number of tokens; () for equal "
    "weights.", POSITIVE,
  )


@section
class Exchanging(Judging, Weighted):
  """Keys of loops that exchange a mean, possibly in low precision."""

  codec: str = field(
    "float32", '"float32" or "bfloat16" for an all-reduce; or "int8", "fp8", '
    '"int4" or "e3m0" for blocks of codes with one float32 scale each. "e3m0" '
    "with rounding to nearest shrinks Gaussian differences by 3.5% in blocks "
    "of 256.",
  )
  block: int = field(
    0,
    "Elements per block of codes; 0 for 256.",
    COUNT_OR_NONE,
  )
  route: str = field(
    "all_gather", 'Collective for blocks: "all_gather" (each difference is '
    'rounded once) or "all_to_all" (means are rounded a second time).',
  )
  stochastic_rounding: bool = field(
    False,
    "Whether codes are rounded stochastically, without bias, instead of to "
    "nearest.",
  )
  error_feedback: bool = field(
    False, "Whether a worker's rounding error is added to its next exchange."
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
    0, "Number of workers in a round, sampled for each round; 0 for all.",
    COUNT_OR_NONE,
  )


@section
class DiLoCo(Rounds, OuterStep, Exchanging):
  """DiLoCo."""


@section
class Streaming(DiLoCo):
  """Streaming DiLoCo."""

  fragment_layers: int = field(
    1, "Layers per fragment; 0 for one fragment of all parameters.",
    COUNT_OR_NONE,
  )
  pattern: str = field(
    "strided", 'Layers of a fragment: evenly spread ("strided") or consecutive '
    '("sequential").', ("strided", "sequential"),
  )
  overlap: tuple[int, ...] = field(
    (0,), "Steps from send to receipt (tau): one number, or one per worker.",
    COUNT_OR_NONE,
  )
  keep: float = field(
    0.0, "Weight of a worker's own parameters when it receives a mean (alpha).",
    FRACTION,
  )
  pieces: int = field(1, "Steps over which an exchange is spread.", COUNT)


@section
class Eager(DiLoCo):
  """Eager updates: DiLoCo with means that are delayed by one round."""


@section
class DCS3GD(Exchanging):
  """Delay-compensated stale-synchronous SGD."""

  compensation: float = field(
    0.2, "Strength of the delay compensation (lambda_0); 0 for none.",
    NOT_NEGATIVE,
  )


@section
class SparseLoCo(Rounds, Judging, Weighted):
  """SparseLoCo."""

  learning_rate: float = field(0.7, "Outer learning rate.", POSITIVE)
  chunk: int = field(4096, "Elements per chunk.", COUNT)
  top_k: int = field(64, "Elements of a chunk that are sent.", COUNT)
  error_decay: float = field(
    0.95, "Share of the unsent part that remains after a round.", FRACTION
  )


@section
class NoLoCo(Rounds, Judging):
  """NoLoCo.

  Defaults are published (arXiv 2506.10911, section 4, and its authors' code).
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
