"""The best that can be known of labels in planted communities.

In `caatnet.data.graphs.builders.communities` each node draws neighbours and
features on its own account, given its community. So what a model sees of a node
v, a tree of sampled neighbours and their features, has a likelihood that goes
from the leaves to the root (belief propagation):

    log P(tree of v | c) = log N(x_v; mean_c, 1)
                         + sum over children u of log sum_c' T[c, c'] P(u | c')

with T the probability that a neighbour of a node in c is in c'. The community
with the largest one is Bayes' rule: no function of the same tree is right more
often, but for the few trees in which a node is twice.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from caatnet.data.graphs.builders import class_means


def accuracy(
  features: np.ndarray,
  ids: np.ndarray,
  degrees: np.ndarray,
  labels: np.ndarray,
  fanouts: tuple[int, ...],
  meta: Mapping[str, Any],
  depth: int | None = None,
) -> float:
  """Returns the share of nodes whose label Bayes' rule finds.

  Args:
    features: Those of all nodes of the graph, float32 ``[N, F]``.
    ids: A tree for each node, as `caatnet.data.graphs.sampling` has it, int
      ``[B, T]``.
    degrees: int ``[B, T]``.
    labels: int ``[B]``.
    fanouts: Neighbours of each level of the trees.
    meta: That of a graph of planted communities.
    depth: The levels of neighbours that are looked at; None for all, 0 for a
      node's own features alone.
  """
  made, num_classes = meta["generator"], meta["num_classes"]
  if made["name"] != "communities":
    raise ValueError(f"{made['name']} has no bound on accuracy")
  means = class_means(
    num_classes, features.shape[1], made["signal"], made["seed"]
  ).astype(np.float64)
  # The square of x is the same for all communities, and left out.
  known, places = np.unique(ids, return_inverse=True)
  evidence = features[known] @ means.T - np.square(means).sum(axis=1) / 2
  evidence = evidence[places.reshape(ids.shape)]  # [B, T, K]
  others = (1 - made["inside"]) / (num_classes - 1)
  transition = np.full((num_classes, num_classes), others)
  np.fill_diagonal(transition, made["inside"])
  starts = np.cumsum([0, *np.cumprod([1, *fanouts])])
  depth = len(fanouts) if depth is None else depth
  belief = evidence[:, starts[depth] : starts[depth + 1]]
  for level in reversed(range(depth)):
    parents = slice(starts[level], starts[level + 1])
    fanout = fanouts[level]
    top = belief.max(axis=-1, keepdims=True)
    message = np.log(np.exp(belief - top) @ transition) + top
    message = message.reshape(len(message), -1, fanout, num_classes)
    there = np.arange(fanout) < degrees[:, parents, None]
    message = np.where(there[..., None], message, 0).sum(axis=2)
    belief = evidence[:, parents] + message
  return float((belief[:, 0].argmax(axis=1) == labels).mean())
