r"""The model of `configs/caatnet/tiny.py` in four stages of two tensor ranks.

  python -m launch.train --config=configs/pipeline/tiny.py --cpu_devices=8
  python -m launch.train --config=configs/pipeline/tiny.py --cpu_devices=8 \
    --config.pipeline.timetable=interleaved_1f1b --config.pipeline.chunks=2
  python -m launch.train --config=configs/pipeline/tiny.py --cpu_devices=8 \
    --config.pipeline.timetable=zb_h1 --config.pipeline.keep=residuals

Expected result: the loss of the same run without stages
(`--config.parallel.stage=1`), step for step up to the rounding of float32. On
virtual devices it takes longer than that, since they share the processor.
`tiny.py:test` makes a few steps of a smaller model.
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
