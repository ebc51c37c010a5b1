"""Terminal output of generated text: streamed, or each text with its prompt."""

from collections.abc import Sequence
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
from caatnet.serving.generate import Speed
from caatnet.show.tables import print_table
from parallel.base import files

# Control characters in generated text, such as escape sequences, would be
# executed by a terminal.
_CONTROLS = {
  code: "\N{REPLACEMENT CHARACTER}"
  for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}


class Screen:
  """Streams the text of a single prompt, or shows progress of several prompts.

  A context manager that is active during generation.
  """

  def __init__(
    self,
    prompts: Sequence[str],
    tokenizer: Tokenizer,
    as_json: bool,
    logprobs: bool,
  ) -> None:
    """Prepares the output.

    Args:
      prompts: The prompts.
      tokenizer: Decodes single tokens, for log-probabilities.
      as_json: Whether each completion is printed as one line of JSON at the
        end.
      logprobs: Whether to print log-probabilities.
    """
    self._prompts, self._tokenizer = prompts, tokenizer
    self._as_json, self._logprobs = as_json, logprobs
    self._streams = len(prompts) == 1 and not as_json
    # Disabled when stderr is not a terminal.
    self._bar = Progress(
      TextColumn("{task.description}"),
      BarColumn(),
      MofNCompleteColumn(),
      TimeRemainingColumn(),
      console=Console(stderr=True),
      disable=self._streams or not sys.stderr.isatty(),
      transient=True,
    )
    self._task = self._bar.add_task("prompts", total=len(prompts))

  def __enter__(self) -> "Screen":
    self._bar.start()
    return self

  def __exit__(self, *error: object) -> None:
    self._bar.stop()

  def on_text(self, index: int, text: str) -> None:
    """Streams new text to stdout if there is a single prompt."""
    if self._streams:
      _write(text)

  def on_end(self, index: int) -> None:
    """Advances the progress bar when a prompt's text has ended."""
    self._bar.advance(self._task)

  def show(self, completions: Sequence[Completion]) -> None:
    """Prints the completions, except for text that has been streamed."""
    numbered = enumerate(zip(self._prompts, completions, strict=True), 1)
    for number, (prompt, completion) in numbered:
      if self._as_json:
        print(_line(prompt, completion, self._logprobs))
        continue
      if self._streams:
        _write("\n")
      else:
        # Text, so that markup in a prompt is not interpreted.
        heading = Text(f"{number}: {prompt!r}", style="bold")
        Console(soft_wrap=True).print(heading)
        _write(completion.text + "\n\n")
      if self._logprobs:
        _print_logprobs(completion, self._tokenizer)
    left = sum(c.reason == "interrupted" for c in completions)
    if left:
      print(
        f"interrupted: {len(completions) - left} of {len(completions)} prompts "
        "were finished", file=sys.stderr,
      )


def print_speed(speed: Speed, num_programs: int, seconds: float) -> None:
  """Prints tokens per second of prefill and of decoding on stderr.

  Args:
    speed: Tokens and seconds of the generation.
    num_programs: Number of compiled programs.
    seconds: Seconds of compilation, which ``speed`` does not include.
  """
  parts = [
    f"{what} {tokens:,} tokens, {tokens / took:,.0f} tokens/s"
    for what, tokens, took in (
      ("prefill", speed.prompt_tokens, speed.prompt_seconds),
      ("decode", speed.decoded_tokens, speed.decode_seconds),
    ) if tokens
  ]
  programs = "program" if num_programs == 1 else "programs"
  parts.append(f"{num_programs} {programs} compiled in {seconds:.1f} s")
  print("; ".join(parts), file=sys.stderr)


def _write(text: str) -> None:
  """Writes a piece of text to stdout, and flushes.

  On a terminal, control characters are replaced; in a file the text is
  unchanged.
  """
  sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
  sys.stdout.flush()


def _line(prompt: str, completion: Completion, logprobs: bool) -> str:
  """Returns a completion as one line of JSON."""
  facts: dict[str, Any] = {
    "prompt": prompt,
    "text": completion.text,
    "reason": completion.reason,
    "tokens": completion.tokens,
  }
  if logprobs:
    facts["logprobs"] = completion.logprobs
  return files.to_json(facts)


def _print_logprobs(completion: Completion, tokenizer: Tokenizer) -> None:
  """Prints a table of tokens with their text and log-probability."""
  print_table(
    "log-probabilities in nats, at temperature 1 without filters",
    ("text", "token", "log-probability"),
    [
      [repr(tokenizer.decode([token])), str(token), f"{logprob:.4f}"]
      for token, logprob in zip(
        completion.tokens, completion.logprobs, strict=True
      )
    ],
  )
