"""``config.zero``: the partition of the training state."""

from caatnet.schema.fields import COUNT_OR_ZERO, field, section

_LEVEL_DOC = (
  'Outermost level over which {} sharded, together with all inner levels; '
  '"none" for no level, "" for the default of config.zero.scheme.'
)
_CODEC_DOC = (
  'Codec in which {} are sent: "none", "int8" or "int4"; "" for the default of '
  "config.zero.scheme."
)
_CODECS = ("", "none", "int8", "int4")


@section
class Zero:
  """Partition: levels of ranks over which parts of the state are sharded."""

  levels: str = field(
    "", "Levels of data-parallel ranks, outermost first, as in "
    '"node:2,gpu:4"; "" for one level named data.',
  )
  scheme: str = field(
    "ddp", 'Named partition: "ddp", "zero1", "zero2", "zero3" (FSDP), "hsdp", '
    '"mics", "hpz", "zeropp", "zeropp_by_level", "frontier3" or '
    '"frontier3_quantised".',
  )
  weights: str = field("", _LEVEL_DOC.format("weights are"))
  gradients: str = field("", _LEVEL_DOC.format("gradients are"))
  optimizer: str = field("", _LEVEL_DOC.format("the optimizer's state is"))
  secondary: str = field(
    "",
    _LEVEL_DOC.format("a second copy of the weights, from which the backward "
                      "gathers, is"),
  )
  weight_codec: str = field("", _CODEC_DOC.format("weights"), _CODECS)
  gradient_codec: str = field("", _CODEC_DOC.format("gradients"), _CODECS)
  secondary_codec: str = field("", _CODEC_DOC.format("second copies"), _CODECS)
  block: int = field(
    0, "Elements per block of codes with one scale; 0 for 256.", COUNT_OR_ZERO
  )
  coded_blocks: int = field(
    1, "Smallest number of blocks in a rank's shard of a parameter for which "
    "the parameter is sent with a codec; 0 for all parameters.", COUNT_OR_ZERO,
  )
  gradient_hops: str = field(
    "", 'Hops in which coded gradients are reduced: one per level '
    '("by_level"), or one over all inner levels and one over the outermost '
    'level ("two"); "" for the default of config.zero.scheme.',
  )
  prefetch: bool = field(
    False, "Whether a layer's weights are gathered while the previous layer "
    "runs; this needs memory for two gathered layers.",
  )
