"""Config of the study of switching between requests."""

from caatnet.schema import register
from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_ZERO,
  FRACTION,
  NOT_NEGATIVE,
  SEED,
  TWO_OR_MORE,
  Range,
  field,
  section,
)
from caatnet.studies.keys import study_key
from caatnet.studies.serving.keys import (
  RATE,
  Hardware,
  Limits,
  ModelSizes,
  PreemptionMethod,
)


def _arms() -> dict[str, PreemptionMethod]:
  """Returns preemption methods, each with more features than the one before."""
  copies = {"preempt": "swap", "single": False, "growth": 4}
  return {
    "recompute": PreemptionMethod(),
    "blocks": PreemptionMethod(preempt="swap"),
    "groups": PreemptionMethod(**copies),
    "asynchronous": PreemptionMethod(**copies, wait_s=0.002),
    "reuse": PreemptionMethod(**copies, wait_s=0.002, keep=True),
    "cost": PreemptionMethod(
      **copies | {"preempt": "cost"}, wait_s=0.002, keep=True
    ),
  }


@register.study
class FastSwitch:
  """Costs of switching between requests."""

  @section
  class Priorities:
    """Random changes of priorities."""

    frequency: float = field(
      0.04,
      "Probability that priorities change after a step, as in the paper for an "
      "8B model.",
      FRACTION,
    )
    levels: int = field(8, "Number of priorities, an assumption.", COUNT)

  @section
  class Sessions:
    """Conversations in several turns."""

    num_sessions: int = field(100, "Number of sessions.", COUNT)
    rate: float = field(1.0, "Turns per second.", RATE)
    turns: float = field(5.5, "Mean number of turns of a session.", Range(1))
    think_s: float = field(
      30.0, "Mean time between a response and the next turn in seconds, an "
      "assumption.", NOT_NEGATIVE,
    )
    seed: int = field(0, "Seed of the sessions.", SEED)
    longest_answer: int = field(
      1000, "Largest number of tokens of a response: the 99th percentile of "
      "ShareGPT.", COUNT,
    )

  @section
  class Trace:
    """Public trace of requests."""

    path: str = field(
      "",
      'File of the trace; "" for the sample in the package.',
    )

  name: str = field("fastswitch", "Name of the config.")
  study: str = study_key("serving")
  subject: str = field("fastswitch", "Subject of the study.", ("fastswitch",))
  keep: str = field(
    "runs/fastswitch/cells.jsonl", "File that stores finished simulations, "
    'which are not repeated; "" for none.',
  )
  model: ModelSizes = field(ModelSizes, "Sizes of the model.")
  hardware: Hardware = field(Hardware, "Machine that serves the model.")
  limits: Limits = field(Limits, "Limits of a step.")
  arms: dict[str, PreemptionMethod] = field(
    _arms, "Preemption methods by name."
  )
  order: tuple[str, ...] = field(
    ("recompute", "blocks", "groups", "asynchronous", "reuse", "cost"),
    "Preemption methods to simulate, keys of config.arms, in this order.",
  )
  priorities: Priorities = field(Priorities, "Changes of priorities.")
  kinds: tuple[str, ...] = field(
    ("random", "markov"), "Kinds of priority changes in the first setting; the "
    'second setting has "random" changes.',
  )
  sessions: Sessions = field(Sessions, "Sessions of the first setting.")
  traces: dict[str, Trace] = field(
    lambda: {
      name: FastSwitch.Trace()
      for name in ("azure_code", "azure_conv", "mooncake")
    }, "Traces of the second setting by name.",
  )
  num_requests: int = field(
    200, "Number of requests of each trace; 0 for all.",
    COUNT_OR_ZERO,
  )
  loads: tuple[float, ...] = field(
    (0.5, 0.7, 0.9), "Arrival rates as fractions of the capacity with the "
    'method "recompute".', RATE,
  )
  seeds: tuple[int, ...] = field(
    (0, 1, 2, 3, 4), "Seeds of Poisson arrivals, to compare the cost model.",
    SEED,
  )
  seeds_trace: str = field("azure_conv", "Trace for seeds and for shares.")
  ranks: int = field(8, "Tensor ranks of the CAAT-Net experiment.", TWO_OR_MORE)
  ranks_device: str = field("h100", "Device of the tensor ranks.")
  shares: tuple[float, ...] = field(
    (1.0, 0.75, 0.5, 0.25, 0.0),
    "Values of p of the CAAT-Net experiment; () to skip it.",
    FRACTION, empty=True,
  )
  shares_rate: float = field(
    40.0, "Requests per second of the CAAT-Net experiment's trace.", RATE
  )
