"""Config of the study of fairness between clients."""

from caatnet.schema import register
from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_ZERO,
  NOT_NEGATIVE,
  SEED,
  field,
  section,
)
from caatnet.studies.keys import study_key
from caatnet.studies.serving.keys import (
  Hardware,
  Limits,
  ModelSizes,
  PreemptionMethod,
)


@section
class PrefixReuseMethod(PreemptionMethod):
  """Preemption method, and whether requests share prefixes."""

  found: bool = field(True, "Whether requests share pages of common prefixes.")


@section
class Client:
  """Requests and priority of a client."""

  requests: int = field(400, "Number of requests.", COUNT)
  rate: float = field(
    0.0, "Requests per second; 0 if all arrive at the beginning.", NOT_NEGATIVE
  )
  prompt: int = field(
    128, "Mean tokens of a prompt, without the common prefix.", COUNT
  )
  output: int = field(64, "Mean tokens of a response.", COUNT)
  shared: int = field(
    256, "Tokens of the common prefix of the client's prompts.", COUNT
  )
  priority: int = field(
    1, "Strict priority; lower is served earlier.", COUNT_OR_ZERO
  )
  backlogged: bool = field(
    True, "Whether the client is meant to have waiting requests at all times; "
    "the service of such clients is compared.",
  )


@register.study
class Fairness:
  """Cost of fairness between clients whose demand exceeds the capacity."""

  name: str = field("fairness", "Name of the config.")
  study: str = study_key("serving")
  subject: str = field("fairness", "Subject of the study.", ("fairness",))
  policies: tuple[str, ...] = field(
    ("first_come", "shortest_first", "strict_priority", "vtc", "dlpm"),
    "Scheduling policies, each of which serves the same requests.",
  )
  seed: int = field(0, "Seed of the requests.", SEED)
  model: ModelSizes = field(ModelSizes, "Sizes of the model.")
  hardware: Hardware = field(Hardware, "Machine that serves the model.")
  arm: PrefixReuseMethod = field(PrefixReuseMethod, "Preemption method.")
  limits: Limits = field(
    lambda: Limits(slots=16), "Limits of a step. The number of slots is small, "
    "since the fairness bound grows with it.",
  )
  clients: dict[str, Client] = field(
    lambda: {
      "short": Client(),
      "long": Client(requests=120, prompt=512, output=256),
      "aggressor": Client(
        requests=1200, rate=20.0, prompt=256, output=128, priority=0
      ),
      "light": Client(requests=60, rate=0.5, backlogged=False),
    }, "Clients by name.",
  )
