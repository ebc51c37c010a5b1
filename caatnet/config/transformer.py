"""Builds ``config.model`` with the name "transformer", with ``config.sync``."""

from caatnet.checks import DTYPES, one_of
from caatnet.config import sections
from caatnet.config.context import Context
from caatnet.config.sync import Sync, build_sync
from caatnet.data.text import TextData
from caatnet.models.transformer import attention as attentions
from caatnet.models.transformer.config import TransformerConfig
from caatnet.models.transformer.model import TransformerModel
from caatnet.models.transformer.positions import parse_scaling
from parallel.kernels import evidence
from parallel.tensor.partial_sync import FUSED_ROUTES


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
  if not isinstance(context.data, TextData):
    raise ValueError(
      "config.data.name must be 'text' with config.model.name='transformer'"
    )
  if context.sync is None:
    raise ValueError(
      "config.sync is missing: config.model.name='transformer' needs it "
      "(configs/sections.py)"
    )
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
    kernels=_kernels_of_norms(context, sync),
    init_std=init_std,
    unroll=unroll,
    carry=sync.carry,
  )
  return TransformerModel(config, context.tensor, context.stage)


def _kernels_of_norms(context: Context, sync: Sync) -> tuple[str, ...]:
  """Returns implementations of the norms, without kernels that do not help.

  One choice is made for all layers, by their mean p if it differs. A route that
  is a kernel's was asked for by name, so it takes its kernel in any case.
  """
  doors = [door for layer in sync.doors for door in layer]
  p = sum(door.p for door in doors) / len(doors)
  asked = context.evidence_of is None or doors[0].route in FUSED_ROUTES
  if asked or evidence.helps(context.evidence_of, "add_norm", p):
    return context.kernels
  return ("reference",)
