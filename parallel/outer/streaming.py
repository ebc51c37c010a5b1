"""Streaming DiLoCo: exchanges one fragment at a time, overlapped with compute.

A fragment is a few whole layers; the last fragment holds all parameters outside
the layers. Fragment f of F is sent every H steps, with the offset t_f = f (H //
F), and for the first time at least H steps after the start of training
(`parallel.plans.outer.fragment_plan` computes the schedule):

    send    after update t where (t - t_f) mod H = 0 and t - t_f >= H:
              delta <- mean over m of (phi_f - theta_m,f)     in few bits
    receive after update t + tau:
              phi_f     <- OuterOpt(phi_f, delta)
              theta_m,f <- keep * theta_m,f + (1 - keep) * phi_f

With tau >= 1 an exchange is sent at the start of the step after update t,
before that step's gradients, so that it overlaps with their compute. The mean
then waits in a *slot* of the state until the end of update t + tau. With a
large tau several fragments are in flight at once, each in a separate slot. On a
link that is slower than a step, an exchange can be sent in *pieces*, at the
starts of several steps.

When a mean arrives, the workers have trained for tau more steps. `_merge` mixes
the new outer parameters into theirs: keep = 0 discards those steps, keep = 1
ignores the other workers.

A worker whose fragment has diverged (`parallel.outer.health`) is excluded from
that exchange. At the end of the step that sent the fragment, it replaces all
its parameters by phi: a healthy fragment among diverged ones would diverge
within a step.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication",
arXiv 2501.18512, Algorithm 2, where keep is alpha. Slots and pieces are
additions; outer parameters and momentum of all fragments stay in memory.
"""

import collections
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from parallel.base.checks import fraction
from parallel.collectives import ranks_here
from parallel.outer import health
from parallel.outer.base import (
  Params,
  Plan,
  RoundLoop,
  State,
  stacked_zeros,
  to_workers,
)
from parallel.outer.exchange import Exchange
from parallel.outer.fragments import Fragments
from parallel.outer.optimizers import OuterOptimizer
from parallel.outer.pieces import Pieces
from parallel.plans.outer.fragment_plan import (
  FragmentSchedule,
  ReceiveArguments,
  ReceiveVariant,
  SendArguments,
  SendVariant,
  StepArguments,
  StepVariant,
)


@dataclasses.dataclass(frozen=True)
class Streaming(RoundLoop):
  """Outer loop that exchanges one fragment after the other.

  Attributes:
    sync_every: H, the number of steps per round; each fragment is sent once per
      round.
    optimizer: Outer optimizer; every fragment has its part of the state.
    exchange: Mean over the workers.
    fragments: Partition of the parameters.
    overlap: tau, the steps between send and receive: one number, or one per
      worker; all zero or all positive.
    keep: alpha, the weight of a worker's own parameters, in [0, 1], when it
      merges a fragment that has arrived.
    pieces: Number of steps over which an exchange is spread, for links that are
      slower than a step. It is at most tau, so that the mean is complete when
      it is applied, and at most the number of steps between two sends, so that
      only one exchange is in pieces at a time.

  Raises:
    ValueError: ``overlap``, ``keep`` or ``pieces`` is out of range, or there
      are more fragments than steps in a round.
  """

  optimizer: OuterOptimizer
  exchange: Exchange
  fragments: Fragments
  overlap: tuple[int, ...] = (0,)
  keep: float = 0.0
  pieces: int = 1

  def __post_init__(self) -> None:
    spacing = self.times.spacing  # refuses more fragments than steps
    if len(self.overlap) not in (1, self.worker.size):
      raise ValueError(
        f"overlap={self.overlap} must have one value, or one for each of the "
        f"{self.worker.size} workers"
      )
    if min(self.overlap) < 0 or max(self.overlap) >= self.sync_every:
      raise ValueError(
        f"overlap={self.overlap} must lie in [0, sync_every={self.sync_every})"
      )
    if min(self.overlap) == 0 < max(self.overlap):
      raise ValueError(
        f"overlap={self.overlap} must be all zero or all positive"
      )
    if not 1 <= self.pieces <= max(1, min(min(self.overlap), spacing)):
      raise ValueError(
        f"pieces={self.pieces} must be at least 1 and at most "
        f"overlap={self.overlap} and the {spacing} steps between two sends"
      )
    fraction("keep", self.keep)

  @property
  def times(self) -> FragmentSchedule:
    """Schedule of the steps after which each fragment is sent."""
    return FragmentSchedule(
      self.sync_every, self.fragments.num_layer_fragments + 1
    )

  @property
  def period(self) -> int:
    # The slots, which are compile-time constants, are used in turn. A fragment
    # uses the same slot again when the number of sends since its last use is a
    # multiple of the number of slots, which may take several rounds.
    many = max(1, self.fragments.num_layer_fragments)
    return self.sync_every * math.lcm(many, max(1, self.slots)) // many

  @property
  def slots(self) -> int:
    """Maximum number of fragments of layers in flight at once."""
    most = max(1, self.fragments.num_layer_fragments)
    # A fragment is sent every `spacing` steps, and its slot is occupied until
    # the workers with the smallest `overlap` receive it. Later workers merge
    # the outer parameters, which then include the mean, and read no slot.
    return min(most, -(-min(self.overlap) // self.times.spacing))

  @property
  def _cutter(self) -> Pieces:
    return Pieces(self.exchange, self.pieces)

  def init(self, params: Params) -> State:
    optimizer = jax.tree.map(
      # Scalars of the optimizer's state, such as Adam's step count, become
      # [fragments]: each fragment counts its own outer steps.
      lambda x: x if x.ndim else jnp.broadcast_to(x, self._counts_shape),
      self.optimizer.init(params),
    )
    cut, last = self.fragments, self.fragments.last_kind
    state = {"params": params, "optimizer": optimizer}
    if min(self.overlap):  # slots, which hold means from send to receive
      zeros = jax.tree.map(jnp.zeros_like, params)
      # The last fragment needs one slot: `sync_every` exceeds `overlap`.
      arriving = {last: {"0": cut.take(zeros, last, 0, 0)}}
      for kind in cut.stack_kinds:
        layers = cut.take(zeros, kind, 0, 0)
        arriving[kind] = {str(slot): layers for slot in range(self.slots)}
      state["arriving"] = arriving
    state |= self.exchange.init(params)
    if self.pieces > 1:
      # Deltas of the exchange in flight, per worker: all its pieces are slices
      # of the deltas at the first piece, but the parameters change in between.
      stacked = stacked_zeros(params, self.worker)
      sending = {
        kind: cut.take(stacked, kind, 0, 1)
        for kind in (*cut.stack_kinds, last)
      }
      state["workers"] = state["workers"] | {"sending": sending}
    return state

  @property
  def _counts_shape(self) -> tuple[int]:
    return (self.fragments.num_layer_fragments + 1,)

  def plan(self, step: int) -> Plan:
    now = step + 1  # number of updates at the end of this step
    # The start of this step is after update `step`. The pieces of a fragment
    # are sent at the starts of consecutive steps.
    piece = (step % self.sync_every) % self.times.spacing
    send, send_numbers = None, None
    if min(self.overlap) and piece < self.pieces:
      sent_at = step - piece
      fragment = self.times.sent(sent_at)
      if fragment is not None:
        kind, place = self.fragments.place(fragment)
        send = SendVariant(kind, self._slot(fragment, sent_at), piece == 0)
        send_numbers = SendArguments(place, sent_at, piece)
    receives, receive_numbers = [], []
    for tau in sorted(set(self.overlap)):
      sent_at = now - tau
      fragment = self.times.sent(sent_at)
      if fragment is not None:
        kind, place = self.fragments.place(fragment)
        slot = self._slot(fragment, sent_at)
        # Only the first receive takes the outer step; workers with a larger
        # `overlap` merge its result later.
        first = tau == min(self.overlap)
        receives.append(ReceiveVariant(kind, slot, first))
        receive_numbers.append(ReceiveArguments(place, sent_at, tau))
    return Plan(
      StepVariant(send, tuple(receives)),
      StepArguments(send_numbers, tuple(receive_numbers)),
    )

  def _slot(self, fragment: int, sent_at: int) -> int:
    """Returns the slot that holds a fragment's mean from send to receive.

    ``sent_at`` is the number of updates before the send.
    """
    many = self.fragments.num_layer_fragments
    if not self.slots or fragment >= many:  # the last fragment has one slot
      return 0
    # Index of this send among all sends of layers, modulo the slots.
    return ((sent_at // self.sync_every) * many + fragment) % self.slots

  def begin(self, params: Params, state: State, plan: Plan) -> State:
    send, numbers = plan.variant.send, plan.numbers.send
    if send is None:
      return state
    # The exchange reads the parameters after the last update, before this
    # step's gradients, and the gradients do not read its mean.
    if self.pieces == 1:
      arrived, state = self._exchange(
        params, state, send.kind, numbers.place, numbers.exchange
      )
      return _write_slot(state, send, arrived)
    if send.starts:  # snapshot: the parameters change between pieces
      outer, mine = self.outer_and_own_params(
        params, state, send.kind, numbers.place
      )
      deltas = jax.tree.map(lambda x, y: x[None] - y, outer, mine)
      workers = state["workers"]
      sending = workers["sending"] | {send.kind: deltas}
      state = state | {"workers": workers | {"sending": sending}}
    deltas = state["workers"]["sending"][send.kind]
    # Each piece repeats the judgment of the same deltas, with the same result.
    verdict = self.exchange.judge(deltas)
    if send.starts:
      state = _record_verdict(state, verdict)
    arrived, state = self._exchange_piece(
      deltas, _read_slot(state, send), state, verdict.mask, send.kind, numbers
    )
    return _write_slot(state, send, arrived)

  def finish(
    self, params: Params, updates: Params, state: State, plan: Plan
  ) -> tuple[Params, State]:
    params = optax.apply_updates(params, updates)
    state = dict(state)
    for receive, numbers in zip(
      plan.variant.receives, plan.numbers.receives, strict=True
    ):
      kind, place = receive.kind, numbers.place
      if receive.first:
        if min(self.overlap):
          delta = _read_slot(state, receive)
        else:  # sent and received in one step
          delta, state = self._exchange(
            params, state, kind, place, numbers.exchange
          )
        state = self._outer_update(delta, state, kind, place)
      params = self._merge(params, state, kind, numbers)
    # Workers that this step's exchange has excluded take the outer parameters.
    if (mine := state.pop("mask_here", None)) is not None:
      outer = to_workers(state["params"], self.worker)
      params = health.select_per_worker(mine, params, outer)
    return params, state

  def outer_and_own_params(
    self, params: Params, state: State, kind: str, place: Any
  ) -> tuple[Params, Params]:
    """Returns a fragment of the outer and of the workers' parameters.

    They are ``[...]``, and ``[W, ...]`` for this device's W workers. ``kind``
    and ``place`` select the fragment as in `Fragments.take`.
    """
    outer = self.fragments.take(state["params"], kind, place, 0)
    return outer, self.fragments.take(params, kind, place, 1)

  def _exchange(
    self, params: Params, state: State, kind: str, place: Any, exchange: Any
  ) -> tuple[Params, State]:
    """Averages a fragment's outer gradients over the workers.

    ``kind`` and ``place`` select the fragment as in `Fragments.take`;
    ``exchange`` is the number of the exchange, which seeds its random draws.

    Returns:
      The mean, a tree of ``[...]``, and the state with new residuals, health
      statistics and the mask of this device's included workers.
    """
    cut = self.fragments
    outer, mine = self.outer_and_own_params(params, state, kind, place)
    verdict = self.exchange.judge(mine, outer)
    state = _record_verdict(state, verdict)
    workers = state["workers"]
    mean = functools.partial(
      self.exchange.mean, mine, number=exchange, mask=verdict.mask,
      anchor=outer,
    )
    if "residual" not in workers:
      return mean(state={})[0], state
    # Residuals exist for all parameters; this exchange needs one fragment's.
    part = cut.take(workers["residual"], kind, place, 1)
    delta, new = mean(state={"workers": {"residual": part}})
    part = new["workers"]["residual"]
    residual = cut.put(workers["residual"], part, kind, place, 1)
    return delta, state | {"workers": workers | {"residual": residual}}

  def _exchange_piece(
    self,
    deltas: Params,
    arriving: Params,
    state: State,
    mask: jax.Array,
    kind: str,
    numbers: SendArguments,
  ) -> tuple[Params, State]:
    """Averages one piece of a fragment's outer gradients over the workers.

    Args:
      deltas: Outer gradients of this device's W workers when the first piece
        was sent, ``[W, ...]``.
      arriving: Mean of the fragment; pieces that have not arrived are stale.
      state: State of the outer loop.
      mask: Mask of included workers, float32 ``[workers]``.
      kind: Key of the fragment's stack, as in `Fragments.take`.
      numbers: Numbers of the exchange and of the piece.

    Returns:
      The mean with this piece included, and the state with new residuals.
    """
    cut, place, piece = self.fragments, numbers.place, numbers.piece
    take = functools.partial(self._cutter.take, number=piece)
    # Different random numbers for the pieces of one exchange.
    draw = numbers.exchange * self.pieces + piece
    workers = state["workers"]
    old = {}
    if "residual" in workers:
      residual = cut.take(workers["residual"], kind, place, 1)
      old = {"workers": {"residual": take(residual, dim=1)}}
    mean, new = self.exchange.mean(take(deltas, dim=1), old, draw, mask)
    arriving = self._cutter.put(arriving, mean, piece, 0)
    if old:
      part = new["workers"]["residual"]
      part = self._cutter.put(residual, part, piece, 1)
      whole = cut.put(workers["residual"], part, kind, place, 1)
      state = state | {"workers": workers | {"residual": whole}}
    return arriving, state

  def _outer_update(
    self, delta: Params, state: State, kind: str, place: Any
  ) -> State:
    """Returns the state after the outer step of one fragment.

    ``delta`` is the mean outer gradient; ``kind`` and ``place`` select the
    fragment as in `Fragments.take`.
    """
    cut = self.fragments
    index = cut.first_of(kind) + place  # of the fragment's step count
    whole = state["optimizer"]
    # An optimizer's state contains trees in the structure of the parameters,
    # such as momentum, from which the fragment is sliced, and counts
    # [fragments].
    is_tree = _structure_predicate(state["params"])
    part = jax.tree.map(
      lambda x: cut.take(x, kind, place, 0) if is_tree(x) else x[index],
      whole, is_leaf=is_tree,
    )
    outer = cut.take(state["params"], kind, place, 0)
    updates, part = self.optimizer.update(delta, part, outer)
    outer = optax.apply_updates(outer, updates)
    optimizer = jax.tree.map(
      lambda x, y: cut.put(x, y, kind, place, 0)
      if is_tree(x)
      else x.at[index].set(y),
      whole, part, is_leaf=is_tree,
    )
    params = cut.put(state["params"], outer, kind, place, 0)
    return state | {"params": params, "optimizer": optimizer}

  def _merge(
    self, params: Params, state: State, kind: str, numbers: ReceiveArguments
  ) -> Params:
    """Mixes a fragment's outer parameters into those of receiving workers.

    Returns the workers' parameters. ``kind`` is the fragment's kind, as in
    `Fragments.take`; ``numbers`` has the fragment's place and the workers.
    """
    cut, place = self.fragments, numbers.place
    outer, mine = self.outer_and_own_params(params, state, kind, place)
    taus = np.broadcast_to(np.asarray(self.overlap), (self.worker.size,))
    # bool [W]: one program runs on all devices, so each lane looks up the
    # `overlap` of its worker.
    now = jnp.asarray(taus)[ranks_here(self.worker)] == numbers.tau

    mixed = jax.tree.map(
      lambda y, x: jax.vmap(jnp.where)(now, self.mix(y, x), x), outer, mine
    )
    return cut.put(params, mixed, kind, place, 1)

  def mix(self, outer: jax.Array, mine: jax.Array) -> jax.Array:
    """Returns `keep` * mine + (1 - `keep`) * outer.

    ``mine`` and the result are ``[W, ...]`` for this device's W workers.
    """
    if not self.keep:
      return jnp.broadcast_to(outer, mine.shape)
    return self.keep * mine + (1.0 - self.keep) * outer[None]

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    cut = self.fragments
    total: collections.Counter[str] = collections.Counter()
    for number in range(cut.num_layer_fragments + 1):
      kind, _ = cut.place(number)
      part = jax.eval_shape(lambda t, k=kind: cut.take(t, k, 0, 0), shapes)
      if self.pieces > 1:
        part = jax.eval_shape(lambda t: self._cutter.take(t, 0, 0), part)
      for _ in range(self.pieces):
        total.update(self.exchange.sent_bytes(part))
    rounds = self.period // self.sync_every  # each sends all fragments once
    return {dtype: rounds * size for dtype, size in total.items()}


def _structure_predicate(params: Params):
  """Returns a predicate: whether a tree has the structure of the parameters."""
  treedef = jax.tree.structure(params)
  return lambda x: jax.tree.structure(x) == treedef


def _record_verdict(state: State, verdict: health.Verdict) -> State:
  """Returns the state with new health statistics of the workers.

  Until `finish`, it also has the mask of this device's included workers.
  """
  workers = health.record_statistics(
    state["workers"], verdict.norms, verdict.mine
  )
  return state | {"workers": workers, "mask_here": verdict.mine}


def _read_slot(state: State, variant: SendVariant | ReceiveVariant) -> Params:
  """Returns the mean in the slot that ``variant`` names.

  It is what the exchange of a fragment has computed so far.
  """
  return state["arriving"][variant.kind][str(variant.slot)]


def _write_slot(
  state: State, variant: SendVariant, arrived: Params
) -> State:
  """Returns the state with ``arrived`` in the slot that ``variant`` names.

  It is the mean of a fragment in flight.
  """
  of_kind = state["arriving"][variant.kind] | {str(variant.slot): arrived}
  return state | {"arriving": state["arriving"] | {variant.kind: of_kind}}
