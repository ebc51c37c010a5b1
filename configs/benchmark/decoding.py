"""Decoding of a 25M-parameter model on a CPU, compared with Hugging Face.

  python -m launch.benchmark --config=configs/benchmark/decoding.py \
    --cpu_devices=1 --config.benchmark.rival=/path/to/python

config.benchmark.rival is a Python with torch and transformers, whose `generate`
is timed; without it, only our decoding is timed. Both continue the same number
of random prompts greedily in float32, in alternation, after one warm-up round.
Both use two cores: `taskset --cpu-list 0,1` on machines with more cores.
"""

import ml_collections

from caatnet.benchmarks.serving.keys import Decoding
from caatnet.schema.tree import defaults
from configs.caatnet import base


def get_config(size: str = "25m") -> ml_collections.ConfigDict:
  """Returns the benchmark of a model: `25m`, `135m`, or `test` for seconds."""
  if size not in ("25m", "135m", "test"):
    raise ValueError(f"decoding.py:{size}: the sizes are 25m, 135m and test")
  config = base.get_config()
  config.name = "decoding"
  config.model.width = 512
  config.model.num_layers = 8
  config.model.ffn_width = 1376
  config.model.vocab_size = 8192
  config.model.dtype = "float32"
  config.parallel.tensor = 1
  config.benchmark = defaults(Decoding)
  if size == "135m":  # weights of a step are many times a CPU's caches
    config.model.width = 768
    config.model.num_layers = 12
    config.model.num_heads = config.model.num_kv_heads = 12
    config.model.ffn_width = 2048
    config.model.vocab_size = 32768
  if size == "test":
    config.model.width = 32
    config.model.num_layers = 1
    config.model.ffn_width = 48
    config.model.vocab_size = 256
    config.benchmark.rounds = 1
    config.benchmark.batches = (1,)
    config.benchmark.prompt, config.benchmark.tokens = 15, 35
  return config
