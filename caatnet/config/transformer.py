"""Builds ``config.model`` with the name "transformer", with ``config.sync``."""

from caatnet.checks import DTYPES, one_of
from caatnet.config import sections
from caatnet.config.context import Context
from caatnet.config.sync import Sync, build_sync, kernels_of_norms
from caatnet.models.transformer import attention as attentions
from caatnet.models.transformer.config import TransformerConfig
from caatnet.models.transformer.model import TransformerModel
from caatnet.models.transformer.positions import parse_scaling


def build(
  context: Context,
  *,
  vocab_size: int,
  width: int,
  num_layers: int,
  num_heads: int,
  num_kv_heads: int,
  ffn_width: int,
  head_width: int,
  qkv_bias: bool,
  qk_norm: bool,
  sliding_window: int,
  rope_scaling: tuple[str | float, ...],
  rope_base: float,
  norm_eps: float,
  tied_embeddings: bool,
  init_std: float,
  dtype: str,
  remat: str,
  unroll: int,
  attention: str,
) -> TransformerModel:
  """Checks both sections and builds the model that they describe.

  Keyword arguments are the keys of ``config.model``, which
  ``configs/sections.py`` explains.

  Args:
    context: The parts of the experiment on which a model depends, among them
      ``config.sync``.

  Raises:
    ValueError: A value does not fit; the message names what would.
  """
  one_of("dtype", dtype, DTYPES)
  one_of("attention", attention, attentions.IMPLEMENTATIONS)
  context.check_language("transformer")
  sync: Sync = sections.call(
    "sync", build_sync, context.sync, context, num_layers, remat
  )
  config = TransformerConfig(
    vocab_size=vocab_size,
    width=width,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    ffn_width=ffn_width,
    syncs=sync.doors,
    head_width=head_width,
    qkv_bias=qkv_bias,
    qk_norm=qk_norm,
    sliding_window=sliding_window,
    rope_scaling=parse_scaling(rope_scaling),
    rope_base=rope_base,
    norm_eps=norm_eps,
    tied_embeddings=tied_embeddings,
    dtype=dtype,
    remat=remat,
    attention=attentions.resolve(
      attention, context.platform, dtype, context.data.seq_len,
      head_width or width // num_heads,
    ),
    kernels=kernels_of_norms(context, sync),
    init_std=init_std,
    unroll=unroll,
    carry=sync.carry,
  )
  return TransformerModel(config, context.tensor, context.stage)
