"""Answers what EleutherAI's lm-evaluation-harness asks of a model.

The harness makes requests of its tasks' documents and computes metrics from the
answers. What a request means here is what it means to its models of Hugging
Face (``lm_eval.models.huggingface``, 0.4.13): where a context ends and its
continuation begins in tokens, what is cut where both are longer than the
model's context, and which windows a long text is scored in. In two places these
models end in an error, where an answer is plain: nothing as a continuation is
certain, and a continuation longer than the model's context is scored in
windows, as a text of its own is.

`Answers` needs no harness. `evaluate` does, the extra ``eval``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import difflib
import importlib.util
import logging
import os
import sys
from typing import Any, NamedTuple, Protocol

import numpy as np
from rich.console import Console
from rich.progress import Progress

from caatnet.data.tokenizers import Tokenizer
from caatnet.inference import requests
from caatnet.inference.scoring import Scorer
from caatnet.inference.stops import Stops

# By what names tasks say how many tokens may follow, the strongest first, and
# the number if they do not.
_NUM_TOKENS = (
  "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens",
)
_MAX_TOKENS = 256
# Resamples for the standard error of a metric that has no formula for it.
_RESAMPLES = 1000


class Request(Protocol):
  """A request, such as ``lm_eval.api.instance.Instance``.

  Attributes:
    args: The strings that `Answers`' methods say.
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
    context: By how many tokens one can be scored.
    num_cut: How many contexts lost their beginning, since they were too long.
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
      generate: The same model, which continues prompts, in a context at least
        as long.
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

    Each token is scored once, with as many tokens before it as its window has;
    the first one by the token that stands before a document.

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

    What is cut of a context that leaves no room for as many tokens as may
    follow is its beginning.

    Args:
      asked: Their ``args`` are a context and how to go on: "until" (one string
        or several), "max_gen_toks", "do_sample", "temperature", "top_k",
        "top_p", "min_p", all of which may be missing.

    Returns:
      The text that follows each context, without what ended it.

    Raises:
      ValueError: A request asks for what there is not, or leaves no room for
        its context.
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
    given = dict(how)
    until = given.pop("until", [])
    named = [given.pop(name, None) for name in _NUM_TOKENS]
    max_tokens = next((int(n) for n in named if n is not None), _MAX_TOKENS)
    samples = given.pop("do_sample", None)
    temperature = float(given.pop("temperature", 1.0 if samples else 0.0))
    filters = {
      name: given.pop(name) for name in ("top_k", "top_p", "min_p")
      if given.get(name) is not None
    }
    if given.pop("num_beams", 1) != 1 or given:
      raise ValueError(
        f"a task asks to generate with {dict(how)}: beams, and other settings "
        f"than until, max_gen_toks, do_sample, temperature, top_k, top_p and "
        "min_p, are not supported"
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
    limit: The model's context, by how many tokens one can be scored.
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


class TaskMetric(NamedTuple):
  """A number that the harness computed.

  Attributes:
    task: The task or group of tasks.
    version: The task's version.
    num_shots: Examples before each document.
    num_documents: Documents that were evaluated.
    metric: The metric's name.
    filter: What the harness did with answers before it judged them.
    value: The number.
    stderr: Its standard error; None where the harness gives none.
  """

  task: str
  version: str
  num_shots: int
  num_documents: int
  metric: str
  filter: str
  value: float
  stderr: float | None


def check_installed() -> None:
  """Checks that the harness is there, without the seconds that it takes.

  Raises:
    ValueError: It is not; the message says how to install it.
  """
  if importlib.util.find_spec("lm_eval") is None:
    raise ValueError(
      '--tasks needs lm-evaluation-harness: pip install "caatnet[eval]"'
    )


def evaluate(
  answers: Answers, tasks: Sequence[str], limit: float | None = None
) -> dict[str, Any]:
  """Runs tasks of the harness.

  Args:
    answers: Answers the tasks' requests.
    tasks: Names that the harness knows, or paths of .yaml files. Where all are
      paths, such files cannot name tasks of the harness' own: to find these it
      reads 14,000 files.
    limit: How many documents of each task are read; a share of them below 1;
      None for all.

  Returns:
    Plain data: "context", the length of the model's; "num_cut", how many
    requests lost the beginning of their context; "metrics", the fields of each
    `TaskMetric`.

  Raises:
    FileNotFoundError: A .yaml file is missing.
    ValueError: The harness is not installed or has no such task, or the limit
      leaves no document.
  """
  check_installed()
  if limit is not None and not limit > 0:
    raise ValueError(f"--limit={limit} must be above 0")
  with contextlib.redirect_stdout(sys.stderr):  # it prints as it goes
    import lm_eval
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Answering(LM):
      """The class that the harness expects, with our methods."""

      loglikelihood = staticmethod(answers.loglikelihood)
      loglikelihood_rolling = staticmethod(answers.loglikelihood_rolling)
      generate_until = staticmethod(answers.generate_until)

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    paths = all(task.endswith(".yaml") for task in tasks)
    manager = TaskManager(include_defaults=not paths)
    _check_tasks(tasks, manager.all_tasks)
    # It would fork for resamples, and jax has threads.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    results = lm_eval.simple_evaluate(
      Answering(), tasks=list(tasks), limit=limit, task_manager=manager,
      log_samples=False, bootstrap_iters=_RESAMPLES,
    )
  return {
    "context": answers.context,
    "num_cut": answers.num_cut,
    "metrics": [metric._asdict() for metric in _metrics(results)],
  }


def _check_tasks(tasks: Sequence[str], known: Sequence[str]) -> None:
  """Refuses tasks that are neither files nor known to the harness."""
  for task in tasks:
    if task in known or (task.endswith(".yaml") and os.path.isfile(task)):
      continue
    if task.endswith(".yaml"):
      raise FileNotFoundError(f"--tasks={task}: no such file")
    near = difflib.get_close_matches(task, known, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"--tasks={task}: lm-evaluation-harness has none{hint}")


def _metrics(results: Mapping[str, Any]) -> Iterator[TaskMetric]:
  """Reads the metrics out of what the harness returns."""
  found = results["results"] | results.get("groups", {})
  for task, values in found.items():
    for key, value in values.items():
      metric, comma, kind = key.partition(",")
      if not comma or metric.endswith("_stderr"):
        continue  # other facts of the task
      stderr = values.get(f"{metric}_stderr,{kind}")
      yield TaskMetric(
        task=task,
        version=str(results["versions"].get(task, "")),
        num_shots=results["n-shot"].get(task, 0),
        num_documents=results["n-samples"].get(task, {}).get("effective", 0),
        metric=metric,
        filter=kind,
        value=value,
        stderr=stderr if isinstance(stderr, float) else None,
      )
