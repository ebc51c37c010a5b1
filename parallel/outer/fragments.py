"""How Streaming DiLoCo cuts parameters: whole layers, and a rest."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
from jax import lax

from parallel.outer.base import Params

# Kinds of fragments that are not layers of a stack: all that is in no stack,
# and everything at once. A fragment of layers has its stack's key as its kind.
REST, WHOLE = "(rest)", "(whole)"


@dataclasses.dataclass(frozen=True)
class Fragments:
  """How parameters are cut.

  A stack is a top-level subtree whose leaves are stacked over equal layers.
  Fragments are numbered: those of the first stack, of the second, and so on,
  and last all that is in no stack.

  Attributes:
    stacks: Key of each stack, and its number of layers.
    layers: Layers per fragment; divides each of these numbers. 0: one fragment
      of everything.
    strided: A stack's fragment f of n has the layers f, f + n, f + 2 n, ...;
      else consecutive ones.
  """

  stacks: tuple[tuple[str, int], ...]
  layers: int
  strided: bool

  def __post_init__(self) -> None:
    for key, num_layers in self.stacks:
      if self.layers < 0 or (self.layers and num_layers % self.layers):
        raise ValueError(
          f"fragment_layers={self.layers} must divide the {num_layers} layers "
          f"of {key!r}, or be 0"
        )

  @property
  def num_layer_fragments(self) -> int:
    """Fragments of layers; one more holds the rest."""
    return sum(self._num_of(key) for key, _ in self.stacks)

  def _num_of(self, kind: str) -> int:
    """Fragments of one stack."""
    return dict(self.stacks)[kind] // self.layers if self.layers else 0

  def first_of(self, kind: str) -> int:
    """The number of the first fragment of a kind."""
    first = 0
    for key, _ in self.stacks:
      if key == kind:
        break
      first += self._num_of(key)
    return first

  @property
  def stack_kinds(self) -> tuple[str, ...]:
    """The kinds of fragments of layers."""
    return tuple(key for key, _ in self.stacks) if self.layers else ()

  @property
  def last_kind(self) -> str:
    """The kind of the last fragment, which is not of layers."""
    return REST if self.layers else WHOLE

  def place(self, number: int) -> tuple[str, int]:
    """The kind of a fragment, and its place among those of its kind."""
    for kind in self.stack_kinds:
      if number < self._num_of(kind):
        return kind, number
      number -= self._num_of(kind)
    return self.last_kind, 0

  def take(self, tree: Params, kind: str, place: Any, dim: int) -> Params:
    """One fragment of a tree in the shape of the parameters.

    Args:
      tree: Stacks have leaves ``[..., L, ...]``.
      kind: The fragment's kind.
      place: Its place among those of its kind; may be traced.
      dim: Where the layers' dim is.

    Returns:
      A tree with a part of the keys; of a stack, leaves ``[..., layers, ...]``.
    """
    if kind == WHOLE:
      return tree
    if kind == REST:
      stacks = dict(self.stacks)
      return {k: v for k, v in tree.items() if k not in stacks}

    def take(x):
      x, at = self._split(kind, x, dim)
      return lax.dynamic_index_in_dim(x, place, at, keepdims=False)

    return {kind: jax.tree.map(take, tree[kind])}

  def put(
    self, tree: Params, part: Params, kind: str, place: Any, dim: int
  ) -> Params:
    """The tree with one fragment replaced; the inverse of ``take``."""
    if kind in (REST, WHOLE):
      return tree | part

    def put(x, y):
      split, at = self._split(kind, x, dim)
      new = lax.dynamic_update_index_in_dim(split, y, place, at)
      return new.reshape(x.shape)

    return tree | {kind: jax.tree.map(put, tree[kind], part[kind])}

  def _split(
    self, kind: str, x: jax.Array, dim: int
  ) -> tuple[jax.Array, int]:
    """The layers' dim as two, and which of them counts fragments.

    Strided fragments are columns of ``[layers, fragments]``, consecutive ones
    rows of ``[fragments, layers]``.
    """
    cut = (self._num_of(kind), self.layers)
    cut = cut[::-1] if self.strided else cut
    split = x.reshape(*x.shape[:dim], *cut, *x.shape[dim + 1 :])
    return split, dim + self.strided


def fragments(
  stacks: Mapping[str, int], layers: int, strided: bool
) -> Fragments:
  """`Fragments` of a model's stacks; see there."""
  return Fragments(tuple(stacks.items()), layers, strided)
