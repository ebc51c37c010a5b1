"""``config.memory``: the memory that holds each part of the training state."""

from caatnet.schema.fields import COUNT_OR_NONE, FRACTION, field, section

_KINDS = ("device", "pinned_host")
# Value of `Memory.activations`.
PLACEMENT = "placement"


@section
class Memory:
  """Placement of tensors in memory of the device and of the host.

  The placement changes no result, but the optimizer on the host rounds other
  sums than the one on the device, and compilers may round what a layer
  recomputes otherwise than what it saves. XLA:CPU has one memory and elides
  "pinned_host". Each process has its own tiers.
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
    'be placed. "placement" for the shares of layers of '
    "config.memory.placement: of all layers, those that it saves save what "
    "config.model.remat selects, the others their input. Shares are rounded "
    "down to quarters, thirds or halves, of which the number of layers is a "
    "multiple.",
    (*_KINDS, PLACEMENT),
  )
  optimizer: str = field(
    "device", 'Processor that updates the state: "device", or "host": AdamW on '
    "the CPU, with master weights and moments on config.memory.tiers. Each "
    "step copies gradients to the host and new weights to the device.",
    ("device", "host"),
  )
  tiers: tuple[tuple[str, float], ...] = field(
    (), "Tiers of the host's optimizer, each with its share of every array: "
    "the number of a NUMA node, or a folder that exists, in which a file is "
    'mapped. An example is (("0", 0.5), ("/mnt/disk", 0.5)). () for the first '
    "node, or for those of config.memory.placement.",
    FRACTION,
  )
  placement: str = field(
    "", "File that launch.place --output has written, with the tiers of master "
    "weights, moments and gradients of the host's optimizer, and what layers "
    "save with "
    'config.memory.activations="placement"; "" for none.'
  )
  policy: str = field(
    "latency_first", "Policy of launch.place whose placement the run executes. "
    'With config.memory.optimizer="host", it must update all parameters on '
    "the host."
  )
  threads: int = field(
    0, "Threads of the host's optimizer; 0 for one per core.", COUNT_OR_NONE
  )
