r"""Scheduling time per step, with 256 running and 1,000 waiting requests.

  python -m launch.benchmark --config=configs/benchmark/serving.py \
    --output=results/serving_scheduler.json

For each policy the server has a constant load: whenever a request ends, another
one arrives. Prompts begin with one of several system prompts, whose pages are
shared; priorities change; there are so few pages that one step in twenty
preempts requests, which the table reports. The time of a step includes its
scheduling, the processing of its tokens, and changes of priorities. The time to
accept a request, mostly to hash the blocks of its prompt, is a separate column.
No model is executed. The same steps are repeated in several rounds, and all
repetitions are counted. `NUMBA_DISABLE_JIT=1` in the environment measures the
scheduler without numba (of the optional dependencies `serve`).

Aims: a median below 200 us and a P99 below 1 ms for each policy. It takes a
minute; `serving.py:test` takes seconds.
"""

import ml_collections

from caatnet.benchmarks.serving.keys import Serving
from caatnet.schema.tree import defaults


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the config of the benchmark.

  Args:
    size: "all", or "test" for a benchmark that takes seconds.

  Raises:
    ValueError: The size is unknown.
  """
  if size not in ("all", "test"):
    raise ValueError(f'serving.py:{size}: size must be "all" or "test"')
  config = ml_collections.ConfigDict()
  config.name = "serving"
  config.benchmark = defaults(Serving)
  if size == "test":
    config.benchmark.policies = ("first_come", "vtc")
    config.benchmark.running, config.benchmark.waiting = 16, 40
    config.benchmark.pages = dict.fromkeys(config.benchmark.policies, 800)
    config.benchmark.warm_up, config.benchmark.steps = 20, 40
    config.benchmark.rounds = 2
  return config
