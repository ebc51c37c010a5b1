"""``config.train``, ``config.elastic`` and ``config.sweep``."""

from caatnet.schema.fields import (
  COUNT,
  POSITIVE,
  SEED,
  SectionsByChoice,
  field,
  section,
)


@section
class Train:
  """Length of a run and intervals between its records, in steps."""

  num_steps: int = field(200, "Steps of the run.", COUNT)
  accumulation: int = field(1, "Microbatches per step and rank.", COUNT)
  log_every: int = field(1, "Steps between records of the metrics.", COUNT)
  eval_every: int = field(100, "Steps between evaluations.", COUNT)
  checkpoint_every: int = field(100, "Steps between checkpoints.", COUNT)
  keep_checkpoints: int = field(
    2, "Number of newest checkpoints to keep.", COUNT
  )
  init_from: str = field(
    "", "Folder of another run, whose newest checkpoint has the initial "
    'parameters; "" for random initialisation. Its config.outer.algorithm must '
    'be "data_parallel". Its tokenizer, number of tensor ranks '
    "(config.parallel.tensor) and config.model, except dtype, remat, unroll, "
    "attention and init_std, must be those of this run; config.sync.p, the "
    "fraction of channels that tensor ranks sum, may differ.",
  )


@section
class Elastic:
  """Membership of a worker in a swarm (``launch.train --elastic``)."""

  order: str = field(
    "direct", 'Order of floating-point additions: "direct" (the order of the '
    'workers) or "ring" (that of a ring all-reduce). Values encoded by a codec '
    "are always added in the order of the workers.", ("direct", "ring"),
  )
  measured: bool = field(
    False, "Whether workers measure their links when the membership changes, "
    'to choose the fastest algorithm for order="ring": a ring, a direct '
    "exchange, or one that first sums within each site (a group of near "
    "workers). Must be equal on all workers.",
  )
  alone_s: float = field(
    300.0, "Seconds without a coordinator after which a worker saves its state "
    "and exits.", POSITIVE,
  )
  num_connections: int = field(
    1, "Connections between each pair of workers; several help on links with a "
    "high bandwidth-delay product.", COUNT,
  )
  checksums: bool = field(
    False, "Whether exchanges have checksums in addition to those of TCP."
  )


@section
class Sweep:
  """Points and seeds of a sweep, one run for each pair."""

  points: tuple[str, ...] = field(
    ("",), 'Overrides of each point, as in "sync.p=0.5 seed=1".', empty=True,
  )
  seeds: tuple[int, ...] = field(
    (0,), "Seeds; each point runs with each seed.", SEED, empty=True,
  )
  sections: SectionsByChoice = field(
    dict, "Sections by name and choice, such as outer and diloco; a point with "
    "outer.algorithm=diloco gets this section instead of declared defaults.",
  )
