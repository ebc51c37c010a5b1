"""Answers what EleutherAI's lm-evaluation-harness asks of a language model.

The harness makes requests of its tasks' documents and computes metrics from the
answers. What a request means here is what it means to its models of Hugging
Face (``lm_eval.models.huggingface``, 0.4.13): where a context ends and its
continuation begins in tokens, what is cut where both are longer than the
model's context, and which windows a long text is scored in. In two places these
models end in an error, where an answer is plain: nothing as a continuation is
certain, and a continuation longer than the model's context is scored in
windows, as a text of its own is.

Nothing of the harness is needed here; `caatnet.interop.harness` runs it.
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

# By what names tasks say how many tokens may follow, the strongest first, and
# the number if they do not.
_NUM_TOKENS = (
  "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens",
)
_MAX_TOKENS = 256


class Request(Protocol):
  """A request, such as ``lm_eval.api.instance.Instance``.

  Attributes:
    args: What the methods of `Answers` say.
  """

  args: tuple[Any, ...]


class Window(NamedTuple):
  """Tokens that the model reads at once.

  Attributes:
    tokens: At most one more than the model's context.
    num_targets: How many of the last ones are scored.
  """

  tokens: Sequence[int]
  num_targets: int


class Answers:
  """Answers requests by one model.

  Attributes:
    context: How many tokens the model reads at most.
    num_cut: How many requests lost the beginning of their context, since they
      were too long.
  """

  def __init__(
    self,
    scorer: Scorer,
    tokenizer: Tokenizer,
    generate: Callable[
      [Sequence[requests.Request]], Sequence[requests.Completion]
    ],
  ) -> None:
    """Takes what answers.

    Args:
      scorer: The model, which judges tokens.
      tokenizer: Its tokenizer.
      generate: The same model, which continues prompts in a context at least
        as long as the scorer's.
    """
    self.context, self.num_cut = scorer.context, 0
    self._scorer, self._tokenizer = scorer, tokenizer
    self._generate = generate

  def loglikelihood(
    self, asked: Sequence[Request]
  ) -> list[tuple[float, bool]]:
    """Scores continuations of contexts.

    Args:
      asked: Their ``args`` are a context and a continuation.

    Returns:
      For each request the continuation's log-probability in nats, and whether
      each of its tokens is the greedy choice after those before it.
    """
    pairs = [self._pair(*request.args) for request in asked]
    room = self.context + 1
    self.num_cut += sum(
      len(context) > max(1, room - len(continuation))
      for context, continuation in pairs
    )
    return self._judge(pairs)

  def loglikelihood_rolling(self, asked: Sequence[Request]) -> list[float]:
    """Scores whole texts, each by itself.

    Each token is scored once, by the tokens before it in its window, and the
    first one of a text by the token that stands before a document.

    Args:
      asked: Their ``args`` are a text.

    Returns:
      The log-probability of each text in nats.
    """
    pairs = [
      ([self._prefix], self._encode(text))
      for (text,) in (request.args for request in asked)
    ]
    return [total for total, _ in self._judge(pairs)]

  def generate_until(self, asked: Sequence[Request]) -> list[str]:
    """Continues contexts until a string comes.

    A context that leaves no room for the tokens that may follow it loses its
    beginning.

    Args:
      asked: Their ``args`` are a context and a mapping that says how to go on:
        "until" (a string or several), "max_gen_toks", "do_sample",
        "temperature", and the names of filters. Any of them may be missing.

    Returns:
      The text that follows each context, without what ended it.

    Raises:
      ValueError: A request has a setting that there is not, or asks for so many
        tokens that there is no room for any context.
    """
    found = self._generate([
      self._continued(*request.args, seed)
      for seed, request in enumerate(asked)
    ])
    return [completion.text for completion in found]

  def _continued(
    self, context: str, how: Mapping[str, Any], seed: int
  ) -> requests.Request:
    """Returns the request to continue a context."""
    given = {key: value for key, value in how.items() if value is not None}
    until = given.pop("until", [])
    named = [given.pop(name, None) for name in _NUM_TOKENS]
    max_tokens = next((int(n) for n in named if n is not None), _MAX_TOKENS)
    samples = given.pop("do_sample", None)
    temperature = float(given.pop("temperature", 1.0 if samples else 0.0))
    filters = {
      name: given.pop(name) for name in FILTERS if name in given
    }
    if given.pop("num_beams", 1) != 1 or given:
      raise ValueError(
        f"a task asks to generate with {dict(how)}: beams, and other settings "
        "than until, max_gen_toks, do_sample, temperature, "
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

  def _judge(
    self, pairs: Sequence[tuple[list[int], list[int]]]
  ) -> list[tuple[float, bool]]:
    """Scores continuations of contexts, both in tokens."""
    windows = [list(_windows(*pair, self.context)) for pair in pairs]
    flat = [window for several in windows for window in several]
    with _progress("scoring", len(flat)) as advance:
      scores = iter(
        self._scorer.score([window.tokens for window in flat], advance)
      )
    answers = []
    for several in windows:
      total, greedy = 0.0, True
      for window in several:
        judged = next(scores)
        last = slice(len(window.tokens) - 1 - window.num_targets, None)
        total += float(judged.log_probabilities[last].sum(dtype=np.float64))
        greedy &= bool(judged.greedy[last].all())
      answers.append((total, greedy))
    return answers

  def _pair(
    self, context: str, continuation: str
  ) -> tuple[list[int], list[int]]:
    """Returns the tokens of a context and of what continues it.

    Both are encoded together, since a tokenizer may join characters across the
    border. Spaces at the context's end belong to the continuation, with whose
    first word a tokenizer may join them.
    """
    both = self._encode(context + continuation)
    split = len(self._encode(context.rstrip()))
    if context:
      before = [*self._tokenizer.start_ids, *both[:split]]
      return before or [self._prefix], both[split:]
    if both[:1] == [self._prefix]:  # the text has it itself
      return both[:1], both[1:]
    return [self._prefix], both

  def _encode(self, text: str) -> list[int]:
    return [int(token) for token in self._tokenizer.encode(text)]

  @property
  def _prefix(self) -> int:
    """The token by which the first one of a text is scored."""
    t = self._tokenizer
    separators = () if t.separator is None else (t.separator,)
    for token in (*t.start_ids[-1:], *separators, *t.stop_ids):
      return token
    raise ValueError(
      "the tokenizer has no token that stands before a text: none that opens "
      "a prompt, separates documents or ends a text"
    )


def _windows(
  context: Sequence[int], continuation: Sequence[int], limit: int
) -> Iterator[Window]:
  """Cuts tokens into windows in which each token of a continuation is scored.

  A continuation that the model can read is in one window, with as much of its
  context as fits. A longer one fills a window first, with one token before it,
  and then each next window; the last has as many tokens before its targets as
  fit.

  Args:
    context: At least one token.
    continuation: The tokens that are scored.
    limit: How many tokens the model reads at most.
  """
  tokens = [*context, *continuation]
  stop = len(context)
  while stop < len(tokens):
    count = min(len(tokens) - stop, limit)
    stop += count
    yield Window(tokens[max(0, stop - limit - 1) : stop], count)


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Any]:
  """Shows a bar on a terminal; gives a function that advances it."""
  console = Console(stderr=True)
  with Progress(
    console=console, transient=True, disable=not console.is_terminal
  ) as bar:
    task = bar.add_task(what, total=total)
    yield lambda count: bar.advance(task, count)
