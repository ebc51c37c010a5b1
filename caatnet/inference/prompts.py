"""Prompts from the command line, a file, or standard input."""

from collections.abc import Sequence
import pathlib
import sys
from typing import Annotated

from parallel.base import schema

# Path that denotes standard input.
STDIN = "-"


class _Prompt(schema.OpenSchema):
  prompt: Annotated[str, schema.Field(min_length=1)]


def read(prompts: Sequence[str], path: str | None) -> list[str]:
  """Returns the prompts of ``--prompt`` and of ``--prompt_file``, in order.

  Args:
    prompts: Prompts; "-" is all of standard input as one prompt.
    path: A .jsonl file whose lines are objects with the key "prompt", or a text
      file with one prompt per line, where empty lines are ignored; "-" is such
      text on standard input.

  Raises:
    FileNotFoundError: The file does not exist.
    ValueError: There is no prompt, a prompt is empty, or a line is invalid; the
      message names the line.
  """
  if [*prompts, path].count(STDIN) > 1:
    raise ValueError("only one of --prompt and --prompt_file can read '-'")
  found = [sys.stdin.read() if p == STDIN else p for p in prompts]
  if "" in found:
    raise ValueError(
      f"--prompt number {found.index('') + 1} is empty; give it at least one "
      "character"
    )
  if path is not None:
    lines = _read_prompt_file(path)
    if not lines:
      raise ValueError(f"--prompt_file={path} must have at least one prompt")
    found += lines
  if not found:
    raise ValueError("--prompt=TEXT or --prompt_file=PATH is required (--help)")
  for number, text in enumerate(found, 1):
    try:
      text.encode()
    except UnicodeEncodeError as error:
      raise ValueError(f"prompt {number} is not UTF-8 text: {error}") from error
  return found


def _read_prompt_file(path: str) -> list[str]:
  """Returns the prompts of a file."""
  try:
    text = (
      sys.stdin.read() if path == STDIN
      else pathlib.Path(path).read_text(encoding="utf-8")
    )
  except FileNotFoundError as error:
    raise FileNotFoundError(f"--prompt_file={path}: no such file") from error
  except UnicodeDecodeError as error:
    raise ValueError(f"--prompt_file={path} is not UTF-8 text") from error
  except OSError as error:
    raise ValueError(
      f"--prompt_file={path} cannot be read: {error.strerror}"
    ) from error
  lines = text.split("\n")
  if not path.endswith(".jsonl"):
    return [line for line in lines if line.strip()]
  return [
    _prompt(line, f"--prompt_file={path}, line {number}")
    for number, line in enumerate(lines, 1) if line.strip()
  ]


def _prompt(line: str, where: str) -> str:
  """Returns the prompt of one JSON line."""
  try:
    return schema.parse(_Prompt, line).prompt
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from error
