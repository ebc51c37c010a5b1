"""The section of recurrent language models; see `configs.sections`."""

import ml_collections

ConfigDict = ml_collections.ConfigDict


def recurrent() -> ConfigDict:
  """Returns a gated linear recurrence (Hawk) with the sizes of ``tiny``."""
  model = ConfigDict()
  model.name = "recurrent"
  # More than the largest token of the data.
  model.vocab_size = 256
  model.width = 128
  model.num_layers = 4
  # Heads of the recurrence's gates; a multiple of the tensor ranks.
  model.num_heads = 8
  # The channels of the recurrence, of all heads.
  model.rnn_width = 160
  # The positions that the convolution before the recurrence sees.
  model.conv_width = 4
  model.ffn_width = 352
  model.norm_eps = 1e-5
  model.tied_embeddings = False
  model.init_std = 0.02
  # The dtype of activations; parameters and states are float32.
  model.dtype = "float32"
  # What the backward recomputes: "none", "full" (a whole layer), or "reduced"
  # (all but what was reduced over ranks, so that nothing is sent again).
  model.remat = "none"
  # Layers per iteration of the scan.
  model.unroll = 1
  return model
