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
head of the step after update t, so that it runs under that step.
"""

import collections
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from parallel.outer.base import (
  OuterLoop,
  Params,
  Plan,
  State,
  worker_ids,
)
from parallel.outer.exchange import Exchange

LAYERS, REST, WHOLE = "layers", "rest", "whole"


@dataclasses.dataclass(frozen=True)
class Fragments:
  """How parameters are cut; a leaf under ``blocks`` is stacked over layers.

  Attributes:
    num_layers: L.
    layers: Layers per fragment; divides L. 0: one fragment of everything.
    strided: Layers f, f + n, f + 2 n, ... of n fragments; else consecutive.
    blocks: The key of the layer-stacked subtree.
  """

  num_layers: int
  layers: int
  strided: bool
  blocks: str = "blocks"

  def __post_init__(self) -> None:
    if self.layers < 0 or (self.layers and self.num_layers % self.layers):
      raise ValueError(
        f"config.outer.fragment_layers={self.layers} must divide "
        f"config.model.num_layers={self.num_layers}, or be 0"
      )

  @property
  def num_layer_fragments(self) -> int:
    """Fragments of layers; one more holds the rest."""
    return self.num_layers // self.layers if self.layers else 0

  def kind(self, number: int) -> str:
    """Of fragment ``number``; the last one is not of layers."""
    if number < self.num_layer_fragments:
      return LAYERS
    return REST if self.layers else WHOLE

  def take(self, tree: Params, kind: str, number: Any, dim: int) -> Params:
    """One fragment of a tree in the shape of the parameters.

    Args:
      tree: Leaves ``[..., L, ...]`` under ``blocks``.
      kind: LAYERS, REST or WHOLE.
      number: Which fragment of layers.
      dim: Where the layers' dim is.
    """
    if kind == WHOLE:
      return tree
    if kind == REST:
      return {k: v for k, v in tree.items() if k != self.blocks}

    def take(x):
      x, at = self._split(x, dim)
      return lax.dynamic_index_in_dim(x, number, at, keepdims=False)

    return {self.blocks: jax.tree.map(take, tree[self.blocks])}

  def put(
    self, tree: Params, part: Params, kind: str, number: Any, dim: int
  ) -> Params:
    """The tree with one fragment replaced; the inverse of ``take``."""
    if kind in (REST, WHOLE):
      return tree | part

    def put(x, y):
      split, at = self._split(x, dim)
      new = lax.dynamic_update_index_in_dim(split, y, number, at)
      return new.reshape(x.shape)

    blocks = jax.tree.map(put, tree[self.blocks], part[self.blocks])
    return tree | {self.blocks: blocks}

  def _split(self, x: jax.Array, dim: int) -> tuple[jax.Array, int]:
    """The layers' dim as two, and which of them counts fragments."""
    cut = (self.num_layer_fragments, self.layers)
    cut = cut[::-1] if self.strided else cut
    split = x.reshape(*x.shape[:dim], *cut, *x.shape[dim + 1 :])
    return split, dim + self.strided


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
  """

  every: int
  optimizer: optax.GradientTransformation
  exchange: Exchange
  fragments: Fragments
  overlap: tuple[int, ...] = (0,)
  keep: float = 0.0

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
    if not 0.0 <= self.keep <= 1.0:
      raise ValueError(f"config.outer.keep={self.keep} must lie in [0, 1]")

  @property
  def period(self) -> int:
    return self.every

  @property
  def spacing(self) -> int:
    """Steps between the sends of two fragments."""
    return self.every // (self.fragments.num_layer_fragments + 1)

  @property
  def slots(self) -> int:
    """Fragments of layers that can be under way at once."""
    return -(-min(self.overlap) // self.spacing)

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
    return state | self.exchange.init(params)

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
    sends = self.sent(step) if min(self.overlap) else None
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
    sending = self._numbers(sends, step)
    static = (self.fragments.kind(sends), sending.pop("slot"))
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
    if sends is None or not min(self.overlap):
      return state
    kind, slot = sends
    delta, state = self._exchange(params, state, kind, plan.numbers["send"])
    if kind == LAYERS:
      delta = state[LAYERS] | {str(slot): delta}
    return state | {kind: delta}

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

  def _exchange(
    self, params: Params, state: State, kind: str, numbers: Any
  ) -> tuple[Params, State]:
    """The mean difference of one fragment, from the parameters as they are."""
    cut = self.fragments
    number = numbers["fragment"]
    outer = cut.take(state["params"], kind, number, 0)
    mine = cut.take(params, kind, number, 1)
    deltas = jax.tree.map(jnp.subtract, outer, mine)
    workers = state.get("workers", {})
    parts = {
      key: cut.take(tree, kind, number, 1) for key, tree in workers.items()
    }
    delta, new = self.exchange.mean(
      deltas, {"workers": parts}, numbers["exchange"]
    )
    for key, part in new.get("workers", {}).items():
      tree = cut.put(workers[key], part, kind, number, 1)
      state = state | {"workers": state["workers"] | {key: tree}}
    return delta, state

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
    outer = cut.take(state["params"], kind, number, 0)
    mine = cut.take(params, kind, number, 1)
    taus = np.broadcast_to(np.asarray(self.overlap), (self.worker.size,))
    now = jnp.asarray(taus)[worker_ids(self.worker)] == numbers["tau"]

    def mix(x, y):
      mixed = self.keep * x + (1.0 - self.keep) * y if self.keep else (
        jnp.broadcast_to(y, x.shape)
      )
      return jnp.where(now.reshape(-1, *(1,) * (x.ndim - 1)), mixed, x)

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
      total.update(self.exchange.sent_bytes(part))
    return dict(total)


def _in_shape_of(params: Params):
  """Whether something is a tree with the structure of the parameters."""
  treedef = jax.tree.structure(params)
  return lambda x: jax.tree.structure(x) == treedef
