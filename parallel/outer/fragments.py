"""How Streaming DiLoCo cuts parameters: whole layers, and a rest."""

import dataclasses
from typing import Any

import jax
from jax import lax

from parallel.outer.base import Params

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
