"""``config.model``: a section for each kind of model."""

from caatnet.checks import DTYPES
from caatnet.config.schema.fields import (
  COUNT,
  COUNT_OR_NONE,
  POSITIVE,
  TWO_OR_MORE,
  Range,
  field,
  section,
)

_DTYPE = "Dtype of activations; parameters are float32."


@section
class Stack:
  """Keys of all language models with a stack of layers."""

  vocab_size: int = field(
    256, "Size of the vocabulary, more than the largest token of the data.",
    COUNT,
  )
  width: int = field(128, "Channels of the residual stream.", COUNT)
  num_layers: int = field(4, "Number of layers.", COUNT)
  ffn_width: int = field(352, "Hidden channels of the MLP.", COUNT)
  norm_eps: float = field(1e-5, "Epsilon of RMSNorm.", POSITIVE)
  tied_embeddings: bool = field(
    False, "Whether the head uses the embedding's table."
  )
  init_std: float = field(
    0.02, "Standard deviation of initial weights.", POSITIVE
  )
  dtype: str = field("float32", _DTYPE, DTYPES)
  remat: str = field(
    "none", 'Activations that the backward recomputes: "none", "full" (a whole '
    'layer), or "reduced" (all except the results of reductions over ranks, so '
    "that nothing is sent again).", ("none", "full", "reduced"),
  )
  unroll: int = field(1, "Layers per iteration of the scan.", COUNT)


@section
class Transformer(Stack):
  """A Llama-style transformer with the sizes of ``tiny``."""

  num_heads: int = field(8, "Number of query heads.", COUNT)
  num_kv_heads: int = field(8, "Number of key and value heads.", COUNT)
  head_width: int = field(
    0, "Channels of one head; 0 for width / num_heads.", COUNT_OR_NONE
  )
  qkv_bias: bool = field(False, "Biases of queries, keys and values (Qwen2).")
  qk_norm: bool = field(False, "Norms of each head's queries and keys (Qwen3).")
  sliding_window: int = field(
    0, "Positions that a query attends to, including its own (Mistral); 0 for "
    "all.", COUNT_OR_NONE,
  )
  rope_base: float = field(10_000.0, "Base of rotary frequencies.", Range(1))
  rope_scaling: tuple[str | float, ...] = field(
    (), 'Change of rotary frequencies for longer contexts: (), ("linear", '
    'factor), or ("llama3", factor, low, high, original context).', POSITIVE,
  )
  attention: str = field(
    "auto", 'Implementation of attention: "xla" (any device), "cudnn" (GPU, 16 '
    'bits), "splash" (TPU, seq_len a multiple of 128), or "auto" for the '
    "fastest of those that apply.",
  )


@section
class Recurrent(Stack):
  """A gated linear recurrence (Hawk) with the sizes of ``tiny``."""

  num_heads: int = field(
    8, "Heads of the recurrence's gates, a multiple of the tensor ranks.", COUNT
  )
  rnn_width: int = field(
    160, "Channels of the recurrence, of all heads together.", COUNT
  )
  conv_width: int = field(
    4, "Positions that the convolution before the recurrence reads.",
    TWO_OR_MORE,
  )


@section
class Convolutional:
  """A residual convolutional network with GroupNorm."""

  widths: tuple[int, ...] = field(
    (16, 32),
    "Channels of each stage; each stage after the first halves height and "
    "width.",
    COUNT,
  )
  blocks: int = field(
    2, "Residual blocks per stage, each of two 3 x 3 convolutions.", COUNT
  )
  groups: int = field(
    4, "Groups of channels that are normalised together.", COUNT
  )
  dtype: str = field("float32", _DTYPE, DTYPES)


@section
class Graph:
  """A graph network with a layer for each of the data's fan-outs."""

  layer: str = field(
    "sage", 'Kind of layers: "sage" (GraphSAGE, mean) or "gcn".'
  )
  width: int = field(64, "Channels of states between layers.", COUNT)
  dtype: str = field("float32", _DTYPE, DTYPES)


MODELS = {
  "transformer": Transformer, "recurrent": Recurrent,
  "convolutional": Convolutional, "graph": Graph,
}
