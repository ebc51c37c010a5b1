"""Stacked layers as a `caatnet.models.protocol.LanguageModel`."""

import collections
from collections.abc import Mapping
import dataclasses
import functools
from typing import Any, ClassVar

from flax import nnx
import jax
from jax.sharding import PartitionSpec as P

from caatnet.models.access import DEFAULT_ACCESS, Access
from caatnet.models.lm.communication import (
  decoding_reductions,
  tensor_reductions,
)
from caatnet.models.lm.config import StackConfig
from caatnet.models.lm.losses import cross_entropy, target_scores
from caatnet.models.lm.module import LanguageModule
from caatnet.models.lm.parameters import Bias, Float32Bias, Sharded
from caatnet.models.nanobatches import NanobatchRule
from caatnet.models.paged import Batch, Cache
from caatnet.models.protocol import Parameter, PipelineParts, Reduction
from parallel.axes import Axis

# The key of the subtree whose leaves are stacked over layers.
BLOCKS = "blocks"


@dataclasses.dataclass(frozen=True)
class StackedLanguageModel:
  """Base class of language models; an example is T + 1 tokens, int ``[T + 1]``.

  A subclass defines ``module_type``, `cache_shape` and `flops`.

  Attributes:
    module_type: The class of the module.
    config: Sizes, and sync policies of the row-parallel projections.
    tensor: The tensor axis.
    stage: The stage axis, if pipeline stages cut the vocabulary in addition to
      tensor ranks; else None.
  """

  config: StackConfig
  tensor: Axis
  stage: Axis | None = None
  module_type: ClassVar[type[LanguageModule]]

  def _make_module(self, rngs: nnx.Rngs) -> LanguageModule:
    return self.module_type(self.config, self.tensor, rngs)

  @functools.cached_property
  def _graphdef_and_shapes(self) -> tuple[Any, Any]:
    """Graph definition and abstract parameters of the module."""
    return nnx.split(nnx.eval_shape(lambda: self._make_module(nnx.Rngs(0))))

  @property
  def _module(self) -> LanguageModule:
    """Module whose parameters are only shapes and dtypes."""
    module = nnx.merge(*self._graphdef_and_shapes)
    module.stage = self.stage
    return module

  @property
  def dtype(self) -> str:
    return self.config.dtype

  @property
  def num_params(self) -> int:
    return self.config.num_params

  @property
  def vocab_size(self) -> int:
    return self.config.vocab_size

  @property
  def stacks(self) -> Mapping[str, int]:
    return {BLOCKS: self.config.num_layers}

  @property
  def parameters(self) -> Any:
    """Tree of `Parameter`; `Sharded` ones are cut over ranks, gains are not."""

    def parameter(path: tuple[Any, ...], variable: Any) -> Parameter:
      in_block = path[0] == BLOCKS
      looked_up = path[0] == "embedding"
      if not isinstance(variable, Sharded):  # the gain of a norm
        return Parameter(
          P(), int(in_block), "float32", decays=False,
          stage_dim=0 if in_block else None,
        )
      ranks = (self.tensor.name,)
      tied = looked_up and self.config.tied_embeddings
      stage_dim = 0 if in_block else None
      if self.stage is not None and not in_block:  # the dim of tokens
        stage_dim = 1 if looked_up else 2
      return Parameter(
        # [layer, R, ...] in a block, [R, ...] elsewhere.
        P(None, *ranks) if in_block else P(*ranks),
        1 + in_block,
        "float32" if isinstance(variable, Float32Bias) else self.config.dtype,
        decays=not isinstance(variable, Bias),
        uses=2 if tied else 1,  # a tied table is also the head
        # The backward of a lookup does not read the table, the head's does.
        regathered=1 if tied or not looked_up else 0,
        stage_dim=stage_dim,
        # Functions cast it at each product, and after the sum of a lookup.
        cast=False,
      )

    flat = {
      path: parameter(path, variable)
      for path, variable in nnx.to_flat_state(self._graphdef_and_shapes[1])
    }
    return nnx.traversals.unflatten_mapping(flat)

  def init(self, key: jax.Array) -> Any:
    module = self._make_module(nnx.Rngs(params=key))
    return nnx.to_pure_dict(nnx.split(module)[1])

  def scores(
    self, params: Any, batch: jax.Array, access: Access = DEFAULT_ACCESS
  ) -> dict[str, jax.Array]:
    """Returns the cross-entropy in nats, ``{"loss": float32 [B, T]}``."""
    losses = self._module.judge(
      params, cross_entropy, batch, access
    )
    return {"loss": losses}

  def target_scores(
    self, params: Any, batch: jax.Array, access: Access = DEFAULT_ACCESS
  ) -> dict[str, jax.Array]:
    return self._module.judge(
      params, target_scores, batch, access
    )

  def logits(
    self, params: Any, tokens: jax.Array, access: Access = DEFAULT_ACCESS
  ) -> jax.Array:
    return self._module.logits(params, tokens, access)

  def parts(self) -> PipelineParts:
    if len(set(self.config.syncs)) > 1:
      p_attention, p_mlp = (
        tuple(sync.p for sync in syncs)
        for syncs in zip(*self.config.syncs, strict=True)
      )
      raise ValueError(
        f"p_attention={p_attention} and p_mlp={p_mlp} must have one number "
        "each, since all layers of a pipeline must have the same sync policies"
      )
    module = self._module
    if module.carries(self.config.syncs[0]):
      raise ValueError(
        "carry='off' is required for pipeline stages: with carry, a layer "
        "leaves its reduction to the next one, which may be on another stage"
      )
    return PipelineParts(
      BLOCKS,
      lambda params, batch, access: module.before_blocks(
        params, batch[..., :-1], access
      ),
      module.run_blocks,
      lambda params, x, batch, access: {
        "loss": module.after_blocks(
          params, x, cross_entropy, batch[..., 1:], access
        )
      },
      together=self.stage is not None,
    )

  def decode(
    self,
    params: Any,
    cache: Cache,
    batch: Batch,
    access: Access = DEFAULT_ACCESS,
    nanobatches: NanobatchRule | None = None,
  ) -> tuple[jax.Array, Cache]:
    return self._module.decode(params, cache, batch, access, nanobatches)

  def token_ids(self) -> jax.Array:
    return self._module.vocabulary.token_ids()

  def flops(self, example: jax.ShapeDtypeStruct) -> float:
    raise NotImplementedError

  def reductions(
    self,
    example: jax.ShapeDtypeStruct,
    *,
    batch_size: int,
    data_lanes: int,
    accumulation: int = 1,
  ) -> collections.Counter[Reduction]:
    return tensor_reductions(
      self.config,
      data_lanes=data_lanes,
      batch_size=batch_size,
      seq_len=example.shape[-1] - 1,
      accumulation=accumulation,
    )

  def decoding_reductions(
    self, *, tokens: int
  ) -> collections.Counter[Reduction]:
    """Counts the collectives of `decode` over the tensor axis, in closed form.

    Args:
      tokens: Tokens of the step on one device.
    """
    return decoding_reductions(self.config, tokens=tokens)
