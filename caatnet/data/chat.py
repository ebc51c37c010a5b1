"""Prompts of conversations by the chat template of a tokenizer.

A template is a jinja2 program that comes with a checkpoint. Since it is
untrusted, it runs in jinja2's sandbox.
"""

from collections.abc import Mapping, Sequence
import datetime
import json
from typing import Any, NoReturn


def render_prompt(
  template: str,
  messages: Sequence[Mapping[str, Any]],
  tokens: Mapping[str, str],
  options: Mapping[str, Any] | None = None,
) -> str:
  """Renders a conversation as the prompt for the assistant's next message.

  Args:
    template: The template, with the variables of Hugging Face transformers.
    messages: The messages, each with a "role" and a "content".
    tokens: The text of special tokens by names such as "bos_token".
    options: Further variables of the template, such as Qwen3's
      ``enable_thinking``.

  Raises:
    ValueError: If jinja2 is missing, the template is damaged or rejects the
      messages, or an option has the name of another variable.
  """
  try:
    from jinja2 import sandbox

    from caatnet.data import chat_tags
  except ImportError as error:
    raise ValueError(
      'chat templates need jinja2: pip install "caatnet[chat]"'
    ) from error
  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=["jinja2.ext.loopcontrols", chat_tags.Generation],
  )
  # jinja2's default filter would escape "<" and ">" for HTML.
  environment.filters["tojson"] = _json
  environment.globals["raise_exception"] = _refuse
  environment.globals["strftime_now"] = _now
  variables = {
    "messages": messages, "tools": None, "documents": None,
    "add_generation_prompt": True, **tokens,
  }
  if taken := sorted(variables.keys() & (options or {}).keys()):
    raise ValueError(f"{taken[0]} is not an option of a chat template")
  try:
    return environment.from_string(template).render(
      **variables, **(options or {})
    )
  except Exception as error:  # of any type: a template is a program
    raise ValueError(f"the chat template fails: {error}") from error


def _json(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  return json.dumps(
    value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
    sort_keys=sort_keys,
  )


def _now(form: str) -> str:
  return datetime.datetime.now().strftime(form)


def _refuse(message: str) -> NoReturn:
  raise ValueError(message)
