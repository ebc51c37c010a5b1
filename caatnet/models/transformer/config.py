"""Sizes of a transformer, and implementations of its layers."""

import dataclasses

from caatnet.models.lm.config import StackConfig, check_divides
from caatnet.models.transformer.positions import Scaling
from parallel.plans.workload import Transformer as Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(StackConfig):
  """Sizes of a whole transformer, independent of the number of ranks.

  Attributes:
    num_heads: The number of query heads.
    num_kv_heads: The number of key/value heads; divides ``num_heads``.
    head_width: The channels of one head; 0 means ``width / num_heads``.
    qkv_bias: Whether queries, keys and values have biases, as in Qwen2.
    qk_norm: Whether each head's queries and keys are normalised, as in Qwen3.
    sliding_window: Positions that a query attends to, including its own, as in
      Mistral; 0 for full causal attention.
    max_positions: Longest sequence for which the model was published; 0 for no
      limit.
    rope_base: Base of the rotary wavelengths, the longest of which is about
      ``2 pi rope_base`` positions.
    rope_scaling: Scaling of rotary frequencies for longer contexts, or None.
    attention: Name of the implementation, see `attention.attention`.

  Example:
    >>> from parallel.tensor.partial_sync import PartialSync
    >>> config = TransformerConfig(
    ...   vocab_size=32000, width=4096, num_layers=32, ffn_width=11008,
    ...   num_heads=32, num_kv_heads=32, syncs=((PartialSync(),) * 2,) * 32,
    ... )
    >>> config.num_params  # Llama 7B
    6738415616
    >>> f"{config.flops_per_token(seq_len=2048):.3g}"
    '4.13e+10'
  """

  num_heads: int
  num_kv_heads: int
  head_width: int = 0
  qkv_bias: bool = False
  qk_norm: bool = False
  sliding_window: int = 0
  max_positions: int = 0
  rope_base: float = 10_000.0
  rope_scaling: Scaling | None = None
  attention: str = "xla"

  def __post_init__(self) -> None:
    check_divides(
      self.num_heads, "num_heads", self.num_kv_heads, "model.num_kv_heads"
    )
    if not self.head_width:
      check_divides(self.width, "width", self.num_heads, "model.num_heads")
      object.__setattr__(self, "head_width", self.width // self.num_heads)
    if self.head_width % 2:
      raise ValueError(
        f"config.model.head_width={self.head_width} (0: width / num_heads) "
        "must be even, since rotary positions rotate pairs of channels"
      )
    super().__post_init__()

  @property
  def workload(self) -> Workload:
    """The sizes as a `Workload`, which computes parameters, FLOPs and bytes."""
    names = (field.name for field in dataclasses.fields(Workload))
    return Workload(**{name: getattr(self, name) for name in names})

  @property
  def layer_params(self) -> int:
    return self.workload.layer_params

  @property
  def gains(self) -> list[tuple[int, ...]]:
    of_heads = [(self.head_width,)] * 2 * self.qk_norm
    return [*super().gains, *of_heads]

  @property
  def num_slices(self) -> int:
    return 4 + self.qkv_bias

  def flops_per_token(self, seq_len: int) -> float:
    """Returns training FLOPs per token, see `Workload.flops_per_token`."""
    return self.workload.flops_per_token(seq_len)
