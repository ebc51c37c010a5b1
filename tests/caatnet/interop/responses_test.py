"""Responses to lm-evaluation-harness, against sums of log-softmax by hand.

`tests/eval` compares them with the harness.
"""

import functools
import importlib.util
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from caatnet.inference.requests import Completion
from caatnet.inference.scoring import Scorer
from caatnet.inference.stops import Stops
from caatnet.inference.weights import make_weights
from caatnet.interop import harness
from caatnet.interop.responses import Responder, _windows
from caatnet.train.evaluate import make_evaluate
from tests.caatnet.models import oracle
from tests.caatnet.models.transformer_test import (
  draw_params,
  make_config,
  make_program,
)

CONTEXT, RANKS = 12, 2
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


class Characters:
  """Tokenizer of characters, with tokens for "th" and " t"."""

  start_ids: tuple[int, ...] = ()
  stop_ids = (0,)
  separator: int | None = 0

  def encode(self, text):
    tokens = []
    while text:
      pair = {"th": 1, " t": 2}.get(text[:2])
      tokens.append(ord(text[0]) if pair is None else pair)
      text = text[1 if pair is None else 2 :]
    return tokens


class Opened(Characters):
  """Tokenizer that starts prompts with the token 3."""

  start_ids = (3,)


class OpenedTwice(Characters):
  """Tokenizer that starts prompts with the tokens 5 and 4."""

  start_ids = (5, 4)


@functools.cache
def make():
  config = make_config(0.5, vocab_size=127)
  program = make_program(config, RANKS, 2)
  params = draw_params(program)
  weights = make_weights(
    program, jax.tree.map(jnp.array, params), apart=True, coded=False
  )
  return Scorer(program, weights, CONTEXT, 3), program, params


def responder(tokenizer=Characters, generate=None):
  return Responder(make()[0], tokenizer(), generate)


def ask(*args):
  return types.SimpleNamespace(args=args)


def logits(tokens):
  """Returns the oracle's logits after each token; padded to one length."""
  _, program, params = make()
  padded = np.zeros((1, CONTEXT), int)
  padded[0, : len(tokens)] = tokens
  found = _oracle(program.model.config)(params, padded)
  return np.asarray(found, np.float64)[0, : len(tokens)]


@functools.cache
def _oracle(config):
  return jax.jit(
    functools.partial(oracle.rank_logits, config=config, ranks=RANKS)
  )


def by_hand(row, num_targets):
  """Returns the summed log-softmax of the targets, and if all are argmax."""
  found, targets = logits(row[:-1])[-num_targets:], row[-num_targets:]
  log_p = found - np.log(np.exp(found).sum(axis=-1, keepdims=True))
  total = log_p[np.arange(num_targets), targets].sum()
  return total, bool((found.argmax(axis=-1) == targets).all())


def o(text):
  return [ord(c) for c in text]


# (context, continuation, tokenizer, windows of tokens with their targets).
PAIRS = [
  ("ab", "cde", Characters, [(o("abcde"), 3)]),
  ("ab", "cde", Opened, [([3, *o("abcde")], 3)]),
  # Trailing spaces move to the continuation, and merge with its tokens.
  ("a  ", "to", Characters, [([*o("a "), 2, *o("o")], 3)]),
  # A token across the border belongs to the context.
  ("at", "he", Characters, [([*o("a"), 1, *o("e")], 1)]),
  # Without a context, the start token is prepended, unless the text has it.
  ("", "abc", Characters, [([0, *o("abc")], 3)]),
  ("", "abc", Opened, [([3, *o("abc")], 3)]),
  # The last start token precedes a text.
  ("ab", "cde", OpenedTwice, [([5, 4, *o("abcde")], 3)]),
  ("", "abc", OpenedTwice, [([4, *o("abc")], 3)]),
  ("", "\0bc", Characters, [([0, *o("bc")], 2)]),
  ("  ", "b", Characters, [([0, *o("  b")], 3)]),
  # No target: log-probability 0.
  ("ab", "", Characters, []),
  ("", "", Characters, []),
  # A context that is too long is cut at its start.
  ("abcdefghijklmno", "pq", Characters, [(o("efghijklmnopq"), 2)]),
  ("abcdefghijkl", "mn", Characters, [(o("bcdefghijklmn"), 2)]),
  ("abcdefghijk", "lm", Characters, [(o("abcdefghijklm"), 2)]),
  ("a", "bcdefghijklm", Characters, [(o("abcdefghijklm"), 12)]),
  # A continuation that does not fit is scored in windows.
  ("xya", "bcdefghijklmnop", Characters,
   [(o("abcdefghijklm"), 12), (o("defghijklmnop"), 3)]),
]


def test_loglikelihoods_equal_sums_by_hand():
  for tokenizer in (Characters, Opened, OpenedTwice):
    rows = [row for row in PAIRS if row[2] is tokenizer]
    adapter = responder(tokenizer)
    found = adapter.loglikelihood([ask(*row[:2]) for row in rows])
    assert adapter.num_cut == (3 if tokenizer is Characters else 0)
    for (*pair, _, windows), (total, greedy) in zip(rows, found, strict=True):
      parts = [by_hand(*window) for window in windows]
      expected = sum(part for part, _ in parts)
      np.testing.assert_allclose(total, expected, **TOLERANCE, err_msg=pair)
      assert greedy == all(part for _, part in parts)
      assert type(total) is float
      assert type(greedy) is bool


def test_continuation_is_greedy_if_each_token_is():
  text = o("ab")
  while len(text) < 8:  # the model's own continuation, one character a token
    text.append(int(logits(text)[-1].argmax()))
  texts = ["".join(map(chr, text))]
  # Changes the token at one place.
  texts += [texts[0][:n] + "~" + texts[0][n + 1 :] for n in (2, 4, 7)]
  encode = Characters().encode
  assert encode(texts[0]) == text
  found = responder().loglikelihood([ask("ab", text[2:]) for text in texts])
  assert [greedy for _, greedy in found] == [True, False, False, False]


def test_order_of_requests_does_not_change_results():
  requests = [ask(*row[:2]) for row in PAIRS]
  straight = responder().loglikelihood(requests)
  backward = responder().loglikelihood(requests[::-1])[::-1]
  np.testing.assert_allclose(straight, backward, **TOLERANCE)
  assert make()[0].num_compilations == 1


@pytest.mark.parametrize("num_context", [1, 2, 5, 20])
def test_windows_score_each_token_once(num_context):
  for count in range(40):
    tokens = list(range(num_context + count))
    windows = list(
      _windows(tokens[:num_context], tokens[num_context:], CONTEXT)
    )
    scored = [t for w in windows for t in w.tokens[-w.num_targets :]]
    assert scored == tokens[num_context:]
    for window in windows:
      first = window.tokens[0]
      assert window.tokens == tokens[first : first + len(window.tokens)]
      assert window.num_targets < len(window.tokens) <= CONTEXT + 1
      assert len(window.tokens) == CONTEXT + 1 or first == 0


def test_rolling_loglikelihood_has_no_context():
  texts = ["", "a", "abcdefghijkl", "abcdefghijklmnopqrstuvwxyz"]
  windows = [
    [], [([0, *o("a")], 1)], [([0, *o(texts[2])], 12)],
    [([0, *o(texts[2])], 12), (o(texts[3][11:24]), 12),
     (o(texts[3][13:]), 2)],
  ]
  found = responder().loglikelihood_rolling([ask(text) for text in texts])
  expected = [sum(by_hand(*w)[0] for w in several) for several in windows]
  np.testing.assert_allclose(found, expected, **TOLERANCE)


def test_loglikelihoods_sum_to_the_loss_of_an_evaluation():
  _, program, params = make()
  rng = np.random.default_rng(0)
  windows = rng.integers(ord("!"), 127, (5, CONTEXT + 1))
  windows[windows == ord("t")] = ord("s")  # neither "th" nor " t"
  texts = ["".join(map(chr, row)) for row in windows]
  found = responder().loglikelihood([ask(t[0], t[1:]) for t in texts])
  loss = make_evaluate(program, 3)(params, windows).loss
  total = sum(log_p for log_p, _ in found)
  np.testing.assert_allclose(total, -loss * 5 * CONTEXT, rtol=1e-6)


# Arguments of a task -> stops and settings of the request.
WAYS = [
  ({"until": "\n"}, {"max_gen_toks": 8}, Stops(8, {0}, ("\n",)), {}),
  ({"until": ["a", ""]}, {"max_new_tokens": 3}, Stops(3, {0}, ("a",)), {}),
  ({"temperature": 0.5, "top_p": 0.9}, {"max_tokens": 2}, Stops(2, {0}),
   {"temperature": 0.5, "top_p": 0.9}),
  ({"do_sample": False, "temperature": 0.5, "num_beams": 1},
   {"max_gen_toks": 2}, Stops(2, {0}), {"temperature": 0.0}),
  ({"do_sample": True, "top_k": 4, "min_p": 0.1}, {"max_gen_toks": 2},
   Stops(2, {0}), {"temperature": 1.0, "top_k": 4, "min_p": 0.1}),
  # The first name of the length applies; a prompt of one token fits.
  ({"max_tokens": 3, "max_new_tokens": 11}, {"max_completion_tokens": 2},
   Stops(11, {0}), {}),
  ({"max_gen_toks": 8, "temperature": None}, {"max_new_tokens": 3},
   Stops(8, {0}), {}),
]


@pytest.mark.parametrize(("how", "number", "stops", "settings"), WAYS)
def test_generation_request_is_parsed(how, number, stops, settings):
  asked = []

  def generate(requests):
    asked.extend(requests)
    return [
      Completion(f"answer {len(request.prompt)}", (), (), "max_tokens")
      for request in requests
    ]

  room = CONTEXT - stops.max_tokens
  texts = ("abcdefghijklmnopq", "abcdefghijklmnopq"[: room - 1], "")
  adapter = responder(Opened, generate)
  found = adapter.generate_until([ask(text, how | number) for text in texts])
  assert found == [f"answer {n}" for n in (room, room, 1)]
  assert adapter.num_cut == 1
  assert [request.prompt for request in asked] == [
    tuple([3, *o(text)][-room:]) for text in texts
  ]
  assert [request.seed for request in asked] == [0, 1, 2]
  for request in asked:
    assert request.stops == stops
    expected = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert {k: getattr(request, k) for k in expected} == expected | settings


@pytest.mark.parametrize(
  ("how", "message"),
  [({"num_beams": 4}, "num_beams.: 4.*beams"),
   ({"penalty": 1.2, "max_gen_toks": 1}, "penalty.*not supported"),
   ({}, "256 tokens, which leaves no room .* context of 12"),
   ({"max_gen_toks": 12}, "12 tokens, which leaves no room")],
)
def test_unsupported_generation_is_refused(how, message):
  with pytest.raises(ValueError, match=message):
    responder().generate_until([ask("ab", how)])


def test_progress_is_shown_on_a_terminal_and_removed(monkeypatch, capsys):
  monkeypatch.setenv("FORCE_COLOR", "1")  # counts as a terminal
  assert len(responder().loglikelihood([ask("ab", "cd")] * 5)) == 5
  printed = capsys.readouterr()
  assert not printed.out
  _, shown, after = printed.err.rpartition("scoring")
  assert shown
  assert "100%" in after
  assert after.endswith("\x1b[2K")  # erases the line
  monkeypatch.delenv("FORCE_COLOR")
  responder().loglikelihood([ask("ab", "cd")])
  assert not capsys.readouterr().err


def test_empty_context_needs_a_start_token():
  class Bare(Characters):
    stop_ids, separator = (), None

  assert responder(Bare).loglikelihood([ask("ab", "c")])
  with pytest.raises(ValueError, match="must have a token that can precede a"):
    responder(Bare).loglikelihood([ask("", "c")])


@pytest.mark.skipif(
  importlib.util.find_spec("lm_eval") is not None, reason="it is installed"
)
def test_missing_extra_is_named():
  with pytest.raises(ValueError, match=r"caatnet\[eval\]"):
    harness.evaluate(responder(), ["sums"])
