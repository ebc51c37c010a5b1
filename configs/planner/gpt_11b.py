r"""Plans a language model of 11.1B parameters on 128 GPUs.

  python -m launch.plan --config=configs/planner/gpt_11b.py
  python -m launch.plan --config=configs/planner/gpt_11b.py \
    --cluster=pipette-v100:16,uneven=3 --plot=plan.png
  python -m launch.plan --config=configs/planner/gpt_11b.py \
    --cluster=my_cluster.json --why_not="parallel.stage=8 parallel.tensor=8"

The number of parameters is that of the larger model of Pipette (arXiv
2405.18093), and so are the clusters; layers, width, vocabulary and batch are
ours. Clusters are files of JSON (`parallel/hardware/cluster_files.py`;
`launch.measure_links` writes them) or names of examples. What is printed is
predicted, not measured. It takes half a minute on one core. Each answer ends
with what a training run takes unchanged:

  python -m launch.train --config=configs/planner/gpt_11b.py:train \
    --config.parallel.stage=4 ...

`gpt_11b.py:test` plans a small model for eight devices in a second.
"""

import ml_collections

from configs.caatnet import base

SIZES = ("plan", "train", "test", "test_train")


def get_config(size: str = "plan") -> ml_collections.ConfigDict:
  """Returns the plan's config, or with "train" that of the run alone."""
  if size not in SIZES:
    raise ValueError(
      f"configs/planner/gpt_11b.py:{size}: the sizes are {', '.join(SIZES)}"
    )
  config = base.get_config()
  config.name = "gpt_11b"
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
  if size.endswith("train"):
    return config
  config.study = "planner"
  config.planner = planner()
  if size == "test":
    config.planner.cluster = "h100:1,uneven=0"
    config.planner.timetables = ("1f1b", "zb_h1")
    config.planner.chunks = (1,)
    config.planner.most_microbatches = 4
  return config


def planner() -> ml_collections.ConfigDict:
  """Returns what is tried, and how it is predicted."""
  section = ml_collections.ConfigDict()
  # A file of a cluster, or NAME:GROUPS of parallel/hardware/clusters.py, with
  # ",uneven=SEED" for links between nodes that reach less than they should.
  section.cluster = "pipette-a100:16"
  # How stages run: in "lockstep", as launch.train runs them, a tick being as
  # long as its longest action and hop; or each at its own pace ("events").
  section.execution = "lockstep"
  # The share of the peak that matrix products reach, an assumption
  # (parallel/planner/model.py).
  section.utilisation = 0.5
  # What is tried with all degrees of stages, data and tensor ranks.
  section.timetables = (
    "1f1b", "gpipe", "eager_1f1b", "interleaved_1f1b", "zb_h1"
  )
  section.chunks = (1, 2)
  section.schemes = ("ddp", "zero1", "zero2", "zero3")
  section.routes = ("psum", "one_shot")
  section.remats = ("none", "reduced", "full")
  section.offload = True
  # What stages keep for the backward, as config.pipeline.keep.
  section.keeps = ("residuals", "inputs")
  section.most_microbatches = 256
  # How many answers, and how many configurations get a device order.
  section.top = 5
  section.ordered = 10
  # Configurations of which to say why they are not the answer, each as in
  # "parallel.stage=8 parallel.tensor=8"; what a text does not name is as in the
  # best one.
  section.why_not = ()
  return section
