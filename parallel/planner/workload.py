"""A transformer's sizes in closed form: parameters, FLOPs, bytes of a layer.

It is the model of `caatnet/models/transformer`: grouped-query attention, SwiGLU
and RMSNorm; float32 parameters, activations in a dtype of fewer bytes.
"""

import dataclasses
import math

from parallel import checks
from parallel.hardware.devices import Device

# The share of a device's peak that its matrix products reach, an assumption.
UTILISATION_SOURCE = (
  "Narayanan et al., 2104.04473, table 1: 44% to 52% of an A100's peak for GPT "
  "of 1.7B to 1T, communication and bubbles included; products alone reach more"
)
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class Transformer:
  """The sizes of a transformer, and of an example.

  Attributes:
    vocab_size: The number of tokens.
    width: Channels of the residual stream.
    num_layers: The number of blocks.
    num_heads: Query heads.
    num_kv_heads: Key and value heads.
    head_width: Channels of a head.
    ffn_width: The hidden width of the MLP.
    seq_len: Positions of an example.
    dtype: The dtype of activations.
    backward_bytes: Bytes of an element of what is reduced over tensor ranks in
      the backward.
  """

  vocab_size: int
  width: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_width: int
  ffn_width: int
  seq_len: int
  dtype: str = "bfloat16"
  backward_bytes: int = 4

  def __post_init__(self) -> None:
    checks.known("dtype=", self.dtype, _BYTES)

  @property
  def item_bytes(self) -> int:
    """Bytes of an activation."""
    return _BYTES[self.dtype]

  @property
  def matrices(self) -> tuple[int, ...]:
    """Elements of a layer's matrices: qkv, out, gate and up, down."""
    heads = self.num_heads * self.head_width
    keys = 2 * self.num_kv_heads * self.head_width
    return (
      self.width * (heads + keys), heads * self.width,
      2 * self.width * self.ffn_width, self.ffn_width * self.width,
    )

  @property
  def num_params(self) -> int:
    """The number of parameters: layers, embedding, head, norms."""
    layer = sum(self.matrices) + 2 * self.width
    return (
      self.num_layers * layer + 2 * self.vocab_size * self.width + self.width
    )

  def boundary_bytes(self, examples: float) -> float:
    """Returns the bytes of the stream of some examples."""
    return examples * self.seq_len * self.width * self.item_bytes

  def layer_flops(self, examples: float, tensor: int) -> float:
    """Returns FLOPs of a layer's forward on one of the tensor ranks.

    Of the scores half are computed, since attention is causal.
    """
    tokens = examples * self.seq_len
    scores = 2 * self.seq_len * self.num_heads * self.head_width
    return tokens * (2 * sum(self.matrices) + scores) / tensor

  def head_flops(self, examples: float, ranks: int) -> float:
    """Returns FLOPs of the head's forward on one of so many ranks."""
    tokens = examples * self.seq_len
    return 2 * tokens * self.width * self.vocab_size / ranks

  def kept_bytes(self, examples: float, tensor: int) -> float:
    """Returns bytes that a layer's forward leaves for its backward.

    The stream before both norms and both normalised copies on every rank; of a
    rank's heads and channels queries, keys, values, what attention returns,
    gate, up and their product. Scores are not kept: attention is fused.
    """
    heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_width
    channels = 4 * self.width + (heads + 3 * self.ffn_width) / tensor
    return examples * self.seq_len * channels * self.item_bytes

  def layer_s(
    self, examples: float, tensor: int, device: Device, utilisation: float
  ) -> float:
    """Returns seconds of a layer's forward without communication (roofline).

    Products reach a share of the peak, or as much as their weights can be read
    at; what is between them is read and written once.
    """
    weights = sum(self.matrices) / tensor * self.item_bytes
    products = max(
      self.layer_flops(examples, tensor)
      / (utilisation * device.peak(self.dtype)),
      weights / device.memory_bandwidth,
    )
    between = 2 * self.kept_bytes(examples, tensor) / device.memory_bandwidth
    return products + between


def layers_per_part(model: Transformer, parts: int) -> int:
  """Returns the layers of a part, of which programs pad the smaller ones."""
  return math.ceil(model.num_layers / parts)
