"""Config of the study of decoding."""

from caatnet.schema import register
from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_ZERO,
  FRACTION,
  POSITIVE,
  field,
)
from caatnet.studies.keys import study_key


@register.study
class Inference:
  """Bounds of prefill and decode times, and the time saved by partial sync."""

  name: str = field("decode", "Name of the config.")
  study: str = study_key("inference")
  models: tuple[str, ...] = field(
    ("7b", "70b"), "Names of `caatnet.studies.inference.study.MODELS`."
  )
  machines: tuple[str, ...] = field(
    ("gpu:h200:1x8", "gpu:a100:1x8", "gpu:a100-pcie:1x8", "tpu:v5p:2x2x2",
     "tpu:v6e:2x4"),
    "Devices of one node or slice, as in --target of launch.compile; each "
    "device is a tensor rank.",
  )
  p: tuple[float, ...] = field(
    (1.0, 0.75, 0.5, 0.25), "Fractions of the channels that every row-parallel "
    "projection reduces over ranks.", FRACTION,
  )
  every: tuple[int, ...] = field(
    (2,), "Alternatives to partial sync (p): in one of every N layers both "
    "projections reduce all channels, in other layers none.", COUNT, empty=True,
  )
  batch: tuple[int, ...] = field(
    (1, 32, 256), "Concurrently decoding sequences.", COUNT
  )
  context: int = field(2048, "Cached positions of each sequence.", COUNT)
  prompt: int = field(
    2048, "Tokens of a prefilled prompt; 0 for none.", COUNT_OR_ZERO
  )
  compute_factor: float = field(
    1.0, "Factor on the roofline's compute time. Measured layers take 1.4 to "
    "2.3 times as long (table of layers), which reduces the saving.", POSITIVE,
  )
  threshold: float = field(
    0.05, "Smallest relative saving of a step that counts as an improvement.",
    FRACTION,
  )
