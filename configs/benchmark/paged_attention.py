"""Support matrix of paged attention kernels.

  python -m launch.benchmark --config=configs/benchmark/paged_attention.py

For each kernel, head width and number of kv heads of a rank the table has the
supported cases: decoding (one new token per sequence), a chunk of a prompt, a
sliding window, int8 pages, and two lanes under ``jax.vmap`` (without support,
lanes run sequentially). A mixed step needs a kernel with the first two. Each
cell is compiled for the target on this machine, under ``jax.shard_map`` with
checked varying axes, or has the reason of the failure; "copies" means that XLA
copies the pages for the kernel. If the target's compiler is not installed,
programs are only lowered, and the table has a note. Pages are declared to be
finite, as jax's own kernels require.

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
