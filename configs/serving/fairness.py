r"""What fairness costs: clients that want more than a server has.

  python -m launch.simulate --config=configs/serving/fairness.py \
    --plot=fairness.png

Two clients with requests of different lengths and an aggressor always have
requests in line; a fourth one asks now and then. Each policy serves the same
requests. Told are the largest difference of service between two clients that
both wait, beside the bound of virtual token counters, and what tails and
throughput become. It takes a minute; `fairness.py:test` seconds.
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the study: `all`, or `test` for fewer requests."""
  if size not in ("all", "test"):
    raise ValueError(f"fairness.py:{size}: the sizes are all and test")
  config = defaults("study", "serving.fairness")
  if size == "test":
    for client in config.clients.values():
      client.requests = round(0.1 * client.requests)
  return config
