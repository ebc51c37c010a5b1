r"""Cost of fairness between clients whose load exceeds the server's capacity.

  python -m launch.simulate --config=configs/serving/fairness.py \
    --plot=fairness.png

Two clients with requests of different lengths and an aggressor always have
waiting requests; a fourth client has occasional requests. Each policy serves
the same requests. The study reports the largest difference of service between
two clients that both have waiting requests, compared with the bound for virtual
token counters (VTC), and the effect on tail latencies and throughput. It takes
a minute; `fairness.py:test` takes seconds.
"""

import ml_collections

from caatnet.schema.tree import defaults
from caatnet.studies.serving.fairness_keys import Fairness


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the study: `all`, or `test` for fewer requests."""
  if size not in ("all", "test"):
    raise ValueError(f"fairness.py:{size}: the sizes are all and test")
  config = defaults(Fairness)
  if size == "test":
    for client in config.clients.values():
      client.requests = round(0.1 * client.requests)
  return config
