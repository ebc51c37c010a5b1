"""Core of a federated server: ``(state, message, time) -> (state, effects)``.

`step` is a pure function without sockets and clocks. `service.py` runs it over
connections, `simulate.py` over simulated ones. All decisions are here: the
sampled clients, the end of a round, valid updates and how they are merged.

A *round* is one attempt to improve the model. A round with at least one valid
update makes the next *revision* of the model; a round without one leaves it
unchanged. The server holds two vectors: the parameters, and the *published*
ones, which all clients with a revision have. They differ only by the rounding
of downlinks: revision r is published as the coded difference between the
parameters and the published vector of revision r - 1, so that rounding errors
do not accumulate, and a client that has revision q receives the differences q +
1 to r.

A round ends when each sampled client has returned an update or is lost, or at
the time limit, `Rules.limit_s`. A client is lost if it has no connection for
`Rules.reconnect_s` seconds, has lost its connection five times in the round, or
reports a round that it cannot work on. An update that arrives later is dropped
or merged into the round in progress, by `Rules.stragglers`.

With `Rules.downlinks_at_once` or `Rules.uplinks_at_once`, few clients receive
or send at a time, and others wait in a queue: which model is sent next and
which update is asked for next are decisions of the server. Models are sent to
the client first that computed longest in its last round.

`Save` precedes the messages that depend on the saved state. After a crash,
`resume_state` waits for the clients and starts the saved round again: they
return retained updates or compute them again, which gives the same bits.
"""

import dataclasses
import math
from typing import Any, Protocol

import numpy as np

from caatnet.federated import sampling, transfers
from caatnet.federated.events import (
  Abandon,
  Disconnected,
  Hello,
  ModelReceived,
  PrintWarning,
  RefuseClient,
  RoundEnded,
  Save,
  Stop,
  Update,
  UpdateReady,
  UpdateRefused,
)
from caatnet.federated.state import (
  Contribution,
  Member,
  Rules,
  ServerState,
  put,
  replace_member,
)

_MAX_LOST = 5  # lost connections in a round, after which a client is lost
_MIN_LOSS = -1e-3  # 0 minus the rounding error of a cross-entropy
# sum of a round's coefficients; a warning is printed above it
_MAX_COEFFICIENT_SUM = 1.5


class Arithmetic(Protocol):
  """Computations on vectors; `arithmetic.py` implements them for real runs."""

  def init(self, params: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns the initial state of the server's optimizer."""
    ...

  def update(
    self, mean: np.ndarray, state: tuple[np.ndarray, ...], params: np.ndarray
  ) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Returns parameters ``[n]`` and optimizer state after a mean update."""
    ...

  def healthy(self, norms: list[float]) -> list[bool]:
    """Returns for each norm (or loss) whether it is not an outlier."""
    ...

  def publish(self, difference: np.ndarray) -> tuple[bytes, np.ndarray] | None:
    """Returns (coded difference, its decoded value); None without a codec."""
    ...


def initial_state(params: np.ndarray, arithmetic: Arithmetic) -> ServerState:
  """Returns the state before the first client connects.

  Args:
    params: Initial parameters, float32 ``[n]``.
    arithmetic: Computations on vectors.
  """
  return ServerState(params, params, arithmetic.init(params))


def resume_state(state: ServerState, time: float, rules: Rules) -> ServerState:
  """Returns a saved state after a restart: no client is connected.

  A run whose rounds have all ended continues if the rules allow more rounds.
  """
  continues = state.round < rules.rounds and not _is_stale(state, rules)
  members = {
    k: dataclasses.replace(m, connected=False, since=time, working=-1)
    for k, m in state.members.items()
  }
  return dataclasses.replace(
    state, members=members, started=None, downlinks=(), uplinks=(),
    finished="" if continues else state.finished,
  )


def step(
  state: ServerState, message: Any, time: float, rules: Rules,
  arithmetic: Arithmetic,
) -> tuple[ServerState, list[Any]]:
  """Processes a message.

  Args:
    state: The state.
    message: `Hello`, `ModelReceived`, `UpdateReady`, `Update`, `Disconnected`
      or `Tick`; see `events.py`.
    time: Current time in seconds, of any monotonic clock.
    rules: Constants of the run.
    arithmetic: Computations on vectors.

  Returns:
    The next state, and effects to execute in order.
  """
  effects: list[Any] = []
  match message:
    case Hello():
      state = _hello(state, message, time, rules, effects)
    case ModelReceived(client=client, round=round) if (
      client in state.members and state.members[client].working == round
    ):
      state = transfers.dequeue(state, client, rules, effects, up=False)
    case UpdateReady() if message.client in state.members:
      state = _ready(state, message, rules, effects)
    case Update():
      state = _update(state, message, rules, effects)
    case Disconnected() if message.client in state.members:
      state = _gone(state, message.client, time, rules, effects)
  if state.finished:
    return state, effects
  if state.started is None:
    if time >= _earliest_start_s(state, rules):
      state = _begin_round(state, time, rules, effects)
  elif _is_round_complete(state, time, rules):
    state = _end_round(state, time, rules, arithmetic, effects)
  return state, effects


def downlink_payload(state: ServerState, base: int) -> tuple[
  bool, tuple[bytes, ...]
]:
  """Returns the bytes by which a client obtains the newest revision.

  Args:
    state: The state.
    base: Revision that the client holds; -1 for none.

  Returns:
    (True, coded differences to add in order), or (False, one item: the
    published parameters as float32 bytes).
  """
  behind = state.revision - base
  if base >= 0 and behind <= len(state.differences):
    return True, state.differences[len(state.differences) - behind:]
  return False, (state.published.tobytes(),)


def wake_s(state: ServerState, rules: Rules) -> float | None:
  """Returns the time at which `step` needs a `Tick`; None if it needs none."""
  if state.finished:
    return None
  if state.started is None:
    ready_s = _earliest_start_s(state, rules)
    return ready_s if math.isfinite(ready_s) else None
  lost = [
    state.members[k].since + rules.reconnect_s for k in _missing_clients(state)
    if not state.members[k].connected
  ]
  times = [max(lost)] if len(lost) == len(_missing_clients(state)) > 0 else []
  times.append(state.started + rules.limit_s)
  return min(times) if math.isfinite(min(times)) else None


def describe_wait(state: ServerState, rules: Rules) -> str:
  """Returns a description of what the server waits for."""
  if state.finished:
    return state.finished
  if state.started is None:
    there = [k for k, m in state.members.items() if m.connected]
    missing = [k for k in range(rules.clients) if k not in there]
    return (
      f"waits for clients {_format_clients(missing)} to connect: {len(there)} "
      "of "
      f"{rules.clients} there"
    )
  left = _missing_clients(state)
  away = [k for k in left if not state.members[k].connected]
  text = (
    f"round {state.round}: waits for updates of clients {_format_clients(left)}"
    if left else f"round {state.round}: all updates are there"
  )
  if away:
    text += f"; without a connection: {_format_clients(away)}"
  if math.isfinite(rules.limit_s):
    text += f"; the deadline is {rules.limit_s:g} s"
  return text


def _hello(
  state: ServerState, hello: Hello, time: float, rules: Rules,
  effects: list[Any],
) -> ServerState:
  """Registers a client, and continues its part of the round.

  As all handlers here, it returns the next state and appends to ``effects``.
  """
  reason = ""
  if not 0 <= hello.client < rules.clients:
    reason = f"client {hello.client}: ids are 0 to {rules.clients - 1}"
  elif hello.digest != rules.digest:
    reason = (
      f"client {hello.client} has another model: digest {hello.digest or '-'}, "
      f"the server's is {rules.digest}"
    )
  elif hello.revision > state.revision:
    reason = (
      f"client {hello.client} has revision {hello.revision}, but the newest "
      f"one is {state.revision}: it belongs to another run"
    )
  elif hello.examples > rules.max_examples:
    reason = (
      f"client {hello.client} reports {hello.examples:,} examples, but may "
      f"have at most max_examples={rules.max_examples:,}: raise this key if "
      "the number is right"
    )
  if reason:
    effects.append(RefuseClient(hello.client, reason))
    return state
  before = state.members.get(hello.client, Member(hello.examples))
  if before.examples != hello.examples:
    effects.append(RefuseClient(
      hello.client,
      f"client {hello.client} has {hello.examples} examples, before it had "
      f"{before.examples}",
    ))
    return state
  is_new = hello.client not in state.members
  state = put(state, hello.client, dataclasses.replace(
    before, connected=True, since=time, revision=hello.revision,
    retained=hello.retained, working=-1,
  ))
  if is_new and len(state.members) == rules.clients:
    _warn_of_majority(_client_weights(state, rules), effects)
  if state.finished:
    effects.append(RefuseClient(hello.client, state.finished))
    return state
  return _start_transfer_if_due(state, hello.client, rules, effects)


def _start_transfer_if_due(
  state: ServerState, client: int, rules: Rules, effects: list[Any]
) -> ServerState:
  """Returns the state after sending a model or requesting an update, if due."""
  member = state.members[client]
  if not member.connected or member.working >= 0 or state.started is None:
    return state
  late = rules.stragglers == "late" and client in state.history.get(
    member.retained, ()
  )
  now = client in state.sampled and member.done < state.round
  if member.retained > member.done and (
    late or (now and member.retained == state.round)
  ):
    state = replace_member(state, client, working=member.retained)
    return transfers.enqueue(state, client, rules, effects, up=True)
  if now:
    state = replace_member(state, client, working=state.round)
    return transfers.enqueue(state, client, rules, effects, up=False)
  return state


def _ready(
  state: ServerState, ready: UpdateReady, rules: Rules, effects: list[Any]
) -> ServerState:
  """Returns the state after requesting an update, at once or in a queue."""
  if state.started is None:
    return state  # the next round asks for it
  if _cannot_work_on(state, ready, rules):
    return _refuse_wrong_round(state, ready, rules, effects)
  if ready.client in state.uplinks or (
    ready.round != state.members[ready.client].working
  ):
    return state  # already in the queue, or the round needs no update any more
  state = transfers.dequeue(state, ready.client, rules, effects, up=False)
  state = replace_member(state, ready.client, retained=ready.round)
  return transfers.enqueue(state, ready.client, rules, effects, up=True)


def _update(
  state: ServerState, update: Update, rules: Rules, effects: list[Any]
) -> ServerState:
  """Returns the state with an update added to the round's, or refused."""
  member = state.members.get(update.client)
  if member is None:
    return _refuse(state, update, "not registered", effects)
  if state.started is None:
    state = replace_member(state, update.client, retained=update.round)
    return _refuse(state, update, "between rounds", effects)
  if update.revision > state.revision or _cannot_work_on(state, update, rules):
    return _refuse_wrong_round(state, update, rules, effects)
  if member.done >= update.round:
    return _refuse(state, update, "a duplicate", effects)
  if member.working == update.round:
    for up in (False, True):
      state = transfers.dequeue(state, update.client, rules, effects, up)
  draws = state.history.get(update.round, ()).count(update.client)
  norm = _norm(update.delta)
  state = replace_member(
    state, update.client, done=update.round, retained=update.round,
    busy_s=update.busy_s,
    working=-1 if member.working == update.round else member.working,
  )
  if update.round < state.round and rules.stragglers != "late":
    state = _refuse(state, update, "late", effects)
  elif not draws:
    state = _refuse(state, update, "not sampled", effects)
  elif update.delta.shape != state.params.shape:
    state = _refuse(state, update, "of another size", effects)
  elif update.validated > rules.max_examples:
    state = _refuse(state, update, "of too many examples", effects)
  elif not math.isfinite(norm):
    state = _refuse(state, update, "not finite", effects)
  else:
    found = Contribution(update, draws, norm)
    state = dataclasses.replace(state, received=(*state.received, found))
  # A straggler starts the round in progress after its late update.
  return _start_transfer_if_due(state, update.client, rules, effects)


def _gone(
  state: ServerState, client: int, time: float, rules: Rules, effects: list[Any]
) -> ServerState:
  """Returns the state after a client has lost its connection.

  After `_MAX_LOST` lost connections in a round, gives up on its update.
  """
  member = state.members[client]
  missed = state.started is not None and client in _missing_clients(state)
  state = replace_member(
    state, client, connected=False, since=time, lost=member.lost + missed
  )
  if missed and member.lost + 1 >= _MAX_LOST:
    state = _refuse(
      state, UpdateReady(client, state.round), "interrupted too often", effects
    )
    return _give_up_on_update(state, client, rules, effects)
  return _stop_client_work(state, client, rules, effects)


def _stop_client_work(
  state: ServerState, client: int, rules: Rules, effects: list[Any]
) -> ServerState:
  """Returns the state without a client's transfers and its work in a round."""
  for up in (False, True):
    state = transfers.dequeue(state, client, rules, effects, up)
  return replace_member(state, client, working=-1)


def _give_up_on_update(
  state: ServerState, client: int, rules: Rules, effects: list[Any]
) -> ServerState:
  """Returns the state in which a client's work ends without an update."""
  state = _stop_client_work(state, client, rules, effects)
  return replace_member(state, client, done=state.round, left=state.round)


def _cannot_work_on(
  state: ServerState, answer: Update | UpdateReady, rules: Rules
) -> bool:
  """Returns whether a client reports a round that it cannot work on.

  With "wait" for `Rules.stragglers`, it can work on the round in progress, and
  on the newest round that has ended without its update.
  """
  left = state.members[answer.client].left
  return answer.round > state.round or (
    rules.stragglers == "wait" and answer.round not in (state.round, left)
  )


def _refuse_wrong_round(
  state: ServerState, answer: Update | UpdateReady, rules: Rules,
  effects: list[Any]
) -> ServerState:
  """Refuses a message that names a wrong round; its client counts as lost."""
  reason = "of the past" if answer.round < state.round else "of the future"
  state = _refuse(state, answer, reason, effects)
  if answer.client in _missing_clients(state):
    state = _give_up_on_update(state, answer.client, rules, effects)
  return state


def _begin_round(
  state: ServerState, time: float, rules: Rules, effects: list[Any]
) -> ServerState:
  """Returns the state after the start of round ``state.round``."""
  weights = _client_weights(state, rules)
  if not weights:
    return _finish(state, "no client has training examples", effects)
  if state.round >= rules.rounds:
    return _finish(state, f"{rules.rounds} rounds have ended", effects)
  drawn = sampling.sample(
    weights, rules.per_round, rules.sampling, rules.seed, state.round
  )
  # Keeps rounds for which a sampled client may still send a late update.
  history = {
    r: clients for r, clients in state.history.items()
    if any(state.members[k].done < r for k in clients)
  } if rules.stragglers == "late" else {}
  bases = {r: x for r, x in state.bases.items() if r in history} | {
    state.round: state.published
  } if rules.stragglers == "late" and rules.compensation else {}
  state = dataclasses.replace(
    state, history=history | {state.round: drawn}, bases=bases, started=time
  )
  effects.append(Save())
  state = transfers.drop_waiting_models(state, rules)
  order = sorted(drawn, key=lambda k: -state.members[k].busy_s)
  # Clients not sampled in this round may still owe a late update.
  for client in dict.fromkeys((*order, *state.members)):
    member = state.members[client]
    # Unless late updates are merged, clients abandon older rounds.
    working = member.working if rules.stragglers == "late" else -1
    if (member.working, member.lost) != (working, 0):
      state = replace_member(state, client, working=working, lost=0)
    state = _start_transfer_if_due(state, client, rules, effects)
  return state


def _earliest_start_s(state: ServerState, rules: Rules) -> float:
  """Returns the time from which a round may begin; infinity for unknown.

  At the start of a run, the server waits for all clients. After a restart, it
  waits for clients that have not reconnected for at most `Rules.reconnect_s`
  seconds after the last connection.
  """
  members = state.members.values()
  last = max((m.since for m in members if m.connected), default=math.inf)
  if len(members) < rules.clients:
    return math.inf
  return last + (0 if all(m.connected for m in members) else rules.reconnect_s)


def _missing_clients(state: ServerState) -> list[int]:
  """Returns the sampled clients whose update is missing, in order."""
  return [
    k for k in dict.fromkeys(state.sampled)
    if state.members[k].done < state.round
  ]


def _is_round_complete(state: ServerState, time: float, rules: Rules) -> bool:
  """Returns whether the round in progress ends now."""
  assert state.started is not None
  unanswered = _missing_clients(state)
  # Without any connection, a round waits, instead of ending without updates.
  if len(unanswered) == len(set(state.sampled)) and not any(
    m.connected for m in state.members.values()
  ):
    return False
  if time >= state.started + rules.limit_s:
    return True
  return all(
    not state.members[k].connected
    and time >= state.members[k].since + rules.reconnect_s
    for k in unanswered
  )


def _end_round(
  state: ServerState, time: float, rules: Rules, arithmetic: Arithmetic,
  effects: list[Any],
) -> ServerState:
  """Merges the updates of a round; returns the state in the next one."""
  missing = _missing_clients(state)
  # Ordered by sample, not by arrival, so that the sum has the same bits.
  order = {k: i for i, k in enumerate(dict.fromkeys(state.sampled))}
  received = sorted(state.received, key=lambda c: (
    c.update.round, order.get(c.update.client, c.update.client)
  ))
  healthy = arithmetic.healthy([c.norm for c in received])
  for contribution, valid in zip(received, healthy, strict=True):
    if not valid:
      state = _refuse(state, contribution.update, "an outlier", effects)
  kept = [c for c, valid in zip(received, healthy, strict=True) if valid]
  factors = sampling.coefficients(
    _client_weights(state, rules), rules.per_round, rules.sampling,
    [
      (c.update.client, c.draws, state.revision - c.update.revision)
      for c in kept
    ],
  )
  loss = _mean_loss([c.update for c in received], arithmetic, effects)
  if kept:
    state = _merge(state, kept, factors, rules, arithmetic)
  if sum(factors) > _MAX_COEFFICIENT_SUM:
    effects.append(PrintWarning(
      f"coefficients of round {state.round} sum to {sum(factors):.2f} instead "
      f"of 1: with sampling={rules.sampling!r} and unequal weights, training "
      'may diverge; choose "weighted" or "ratio"'
    ))
  effects.append(RoundEnded(
    state.round, state.revision, state.sampled,
    tuple(
      (c.update.client, c.update.round, f)
      for c, f in zip(kept, factors, strict=True)
    ),
    tuple(missing), state.refused, loss, time - (state.started or 0.0),
    bool(missing) and time >= (state.started or 0.0) + rules.limit_s,
  ))
  for client in missing:
    state = replace_member(state, client, left=state.round)
    if rules.stragglers != "late" and (
      state.members[client].working == state.round
    ):
      effects.append(Abandon(client, state.round))
      state = replace_member(state, client, working=-1)
  if not math.isnan(loss):
    better = loss < state.best - rules.min_gain
    state = dataclasses.replace(
      state, best=loss if better else state.best,
      stale=0 if better else state.stale + 1,
    )
  state = dataclasses.replace(
    state, round=state.round + 1, received=(), refused=(), started=None
  )
  if _is_stale(state, rules):
    return _finish(
      state, f"the validation loss has not decreased for {state.stale} rounds",
      effects,
    )
  return _begin_round(state, time, rules, effects)


def _is_stale(state: ServerState, rules: Rules) -> bool:
  """Returns whether the loss has not decreased for `Rules.patience` rounds."""
  return 0 < rules.patience <= state.stale


def _merge(
  state: ServerState, kept: list[Contribution], factors: list[float],
  rules: Rules, arithmetic: Arithmetic,
) -> ServerState:
  """Returns the state with the next revision of the model.

  The server's optimizer receives the sum of the updates ``kept``, each times
  its factor.
  """
  mean = np.zeros_like(state.params)
  for contribution, factor in zip(kept, factors, strict=True):
    update = contribution.update
    delta = update.delta
    if update.round in state.bases and update.revision < state.revision:
      delta = _compensate_delay(
        delta, state.published - state.bases[update.round], rules.compensation
      )
    mean += np.float32(factor) * delta
  params, optimizer = arithmetic.update(mean, state.optimizer, state.params)
  coded = arithmetic.publish(params - state.published)
  if coded is None:
    differences, published = (), params
  else:
    differences = (*state.differences, coded[0])
    # Differences with more bytes than the whole model are never sent.
    while sum(map(len, differences)) > params.nbytes:
      differences = differences[1:]
    published = state.published + coded[1]
  return dataclasses.replace(
    state, params=params, published=published, optimizer=optimizer,
    revision=state.revision + 1, differences=differences,
  )


def _compensate_delay(
  delta: np.ndarray, moved: np.ndarray, strength: float
) -> np.ndarray:
  """Returns a late update, corrected to first order for its delay.

  To a gradient g, DC-ASGD (Zheng et al., arXiv 1609.08326) adds l g * g * d,
  where d is the change of the parameters since g was computed, and * an
  elementwise product. An update is -c g, so it becomes -c (g + l g * g * d). As
  in `parallel.outer.dc_s3gd`, l scales the correction to ``strength`` times the
  norm of g; c then has no effect.

  Args:
    delta: Update, float32 ``[n]``.
    moved: d, float32 ``[n]``.
    strength: Norm of the correction, relative to the update.
  """
  largest = np.abs(delta).max()
  if not largest:
    return delta
  # Scaled, so that squares do not overflow.
  correction = np.square(delta / largest) * moved
  norm = _norm(correction)
  if not norm:
    return delta
  return delta - np.float32(strength * _norm(delta) / norm) * correction


def _finish(state: ServerState, reason: str, effects: list[Any]) -> ServerState:
  """Returns the state of a run that has ended for ``reason``."""
  state = dataclasses.replace(
    state, finished=reason, started=None, downlinks=(), uplinks=()
  )
  effects += [Save(), Stop(reason)]
  return state


def _warn_of_majority(weights: dict[int, float], effects: list[Any]) -> None:
  """Warns if one of several clients has most of the total weight."""
  most = max(weights, key=lambda k: weights[k], default=0)
  share = weights.get(most, 0.0) / (sum(weights.values()) or 1.0)
  if len(weights) > 1 and share > (0.9 if len(weights) == 2 else 0.5):
    effects.append(PrintWarning(
      f"client {most} reports {weights[most]:,.0f} examples, {share:.1%} of "
      "all, so its updates determine the model: lower max_examples to refuse "
      "such numbers, or set weights='equal' to ignore them"
    ))


def _refuse(
  state: ServerState, update: Update | UpdateReady, reason: str,
  effects: list[Any]
) -> ServerState:
  """Returns the state with one more refused update, which an effect reports."""
  effects.append(UpdateRefused(
    update.client,
    f"update of client {update.client} in round {update.round} refused: "
    f"{reason}",
  ))
  counts = dict(state.counts)
  counts[reason] = counts.get(reason, 0) + 1
  return dataclasses.replace(
    state, counts=counts, refused=(*state.refused, (update.client, reason))
  )


def _client_weights(state: ServerState, rules: Rules) -> dict[int, float]:
  """Returns the weights of all clients with examples."""
  return {
    k: float(m.examples) if rules.weights == "examples" else 1.0
    for k, m in sorted(state.members.items()) if m.examples > 0
  }


def _mean_loss(
  updates: list[Update], arithmetic: Arithmetic, effects: list[Any]
) -> float:
  """Returns the mean validation loss over examples; NaN for none.

  Cross-entropies are not negative. A negative loss and an outlier do not count.
  """
  said = [u for u in updates if u.validated > 0 and math.isfinite(u.loss)]
  healthy = arithmetic.healthy([
    u.loss if u.loss >= _MIN_LOSS else math.nan for u in said
  ])
  effects += [
    UpdateRefused(
      u.client, f"loss of client {u.client} in round {u.round} refused: "
      f"{u.loss:g} is negative or an outlier",
    ) for u, valid in zip(said, healthy, strict=True) if not valid
  ]
  said = [u for u, valid in zip(said, healthy, strict=True) if valid]
  total = sum(u.validated for u in said)
  return sum(u.loss * u.validated for u in said) / total if said else math.nan


def _norm(delta: np.ndarray) -> float:
  """Returns the 2-norm, computed in float64 so that it does not overflow."""
  return float(np.sqrt(np.sum(np.square(delta, dtype=np.float64))))


def _format_clients(clients: list[int]) -> str:
  """Formats client ids with commas: at most eight, and the number of others."""
  more = f" and {len(clients) - 8} more" if len(clients) > 8 else ""
  return ", ".join(map(str, clients[:8])) + more
