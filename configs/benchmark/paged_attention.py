"""Which kernel of attention over pages runs where.

  python -m launch.benchmark --config=configs/benchmark/paged_attention.py

For each kernel, head width and number of kv heads of a rank the table says what
it takes: decoding (one new token of each sequence), a chunk of a prompt, a
window, int8 pages, and two lanes under ``jax.vmap`` (other code goes through
lanes one by one). A mixed step wants a kernel that takes the first two. Each
cell is compiled for the target from this machine, under ``jax.shard_map`` with
checked varying axes, or it has the reason why not; "copies" says that XLA
copies the pages for it. Where the target's compiler is not installed, programs
are lowered only, and the table says so. Pages are promised to be finite, which
jax's own kernels need.

One target needs the extra `tpu`, the other `cuda`:

  python -m launch.benchmark --config=configs/benchmark/paged_attention.py \
    --config.benchmark.targets='("gpu:h200:1x1",)'
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.name = "paged_attention"
  config.benchmark = defaults("benchmark", "paged_attention")
  return config
