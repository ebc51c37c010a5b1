"""Training steps of the models compute on devices what they do on one."""

import importlib

import pytest

from caatnet.config import equality
from caatnet.config.override import override
from parallel.ledger.equal import check

TEXT = (
  "model.width=16 model.num_heads=4 model.num_kv_heads=4 model.ffn_width=24 "
  "model.vocab_size=257 data.seq_len=8 data.batch_size=8 parallel.tensor=4 "
)
RECURRENT = (
  "model.width=16 model.num_heads=4 model.rnn_width=16 model.ffn_width=24 "
  "data.seq_len=8 data.batch_size=8 parallel.tensor=4 sync.p=0.5 "
)
BFLOAT16 = "model.dtype=bfloat16 "
LEVELS = "zero.levels=node:2,gpu:2 parallel.data=4 "
STAGES = (
  TEXT + "model.num_layers=4 train.accumulation=4 parallel.stage=4 "
  "parallel.tensor=2 "
)
LOOPS = (
  "local_sgd", "fedavg", "diloco", "streaming", "eager", "dc_s3gd", "noloco",
  "sparseloco",
)

# Name -> (config, overrides, layouts).
STEPS = {
  "dense": ("caatnet.tiny:test", TEXT, "tensor:4 data:2,tensor:2"),
  "dense, bfloat16": ("caatnet.tiny:test", TEXT + BFLOAT16, "tensor:4 data:8"),
  "p=0.5": ("caatnet.tiny:test", TEXT + "sync.p=0.5", "tensor:4 data:4"),
  "p=0.5, bfloat16": (
    "caatnet.tiny:test", TEXT + BFLOAT16 + "sync.p=0.5",
    "tensor:4 data:2,tensor:2",
  ),
  "p=0, accumulation": (
    "caatnet.tiny:test", TEXT + "sync.p=0 train.accumulation=2",
    "data:2,tensor:2",
  ),
  "all features, remat": (
    "caatnet.tiny:test",
    TEXT + "model.num_heads=6 model.num_kv_heads=3 model.head_width=4 "
    "model.qkv_bias=True model.qk_norm=True model.sliding_window=3 "
    "model.tied_embeddings=True model.remat=reduced sync.p=0.5",
    "tensor:4 data:2,tensor:2",
  ),
  "routes": (
    "caatnet.tiny:test", TEXT + "sync.route=ring model.remat=full", "tensor:4",
  ),
  "recurrent": ("recurrent.tiny:test", RECURRENT, "tensor:4 data:2,tensor:2"),
  "recurrent, bfloat16": (
    "recurrent.tiny:test", RECURRENT + BFLOAT16, "tensor:2 data:4",
  ),
  "images": ("images.tiny:data_parallel,test", "", "worker:2,data:2 data:2"),
  "images, bfloat16": (
    "images.tiny:data_parallel,test", BFLOAT16, "worker:2,data:2",
  ),
  "sage": ("graphs.tiny:data_parallel,test", "", "worker:2,data:2"),
  "gcn, bfloat16": (
    "graphs.tiny:data_parallel,test", BFLOAT16 + "model.layer=gcn", "data:2",
  ),
  "gpipe": (
    "pipeline.tiny:test", STAGES + "pipeline.schedule=gpipe",
    "stage:4 stage:2,tensor:2",
  ),
  "zb_h1, bfloat16": (
    "pipeline.tiny:test", STAGES + BFLOAT16 + "pipeline.schedule=zb_h1",
    "stage:4",
  ),
  **{
    f"{scheme}, {dtype}": (
      "caatnet.tiny:test",
      f"{TEXT}{LEVELS}zero.scheme={scheme} model.dtype={dtype} sync.p=0.5",
      "node:2,gpu:2 node:2,tensor:2",
    )
    for scheme, dtype in (
      ("zero1", "float32"), ("zero2", "bfloat16"), ("zero3", "float32"),
      ("zero3", "bfloat16"), ("hsdp", "float32"), ("hpz", "float32"),
      ("frontier3", "bfloat16"),
    )
  },
  **{
    f"loop {loop}": (
      f"images.tiny:{loop},test",
      "model.widths=(8,) model.blocks=1 data.batch_size=16 ",
      "worker:2 data:2",
    ) for loop in LOOPS
  },
}


@pytest.mark.rotated(len(STEPS) // 2)
@pytest.mark.parametrize("name", STEPS)
def test_lanes_equal_devices(name):
  module, overrides, layouts = STEPS[name]
  module, _, argument = module.partition(":")
  config = importlib.import_module(f"configs.{module}").get_config(argument)
  layouts = check.programs.parse_layouts(layouts)
  build = equality.builder(override(config, overrides), layouts)
  check.assert_equal(build, layouts)
