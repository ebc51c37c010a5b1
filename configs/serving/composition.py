r"""Compositions of experts: switching costs, hit rates, and fairness.

  python -m launch.simulate --config=configs/serving/composition.py \
    --plot=composition.png
  python -m launch.simulate --config=configs/serving/composition.py:figures
  python -m launch.simulate --config=configs/serving/composition.py \
    --config.experts.slots=2 --config.experts.copy_rate=32e9

One H100 serves 150 experts with the sizes of Llama 2 7B, four of which are in
device memory; the others are in host memory behind PCI Express 5. The study
compares eviction policies on several orders of requests, and reports, for each
load, how much switching does not overlap with steps, and the trade-off between
fairness and switching. Results of SN40L and Composition of Experts (arXiv
2405.07518) are computed from rates, capacities and assumed execution times.

Sizes: `all` takes some minutes on one core, `figures` has only the published
results, `test` takes seconds.
"""

import ml_collections

from caatnet.schema.tree import defaults
from caatnet.studies.serving.composition_keys import Composition

_SIZES = ("all", "figures", "test")


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the study: `all`, `figures` without simulations, or `test`."""
  if size not in _SIZES:
    raise ValueError(
      f"composition.py:{size}: the sizes are {', '.join(_SIZES)}"
    )
  config = defaults(Composition)
  if size == "test":
    config.experts.number = config.experts.host_experts = 12
    config.stream.requests, config.stream.prompt = 40, 16
    config.stream.output = 4
    config.streams, config.evictions = ("zipf", "cyclic"), ("lru", "lookahead")
    config.slots, config.rates, config.outputs = (2,), (4.0,), (4,)
    config.deadlines, config.patiences = (1.0,), (0.0, 4.0)
    config.front_output = 8
  if size == "figures":
    config.streams, config.slots, config.rates = (), (), ()
    config.deadlines = ()
  return config
