r"""Composition of experts: a router, and an expert for each kind of text.

The text is found on this machine: Python source, C headers, licences,
documentation, JSON, shell scripts, changelogs and manual pages. Perl and markup
replace kinds with too little text (caatnet/data/kinds.py). For each of 3 seeds,
a base of 0.87M parameters is trained on all kinds, 8 experts are trained from
the base, and two baselines have as many tokens or parameters.

  python -m launch.sweep --config=configs/experts/kinds.py

The same command resumes a stopped sweep. It ends with a report, and with the
library runs/experts/library for launch.serve. `kinds.py:small` has models of
0.13M parameters, `kinds.py:test` takes about a minute. Results:
log/2026-11-27-composition-of-experts.md.
"""

import ml_collections

from caatnet.schema.tree import defaults
from configs.caatnet import tiny


def get_config(size: str = "study") -> ml_collections.ConfigDict:
  """Returns the sweep: `study`, `small`, or `test` with three kinds."""
  if size not in ("study", "small", "test"):
    raise ValueError(f"kinds.py:{size}: the sizes are study, small and test")
  config = tiny.get_config("test" if size == "test" else "demo")
  config.name = "experts" if size == "study" else f"experts_{size}"
  config.parallel.tensor = 1
  config.data.validation_percent = 10.0
  config.kinds = defaults("kinds")
  config.sweep = defaults("sweep")
  config.sweep.seeds = (0,) if size == "test" else (0, 1, 2)
  config.train.log_every = 10
  if size == "small":
    config.model.width, config.model.num_layers = 64, 2
    config.model.ffn_width = 176
    config.model.num_heads = config.model.num_kv_heads = 4
  if size != "test":
    config.data.seq_len = 256
    config.data.validation_windows = 96
    config.train.num_steps = 500
    config.train.checkpoint_every = 40
    config.train.eval_every = 500
  else:
    config.kinds.count = 3
    config.kinds.size_bytes = 150_000
    config.kinds.min_bytes = 50_000
    config.kinds.expert_steps = 8
    config.kinds.router_prompts = 256
    config.kinds.prompt_bytes = 16
    config.kinds.experts = 8
  return config
