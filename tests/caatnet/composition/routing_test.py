"""Training of routers on planted kinds."""

import random

import numpy as np

from caatnet.composition import routing

ALPHABETS = {"a": "abcdefgh", "b": "efghijkl", "c": "ghijklmn"}


def texts(seed):
  """Kinds whose alphabets overlap."""
  generator = random.Random(seed)
  return {
    kind: [
      "".join(generator.choices(letters, k=600)).encode() for _ in range(6)
    ]
    for kind, letters in ALPHABETS.items()
  }


def test_router_separates_planted_kinds_better_with_longer_prompts():
  router = routing.train_router(texts(0), 512, 64, 100, seed=0)
  found = routing.accuracy(router, texts(1), seed=0)
  means = [float(np.mean([*row.values()])) for row in found.values()]
  assert means[0] > 0.6  # chance is 1/3
  assert min(means[3:]) > 0.95
  assert list(found) == [16 * 2**i for i in range(6)]
  # Shares of 64 prompts.
  assert all((64 * x).is_integer() for row in found.values()
             for x in row.values())
  again = routing.train_router(texts(0), 512, 64, 100, seed=0)
  assert again.weights.tobytes() == router.weights.tobytes()
  other = routing.train_router(texts(0), 512, 64, 100, seed=1)
  assert other.weights.tobytes() != router.weights.tobytes()


def test_router_of_one_prompt_of_each_kind_knows_it():
  texts = {"a": b"def f(x):", "b": b"Once upon", "c": b"{'k': 1}"}
  router = routing.train_router(
    {kind: [text] for kind, text in texts.items()}, 1, 512, 100, seed=0
  )
  assert {kind: router.kind(text) for kind, text in texts.items()} == {
    kind: kind for kind in texts
  }


def test_router_without_information_is_as_good_as_chance():
  same = dict.fromkeys("abc", texts(0)["a"])
  router = routing.train_router(same, 512, 64, 100, seed=0)
  found = routing.accuracy(router, dict.fromkeys("abc", texts(1)["a"]), seed=0)
  means = [float(np.mean([*row.values()])) for row in found.values()]
  assert 0.2 < np.mean(means) < 0.47


def test_prompt_is_a_part_of_a_document():
  generator = np.random.default_rng(0)
  documents = [b"abcdef", b"x"]
  found = {routing.draw_excerpt(documents, 3, generator) for _ in range(300)}
  assert found == {b"abc", b"bcd", b"cde", b"def", b"x"}
