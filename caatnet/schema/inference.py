"""``config.inference`` and ``config.serving``."""

from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_NONE,
  NOT_NEGATIVE,
  POSITIVE,
  field,
  section,
)
from parallel.base.naming import DTYPES

_STORED = ("float", "int8")


@section
class Inference:
  """Generation of text by a language model (`launch.generate`)."""

  batch: int = field(
    16,
    "Concurrent sequences of each replica; config.parallel.data is the number "
    "of replicas.",
    COUNT,
  )
  context: int = field(
    1024, "Largest number of positions of a sequence, with its prompt.", COUNT
  )
  page_size: int = field(64, "Positions of a page of the cache.", COUNT)
  pages: int = field(
    0, "Pages of a replica's cache; 0 for the number that a whole batch can "
    "fill. No effect for a model without keys and values.", COUNT_OR_NONE,
  )
  chunk: int = field(256, "Tokens of a prompt that one step reads.", COUNT)
  batch_invariant: bool = field(
    False, "Whether all steps run one program, so that a sequence has the same "
    "tokens and log-probabilities, bit by bit, alone and in any batch. A step "
    "then reads `batch` tokens of prompts and sequences, whatever `chunk` is, "
    "and tables of pages are as long as `context`: steps take longer.",
  )
  dtype: str = field(
    "", 'Dtype of weights and activations; "" for config.model.dtype.',
    ("", *DTYPES),
  )
  weights: str = field(
    "float", 'Storage of matrices: "float", or "int8" with a scale per block.',
    _STORED,
  )
  cache: str = field(
    "float", 'Storage of keys and values: "float", or "int8" with a scale per '
    "token and head.", _STORED,
  )
  nanobatches: str = field(
    "1", "Number of pieces of a step, of which one is reduced during the "
    'products of another; "plan" for the number and sizes that are fastest on '
    "`machine`. A step with fewer tokens than pieces is not cut.",
  )
  machine: str = field(
    "", 'Machine for which nanobatches="plan" plans, such as gpu:h200:1x8; "" '
    "for the --target, or for CPUs, which overlap nothing.",
  )


@section
class Serving:
  """Server; times are in seconds.

  ``config.inference.batch`` is the number of concurrent sequences, and
  ``config.inference.pages`` the number of pages that they share: 0 for the
  number that they can fill, limited to half of the free memory.
  """

  policy: str = field(
    "strict_priority", "Scheduling policy, a name of "
    "`caatnet.serving.scheduler.policies.registry.POLICIES`.",
  )
  preempt: str = field(
    "cost", 'Handling of preempted pages: "swap", "recompute", or "cost" for '
    "the cheaper one.", ("recompute", "swap", "cost"),
  )
  host_pages: int = field(
    0, "Pages of the host cache for swapped sequences; 0 for the number of the "
    "device's pages, limited to a quarter of the free memory. For a model "
    "without keys and values, the number of states.", COUNT_OR_NONE,
  )
  growth: int = field(1, "Pages per allocation of a sequence.", COUNT)
  wait_s: float = field(
    2e-3, "Longest copy, in seconds, for which a step waits.", NOT_NEGATIVE
  )
  reuse: bool = field(
    True, "Whether sequences with a common prefix share pages; no effect for a "
    "model with one state per sequence.",
  )
  keep_turns: bool = field(
    True, "Whether the host cache keeps the turns of a conversation."
  )
  queue: int = field(
    1024, "Largest number of sequences that wait for a slot.", COUNT_OR_NONE
  )
  choices: int = field(64, "Largest number of choices per request.", COUNT)
  max_tokens: int = field(
    0, "Largest number of tokens of a response; 0 for no limit except the "
    "context.", COUNT_OR_NONE,
  )
  body_bytes: int = field(
    4 << 20,
    "Largest size of a request's body, in bytes.",
    COUNT,
  )
  read_s: float = field(
    20.0, "Timeout for reading a request, in seconds.", POSITIVE
  )
  write_s: float = field(
    60.0, "Timeout for writing to a client that does not read, in seconds.",
    POSITIVE,
  )
  drain_s: float = field(
    30.0, "Seconds for which requests continue after a termination signal.",
    NOT_NEGATIVE,
  )
