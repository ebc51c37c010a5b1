"""Config of the study of a vLLM run."""

from caatnet.schema import register
from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_ZERO,
  DECAY,
  FRACTION,
  NOT_NEGATIVE,
  Range,
  field,
  section,
)
from caatnet.studies.keys import study_key


@register.study
class VLLMLog:
  """Simulation of a run of a vLLM server, compared with its log."""

  @section
  class Server:
    """Options of the logged vLLM server."""

    policy: str = field("first_come", "Scheduling policy.")
    slots: int = field(
      0, "Largest number of running requests; 0 for that of the log.",
      COUNT_OR_ZERO,
    )
    tokens: int = field(
      0, "Tokens of a step; 0 for that of the log.", COUNT_OR_ZERO
    )
    page_size: int = field(
      0, "Positions of a page of the cache; 0 for those of the log.",
      COUNT_OR_ZERO,
    )
    pages: int = field(
      0, "Pages of the cache; 0 for the number in the log or, without one, for "
      "those that fit in memory next to the weights.", COUNT_OR_ZERO,
    )
    reuse: bool = field(
      True, "Whether requests share pages of prefixes, if the logged server "
      "does so."
    )
    whole_prompt: bool = field(
      True, "Whether admission of a request requires free pages for its whole "
      "prompt.",
    )
    steps_ahead: int = field(2, "Largest number of steps in flight.", COUNT)

  @section
  class Sizes:
    """Sizes of the model; 0 for those of the model that the log names."""

    path: str = field(
      "", "The model's published config.json, or its folder; unset for a known "
      "model, or the file in configs/model of LLMServingSim.",
    )
    vocab_size: int = field(0, "Size of the vocabulary.", COUNT_OR_ZERO)
    width: int = field(0, "Channels of the residual stream.", COUNT_OR_ZERO)
    num_layers: int = field(0, "Layers.", COUNT_OR_ZERO)
    num_heads: int = field(0, "Query heads.", COUNT_OR_ZERO)
    num_kv_heads: int = field(0, "Key and value heads.", COUNT_OR_ZERO)
    ffn_width: int = field(0, "Hidden channels of the MLP.", COUNT_OR_ZERO)
    head_width: int = field(0, "Channels of a head.", COUNT_OR_ZERO)

  @section
  class Collectives:
    """All-reduces over tensor ranks, which a profile does not contain."""

    per_layer: int = field(2, "All-reduces of a layer.", COUNT_OR_ZERO)
    bandwidth: float = field(
      0.0, "Bytes per second between two ranks; 0 for that of the log.",
      NOT_NEGATIVE,
    )
    latency_s: float | None = field(
      None, "Latency of a message in seconds; None for that of the log.",
      NOT_NEGATIVE,
    )

  name: str = field("vllm_log", "Name of the config.")
  study: str = study_key("serving")
  subject: str = field("vllm_log", "Subject of the study.", ("vllm_log",))
  log: str = field(
    "rtx4090_llama31_8b", "Log of one vLLM engine: a folder in the format of "
    "LLMServingSim, or a name in caatnet/studies/serving/logs.",
  )
  profile: str = field(
    "", "Folder with the measured times of operations; unset for the folder "
    '"profile" of the log, or that of LLMServingSim\'s repository.',
  )
  model: Sizes = field(Sizes, "Sizes of the model.")
  ranks: int = field(
    0, "Tensor ranks; 0 for the number of the log.", COUNT_OR_ZERO
  )
  collectives: Collectives = field(
    Collectives, "All-reduces over tensor ranks."
  )
  skew: float | None = field(
    None, "Context that sets the time of attention over unequal contexts: the "
    "mean (0), the largest (1), or one in between; None for the fit in the "
    "profile.", FRACTION,
  )
  num_requests: int = field(
    0, "Number of requests of the log; 0 for all.", COUNT_OR_ZERO
  )
  prefixes: str = field(
    "auto", 'Common prefixes of prompts: "published" for those in the log\'s '
    'prefixes.csv, "none", or the path of the workload\'s file; "auto" uses '
    "prefixes.csv or else the workload's file, if it is found.",
  )
  server: Server = field(Server, "Options of the logged vLLM server.")
  percentiles: tuple[int, ...] = field(
    (50, 90, 95, 99), "Percentiles to compare.",
    Range(0, 100, whole=True),
  )
  tolerance: float = field(
    0.02, "Relative error above which the report marks a statistic.", FRACTION
  )
  change: float = field(
    0.01,
    "Relative change of pages and times whose effect is shown; 0 for none.",
    DECAY,
  )
