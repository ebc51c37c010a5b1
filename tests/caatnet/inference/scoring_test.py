"""Properties of scoring: the oracle's log-softmax on any mesh and batch."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from caatnet.inference.scoring import Scorer, _padded_lengths
from caatnet.inference.weights import make_weights
from caatnet.models.lm import losses
from caatnet.train.evaluate import make_evaluate
from parallel.axes import Axis, make_mesh
from parallel.ledger import ledger
from tests.caatnet.models import oracle
from tests.caatnet.models.transformer_test import (
  draw_params,
  make_config,
  make_program,
)

TOLERANCE = {"rtol": 2e-5, "atol": 5e-6}


class Case(NamedTuple):
  """Model on a mesh: tensor ranks, data-parallel ranks, their devices."""

  p: float
  ranks: int
  devices: int
  data: int = 1
  data_devices: int = 1
  changes: tuple[tuple[str, object], ...] = ()
  context: int = 20
  layers_apart: bool = False


# None of these is divisible by 4 ranks: all are padded.
PADDED = (("num_heads", 14), ("num_kv_heads", 7), ("width", 56),
          ("ffn_width", 41), ("vocab_size", 61))
CASES = [
  Case(1.0, 1, 1, changes=(("tied_embeddings", True),)),
  Case(0.5, 4, 2, 2, 2, context=70),  # rows are padded to 64 or to 70
  Case(0.25, 4, 4, 2, 1, changes=PADDED, layers_apart=True),
]


def draw_rows(case, lengths=None):
  """Returns rows of tokens; the longest one fills the context."""
  c = case.context
  lengths = lengths or (c + 1, 2, c - 5, 9, 1, c // 2)
  vocab = dict(case.changes).get("vocab_size", 64)
  rng = np.random.default_rng(0)
  return [rng.integers(0, vocab, length) for length in lengths]


@functools.cache
def make(case):
  """Returns a scorer of two rows per replica, with params and program."""
  config = make_config(case.p, **dict(case.changes))
  program = make_program(config, *case[1:5])
  params = draw_params(program)
  weights = make_weights(
    program, jax.tree.map(jnp.array, params), case.layers_apart, coded=False
  )
  return Scorer(program, weights, case.context, 2), params, program, weights


def expected_logits(case, rows):
  """Returns the oracle's logits of each row except its last token."""
  _, params, program, _ = make(case)
  batch = np.zeros((len(rows), case.context), int)
  for place, row in enumerate(rows):
    batch[place, : len(row) - 1] = row[:-1]
  config = program.model.config
  logits = jax.jit(
    functools.partial(oracle.rank_logits, config=config, ranks=case.ranks)
  )(params, batch)
  return [
    np.asarray(x[: len(row) - 1]) for x, row in zip(logits, rows, strict=True)
  ]


def log_softmax(logits):
  shifted = logits - logits.max(axis=-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES)
def test_scores_equal_the_log_softmax_of_the_oracle(case):
  scorer = make(case)[0]
  rows = draw_rows(case)
  logits = expected_logits(case, rows)
  # Sets the last target of each row to the greedy choice.
  for row, found in zip(rows, logits, strict=True):
    row[1:][-1:] = found[-1:].argmax(axis=-1)
  counts = []
  scores = scorer.score(rows, counts.append)
  assert sum(counts) == len(rows)
  for row, found, score in zip(rows, logits, scores, strict=True):
    targets = row[1:, None]
    expected = np.take_along_axis(log_softmax(found), targets, axis=-1)[:, 0]
    np.testing.assert_allclose(score.log_probabilities, expected, **TOLERANCE)
    np.testing.assert_array_equal(
      score.greedy, found.argmax(axis=-1) == row[1:]
    )
  assert sum(score.greedy.sum() for score in scores) >= len(rows) - 1
  assert scorer.num_compilations == (1 if case.context < 64 else 2)


@pytest.mark.parametrize("case", CASES[2:3])
def test_logits_are_gathered_without_padding_of_the_vocabulary(case):
  _, _, program, weights = make(case)
  scorer = Scorer(program, weights, 8, 2)
  rows = draw_rows(case, (6,) * 5)
  tokens = np.stack(rows)[:, :-1]
  np.testing.assert_allclose(
    scorer.logits(tokens), np.stack(expected_logits(case, rows)), **TOLERANCE
  )


@pytest.mark.parametrize("case", CASES[2:3])
def test_most_probable_tokens_are_those_of_the_oracle(case):
  """Also returns the scores, which a padded vocabulary does not change."""
  scorer = make(case)[0]
  rows = draw_rows(case)
  plain, found = scorer.score(rows), scorer.score(rows, top=True)
  for logits, one, both in zip(
    expected_logits(case, rows), plain, found, strict=True
  ):
    assert one.top is None
    np.testing.assert_allclose(
      both.log_probabilities, one.log_probabilities, **TOLERANCE
    )
    np.testing.assert_array_equal(both.greedy, one.greedy)
    order = np.argsort(-logits, axis=-1)[:, :20]
    np.testing.assert_array_equal(both.top.ids, order)
    np.testing.assert_allclose(
      both.top.logprobs,
      np.take_along_axis(log_softmax(logits), order, axis=-1), **TOLERANCE
    )


def test_longest_rows_are_scored_first_in_full_batches():
  """Two rows per replica, on two replicas."""
  scorer = make(CASES[1])[0]
  counts = []
  scorer.score([[1] * n for n in (2, 71, 1, 70, 3, 9)], counts.append)
  assert counts == [4, 2]
  assert scorer.score([]) == []


def test_order_and_batch_of_rows_do_not_change_scores():
  few, _, program, weights = make(CASES[1])
  rows = draw_rows(CASES[1])
  many = Scorer(program, weights, 70, 6)
  straight, reverse = few.score(rows), few.score(rows[::-1])[::-1]
  for one, *others in zip(straight, reverse, many.score(rows), strict=True):
    for other in others:
      np.testing.assert_allclose(
        one.log_probabilities, other.log_probabilities, **TOLERANCE
      )
      np.testing.assert_array_equal(one.greedy, other.greedy)


def test_scores_sum_to_the_loss_of_an_evaluation():
  scorer, _, program, weights = make(CASES[1])
  windows = np.stack(draw_rows(CASES[1], (71,) * 6))
  found = make_evaluate(program, 4)(weights.params, windows)
  total = sum(s.log_probabilities.sum() for s in scorer.score(windows))
  np.testing.assert_allclose(total, -found.loss * 6 * 70, rtol=1e-6)


def test_scores_send_one_number_per_token_more_than_a_loss():
  _, _, program, weights = make(CASES[1])
  batch = jax.ShapeDtypeStruct((6, 9), jnp.int32)
  model, mesh = program.model, program.layout.mesh

  def sent(score):
    mapped = jax.shard_map(
      score, mesh=mesh, in_specs=(weights.specs, P("data")),
      out_specs=P("data"),
    )
    lowered = jax.jit(mapped).lower(weights.params, batch)
    return ledger.total(ledger.collectives(lowered, mesh), axis="tensor")

  rows = 6 // 2  # per device
  assert sent(model.target_scores) - sent(model.scores) == 4 * rows * 8
  assert sent(model.scores) > 0


@pytest.mark.quick
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_greedy_choice_is_that_of_argmax(devices):
  """Draws few values, so that the largest logit is seldom unique."""
  axis = Axis("tensor", 4, devices)
  rng = np.random.default_rng(0)
  logits = rng.integers(0, 3, (4, 5, 40, 3)).astype(np.float32)
  logits[3, :, :, 1:] = -np.inf  # a vocabulary of 10 tokens
  whole = np.moveaxis(logits, 0, 2).reshape(5, 40, 12)
  choice = whole.argmax(axis=-1)
  tokens = np.where(rng.random((5, 40)) < 0.5, choice,
                    rng.integers(0, 10, (5, 40)))

  def judge(logits, token_ids, tokens):
    return losses.target_scores(
      logits, losses.Targets(tokens, token_ids, "tensor")
    )

  cut = P("tensor")
  scores = jax.jit(jax.shard_map(
    judge, mesh=make_mesh({"tensor": axis}), in_specs=(cut, cut, P()),
    out_specs=P(),
  ))(logits, np.arange(12).reshape(4, 3), tokens)
  np.testing.assert_array_equal(scores["greedy"], choice == tokens)
  expected = np.take_along_axis(log_softmax(whole), tokens[..., None], -1)
  np.testing.assert_allclose(
    scores["log_probability"], expected[..., 0], **TOLERANCE
  )


@pytest.mark.parametrize(
  ("context", "platform", "lengths"),
  [(70, "cpu", [64, 70]), (64, "gpu", [64]), (8, "gpu", [8]),
   (8, "tpu", [128]), (512, "cpu", [64, 128, 256, 512]),
   (300, "tpu", [128, 256, 384]), (512, "tpu", [128, 256, 512])],
)
def test_padded_rows_have_few_lengths(context, platform, lengths):
  assert _padded_lengths(context, platform) == lengths


@pytest.mark.parametrize(
  ("row", "message"),
  [([], "a row has 0 tokens"), ([0] * 72, "72 tokens; it must have 1 to 71"),
   ([3, 64], "token 64 must lie in .0, config.model.vocab_size=64"),
   ([-1, 3], "token -1")],
)
def test_rows_that_the_model_cannot_read_are_refused(row, message):
  with pytest.raises(ValueError, match=message):
    make(CASES[1])[0].score([[1, 2], row])


def test_nan_logits_of_a_diverged_model_raise():
  _, _, program, weights = make(CASES[0])
  broken = weights.params | {"norm": jnp.nan * weights.params["norm"]}
  broken = jax.device_put(broken, program.layout.shardings(weights.specs))
  scorer = Scorer(
    program, dataclasses.replace(weights, params=broken), CASES[0].context, 2
  )
  with pytest.raises(ValueError, match="logits of the model are NaN"):
    scorer.score([[1, 2, 3]])
