r"""Cost of switching between requests: recompute, swap, and FastSwitch.

  python -m launch.simulate --config=configs/serving/fastswitch.py \
    --plot=fastswitch.png
  python -m launch.simulate --config=configs/serving/fastswitch.py:paper
  python -m launch.simulate --config=configs/serving/fastswitch.py \
    --config.traces.azure_conv.path=AzureLLMInferenceTrace_conv.csv \
    --config.num_requests=0

A server with changing priorities is simulated with several preemption methods
("arms"), each of which adds one feature to the previous one. The first setting
has sessions as in FastSwitch's evaluation (arXiv 2411.18424), the second public
traces with arrival rates scaled to fractions of the first arm's capacity.

Sizes: `all` has 100 sessions and takes some minutes on one core, `paper` has
the paper's 1,000 sessions and takes more than an hour, `test` takes seconds.
Finished simulations are stored in config.keep, so that a stopped study resumes.
"""

import ml_collections

from caatnet.schema.tree import defaults
from caatnet.studies.serving.fastswitch_keys import FastSwitch

_SIZES = ("all", "paper", "test")


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the study: `all`, `paper` for 1,000 sessions, or `test`."""
  if size not in _SIZES:
    raise ValueError(
      f"fastswitch.py:{size}: the sizes are {', '.join(_SIZES)}"
    )
  config = defaults(FastSwitch)
  if size == "paper":
    config.sessions.num_sessions, config.num_requests = 1000, 1500
  if size == "test":
    config.keep = ""
    config.sessions.num_sessions, config.num_requests = 10, 16
    config.kinds, config.loads, config.seeds = ("random",), (0.9,), (0,)
    config.shares, config.hardware.pages = (1.0, 0.0), 160
    config.sessions.rate, config.sessions.longest_answer = 20.0, 40
    config.sessions.think_s = 1.0
    del config.traces.azure_code, config.traces.mooncake
  return config
