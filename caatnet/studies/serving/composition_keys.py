"""Config of the study of compositions of experts."""

from caatnet.schema import register
from caatnet.schema.experts import DEADLINE_DOC, EVICTIONS, PATIENCE_DOC
from caatnet.schema.fields import (
  COUNT,
  NOT_NEGATIVE,
  POSITIVE,
  SEED,
  TWO_OR_MORE,
  field,
  section,
)
from caatnet.studies.keys import study_key
from caatnet.studies.serving.keys import RATE, Hardware, Limits, ModelSizes

# Names of `caatnet.studies.serving.composition.EXPERT_ORDERS`.
_EXPERT_ORDERS = "zipf", "uniform", "bursty", "cyclic"


@register.study
class Composition:
  """Experts switched by one server, on a simulated clock."""

  @section
  class Experts:
    """Experts, and the memories and files that hold them."""

    number: int = field(150, "Number of experts.", TWO_OR_MORE)
    slots: int = field(4, "Number of experts on the device.", COUNT)
    copy_rate: float = field(
      64e9, "Bytes per second from host memory to a slot: PCI Express 5 x16.",
      POSITIVE,
    )
    host_experts: int = field(
      150, "Experts in host memory; others are read from files.", COUNT
    )
    file_rate: float = field(
      7e9, "Bytes per second from a file to a slot, an assumption.", POSITIVE
    )
    deadline_s: float = field(10.0, DEADLINE_DOC, NOT_NEGATIVE)
    patience: float = field(1.0, PATIENCE_DOC, NOT_NEGATIVE)

  @section
  class Stream:
    """Requests of a stream."""

    requests: int = field(
      600, "Number of requests; a fifth of it with responses of 100 tokens or "
      "more.", COUNT,
    )
    prompt: int = field(128, "Tokens of a prompt.", COUNT)
    output: int = field(20, "Tokens of a response.", COUNT)
    rate: float = field(4.0, "Requests per second.", RATE)
    batch: int = field(1, "Requests that arrive together.", COUNT)
    exponent: float = field(
      1.0, "Exponent of Zipf's distribution over experts.", NOT_NEGATIVE
    )
    burst: int = field(
      8, "Mean number of consecutive requests of an expert in a burst.", COUNT
    )
    seed: int = field(0, "Seed of experts, arrivals and tokens.", SEED)

  @section
  class Published:
    """Figures of the paper's machines (arXiv 2405.07518)."""

    experts: int = field(150, "Experts of Samba-CoE.", COUNT)
    max_experts: int = field(850, "Largest published number of experts.", COUNT)
    parameters: float = field(
      6.738415616e9, "Parameters of an expert: Llama 2 7B.", POSITIVE
    )
    item_bytes: int = field(2, "Bytes of a parameter: bfloat16.", COUNT)
    exec_s: tuple[float, ...] = field(
      (0.01, 0.03, 0.06, 0.1, 0.3, 1.0),
      "Execution times of a request to try, in seconds.", POSITIVE,
    )
    call_s: tuple[float, ...] = field(
      (1e-6, 2e-6, 5e-6, 1e-5, 2e-5),
      "Times of the launch of an unfused operator to try, in seconds.",
      POSITIVE,
    )
    operators: int = field(
      20, "Unfused operators of a layer, an assumption.", COUNT
    )

  name: str = field("composition", "Name of the config.")
  study: str = study_key("serving")
  subject: str = field(
    "composition", "Subject of the study.", ("composition",)
  )
  model: ModelSizes = field(
    lambda: ModelSizes(
      vocab_size=32000, num_kv_heads=32, ffn_width=11008
    ), "Sizes of an expert: Llama 2 7B in bfloat16.",
  )
  hardware: Hardware = field(
    lambda: Hardware(
      device="h100", pages=0, copy_rate=50e9, host_bytes=0.0
    ), "Machine; pages=0 for the number that fits in memory with the slots.",
  )
  limits: Limits = field(lambda: Limits(slots=64), "Limits of a step.")
  experts: Experts = field(Experts, "Experts and their tiers.")
  stream: Stream = field(Stream, "Requests.")
  streams: tuple[str, ...] = field(
    _EXPERT_ORDERS, "Orders of experts to simulate.", _EXPERT_ORDERS,
    empty=True,
  )
  evictions: tuple[str, ...] = field(
    EVICTIONS, "Eviction policies to compare.", EVICTIONS
  )
  slots: tuple[int, ...] = field(
    (1, 2, 3, 4, 5), "Numbers of slots to compare.", COUNT, empty=True,
  )
  rates: tuple[float, ...] = field(
    (0.5, 1.0, 2.0, 4.0, 8.0, 16.0), "Requests per second to compare.", RATE,
    empty=True,
  )
  batches: tuple[int, ...] = field(
    (1, 8), "Numbers of requests that arrive together, to compare.", COUNT
  )
  outputs: tuple[int, ...] = field(
    (20, 200), "Tokens of a response, to compare.", COUNT
  )
  patiences: tuple[float, ...] = field(
    (0.0, 1.0, 2.0, 4.0, 8.0, 16.0), "Values of patience to compare.",
    NOT_NEGATIVE,
  )
  deadlines: tuple[float, ...] = field(
    (1.0, 30.0), "Deadlines to compare, in seconds.", NOT_NEGATIVE, empty=True,
  )
  front_rate: float = field(
    3.0, "Requests per second in the comparison of patiences and deadlines.",
    RATE,
  )
  front_output: int = field(
    200, "Tokens of a response in the same comparison as front_rate.", COUNT
  )
  published: Published = field(Published, "Figures of the paper's machines.")
