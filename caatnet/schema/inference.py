"""``config.inference`` and ``config.serving``."""

from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_ZERO,
  NOT_NEGATIVE,
  POSITIVE,
  field,
  section,
)
from parallel.base.naming import DTYPES

_STORAGE_FORMATS = ("float", "int8")


@section
class Inference:
  """Generation of text by a language model (`launch.generate`)."""

  batch: int = field(
    16, "Concurrent sequences of a replica; config.parallel.data is the number "
    "of replicas.", COUNT,
  )
  context: int = field(
    1024, "Largest number of tokens of a sequence, with its prompt.", COUNT
  )
  page_size: int = field(64, "Tokens per page of the cache.", COUNT)
  pages: int = field(
    0, "Pages of a replica's cache; 0 for the number that a whole batch can "
    "fill. No effect for a model without keys and values.", COUNT_OR_ZERO,
  )
  chunk: int = field(256, "Prompt tokens that one step reads.", COUNT)
  batch_invariant: bool = field(
    False, "Whether all steps run one program, so that a sequence has bitwise "
    "the same tokens and log-probabilities alone and in any batch. A step then "
    "reads `batch` tokens of prompts and sequences, whatever `chunk` is, and "
    "page tables always cover `context` tokens: steps take longer.",
  )
  dtype: str = field(
    "", 'Dtype of weights and activations; "" for config.model.dtype.',
    ("", *DTYPES),
  )
  weights: str = field(
    "float", 'Storage of matrices: "float", or "int8" with a scale per block.',
    _STORAGE_FORMATS,
  )
  cache: str = field(
    "float", 'Storage of keys and values: "float", or "int8" with a scale per '
    "token and head.", _STORAGE_FORMATS,
  )
  nanobatches: str = field(
    "1", "Number of nano-batches into which a step's tokens are split, so that "
    "the all-reduce of one overlaps with the matrix products of another; "
    '"plan" for the number and sizes that are predicted to be fastest on '
    "`machine`. A step with fewer tokens than nano-batches is not split.",
  )
  machine: str = field(
    "", 'Machine for which nanobatches="plan" plans, such as gpu:h200:1x8; "" '
    "for the machine of --target, or on CPUs, whose steps are never split.",
  )


@section
class Serving:
  """Options of a server (`launch.serve`); times are in seconds.

  ``config.inference.batch`` is the number of concurrent sequences, and
  ``config.inference.pages`` is the number of pages that they share: 0 for the
  number that they can fill, limited to half of the free memory.
  """

  policy: str = field(
    "strict_priority", "Scheduling policy: a name in "
    "`caatnet.serving.scheduler.policies.registry.POLICIES`.",
  )
  preempt: str = field(
    "cost", 'Handling of the pages of a preempted sequence: "swap" copies them '
    'to the host, "recompute" discards them, "cost" chooses the faster one.',
    ("recompute", "swap", "cost"),
  )
  host_pages: int = field(
    0, "Pages (for a model without keys and values, recurrent states) of the "
    "host cache for swapped sequences; 0 for the number on the device, limited "
    "to a quarter of the free host memory.", COUNT_OR_ZERO,
  )
  growth: int = field(
    1, "Pages added to a sequence whose last page is full.", COUNT
  )
  wait_s: float = field(
    2e-3, "Longest copy of pages to or from the host, in seconds, for which a "
    "step waits; longer copies overlap with later steps.", NOT_NEGATIVE,
  )
  reuse: bool = field(
    True, "Whether sequences with a common prefix share pages; no effect for a "
    "model with one state per sequence.",
  )
  keep_turns: bool = field(
    True, "Whether the host cache keeps a conversation until its next turn."
  )
  queue: int = field(
    1024, "Largest number of sequences that wait for a slot.", COUNT_OR_ZERO
  )
  choices: int = field(64, "Largest number of answers (n) per request.", COUNT)
  max_tokens: int = field(
    0, "Largest number of tokens of a response; 0 for no limit except the "
    "context.", COUNT_OR_ZERO,
  )
  body_bytes: int = field(
    4 << 20, "Largest size of a request's body, in bytes.", COUNT
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
