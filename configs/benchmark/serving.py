r"""Time of the scheduler for a step: 256 running and 1,000 waiting requests.

  python -m launch.benchmark --config=configs/benchmark/serving.py \
    --output=results/serving_scheduler.json

For each policy a server is kept full: whenever a request ends another one
arrives. Prompts begin with one of some system prompts, whose pages are found;
priorities change; pages are so few that requests give way in one step of
twenty, which the table says. Timed is all that the scheduler does for a step:
to make it, to take in its tokens, and to note priorities that have changed.
What a request takes when it arrives, most of it to name its prompt's pages, has
a column of its own. Nothing is computed. The same steps are made in several
rounds, and all of them count. With `NUMBA_DISABLE_JIT=1` in the environment it
shows what it takes where numba, of the extra `serve`, is not installed.

Aims: a median below 200 us and a P99 below 1 ms for each policy. It takes a
minute; `serving.py:test` seconds.
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the benchmark: `all`, or `test` for one that takes seconds."""
  if size not in ("all", "test"):
    raise ValueError(f"serving.py:{size}: the sizes are all and test")
  config = ml_collections.ConfigDict()
  config.name = "serving"
  config.benchmark = defaults("benchmark", "serving")
  if size == "test":
    config.benchmark.policies = ("first_come", "vtc")
    config.benchmark.running, config.benchmark.waiting = 16, 40
    config.benchmark.pages = dict.fromkeys(config.benchmark.policies, 800)
    config.benchmark.warm_up, config.benchmark.steps = 20, 40
    config.benchmark.rounds = 2
  return config
