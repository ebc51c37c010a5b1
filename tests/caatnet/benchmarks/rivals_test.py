"""Scripts that other Pythons run, with stand-ins for the packages of those.

A stand-in has what a script uses of a package, and records how it is used.
"""

import contextlib
import itertools
import sys
import time
import types

from flax import linen
import numpy as np
import pytest

from caatnet.benchmarks.elastic import ring_torch
from caatnet.benchmarks.graphs import graphs_dgl
from caatnet.benchmarks.peers import nanodo_step, torch_step
from caatnet.benchmarks.planner import planner_cp_sat
from caatnet.benchmarks.serving import hugging_face

STEP_S = 0.01


class Llama:
  """Model of two parameters, of 5 and 7 elements."""

  def __init__(self, config):
    self.made, self.calls = config, []
    self.config = types.SimpleNamespace(_attn_implementation="sdpa")

  def parameters(self):
    return [types.SimpleNamespace(numel=lambda n=n: n) for n in (5, 7)]

  def __getattr__(self, name):  # float, eval and train return the model
    return lambda: self.calls.append(name) or self

  def generate(self, prompts, stopping_criteria, **options):
    self.calls.append((prompts, options))
    (arrived,) = stopping_criteria
    for number in range(options["max_new_tokens"]):
      # The first token takes as long as two others.
      time.sleep(STEP_S * (1 + (number == 0)))
      stops = arrived(np.zeros((len(prompts), 4 + number)), None, cache=None)
      assert stops.tolist() == [False] * len(prompts)

  def __call__(self, input_ids, labels):
    assert labels is input_ids
    time.sleep(STEP_S)
    self.calls.append(input_ids.shape)
    number = sum(x == input_ids.shape for x in self.calls)
    return types.SimpleNamespace(loss=types.SimpleNamespace(
      backward=lambda: self.calls.append("backward"), item=lambda: 1 / number
    ))


@pytest.fixture
def llamas(install):
  """Returns the models that a script makes."""
  made, threads = [], []

  def compiled(model):
    def forward(**tokens):
      model.calls.append("compiled")
      return model(**tokens)

    return forward

  class AdamW:
    def __init__(self, parameters, **settings):
      assert len(parameters) == 2
      self.calls = made[0].calls
      self.calls.append(settings)

    def step(self):
      self.calls.append("step")

    def zero_grad(self):
      self.calls.append("zero_grad")

  def build(config):
    assert set(threads) == {3}
    made.append(Llama(config))
    return made[-1]

  install(
    torch={
      "__version__": "9.8", "set_num_threads": threads.append,
      "manual_seed": np.random.seed,
      "randint": lambda high, size: np.random.randint(high, size=size),
      "ones_like": np.ones_like, "zeros": np.zeros, "bool": bool,
      "inference_mode": contextlib.nullcontext, "compile": compiled,
      "optim": types.SimpleNamespace(AdamW=AdamW),
      "nn": types.SimpleNamespace(utils=types.SimpleNamespace(
        clip_grad_norm_=lambda _, norm: made[0].calls.append(norm)
      )),
    },
    transformers={
      "__version__": "7.6", "LlamaForCausalLM": build,
      "LlamaConfig": lambda **sizes: types.SimpleNamespace(**sizes),
      "CompileConfig": types.SimpleNamespace,
    },
  )
  return made


@pytest.mark.parametrize("compiled", [False, True])
def test_arrivals_of_generated_tokens_are_timed(llamas, answers, compiled):
  asked = {"batch": 2, "prompt": 4, "tokens": 3}
  made = {"threads": 3, "compiled": compiled, "model": {"vocab_size": 11}}
  about, first, second = answers(hugging_face.main, made, asked, asked)
  assert about == {
    "torch": "9.8", "transformers": "7.6", "attention": "sdpa",
    "num_params": 12,
  }
  (model,) = llamas
  to_float, to_eval, *runs = model.calls
  assert (to_float, to_eval) == ("float", "eval")
  for prompts, options in runs:
    assert prompts.shape == (2, 4)
    assert 0 <= prompts.min() <= prompts.max() < 11
    assert options.pop("attention_mask").tolist() == [[1] * 4] * 2
    if compiled:  # on a CPU only if asked for
      assert options.pop("cache_implementation") == "static"
      assert vars(options.pop("compile_config")) == {
        "mode": "default", "dynamic": False, "_compile_all_devices": True,
      }
    assert options == {
      "min_new_tokens": 3, "max_new_tokens": 3, "do_sample": False,
      "use_cache": True, "pad_token_id": 0,
    }
  assert len(runs) == 2
  # A run has the same prompts in each process.
  answers(hugging_face.main, made, asked)
  np.testing.assert_array_equal(llamas[1].calls[2][0], runs[0][0])
  for found in (first, second):
    assert found.keys() == {"prompt_seconds", "decode_seconds"}
    assert found["prompt_seconds"] >= 2 * STEP_S
    assert found["decode_seconds"] >= 2 * STEP_S  # of two tokens


@pytest.mark.parametrize("compiled", [False, True])
def test_steps_of_torch_are_those_of_adamw_with_clipping(
  llamas, answers, compiled
):
  start = time.perf_counter()
  about, found, last = answers(
    torch_step.main, {
      "threads": 3, "compiled": compiled, "batch": 2, "length": 6,
      "model": {"vocab_size": 11},
    }, {"steps": 2}, {"steps": 1},
  )
  passed = time.perf_counter() - start
  assert about == {
    "name": "transformers 7.6, torch 9.8" + ", compiled" * compiled,
    "attention": "sdpa", "num_params": 12,
  }
  (model,) = llamas
  assert model.made.use_cache is False
  assert model.calls == [
    "float", "train", {
      "lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True,
    }, *[
      *["compiled"] * compiled, (2, 6), "backward", 1.0, "step", "zero_grad"
    ] * 3,
  ]
  assert (found["loss"], last["loss"]) == (1 / 2, 1 / 3)
  assert STEP_S <= found["seconds"] < passed / 2
  assert STEP_S <= last["seconds"] < passed


class Bigram(linen.Module):
  """Logits of the next token of seven, a row of a matrix for each token."""

  @linen.compact
  def __call__(self, tokens):
    return linen.Embed(7, 7)(tokens)


def test_transformer_of_nanodo_is_not_sharded(install, answers):
  made = []
  install(nanodo={}, nanodo__model={
    "DoConfig": lambda **sizes: sizes,
    "TransformerDo": lambda config: made.append(config) or Bigram(),
  })
  (about,) = answers(
    nanodo_step.main, {"model": {"V": 7, "D": 3}, "batch": 2, "length": 4}
  )
  assert made == [{"V": 7, "D": 3, "fsdp_enabled": False}]
  assert about["num_params"] == 49


def test_edges_and_times_of_dgl_are_of_batches_after_the_warm_up(
  install, answers, monkeypatch, tmp_path
):
  asked = []

  def sample(graph, seeds):
    time.sleep(STEP_S)
    asked.append(seeds.tolist())
    blocks = [
      types.SimpleNamespace(num_edges=lambda n=n: n)
      for n in (len(seeds), 10 * len(seeds))
    ]
    return np.zeros(100 * len(seeds)), None, blocks

  def graph(kind):
    name, (indptr, indices, data) = kind
    assert (name, data) == ("csc", [])
    assert (indptr.dtype, indptr.tolist()) == ("int64", [0, 1, 3])
    assert (indices.dtype, indices.tolist()) == ("int64", [1, 0, 1])

  fanouts, threads = [], []
  install(
    torch={"set_num_threads": threads.append, "from_numpy": lambda x: x},
    dgl={
      "__version__": "5.4", "graph": graph,
      "dataloading": types.SimpleNamespace(NeighborSampler=lambda of: (
        fanouts.append(of) or types.SimpleNamespace(sample=sample)
      )),
    },
  )
  np.save(tmp_path / "indptr.npy", np.int32([0, 1, 3]))
  np.save(tmp_path / "indices.npy", np.int32([1, 0, 1]))
  np.save(tmp_path / "roots.npy", np.int32([[0, 1], [1, 1], [1, 0]]))
  monkeypatch.setattr(
    sys, "argv", ["graphs_dgl.py", str(tmp_path), "1", "4", "15", "10"]
  )
  (found,) = answers(graphs_dgl.main)
  assert asked == [[0, 1], [1], [0, 1]]  # roots occur once
  assert (fanouts, threads) == ([[10, 15]], [4])
  seconds = found.pop("with_unique_s")
  assert found == {
    "of": "DGL 5.4", "edges": 33, "unique": 300, "sampled_s": None,
  }
  assert seconds >= 2 * STEP_S


@pytest.mark.parametrize("lost", [0, 1])
def test_sums_of_gloo_in_torch_are_timed_after_the_first(
  install, answers, lost
):
  """Each process of three has ones; a sum that lacks one is noticed."""
  calls = []

  def joined(backend, **group):
    assert backend == "gloo"
    calls.append(group)

  def summed(x):
    # The first one touches new memory.
    time.sleep(STEP_S * (1 if "sum" in calls else 20))
    calls.append("sum")
    x *= 3
    x[-1] -= lost

  install(torch={
    "__version__": "9.8", "ones": np.ones, "set_num_threads": calls.append,
    "distributed": types.SimpleNamespace(
      init_process_group=joined, all_reduce=summed,
      barrier=lambda: calls.append("barrier"),
      destroy_process_group=lambda: calls.append("end"),
    ),
  })
  asked = {"rank": 1, "count": 3, "port": 12, "size": 5, "rounds": 2}
  if lost:
    with pytest.raises(AssertionError):
      answers(ring_torch.main, asked)
    return
  (found,) = answers(ring_torch.main, asked)
  assert calls == [
    1, {"init_method": "tcp://127.0.0.1:12", "rank": 1, "world_size": 3},
    *["barrier", "sum"] * 3, "end",
  ]
  assert (found["torch"], len(found["seconds"])) == ("9.8", 2)
  assert STEP_S <= min(found["seconds"]) <= max(found["seconds"]) < 20 * STEP_S


class Sum:
  """Sum of variables of a model; a variable is the sum of itself."""

  def __init__(self, *names):
    self.names = names

  def __radd__(self, other):
    return self if other == 0 else Sum(*other.names, *self.names)

  __add__ = __radd__

  def __ge__(self, other):
    return self, other


class Model:
  """The part of CP-SAT that the script uses, solved by trying all orders."""

  def __init__(self):
    self.bounds, self.tables, self.least, self.hint = {}, [], [], {}
    self.add_all_different = lambda found: setattr(self, "devices", found)
    self.add_hint = lambda variable, value: self.hint.update({variable: value})

  def new_int_var(self, low, high, name):
    made = Sum(f"{name} {len(self.bounds)}")
    self.bounds[made.names[0]] = low, high
    return made

  def add_allowed_assignments(self, variables, rows):
    self.tables.append(([x.names[0] for x in variables], rows))

  def add(self, constraint):
    self.least.append(constraint)

  def minimize(self, total):
    self.total = total

  def solve(self):
    """Returns the value of the best order's sum, and its variables."""
    names, best = [x.names[0] for x in self.devices], None
    (low, high), = {self.bounds[name] for name in names}
    for order in itertools.permutations(range(low, high + 1), len(names)):
      of = dict(zip(names, order, strict=True))
      for (a, b, link), rows in self.tables:
        found = [z for x, y, z in rows if (x, y) == (of[a], of[b])]
        of[link] = found[0] if found else np.inf
      for worst, links in self.least:
        name, cost = worst.names[0], sum(of[x] for x in links.names)
        of[name] = max(of.get(name, 0), cost)
        if of[name] > self.bounds[name][1]:
          of[name] = np.inf
      value = sum(of[x] for x in self.total.names)
      best = min(best or (np.inf, of), (value, of), key=lambda x: x[0])
    return best


def test_order_of_cp_sat_has_the_least_cost(install, answers):
  """Two kinds of links: the slowest one, and the slowest of two pipelines."""
  class Solver:
    def __init__(self):
      self.parameters, self.wall_time = types.SimpleNamespace(), 2.5

    def solve(self, model):
      assert self.parameters.max_time_in_seconds == 9
      assert [model.hint[x] for x in model.devices] == [0, 1, 2, 3]
      # Costs are in ten-thousandths of the known one, and no larger.
      most, = {high for _, high in model.bounds.values()} - {3}
      assert most in (10_000, 10_001)
      self.best_objective_bound, self.found = model.solve()
      return 4

    def value(self, variable):
      return self.found[variable.names[0]]

  module = {
    "CpModel": Model, "CpSolver": Solver, "OPTIMAL": 4, "FEASIBLE": 2,
  }
  install(ortools={}, ortools__sat={}, ortools__sat__python={
    "cp_model": types.SimpleNamespace(**module)
  })
  first, second = np.random.default_rng(0).uniform(1, 3, (2, 4, 4))

  def cost(order):
    a, b, c, d = order
    links = first[a, b], first[b, c]
    return max(links) + max(
      second[a, b] + second[b, c], second[c, d] + second[d, a]
    )

  (found,) = answers(planner_cp_sat.main, {
    "size": 4, "known": cost(range(4)), "hint": [0, 1, 2, 3], "limit_s": 9,
    "kinds": [
      {"seconds": first.tolist(), "source": [0, 1], "target": [1, 2],
       "sums": [[0], [1]]},
      {"seconds": second.tolist(), "source": [0, 1, 2, 3],
       "target": [1, 2, 3, 0], "sums": [[0, 1], [2, 3]]},
    ],
  })
  assert cost(found["order"]) == pytest.approx(
    min(map(cost, itertools.permutations(range(4)))), rel=1e-3
  )
  # Six costs are rounded down.
  assert 0 <= cost(found["order"]) - found["bound"] < 6e-4 * cost(range(4))
  assert (found["proven"], found["seconds"]) == (True, 2.5)
