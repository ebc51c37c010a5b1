"""``config.memory``: the memory that holds each part of the training state."""

from caatnet.config.schema.fields import field, section

_KINDS = ("device", "pinned_host")


@section
class Memory:
  """Placement of tensors in device or pinned host memory; results are equal.

  XLA:CPU has one memory and elides the placement.
  """

  moments: str = field(
    "device", "Memory of the inner optimizer's moments between steps: "
    '"device" or "pinned_host", from which each step copies them and back.',
    _KINDS,
  )
  activations: str = field(
    "device", "Memory of the activations that a layer saves for its backward: "
    '"device" or "pinned_host". It applies to the input of each layer and to '
    "the activations that config.model.remat saves by name; "
    'config.model.remat="none" saves activations without a name, which cannot '
    "be placed.", _KINDS,
  )
