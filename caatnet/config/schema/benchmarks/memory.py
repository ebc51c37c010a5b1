"""Benchmarks of memory tiers."""

from caatnet.config.schema.benchmarks.shared import ROUNDS
from caatnet.config.schema.fields import (
  COUNT,
  COUNT_OR_NONE,
  POSITIVE_FRACTION,
  field,
  section,
)


@section
class HostOptimizer:
  """AdamW on the host, compared with others and with predictions."""

  sizes: tuple[int, ...] = field(
    (1_000_000, 4_000_000, 20_000_000, 60_000_000, 200_000_000),
    "Numbers of elements; 16 bytes of state each.", COUNT,
  )
  threads: int = field(0, "Number of threads; 0 for all cores.", COUNT_OR_NONE)
  rounds: int = field(5, ROUNDS, COUNT)
  rivals: str = field(
    "", 'A Python with torch and, if installed, DeepSpeed; "" for none.'
  )
  tiers: str = field(
    "", "Tiers that launch.measure_memory --file has written, to compare steps "
    'of placements with predictions; "" to skip this.'
  )
  dram_share: float = field(
    0.5, "Share of the state that the planned placement may keep in DRAM.",
    POSITIVE_FRACTION,
  )
