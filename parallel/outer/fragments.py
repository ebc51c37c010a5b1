"""How Streaming DiLoCo cuts parameters: into whole layers, and a rest."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
from jax import lax

from parallel.outer.base import Params

# The kind of a fragment says which of the parameters' arrays it is cut from. A
# fragment of layers has its stack's key as its kind. Two kinds are not cut from
# a stack: all that is in no stack, and everything at once.
REST, WHOLE = "(rest)", "(whole)"


@dataclasses.dataclass(frozen=True)
class Fragments:
  """How parameters are cut into fragments.

  A stack is a top-level subtree whose leaves are stacked over equal layers.
  Fragments are numbered from 0: first those of the first stack, then those of
  the second, and so on. The last fragment has all that is in no stack.

  Attributes:
    stacks: The key and the number of layers of each stack.
    layers: Layers per fragment, which must divide the number of layers of every
      stack; 0 makes one fragment of all parameters.
    strided: Whether the f-th of a stack's n fragments has the layers f, f + n,
      f + 2 n, and so on; else its layers are neighbours.
    num_lead: How many dims a stack's arrays have before that of layers. Where
      these are stages of a pipeline, numbers of layers are those of a stage: a
      fragment has as many of each.
  """

  stacks: tuple[tuple[str, int], ...]
  layers: int
  strided: bool
  num_lead: int = 0

  def __post_init__(self) -> None:
    for key, num_layers in self.stacks:
      if self.layers < 0 or (self.layers and num_layers % self.layers):
        raise ValueError(
          f"fragment_layers={self.layers} must divide the {num_layers} layers "
          f"of {key!r}, or be 0"
        )

  @property
  def num_layer_fragments(self) -> int:
    """The number of fragments of layers; one more fragment holds the rest."""
    return sum(self._num_of(key) for key, _ in self.stacks)

  def _num_of(self, kind: str) -> int:
    """Returns the number of fragments of one stack."""
    return dict(self.stacks)[kind] // self.layers if self.layers else 0

  def first_of(self, kind: str) -> int:
    """Returns the number of the first fragment of a kind."""
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
    """Returns a fragment's kind and its place among those of its kind."""
    for kind in self.stack_kinds:
      if number < self._num_of(kind):
        return kind, number
      number -= self._num_of(kind)
    return self.last_kind, 0

  def take(self, tree: Params, kind: str, place: Any, dim: int) -> Params:
    """Returns one fragment of a tree in the structure of the parameters.

    Args:
      tree: A tree whose stacks have leaves ``[..., L, ...]``.
      kind: The fragment's kind.
      place: Its place among those of its kind; may be traced.
      dim: Which dim L is: 0 for arrays of one worker, 1 behind a worker dim.

    Returns:
      A tree with the fragment's top-level keys; a stack has leaves
      ``[..., layers, ...]``.
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
    """Returns the tree with one fragment replaced; the inverse of `take`."""
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
    """Splits the layers' dim into two, of which one counts fragments.

    A stack has n fragments. Layer l is in fragment l % n if they are strided:
    these are the columns of ``[layers, n]``. Else it is in fragment
    l // layers: these are the rows of ``[n, layers]``.

    Returns:
      The array with one more dim, and which dim counts fragments.
    """
    dim += self.num_lead
    cut = (self._num_of(kind), self.layers)
    cut = cut[::-1] if self.strided else cut
    split = x.reshape(*x.shape[:dim], *cut, *x.shape[dim + 1 :])
    return split, dim + self.strided


def fragments(
  stacks: Mapping[str, int], layers: int, strided: bool, num_lead: int = 0
) -> Fragments:
  """Cuts a model's stacks into fragments.

  Args:
    stacks: The key and the number of layers of each stack.
    layers: Layers per fragment; 0 makes one fragment of all parameters.
    strided: Whether a fragment's layers are evenly spread over its stack.
    num_lead: Dims before that of layers.
  """
  return Fragments(tuple(stacks.items()), layers, strided, num_lead)
