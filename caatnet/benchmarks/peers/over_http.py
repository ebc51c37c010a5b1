"""Streams over HTTP from our server and from vLLM's, in turns.

vLLM has a model of the same sizes with random weights, and a tokenizer with a
word for each token, so that each of its tokens is an event, as each of ours is
by its log-probability.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time
from typing import Any
import urllib.error
import urllib.request

import numpy as np

from caatnet.benchmarks.harness import processes, timing
from caatnet.benchmarks.serving import decoders, decoding, server
from caatnet.config import serving
from caatnet.serving.engine import warm_up
from caatnet.show import servers, tables

_KEY = "config.benchmark.vllm"
_START_S, _END_S = 600.0, 20.0  # it compiles its model
_TOKENIZER = {
  "version": "1.0", "added_tokens": [],
  **dict.fromkeys((
    "normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation",
    "padding",
  )),
}


def rows(config: Any) -> list[dict[str, Any]]:
  """Returns the rates of both servers, in the same rounds.

  Args:
    config: Config like configs/benchmark/peers.py, with ``benchmark.vllm``.

  Raises:
    ValueError: vLLM cannot be started, or a stream has failed.
  """
  options = config.benchmark
  batch = max(options.batches, default=1)
  context = options.prompt + options.tokens
  decoder = decoders.decoder(
    decoders.built(config, batch=batch, context=context)
  )
  sizes = decoder, serving.FACTOR
  servers.progress(warm_up.warm_up(*sizes), len(warm_up.shapes(*sizes)))
  prompts = np.random.default_rng(0).integers(
    config.model.vocab_size, size=(2 * batch, options.prompt)
  ).tolist()
  with processes.pool(1) as pool, vllm(config, batch, context) as url:
    found = timing.in_turns({
      "caatnet": lambda: server.served(
        decoder, server.options_of(len(prompts)), prompts, options.tokens, pool
      ),
      "vllm": lambda: pool.submit(
        server.ask, url, prompts, options.tokens
      ).result(),
    }, options.rounds, label=f"{len(prompts)} streams over HTTP")
  for name, rounds in found.items():
    for each in rounds:
      if each["errors"]:
        raise ValueError(f"streams of {name}: {each['errors'][0]}")
  return [
    {
      "by": name, "streams": len(prompts), "batch": batch,
      "tokens_per_second": [each["tokens_per_second"] for each in rounds],
      "ttft_p50_s": [each["measures"]["TTFT"]["P50"] for each in rounds],
    } for name, rounds in found.items()
  ]


def show(found: Sequence[Mapping[str, Any]]) -> None:
  """Prints the table of `rows`."""
  first = np.array(found[0]["tokens_per_second"])
  tables.table(
    f"{found[0]['streams']} streams over HTTP, at most {found[0]['batch']} at "
    "a time, float32",
    ["by", "tokens/s", "caatnet is x times as fast", "TTFT P50 (s)"],
    [
      [
        row["by"], timing.range_text(row["tokens_per_second"]),
        timing.range_text(first / row["tokens_per_second"], ".2f"),
        timing.range_text(row["ttft_p50_s"], ".2f"),
      ] for row in found
    ],
  )


@contextlib.contextmanager
def vllm(config: Any, batch: int, context: int) -> Iterator[str]:
  """Starts vLLM's server; yields its URL.

  Args:
    config: Config with ``model``, ``benchmark.vllm`` and ``benchmark.threads``.
    batch: Sequences that it runs together.
    context: Tokens of a sequence.

  Raises:
    ValueError: It cannot be run, or does not answer.
  """
  python, port = config.benchmark.vllm, processes.free_port()
  url = f"http://127.0.0.1:{port}"
  with tempfile.TemporaryDirectory() as folder:
    log = pathlib.Path(folder) / "log"
    write_model(pathlib.Path(folder), config.model, context)
    command = [
      *processes.with_parent("TERM"), python, "-m",
      "vllm.entrypoints.openai.api_server", f"--model={folder}",
      "--served-model-name=benchmark", "--load-format=dummy",
      "--dtype=float32", f"--max-model-len={context}",
      f"--max-num-seqs={batch}", "--host=127.0.0.1", f"--port={port}",
    ]
    environment = os.environ | {
      "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
      "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
      "VLLM_CPU_OMP_THREADS_BIND": "nobind",
      "OMP_NUM_THREADS": str(config.benchmark.threads),
    }
    try:
      with open(log, "wb") as output:
        process = subprocess.Popen(
          command, stdout=output, stderr=output, env=environment,
          start_new_session=True,
        )
    except OSError as error:
      raise ValueError(f"{_KEY}={python!r}: {error}") from error
    try:
      _wait(url, process, log)
      yield url
    finally:
      _end(process)


def _end(process: subprocess.Popen) -> None:
  """Ends a server and the processes that it has started."""
  process.terminate()
  with contextlib.suppress(subprocess.TimeoutExpired):
    process.wait(_END_S)
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()


def write_model(folder: pathlib.Path, model: Any, positions: int) -> None:
  """Writes a Llama's sizes, and a tokenizer whose tokens are words.

  Args:
    folder: Folder of the files, as Hugging Face names them.
    model: Section ``config.model``.
    positions: Number of positions.
  """
  words = {f"{i} ": i for i in range(model.vocab_size)}
  for name, value in {
    "config": decoding.llama_sizes(model, positions) | {
      "architectures": ["LlamaForCausalLM"], "model_type": "llama",
      "bos_token_id": 0, "eos_token_id": 1,
    },
    "tokenizer": _TOKENIZER | {
      "model": {"type": "WordLevel", "vocab": words, "unk_token": "0 "},
    },
    "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"},
  }.items():
    (folder / f"{name}.json").write_text(json.dumps(value))


def _wait(url: str, process: subprocess.Popen, log: pathlib.Path) -> None:
  """Waits until a server answers.

  Raises:
    ValueError: It has ended, with the last line of its log, or is too slow.
  """
  begin = time.monotonic()
  while time.monotonic() - begin < _START_S:
    if process.poll() is not None:
      lines = log.read_text(errors="replace").strip().splitlines()
      why = lines[-1] if lines else f"it ended with code {process.returncode}"
      raise ValueError(f"{_KEY}: {why}")
    try:
      with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
        return
    except (urllib.error.URLError, OSError):
      time.sleep(0.5)
  raise ValueError(f"{_KEY}: no answer within {_START_S:g} s")
