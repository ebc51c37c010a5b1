"""Sizes common to all language models with a stack of layers."""

import dataclasses

import jax

from caatnet.models.lm.layers import ACTIVATION_NAME
from parallel.base.checks import divisors, known
from parallel.tensor.partial_sync import PartialSync
from parallel.tensor.reductions import REDUCED_NAME

# Checkpoint policies by config name. "none" saves all residuals; "full" saves
# none; "reduced" saves only results of collectives, so that recomputation does
# not communicate; "named" also saves arrays of
# `caatnet.models.lm.layers.name_activations`.
REMAT_POLICIES = {
  "none": None,
  "full": jax.checkpoint_policies.nothing_saveable,
  "reduced": jax.checkpoint_policies.save_only_these_names(REDUCED_NAME),
  "named": jax.checkpoint_policies.save_only_these_names(
    REDUCED_NAME, ACTIVATION_NAME
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackConfig:
  """Sizes of a whole language model, independent of the number of ranks.

  A layer has two row-parallel projections: one of the sequence mixer (attention
  or a recurrence), and one of the MLP.

  Attributes:
    vocab_size: The number of tokens.
    width: The channels of the residual stream.
    num_layers: The number of layers.
    ffn_width: The hidden width of the MLP.
    syncs: For each layer, the sync policies of its two row-parallel
      projections.
    norm_eps: Epsilon that a norm adds to the mean square.
    tied_embeddings: Whether the head is the embedding's transpose.
    dtype: The dtype of activations; parameters are float32.
    remat: Rematerialisation in the backward, a key of ``REMAT_POLICIES``.
    kernels: Implementations of the norms in order of preference, names of
      `parallel.kernels.selection`.
    init_std: Standard deviation of all matrices at initialisation. Output
      projections use it divided by sqrt(2 layers), as GPT-2 and Megatron-LM do.
    unroll: Layers per iteration of the scan.
    carry: Whether the MLP's reduction may be deferred to the first norm of the
      next layer, if ``route`` of the sync policy has a kernel that fuses both.
  """

  vocab_size: int
  width: int
  num_layers: int
  ffn_width: int
  syncs: tuple[tuple[PartialSync, PartialSync], ...]
  norm_eps: float = 1e-5
  tied_embeddings: bool = False
  dtype: str = "float32"
  remat: str = "none"
  kernels: tuple[str, ...] = ("reference",)
  init_std: float = 0.02
  unroll: int = 1
  carry: bool = False

  def __post_init__(self) -> None:
    known("config.model.remat=", self.remat, REMAT_POLICIES)
    if len(self.syncs) != self.num_layers:
      raise ValueError(
        f"p is given for {len(self.syncs)} layers; it must be given for "
        f"config.model.num_layers={self.num_layers}"
      )

  @property
  def layer_params(self) -> int:
    """Number of logical parameters of one layer, without padding."""
    raise NotImplementedError

  @property
  def gains(self) -> list[tuple[int, ...]]:
    """Shapes of a layer's parameters that are replicated on all ranks."""
    return [(self.width,)] * 2  # norms before both column-parallel projections

  @property
  def num_slices(self) -> int:
    """Number of parameter arrays of a layer that are cut over ranks."""
    raise NotImplementedError

  @property
  def num_params(self) -> int:
    """Number of logical parameters of the model, without padding."""
    tables = 1 if self.tied_embeddings else 2
    table = self.vocab_size * self.width
    layers = self.num_layers * self.layer_params
    return layers + tables * table + self.width


def check_divides(value: int, key: str, divisor: int, divisor_key: str) -> None:
  """Checks that a size of ``config.model`` is a multiple of another one.

  Args:
    value: The size.
    key: The key of ``value`` in ``config.model``.
    divisor: Size that must divide ``value``.
    divisor_key: The key of ``divisor`` in ``config``.

  Raises:
    ValueError: If it does not; the message lists the divisors.
  """
  if divisor < 1 or value % divisor:
    raise ValueError(
      f"config.{divisor_key}={divisor} does not divide "
      f"config.model.{key}={value}; use one of {divisors(value)}"
    )
