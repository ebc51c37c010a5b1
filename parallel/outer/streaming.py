"""Streaming DiLoCo: one fragment at a time, under the compute of later steps.

Fragment f of F (whole layers, and last all that is not in a layer) is sent
every H steps from t_f = f (H // F) on, at least H steps after the start:

    send    after update t where (t - t_f) mod H = 0 and t - t_f >= H:
              delta <- mean over m of (phi_f - theta_m,f)     in few bits
    receive after update t + tau:
              phi_f     <- OuterOpt(phi_f, delta)
              theta_m,f <- keep * theta_m,f + (1 - keep) * phi_f

Source: Douillard et al., "Streaming DiLoCo with overlapping communication",
arXiv 2501.18512, Algorithm 2 (``keep`` is its alpha). The fragments and the
outer momentum are in memory whole. An exchange with tau >= 1 is sent at the
head of the step after update t, so that it runs under that step, or in pieces
at the heads of several. When what is sent is `parallel.outer.fragment_plan`.
"""

import collections
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from parallel.checks import fraction
from parallel.collectives import ranks_here
from parallel.outer.base import (
  OuterLoop,
  Params,
  Plan,
  State,
  stacked_zeros,
)
from parallel.outer.exchange import Exchange
from parallel.outer.fragment_plan import (
  FragmentTimes,
  Numbers,
  ReceiveNumbers,
  ReceiveVariant,
  SendNumbers,
  SendVariant,
  Variant,
)
from parallel.outer.fragments import Fragments
from parallel.outer.optimizers import OuterOptimizer


@dataclasses.dataclass(frozen=True)
class Streaming(OuterLoop):
  """Fragments in turn.

  Attributes:
    every: H.
    optimizer: The outer one.
    exchange: How the mean over workers is taken.
    fragments: How parameters are cut.
    overlap: tau, one number or one per worker; all zero or all positive.
    keep: alpha, the share of its own parameters that a worker keeps.
    pieces: Steps over which an exchange is spread, from the first one on, so
      that a link slower than a step has time: at most tau, and at most the
      steps between two sends.
  """

  every: int
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
    if min(self.overlap) < 0 or max(self.overlap) >= self.every:
      raise ValueError(
        f"overlap={self.overlap} must lie in [0, every={self.every})"
      )
    if min(self.overlap) == 0 < max(self.overlap):
      raise ValueError(
        f"overlap={self.overlap}: either none or all overlap"
      )
    if not 1 <= self.pieces <= max(1, min(min(self.overlap), spacing)):
      raise ValueError(
        f"pieces={self.pieces} must be at least 1 and at most "
        f"overlap={self.overlap} and the {spacing} steps between two sends"
      )
    fraction("keep", self.keep)

  @property
  def times(self) -> FragmentTimes:
    """When which fragment is sent."""
    return FragmentTimes(self.every, self.fragments.num_layer_fragments + 1)

  @property
  def period(self) -> int:
    # Slots are taken in turn, so they may repeat later than fragments do.
    many = max(1, self.fragments.num_layer_fragments)
    return self.every * math.lcm(many, max(1, self.slots)) // many

  @property
  def slots(self) -> int:
    """Fragments of layers that can be under way at once."""
    most = max(1, self.fragments.num_layer_fragments)
    return min(most, -(-min(self.overlap) // self.times.spacing))

  def init(self, params: Params) -> State:
    optimizer = jax.tree.map(
      # A count, say, is a fragment's own.
      lambda x: x if x.ndim else jnp.broadcast_to(x, self._counts),
      self.optimizer.init(params),
    )
    cut, last = self.fragments, self.fragments.last_kind
    state = {"params": params, "optimizer": optimizer}
    if min(self.overlap):  # means wait here from their send to their receive
      zeros = jax.tree.map(jnp.zeros_like, params)
      arriving = {last: {"0": cut.take(zeros, last, 0, 0)}}
      for kind in cut.stack_kinds:
        layers = cut.take(zeros, kind, 0, 0)
        arriving[kind] = {str(slot): layers for slot in range(self.slots)}
      state["arriving"] = arriving
    state |= self.exchange.init(params)
    if self.pieces > 1:
      stacked = stacked_zeros(params, self.worker)
      sending = {
        kind: cut.take(stacked, kind, 0, 1)
        for kind in (*cut.stack_kinds, last)
      }
      state["workers"] = state.get("workers", {}) | {"sending": sending}
    return state

  @property
  def _counts(self) -> tuple[int]:
    return (self.fragments.num_layer_fragments + 1,)

  def plan(self, step: int) -> Plan:
    now = step + 1  # updates when the step ends
    # A fragment's pieces go at the heads of the steps from its turn on.
    piece = (step % self.every) % self.times.spacing
    send, send_numbers = None, None
    if min(self.overlap) and piece < self.pieces:
      sent_at = step - piece
      fragment = self.times.sent(sent_at)
      if fragment is not None:
        kind, place = self.fragments.place(fragment)
        send = SendVariant(kind, self._slot(fragment, sent_at), piece == 0)
        send_numbers = SendNumbers(place, sent_at, piece)
    receives, receive_numbers = [], []
    for tau in sorted(set(self.overlap)):
      sent_at = now - tau
      fragment = self.times.sent(sent_at)
      if fragment is not None:
        kind, place = self.fragments.place(fragment)
        slot = self._slot(fragment, sent_at)
        first = tau == min(self.overlap)
        receives.append(ReceiveVariant(kind, slot, first))
        receive_numbers.append(ReceiveNumbers(place, sent_at, tau))
    return Plan(
      Variant(send, tuple(receives)),
      Numbers(send_numbers, tuple(receive_numbers)),
    )

  def _slot(self, fragment: int, sent_at: int) -> int:
    """Where the mean of a send waits; the rest is never sent twice at once."""
    many = self.fragments.num_layer_fragments
    if not self.slots or fragment >= many:
      return 0
    return ((sent_at // self.every) * many + fragment) % self.slots

  def begin(self, params: Params, state: State, plan: Plan) -> State:
    send, numbers = plan.variant.send, plan.numbers.send
    if send is None:
      return state
    if self.pieces == 1:
      arrived, state = self._exchange(
        params, state, send.kind, numbers.place, numbers.exchange
      )
      return _with_arriving(state, send, arrived)
    if send.starts:  # later pieces are of what is sent now
      outer, mine = self._sides(params, state, send.kind, numbers.place)
      deltas = jax.tree.map(jnp.subtract, outer, mine)
      workers = state["workers"]
      sending = workers["sending"] | {send.kind: deltas}
      state = state | {"workers": workers | {"sending": sending}}
    arrived, state = self._exchange_piece(
      state["workers"]["sending"][send.kind], _arriving(state, send), state,
      send.kind, numbers,
    )
    return _with_arriving(state, send, arrived)

  def finish(
    self, params: Params, updates: Params, state: State, plan: Plan
  ) -> tuple[Params, State]:
    params = optax.apply_updates(params, updates)
    for receive, numbers in zip(
      plan.variant.receives, plan.numbers.receives, strict=True
    ):
      kind, place = receive.kind, numbers.place
      if receive.first:
        if min(self.overlap):
          delta = _arriving(state, receive)
        else:  # nothing overlaps: sent and received at once
          delta, state = self._exchange(
            params, state, kind, place, numbers.exchange
          )
        state = self._outer_update(delta, state, kind, place)
      params = self._merge(params, state, kind, numbers)
    return params, state

  def _sides(
    self, params: Params, state: State, kind: str, place: Any
  ) -> tuple[Params, Params]:
    """phi ``[...]`` and theta ``[W, ...]`` of one fragment, as they are now."""
    outer = self.fragments.take(state["params"], kind, place, 0)
    return outer, self.fragments.take(params, kind, place, 1)

  def _exchange(
    self, params: Params, state: State, kind: str, place: Any, exchange: Any
  ) -> tuple[Params, State]:
    """The mean of a fragment's differences phi - theta."""
    cut = self.fragments
    workers = state.get("workers", {})
    outer, mine = self._sides(params, state, kind, place)
    mean = functools.partial(
      self.exchange.mean, mine, number=exchange, anchor=outer
    )
    if "residual" not in workers:
      return mean(state={})[0], state
    # Error feedback: this fragment's part of what was rounded away before.
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
    kind: str,
    numbers: SendNumbers,
  ) -> tuple[Params, State]:
    """The mean of one piece, put where it belongs among what has arrived."""
    cut, place, piece = self.fragments, numbers.place, numbers.piece
    take = functools.partial(self._piece, number=piece)
    draw = numbers.exchange * self.pieces + piece
    workers = state["workers"]
    old = {}
    if "residual" in workers:
      residual = cut.take(workers["residual"], kind, place, 1)
      old = {"workers": {"residual": take(residual, dim=1)}}
    mean, new = self.exchange.mean(take(deltas, dim=1), old, draw)
    arriving = self._put_piece(arriving, mean, piece, 0)
    if old:
      part = new["workers"]["residual"]
      part = self._put_piece(residual, part, piece, 1)
      whole = cut.put(workers["residual"], part, kind, place, 1)
      state = state | {"workers": workers | {"residual": whole}}
    return arriving, state

  def _piece(self, tree: Params, number: Any, dim: int) -> Params:
    """Of each leaf its piece ``[..., m]``, whole blocks of the codec."""

    def take(path, x):
      rows, size = self._rows(path, x, dim)
      return lax.dynamic_slice_in_dim(rows, number * size, size, -1)

    return jax.tree.map_with_path(take, tree)

  def _put_piece(
    self, tree: Params, part: Params, number: Any, dim: int
  ) -> Params:
    def put(path, x, y):
      rows, size = self._rows(path, x, dim)
      rows = lax.dynamic_update_slice_in_dim(rows, y, number * size, -1)
      lead = rows.ndim - 1
      return rows[..., : math.prod(x.shape[lead:])].reshape(x.shape)

    return jax.tree.map_with_path(put, tree, part)

  def _rows(
    self, path: Any, x: jax.Array, dim: int
  ) -> tuple[jax.Array, int]:
    """``[..., n]`` with n padded to equal pieces, and their size."""
    lead = dim + self.exchange.num_block_dims(path)
    rows = x.reshape(*x.shape[:lead], math.prod(x.shape[lead:]))
    block = self.exchange.wire.block
    size = -(-rows.shape[-1] // (self.pieces * block)) * block
    padding = self.pieces * size - rows.shape[-1]
    return jnp.pad(rows, [(0, 0)] * lead + [(0, padding)]), size

  def _outer_update(
    self, delta: Params, state: State, kind: str, place: Any
  ) -> State:
    """Takes the outer step of one fragment, with its own part of the state."""
    cut = self.fragments
    index = cut.first_of(kind) + place  # among the counts of all fragments
    whole = state["optimizer"]
    is_tree = _in_shape_of(state["params"])
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
    self, params: Params, state: State, kind: str, numbers: ReceiveNumbers
  ) -> Params:
    """Mixes a fragment into the workers whose tau this is."""
    cut, place = self.fragments, numbers.place
    outer, mine = self._sides(params, state, kind, place)
    taus = np.broadcast_to(np.asarray(self.overlap), (self.worker.size,))
    now = jnp.asarray(taus)[ranks_here(self.worker)] == numbers.tau

    @jax.vmap
    def choose(now, mixed, own):
      return jnp.where(now, mixed, own)

    def mix(x, y):
      mixed = jnp.broadcast_to(y, x.shape)
      if self.keep:
        mixed = self.keep * x + (1.0 - self.keep) * y
      return choose(now, mixed, x)

    return cut.put(params, jax.tree.map(mix, mine, outer), kind, place, 1)

  def evaluated(self, params: Params, state: State) -> Params:
    return state["params"]

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    cut = self.fragments
    total: collections.Counter[str] = collections.Counter()
    for number in range(cut.num_layer_fragments + 1):
      kind, _ = cut.place(number)
      part = jax.eval_shape(lambda t, k=kind: cut.take(t, k, 0, 0), shapes)
      if self.pieces > 1:
        part = jax.eval_shape(lambda t: self._piece(t, 0, 0), part)
      for _ in range(self.pieces):
        total.update(self.exchange.sent_bytes(part))
    rounds = self.period // self.every
    return {dtype: rounds * size for dtype, size in total.items()}


def _in_shape_of(params: Params):
  """Whether something is a tree with the structure of the parameters."""
  treedef = jax.tree.structure(params)
  return lambda x: jax.tree.structure(x) == treedef


def _arriving(state: State, variant: SendVariant | ReceiveVariant) -> Params:
  """What has arrived of a fragment that is under way."""
  return state["arriving"][variant.kind][str(variant.slot)]


def _with_arriving(
  state: State, variant: SendVariant, arrived: Params
) -> State:
  """The state with that replaced."""
  of_kind = state["arriving"][variant.kind] | {str(variant.slot): arrived}
  return state | {"arriving": state["arriving"] | {variant.kind: of_kind}}
