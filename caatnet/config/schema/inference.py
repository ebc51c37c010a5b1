"""``config.inference`` and ``config.serving``."""

from caatnet.checks import DTYPES
from caatnet.config.schema.fields import (
  COUNT,
  COUNT_OR_NONE,
  NOT_NEGATIVE,
  POSITIVE,
  field,
  section,
)

_STORED = ("float", "int8")


@section
class Inference:
  """Generation of text by a language model (`launch.generate`)."""

  batch: int = field(
    16,
    "Sequences at a time in each replica; config.parallel.data is the number "
    "of replicas.",
    COUNT,
  )
  context: int = field(
    1024, "Positions of a sequence, including those of its prompt.", COUNT
  )
  page_size: int = field(64, "Positions of a page of the cache.", COUNT)
  pages: int = field(
    0, "Pages of a replica's cache; 0 for as many as the whole batch can fill. "
    "Without effect for a model without keys and values.", COUNT_OR_NONE,
  )
  chunk: int = field(256, "Tokens of a prompt that one step reads.", COUNT)
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


@section
class Serving:
  """A server; times are in seconds.

  Sequences that run at a time are ``config.inference.batch``, and the pages
  that they share ``config.inference.pages``: 0 for as many as they can fill, in
  half of the memory that is free.
  """

  policy: str = field(
    "strict_priority", "Scheduling policy, a name of "
    "`caatnet.serving.scheduler.policies.registry.POLICIES`.",
  )
  preempt: str = field(
    "cost", 'Handling of preempted pages: "swap", "recompute", or "cost", '
    "whichever is cheaper.", ("recompute", "swap", "cost"),
  )
  host_pages: int = field(
    0, "Pages of the host's memory for swapped sequences; 0 for as many as the "
    "device has, in a quarter of the memory that is free. For a model without "
    "keys and values, the number of states.", COUNT_OR_NONE,
  )
  growth: int = field(1, "Pages that a sequence takes at a time.", COUNT)
  wait_s: float = field(
    2e-3, "Longest copy, in seconds, for which a step waits.", NOT_NEGATIVE
  )
  reuse: bool = field(
    True, "Whether sequences with the same beginning share pages; without "
    "effect for a model that keeps a state per sequence.",
  )
  keep_turns: bool = field(
    True, "Whether the turns of a conversation are kept on the host."
  )
  queue: int = field(1024, "Sequences that may wait for a slot.", COUNT_OR_NONE)
  choices: int = field(64, "Largest number of answers per request.", COUNT)
  max_tokens: int = field(
    0, "Largest number of tokens of an answer; 0 for no bound except the "
    "context.", COUNT_OR_NONE,
  )
  body_bytes: int = field(
    4 << 20,
    "Largest body of a request, in bytes.",
    COUNT,
  )
  read_s: float = field(
    20.0, "Seconds within which a client must have sent a request.", POSITIVE
  )
  write_s: float = field(
    60.0, "Seconds within which a client must have read what was sent.",
    POSITIVE,
  )
  drain_s: float = field(
    30.0, "Seconds for which requests continue after a signal to end.",
    NOT_NEGATIVE,
  )
