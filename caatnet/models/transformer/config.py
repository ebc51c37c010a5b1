"""The sizes of a transformer, and how its layers are computed."""

import dataclasses

import jax

from caatnet.models.transformer.positions import Scaling
from parallel.axes import divisors
from parallel.tensor.partial_sync import PartialSync
from parallel.tensor.reductions import REDUCED
from parallel.workload import Transformer as Workload

# What of a layer is kept for the backward, by the names that configs use:
# everything, nothing, or only what has been reduced over ranks, so that
# recomputing the rest sends nothing.
REMAT_POLICIES = {
  "none": None,
  "full": jax.checkpoint_policies.nothing_saveable,
  "reduced": jax.checkpoint_policies.save_only_these_names(REDUCED),
}


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """The sizes of a whole transformer, before any cut into ranks.

  Attributes:
    vocab_size: The number of tokens.
    width: The channels of the residual stream.
    num_layers: The number of blocks.
    num_heads: The number of query heads.
    num_kv_heads: The number of key/value heads; divides ``num_heads``.
    head_width: The channels of one head; 0 means ``width / num_heads``.
    ffn_width: The hidden width of the MLP.
    syncs: For each layer how attention's row door and the MLP's synchronise.
    qkv_bias: Whether queries, keys and values have biases, as in Qwen2.
    qk_norm: Whether each head's queries and keys are normalised, as in Qwen3.
    sliding_window: How many positions a query sees, its own among them, as in
      Mistral; 0 for all before it.
    rope_base: The longest rotary wavelength, over 2 pi.
    rope_scaling: How rotary frequencies are changed for longer contexts.
    norm_eps: What a norm adds to the mean square.
    tied_embeddings: Whether the head is the embedding's transpose.
    dtype: The dtype of activations; parameters are float32.
    remat: What the backward recomputes, a key of ``REMAT_POLICIES``.
    attention: The implementation, as `attention.attention` takes it.
    kernels: Implementations of the norms in order of preference, as
      `parallel.kernels.selection` has them.
    init_std: The standard deviation of all matrices when they are drawn. That
      of output projections is smaller by sqrt(2 layers), as in GPT-2 and
      Megatron-LM.
    unroll: Layers per iteration of the scan.
    carry: Whether the MLP's row door may leave its reduction to the first norm
      of the next layer, on routes with a kernel that does both.
  """

  vocab_size: int
  width: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  ffn_width: int
  syncs: tuple[tuple[PartialSync, PartialSync], ...]
  head_width: int = 0
  qkv_bias: bool = False
  qk_norm: bool = False
  sliding_window: int = 0
  rope_base: float = 10_000.0
  rope_scaling: Scaling | None = None
  norm_eps: float = 1e-5
  tied_embeddings: bool = False
  dtype: str = "float32"
  remat: str = "none"
  attention: str = "xla"
  kernels: tuple[str, ...] = ("reference",)
  init_std: float = 0.02
  unroll: int = 1
  carry: bool = False

  def __post_init__(self) -> None:
    _check(self.num_heads, "num_heads", self.num_kv_heads, "num_kv_heads")
    if not self.head_width:
      _check(self.width, "width", self.num_heads, "num_heads")
      object.__setattr__(self, "head_width", self.width // self.num_heads)
    if self.head_width % 2:
      raise ValueError(
        f"config.model.head_width={self.head_width} (width / num_heads, if 0) "
        "must be even for rotary positions"
      )
    if self.remat not in REMAT_POLICIES:
      raise ValueError(
        f"config.model.remat={self.remat!r} must be one of "
        f"{', '.join(REMAT_POLICIES)}"
      )
    if len(self.syncs) != self.num_layers:
      raise ValueError(
        f"p is given for {len(self.syncs)} layers, but "
        f"config.model.num_layers={self.num_layers}"
      )

  @property
  def workload(self) -> Workload:
    """Sizes that determine parameters, FLOPs and bytes."""
    names = (field.name for field in dataclasses.fields(Workload))
    return Workload(**{name: getattr(self, name) for name in names})

  @property
  def num_params(self) -> int:
    """The number of logical parameters, without padding."""
    return self.workload.num_params

  def flops_per_token(self, seq_len: int) -> float:
    """Returns training FLOPs per token, as `Workload.flops_per_token`."""
    return self.workload.flops_per_token(seq_len)


def _check(value: int, key: str, divisor: int, divisor_key: str) -> None:
  if divisor < 1 or value % divisor:
    raise ValueError(
      f"config.model.{divisor_key}={divisor} does not divide "
      f"config.model.{key}={value}; use one of {divisors(value)}"
    )
