"""Flower's server in the comparison with Flower; run by a Python with flwr.

  PYTHON_WITH_FLWR flower_server.py

It is the gRPC server of ``flwr.server.start_server``, whose rounds are the
fastest ones of flwr 1.42: nodes of its newer SuperLink ask for work every 3
seconds.
"""

import json
import os

from flower_client import OPTIONS, make
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerConfig, start_server
from flwr.server.strategy import FedAvg


def main() -> None:
  """Runs all rounds with the options of this process, then returns."""
  options = json.loads(os.environ[OPTIONS])
  num = options["clients"]
  initial = make(0, num, options).get_parameters({})

  def config(server_round: int) -> dict[str, int]:
    return {"server_round": server_round}

  start_server(
    server_address=options["address"],
    config=ServerConfig(num_rounds=options["rounds"]),
    strategy=FedAvg(
      fraction_evaluate=float(options["evaluate"]), min_fit_clients=num,
      min_evaluate_clients=num, min_available_clients=num,
      on_fit_config_fn=config, on_evaluate_config_fn=config,
      initial_parameters=ndarrays_to_parameters(initial),
    ),
  )


if __name__ == "__main__":
  main()
