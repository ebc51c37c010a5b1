"""Servers of other projects with OpenAI's API for completions.

vLLM has a model of the same sizes with random weights, and a tokenizer with a
word for each token, so that it sends one event per token. Our server sends one
event per token because clients ask for log-probabilities. llama.cpp has our
weights in float32, and the same tokenizer as vLLM.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import json
import os
import pathlib
import subprocess
import tempfile
import time
from typing import Any
import urllib.error
import urllib.request

from caatnet.benchmarks.harness import scripts
from caatnet.benchmarks.serving import decoding
from caatnet.serving.server import local
from parallel.peers.emulation import processes

# Script that writes llama.cpp's files and times its decoding.
LLAMA_SCRIPT = pathlib.Path(__file__).with_name("llama.py")
_START_S = 600.0  # time limit of a start, in which vLLM compiles its model
_TOKENIZER = {
  "version": "1.0", "added_tokens": [],
  **dict.fromkeys((
    "normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation",
    "padding",
  )),
}


@contextlib.contextmanager
def vllm(config: Any, batch: int, context: int) -> Iterator[str]:
  """Starts vLLM's server; yields its URL.

  Args:
    config: Config with ``model``, ``benchmark.vllm`` and ``benchmark.threads``.
    batch: Sequences that it runs together.
    context: Tokens of a sequence.

  Raises:
    ValueError: The server cannot be run, or does not answer.
  """
  with tempfile.TemporaryDirectory() as folder:
    write_model_config(pathlib.Path(folder), config.model, context)
    command = [
      config.benchmark.vllm, "-m", "vllm.entrypoints.openai.api_server",
      f"--model={folder}", "--served-model-name=benchmark",
      "--load-format=dummy", "--dtype=float32", f"--max-model-len={context}",
      f"--max-num-seqs={batch}",
      # Our server, too, keeps no prompts of earlier rounds.
      "--no-enable-prefix-caching",
    ]
    with _start_server("config.benchmark.vllm", command, {
      "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
      "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
      "VLLM_CPU_OMP_THREADS_BIND": "nobind",
      "OMP_NUM_THREADS": str(config.benchmark.threads),
    }) as url:
      yield url


@contextlib.contextmanager
def llama_cpp(
  config: Any, batch: int, context: int, python: str, weights: str
) -> Iterator[str]:
  """Starts llama.cpp's server; yields its URL.

  Args:
    config: Config with ``model``, ``benchmark.llama_server`` and
      ``benchmark.threads``.
    batch: Sequences that it runs together.
    context: Tokens of a sequence.
    python: Python with gguf, which writes the model's file.
    weights: npz file of `decoders.hugging_face_params`.

  Raises:
    ValueError: The server cannot be run, or does not answer.
  """
  threads = config.benchmark.threads
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "model.gguf")
    positions = context + 1  # the server ends a sequence that fills its context
    question = llama_request(config, positions, "F32", weights) | {"path": path}
    scripts.ask_script([python, "-P", str(LLAMA_SCRIPT)], question)
    # Keeps no prompts of earlier rounds, like the other servers.
    command = [
      config.benchmark.llama_server, "--model", path, "--ctx-size",
      batch * positions, "--parallel", batch, "--threads", threads,
      "--threads-batch", threads, "--cache-type-k", "f32", "--cache-type-v",
      "f32", "--no-cache-prompt", "--cache-ram", 0,
    ]
    with _start_server(
      "config.benchmark.llama_server", list(map(str, command))
    ) as url:
      yield url


@contextlib.contextmanager
def _start_server(
  key: str, command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[str]:
  """Starts a server on a free port, and waits until it answers.

  Args:
    key: Config key that names the server's program, for errors.
    command: Program and arguments, without host and port.
    environment: Variables in addition to those of this process.

  Yields:
    The server's URL.

  Raises:
    ValueError: The server cannot be run, or does not answer.
  """
  port = processes.free_port()
  url = f"http://127.0.0.1:{port}"
  with tempfile.TemporaryDirectory() as folder:
    log = pathlib.Path(folder) / "log"
    try:
      with open(log, "wb") as output:
        process = subprocess.Popen(
          [
            *local.parent_death_prefix(), *command, "--host", "127.0.0.1",
            "--port", str(port),
          ], stdout=output, stderr=output,
          env=os.environ | dict(environment or {}), start_new_session=True,
        )
    except OSError as error:
      raise ValueError(f"{key}={command[0]!r}: {error}") from error
    try:
      _wait(key, url, process, log)
      yield url
    finally:
      local.end(process)


def llama_request(
  config: Any, positions: int, kind: str, weights: str
) -> dict[str, Any]:
  """Returns the request of `LLAMA_SCRIPT` that describes a model.

  Args:
    config: Config with ``model``.
    positions: Number of positions.
    kind: Type of llama.cpp's matrices, "F32" or "Q8_0".
    weights: npz file of `decoders.hugging_face_params`.
  """
  return {
    "type": kind, "weights": weights, "norm_eps": config.model.norm_eps,
    "rope_base": config.model.rope_base,
    "model": decoding.llama_sizes(config.model, positions),
  }


def write_model_config(
  folder: pathlib.Path, model: Any, positions: int
) -> None:
  """Writes the config of a Llama, and a tokenizer with a word for each token.

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


def _wait(
  key: str, url: str, process: subprocess.Popen, log: pathlib.Path
) -> None:
  """Waits until a server answers.

  Raises:
    ValueError: The server has ended (see its last line) or is too slow.
  """
  begin = time.monotonic()
  while time.monotonic() - begin < _START_S:
    if process.poll() is not None:
      lines = log.read_text(errors="replace").strip().splitlines()
      why = lines[-1] if lines else f"it ended with code {process.returncode}"
      raise ValueError(f"{key}: {why}")
    try:
      with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
        return
    except (urllib.error.URLError, OSError):
      time.sleep(0.5)
  raise ValueError(f"{key}: the server did not answer within {_START_S:g} s")
