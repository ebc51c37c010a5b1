"""Results of the TPU interpreter's race detection."""

from jax._src.pallas.mosaic.interpret import interpret_pallas_call


def races_found() -> bool:
  """Returns whether the last kernel with ``detect_races=True`` had races."""
  return interpret_pallas_call.races.races_found
