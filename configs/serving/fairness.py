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

from configs.serving import fastswitch


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the study: `all`, or `test` for fewer requests."""
  if size not in ("all", "test"):
    raise ValueError(f"fairness.py:{size}: the sizes are all and test")
  config = ml_collections.ConfigDict()
  config.name = "fairness"
  config.study = "serving"
  config.subject = "fairness"
  config.policies = (
    "first_come", "shortest_first", "strict_priority", "vtc", "dlpm"
  )
  config.seed = 0
  paper = fastswitch.get_config()
  # Llama-3.1-8B on an A10, as in configs/serving/fastswitch.py.
  config.model = paper.model
  config.hardware = paper.hardware
  config.arm = paper.arms.recompute
  config.arm.found = True
  config.limits = paper.limits
  # Few, so that the bound, which grows with them, is of use.
  config.limits.slots = 16
  share = 1.0 if size == "all" else 0.1

  def client(
    requests: int, rate: float, prompt: int, output: int, priority: int,
    backlogged: bool,
  ) -> dict[str, object]:
    return {
      # How many requests, and per second; 0 for all at once.
      "requests": max(1, round(share * requests)), "rate": rate,
      # Mean tokens of a prompt, beside those that the client's prompts share,
      # and of an answer.
      "prompt": prompt, "output": output, "shared": 256,
      # For strict priorities; lower is served earlier.
      "priority": priority,
      # Whether it is among those that are compared.
      "backlogged": backlogged,
    }

  config.clients = ml_collections.ConfigDict({
    "short": client(400, 0.0, 128, 64, 1, True),
    "long": client(120, 0.0, 512, 256, 1, True),
    "aggressor": client(1200, 20.0, 256, 128, 0, True),
    "light": client(60, 0.5, 128, 64, 1, False),
  })
  return config
