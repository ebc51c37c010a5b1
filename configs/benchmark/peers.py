r"""Training steps and decoding, compared with Hugging Face, llama.cpp, nanodo.

  python -m launch.benchmark --config=configs/benchmark/peers.py \
    --cpu_devices=1 --output=results/peers.json

All programs run in turns on this machine, in float32, with a model of 34M
parameters, 25M of them in layers. First, training steps of 2,048 tokens are
timed: of this project, of Hugging Face's Llama on torch and, with a checkout in
config.benchmark.nanodo, of nanodo. Then greedy decoding is timed: of this
project, of Hugging Face and of llama.cpp. Hugging Face's model runs eagerly,
and compiled by torch. llama.cpp has our weights, in float32 and in Q8_0; in
float32 it must give our tokens in at least half of the sequences. With a Python
in config.benchmark.vllm, or the program of llama.cpp in
config.benchmark.llama_server, streams over HTTP of our server and of theirs are
timed before all others. The source distribution of llama-cpp-python contains
the source of that program, in vendor/llama.cpp: `cmake -B build
-DLLAMA_BUILD_SERVER=ON`, `cmake --build build --target llama-server`. The rates
of matrix products and of memory reads are measured in the same run.

The command makes an environment with torch, transformers, llama-cpp-python and
gguf; PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu installs torch
without CUDA. llama-cpp-python is compiled for this machine, which needs a C++
compiler and takes long, once.

Aims for training: 1.0 times the speed of Hugging Face, 1.2 times that of
nanodo; 8 ranks on the device take at most 1.05 times (p = 1) and 1.3 times (p =
.5) as long as one. Aims for decoding: with one sequence 2.0 times the speed of
Hugging Face and 0.9 times that of llama.cpp, with 16 sequences 1.2 times that
of Hugging Face; int8 weights 1.5 times the speed of float32.

It takes ten minutes on two cores with vLLM and without torch.compile. Results
are in `config.benchmark.results`, and the same command continues after an
interruption. `peers.py:135m` has weights much larger than a CPU's caches, and
skips the training steps; `peers.py:test` has tiny models and no other programs.
"""

import ml_collections

from caatnet.benchmarks.peers.keys import Peers
from caatnet.schema.tree import defaults
from configs.benchmark import decoding


def get_config(size: str = "25m") -> ml_collections.ConfigDict:
  """Returns the benchmark of a model: `25m`, `135m`, or `test` for seconds."""
  config = decoding.get_config(size)
  config.name = "peers"
  config.data.seq_len, config.data.batch_size = 256, 8
  config.benchmark = defaults(Peers)
  if size == "135m":
    config.benchmark.variants = ()
  if size == "test":
    config.data.seq_len = 16
    config.benchmark.results = ""
    config.benchmark.rounds = config.benchmark.steps = 1
    config.benchmark.variants = config.benchmark.variants[:1]
    config.benchmark.batches, config.benchmark.packages = (1,), ()
    config.benchmark.prompt, config.benchmark.tokens = 15, 35
  return config
