r"""Less and scheduled communication in a radio cell: time to an accuracy.

  python -m launch.benchmark --config=configs/benchmark/federated_cell.py \
    --config.benchmark.plot=results/federated_cell.png \
    --output=results/federated_cell.json
  python -m launch.benchmark \
    --config=configs/benchmark/federated_cell.py:squeezenet

Eight clients with uneven classes train on digits; the last one computes 1.5
times as long. The clock and the cell are simulated (`caatnet/federated/
rehearsal.py`): compute times are assumed, losses are real. The small
convolutional network is in the cell of the bad software radio, SqueezeNet in
one of 20 MHz, so that communication takes about as long as the compute.

The argument is a model, convolutional or squeezenet; `test` has three rounds of
two clients. A run is added to `config.benchmark.results` when it has ended, and
existing ones are not repeated.
"""

import ml_collections

from caatnet.config.schema.tree import defaults
from configs.federated import tiny


def get_config(model: str = "convolutional") -> ml_collections.ConfigDict:
  """Returns the benchmark of a model, or `test`."""
  if model not in ("convolutional", "squeezenet", "test"):
    raise ValueError(
      f"federated_cell.py:{model}: convolutional, squeezenet or test"
    )
  config = tiny.get_config("convolutional,test" if model == "test" else model)
  config.name = "benchmark_federated_cell"
  config.benchmark = defaults("benchmark", "federated_cell")
  some = config.federated
  some.links = ("5g-20mhz" if model == "squeezenet" else "5g-bad",)
  some.split, some.alpha = "dirichlet", 1.0
  some.sampling = "uniform"  # as measured; "weighted" differs for late updates
  # With stragglers=late: above a round of the other clients with 4 bits.
  some.deadline_s = 14.0 if model == "squeezenet" else 15.5
  if model == "squeezenet":
    config.benchmark.results = "runs/federated_cell_squeezenet.json"
  if model == "test":
    config.benchmark.results = ""
    config.benchmark.seeds, config.benchmark.fragments = (0,), 2
  else:
    some.clients = some.per_round = 8
    some.rounds = 10 if model == "squeezenet" else 20
    some.local_steps = 8
    config.data.batch_size = 16 if model == "squeezenet" else 4
  if model == "convolutional":
    config.model.blocks = 1
  return config
