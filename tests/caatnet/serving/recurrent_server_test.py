"""Serving a recurrent model: each request gets the tokens of a run alone.

States of free slots, and of slots whose next sequence begins, are NaN before
each step. A sequence that reads a state which it has not written therefore
gives no tokens.
"""

from concurrent import futures
import copy
import dataclasses
import functools

import httpx2
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from caatnet.config import serving
from caatnet.inference.decoder import Capacity, Decoder
from caatnet.inference.requests import Request as Drawing
from caatnet.inference.stops import Stops
from caatnet.inference.weights import make_weights
from caatnet.models.paged import CacheSizes
from caatnet.models.recurrent import RecurrentModel
from caatnet.program import Layout, Program
from caatnet.serving.cache import prefixes
from caatnet.serving.engine.calibration import calibrate
from caatnet.serving.engine.device import DecoderExecutor, SamplingState
from caatnet.serving.engine.engine import replay
from caatnet.serving.generate import Generation
from caatnet.serving.options import DEFAULTS
from caatnet.serving.requests import Request, State
from parallel.axes import Axis, make_mesh
from parallel.plans.zero.partition import Level, Partition
from parallel.tensor.partial_sync import PartialSync
from tests.caatnet.models.recurrent_test import make_config
from tests.caatnet.serving import small_server

SLOTS, CONTEXT, RANKS, DEVICES = 2, 64, 4, 2


@functools.cache
def first_decoder():
  axes = {
    "worker": Axis("worker", 1), "data": Axis("data", 1),
    "tensor": Axis("tensor", RANKS, DEVICES),
  }
  layout = Layout(
    tuple(axes.values()), make_mesh(axes),
    Partition((Level("data", 1),)),
  )
  sync = PartialSync(0.5)
  config = make_config(
    vocab_size=64, num_layers=2, syncs=((sync, sync), (sync, sync))
  )
  program = Program(RecurrentModel(config, axes["tensor"]), layout)
  params = jax.jit(
    program.init_params,
    out_shardings=layout.shardings(program.unpartitioned_specs)
  )(jax.random.key(2))
  shape = program.model.cache_shape(
    CacheSizes(SLOTS, CONTEXT, SLOTS, "", ("reference",))
  )
  return Decoder(
    program, make_weights(program, params, True, False),
    Capacity(SLOTS, CONTEXT, CONTEXT, 16), shape,
  )


def decoder():
  """Returns a decoder with its own cache that shares the compiled programs."""
  found = copy.copy(first_decoder())
  found._state = jax.tree.map(jnp.copy, found._state)
  return found


def alone(prompts, count, stop=(), endless=False):
  """Returns completions of `launch.generate`, one prompt at a time."""
  tokens = small_server.tokenizer()
  stops = Stops(count, frozenset(tokens.stop_ids), stop)
  if endless:
    stops = Stops(count)
  found = []
  for prompt in prompts:
    generation = Generation(
      decoder(), [Drawing(tuple(prompt), stops)], tokens
    )
    generation._filters = True  # the programs of the server
    found += generation.run()
  return found


def draw(length, seed):
  return np.random.default_rng(seed).integers(0, 60, length).tolist()


class Spoiling(DecoderExecutor):
  """Executor that overwrites unreadable states with NaN before each step."""

  def submit(self, step):
    self._finish(step.after)
    begin = {c.request.slot for c in step.chunks if not c.start}
    for slot in range(SLOTS):
      if slot in begin or self.running.requests[slot] is None:
        self.host_states.spoil(slot, 1)
    super().submit(step)


def engine(monkeypatch, model=None, **options):
  """Returns the engine of a server, with calibrated copy costs."""
  monkeypatch.setattr(serving, "DecoderExecutor", Spoiling)
  chosen = DEFAULTS.__class__(**vars(DEFAULTS) | options)
  made = serving.engine(model or decoder(), chosen)
  made.executor.running = made.scheduler.running
  calibrate(made.executor)
  return made


def request(number, prompt, count, **how):
  drawing = Drawing(tuple(prompt), Stops(count))
  how = {"stop": frozenset(small_server.tokenizer().stop_ids)} | how
  return Request(number, prompt, count, payload=SamplingState(drawing), **how)


def test_requests_are_the_same_bits_alone_and_in_any_batch(monkeypatch):
  """One row reads one token of a state per step, also of prompts."""
  model = decoder()
  model.capacity = dataclasses.replace(
    model.capacity, chunk=SLOTS, batch_invariant=True
  )
  found = []
  for groups in ([[0], [1], [2]], [[2, 0, 1]]):
    for numbers in groups:
      made = engine(monkeypatch, model, preempt="recompute")
      requests = [
        request(i, draw(5 + 9 * i, i), 12, priority=-i, stop=frozenset())
        for i in numbers
      ]
      for each in requests:
        made.scheduler.add(each)
        for _ in range(9):
          made.step()
      while not made.idle:
        made.step()
      made.executor.close()
      found += [(x.number, x.tokens, x.payload.logprobs[:12]) for x in requests]
  assert sorted(found[3:]) == found[:3]


@pytest.mark.rotated(2)
@pytest.mark.parametrize("preempt", ["swap", "recompute"])
def test_preempted_requests_continue_with_the_same_tokens(preempt, monkeypatch):
  """Preempts one request while it decodes, and one between its chunks.

  The last request ends first, so that the others continue in other slots.
  """
  made = engine(monkeypatch, preempt=preempt)
  prompts = [draw(n, n) for n in (5, 40, 3, 20)]
  requests = [
    request(i, prompt, count, priority=-(i // 2), stop=frozenset())
    for i, (prompt, count) in enumerate(
      zip(prompts, (12, 12, 12, 4), strict=True)
    )
  ]
  for each in requests[:2]:
    made.scheduler.add(each)
  while made.scheduler.running.computed.max() < 32:
    made.step()
  for each in requests[2:]:
    made.scheduler.add(each)
  while not made.idle:
    made.step()
  made.executor.close()
  assert made.scheduler.counts.preemptions[preempt] >= 2
  assert made.scheduler.counts.preemptions.total() == (
    made.scheduler.counts.preemptions[preempt]
  )
  for each, expected in zip(
    requests, alone(prompts, 12, endless=True), strict=True
  ):
    assert each.state is State.FINISHED
    assert tuple(each.tokens) == expected.tokens[: each.max_tokens]


@pytest.mark.parametrize("keep", [True, False])
def test_second_turn_equals_the_whole_conversation_read_again(
  keep, monkeypatch
):
  made = engine(monkeypatch, keep_turns=keep)
  # Reading is expensive, so that the kept state is used.
  monkeypatch.setattr(made.executor.costs, "prefill_s", lambda *_: 100.0)
  prompt, asked = draw(20, 0), []
  for number in range(3):
    turn = request(number, prompt, 6, conversation=0, more=True)
    replay(made, [turn])
    asked.append((prompt, turn))
    prompt = [*prompt, *turn.tokens, *draw(2, number + 1)]
  made.executor.close()
  for number, (prompt, turn) in enumerate(asked):
    (expected,) = alone([prompt], 6)
    assert tuple(turn.tokens) == expected.tokens
    # All but the last token, which no step has read, or only the new tokens.
    assert turn.num_hits == (len(prompt) - 3 if keep and number else 0)


def test_next_request_of_a_slot_starts_from_zeros(monkeypatch):
  """Drops the step that was dispatched before the end was known."""
  made = engine(monkeypatch)
  prompts = [draw(n, n) for n in (17, 4, 30, 2, 9)]
  requests = []
  for i, prompt in enumerate(prompts):
    each = request(i, prompt, 20)
    count = iter(range(99))
    each.stop = lambda token, count=count: next(count) == 3
    requests.append(each)
  replay(made, requests)
  made.executor.close()
  for each, expected in zip(requests, alone(prompts, 20), strict=True):
    assert tuple(each.tokens) == expected.tokens[:4]
  assert not made.scheduler.counts.preemptions.total()


def test_server_responses_equal_generate():
  """Sends mixed prompts concurrently; one ends at a stop string."""
  letters = small_server.tokenizer()
  texts = ["Hello 1", "x", "a b c d e f g h i j k l m n o p", "Zebra", "qu"]
  prompts = [letters.encode(text).tolist() for text in texts]
  (longest,) = alone(prompts[:1], 20)
  stop = longest.text[5:8]
  stops = [(stop,), (), (), (), ()]
  expected = [
    alone([prompt], 20, stop)[0]
    for prompt, stop in zip(prompts, stops, strict=True)
  ]
  with small_server.running(model=decoder()) as server:

    def ask(text, stop):
      answer = httpx2.post(
        f"{server.url}/v1/completions", timeout=300, json={
          "model": "small", "prompt": text, "max_tokens": 20, "temperature": 0,
          "stop": list(stop),
        },
      )
      return answer.json()["choices"][0]["text"]

    with futures.ThreadPoolExecutor(len(texts)) as pool:
      found = list(pool.map(ask, texts, stops))
    state = httpx2.get(f"{server.url}/state", timeout=60).json()
    metrics = httpx2.get(f"{server.url}/metrics", timeout=60).text
  assert found == [completion.text for completion in expected]
  assert len({*found}) > 3
  assert state["prefixes"]["hits"] == 0
  assert "caatnet_copied_bytes" in metrics


@pytest.mark.parametrize("reuse", [True, False])
def test_prefix_reuse_is_off_and_reported_once(reuse):
  """Reports it once, unless the option has already switched it off."""
  model = decoder()
  chosen = DEFAULTS.__class__(**vars(DEFAULTS) | {"reuse": reuse})
  notice = serving.reuse_notice(model, chosen)
  assert ("RecurrentModel has one state per sequence" in notice) == reuse
  assert "\n" not in notice
  made = serving.engine(model, chosen)
  requests = [request(i, draw(20, 0), 2) for i in range(2)]
  for each in requests:
    replay(made, [each])
  made.executor.close()
  assert requests[1].num_hits == 0
  made.scheduler.pages.publish(
    np.zeros(1, np.int32), bytes(prefixes.HASH_BYTES)
  )
  assert not made.scheduler.pages.block_hashes()
  assert requests[0].tokens == requests[1].tokens
  assert not serving.reuse_notice(small_server.decoder(), chosen)
