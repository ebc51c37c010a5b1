"""HTTP server of experts: names, routing, changes at run time, failures."""

import concurrent.futures
import contextlib
import dataclasses
import re
import shutil
import threading

import httpx2
import jax
import ml_collections
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
import pytest
from scipy import special

from caatnet.composition import library as composition
from caatnet.config import experts, serving
from caatnet.config.override import override
from caatnet.inference.scoring import Scorer
from caatnet.serving import differences
from caatnet.serving.engine.device_weights import WeightUploader
from caatnet.serving.experts import Library
from caatnet.serving.router import Router
from caatnet.serving.server import http, start
from configs.serving import experts as config_of

KEY = {"Authorization": "Bearer secret"}
SMALL = (
  "parallel.tensor=2 model.width=16 model.num_heads=2 model.num_layers=1 "
  "model.num_kv_heads=2 model.ffn_width=16 inference.batch=3 "
  "inference.context=64 inference.page_size=8 inference.chunk=16 "
  "experts.slots=2 experts.host_experts=2 experts.random=0 model.init_std=0.5"
)
NAMES = tuple(f"random-00{i}" for i in range(5))


def make_config(path, overrides=""):
  config = override(config_of.get_config("random"), f"{SMALL} {overrides}")
  config.experts.path = str(path)
  return config


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """Returns a library of random experts with a router, on disk."""
  path = tmp_path_factory.mktemp("experts") / "library"
  library = experts.create_random(path, make_config(path), 5)
  for name, kind in zip(NAMES, ("letters", "digits"), strict=False):
    library.replace(
      name, library.read(name)[1](), kind=kind, origin="fine-tuned"
    )
  Router(
    ("letters", "digits"), np.random.default_rng(0).standard_normal(
      (64, 2), np.float32
    ), np.zeros(2, np.float32),
  ).write(path)
  return path


@contextlib.contextmanager
def running(path, key="secret"):
  made = experts.build(make_config(path), {"tensor": 2}, print, composition.put)
  server = start.build_server(
    made, key, serving.page_bytes(made.decoder), print
  )
  listener = http.bind_listener("127.0.0.1", 0)
  thread = threading.Thread(target=server.serve_on, args=(listener,))
  thread.start()
  try:
    with httpx2.Client(
      base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", headers=KEY,
      timeout=120,
    ) as client:
      yield client
  finally:
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def client(files):
  with running(files) as found:
    yield found


def ask(client, model, **how):
  body = {
    "model": model, "prompt": "0123456789abcdef", "max_tokens": 9,
    "temperature": 1, "seed": 3, "ignore_eos": True, "logprobs": 0,
  }
  return client.post("/v1/completions", json=body | how)


def tokens(answer):
  assert answer.status_code == 200, answer.text
  return answer.json()["choices"][0]["logprobs"]["tokens"]


def metric(client, name):
  text = client.get("/metrics").text
  return {
    sample.labels["expert"]: sample.value
    for family in text_string_to_metric_families(text)
    for sample in family.samples
    if sample.name == f"caatnet_expert_{name}_total"
  }


def test_concurrent_requests_are_answered_by_their_experts(client):
  alone = {name: tokens(ask(client, name)) for name in NAMES}
  assert len(set(map(tuple, alone.values()))) == 5
  before = {n: metric(client, n) for n in ("hits", "misses", "failures")}
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    asked = [NAMES[i * 3 % 5] for i in range(20)]
    found = list(pool.map(lambda name: ask(client, name), asked))
  for name, answer in zip(asked, found, strict=True):
    assert tokens(answer) == alone[name]
    assert answer.json()["model"] == name
    assert answer.headers["x-expert"].startswith(f"{name}@")
  after = {n: metric(client, n) for n in ("hits", "misses", "failures")}
  for name in NAMES:
    # A miss more for each load of an expert evicted while it had requests.
    assert sum(
      after[kind][name] - before[kind].get(name, 0)
      for kind in ("hits", "misses")
    ) >= 4
  # Bytes moved = loads x size, and each load of this test has a miss.
  loads, moved = metric(client, "loads"), metric(client, "bytes")
  (size,) = {moved[name] / loads[name] for name in NAMES}
  assert size > 0
  assert not any(after["failures"].values())
  assert sum(after["misses"].values()) <= sum(loads.values())


def test_models_are_listed_with_their_tiers(client):
  tokens(ask(client, NAMES[4]))
  cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
  assert list(cards) == ["auto", *NAMES]
  tiers = [cards[name]["tier"] for name in NAMES]
  assert sorted(tiers).count("device") == 2
  assert cards[NAMES[4]]["tier"] == "device"
  assert set(tiers) <= {"device", "host", "file"}
  assert cards[NAMES[0]]["kind"] == "letters"
  assert client.get(f"/v1/models/{NAMES[2]}").json()["origin"] == "seed"
  state = client.get("/state").json()["experts"]
  assert [slot["state"] for slot in state["slots"]] == ["ready", "ready"]
  assert len(state["host"]) <= 2


def test_page_shows_the_slots(client):
  """Evaluates the page's functions in a JavaScript engine without a DOM."""
  dukpy = pytest.importorskip("dukpy", reason="the extra test has it")
  tokens(ask(client, NAMES[1]))
  state, page = client.get("/state").json(), client.get("/").text
  functions = [
    re.search(rf"^function {name}\(.*?^\}}", page, re.S | re.M)[0]
    for name in ("fill", "element", "slotRow", "showExperts")
  ]
  hidden, rows, work = dukpy.evaljs([
    """const number = String, made = {}, node = () => ({
      children: [], append(x) { this.children.push(x) },
      replaceChildren(...all) { this.children = all },
    });
    const document = {createElement: node};
    const $ = id => made[id] = made[id] || node();""",
    *functions,
    """showExperts(dukpy.experts);
    [$("experts").hidden,
     $("slots").children.map(row => row.children.map(x => x.textContent)),
     $("experts-work").children.map(x => x.textContent)]""",
  ], experts=state["experts"])
  assert not hidden
  for index, (row, slot) in enumerate(
    zip(rows, state["experts"]["slots"], strict=True)
  ):
    counters = state["experts"]["counters"][slot["expert"].partition("@")[0]]
    assert row == [
      str(index), slot["expert"], "ready", "0",
      *(str(counters[key]) for key in ("hits", "misses", "loads")),
      str(round(counters["bytes"] / 1e6)), f"{counters['exposed_s']:.2f}",
    ]
  assert any(row[1].startswith(f"{NAMES[1]}@") for row in rows)
  assert work[-1] == f"in host memory {len(state['experts']['host'])}"


def test_auto_is_answered_by_the_expert_that_the_router_selects(client, files):
  library = Library(files)
  router = Router.read(files)
  for prompt in ("0123456789abcdef", "hello", "98765"):
    expected = router.route(prompt.encode(), library.entries)
    answer = ask(client, "auto", prompt=prompt)
    assert answer.json()["model"] == expected
    assert tokens(answer) == tokens(ask(client, expected, prompt=prompt))


def test_expert_is_replaced_while_it_answers(client, files, tmp_path):
  donor = Library(files).path / Library(files).entry(NAMES[3]).file
  old = shutil.copy(
    Library(files).path / Library(files).entry(NAMES[2]).file, tmp_path / "old"
  )
  added = client.post(
    "/v1/experts", json={"name": "new", "path": str(old), "kind": "x"}
  )
  assert added.json()["tier"] == "file"
  assert client.post(
    "/v1/experts", json={"name": "new", "path": str(old)}
  ).status_code == 409
  asked = {"max_tokens": 48, "stream": True}
  before = tokens(ask(client, NAMES[2], max_tokens=48))
  assert tokens(ask(client, "new", max_tokens=48)) == before
  body = {
    "model": "new", "prompt": "0123456789abcdef", "temperature": 1, "seed": 3,
    "ignore_eos": True, "logprobs": 0, **asked,
  }
  with client.stream("POST", "/v1/completions", json=body) as stream:
    events = stream.iter_lines()
    next(events)
    replaced = client.put("/v1/experts/new", json={"path": str(donor)})
    assert replaced.status_code == 200, replaced.text
    # The new revision, although the old one's pages have this prompt.
    assert tokens(ask(client, "new")) == tokens(ask(client, NAMES[3]))
    assert stream.headers["x-expert"] == f"new@{added.json()['revision']}"
    text = "".join(events)
  assert text.count('"finish_reason":"length"') == 1
  assert all(f'"tokens":["{t}"]' in text for t in before[1:] if t.isalnum())
  assert replaced.json()["kind"] == "x"
  assert client.delete("/v1/experts/new").json()["deleted"]
  assert ask(client, "new").status_code == 404
  # A replaced and a removed revision leave the host's memory and the slots.
  state = client.get("/state").json()["experts"]
  assert not [key for key in state["host"] if key.startswith("new@")]


@pytest.fixture(scope="module")
def distributions(files):
  """Returns the log-probabilities after each token, for each expert."""
  library, config = Library(files), make_config(files)
  made = experts._build_inference(library, config, {"tensor": 2})
  device = WeightUploader(made.program, made.layers_apart, made.coded)

  def find(name, ids):
    params = device.put(device.on_host(library.read(name).load()))
    weights = dataclasses.replace(device.abstract, params=params)
    logits = Scorer(made.program, weights, 64, 1).logits(np.array([ids]))[0]
    return special.log_softmax(logits, axis=-1)

  return find


def test_echoed_prompts_are_scored_by_their_experts(client, distributions):
  """Three times as many experts as slots, concurrently with decoding."""
  prompts = ["x", "0123456789", "a" * 64, "hello"]
  asked = [
    (NAMES[i % 5], prompts[i % 4], i % 3 if i % 4 != 2 else 0)
    for i in range(20)
  ]
  with concurrent.futures.ThreadPoolExecutor(10) as pool:
    decoding = [pool.submit(ask, client, NAMES[i % 5]) for i in range(10)]
    scored = list(pool.map(
      lambda x: ask(
        client, x[0], prompt=x[1], max_tokens=x[2], echo=True, logprobs=2
      ), asked,
    ))
  assert all(len(tokens(each.result())) == 9 for each in decoding)
  for (name, prompt, count), answer in zip(asked, scored, strict=True):
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == count
    found = answer.json()["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(prompt) + count
    assert found["token_logprobs"][0] is None
    ids = list(prompt.encode())
    expected = distributions(name, ids)
    np.testing.assert_allclose(
      found["token_logprobs"][1 : len(ids)],
      [row[token] for row, token in zip(expected, ids[1:], strict=False)],
      rtol=0, atol=2e-4,
    )
    for row, top in zip(
      expected, found["top_logprobs"][1 : len(ids)], strict=False
    ):
      assert max(top.values()) == pytest.approx(row.max(), abs=2e-4)


def test_prompts_of_a_request_are_scored_as_lm_eval_asks(client, distributions):
  prompts = [list(text.encode()) for text in ("abc", "z", "other text")]
  answer = client.post("/v1/completions", json={
    "model": NAMES[3], "prompt": prompts, "temperature": 0, "max_tokens": 1,
    "logprobs": 1, "seed": 1234, "echo": True,
  })
  assert answer.status_code == 200, answer.text
  choices = answer.json()["choices"]
  for ids, choice in zip(prompts, choices, strict=True):
    expected = distributions(NAMES[3], ids)
    found = choice["logprobs"]["token_logprobs"]
    # The last one is that of the drawn token.
    np.testing.assert_allclose(
      found[1:], [
        *(row[t] for row, t in zip(expected, ids[1:], strict=False)),
        expected[-1].max(),
      ], rtol=0, atol=2e-4,
    )


def test_clients_of_unscored_prompts_can_leave(files):
  with running(files) as client:
    for name in NAMES:
      with contextlib.suppress(httpx2.TimeoutException):
        client.post("/v1/completions", json={
          "model": name, "prompt": ["abc", "def"], "max_tokens": 0,
          "echo": True, "logprobs": 0,
        }, timeout=1e-2)
    assert len(tokens(ask(client, NAMES[1], echo=True, max_tokens=0))) == 16
    expired = ask(client, NAMES[0], echo=True, deadline_s=0)
    assert expired.json()["error"]["code"] == "deadline_exceeded"
    state = client.get("/state").json()
    assert not any(state["requests"].values())
    assert state["open"] == 0


@pytest.mark.parametrize(("method", "path", "body", "status", "message"), [
  ("POST", "", {"name": "x", "path": "/none"}, 400, "holds no run"),
  ("POST", "", {"name": "a b", "path": "{file}"}, 400, "must consist of"),
  ("POST", "", {"name": "auto", "path": "{file}"}, 409, "exists"),
  ("POST", "", {"name": "x"}, 400, "path must be the path of a run's folder"),
  ("POST", "", {"name": "x", "path": "/etc/passwd"}, 400, "not a safetensors"),
  ("PUT", "/x", {"path": "{file}"}, 404, "there is no model 'x'"),
  ("PUT", f"/{NAMES[0]}", {"name": NAMES[1], "path": "{file}"}, 400,
   "name 'random-001' must be 'random-000', the name in the path"),
  ("DELETE", "/auto", None, 400, "the name auto is reserved for the router"),
  ("DELETE", "/x", None, 404, "there is no model 'x'"),
])
def test_wrong_changes_are_refused(
  client, files, method, path, body, status, message
):
  file = next(files.glob("*.safetensors"))
  if body and "path" in body:
    body = body | {"path": body["path"].format(file=file)}
  answer = client.request(method, f"/v1/experts{path}", json=body)
  assert answer.status_code == status
  assert message in answer.json()["error"]["message"]
  assert "\n" not in answer.json()["error"]["message"]


def test_damaged_file_fails_only_the_requests_of_its_expert(files, tmp_path):
  path = shutil.copytree(files, tmp_path / "library")
  library = Library(path)
  damaged, missing = (path / library.entry(n).file for n in NAMES[3:])
  content = damaged.read_bytes()
  with running(path, key="") as client:
    expected = tokens(ask(client, NAMES[0]))
    damaged.write_bytes(content[:-8] + b"\x00\x00\x80\x7f" * 2)
    missing.unlink()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
      found = pool.map(
        lambda n: ask(client, n), (NAMES[3], NAMES[0], NAMES[4], NAMES[2])
      )
    bad, good, gone, other = found
    assert tokens(good) == expected
    assert len(tokens(other)) == 9
    scored = ask(client, NAMES[3], echo=True, max_tokens=0)
    assert scored.json()["error"]["code"] == "expert_failed"
    for answer, reason in ((bad, "damaged"), (gone, "No such file")):
      assert answer.status_code == 500
      assert answer.json()["error"]["code"] == "expert_failed"
      assert reason in answer.json()["error"]["message"]
    damaged.write_bytes(content)
    assert len(tokens(ask(client, NAMES[3]))) == 9
    # Without a key, experts cannot be changed.
    answer = client.delete(f"/v1/experts/{NAMES[0]}")
    assert answer.status_code == 403
    assert "CAATNET_API_KEY" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("overrides", "message"), [
  ("experts.slots=1000000000", "slots=1000000000 take .* of a device, more"),
  ("serving.policy=vtc", "serving.policy='vtc' must be one of exp"),
  ("experts.pinned=('x',)", "pinned='x' must be one of random-000"),
  ("experts.slots=1 experts.pinned=('random-000',)", "slots=1 must be at leas"),
])
def test_wrong_options_are_refused(files, overrides, message):
  with pytest.raises(ValueError, match=message) as error:
    experts.build(make_config(files, overrides), {"tensor": 2})
  assert "\n" not in str(error.value)


def test_stored_difference_answers_as_the_expert_that_it_restores(
  files, tmp_path
):
  """Two differences and the experts that they restore, on two slots."""
  path = shutil.copytree(files, tmp_path / "library")
  library = Library(path)
  base, tree = (library.read(name).load() for name in NAMES[:2])
  pairs = []
  for form in ("int8", "low_rank"):
    stored = differences.encode(tree, base, form, rank=2)
    restored = differences.restore(base, stored, form)
    library.add(form, stored, form=form, base=NAMES[0])
    library.add(f"{form}-whole", jax.tree.map(np.asarray, restored))
    pairs.append((form, f"{form}-whole"))
  assert library.size_bytes("int8") < 0.5 * library.size_bytes("int8-whole")
  with running(path) as client:
    for _ in range(2):  # from the file, and from host memory
      for pair in pairs:
        stored, whole = (tokens(ask(client, name)) for name in pair)
        assert stored == whole
    found = [tokens(ask(client, pair[0])) for pair in pairs]
    assert found[0] != found[1]
    # Only the differences are copied to the device.
    loads, moved = metric(client, "loads"), metric(client, "bytes")
    for stored, whole in pairs:
      assert loads[stored] > 1
      assert moved[stored] / loads[stored] < 0.6 * moved[whole] / loads[whole]


def test_memory_of_slots_includes_the_base_of_differences(files, tmp_path):
  path = shutil.copytree(files, tmp_path / "library")
  library = Library(path)
  tree = library.read(NAMES[0]).load()
  library.add(
    "d", differences.encode(tree, tree, "int8"), form="int8", base=NAMES[0]
  )
  for folder, counted in ((files, False), (path, True)):
    with pytest.raises(ValueError, match="slots=1000000000 take") as error:
      experts.build(make_config(folder, "experts.slots=1000000000"))
    assert ("the base 0.00 GB" in str(error.value)) == counted


def test_missing_library_names_the_command_that_trains_it(tmp_path):
  with pytest.raises(ValueError, match=r"launch\.sweep --config=configs/expe"):
    experts.build(make_config(tmp_path / "none"))
  Library.create(tmp_path)
  with pytest.raises(ValueError, match="at least one expert"):
    experts.build(make_config(tmp_path))
  config = ml_collections.ConfigDict(config_of.get_config().to_dict())
  assert config.experts.path == "runs/experts/library"
