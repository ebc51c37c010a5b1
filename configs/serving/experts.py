r"""Server of experts: each has a model name; `auto` lets the router choose.

  python -m launch.sweep --config=configs/experts/kinds.py
  python -m launch.serve --config=configs/serving/experts.py
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \
    -d '{"model": "auto", "prompt": "def ", "max_tokens": 32}'

The first command trains the experts. `experts.py:random` serves small experts
with random parameters, which it creates, and no router.

A server with an API key adds experts at run time: POST /v1/experts with the
fields name, path, kind and description. `auto` selects an expert by its kind of
text. Among experts of one kind, it prefers those that the sweep has trained or
that replace these (PUT /v1/experts/NAME). Requests can always name an expert.
"""

import ml_collections

from caatnet.schema.tree import defaults
from configs.caatnet import tiny


def get_config(size: str = "trained") -> ml_collections.ConfigDict:
  """Returns the server: of `trained` experts, or of `random` ones."""
  if size not in ("trained", "random"):
    raise ValueError(f"experts.py:{size}: the sizes are trained and random")
  config = ml_collections.ConfigDict()
  if size == "random":
    config = tiny.get_config("test")
  config.name = "experts_server"
  config.inference = defaults("inference")
  config.inference.context = 512
  config.serving = defaults("serving")
  config.serving.policy = "experts"
  config.experts = defaults("experts")
  config.experts.path = "runs/experts/library"
  config.experts.slots = 8
  if size == "random":
    config.experts.path = "runs/random_experts"
    config.experts.random = 12
    config.experts.slots = 4
  return config
