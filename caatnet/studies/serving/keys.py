"""Keys shared by the subjects of the study of serving."""

from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_ZERO,
  NOT_NEGATIVE,
  POSITIVE,
  POSITIVE_FRACTION,
  Range,
  field,
  section,
)

# Requests per second. Clocks are float64 seconds: after the arrivals of 10^5
# requests at the lowest rate, they still resolve 16 us.
RATE = Range(1e-6)


@section
class ModelSizes:
  """Sizes of a served transformer, by default Llama-3.1-8B in bfloat16."""

  vocab_size: int = field(128256, "Size of the vocabulary.", COUNT)
  width: int = field(4096, "Channels of the residual stream.", COUNT)
  num_layers: int = field(32, "Layers.", COUNT)
  num_heads: int = field(32, "Query heads.", COUNT)
  num_kv_heads: int = field(8, "Key and value heads.", COUNT)
  ffn_width: int = field(14336, "Hidden channels of the MLP.", COUNT)


@section
class Hardware:
  """Machine of the FastSwitch paper: an A10 of 24 GB on PCIe 4."""

  device: str = field("a10", "Device of parallel/plans/hardware/devices.py.")
  utilisation: float = field(
    0.5, "Assumed fraction of peak FLOP/s that a step achieves.",
    POSITIVE_FRACTION,
  )
  memory_fraction: float = field(
    0.8, "Assumed fraction of memory bandwidth that a step achieves.",
    POSITIVE_FRACTION,
  )
  memory_share: float = field(
    0.9, "Fraction of memory for weights and cache; vLLM's default.",
    POSITIVE_FRACTION,
  )
  page_size: int = field(16, "Positions of a page of the cache.", COUNT)
  pages: int = field(
    2588, "Pages of the cache; 0 for the number that fits. The default is what "
    "vLLM 0.19.0 allocates for this model on another GPU of 24 GB "
    "(configs/serving/vllm_log.py).", COUNT_OR_ZERO,
  )
  copy_rate: float = field(
    25e9, "Bandwidth of copies in each direction in bytes/s: 80% of the 31.5 "
    "GB/s of PCIe 4.0 x16.", POSITIVE,
  )
  copy_call_s: float = field(
    6e-6,
    "Fixed time per contiguous range in seconds: 5 to 7 us for each "
    "cudaMemcpyAsync (Wu et al., DualPath, arXiv 2602.21548, section 5.2).",
    NOT_NEGATIVE,
  )
  host_bytes: float = field(
    60e9, "Host memory for swapping, in bytes, as in the paper.", NOT_NEGATIVE
  )


@section
class PreemptionMethod:
  """Preemption of requests, and allocation and copies of their pages."""

  preempt: str = field(
    "recompute", 'Handling of preempted pages: "recompute", "swap", or "cost" '
    "for the cheaper of the two.", ("recompute", "swap", "cost"),
  )
  single: bool = field(True, "Whether each page is copied separately.")
  growth: int = field(1, "Pages that a request allocates at once.", COUNT)
  wait_s: float = field(
    1e6, "Longest copy, in seconds, for which a step waits.", NOT_NEGATIVE
  )
  keep: bool = field(
    False, "Whether the host cache keeps copies after swapping in and stores "
    "finished conversation turns.",
  )


@section
class Limits:
  """Limits of a step of the scheduler."""

  slots: int = field(256, "Largest number of running requests.", COUNT)
  tokens: int = field(2048, "Largest number of tokens of a step.", COUNT)
  steps_ahead: int = field(2, "Largest number of steps in flight.", COUNT)
