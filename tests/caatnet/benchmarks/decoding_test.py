"""Benchmark of decoding: a complete run, and its comparison with PyTorch."""

import dataclasses
import sys
import time

import jax
import numpy as np
import pytest

from caatnet.benchmarks.serving import decoders, decoding
from caatnet.inference.decoder import Capacity
from caatnet.inference.requests import stack_sampling_params
from caatnet.models.paged import Cache
from configs.benchmark import decoding as decoding_config
from tests.caatnet.benchmarks.printed import rows_of

# Python that answers as Hugging Face's script would.
RIVAL = """#!{python}
import json, sys
assert sys.argv[1] == "-P" and sys.argv[2].endswith("hugging_face.py")
asked = json.loads(input())
assert asked["model"]["max_position_embeddings"] == {context}
assert asked["compiled"] is False
print(json.dumps({{"transformers": "5", "torch": "2"}}), flush=True)
for line in sys.stdin:
  print(json.dumps(
    {{"prompt_seconds": 1.5, "decode_seconds": 2.0}}
  ), flush=True)
"""


def test_parts_of_a_step_add_up_to_it(tmp_path):
  config = decoding_config.get_config("test")
  options = config.benchmark
  python = tmp_path / "python"
  python.write_text(RIVAL.format(
    python=sys.executable, context=options.prompt + options.tokens
  ))
  python.chmod(0o755)
  options.rival = str(python)
  (row,) = decoding.run(config)["rows"]
  # The first token is the prompt's.
  drawn = row["batch"] * (options.tokens - 1)
  assert row["rival_tokens_per_second"] == [drawn / 2] * options.rounds
  assert row["rival_seconds"] == [3.5] * options.rounds
  for speed, seconds in zip(
    row["tokens_per_second"], row["seconds"], strict=True
  ):
    assert speed * seconds > drawn  # with prompts
  (times,) = row["ms"]
  parts = dict(row["parts_ms"])
  assert parts.pop("step") == times["step"]
  assert sum(parts.values()) == pytest.approx(times["step"])
  assert row["programs"] == 2  # with a chunk of the prompt, and without
  assert len(row["tokens_per_second"]) == config.benchmark.rounds


def test_rival_without_torch_is_an_error(tmp_path):
  config = decoding_config.get_config("test")
  config.benchmark.rival = str(tmp_path / "python")
  with pytest.raises(ValueError, match="cannot be run"):
    decoding.run(config)
  script = tmp_path / "python"
  script.write_text(f"#!{sys.executable}\n")  # exits immediately
  script.chmod(0o755)
  with pytest.raises(ValueError, match="needs torch"):
    decoding.run(config)


def test_tables_compare_with_a_rival_and_show_parts(capsys):
  parts = dict(zip(decoding._PARTS, (1.0, 2.0, 3.0, 4.0, 5.0), strict=True))
  row = {
    "batch": 4, "tokens_per_second": [100.0, 300.0], "seconds": [1.5],
    "programs": 3, "compile_seconds": 12.4, "parts_ms": parts | {"step": 15.0},
    "rival_tokens_per_second": [50.0, 100.0], "rival_seconds": [2.5],
  }
  decoding._print([row], {"transformers": "5", "torch": "2"})
  assert rows_of(capsys.readouterr().out) == [
    ["4", "caatnet", "200 (100 to 300)", "1.50 (1.50 to 1.50)",
     "2.50 (2.00 to 3.00)", "3 (12)"],
    ["4", "transformers 5, torch 2", "75 (50 to 100)", "2.50 (2.50 to 2.50)",
     "", ""],
    ["4", "1.00", "2.00", "3.00", "4.00", "5.00", "15.00"],
  ]
  decoding._print([row], None)
  first, _ = rows_of(capsys.readouterr().out)
  assert first[1:5:3] == ["caatnet", ""]


def test_parts_are_differences_of_programs_in_their_order():
  names = ("products", "dense", "logits", "program", "step")
  rounds = [
    dict(zip(names, times, strict=True)) for times in (
      (1, 3, 6, 10, 15), (2, 4, 7, 11, 16), (1, 3, 6, 10, 30)
    )
  ]
  assert decoding._median_parts_ms(rounds) == {
    "products": 1, "attention": 2, "gathering": 3, "sampling": 4, "inputs": 5,
    "step": 16,
  }


def test_median_is_of_the_calls_after_the_first(monkeypatch):
  clock, calls = [0.0], []

  def step():
    calls.append(0)
    clock[0] += 100.0 if len(calls) == 1 else 1e-3 * len(calls)

  monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
  # Calls 2 to 17 of 1 ms each more than the one before.
  assert decoding._median_ms(step) == pytest.approx(9.5)
  assert len(calls) == 1 + 16


def test_caches_of_timed_steps_are_three_quarters_full():
  capacity = Capacity(batch=2, context=92, chunk=8, page_size=16)
  batch = decoding._batch(capacity)
  assert batch.tables.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
  assert batch.positions.tolist() == [69, 69]
  assert batch.places.tolist() == [4 * 16 + 5, 10 * 16 + 5]
  assert batch.rows.tolist() == batch.sequences.tolist() == [0, 1]
  assert batch.num_decodes == 2


def test_contiguous_cache_attends_as_the_paged_one():
  """Written pages of two sequences, whose tables are in order."""
  made = decoders.build_inference(
    decoding_config.get_config("test"), batch=2, context=48
  )
  params, found = made.weights(decoders.init_params(made)).params, []
  batch = decoding._batch(made.capacity)
  for kind in (Cache, decoding._ContiguousCache):
    step, cache = decoding._partial_step(made, kind, False)
    keys = iter(jax.random.split(jax.random.key(1), 9))
    pages = jax.tree.map(
      lambda x, keys=keys: jax.device_put(
        jax.random.normal(next(keys), x.shape, x.dtype), x.sharding
      ), cache.pages,
    )
    logits, _ = step(
      params, dataclasses.replace(cache, pages=pages),
      dataclasses.replace(batch, tokens=np.int32([3, 5])),
      stack_sampling_params([None] * 2),
    )
    found.append(np.asarray(logits))
  np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)
  assert np.ptp(found[0]) > 0.1
