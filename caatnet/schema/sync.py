"""``config.sync``: synchronisation of tensor ranks."""

from caatnet.schema.fields import FRACTION, field, section
from parallel.base.naming import DTYPES

_SWITCH = ("auto", "on", "off")


@section
class Sync:
  """Channels that tensor ranks synchronise in row-parallel projections."""

  p: float = field(
    1.0, "Fraction of the residual stream's channels that tensor ranks sum.",
    FRACTION,
  )
  p_attention: tuple[float, ...] = field(
    (), "Value of p for the output projections of attention (or recurrence): "
    "one number, or one per layer; () for config.sync.p.", FRACTION,
  )
  p_mlp: tuple[float, ...] = field(
    (), "Value of p for the output projections of MLPs: one number, or one per "
    "layer; () for config.sync.p.", FRACTION,
  )
  private_scale: str = field(
    "forward", "Place of the factor sqrt(ranks), which gives private channels "
    'the scale of a sum over tensor ranks: in the "forward", in the initial '
    'weights ("init"), or nowhere ("none").', ("none", "init", "forward"),
  )
  forward_dtype: str = field(
    "", 'Dtype of data sent by the forward\'s all-reduces; "" for the dtype of '
    "activations.", ("", *DTYPES),
  )
  backward_dtype: str = field(
    "float32", 'Dtype of data sent by the backward\'s all-reduces; "" for the '
    "dtype of activations.", ("", *DTYPES),
  )
  overlap: str = field(
    "auto", "Whether a row-parallel product computes the shared columns first, "
    "and the private ones during the all-reduce of the shared ones; auto is on "
    "for GPUs.", _SWITCH,
  )
  route: str = field(
    "psum", 'Algorithm of the all-reduce: "psum", "scatter_gather" '
    '(reduce-scatter and all-gather), "ring" (of permutes), "one_shot" '
    '(all-gather and a local sum), "ring_kernel" (TPU), or "schedule:NAME", a '
    'schedule for config.sync.topology, as in "schedule:optimal,pieces=8" (for '
    "8 pipelined pieces per chunk; with 1, optimal may take longer than "
    'multitree). With "one_shot" and "ring_kernel", one kernel reduces, adds '
    "to the residual stream and normalises if config.kernels allows it.",
  )
  topology: str = field(
    "", 'Topology of the devices for route="schedule:NAME": "ring", "torus" or '
    '"mesh" (both as square as possible), "bigraph", "switch" or '
    '"fully_connected"; "" for "torus".',
  )
  carry: str = field(
    "auto", 'Whether route="one_shot" or "ring_kernel" reduces the output of '
    "an MLP in the kernel of the next layer's norm; auto is on for "
    "config.model.remat=none (log/2026-11-22-carried-update.md).", _SWITCH,
  )
