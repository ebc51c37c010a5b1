"""Prompts of conversations by the chat template of a tokenizer.

A template is a jinja2 program that comes with a checkpoint. Since it is
untrusted, it runs in jinja2's sandbox.
"""

from collections.abc import Mapping, Sequence
import datetime
import json
from typing import Any, NoReturn


def written(
  template: str,
  messages: Sequence[Mapping[str, Any]],
  tokens: Mapping[str, str],
) -> str:
  """Renders a conversation as the prompt for the assistant's next message.

  Args:
    template: The template, with the variables of Hugging Face transformers.
    messages: The messages, each with a "role" and a "content".
    tokens: The text of special tokens by names such as "bos_token".

  Raises:
    ValueError: If jinja2 is missing, or the template is damaged or rejects the
      messages.
  """
  try:
    import jinja2
    from jinja2 import sandbox
  except ImportError as error:
    raise ValueError(
      'chat templates need jinja2: pip install "caatnet[chat]"'
    ) from error
  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=["jinja2.ext.loopcontrols"],
  )
  # jinja2's default filter would escape "<" and ">" for HTML.
  environment.filters["tojson"] = _json
  environment.globals["raise_exception"] = _refuse
  environment.globals["strftime_now"] = _now
  try:
    return environment.from_string(template).render(
      messages=messages, add_generation_prompt=True, **tokens
    )
  except (jinja2.TemplateError, TypeError, ValueError) as error:
    raise ValueError(f"the chat template fails: {error}") from error


def _json(value: Any, indent: int | None = None) -> str:
  return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(form: str) -> str:
  return datetime.datetime.now().strftime(form)


def _refuse(message: str) -> NoReturn:
  raise ValueError(message)
