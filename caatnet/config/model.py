"""Builders of ``config.model``, by the names that configs use."""

from caatnet.checks import one_of
from caatnet.config import sections
from caatnet.config.context import Context
from caatnet.config.schema import model as schema
from caatnet.config.sync import Sync, build_sync
from caatnet.data.graphs.data import GraphData
from caatnet.data.images import ImageData
from caatnet.data.text import TextData
from caatnet.models.convolutional import ConvolutionalModel
from caatnet.models.graph import LAYERS, GraphModel
from caatnet.models.transformer import attention as attentions
from caatnet.models.transformer.config import TransformerConfig
from caatnet.models.transformer.model import TransformerModel
from caatnet.models.transformer.positions import parse_scaling
from parallel.kernels import evidence
from parallel.tensor.partial_sync import FUSED_ROUTES


def transformer(
  section: schema.Transformer, context: Context
) -> TransformerModel:
  """Builds the model of ``config.model`` and ``config.sync``.

  Args:
    section: The section.
    context: The parts of the experiment on which a model depends, among them
      ``config.sync``.

  Raises:
    ValueError: A value does not fit; the message names what would.
  """
  one_of("attention", section.attention, attentions.IMPLEMENTATIONS)
  if not isinstance(context.data, TextData):
    raise ValueError(
      "config.data.name must be 'text' with config.model.name='transformer'"
    )
  if context.sync is None:
    raise ValueError(
      "config.sync is missing: config.model.name='transformer' needs it "
      "(caatnet/config/schema/sync.py)"
    )
  sync: Sync = sections.call(
    "sync", build_sync, context.sync, context, section.num_layers, section.remat
  )
  derived = {
    "syncs": sync.doors,
    "rope_scaling": parse_scaling(section.rope_scaling),
    "attention": attentions.resolve(
      section.attention, context.platform, section.dtype, context.data.seq_len,
      section.head_width or section.width // section.num_heads,
    ),
    "kernels": _kernels_of_norms(context, sync),
    "carry": sync.carry,
  }
  return TransformerModel(
    TransformerConfig(**vars(section) | derived), context.tensor, context.stage
  )


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


def convolutional(
  section: schema.Convolutional, context: Context
) -> ConvolutionalModel:
  """Builds the model.

  Args:
    section: The section.
    context: The parts of the experiment on which a model depends.

  Raises:
    ValueError: A value does not fit, or is for models with tensor ranks.
  """
  context.check_unshared("convolutional", "images", ImageData)
  return ConvolutionalModel(
    **vars(section),
    shape=tuple(context.data.shape),
    num_classes=context.data.num_classes,
    tensor=context.tensor,
  )


def graph(section: schema.Graph, context: Context) -> GraphModel:
  """Builds the model.

  Args:
    section: The section.
    context: The parts of the experiment on which a model depends.

  Raises:
    ValueError: A value does not fit, or is for models with tensor ranks.
  """
  context.check_unshared("graph", "graphs", GraphData)
  one_of("layer", section.layer, tuple(LAYERS))
  return GraphModel(
    **vars(section),
    num_features=context.data.num_features,
    num_classes=context.data.num_classes,
    fanouts=tuple(context.data.fanouts),
    tensor=context.tensor,
  )


# A builder receives the section and a `caatnet.config.context.Context`.
MODELS = {
  "transformer": transformer, "convolutional": convolutional, "graph": graph,
}
