"""Queues of a federated server: few clients receive or send at a time.

A queue lists clients in the order of their transfers. The transfers of the
first ones, as many as the limit, are in progress. A limit of 0 allows all
transfers at once, without a queue.
"""

import dataclasses
from typing import Any

from caatnet.federated.events import Resend, Train
from caatnet.federated.state import Rules, ServerState, replace_member


def enqueue(
  state: ServerState, client: int, rules: Rules, effects: list[Any], up: bool
) -> ServerState:
  """Begins a client's download or upload, or appends it to the queue.

  Args:
    state: State in which ``Member.working`` of the client is set.
    client: Id of the client.
    rules: Constants of the run.
    effects: List to which the effect that starts the transfer is appended.
    up: Whether it is an upload.
  """
  limit = rules.uplinks_at_once if up else rules.downlinks_at_once
  if not limit:
    return _transfer(state, client, effects, up)
  name = "uplinks" if up else "downlinks"
  queue = (*getattr(state, name), client)
  state = dataclasses.replace(state, **{name: queue})
  return (
    _transfer(state, client, effects, up) if len(queue) <= limit else state
  )


def dequeue(
  state: ServerState, client: int, rules: Rules, effects: list[Any], up: bool
) -> ServerState:
  """Ends a client's transfer, if it has one, and starts the next client's.

  Args:
    state, client, rules, effects, up: Arguments of `enqueue`.
  """
  limit = rules.uplinks_at_once if up else rules.downlinks_at_once
  name = "uplinks" if up else "downlinks"
  queue = getattr(state, name)
  if client not in queue:
    return state
  place = queue.index(client)
  queue = queue[:place] + queue[place + 1:]
  state = dataclasses.replace(state, **{name: queue})
  if place < limit <= len(queue):
    return _transfer(state, queue[limit - 1], effects, up)
  return state


def _transfer(
  state: ServerState, client: int, effects: list[Any], up: bool
) -> ServerState:
  """Sends a client its model, or asks for its update."""
  member = state.members[client]
  if up:
    effects.append(Resend(client, member.retained))
    return state
  effects.append(Train(client, state.round, state.revision, member.revision))
  # Messages of a connection arrive in order; after a new one, `Hello` has the
  # revision that the client holds.
  return replace_member(state, client, revision=state.revision)


def drop_waiting_models(state: ServerState, rules: Rules) -> ServerState:
  """Returns the state at the start of a round, in which no model waits.

  If late updates are merged, downloads in progress and uploads continue.
  Otherwise both queues are emptied. A client may then still receive the model
  of the last round, in addition to the allowed number: a queue does not record
  the rounds of its models.
  """
  if rules.stragglers != "late":
    return dataclasses.replace(state, downlinks=(), uplinks=())
  limit = rules.downlinks_at_once
  for client in state.downlinks[limit:]:
    state = replace_member(state, client, working=-1)
  return dataclasses.replace(state, downlinks=state.downlinks[:limit])
