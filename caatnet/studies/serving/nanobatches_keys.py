"""Config of the study of nano-batches."""

from caatnet.schema import register
from caatnet.schema.fields import (
  COUNT,
  FRACTION,
  NOT_NEGATIVE,
  POSITIVE_FRACTION,
  field,
)
from caatnet.studies.keys import UTILISATION_DOC, study_key


@register.study
class NanoBatches:
  """Steps cut into nano-batches, whose reductions overlap products."""

  name: str = field("nanobatches", "Name of the config.")
  study: str = study_key("serving")
  subject: str = field(
    "nanobatches", "Subject of the study.", ("nanobatches",)
  )
  machines: tuple[str, ...] = field(
    ("gpu:h100:1x8", "gpu:h100:1x4", "gpu:a100:1x8", "gpu:a100:1x4",
     "gpu:h200:1x8", "gpu:a100-pcie:1x8", "tpu:v5p:2x2x2", "tpu:v6e:2x4"),
    "Machines of the curves, named as for launch.compile.", empty=True,
  )
  tokens: tuple[int, ...] = field(
    (1, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024,
     1536, 2048, 3072, 4096),
    "Tokens of the steps of the curves.", COUNT,
  )
  decodes: int = field(
    256, "Maximum decodes of a step; other tokens belong to prompts.", COUNT
  )
  context: int = field(1024, "Mean positions that a decode attends to.", COUNT)
  interference: tuple[float, ...] = field(
    (0.0, 0.25, 0.5), "Slowdowns of device and network while both are busy: 0 "
    "for none, 1 if overlap gains nothing.", FRACTION,
  )
  threshold: float = field(
    0.01, "Gain above which nano-batches are worthwhile.", NOT_NEGATIVE
  )
  max_pieces: int = field(4, "Largest number of nano-batches.", COUNT)
  utilisation: float = field(0.7, UTILISATION_DOC, POSITIVE_FRACTION)
  joint_machines: tuple[str, ...] = field(
    ("gpu:h100:1x8", "gpu:a100-pcie:1x8", "tpu:v5p:2x2x2"),
    "Machines of the joint table.", empty=True,
  )
  joint_tokens: tuple[int, ...] = field(
    (256, 2048), "Tokens of the steps of the joint table.", COUNT
  )
  joint_interference: float = field(
    0.25, "Interference in the joint table.", FRACTION
  )
  p: tuple[float, ...] = field(
    (1.0, 0.75, 0.5, 0.375, 0.25, 0.125, 0.0625, 0.0),
    "Fractions of the channels that are reduced.", FRACTION,
  )
  bits: tuple[int, ...] = field(
    (16, 8, 4), "Bits of a reduced number. Decoding reduces in 16 bits; fewer "
    "are a prediction.", COUNT,
  )
