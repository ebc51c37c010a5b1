"""Log-probabilities of the server: those of the model's whole distribution.

The reference is a log-softmax of logits without a cache, whatever the
temperature. One token of the small model is one character.
"""

from concurrent import futures
import functools
import itertools
import threading
import time

import numpy as np
import openai
import pytest
from scipy import special

from caatnet.inference.sampling import NUM_TOP_TOKENS
from caatnet.inference.scoring import Scorer
from tests.caatnet.serving import small_server
from tests.caatnet.serving.small_server import CONTEXT, LETTERS

TOLERANCE = {"rtol": 0, "atol": 2e-4}


@pytest.fixture(scope="module")
def client():
  with small_server.running(choices=8) as server, openai.OpenAI(
    base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300
  ) as found:
    yield found


def letters(ids):
  """Returns the text of each token; the last one has none."""
  return [(*LETTERS, "")[i] for i in ids]


@functools.cache
def scorer():
  model = small_server.first_decoder()
  return Scorer(model.program, model.weights, CONTEXT, 1)


def distributions(tokens):
  """Returns the log-probabilities after each token, ``[len(tokens), 64]``."""
  return special.log_softmax(scorer().logits(np.array([tokens]))[0], axis=-1)


def check(choice, prompt, num_top):
  """Compares a choice with an echoed prompt with the reference."""
  logprobs, end = choice.logprobs, LETTERS + "\0"
  tokens = [end.index(t or "\0") for t in logprobs.tokens]
  assert letters(tokens[: len(prompt)]) == list(prompt)
  for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
    assert choice.text[offset : offset + len(token)] == token
  assert logprobs.token_logprobs[0] is None
  at = distributions(tokens)[:-1]
  np.testing.assert_allclose(
    logprobs.token_logprobs[1:], at[np.arange(len(at)), tokens[1:]],
    **TOLERANCE,
  )
  if not num_top:
    assert logprobs.top_logprobs is None
    return
  assert logprobs.top_logprobs[0] is None
  for token, own, found, expected in zip(
    logprobs.tokens[1:], logprobs.token_logprobs[1:],
    logprobs.top_logprobs[1:], at, strict=True,
  ):
    best = letters(np.argsort(-expected)[:num_top])
    assert set(found) == {*best, token}
    assert found[token] == own  # exactly: clients compare it with the largest
    np.testing.assert_allclose(
      [found[t] for t in best], np.sort(expected)[::-1][:num_top], **TOLERANCE
    )


def joined(parts):
  """Returns the only choice of a stream of completions, joined."""
  choices = [part.choices[0] for part in parts]
  whole = choices[-1].model_copy(deep=True)
  whole.text = "".join(c.text for c in choices)
  for name in type(whole.logprobs).model_fields:
    values = [getattr(c.logprobs, name) for c in choices]
    joined_values = None if None in values else [*itertools.chain(*values)]
    setattr(whole.logprobs, name, joined_values)
  return whole


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
  ("num_top", "count", "prompt"),
  [(5, 9, "Hello 1"), (0, 3, "Hi"), (NUM_TOP_TOKENS, 1, "x"), (1, 0, "Hello 1"),
   (2, 0, "x"), (3, 0, "a" * CONTEXT)],
)
def test_echoed_prompts_and_drawn_tokens_have_logprobs(
  client, num_top, count, prompt, stream
):
  """Draws at the default temperature; a prompt may fill the context."""
  asked = dict(
    model="small", prompt=prompt, max_tokens=count, logprobs=num_top, seed=5,
    echo=True, extra_body={"ignore_eos": True, "top_k": 40},
  )
  if stream:
    choice = joined(client.completions.create(**asked, stream=True))
  else:
    found = client.completions.create(**asked)
    choice = found.choices[0]
    assert found.usage.completion_tokens == count
  assert choice.finish_reason == "length"
  assert choice.text.startswith(prompt)
  assert len(choice.logprobs.tokens) == len(prompt) + count
  check(choice, prompt, num_top)


@pytest.mark.parametrize("count", [0, 2])
def test_prompts_of_one_request_are_scored_separately(client, count):
  """A token without text has the offset of the next one."""
  prompts = ["abc", "Z", "other"]
  ids = [[LETTERS.index(letter) for letter in p] for p in prompts]
  ids[2][1:1] = [63, 63]
  for prompt in (prompts, ids):
    found = client.completions.create(
      model="small", prompt=prompt, max_tokens=count, logprobs=3, n=2,
      echo=True, extra_body={"ignore_eos": True},
    )
    assert len(found.choices) == 6
    for i, choice in enumerate(found.choices):
      asked = prompt[i // 2]
      check(choice, asked if prompt is prompts else letters(asked), 3)


def test_echo_without_logprobs_and_tokens_returns_the_prompt(client):
  found = client.completions.create(
    model="small", prompt="abc", max_tokens=0, echo=True
  ).choices[0]
  assert (found.text, found.logprobs) == ("abc", None)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_chat_have_the_most_probable_ones(client, stream):
  found = client.chat.completions.create(
    model="small", messages=[{"role": "user", "content": "good"}],
    max_tokens=8, logprobs=True, top_logprobs=4, seed=3, stream=stream,
    extra_body={"ignore_eos": True},
  )
  parts = list(found) if stream else [found]
  content = [
    token for part in parts for token in part.choices[0].logprobs.content
  ]
  assert len(content) == 8
  end = LETTERS + "\0"
  tokens = [end.index(t) for t in "ugooda"]
  for token in content:
    expected = distributions(tokens)[-1]
    best = np.argsort(-expected)[:4]
    assert [t.token for t in token.top_logprobs] == letters(best)
    np.testing.assert_allclose(
      [t.logprob for t in token.top_logprobs], expected[best], **TOLERANCE
    )
    assert all(t.bytes == list(t.token.encode()) for t in token.top_logprobs)
    tokens.append(end.index(token.token or "\0"))
    np.testing.assert_allclose(token.logprob, expected[tokens[-1]], **TOLERANCE)


def test_completion_ends_while_the_program_of_an_echo_is_compiled():
  """The compiler of the scorer waits for a request that is sent later."""
  ended = threading.Event()
  with small_server.running() as server:
    scorer = server.api.service._scorer
    compile_program = scorer.compile

    def compile_later(length):
      assert ended.wait(60), "no token was drawn"
      compile_program(length)

    scorer.compile = compile_later
    with openai.OpenAI(
      base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client, futures.ThreadPoolExecutor(1) as thread:
      ask = functools.partial(
        client.completions.create, model="small", temperature=0, max_tokens=3
      )
      echo = thread.submit(ask, prompt="abc", echo=True, logprobs=1)
      while not server.api.service.calls:
        time.sleep(0.01)
      plain = ask(prompt="abc")
      ended.set()
      assert echo.result().choices[0].text == "abc" + plain.choices[0].text
