r"""Model of `configs/caatnet/tiny.py` in four stages of two tensor ranks.

  python -m launch.train --config=configs/pipeline/tiny.py --cpu_devices=8
  python -m launch.train --config=configs/pipeline/tiny.py --cpu_devices=8 \
    --config.pipeline.schedule=interleaved_1f1b --config.pipeline.chunks=2
  python -m launch.train --config=configs/pipeline/tiny.py --cpu_devices=8 \
    --config.pipeline.schedule=zb_h1 --config.pipeline.keep=residuals

Expected result: in every step, the loss equals that of the same run without
stages (`--config.parallel.stage=1`) up to float32 rounding. Virtual devices
share the processor, so the run is slower than without stages. `tiny.py:test`
has a few steps of a smaller model.
"""

import ml_collections

from configs.caatnet import tiny


def get_config(size: str = "demo") -> ml_collections.ConfigDict:
  """Returns the run: `demo`, or `test`, which takes seconds."""
  config = tiny.get_config(size)
  config.name = "pipeline"
  config.model.num_layers = 8 if size == "demo" else 4
  config.parallel.stage = 4
  config.parallel.tensor = 2
  config.train.accumulation = 8
  config.data.batch_size = 16
  return config
