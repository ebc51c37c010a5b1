"""Bayes-optimal accuracy of labels in graphs of planted communities.

In `caatnet.data.graphs.builders.communities` each node draws neighbours and
features independently, given its community. So the input of a model for node v,
a tree of sampled neighbours and their features, has a likelihood that is
computed from the leaves to the root (belief propagation):

    log P(tree of v | c) = log N(x_v; mean_c, 1)
                         + sum over children u of log sum_c' T[c, c'] P(u | c')

with T[c, c'] the probability that a neighbour of a node in community c is in
community c', and N(x; m, 1) the normal density of mean m. Bayes' rule selects
the community with the largest likelihood. No function of the same tree has a
higher expected accuracy, except for the few trees in which a node occurs twice.
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
  """Returns the accuracy of Bayes' rule.

  Args:
    features: Features of all nodes of the graph, float32 ``[N, F]``.
    ids: Node ids of each root's tree, int ``[B, T]``, in the layout of
      `caatnet.data.graphs.sampling`.
    degrees: Node degrees of the trees, int ``[B, T]``.
    labels: Labels of the roots, int ``[B]``.
    fanouts: Neighbours per node of each level of the trees.
    meta: Metadata of a graph of planted communities.
    depth: The number of levels of neighbours to use; None for all, 0 for the
      root's features only.

  Raises:
    ValueError: If the graph has no planted communities.
  """
  made, num_classes = meta["generator"], meta["num_classes"]
  if made["name"] != "communities":
    raise ValueError(
      f"the graph {made['name']} has no accuracy bound; only graphs of planted "
      "communities have one"
    )
  means = class_means(
    num_classes, features.shape[1], made["signal"], made["seed"]
  ).astype(np.float64)
  # log N(x; mean_c, 1) without the terms that are equal for all communities.
  known, places = np.unique(ids, return_inverse=True)
  evidence = features[known] @ means.T - np.square(means).sum(axis=1) / 2
  evidence = evidence[places.reshape(ids.shape)]  # [B, T, communities]
  others = (1 - made["inside"]) / (num_classes - 1)
  transition = np.full((num_classes, num_classes), others)
  np.fill_diagonal(transition, made["inside"])
  # First position of each level in the dim T.
  starts = np.cumsum([0, *np.cumprod([1, *fanouts])])
  depth = len(fanouts) if depth is None else depth
  belief = evidence[:, starts[depth] : starts[depth + 1]]
  for level in reversed(range(depth)):
    parents = slice(starts[level], starts[level + 1])
    fanout = fanouts[level]
    top = belief.max(axis=-1, keepdims=True)  # for a stable log-sum-exp
    message = np.log(np.exp(belief - top) @ transition) + top
    message = message.reshape(len(message), -1, fanout, num_classes)
    # Padding contributes no evidence.
    there = np.arange(fanout) < degrees[:, parents, None]
    message = np.where(there[..., None], message, 0).sum(axis=2)
    belief = evidence[:, parents] + message
  return float((belief[:, 0].argmax(axis=1) == labels).mean())
