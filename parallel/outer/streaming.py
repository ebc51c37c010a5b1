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
at the heads of several.
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

from parallel.collectives import ranks_here
from parallel.outer.base import (
  OuterLoop,
  Params,
  Plan,
  State,
  stacked_zeros,
)
from parallel.outer.exchange import Exchange
from parallel.outer.fragments import LAYERS, Fragments


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
  optimizer: optax.GradientTransformation
  exchange: Exchange
  fragments: Fragments
  overlap: tuple[int, ...] = (0,)
  keep: float = 0.0
  pieces: int = 1

  def __post_init__(self) -> None:
    many = self.fragments.num_layer_fragments + 1
    if self.every < many:
      raise ValueError(
        f"config.outer.every={self.every} is less than the {many} fragments; "
        "raise it, or config.outer.fragment_layers"
      )
    if len(self.overlap) not in (1, self.worker.size):
      raise ValueError(
        f"config.outer.overlap={self.overlap} must have one value, or one for "
        f"each of config.parallel.worker={self.worker.size}"
      )
    if min(self.overlap) < 0 or max(self.overlap) >= self.every:
      raise ValueError(
        f"config.outer.overlap={self.overlap} must lie in "
        f"[0, config.outer.every={self.every})"
      )
    if min(self.overlap) == 0 < max(self.overlap):
      raise ValueError(
        f"config.outer.overlap={self.overlap}: either none or all overlap"
      )
    if not 1 <= self.pieces <= max(1, min(min(self.overlap), self.spacing)):
      raise ValueError(
        f"config.outer.pieces={self.pieces} must be at least 1 and at most "
        f"config.outer.overlap={self.overlap} and the {self.spacing} steps "
        "between two sends"
      )
    if not 0.0 <= self.keep <= 1.0:
      raise ValueError(f"config.outer.keep={self.keep} must lie in [0, 1]")

  @property
  def period(self) -> int:
    # Slots are taken in turn, so they may repeat later than fragments do.
    many = max(1, self.fragments.num_layer_fragments)
    return self.every * math.lcm(many, max(1, self.slots)) // many

  @property
  def spacing(self) -> int:
    """Steps between the sends of two fragments."""
    return self.every // (self.fragments.num_layer_fragments + 1)

  @property
  def slots(self) -> int:
    """Fragments of layers that can be under way at once."""
    most = max(1, self.fragments.num_layer_fragments)
    return min(most, -(-min(self.overlap) // self.spacing))

  def init(self, params: Params) -> State:
    optimizer = jax.tree.map(
      # A count, say, is a fragment's own.
      lambda x: x if x.ndim else jnp.broadcast_to(x, self._counts),
      self.optimizer.init(params),
    )
    state = {"params": params, "optimizer": optimizer}
    if min(self.overlap):
      cut, last = self.fragments, self.fragments.num_layer_fragments
      zeros = jax.tree.map(jnp.zeros_like, params)
      if last:
        layers = cut.take(zeros, LAYERS, 0, 0)
        state[LAYERS] = {str(slot): layers for slot in range(self.slots)}
      state[cut.kind(last)] = cut.take(zeros, cut.kind(last), 0, 0)
    state |= self.exchange.init(params)
    if self.pieces > 1:
      last = self.fragments.num_layer_fragments
      kinds = {self.fragments.kind(0), self.fragments.kind(last)}
      stacked = stacked_zeros(params, self.worker)
      sending = {k: self.fragments.take(stacked, k, 0, 1) for k in kinds}
      state["workers"] = state.get("workers", {}) | {"sending": sending}
    return state

  @property
  def _counts(self) -> tuple[int]:
    return (self.fragments.num_layer_fragments + 1,)

  def sent(self, step: int) -> int | None:
    """Which fragment is sent after update number ``step``; REST is last."""
    fragment, left = divmod(step % self.every, self.spacing)
    last = self.fragments.num_layer_fragments
    started = step >= self.every
    return fragment if started and not left and fragment <= last else None

  def plan(self, step: int) -> Plan:
    now = step + 1  # updates when the step ends
    piece = (step % self.every) % self.spacing
    sends = None
    if min(self.overlap) and piece < self.pieces:
      sends = self.sent(step - piece)
    receives = []
    for tau in sorted(set(self.overlap)):
      fragment = self.sent(now - tau)
      if fragment is not None:
        first = tau == min(self.overlap)
        numbers = self._numbers(fragment, now - tau)
        receives.append(
          ((self.fragments.kind(fragment), numbers.pop("slot"), first),
           numbers | {"tau": tau})
        )
    program = tuple(static for static, _ in receives)
    numbers = {"receive": tuple(n for _, n in receives)}
    if sends is None:
      return Plan((None, program), numbers)
    sending = self._numbers(sends, step - piece)
    static = (self.fragments.kind(sends), sending.pop("slot"), piece == 0)
    sending["piece"] = piece
    return Plan((static, program), numbers | {"send": sending})

  def _numbers(self, fragment: int, sent_at: int) -> dict[str, int]:
    many = self.fragments.num_layer_fragments
    layer_send = (sent_at // self.every) * many + fragment
    return {
      "fragment": fragment,
      "slot": layer_send % self.slots if self.slots else 0,
      "exchange": sent_at,
    }

  def begin(self, params: Params, state: State, plan: Plan) -> State:
    sends, _ = plan.program
    if sends is None:
      return state
    kind, slot, starts = sends
    numbers = plan.numbers["send"]
    arriving = state[kind][str(slot)] if kind == LAYERS else state[kind]
    if self.pieces == 1:
      arriving, state = self._exchange(params, state, kind, numbers)
    else:
      if starts:
        outer, mine = self._sides(params, state, kind, numbers["fragment"])
        deltas = jax.tree.map(jnp.subtract, outer, mine)
        workers = state["workers"]
        sending = workers["sending"] | {kind: deltas}
        state = state | {"workers": workers | {"sending": sending}}
      deltas = state["workers"]["sending"][kind]
      arriving, state = self._exchange_piece(
        deltas, arriving, state, kind, numbers
      )
    if kind == LAYERS:
      arriving = state[LAYERS] | {str(slot): arriving}
    return state | {kind: arriving}

  def finish(
    self, params: Params, updates: Params, state: State, plan: Plan
  ) -> tuple[Params, State]:
    params = optax.apply_updates(params, updates)
    _, receives = plan.program
    for (kind, slot, first), numbers in zip(
      receives, plan.numbers["receive"], strict=True
    ):
      if first:
        if min(self.overlap):
          delta = state[kind][str(slot)] if kind == LAYERS else state[kind]
        else:
          delta, state = self._exchange(params, state, kind, numbers)
        state = self._outer_update(delta, state, kind, numbers["fragment"])
      params = self._merge(params, state, kind, numbers)
    return params, state

  def _sides(
    self, params: Params, state: State, kind: str, number: Any
  ) -> tuple[Params, Params]:
    """phi ``[...]`` and theta ``[W, ...]`` of one fragment, as they are now."""
    outer = self.fragments.take(state["params"], kind, number, 0)
    return outer, self.fragments.take(params, kind, number, 1)

  def _exchange(
    self, params: Params, state: State, kind: str, numbers: Any
  ) -> tuple[Params, State]:
    """The mean of a fragment's differences phi - theta."""
    cut, number = self.fragments, numbers["fragment"]
    workers = state.get("workers", {})
    outer, mine = self._sides(params, state, kind, number)
    mean = functools.partial(
      self.exchange.mean, mine, number=numbers["exchange"], anchor=outer
    )
    if "residual" not in workers:
      return mean(state={})[0], state
    part = cut.take(workers["residual"], kind, number, 1)
    delta, new = mean(state={"workers": {"residual": part}})
    part = new["workers"]["residual"]
    residual = cut.put(workers["residual"], part, kind, number, 1)
    return delta, state | {"workers": workers | {"residual": residual}}

  def _exchange_piece(
    self,
    deltas: Params,
    arriving: Params,
    state: State,
    kind: str,
    numbers: Any,
  ) -> tuple[Params, State]:
    """The mean of one piece, put where it belongs among what has arrived."""
    cut, number = self.fragments, numbers["fragment"]
    piece = numbers["piece"]
    take = functools.partial(self._piece, number=piece)
    draw = numbers["exchange"] * self.pieces + piece
    workers = state["workers"]
    old = {}
    if "residual" in workers:
      residual = cut.take(workers["residual"], kind, number, 1)
      old = {"workers": {"residual": take(residual, dim=1)}}
    mean, new = self.exchange.mean(take(deltas, dim=1), old, draw)
    arriving = self._put_piece(arriving, mean, piece, 0)
    if old:
      part = new["workers"]["residual"]
      part = self._put_piece(residual, part, piece, 1)
      whole = cut.put(workers["residual"], part, kind, number, 1)
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
    self, delta: Params, state: State, kind: str, number: Any
  ) -> State:
    cut = self.fragments
    index = number if kind == LAYERS else cut.num_layer_fragments
    whole = state["optimizer"]
    is_tree = _in_shape_of(state["params"])
    part = jax.tree.map(
      lambda x: cut.take(x, kind, number, 0) if is_tree(x) else x[index],
      whole, is_leaf=is_tree,
    )
    outer = cut.take(state["params"], kind, number, 0)
    updates, part = self.optimizer.update(delta, part, outer)
    outer = optax.apply_updates(outer, updates)
    optimizer = jax.tree.map(
      lambda x, y: cut.put(x, y, kind, number, 0)
      if is_tree(x)
      else x.at[index].set(y),
      whole, part, is_leaf=is_tree,
    )
    params = cut.put(state["params"], outer, kind, number, 0)
    return state | {"params": params, "optimizer": optimizer}

  def _merge(
    self, params: Params, state: State, kind: str, numbers: Any
  ) -> Params:
    """Mixes a fragment into the workers whose tau this is."""
    cut, number = self.fragments, numbers["fragment"]
    outer, mine = self._sides(params, state, kind, number)
    taus = np.broadcast_to(np.asarray(self.overlap), (self.worker.size,))
    now = jnp.asarray(taus)[ranks_here(self.worker)] == numbers["tau"]

    @jax.vmap
    def choose(now, mixed, own):
      return jnp.where(now, mixed, own)

    def mix(x, y):
      mixed = jnp.broadcast_to(y, x.shape)
      if self.keep:
        mixed = self.keep * x + (1.0 - self.keep) * y
      return choose(now, mixed, x)

    return cut.put(
      params, jax.tree.map(mix, mine, outer), kind, number, 1
    )

  def evaluated(self, params: Params, state: State) -> Params:
    return state["params"]

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    cut = self.fragments
    total: collections.Counter[str] = collections.Counter()
    for number in range(cut.num_layer_fragments + 1):
      kind = cut.kind(number)
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
