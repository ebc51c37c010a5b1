"""Shows what a model writes: as it comes, or each text under its prompt."""

import json
import sys
from typing import Any

from rich.console import Console
from rich.progress import (
  BarColumn,
  MofNCompleteColumn,
  Progress,
  TextColumn,
  TimeRemainingColumn,
)
from rich.text import Text

from caatnet.data.tokenizers import Tokenizer
from caatnet.inference.requests import Completion
from caatnet.show.tables import table

# A terminal would obey what a model writes, such as an escape sequence.
_CONTROLS = {
  code: "\N{REPLACEMENT CHARACTER}"
  for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}


def write(text: str) -> None:
  """Writes a piece of text to stdout at once.

  What a terminal would obey is replaced there, and left as it is in a file.
  """
  sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
  sys.stdout.flush()


def bar(num_prompts: int) -> Progress:
  """Returns a bar on stderr whose only task counts prompts.

  It is shown on a terminal, and not for one prompt alone.
  """
  made = Progress(
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeRemainingColumn(),
    console=Console(stderr=True),
    disable=num_prompts == 1 or not sys.stderr.isatty(),
    transient=True,
  )
  made.add_task("prompts", total=num_prompts)
  return made


def print_under_prompt(number: int, prompt: str, text: str) -> None:
  """Prints a prompt in one line, and under it what followed."""
  heading = Text(f"{number}: {prompt!r}", style="bold")
  Console(soft_wrap=True).print(heading)
  write(text + "\n\n")


def print_logprobs(completion: Completion, tokenizer: Tokenizer) -> None:
  """Prints each token with its text and its log-probability."""
  table(
    "log-probabilities in nats, at temperature 1 without filters",
    ("text", "token", "log-probability"),
    [
      [repr(tokenizer.decode([token])), str(token), f"{logprob:.4f}"]
      for token, logprob in zip(
        completion.tokens, completion.logprobs, strict=True
      )
    ],
  )


def completion_line(
  prompt: str, completion: Completion, logprobs: bool
) -> str:
  """Returns a completion as one line of JSON.

  Args:
    prompt: Its prompt.
    completion: The completion.
    logprobs: Whether to list the log-probabilities.
  """
  facts: dict[str, Any] = {
    "prompt": prompt,
    "text": completion.text,
    "reason": completion.reason,
    "tokens": completion.tokens,
  }
  if logprobs:
    facts["logprobs"] = completion.logprobs
  return json.dumps(facts, ensure_ascii=False)
