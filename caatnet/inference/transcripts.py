"""Transcript of a request: its text so far, and its stop conditions."""

from caatnet.data.tokenizers import Tokenizer
from caatnet.inference.requests import Completion, Request
from caatnet.inference.stops import EndDetector

# Number of prompt tokens that are decoded before the drawn ones: whether a
# token's text has a leading space may depend on the previous token.
_NUM_PREFIX_TOKENS = 16


class Transcript:
  """Tokens, log-probabilities and text of one request.

  Attributes:
    tokens: Drawn tokens.
    logprobs: Their log-probabilities in nats.
    text: Text that has been returned by `push` and `interrupt`.
  """

  def __init__(
    self, request: Request, tokenizer: Tokenizer, context: int
  ) -> None:
    """Starts an empty continuation of the prompt.

    Args:
      request: The request.
      tokenizer: Decodes the tokens.
      context: Maximum number of tokens of prompt and continuation.
    """
    self.tokens: list[int] = []
    self.logprobs: list[float] = []
    self.text = ""
    self._num_before = len(request.prompt)
    stream = tokenizer.stream()
    for token in request.prompt[-_NUM_PREFIX_TOKENS:]:
      stream.push(token)
    stream.flush()
    self._ending = EndDetector(
      request.stops, stream, context - len(request.prompt)
    )

  @property
  def max_tokens(self) -> int:
    """Maximum number of drawn tokens."""
    return self._ending.max_tokens

  def num_pages(self, page_size: int) -> int:
    """Returns the number of pages of the prompt and longest continuation."""
    return -(-(self._num_before + self.max_tokens) // page_size)

  @property
  def ended(self) -> bool:
    """Whether the sequence has ended."""
    return self._ending.reason is not None

  def push(self, token: int, logprob: float) -> str:
    """Appends a token; returns the new text that can be shown."""
    self.tokens.append(token)
    self.logprobs.append(logprob)
    return self._append_text(self._ending.push(token))

  def interrupt(self) -> str:
    """Ends the sequence early; returns the rest of the text."""
    return "" if self.ended else self._append_text(self._ending.interrupt())

  @property
  def completion(self) -> Completion:
    """The continuation, after the sequence has ended."""
    reason = self._ending.reason
    assert reason is not None, "the sequence has not ended"
    return Completion(
      self.text, tuple(self.tokens), tuple(self.logprobs), reason
    )

  def _append_text(self, text: str) -> str:
    """Appends text, and returns it."""
    self.text += text
    return text
