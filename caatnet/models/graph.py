"""Graph networks on sampled neighbourhoods: GCN and GraphSAGE.

An example is a node with a tree of its neighbours, their neighbours and so on,
one level per layer (`caatnet.data.graphs.sampling`). Layer l = 0, 1, ...
computes new states h_v of the nodes v of all levels except the last l + 1, from
the states h_u of their children u and from node degrees d:

    GraphSAGE, mean (Hamilton et al., arXiv 1706.02216, algorithm 2)
      h_v = W_self h_v + W_neighbours mean over u of h_u + b
    GCN (Kipf and Welling, arXiv 1609.02907, equation 2)
      h_v = W (h_v / (d_v + 1) + sum of h_u / sqrt((d_v + 1)(d_u + 1))) + b

with a ReLU after all layers except the last. If a node has more neighbours than
the fanout, GCN multiplies the sum over the sample by d_v / (sample size), an
unbiased estimate of the full sum. A node without neighbours has a sum of 0.
Deviation: GraphSAGE's normalisation to unit length and dropout are left out.

States are computed separately for each example, even if two examples share a
node. So shapes are static, examples are independent, and they are split over
data-parallel ranks and microbatches as in any other model.

Shape legend: B = batch, P = tree positions of a level, K = children of a
position, T = positions of all levels, F = features of a position.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp

from caatnet.models import classes
from caatnet.models.access import DEFAULT_ACCESS, Access
from caatnet.models.modules import SequentialModel
from caatnet.models.protocol import PipelineParts
from parallel.axes import Axis


class Sage(nnx.Module):
  """GraphSAGE layer with the mean aggregator."""

  def __init__(
    self, inputs: int, outputs: int, dtype: str, rngs: nnx.Rngs
  ) -> None:
    self.own = nnx.Linear(inputs, outputs, dtype=dtype, rngs=rngs)
    self.neighbours = nnx.Linear(
      inputs, outputs, use_bias=False, dtype=dtype, rngs=rngs
    )

  def __call__(
    self, x: jax.Array, below: jax.Array, degree: jax.Array, _: jax.Array
  ) -> jax.Array:
    """Returns new states of a level, ``[B, P, outputs]``.

    Args:
      x: States of the level, ``[B, P, F]``.
      below: States of its children, ``[B, P, K, F]``.
      degree: Node degrees of the level, int32 ``[B, P]``.
      _: Node degrees of its children, which the mean does not use.
    """
    there, count = _mask_children(degree, below.shape[2])
    total = jnp.sum(jnp.where(there[..., None], below, 0), axis=2)
    mean = total / jnp.maximum(count, 1)[..., None].astype(x.dtype)
    return self.own(x) + self.neighbours(mean)


class Gcn(nnx.Module):
  """Layer of a graph convolutional network (GCN)."""

  def __init__(
    self, inputs: int, outputs: int, dtype: str, rngs: nnx.Rngs
  ) -> None:
    self.linear = nnx.Linear(inputs, outputs, dtype=dtype, rngs=rngs)

  def __call__(
    self, x: jax.Array, below: jax.Array, degree: jax.Array,
    degree_below: jax.Array,
  ) -> jax.Array:
    """Returns new states of a level; see `Sage`.

    Args:
      x: States of the level, ``[B, P, F]``.
      below: States of its children, ``[B, P, K, F]``.
      degree: Node degrees of the level, int32 ``[B, P]``.
      degree_below: Node degrees of its children, int32 ``[B, P, K]``.
    """
    there, count = _mask_children(degree, below.shape[2])
    # The factor degree / count makes the sum over sampled children unbiased.
    share = degree / jnp.maximum(count, 1) / jnp.sqrt(degree + 1.0)
    weight = jnp.where(
      there, share[..., None] * lax.rsqrt(degree_below + 1.0), 0
    )
    near = jnp.einsum("bpk,bpkf->bpf", weight.astype(x.dtype), below)
    own = x / (degree + 1).astype(x.dtype)[..., None]
    return self.linear(own + near)


def _mask_children(degree: jax.Array, places: int) -> tuple[
  jax.Array, jax.Array
]:
  """Returns the mask of existing children and their number.

  Args:
    degree: int32 ``[B, P]``.
    places: K, the positions for children.

  Returns:
    bool ``[B, P, K]``, and int32 ``[B, P]``.
  """
  there = jnp.arange(places)[None, None] < degree[..., None]
  return there, jnp.minimum(degree, places)


LAYERS = {"sage": Sage, "gcn": Gcn}


@dataclasses.dataclass(frozen=True)
class GraphModel(SequentialModel):
  """Graph network as a `caatnet.models.protocol.Model`.

  An example is ``{"features": float32 [T, F], "degree": int32 [T], "label":
  int}``. The number of layers equals the number of levels of neighbours.

  Attributes:
    layer: The kind of layer, a key of ``LAYERS``.
    num_features: The features of a node.
    num_classes: The number of classes; labels are 0 to num_classes - 1.
    fanouts: The number of sampled neighbours per node of each level.
    width: The channels of hidden states.
    dtype: The dtype of activations; parameters are float32.
    tensor: The tensor axis, which has one rank.
  """

  layer: str
  num_features: int
  num_classes: int
  fanouts: tuple[int, ...]
  width: int
  dtype: str
  tensor: Axis

  @functools.cached_property
  def _level_sizes(self) -> tuple[int, ...]:
    """Number of tree positions of each level, beginning with the root."""
    return tuple(
      math.prod(self.fanouts[:level]) for level in range(len(self.fanouts) + 1)
    )

  def _makers(self) -> dict[str, Any]:
    # Input channels of the first layer, then output channels of each layer.
    widths = [
      self.num_features, *[self.width] * (len(self.fanouts) - 1),
      self.num_classes,
    ]
    return {
      f"layer_{i}": functools.partial(LAYERS[self.layer], a, b, self.dtype)
      for i, (a, b) in enumerate(itertools.pairwise(widths))
    }

  def scores(
    self, params: Any, batch: Any, access: Access = DEFAULT_ACCESS
  ) -> dict[str, jax.Array]:
    """Returns "loss" in nats and "accuracy", 0 or 1, float32 ``[B]`` each."""
    degree = batch["degree"]
    x = access.apply(
      lambda _, features: features.astype(self.dtype), None, batch["features"]
    )
    for number in range(len(self.fanouts)):
      x = access.apply(
        self._layer_function(number), params[f"layer_{number}"], x, degree
      )
    return access.apply(self._compute_scores, None, x, batch["label"])

  def parts(self) -> PipelineParts:
    raise ValueError(
      f"layer={self.layer!r}: each layer reads one level less than the "
      "previous one, so layers cannot be split into pipeline stages; "
      "parallel.stage must be 1"
    )

  def _layer_function(self, number: int) -> Any:
    """Returns a layer as a function ``(params, states, degree) -> states``.

    Input states are ``[B, positions of the first levels, F]``; the output lacks
    the last of these levels.
    """
    graph, last = self._graphdefs[f"layer_{number}"], len(self.fanouts) - 1
    # End of each level in the dim of all positions T.
    ends = [sum(self._level_sizes[: level + 1]) for level in range(last + 2)]

    def run(params: Any, x: jax.Array, degree: jax.Array) -> jax.Array:
      layer, new = nnx.merge(graph, params), []
      for level in range(last + 1 - number):
        # Positions of this level, and of its children.
        here = slice(ends[level] - self._level_sizes[level], ends[level])
        under = slice(ends[level], ends[level + 1])
        children = self._level_sizes[level], self.fanouts[level]
        y = layer(
          x[:, here], x[:, under].reshape(-1, *children, x.shape[2]),
          degree[:, here], degree[:, under].reshape(-1, *children),
        )
        new.append(y if number == last else jax.nn.relu(y))
      return jnp.concatenate(new, axis=1)

    return run

  def _compute_scores(
    self, _: None, logits: jax.Array, labels: jax.Array
  ) -> dict[str, jax.Array]:
    """Computes scores of logits ``[B, 1, classes]`` given labels ``[B]``."""
    return classes.scores(logits[:, 0], labels, self.tensor)

  def flops(self, example: Any) -> float:
    """Returns the training FLOPs of an example.

    These are 6 FLOPs for each weight matrix element and tree position.
    """
    shapes = jax.eval_shape(self.init, jax.random.key(0))
    total = 0.0
    for number in range(len(self.fanouts)):
      places = sum(self._level_sizes[: len(self.fanouts) - number])
      total += 6 * places * sum(
        x.size for path, x in jax.tree.leaves_with_path(
          shapes[f"layer_{number}"]
        ) if path[-1].key == "kernel"
      )
    return total
