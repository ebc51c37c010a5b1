"""Requests to a model, and completions."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from caatnet.data.tokenizers import Tokenizer
from caatnet.inference.filters import FILTERS, Settings
from caatnet.inference.sampling import DTYPES, GATHERING_FILTERS, Sampling
from caatnet.inference.stops import Reason, Stops


@dataclasses.dataclass(frozen=True)
class Request(Settings):
  """A prompt with its sampling parameters and stop conditions.

  Attributes:
    prompt: Token ids of the prompt, at least one.
    stops: Conditions that end the sequence.
    temperature: Divisor of the logits; 0 selects the most probable token.
    seed: Seed in [0, 2^32); requests with equal prompts and seeds have equal
      tokens.
    NAME: Value of the filter of that name (`caatnet.inference.filters`).

  Raises:
    ValueError: The prompt is empty, or a value is out of range.

  Example:
    >>> request = Request((5, 6), Stops(8), temperature=0.7, top_k=40, seed=1)
    >>> request.filters  # top-k needs the logits of all ranks
    True
    >>> request.check(vocab_size=6, context=16)
    Traceback (most recent call last):
    ValueError: the prompt has the token 6; tokens must lie in [0, 5] ...
  """

  prompt: tuple[int, ...]
  stops: Stops

  def __post_init__(self) -> None:
    if not self.prompt:
      raise ValueError("the prompt is empty; it must have at least one token")
    for name, fits, bound in (
      # A Python float: a larger temperature overflows NumPy's float32, which
      # is a warning.
      ("temperature", 0 <= self.temperature <= float(np.finfo("f4").max),
       "be at least 0 and finite"),
      *((name, row.fits(getattr(self, name)), row.must)
        for name, row in FILTERS.items()),
      ("seed", 0 <= self.seed < 2**32, "be an integer from 0 to 2^32 - 1"),
    ):
      if not fits:
        raise ValueError(f"{name}={getattr(self, name)} must {bound}")

  @property
  def filters(self) -> bool:
    """Whether the logits of all ranks must be gathered to draw a token."""
    return self.temperature > 0 and any(
      FILTERS[name].used(getattr(self, name)) for name in GATHERING_FILTERS
    )

  def check(self, vocab_size: int, context: int) -> None:
    """Checks that a model can take the prompt.

    Args:
      vocab_size: Vocabulary size of the model.
      context: Maximum number of tokens of prompt and continuation.

    Raises:
      ValueError: A token is not in the vocabulary, or the prompt is too long.
    """
    wrong = [t for t in self.prompt if not 0 <= t < vocab_size]
    if wrong:
      raise ValueError(
        f"the prompt has the token {wrong[0]}; tokens must lie in [0, "
        f"{vocab_size - 1}] (config.model.vocab_size)"
      )
    if len(self.prompt) >= context:
      raise ValueError(
        f"the prompt has {len(self.prompt)} tokens, which leaves no room in "
        f"config.inference.context={context}"
      )


@dataclasses.dataclass(frozen=True)
class Completion:
  """Continuation of a prompt.

  Attributes:
    text: The text, without the stop string or token that ended it.
    tokens: All drawn tokens, including the one that ended the sequence.
    logprobs: Their log-probabilities in nats: those of the model at temperature
      1 without filters.
    reason: Reason why the sequence ended.
  """

  text: str
  tokens: tuple[int, ...]
  logprobs: tuple[float, ...]
  reason: Reason


def encode_prompt(
  text: str, tokenizer: Tokenizer, chat: bool
) -> tuple[int, ...]:
  """Returns the token ids of a prompt.

  Args:
    text: The prompt; with ``chat`` a user's message to an assistant.
    tokenizer: Encodes the text.
    chat: Whether the prompt is formatted by the tokenizer's chat template.

  Raises:
    ValueError: The tokenizer has no chat template, or cannot encode the text.
  """
  start = tokenizer.start_ids
  if chat:  # the template includes the start tokens
    text = tokenizer.chat([{"role": "user", "content": text}])
    start = ()
  return (*start, *tokenizer.encode(text).tolist())


def stack_sampling_params(requests: Sequence[Request | None]) -> Sampling:
  """Returns the sampling parameters of requests as arrays ``[S]``.

  Args:
    requests: Request of each slot; None for a free slot.
  """
  idle = Request((0,), Stops(1))
  rows = [request or idle for request in requests]
  return Sampling(*(
    np.array([getattr(row, name) for row in rows], dtype)
    for name, dtype in DTYPES.items()
  ))
