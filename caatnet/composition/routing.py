"""Training and evaluation of a router, which classifies prompts by kind."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from caatnet.serving.router import Router, features

# Lengths of training and test prompts in bytes.
LENGTHS = (16, 32, 64, 128, 256, 512)
_NUM_TEST_PROMPTS = 64  # test prompts per kind and length
_LEARNING_RATE = 0.1
_WEIGHT_DECAY = 1e-2


def train_router(
  documents: Mapping[str, Sequence[bytes]],
  num_prompts: int,
  num_buckets: int,
  num_steps: int,
  seed: int,
) -> Router:
  """Returns a router, which classifies prompts by kind of text.

  The loss is the cross-entropy over all training prompts in every step.

  Args:
    documents: Training documents of each kind, from which prompts are cut.
    num_prompts: Number of training prompts of each kind, over all `LENGTHS`.
    num_buckets: Number of hash buckets, each of which is a feature.
    num_steps: Number of steps of Adam.
    seed: Determines the prompts.
  """
  kinds = tuple(documents)
  generator = np.random.default_rng(seed)
  found, labels = [], []
  for label, kind in enumerate(kinds):
    for index in range(num_prompts):
      length = LENGTHS[index % len(LENGTHS)]
      prompt = draw_excerpt(documents[kind], length, generator)
      found.append(features(prompt, num_buckets))
      labels.append(label)
  x, y = jnp.asarray(np.stack(found)), jnp.asarray(labels)
  optimizer = optax.adamw(_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)
  params = (
    jnp.zeros((num_buckets, len(kinds))), jnp.zeros((1, len(kinds)))
  )

  def loss(params):
    logits = x @ params[0] + params[1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

  def step(carry, _):
    params, state = carry
    updates, state = optimizer.update(jax.grad(loss)(params), state, params)
    return (optax.apply_updates(params, updates), state), None

  train = jax.jit(lambda carry: jax.lax.scan(step, carry, None, num_steps)[0])
  weights, bias = jax.device_get(train((params, optimizer.init(params)))[0])
  return Router(kinds, weights, bias[0])


def accuracy(
  router: Router, documents: Mapping[str, Sequence[bytes]], seed: int
) -> dict[int, dict[str, float]]:
  """Returns the fraction of correctly routed prompts by length and kind.

  Args:
    router: The router.
    documents: Held-out documents of each kind.
    seed: Determines the prompts.
  """
  generator = np.random.default_rng(seed)
  return {
    length: {
      kind: float(np.mean([
        router.kind(draw_excerpt(documents[kind], length, generator)) == kind
        for _ in range(_NUM_TEST_PROMPTS)
      ]))
      for kind in router.kinds
    }
    for length in LENGTHS
  }


def draw_excerpt(
  documents: Sequence[bytes], length: int, generator: np.random.Generator
) -> bytes:
  """Returns a part of a document at a random position.

  Args:
    documents: The documents; each is drawn with a probability proportional to
      its length.
    length: Length of the part in bytes; shorter documents are taken whole.
    generator: Source of randomness.
  """
  sizes = np.cumsum([len(x) for x in documents])
  document = documents[
    int(np.searchsorted(sizes, generator.integers(sizes[-1]), "right"))
  ]
  start = int(generator.integers(max(1, len(document) - length + 1)))
  return document[start : start + length]
