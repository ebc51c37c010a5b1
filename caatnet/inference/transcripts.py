"""Follows requests while they are answered: their text, and where it ends."""

from caatnet.data.tokenizers import Tokenizer
from caatnet.inference.requests import Completion, Request
from caatnet.inference.stops import Ending

# Of a prompt, how many tokens are decoded before those that follow it: whether
# a token's text has a leading space may depend on the token before.
_NUM_BEFORE = 16


class Transcript:
  """Follows one request.

  Attributes:
    tokens: The tokens that were drawn.
    logprobs: Their log-probabilities.
    text: The text that was given out.
  """

  def __init__(
    self, request: Request, tokenizer: Tokenizer, context: int
  ) -> None:
    """Starts behind the prompt.

    Args:
      request: The request.
      tokenizer: Makes text of tokens.
      context: How many tokens the prompt and what follows may have.
    """
    self.tokens: list[int] = []
    self.logprobs: list[float] = []
    self.text = ""
    self._num_before = len(request.prompt)
    stream = tokenizer.stream()
    for token in request.prompt[-_NUM_BEFORE:]:
      stream.push(token)
    stream.flush()
    self._ending = Ending(
      request.stops, stream, context - len(request.prompt)
    )

  @property
  def most_tokens(self) -> int:
    """How many tokens are drawn at most."""
    return self._ending.most_tokens

  def num_pages(self, page_size: int) -> int:
    """Returns how many pages the prompt and all that may follow take."""
    return -(-(self._num_before + self.most_tokens) // page_size)

  @property
  def ended(self) -> bool:
    """Whether nothing more is drawn."""
    return self._ending.reason is not None

  def push(self, token: int, logprob: float) -> str:
    """Takes the next token and returns the text that can be shown."""
    self.tokens.append(token)
    self.logprobs.append(logprob)
    return self._more(self._ending.push(token))

  def interrupt(self) -> str:
    """Ends where it is, and returns the rest of the text."""
    return "" if self.ended else self._more(self._ending.interrupt())

  @property
  def completion(self) -> Completion:
    """What followed the prompt, once it has ended."""
    reason = self._ending.reason
    assert reason is not None, "the sequence still goes on"
    return Completion(
      self.text, tuple(self.tokens), tuple(self.logprobs), reason
    )

  def _more(self, text: str) -> str:
    self.text += text
    return text
