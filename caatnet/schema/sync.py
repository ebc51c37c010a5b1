"""``config.sync``: synchronisation of tensor ranks."""

from caatnet.schema.fields import FRACTION, field, section
from parallel.base.naming import DTYPES

_SWITCH = ("auto", "on", "off")


@section
class Sync:
  """Channels that tensor ranks synchronise in row-parallel projections."""

  p: float = field(
    1.0, "Fraction of the stream's channels that the tensor ranks share.",
    FRACTION,
  )
  p_attention: tuple[float, ...] = field(
    (), "The fraction in attention's projections instead of p: one number, or "
    "one per layer; () for p.", FRACTION,
  )
  p_mlp: tuple[float, ...] = field(
    (),
    "The fraction in the MLP's projections instead of p: one number, or one "
    "per layer; () for p.",
    FRACTION,
  )
  private_scale: str = field(
    "forward", "Place of the factor sqrt(ranks) for private channels: in the "
    '"forward", in the initial weights ("init"), or nowhere ("none").',
    ("none", "init", "forward"),
  )
  forward_dtype: str = field(
    "", 'Dtype of the forward reduction on the wire; "" for that of '
    "activations.", ("", *DTYPES),
  )
  backward_dtype: str = field(
    "float32", 'Dtype of the backward reduction on the wire; "" for that of '
    "activations.", ("", *DTYPES),
  )
  overlap: str = field(
    "auto", "Whether the shared columns of a row-parallel product are computed "
    "first, and the private ones during their reduction; auto is on for GPUs.",
    _SWITCH,
  )
  route: str = field(
    "psum", 'Algorithm of the all-reduce: "psum", "scatter_gather" '
    '(reduce-scatter and all-gather), "ring" (of permutes), "one_shot" '
    '(all-gather and a local sum), "ring_kernel" (TPU), or "schedule:NAME" on '
    'the key topology, with options as in "schedule:optimal,pieces=8"; without '
    "pieces, optimal may take longer than multitree. With "
    '"one_shot" and "ring_kernel", one kernel reduces, adds and normalises if '
    "config.kernels allows it.",
  )
  topology: str = field(
    "",
    'Topology of the devices of a schedule: "ring", "torus" or "mesh" (both as '
    'square as possible), "bigraph", "switch" or "fully_connected"; "" for '
    '"torus".',
  )
  carry: str = field(
    "auto", "Whether the two routes with a kernel leave the MLP's reduction to "
    "the next layer's norm; auto is on for config.model.remat=none "
    "(log/2026-11-22-carried-update.md).",
    _SWITCH,
  )
