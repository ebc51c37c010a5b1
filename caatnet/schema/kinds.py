"""``config.kinds``: training of a router and of experts for kinds of text."""

from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_NONE,
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
  """Sweep that trains a base, and an expert per kind of text from it."""

  names: tuple[str, ...] = field(
    NAMES, "Kinds of text (caatnet/data/kinds.py), in order of preference.",
    NAMES,
  )
  count: int = field(
    8, "Number of kinds: the first ones with enough text on this machine.",
    Range(2, len(NAMES), whole=True),
  )
  size_bytes: int = field(
    1_200_000, "Text of each kind in bytes, including held-out files.", COUNT
  )
  min_bytes: int = field(
    300_000, "Training text of a kind in bytes, below which it is left out.",
    COUNT,
  )
  expert_steps: int = field(120, "Training steps of an expert.", COUNT)
  learning_rate: float = field(
    1e-3, "Highest learning rate of experts, and of the base that is trained "
    "further on all kinds.", POSITIVE,
  )
  prompt_bytes: int = field(
    128, "Tokens at the start of a held-out sequence that the router receives; "
    "losses are means over the rest.", COUNT,
  )
  buckets: int = field(512, "Features of the router.", COUNT)
  router_prompts: int = field(
    2048, "Training prompts of the router per kind.", COUNT
  )
  router_steps: int = field(100, "Training steps of the router.", COUNT)
  baselines: bool = field(
    True, "Whether to train a model of as many parameters as router and "
    "expert, and the base further on the union of all kinds.",
  )
  experts: int = field(
    150, "Most experts in the library: those of further seeds and checkpoints "
    "follow those of the first seed.", COUNT,
  )
  form: str = field(
    "whole", 'Form of stored experts: "whole", or differences from the base: '
    '"low_rank", "int8" or "int4".', ("whole", "low_rank", "int8", "int4"),
  )
  ranks: tuple[int, ...] = field(
    (4, 16), "Ranks of low-rank differences in the report; the first one is "
    "the rank of stored experts.", COUNT,
  )
  forms_seeds: int = field(
    1, "Seeds for which the report has losses of stored differences.",
    COUNT_OR_NONE,
  )
