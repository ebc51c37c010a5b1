"""OpenAI's Python client against the server: responses equal runs alone."""

import asyncio
import json
import re

import httpx2
import openai
from prometheus_client.parser import text_string_to_metric_families
import pytest

from caatnet.serving.cache.pages import STATES
from tests.caatnet.serving import small_server
from tests.caatnet.serving.small_server import alone

ASK = {"model": "small", "prompt": "abc"}


@pytest.fixture(scope="module")
def server():
  with small_server.running(key="secret", body_bytes=2000, choices=8) as found:
    yield found


@pytest.fixture(scope="module")
def client(server):
  with openai.OpenAI(
    base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=300
  ) as found:
    yield found


def post(server, body, path="completions", key="secret"):
  return httpx2.post(
    f"{server.url}/v1/{path}", content=body,
    headers={"Authorization": f"Bearer {key}"}, timeout=60,
  )


@pytest.mark.parametrize(
  "how",
  [{}, {"temperature": 1.0, "seed": 7},
   {"temperature": 0.7, "seed": 1, "top_p": 0.9, "top_k": 5, "min_p": 0.01}],
)
def test_completions_equal_a_run_alone(client, how):
  ours = {k: v for k, v in how.items() if k in ("top_k", "min_p")}
  theirs = {k: v for k, v in how.items() if k not in ours}
  expected = alone("Hello 1", 30, **how)
  arguments = dict(
    model="small", prompt="Hello 1", max_tokens=30, logprobs=0,
    extra_body=ours, **{"temperature": 0} | theirs,
  )
  found = client.completions.create(**arguments)
  choice = found.choices[0]
  assert choice.text == expected.text
  assert choice.logprobs.token_logprobs == pytest.approx(
    expected.logprobs, abs=2e-4
  )
  assert choice.finish_reason == {
    "max_tokens": "length", "stop_id": "stop"
  }[expected.reason]
  assert found.usage.prompt_tokens == 7
  assert found.usage.completion_tokens == len(expected.tokens)
  parts = list(client.completions.create(
    **arguments, stream=True, stream_options={"include_usage": True}
  ))
  *parts, last = parts
  assert last.choices == []
  assert last.usage.completion_tokens == len(expected.tokens)
  assert "".join(p.choices[0].text for p in parts) == expected.text
  assert parts[-1].choices[0].finish_reason == choice.finish_reason
  assert len(parts) == len(expected.tokens)


def test_stop_strings_across_tokens_end_responses(client):
  whole = alone("abc", 40).text
  stop = whole[9:12]
  expected = alone("abc", 40, (stop, "never"))
  assert 0 < len(expected.text) < len(whole)
  for stream in (False, True):
    found = client.completions.create(
      **ASK, max_tokens=40, temperature=0, stop=[stop, "never"], stream=stream
    )
    texts = [p.choices[0] for p in found] if stream else [found.choices[0]]
    assert "".join(p.text for p in texts) == expected.text
    assert texts[-1].finish_reason == "stop"


def test_chat_prompt_is_rendered_by_the_model_template(client):
  messages = [
    {"role": "system", "content": "Be"},
    {"role": "user", "content": [{"type": "text", "text": "good"}]},
  ]
  expected = alone("sBeugooda", 20)
  asked = dict(
    model="small", messages=messages, max_completion_tokens=20, temperature=0,
    logprobs=True, top_logprobs=1,
  )
  found = client.chat.completions.create(**asked)
  assert found.choices[0].message.content == expected.text
  assert found.usage.prompt_tokens == len("sBeugooda")
  tokens = found.choices[0].logprobs.content
  assert "".join(t.token for t in tokens) == expected.text
  assert [t.top_logprobs[0].token for t in tokens] == [
    t.token for t in tokens
  ]
  # The message may be sent back unchanged, as the next turn's.
  asked["messages"] = [found.choices[0].message]
  again = client.chat.completions.create(**asked)
  assert again.usage.prompt_tokens == 1 + len(expected.text) + 1
  asked["messages"] = messages
  parts = list(client.chat.completions.create(**asked, stream=True))
  assert parts[0].choices[0].delta.role == "assistant"
  text = "".join(p.choices[0].delta.content or "" for p in parts)
  assert text == expected.text


def test_chat_without_a_template_is_refused():
  with small_server.running(template="") as server:
    answer = post(server, json.dumps(
      {"model": "small", "messages": [{"role": "user", "content": "a"}]}
    ), "chat/completions")
  assert answer.status_code == 400
  assert "no chat template" in answer.json()["error"]["message"]


def test_several_prompts_with_several_choices_each(client):
  """Gives each choice the seed of the one before, plus one."""
  prompts = ["abc", [1, 2, 3, 4], "XYZ"]
  texts = ["abc", "bcde", "XYZ"]
  for prompt in (prompts[::2], [prompts[1]], prompts[1]):
    found = client.completions.create(
      model="small", prompt=prompt, n=2, max_tokens=9, seed=3, temperature=1,
      echo=True,
    )
    asked = [texts[1]] if prompt in ([prompts[1]], prompts[1]) else texts[::2]
    expected = [
      text + alone(text, 9, temperature=1.0, seed=3 + 2 * i + j).text
      for i, text in enumerate(asked) for j in range(2)
    ]
    assert [c.text for c in found.choices] == expected
    assert [c.index for c in found.choices] == list(range(len(expected)))
    assert found.usage.prompt_tokens == sum(map(len, asked))


def test_texts_are_tokenized_and_tokens_decoded(server):
  """By the routes that clients without a tokenizer use, as of vLLM."""
  def asked(path, method="POST", **body):
    return httpx2.request(
      method, f"{server.url}/{path}", json=body or None, timeout=60,
      headers={"Authorization": "Bearer secret"},
    ).json()

  assert asked("tokenizer_info", "GET") == {
    "bos_token": None, "eos_token": "</s>"
  }
  assert asked("tokenize", prompt="abc</s>", add_special_tokens=False) == {
    "tokens": [0, 1, 2, 63], "count": 4, "max_model_len": 96
  }
  assert asked("detokenize", tokens=[1, 2, 99]) == {"prompt": "bc"}


def test_shared_prefix_is_read_once(client):
  prompt = "the same beginning of it"
  arguments = dict(model="small", prompt=prompt, max_tokens=2, temperature=0)
  first = client.completions.create(**arguments)
  again = client.completions.create(**arguments)
  assert again.choices[0].text == first.choices[0].text
  assert again.usage.prompt_tokens_details.cached_tokens == len(prompt) - 1


def test_models_are_listed_and_retrieved(client):
  assert [m.id for m in client.models.list()] == ["small"]
  assert client.models.retrieve("small").id == "small"
  with pytest.raises(openai.NotFoundError):
    client.models.retrieve("other")


def body(**fields):
  return json.dumps(ASK | fields)


WRONG = [
  ("{", 400, "is not JSON"),
  ("[" * 100_000, 413, "longer than 2,000 bytes"),
  ("[" * 1_500, 400, "is not JSON"),
  ("{" + " " * 1999, 400, "is not JSON"),
  ("{" + " " * 2000, 413, "longer than 2,000 bytes"),
  ("[]", 400, "must be a JSON object"),
  (b"\xff", 400, "is not JSON"),
  ('{"prompt": "a"}', 400, "model is missing"),
  (body(model="gpt"), 404, "this server has 'small'"),
  (body(foo=1), 400, "foo is not a field"),
  ('{"model": "small", "prompt": "a", "\\ud800": 1}', 400, "is not a field"),
  (body(logit_bias={"5": 1}), 400, "logit_bias={'5': 1} is not supported"),
  (body(frequency_penalty=.5), 400, "frequency_penalty=0.5 is not"),
  (body(logprobs=21), 400, "logprobs=21 must be an integer in [0, 20]"),
  (body(logprobs=True), 400, "logprobs=True must be an integer in [0, 20]"),
  (body(best_of=2), 400, "best_of=2 must be n=1"),
  (body(n=9), 400, "n=9 must be an integer in [1, 8]"),
  (body(n=True), 400, "n=True must be an integer"),
  (body(n=3, prompt=["a", "b", "c"]), 400,
   "3 prompts with n=3 request 9 answers; at most 8 are allowed"),
  (body(max_tokens=0), 400, "max_tokens=0 needs echo=true"),
  (body(max_tokens=0, echo=True, prompt="a" * 97), 400, "with max_tokens=0 it"),
  (body(max_tokens=94), 400, "exceeds the context of 96"),
  (body(prompt="a" * 96), 400, "exceeds the context of 96"),
  (body(prompt=""), 400, "the prompt is empty"),
  (body(prompt=[]), 400, "prompt=[] must contain a prompt"),
  (body(prompt=[[]]), 400, "the prompt is empty"),
  (body(prompt=[64]), 400, "the prompt has the token 64"),
  (body(prompt=[-1]), 400, "prompt must be a string"),
  (body(prompt=None), 400, "prompt must be a string"),
  (body(prompt=5), 400, "prompt must be a string"),
  (body(temperature=float("nan")), 400, "temperature=nan must"),
  (body(top_p=0), 400, "top_p=0 must be above 0"),
  (body(stop=[""]), 400, "stop must be"),
  (body(stream="yes"), 400, "stream='yes' must be true or false"),
  (body(stream_options={}), 400, "needs stream=true"),
  (body(seed=2**63), 400, "seed="),
  (body(deadline_s=0), 504, "no token was drawn within deadline_s=0"),
  (body(deadline_s=0, stream=True), 504, "drawn within deadline_s=0"),
]


@pytest.mark.parametrize(("prompt", "count"), [("abc", 93), ("a" * 95, 1)])
def test_sequence_may_fill_the_context(client, prompt, count):
  """Prompt and response have 96 tokens together."""
  found = client.completions.create(
    model="small", prompt=prompt, max_tokens=count, temperature=0,
    extra_body={"ignore_eos": True},
  )
  assert found.usage.total_tokens == 96
  assert found.choices[0].finish_reason == "length"


@pytest.mark.parametrize(("content", "status", "message"), WRONG)
def test_invalid_field_is_named(server, content, status, message):
  answer = post(server, content)
  error = answer.json()["error"]
  assert (answer.status_code, set(error)) == (
    status, {"message", "type", "param", "code"}
  )
  assert message in error["message"]


CHATS = [
  ({"messages": []}, "at least one message"),
  ({"messages": [{"role": "user"}]}, "messages[0].content must be a string"),
  ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
   "a part other than text"),
  ({"messages": [{"role": "tool", "content": "", "tool_call_id": "1"}]},
   "messages[0].tool_call_id is not supported"),
  ({"tools": [{}]}, "tools=[{}] is not supported"),
  ({"response_format": {"type": "json_object"}}, "response_format="),
  ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens=1 is not"),
  ({"top_logprobs": 1}, "needs logprobs=true"),
]


@pytest.mark.parametrize(("fields", "message"), CHATS)
def test_invalid_chat_field_is_named(server, fields, message):
  chat = {"model": "small", "messages": [{"role": "user", "content": "a"}]}
  answer = post(server, json.dumps(chat | fields), "chat/completions")
  assert answer.status_code == 400
  assert message in answer.json()["error"]["message"]


def test_paths_methods_and_keys_give_their_status(server):
  for path, method, key, status in (
    ("/nowhere", "GET", "secret", 404),
    ("/v1/completions", "GET", "secret", 405),
    ("/v1/models", "GET", "wrong", 401),
    ("/v1/models", "GET", "s\u00e9cret", 401),
    ("/state", "GET", "", 401),
    ("/metrics", "GET", "", 401),
    ("/v1/models", "GET", "secret", 200),
    ("/health", "GET", "", 200),
    ("/", "GET", "", 200),
  ):
    header = {"Authorization": f"Bearer {key}".encode()} if key else {}
    answer = httpx2.request(method, server.url + path, headers=header)
    assert answer.status_code == status, path
    if status != 200:
      assert set(answer.json()) == {"error"}


def test_limits_of_queue_and_tokens_are_enforced():
  with small_server.running(queue=1, max_tokens=3) as server:
    # One choice more than there are slots and places in the queue.
    answer = post(server, body(n=6, max_tokens=3))
    assert answer.status_code == 429
    assert answer.headers["Retry-After"] == "1"
    assert post(server, body(n=5, max_tokens=3)).status_code == 200
    answer = post(server, body(max_tokens=4))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"
    # A chat without a limit gets that of the server.
    answer = post(server, json.dumps({
      "model": "small", "messages": [{"role": "user", "content": "a"}],
      "temperature": 0, "ignore_eos": True,
    }), "chat/completions").json()
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"


def test_metrics_count_served_requests_and_tokens(server, client):
  headers = {"Authorization": "Bearer secret"}

  def read():
    text = httpx2.get(
      f"{server.url}/metrics", headers=headers, timeout=60
    ).text
    return {
      (s.name, *sorted(s.labels.values())): s.value
      for family in text_string_to_metric_families(text)
      for s in family.samples
    }

  client.completions.create(**ASK, max_tokens=1)  # creates its counter
  before = read()
  client.completions.create(**ASK, max_tokens=5, temperature=0)
  after = read()
  grown = {k: v - before.get(k, 0) for k, v in after.items()}
  assert grown["caatnet_drawn_tokens_total",] == 5
  assert grown["caatnet_prompt_tokens_total",] == 3
  assert grown["caatnet_ttft_seconds_count",] == 1
  assert grown["caatnet_tbt_seconds_count",] == 4
  assert grown["caatnet_requests_total", "finished"] == 1
  assert grown["caatnet_http_responses_total", "200"] == 1
  pages = [v for k, v in after.items() if k[0] == "caatnet_pages"]
  assert sum(pages) == small_server.PAGES
  assert set(after) == set(before)  # no new series per request


def test_dashboard_shows_the_state_and_loads_no_other_origin(server):
  page = httpx2.get(server.url, timeout=60)
  assert not re.search(r"https?:|//|src=|@import|url\(", re.sub(
    r"^ *//.*$", "", page.text, flags=re.MULTILINE
  ))
  policy = page.headers["Content-Security-Policy"]
  assert "default-src 'none'" in policy
  assert "connect-src 'self'" in policy
  state = httpx2.get(
    f"{server.url}/state", headers={"Authorization": "Bearer secret"}
  ).json()
  assert len(state["map"]) == small_server.PAGES
  for i, name in enumerate(STATES):
    assert state["pages"][name] == state["map"].count(str(i))
  # The state has each field that the page reads.
  for name in set(re.findall(r"state\.(\w+)", page.text)):
    assert name in state
  for name in set(re.findall(r"request\.(\w+)", page.text)):
    assert name in ("number", "state", "prompt", "drawn", "most", "pages",
                    "preempted", "priority")


def test_concurrent_clients_share_steps(server):
  """Mixes streams and whole responses, more than there are slots."""
  prompts = ["abc"[: 1 + i % 3] + "xyz"[: i % 4] + "0" for i in range(12)]

  async def one(client, i):
    arguments = dict(
      model="small", prompt=prompts[i], max_tokens=20, seed=i, temperature=1,
      extra_body={"priority": i % 3}, user=f"user {i % 2}",
    )
    if i % 2:
      found = await client.completions.create(**arguments)
      return found.choices[0].text
    stream = await client.completions.create(**arguments, stream=True)
    return "".join([part.choices[0].text async for part in stream])

  async def all_of_them():
    async with openai.AsyncOpenAI(
      base_url=f"{server.url}/v1", api_key="secret"
    ) as client:
      return await asyncio.gather(*(one(client, i) for i in range(12)))

  found = asyncio.run(all_of_them())
  assert found == [
    alone(p, 20, temperature=1.0, seed=i).text for i, p in enumerate(prompts)
  ]
