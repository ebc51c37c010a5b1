"""Requests of a trace, as a client sends them."""

from collections.abc import Mapping, Sequence
from typing import Any

from caatnet.serving import traces
from caatnet.serving.server.client import Question


def of_arrivals(
  arrivals: Sequence[traces.Arrival], card: Mapping[str, Any]
) -> list[Question]:
  """Returns the requests that a model can take.

  A turn of a conversation comes after the answer to the turn before it, and
  its prompt begins with that turn and a made-up answer of the same length.

  Args:
    arrivals: The trace.
    card: The server's model: ``id``, ``max_model_len`` and ``vocab_size``.

  Raises:
    ValueError: No request fits.
  """
  context, found = card["max_model_len"], list[Question]()
  turns: dict[Any, int] = {}
  for arrival in arrivals:
    if arrival.prompt + arrival.output > context:
      continue
    tokens = traces.tokens(arrival, card["vocab_size"])[: arrival.prompt]
    body = {
      "model": card["id"], "prompt": tokens.tolist(),
      "max_tokens": arrival.output, "temperature": 0, "ignore_eos": True,
    }
    if arrival.think_s is not None and arrival.conversation in turns:
      found.append(Question(
        0.0, body, turns[arrival.conversation], arrival.think_s
      ))
    else:
      found.append(Question(arrival.time_s, body))
    if arrival.conversation is not None:
      turns[arrival.conversation] = len(found) - 1
  if not found:
    raise ValueError(
      f"none of {len(arrivals)} requests fits into the server's context of "
      f"{context} tokens"
    )
  return found
