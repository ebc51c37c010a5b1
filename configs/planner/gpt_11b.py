r"""Plans a language model of 11.1B parameters on 128 GPUs.

  python -m launch.plan --config=configs/planner/gpt_11b.py
  python -m launch.plan --config=configs/planner/gpt_11b.py \
    --cluster=pipette-v100:16,uneven=3 --plot=plan.png
  python -m launch.plan --config=configs/planner/gpt_11b.py \
    --cluster=my_cluster.json --why_not="parallel.stage=8 parallel.tensor=8"

The number of parameters and the clusters are those of Pipette (arXiv
2405.18093, larger model); layers, width, vocabulary and batch are ours.
Clusters are JSON files (`parallel/plans/hardware/cluster_files.py`; written by
`launch.measure`) or names of examples. All times are predictions. The plan
takes half a minute on one core. Each reported configuration ends with the flags
of a training run:

  python -m launch.train --config=configs/planner/gpt_11b.py:train \
    --config.parallel.stage=4 ...

A second table (`config.planner.second`) has variants that are faster but change
training, with the flags of each row. Rows with an outer loop need the config
with its section, `gpt_11b.py:train,diloco` or `train,streaming`.

`gpt_11b.py:test` plans a small model for eight devices in a second.
"""

import ml_collections

from caatnet.schema.tree import choices, defaults
from caatnet.studies.planner.keys import Planner
from configs.caatnet import base

SIZES = ("plan", "train", "test", "test_train")


def get_config(arguments: str = "plan") -> ml_collections.ConfigDict:
  """Returns the config of the plan or, with "train", of the training run.

  Args:
    arguments: One of ``SIZES``; for a training run, optionally with an outer
      loop, as in "train,diloco".
  """
  size, _, algorithm = arguments.partition(",")
  of_run = size.endswith("train")
  if size not in SIZES or (algorithm and not of_run):
    raise ValueError(
      f"configs/planner/gpt_11b.py:{arguments}: the sizes are "
      f"{', '.join(SIZES)}; those of a run may have an outer loop, as in "
      "train,diloco"
    )
  config = base.get_config()
  config.name = "gpt_11b"
  if algorithm:
    loops = choices("outer")
    if algorithm not in loops:
      raise ValueError(
        f"configs/planner/gpt_11b.py:{arguments}: the outer loops are "
        f"{', '.join(loops)}"
      )
    config.name += f"_{algorithm}"
    config.outer = defaults("outer", algorithm)
  config.model.vocab_size = 51_200
  config.model.num_layers = 52
  config.model.width = 4096
  config.model.num_heads = 32
  config.model.num_kv_heads = 32
  config.model.ffn_width = 11_264
  config.model.dtype = "bfloat16"
  config.data.seq_len = 2048
  config.data.batch_size = 512
  config.optimizer.learning_rate = 2e-4
  config.optimizer.warmup_steps = 2_000
  config.train.num_steps = 100_000
  config.train.log_every = 10
  config.train.eval_every = 1_000
  config.train.checkpoint_every = 1_000
  if size.startswith("test"):
    config.model.vocab_size = 256
    config.model.num_layers = 4
    config.model.width = 128
    config.model.num_heads = config.model.num_kv_heads = 8
    config.model.ffn_width = 352
    config.data.seq_len = 64
    config.data.batch_size = 16
    config.train.num_steps = 2
    config.optimizer.warmup_steps = 1
  if of_run:
    return config
  config.update(defaults(Planner))
  if size == "test":
    config.planner.cluster = "h100:1,uneven=0"
    config.planner.schedules = ("1f1b", "zb_h1")
    config.planner.chunks = (1,)
    config.planner.max_microbatches = 4
  return config
