"""``config.model``: one section per kind of model."""

from caatnet.schema.fields import (
  COUNT,
  COUNT_OR_ZERO,
  POSITIVE,
  TWO_OR_MORE,
  Range,
  field,
  section,
)
from parallel.base.naming import DTYPES

_DTYPE_DOC = "Dtype of activations; parameters are float32."


@section
class StackedModel:
  """Keys common to all language models with a stack of layers."""

  vocab_size: int = field(
    256, "Size of the vocabulary; must exceed the largest token of the data.",
    COUNT,
  )
  width: int = field(128, "Channels of the residual stream.", COUNT)
  num_layers: int = field(4, "Number of layers.", COUNT)
  ffn_width: int = field(352, "Hidden channels of the MLP.", COUNT)
  norm_eps: float = field(1e-5, "Epsilon of RMSNorm.", POSITIVE)
  tied_embeddings: bool = field(
    False, "Whether the head and the embedding share one table."
  )
  init_std: float = field(
    0.02, "Standard deviation of initial weights.", POSITIVE
  )
  dtype: str = field("float32", _DTYPE_DOC, DTYPES)
  remat: str = field(
    "none", 'Activations that the backward recomputes: "none", "full" (a whole '
    'layer), "reduced" (all except the results of all-reduces over ranks, so '
    'that recomputation does not communicate), or "named" (as "reduced", and '
    "also except queries, keys, values, and both inputs of the MLP's "
    "activation function).", ("none", "full", "reduced", "named"),
  )
  unroll: int = field(1, "Layers per iteration of the scan over layers.", COUNT)


@section
class Transformer(StackedModel):
  """Llama-style transformer, sized as configs/caatnet/tiny.py by default."""

  num_heads: int = field(8, "Number of query heads.", COUNT)
  num_kv_heads: int = field(8, "Number of key and value heads.", COUNT)
  head_width: int = field(
    0, "Channels of one head; 0 for width / num_heads.", COUNT_OR_ZERO
  )
  qkv_bias: bool = field(False, "Whether q, k and v have biases (Qwen2).")
  qk_norm: bool = field(False, "Whether each head normalises q and k (Qwen3).")
  sliding_window: int = field(
    0, "Number of positions that a query attends to, including its own "
    "(Mistral); 0 for full causal attention.", COUNT_OR_ZERO,
  )
  max_positions: int = field(
    0, "Longest sequence for which the model was published, an upper limit of "
    "data.seq_len and inference.context; 0 for no limit.", COUNT_OR_ZERO,
  )
  rope_base: float = field(10_000.0, "Base of rotary frequencies.", Range(1))
  rope_scaling: tuple[str | float, ...] = field(
    (), 'Scaling of rotary frequencies for longer contexts: (), ("linear", '
    'factor), or ("llama3", factor, low, high, original context).', POSITIVE,
  )
  attention: str = field(
    "auto", 'Implementation of attention: "xla" (any device), "cudnn" (GPU, '
    'bfloat16 or float16), "splash" (TPU, seq_len a multiple of 128), or '
    '"auto" for the fastest supported one.',
  )


@section
class Recurrent(StackedModel):
  """Gated linear recurrence (Hawk), sized as configs/recurrent/tiny.py."""

  num_heads: int = field(
    8, "Heads of the recurrence's gates, a multiple of the tensor ranks.", COUNT
  )
  rnn_width: int = field(
    160, "Channels of the recurrence, over all heads.", COUNT
  )
  conv_width: int = field(
    4, "Positions that the convolution before the recurrence reads.",
    TWO_OR_MORE,
  )


@section
class Convolutional:
  """Residual convolutional network with GroupNorm."""

  widths: tuple[int, ...] = field(
    (16, 32), "Channels of each stage; each stage after the first halves "
    "height and width.", COUNT,
  )
  blocks: int = field(
    2, "Residual blocks per stage, each of two 3 x 3 convolutions.", COUNT
  )
  groups: int = field(
    4, "Channel groups of GroupNorm; divides all widths.", COUNT
  )
  dtype: str = field("float32", _DTYPE_DOC, DTYPES)


@section
class SqueezeNet:
  """SqueezeNet 1.0, whose sizes are fixed."""

  dtype: str = field("float32", _DTYPE_DOC, DTYPES)


@section
class Graph:
  """Graph network with one layer per element of ``data.fanouts``."""

  layer: str = field(
    "sage", 'Kind of layers: "sage" (GraphSAGE, mean) or "gcn".'
  )
  width: int = field(64, "Channels of hidden states.", COUNT)
  dtype: str = field("float32", _DTYPE_DOC, DTYPES)


MODELS = {
  "transformer": Transformer, "recurrent": Recurrent,
  "convolutional": Convolutional, "squeezenet": SqueezeNet, "graph": Graph,
}
