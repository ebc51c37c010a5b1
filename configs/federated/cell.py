r"""SqueezeNet trained by eight clients in a 5G cell, with less communication.

  python -m launch.federate --config=configs/federated/cell.py:float32
  python -m launch.federate --config=configs/federated/cell.py:scheduled
  python -m launch.federate --config=configs/federated/cell.py:late \
    --config.seed=1

All clients share an emulated link of 20 MHz (docs/federated.md). The argument
is a variant; with `,test` the run has three small rounds of two clients:

  float32    models and updates in float32, all at once
  int8, int4 updates in 8 or 4 bits, models as float32
  coded      updates and differences between models in 4 bits
  sparse     the 64 largest of each 4,096 numbers of an update
  late       4-bit updates; updates that miss the deadline are merged later
  scheduled  two clients at a time receive models, or send updates
"""

import ml_collections

from configs.federated import tiny

VARIANTS = {
  "float32": {},
  "int8": {"uplink": "int8"},
  "int4": {"uplink": "int4"},
  "coded": {"uplink": "int4", "downlink": "int4"},
  "sparse": {"uplink": "sparse"},
  "late": {"uplink": "int4", "stragglers": "late", "deadline_s": 12.0},
  "scheduled": {"downlinks_at_once": 2, "uplinks_at_once": 2},
}


def get_config(arguments: str = "float32") -> ml_collections.ConfigDict:
  """Returns the config of a variant and a size, as in `int4,test`."""
  variant, _, size = arguments.partition(",")
  if variant not in VARIANTS or size not in ("", "test"):
    raise ValueError(
      f"cell.py:{arguments}: use one of {', '.join(VARIANTS)}, or add ',test'"
    )
  config = tiny.get_config("squeezenet,test" if size else "squeezenet")
  config.name = f"federated_cell_{variant}"
  config.federated.links = ("5g-20mhz",)
  if not size:
    config.federated.clients = config.federated.per_round = 8
    config.federated.split = "dirichlet"
  config.federated.update(VARIANTS[variant])
  return config
