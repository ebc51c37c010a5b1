"""``config.kinds``: training of experts for kinds of text, and their router."""

from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_ZERO,
  POSITIVE,
  Range,
  field,
  section,
)

# Keys of `caatnet.data.kinds.KINDS`, most common ones first.
NAMES = (
  "python", "c", "licence", "documentation", "json", "shell", "changelog",
  "manual", "perl", "markup",
)


@section
class Kinds:
  """Sweep that trains a base model, and from it an expert per kind of text."""

  names: tuple[str, ...] = field(
    NAMES, "Kinds of text (caatnet/data/kinds.py), preferred ones first.", NAMES
  )
  count: int = field(
    8, "Number of kinds: the first of names with enough text on this machine.",
    Range(2, len(NAMES), whole=True),
  )
  size_bytes: int = field(
    1_200_000, "Text of each kind in bytes, including held-out files.", COUNT
  )
  min_bytes: int = field(
    300_000, "A kind with less training text than this, in bytes, is left out.",
    COUNT,
  )
  expert_steps: int = field(120, "Training steps of an expert.", COUNT)
  learning_rate: float = field(
    1e-3, "Peak learning rate of the experts, and of the baseline that trains "
    "the base further on all kinds.", POSITIVE,
  )
  prompt_bytes: int = field(
    128, "Bytes (tokens) at the start of a held-out sequence by which the "
    "router selects an expert; losses are means over the rest.", COUNT,
  )
  buckets: int = field(512, "Router features: hash buckets of n-grams.", COUNT)
  router_prompts: int = field(
    2048, "Training prompts of the router, per kind.", COUNT
  )
  router_steps: int = field(100, "Training steps of the router.", COUNT)
  baselines: bool = field(
    True, "Whether to train two baselines: a model with as many parameters as "
    "router and expert together, and the base trained further on all kinds.",
  )
  experts: int = field(
    150, "Largest number of experts in the library: first those of the first "
    "seed, then those of other seeds and of earlier checkpoints.", COUNT,
  )
  form: str = field(
    "whole", 'Form in which experts are stored: "whole" (all parameters), or '
    'their difference from the base as "low_rank", "int8" or "int4".',
    ("whole", "low_rank", "int8", "int4"),
  )
  ranks: tuple[int, ...] = field(
    (4, 16), "Ranks of low-rank differences in the report; the first one is "
    "the rank of stored experts.", COUNT,
  )
  forms_seeds: int = field(
    1, "Number of seeds for which the report has the losses of experts that "
    "are stored as differences.", COUNT_OR_ZERO,
  )
