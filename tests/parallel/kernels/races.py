"""What the TPU interpreter's race detection found."""

from jax._src.pallas.mosaic.interpret import interpret_pallas_call


def races_found() -> bool:
  """In the last kernel that was interpreted with ``detect_races=True``."""
  return interpret_pallas_call.races.races_found
