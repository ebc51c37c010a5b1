"""Keys of benchmarks of decoding and serving."""

from caatnet.benchmarks.keys import PROMPT_DOC, ROUNDS_DOC, TOKENS_DOC
from caatnet.schema import register
from caatnet.schema.fields import COUNT, COUNT_OR_ZERO, FRACTION, field


@register.benchmark("decoding")
class Decoding:
  """Decoding compared with Hugging Face's generate."""

  rounds: int = field(7, ROUNDS_DOC, COUNT)
  batches: tuple[int, ...] = field(
    (1, 16), "Batch sizes; each is a program and a row.", COUNT
  )
  prompt: int = field(128, PROMPT_DOC, COUNT)
  tokens: int = field(128, TOKENS_DOC, COUNT)
  rival: str = field("", 'A Python with torch and transformers; "" for none.')
  threads: int = field(2, "Threads of that Python.", COUNT)


@register.benchmark("server")
class Server:
  """Server over HTTP, compared with its engine."""

  rounds: int = field(3, ROUNDS_DOC, COUNT)
  batches: tuple[int, ...] = field(
    (16, 64), "Concurrent sequences; each value is a row.", COUNT
  )
  streams: int = field(500, "Concurrent streams.", COUNT)
  prompt: int = field(16, PROMPT_DOC, COUNT)
  tokens: int = field(32, TOKENS_DOC, COUNT)


@register.benchmark("serving")
class Serving:
  """Time that the scheduler takes per step."""

  policies: tuple[str, ...] = field(
    ("first_come", "strict_priority", "shortest_first", "vtc", "dlpm"),
    "Scheduling policies.",
  )
  running: int = field(256, "Number of running requests.", COUNT)
  waiting: int = field(1000, "Number of waiting requests.", COUNT)
  pages: dict[str, int] = field(
    lambda: {
      "first_come": 10700, "strict_priority": 11400, "shortest_first": 8500,
      "vtc": 10700, "dlpm": 10500,
    }, "Number of pages of 16 tokens for each policy, so few that one of 20 "
    "steps preempts.", COUNT,
  )
  warm_up: int = field(600, "Steps before the timed ones.", COUNT_OR_ZERO)
  steps: int = field(2000, "Number of timed steps.", COUNT)
  rounds: int = field(5, ROUNDS_DOC, COUNT)
  frequency: float = field(
    0.04, "Probability that a step changes priorities of requests.", FRACTION
  )
  stay: float = field(
    0.99, "Probability that a request keeps its priority in such a step.",
    FRACTION,
  )
  clients: int = field(27, "Number of clients that send requests.", COUNT)
