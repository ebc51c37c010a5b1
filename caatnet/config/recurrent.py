"""Builds ``config.model`` with the name "recurrent", with ``config.sync``."""

from typing import Any

from caatnet.checks import DTYPES, one_of
from caatnet.config import sections
from caatnet.config.context import Context
from caatnet.config.sync import Sync, build_sync, kernels_of_norms
from caatnet.models.recurrent import RecurrentConfig, RecurrentModel


def build(
  context: Context,
  *,
  vocab_size: int,
  width: int,
  num_layers: int,
  num_heads: int,
  rnn_width: int,
  conv_width: int,
  ffn_width: int,
  norm_eps: float,
  tied_embeddings: bool,
  init_std: float,
  dtype: str,
  remat: str,
  unroll: int,
) -> RecurrentModel:
  """Checks both sections and builds the model that they describe.

  Keyword arguments are the keys of ``config.model``, which
  ``configs/recurrent_sections.py`` explains.

  Args:
    context: The parts of the experiment on which a model depends, among them
      ``config.sync``.

  Raises:
    ValueError: A value does not fit; the message names what would.
  """
  sizes: dict[str, Any] = {
    key: value for key, value in locals().items() if key != "context"
  }
  one_of("dtype", dtype, DTYPES)
  context.check_language("recurrent")
  sync: Sync = sections.call(
    "sync", build_sync, context.sync, context, num_layers, remat
  )
  config = RecurrentConfig(
    **sizes, syncs=sync.doors, kernels=kernels_of_norms(context, sync)
  )
  return RecurrentModel(config, context.tensor, context.stage)
