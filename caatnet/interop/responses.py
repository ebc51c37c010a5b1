"""Responses to the requests of EleutherAI's lm-evaluation-harness.

The harness builds requests from its tasks' documents and computes metrics from
the responses. Requests are interpreted as by its class for Hugging Face models
(``lm_eval.models.huggingface``, 0.4.13): the boundary between context and
continuation in tokens, the truncation of inputs longer than the model's
context, and the windows in which a long text is scored. Two cases that are
errors there have a well-defined result here: an empty continuation has
probability 1, and a continuation longer than the model's context is scored in
windows, like a text without a context.

This module does not import the harness; `caatnet.interop.harness` runs it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
from typing import Any, NamedTuple, Protocol

import numpy as np
from rich.console import Console
from rich.progress import Progress

from caatnet.data.tokenizers import Tokenizer
from caatnet.inference import requests
from caatnet.inference.filters import FILTERS
from caatnet.inference.scoring import Scorer
from caatnet.inference.stops import Stops

# Names under which tasks set the maximum number of tokens, in order of
# precedence, and the default.
_MAX_TOKENS_KEYS = (
  "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens",
)
_DEFAULT_MAX_TOKENS = 256


class EvalRequest(Protocol):
  """A request, such as ``lm_eval.api.instance.Instance``.

  Attributes:
    args: Arguments, documented in the methods of `Responder`.
  """

  args: tuple[Any, ...]


class Window(NamedTuple):
  """Tokens of one forward pass, the last of which are scored.

  Attributes:
    tokens: Token ids, at most one more than the model's context.
    num_targets: Number of tokens at the end that are scored.
  """

  tokens: Sequence[int]
  num_targets: int


class Responder:
  """Responder to the harness's requests, with one model.

  Attributes:
    context: Maximum number of tokens that the model reads.
    num_cut: Number of requests whose context was truncated at its beginning.
  """

  def __init__(
    self,
    scorer: Scorer,
    tokenizer: Tokenizer,
    generate: Callable[
      [Sequence[requests.Request]], Sequence[requests.Completion]
    ],
  ) -> None:
    """Sets the model.

    Args:
      scorer: Scorer of the model.
      tokenizer: Tokenizer of the model.
      generate: Continues prompts with the same model, with a context at least
        as long as the scorer's.
    """
    self.context, self.num_cut = scorer.context, 0
    self._scorer, self._tokenizer = scorer, tokenizer
    self._generate = generate

  def loglikelihood(
    self, asked: Sequence[EvalRequest]
  ) -> list[tuple[float, bool]]:
    """Scores continuations of contexts.

    Args:
      asked: Requests whose ``args`` are a context and a continuation.

    Returns:
      For each request the log-probability of the continuation in nats, and
      whether each of its tokens is the greedy choice given the previous tokens.
    """
    pairs = [self._encode_pair(*request.args) for request in asked]
    room = self.context + 1
    # At least one token of a context is kept, to predict the first target.
    self.num_cut += sum(
      len(context) > max(1, room - len(continuation))
      for context, continuation in pairs
    )
    return self._score_pairs(pairs)

  def loglikelihood_rolling(self, asked: Sequence[EvalRequest]) -> list[float]:
    """Scores whole texts independently.

    Each token is scored once, given the previous tokens in its window. The
    first token of a text is scored given the token that separates documents.

    Args:
      asked: Requests whose ``args`` are a text.

    Returns:
      The log-probability of each text in nats.
    """
    pairs = [
      ([self._prefix], self._encode(text))
      for (text,) in (request.args for request in asked)
    ]
    return [total for total, _ in self._score_pairs(pairs)]

  def generate_until(self, asked: Sequence[EvalRequest]) -> list[str]:
    """Continues contexts until a stop string.

    A context that leaves no room for ``max_gen_toks`` tokens is truncated at
    its beginning.

    Args:
      asked: Requests whose ``args`` are a context and a mapping with the
        optional keys "until" (a string or several), "max_gen_toks",
        "do_sample", "temperature", and the names of filters.

    Returns:
      The continuation of each context, without the stop string.

    Raises:
      ValueError: A request has an unsupported setting, or asks for so many
        tokens that there is no room for any context.
    """
    found = self._generate([
      self._make_request(*request.args, seed)
      for seed, request in enumerate(asked)
    ])
    return [completion.text for completion in found]

  def _make_request(
    self, context: str, how: Mapping[str, Any], seed: int
  ) -> requests.Request:
    """Returns a request to continue a context, with a task's settings `how`."""
    given = {key: value for key, value in how.items() if value is not None}
    until = given.pop("until", [])
    # All these names are removed, and the first one that was given applies.
    named = [given.pop(name, None) for name in _MAX_TOKENS_KEYS]
    max_tokens = next(
      (int(n) for n in named if n is not None), _DEFAULT_MAX_TOKENS
    )
    samples = given.pop("do_sample", None)
    temperature = float(given.pop("temperature", 1.0 if samples else 0.0))
    filters = {
      name: given.pop(name) for name in FILTERS if name in given
    }
    if given.pop("num_beams", 1) != 1 or given:
      raise ValueError(
        f"a task requests generation with {dict(how)}: beams, and settings "
        "other than until, max_gen_toks, do_sample, temperature, "
        f"{', '.join(FILTERS)}, are not supported"
      )
    room = self.context - max_tokens
    if room < 1:
      raise ValueError(
        f"a task asks for {max_tokens} tokens, which leaves no room for its "
        f"prompt in the model's context of {self.context}"
      )
    tokens = [*self._tokenizer.start_ids, *self._encode(context)]
    self.num_cut += len(tokens) > room
    strings = [until] if isinstance(until, str) else until
    return requests.Request(
      # The end of the context is kept.
      tuple(tokens[-room:] or [self._prefix]),
      Stops(
        max_tokens,
        frozenset(self._tokenizer.stop_ids),
        tuple(filter(None, strings)),
      ),
      temperature=0.0 if samples is False else temperature,
      seed=seed,
      **filters,
    )

  def _score_pairs(
    self, pairs: Sequence[tuple[list[int], list[int]]]
  ) -> list[tuple[float, bool]]:
    """Scores continuations of contexts, both as token ids."""
    windows = [list(_windows(*pair, self.context)) for pair in pairs]
    flat = [window for several in windows for window in several]
    with _progress("scoring", len(flat)) as advance:
      # One call for all windows, so that the scorer can sort them by length.
      scores = iter(
        self._scorer.score([window.tokens for window in flat], advance)
      )
    responses = []
    for several in windows:
      total, greedy = 0.0, True
      for window in several:
        judged = next(scores)
        # Scores are of the tokens after the first, so indices are shifted by
        # one.
        last = slice(len(window.tokens) - 1 - window.num_targets, None)
        total += float(judged.log_probabilities[last].sum(dtype=np.float64))
        # An empty continuation has no windows: log-probability 0, greedy.
        greedy &= bool(judged.greedy[last].all())
      responses.append((total, greedy))
    return responses

  def _encode_pair(
    self, context: str, continuation: str
  ) -> tuple[list[int], list[int]]:
    """Returns the token ids of a context and of its continuation.

    Both are encoded together, since a tokenizer may merge characters across the
    boundary. Spaces at the end of the context belong to the continuation, with
    whose first word a tokenizer may merge them.
    """
    both = self._encode(context + continuation)
    split = len(self._encode(context.rstrip()))
    if context:
      before = [*self._tokenizer.start_ids, *both[:split]]
      return before or [self._prefix], both[split:]
    if both[:1] == [self._prefix]:  # the text begins with it
      return both[:1], both[1:]
    return [self._prefix], both

  def _encode(self, text: str) -> list[int]:
    """Returns the token ids of a text."""
    return [int(token) for token in self._tokenizer.encode(text)]

  @property
  def _prefix(self) -> int:
    """Token before a text, on which the score of its first token depends."""
    t = self._tokenizer
    separators = () if t.separator is None else (t.separator,)
    for token in (*t.start_ids[-1:], *separators, *t.stop_ids):
      return token
    raise ValueError(
      "the tokenizer must have a token that can precede a text: one that opens "
      "a prompt, separates documents or ends a text"
    )


def _windows(
  context: Sequence[int], continuation: Sequence[int], limit: int
) -> Iterator[Window]:
  """Yields windows in which each token of a continuation is scored once.

  A continuation that fits into the model's context is in one window, with as
  much of its context as fits. A longer one first fills a window, preceded by
  one token, and then each following window; the last window has as many tokens
  before its targets as fit.

  Args:
    context: At least one token id.
    continuation: Token ids that are scored.
    limit: Maximum number of tokens that the model reads.

  Example:
    A model that reads two tokens scores five tokens after the token 0:

    >>> for window in _windows([0], [1, 2, 3, 4, 5], limit=2):
    ...   print(window.tokens, window.num_targets)
    [0, 1, 2] 2
    [2, 3, 4] 2
    [3, 4, 5] 1
  """
  tokens = [*context, *continuation]
  stop = len(context)
  while stop < len(tokens):
    count = min(len(tokens) - stop, limit)
    stop += count
    yield Window(tokens[max(0, stop - limit - 1) : stop], count)


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Any]:
  """Shows a progress bar on a terminal; yields a function that advances it."""
  console = Console(stderr=True)
  with Progress(
    console=console, transient=True, disable=not console.is_terminal
  ) as bar:
    task = bar.add_task(what, total=total)
    yield lambda count: bar.advance(task, count)
