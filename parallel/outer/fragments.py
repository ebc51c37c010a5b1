"""Fragments of Streaming DiLoCo: groups of whole layers, and a remainder."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
from jax import lax

from parallel.outer.base import Params

# The kind of a fragment is the key of the stack that holds its layers, or one
# of these: all parameters outside the stacks, or the whole tree.
REST, WHOLE = "(rest)", "(whole)"


@dataclasses.dataclass(frozen=True)
class Fragments:
  """Partition of the parameters into fragments.

  A stack is a top-level subtree whose leaves are stacked over equal layers.
  Fragments are numbered from 0: first those of the first stack, then those of
  the second, and so on. The last fragment holds the parameters outside all
  stacks.

  Attributes:
    stacks: Key and number of layers of each stack.
    layers: Layers per fragment, which must divide the number of layers of every
      stack; 0 makes one fragment of all parameters.
    strided: Whether the f-th of a stack's n fragments holds the layers f, f +
      n, f + 2 n, and so on, rather than consecutive layers.
    num_lead: Number of dims before the layer dim in a stack's arrays. If these
      are pipeline stages, numbers of layers are per stage, and a fragment has
      that many layers of each stage.

  Raises:
    ValueError: The number of layers per fragment does not divide a stack.

  Example:
    Two strided fragments of a stack of four layers, and one of the rest.

    >>> cut = Fragments((("blocks", 4),), layers=2, strided=True)
    >>> [cut.place(number) for number in range(3)]
    [('blocks', 0), ('blocks', 1), ('(rest)', 0)]
    >>> tree = {"blocks": jax.numpy.arange(4), "embedding": 0}
    >>> cut.take(tree, "blocks", 1, dim=0)["blocks"].tolist()
    [1, 3]
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
    """Number of fragments of layers; the last fragment holds all else."""
    return sum(self._num_of(key) for key, _ in self.stacks)

  def _num_of(self, kind: str) -> int:
    """Returns the number of fragments of the stack with the key ``kind``."""
    return dict(self.stacks)[kind] // self.layers if self.layers else 0

  def first_of(self, kind: str) -> int:
    """Returns the number of a stack's first fragment.

    ``kind`` is the stack's key, or `last_kind` for the last fragment.
    """
    first = 0
    for key, _ in self.stacks:
      if key == kind:
        break
      first += self._num_of(key)
    return first

  @property
  def stack_kinds(self) -> tuple[str, ...]:
    """Keys of the stacks that are split into fragments."""
    return tuple(key for key, _ in self.stacks) if self.layers else ()

  @property
  def last_kind(self) -> str:
    """Kind of the last fragment: `REST`, or `WHOLE` if it is the only one."""
    return REST if self.layers else WHOLE

  def place(self, number: int) -> tuple[str, int]:
    """Returns a fragment's kind, and its index among those of this kind.

    The kind is the key of its stack, or `last_kind`.
    """
    for kind in self.stack_kinds:
      if number < self._num_of(kind):
        return kind, number
      number -= self._num_of(kind)  # index among the remaining kinds
    return self.last_kind, 0

  def take(self, tree: Params, kind: str, place: Any, dim: int) -> Params:
    """Returns one fragment of a tree in the structure of the parameters.

    Args:
      tree: Tree whose stacks have leaves ``[..., L, ...]``.
      kind: Key of the fragment's stack, or `last_kind`.
      place: Index among the fragments of this stack; may be traced.
      dim: Position of the layer dim L, not counting the ``num_lead`` dims: 0
        for the arrays of one worker, 1 after a worker dim.

    Returns:
      Tree with the fragment's top-level keys; a stack has leaves ``[...,
      layers, ...]``.
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
    """Returns the tree with one fragment replaced by ``part``.

    It is the inverse of `take`, whose other arguments it has.
    """
    if kind in (REST, WHOLE):
      return tree | part

    def put(x, y):
      # [..., L, ...] -> [..., n, layers, ...] and back.
      split, at = self._split(kind, x, dim)
      new = lax.dynamic_update_index_in_dim(split, y, place, at)
      return new.reshape(x.shape)

    return tree | {kind: jax.tree.map(put, tree[kind], part[kind])}

  def _split(
    self, kind: str, x: jax.Array, dim: int
  ) -> tuple[jax.Array, int]:
    """Splits the layer dim into two dims, one of which indexes fragments.

    A stack has n fragments. If they are strided, layer l belongs to fragment l
    % n, a column of ``[layers, n]``. Otherwise layer l belongs to fragment l //
    layers, a row of ``[n, layers]``.

    Returns:
      The array with one more dim, and the position of the fragment dim.
    """
    dim += self.num_lead
    cut = (self._num_of(kind), self.layers)
    # [n, layers], or [layers, n] if strided.
    cut = cut[::-1] if self.strided else cut
    split = x.reshape(*x.shape[:dim], *cut, *x.shape[dim + 1 :])
    return split, dim + self.strided


def fragments(
  stacks: Mapping[str, int], layers: int, strided: bool, num_lead: int = 0
) -> Fragments:
  """Builds the fragments of a model's stacks.

  Args:
    stacks: Key and number of layers of each stack.
    layers: Layers per fragment; 0 makes one fragment of all parameters.
    strided: Whether a fragment's layers are evenly spread over its stack.
    num_lead: Number of dims before the layer dim.
  """
  return Fragments(tuple(stacks.items()), layers, strided, num_lead)
