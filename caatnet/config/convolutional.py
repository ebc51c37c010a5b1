"""Builds ``config.model`` with the name "convolutional"."""

from caatnet.checks import DTYPES, one_of
from caatnet.config.context import Context
from caatnet.data.images import ImageData
from caatnet.models.convolutional import ConvolutionalModel


def build(
  context: Context,
  *,
  widths: tuple[int, ...],
  blocks: int,
  groups: int,
  dtype: str,
) -> ConvolutionalModel:
  """Checks the section and builds the model.

  Keyword arguments are the section's keys, which ``configs/sections.py``
  explains.

  Args:
    context: The parts of the experiment on which a model depends.

  Raises:
    ValueError: A value does not fit, or is for models with tensor ranks.
  """
  context.check_unshared("convolutional", "images", ImageData)
  one_of("dtype", dtype, DTYPES)
  return ConvolutionalModel(
    shape=tuple(context.data.shape),
    num_classes=context.data.num_classes,
    widths=tuple(widths),
    blocks=blocks,
    groups=groups,
    dtype=dtype,
    tensor=context.tensor,
  )
