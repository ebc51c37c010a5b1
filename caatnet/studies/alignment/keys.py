"""Config of the study of rows and memory sectors."""

from caatnet.schema import register
from caatnet.schema.fields import COUNT, COUNT_OR_ZERO, SEED, field
from caatnet.studies.keys import study_key


@register.study
class Alignment:
  """Memory requests of a GPU that gathers rows of features."""

  name: str = field("alignment", "Name of the config.")
  study: str = study_key("alignment")
  features: tuple[int, ...] = field(
    (32, 50, 100, 128, 256, 300, 513, 602, 768, 1024),
    "Float32 features of a row: ogbn-products has 100, papers100M 128, Reddit "
    "602, MAG240M 768.", COUNT,
  )
  num_rows: int = field(1_000_000, "Rows of the table.", COUNT)
  num_ids: int = field(
    100_000, "Number of gathered rows, drawn at random.", COUNT
  )
  offset: int = field(0, "Byte address of row 0.", COUNT_OR_ZERO)
  seed: int = field(0, "Seed of the rows.", SEED)
  largest: int = field(
    700, "Largest number of features in the plot.", COUNT
  )
