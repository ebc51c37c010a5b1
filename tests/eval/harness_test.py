"""Local tasks of lm-evaluation-harness through the adapter.

Results are compared with the harness's own steps: its token pairs and rolling
windows, scored from whole logits like its Hugging Face models.
"""

import dataclasses
import functools
import json
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

import jax
import jax.numpy as jnp
import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from caatnet.config import experiments, inference
from caatnet.config.override import override
from caatnet.data.tokenizers import ByteTokenizer
from caatnet.inference.scoring import Scorer
from caatnet.inference.weights import make_weights
from caatnet.interop import harness
from caatnet.interop.responses import Responder
from caatnet.serving.generate import Generation
from caatnet.train import loop
from configs.caatnet import tiny
from tests.caatnet.interop.responses_test import Characters
from tests.caatnet.models.transformer_test import (
  draw_params,
  make_config,
  make_program,
)
from tests.caatnet.serving import small_server

CONTEXT = 40
SUMS, TEXT, WRITTEN, GROUP = (
  f"tests/eval/{name}.yaml"
  for name in ("sums", "sums_text", "sums_written", "sums_all")
)

TASKS = [SUMS, TEXT, WRITTEN]


class Reference(TemplateLM):
  """Reference that runs the harness's own steps with a small model's logits."""

  eot_token_id = 0
  max_length = CONTEXT

  def tok_encode(self, string, add_special_tokens=None, **kwargs):
    return Characters().encode(string)

  def _loglikelihood_tokens(self, requests, **kwargs):
    return [self._score(context, target) for _, context, target in requests]

  def _score(self, context, target):
    assert len(target) <= self.max_length
    inputs = (context + target)[-(self.max_length + 1) :][:-1]
    padded = np.zeros((1, self.max_length), int)
    padded[0, : len(inputs)] = inputs
    logits = make()[0].logits(padded)[0, : len(inputs)][-len(target) :]
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    greedy = (logits.argmax(axis=-1) == target).all()
    return float(log_p[np.arange(len(target)), target].sum()), bool(greedy)

  def loglikelihood_rolling(self, requests, disable_tqdm=False):
    return [
      sum(
        self._score(*make_disjoint_window(window))[0]
        for window in get_rolling_token_windows(
          self.tok_encode(*request.args), self.prefix_token_id,
          self.max_length, 1,
        )
      )
      for request in requests
    ]

  def generate_until(self, requests, disable_tqdm=False):
    raise NotImplementedError


@functools.cache
def make():
  config = make_config(0.5, vocab_size=127)
  program = make_program(config, 4, 2, 2, 2)
  params = jax.tree.map(jnp.array, draw_params(program))
  weights = make_weights(program, params, apart=True, coded=False)
  scorer = Scorer(program, weights, CONTEXT, 2)
  return scorer, Responder(scorer, Characters(), None)


@pytest.mark.parametrize("task", [SUMS, TEXT])
@pytest.mark.parametrize("limit", [None, 2, 0.5])
def test_metrics_equal_those_of_the_harness_itself(task, limit):
  found = harness.evaluate(make()[1], [task], limit)["metrics"]
  expected = lm_eval.simple_evaluate(
    Reference(), tasks=[task], limit=limit, bootstrap_iters=1000,
    task_manager=TaskManager(include_defaults=False), log_samples=False,
  )["results"]
  assert len(found) == 2
  for row in found:
    row = harness.TaskMetric(**row)
    values = expected[row.task]
    np.testing.assert_allclose(
      row.value, values[f"{row.metric},{row.filter}"], rtol=1e-5
    )
    stderr = values[f"{row.metric}_stderr,{row.filter}"]
    assert (row.stderr is None) == (stderr == "N/A")
    if row.stderr is not None:
      np.testing.assert_allclose(row.stderr, stderr, rtol=1e-5)
    assert row.num_documents == {None: 6, 2: 2, 0.5: 3}[limit]


def test_drawn_requests_equal_those_of_the_harness():
  rng = np.random.default_rng(0)

  def draw(longest):
    return "".join(rng.choice(list("the tea \n"), rng.integers(1, longest)))

  pairs = [(draw(70), draw(40)) for _ in range(40)]
  pairs = [(c, t) for c, t in pairs if c.strip()]  # an error of the harness
  pairs += [("", t) for _, t in pairs[:5]] + [("", "\0the tea")]
  texts = [(draw(150),) for _ in range(10)]
  for kind, args in (
    ("loglikelihood", pairs), ("loglikelihood_rolling", texts),
  ):
    requests = [Instance(kind, {}, a, i) for i, a in enumerate(args)]
    ours, theirs = (
      getattr(model, kind)(requests) for model in (make()[1], Reference())
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@functools.cache
def drawn():
  """Returns the inference of a byte model, and its weights."""
  config = override(
    tiny.get_config("test"),
    f"model.init_std=0.3 inference.context={CONTEXT} inference.batch=4 "
    "inference.chunk=16",
  )
  made = inference.build(config, {"tensor": 2})
  program = made.program
  params = jax.jit(
    program.init_params,
    out_shardings=program.layout.shardings(program.unpartitioned_specs),
  )(jax.random.key(0))
  return made, made.weights(params)


def test_generated_text_is_the_greedy_choice():
  """Uses a decoder, which reads prompts in chunks and has a cache."""
  made, weights = drawn()
  scorer, asked, completions = made.scorer_of(weights), [], []

  def generate(requests):
    asked.extend(requests)
    found = Generation(
      made.decoder_of(weights), requests, ByteTokenizer()
    ).run()
    completions.extend(found)
    return found

  found = harness.evaluate(
    Responder(scorer, ByteTokenizer(), generate), [WRITTEN]
  )
  assert found["metrics"][0]["metric"] == "exact_match"
  assert len(completions) == len(asked) == 6
  rows = [
    (*request.prompt, *completion.tokens)
    for request, completion in zip(asked, completions, strict=True)
  ]
  scores = scorer.score(rows)
  for completion, score in zip(completions, scores, strict=True):
    count = len(completion.tokens)
    assert 0 < count <= 8
    assert score.greedy[-count:].all()
    np.testing.assert_allclose(
      score.log_probabilities[-count:], completion.logprobs, rtol=1e-4,
      atol=1e-4,
    )
    assert "?" not in completion.text
    assert "\n" not in completion.text


@pytest.fixture(scope="module")
def server():
  """Serves the byte model with room for the token that the harness draws."""
  made, weights = drawn()
  capacity = dataclasses.replace(made.capacity, context=CONTEXT + 2)
  model = dataclasses.replace(made, capacity=capacity).decoder_of(weights)
  with small_server.running(model=model, tokens=ByteTokenizer()) as found:
    yield found


@functools.cache
def in_process():
  """Returns the scorer of the byte model, its responder, and its metrics."""
  made, weights = drawn()
  scorer = made.scorer_of(weights)
  ours = Responder(
    scorer, ByteTokenizer(),
    lambda asked: Generation(
      made.decoder_of(weights), asked, ByteTokenizer()
    ).run(),
  )
  return scorer, ours, harness.evaluate(ours, TASKS)["metrics"]


@pytest.mark.parametrize(
  "how", [{}, {"batch_size": 3}, {"tokenized_requests": False}]
)
def test_figures_over_http_equal_those_in_process(server, how):
  """The harness's own client sends tokens or texts, and reads logprobs."""
  client = get_model("local-completions")(
    model="small", base_url=f"{server.url}/v1/completions",
    max_length=CONTEXT + 2, **how,
  )
  assert client.tokenizer_backend == "remote"
  scorer, ours, expected = in_process()
  found = lm_eval.simple_evaluate(
    client, tasks=TASKS, task_manager=TaskManager(include_defaults=False),
    log_samples=False,
  )["results"]
  assert len(expected) == 5
  for row in expected:
    np.testing.assert_allclose(
      found[row["task"]][f"{row['metric']},{row['filter']}"], row["value"],
      rtol=1e-5, err_msg=row["task"],
    )
  # An empty context, truncated ones, and the first greedy choice in ASCII.
  text = "".join(map(chr, range(33, 127)))
  best = scorer.logits(
    ByteTokenizer().encode(text)[None, :CONTEXT]
  )[0].argmax(axis=-1)
  place = next(i for i, token in enumerate(best) if 32 < token < 127)
  requests = [
    Instance("loglikelihood", {}, pair, i)
    for i, pair in enumerate([
      ("", "tea"), (text, " yes"), (text[:9], "x" * 39),
      (text[: place + 1], chr(best[place])),
    ])
  ]
  mine, theirs = ours.loglikelihood(requests), client.loglikelihood(requests)
  np.testing.assert_allclose(theirs, mine, rtol=1e-5, atol=1e-5)
  assert [one[1] for one in theirs] == [False, False, False, True]


def test_group_is_the_mean_of_its_tasks():
  *tasks, group = harness.evaluate(make()[1], [GROUP])["metrics"]
  assert [row["task"] for row in (*tasks, group)] == [
    "sums_all::sums_with_spaces", "sums_all::sums_without", "sums_all",
  ]
  np.testing.assert_allclose(
    group["value"], np.mean([row["value"] for row in tasks])
  )
  assert all(row["stderr"] > 0 for row in (*tasks, group))


def test_invalid_tasks_and_limits_are_named(tmp_path):
  damaged = tmp_path / "damaged.yaml"
  damaged.write_text("task: damaged\ndataset_path: json\noutput: none\n")
  for tasks, limit, kind, message in (
    (["no.yaml"], None, FileNotFoundError, "--tasks=no.yaml: no such file"),
    ([str(damaged)], None, ValueError, "damaged.yaml: TypeError: .*'output'"),
    ([SUMS], 0.0, ValueError, "--limit=0.0 must be above 0"),
    (["arc_eazy"], None, ValueError, "did you mean arc_easy"),
  ):
    with pytest.raises(kind, match=message):
      harness.evaluate(make()[1], tasks, limit)


def test_run_is_evaluated_from_the_command_line(tmp_path):
  config = override(
    tiny.get_config("test"), "train.num_steps=2 optimizer.warmup_steps=1"
  )
  loop.train(experiments.build(config), tmp_path / "run")
  ended = subprocess.run(
    [sys.executable, "-m", "launch.evaluate", f"--workdir={tmp_path / 'run'}",
     f"--tasks={SUMS},{TEXT},{WRITTEN}", "--limit=3", "--json",
     "--cpu_devices=2"],
    capture_output=True, text=True, check=False,
  )
  assert ended.returncode == 0, ended.stderr
  found = json.loads(ended.stdout)
  assert (found["step"], found["context"]) == (2, config.data.seq_len)
  assert found["num_cut"] > 0
  assert len(found["metrics"]) == 5
  assert {row["num_documents"] for row in found["metrics"]} == {3}
