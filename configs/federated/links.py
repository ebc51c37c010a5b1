r"""Federated rounds over Ethernet, WiFi and 5G, predicted.

  python -m launch.simulate --config=configs/federated/links.py \
    --plot=federated.png
  python -m launch.simulate --config=configs/federated/links.py \
    --config.links="('wifi', 'mine.json')" --config.training_s=4
  python -m launch.simulate --config=configs/federated/links.py:figures

A server and its clients are simulated (`caatnet/federated/predict.py`) with the
links of `parallel/plans/hardware/client_links.py`. Compute times and the fixed
time per message are assumptions; `launch.federate` measures them. The second
part predicts published results of a 5G testbed (arXiv 2504.04678), and computes
the fixed time and rate that would give them. The third part compares shared and
scheduled transfers, and coded, late and streamed updates.

Sizes: `all` takes seconds, `figures` has only the second part, `test` has a few
rows of each table.
"""

import ml_collections

from caatnet.schema.tree import defaults
from caatnet.studies.federated.keys import FederatedLinks

_SIZES = ("all", "figures", "test")


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the study: `all`, `figures`, or `test`."""
  if size not in _SIZES:
    raise ValueError(f"links.py:{size}: the sizes are {', '.join(_SIZES)}")
  config = defaults(FederatedLinks)
  if size == "figures":
    config.parameters, config.apart, config.fragments = (), (), ()
  if size == "test":
    config.links = ("ethernet", "wifi", "5g-40mhz")
    config.clients, config.parameters = (2, 4), (100_000, 740_554)
    config.trials, config.apart, config.limits = 200, (0.0, 0.5), (1.0, 0.5)
    config.scheduled_clients, config.fragments = 4, (1, 4)
    config.region_points = 31
  return config
