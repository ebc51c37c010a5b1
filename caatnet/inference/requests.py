"""What is asked of a model, and what it answers."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from caatnet.data.tokenizers import Tokenizer
from caatnet.inference.filters import FILTERS, Settings
from caatnet.inference.sampling import DTYPES, GATHERING, Sampling
from caatnet.inference.stops import Reason, Stops


@dataclasses.dataclass(frozen=True)
class Request(Settings):
  """A prompt, how tokens after it are drawn, and what ends them.

  Attributes:
    prompt: The tokens of the prompt, at least one.
    stops: What ends the sequence.
    temperature: Divides the logits; 0 takes the most probable token.
    seed: Requests with equal prompts and seeds have equal tokens, in [0, 2^32).
    NAME: Value of the filter of that name (`caatnet.inference.filters`).
  """

  prompt: tuple[int, ...]
  stops: Stops

  def __post_init__(self) -> None:
    if not self.prompt:
      raise ValueError("the prompt is empty: it has no token")
    for name, fits, bound in (
      ("temperature", 0 <= self.temperature <= np.finfo("f4").max,
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
      FILTERS[name].used(getattr(self, name)) for name in GATHERING
    )

  def check(self, vocab_size: int, context: int) -> None:
    """Checks that a model can take the prompt.

    Args:
      vocab_size: How many tokens the model knows.
      context: How many tokens the prompt and what follows may have.

    Raises:
      ValueError: It cannot; the message says why.
    """
    wrong = [t for t in self.prompt if not 0 <= t < vocab_size]
    if wrong:
      raise ValueError(
        f"the prompt has the token {wrong[0]}, and the model knows those from "
        f"0 to {vocab_size - 1} (config.model.vocab_size)"
      )
    if len(self.prompt) >= context:
      raise ValueError(
        f"the prompt has {len(self.prompt)} tokens, which leaves no room in "
        f"config.inference.context={context}"
      )


@dataclasses.dataclass(frozen=True)
class Completion:
  """What followed a prompt.

  Attributes:
    text: The text, without what ended it.
    tokens: All tokens that were drawn, with the one that ended the sequence.
    logprobs: Their log-probabilities in nats, those of the model itself: at
      temperature 1 and with no filter.
    reason: Why the sequence has ended.
  """

  text: str
  tokens: tuple[int, ...]
  logprobs: tuple[float, ...]
  reason: Reason


def encoded(text: str, tokenizer: Tokenizer, chat: bool) -> tuple[int, ...]:
  """Returns the tokens of a prompt.

  Args:
    text: The prompt; with ``chat`` a user's message to an assistant.
    tokenizer: Makes tokens of text.
    chat: Whether the tokenizer's chat template writes the prompt.

  Raises:
    ValueError: The tokenizer has no chat template, or cannot encode the text.
  """
  start = tokenizer.start_ids
  if chat:  # the template writes what opens a prompt, too
    text = tokenizer.chat([{"role": "user", "content": text}])
    start = ()
  return (*start, *tokenizer.encode(text).tolist())


def stacked(requests: Sequence[Request | None]) -> Sampling:
  """Returns how to draw the next token of each request, arrays ``[S]``.

  Args:
    requests: A request for each slot; None where a slot is free.
  """
  idle = Request((0,), Stops(1))
  rows = [request or idle for request in requests]
  return Sampling(*(
    np.array([getattr(row, name) for row in rows], dtype)
    for name, dtype in DTYPES.items()
  ))
