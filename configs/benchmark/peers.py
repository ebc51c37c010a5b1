r"""Training steps and decoding, compared with Hugging Face and nanodo.

  python -m launch.benchmark --config=configs/benchmark/peers.py \
    --cpu_devices=1 --output=results/peers.json

All subjects run in turns on this machine, in float32, with a model of 25M
parameters: training steps of 2,048 tokens of ours, of Hugging Face's Llama on
torch and, with a checkout in config.benchmark.nanodo, of nanodo; then decoding
of ours and of Hugging Face; then, with a Python in config.benchmark.vllm,
streams over HTTP of our server and of vLLM's. The rates of matrix products and
of reads of memory are measured in the same run. The command makes an
environment with torch and transformers;
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu keeps torch small. Aims: 1.0 times Hugging Face's training and 1.2 times nanodo's,
lanes at most 1.05 (p = 1) and 1.3 times (p = .5) the time of one rank; 2.0
times Hugging Face's decoding of one sequence and 1.2 times that of 16.

It takes about ten minutes on two cores; `peers.py:test` has tiny models, and
nothing to compare.
"""

import ml_collections

from caatnet.config.schema.tree import defaults
from configs.benchmark import decoding


def get_config(size: str = "25m") -> ml_collections.ConfigDict:
  """Returns the benchmark: `25m`, or `test` for a model that takes seconds."""
  config = decoding.get_config(size)
  config.name = "peers"
  config.data.seq_len, config.data.batch_size = 256, 8
  config.benchmark = defaults("benchmark", "peers")
  if size == "test":
    config.data.seq_len = 16
    config.benchmark.rounds = config.benchmark.steps = 1
    config.benchmark.variants = config.benchmark.variants[:1]
    config.benchmark.batches, config.benchmark.packages = (1,), ()
    config.benchmark.prompt, config.benchmark.tokens = 15, 35
  return config
