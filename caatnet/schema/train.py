"""``config.train``, ``config.elastic`` and ``config.sweep``."""

from caatnet.schema.fields import (
  COUNT,
  POSITIVE,
  SEED,
  Sections,
  field,
  section,
)


@section
class Train:
  """Length of a run and intervals of its records, in steps."""

  num_steps: int = field(200, "Steps of the run.", COUNT)
  accumulation: int = field(1, "Microbatches per step.", COUNT)
  log_every: int = field(1, "Steps between records of the metrics.", COUNT)
  eval_every: int = field(100, "Steps between evaluations.", COUNT)
  checkpoint_every: int = field(100, "Steps between checkpoints.", COUNT)
  keep_checkpoints: int = field(
    2, "Number of newest checkpoints to keep.", COUNT
  )
  init_from: str = field(
    "", "Folder of a run with the same model and ranks (p may differ), whose "
    'newest parameters are the initial ones; "" for random initialisation.',
  )


@section
class Elastic:
  """Membership of a worker in a swarm (``launch.train --elastic``)."""

  order: str = field(
    "direct", 'Order of floating-point sums: "direct" (order of the workers) '
    'or "ring". Codes are always added in the order of the workers.',
    ("direct", "ring"),
  )
  measured: bool = field(
    False, 'Whether links are measured at each change of the membership, and '
    'order="ring" uses the fastest one of a ring, a direct exchange and a sum '
    "inside sites first; equal for all workers.",
  )
  alone_s: float = field(
    300.0, "Seconds without a coordinator after which a worker saves and ends.",
    POSITIVE,
  )
  num_connections: int = field(
    1,
    "Connections between each pair of workers; several help on links with a "
    "high bandwidth-delay product.",
    COUNT,
  )
  checksums: bool = field(
    False, "Whether exchanged data have checksums in addition to TCP's."
  )


@section
class Sweep:
  """Runs of a sweep."""

  points: tuple[str, ...] = field(
    ("",), 'Overrides of each point, as in "sync.p=0.5 seed=1".', empty=True,
  )
  seeds: tuple[int, ...] = field(
    (0,), "Seeds; each point runs with each seed.", SEED, empty=True,
  )
  sections: Sections = field(
    dict, "Sections, by name and choice, that a point with a selector such as "
    "outer.algorithm=diloco receives instead of the declared defaults.",
  )
