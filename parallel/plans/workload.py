"""Transformer workload: sizes, parameters, FLOPs and bytes in closed form.

The model is `caatnet/models/transformer`: grouped-query attention, SwiGLU and
RMSNorm; float32 parameters, activations in ``dtype``. The training code, the
planner, the inference bounds and the studies use the same counts.
"""

import dataclasses
import math

from parallel.base import checks
from parallel.plans.hardware.devices import Device

# Source of the assumed fraction of a device's peak that matrix products reach.
UTILISATION_SOURCE = (
  "Narayanan et al., 2104.04473, table 1: 44% to 52% of an A100's peak for GPT "
  "of 1.7B to 1T, communication and bubbles included; products alone reach more"
)
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class Transformer:
  """Sizes of a transformer, before any partition over ranks.

  Attributes:
    vocab_size: Number of tokens in the vocabulary.
    width: Channels of the residual stream.
    num_layers: Number of blocks.
    num_heads: Number of query heads.
    num_kv_heads: Number of key and value heads.
    ffn_width: Hidden width of the MLP.
    head_width: Channels of a head; 0 for width / num_heads.
    dtype: Dtype of activations and, in inference, of weights and cache:
      "float32", "bfloat16" or "float16".
    qkv_bias: Whether queries, keys and values have biases, as in Qwen2.
    qk_norm: Whether queries and keys are normalised per head, as in Qwen3.
    sliding_window: Positions that a query attends to, including its own, as in
      Mistral; 0 for all preceding positions.
    tied_embeddings: Whether the head is the transposed embedding.

  Raises:
    ValueError: ``dtype`` is unknown.

  Example:
    >>> llama = Transformer(  # Llama 2 7B
    ...   vocab_size=32000, width=4096, num_layers=32, num_heads=32,
    ...   num_kv_heads=32, ffn_width=11008,
    ... )
    >>> llama.num_params
    6738415616
  """

  vocab_size: int
  width: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  ffn_width: int
  head_width: int = 0
  dtype: str = "bfloat16"
  qkv_bias: bool = False
  qk_norm: bool = False
  sliding_window: int = 0
  tied_embeddings: bool = False

  def __post_init__(self) -> None:
    checks.known("dtype=", self.dtype, _DTYPE_BYTES)
    if not self.head_width:
      if self.num_heads > self.width:
        raise ValueError(
          f"num_heads={self.num_heads} is more than width={self.width}, so "
          "heads would have no channels; set head_width"
        )
      object.__setattr__(self, "head_width", self.width // self.num_heads)

  @property
  def item_bytes(self) -> int:
    """Bytes of one activation element."""
    return _DTYPE_BYTES[self.dtype]

  @property
  def matrices(self) -> tuple[int, ...]:
    """Number of elements of a layer's matrices: qkv, out, gate and up, down."""
    heads = self.num_heads * self.head_width
    keys = 2 * self.num_kv_heads * self.head_width
    return (
      self.width * (heads + keys), heads * self.width,
      2 * self.width * self.ffn_width, self.ffn_width * self.width,
    )

  @property
  def layer_params(self) -> int:
    """Number of logical parameters of a layer, including its norms."""
    layer = sum(self.matrices) + 2 * self.width  # two RMSNorms
    if self.qkv_bias:
      layer += (self.num_heads + 2 * self.num_kv_heads) * self.head_width
    if self.qk_norm:
      # One scale for queries and one for keys, shared by all heads.
      layer += 2 * self.head_width
    return layer

  @property
  def num_params(self) -> int:
    """Number of logical parameters of the whole model, without padding."""
    # Embedding and head, [vocab_size, width] each, and the final norm [width].
    tables = 1 if self.tied_embeddings else 2
    table = self.vocab_size * self.width
    layers = self.num_layers * self.layer_params
    return layers + tables * table + self.width

  def twice_mean_context(self, seq_len: int) -> float:
    """Returns twice the mean number of positions that a query attends to.

    Without a sliding window the result is ``seq_len``, since attention is
    causal. With a window of w positions, the score matrix is half of a w x w
    square for the first w queries and a band of width w for the others.
    """
    # Twice the area, w^2 + 2 w (S - w), divided by the S queries.
    window = min(self.sliding_window or seq_len, seq_len)
    return window * (2 * seq_len - window) / seq_len

  def flops_per_token(self, seq_len: int) -> float:
    """Returns training FLOPs per token: 6 per weight, plus attention scores.

    Source: Chowdhery et al. (PaLM), arXiv 2204.02311, appendix B. Deviation:
    half of the score matrix is counted, since attention is causal.
    """
    # An embedding lookup is no matrix product; a tied table counts once, for
    # its use as the head.
    products = self.num_params
    if not self.tied_embeddings:
      products -= self.vocab_size * self.width
    heads = self.num_layers * self.num_heads * self.head_width
    return 6 * products + 6 * heads * self.twice_mean_context(seq_len)

  def layer_flops(self, tokens: float, seq_len: int) -> float:
    """Returns FLOPs of a layer's forward pass: matrix products and attention.

    Args:
      tokens: Number of tokens of all sequences.
      seq_len: Positions of a sequence.
    """
    # Two products (scores, weighted values) of 2 FLOPs per position and
    # channel; `twice_mean_context` is already twice the mean.
    scores = (
      2 * self.twice_mean_context(seq_len) * self.num_heads * self.head_width
    )
    return tokens * (2 * sum(self.matrices) + scores)

  def head_flops(self, tokens: float) -> float:
    """Returns FLOPs of the head's forward pass for ``tokens`` tokens."""
    return 2 * tokens * self.width * self.vocab_size

  def residual_stream_bytes(self, tokens: float) -> float:
    """Returns the bytes of the residual stream of ``tokens`` tokens."""
    return tokens * self.width * self.item_bytes

  def saved_activation_bytes(self, tokens: float, tensor: int) -> float:
    """Returns bytes of a layer's activations saved for its backward, per rank.

    Every rank saves the residual stream before each of the two norms and the
    normalised copies. The ranks partition queries, keys, values, the output of
    attention, gate, up and the product of gate and up. Scores are not saved,
    since attention is fused.

    Args:
      tokens: Number of tokens of all sequences.
      tensor: Number of tensor ranks.
    """
    # Queries and the output of attention; keys and values.
    heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_width
    channels = 4 * self.width + (heads + 3 * self.ffn_width) / tensor
    return tokens * channels * self.item_bytes

  def layers_per_part(self, parts: int) -> int:
    """Returns the layers per pipeline part; shorter parts are padded."""
    return math.ceil(self.num_layers / parts)


@dataclasses.dataclass(frozen=True)
class TrainingStep:
  """Training step: a model and the sizes of its batch.

  Attributes:
    model: Sizes of the model.
    batch_size: Number of examples of a step.
    seq_len: Positions of an example.
    backward_bytes: Bytes per element of the backward's all-reduces over tensor
      ranks.
    moments: Number of the optimizer's float32 arrays of a parameter's size.
  """

  model: Transformer
  batch_size: int
  seq_len: int
  backward_bytes: int = 4
  moments: int = 2

  def boundary_bytes(self, examples: float) -> float:
    """Returns the bytes of the residual stream of ``examples`` examples."""
    return self.model.residual_stream_bytes(examples * self.seq_len)

  def saved_activation_bytes(self, examples: float, tensor: int) -> float:
    """Returns `Transformer.saved_activation_bytes` of ``examples`` examples."""
    return self.model.saved_activation_bytes(examples * self.seq_len, tensor)

  def layer_flops(self, examples: float, tensor: int) -> float:
    """Returns FLOPs of a layer's forward pass on one tensor rank."""
    tokens = examples * self.seq_len
    return self.model.layer_flops(tokens, self.seq_len) / tensor

  def head_flops(self, examples: float, ranks: int) -> float:
    """Returns FLOPs of the output head's forward on one of ``ranks`` ranks."""
    return self.model.head_flops(examples * self.seq_len) / ranks

  def layer_s(
    self, examples: float, tensor: int, device: Device, utilisation: float
  ) -> float:
    """Returns seconds of a layer's forward without communication (roofline).

    The matrix products take the larger of two times: that of their FLOPs at
    ``utilisation`` times the peak, and that of reading their weights.
    Activations are written once and read once.

    Args:
      examples: Number of examples.
      tensor: Number of tensor ranks.
      device: Device with peak FLOP/s and memory bandwidth in bytes/s.
      utilisation: Fraction of the peak that matrix products reach, in (0, 1].
    """
    model = self.model
    weights = sum(model.matrices) / tensor * model.item_bytes
    products = max(
      self.layer_flops(examples, tensor)
      / (utilisation * device.peak(model.dtype)),
      weights / device.memory_bandwidth,
    )
    between = 2 * self.saved_activation_bytes(
      examples, tensor
    ) / device.memory_bandwidth
    return products + between
