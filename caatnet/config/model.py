"""Builders of models by ``config.model.name``."""

from typing import Any

from caatnet.config import sections
from caatnet.config.context import ModelContext
from caatnet.config.sync import Sync, build_sync, kernels_of_norms
from caatnet.data.images import ImageData
from caatnet.models.convolutional import ConvolutionalModel
from caatnet.models.protocol import Model
from caatnet.models.recurrent import RecurrentConfig, RecurrentModel
from caatnet.models.squeezenet import SqueezeNet
from caatnet.models.transformer import attention as attentions
from caatnet.models.transformer.config import TransformerConfig
from caatnet.models.transformer.model import TransformerModel
from caatnet.models.transformer.positions import parse_scaling
from caatnet.schema import model as schema
from parallel.base.checks import known


def transformer(
  section: schema.Transformer, context: ModelContext
) -> TransformerModel:
  """Builds a transformer from ``config.model`` and ``config.sync``.

  Args:
    section: The section.
    context: Parts of the experiment on which a model depends, including
      ``config.sync``.

  Raises:
    ValueError: If a value is not allowed; the message has the allowed values.
  """
  known("attention=", section.attention, attentions.IMPLEMENTATIONS)
  sync, fields = _build_stack_args("transformer", section, context)
  check_positions("data.seq_len", context.data.seq_len, section.max_positions)
  fields |= {
    "rope_scaling": parse_scaling(section.rope_scaling),
    "attention": attentions.resolve(
      section.attention, context.platform, section.dtype, context.data.seq_len,
      section.head_width or section.width // section.num_heads,
    ),
    "carry": sync.carry,
  }
  return TransformerModel(
    TransformerConfig(**fields), context.tensor, context.stage
  )


def _build_stack_args(
  model: str, section: schema.StackedModel, context: ModelContext
) -> tuple[Sync, dict[str, Any]]:
  """Returns sync policies, and arguments for any subclass of `StackConfig`."""
  context.check_language_model(model)
  sync: Sync = sections.build_section(
    "sync", build_sync, context.sync, context, section.num_layers, section.remat
  )
  return sync, vars(section) | {
    "syncs": sync.policies, "kernels": kernels_of_norms(context, sync),
  }


def check_positions(key: str, length: int, most: int) -> None:
  """Raises ValueError if sequences are longer than a model supports.

  Args:
    key: The config key that sets `length`.
    length: Length of the longest sequence.
    most: ``config.model.max_positions``; 0 for no limit.
  """
  if 0 < most < length:
    raise ValueError(
      f"config.{key}={length} must be at most config.model.max_positions={most}"
      ", for which the model was published; 0 removes the limit"
    )


def recurrent(
  section: schema.Recurrent, context: ModelContext
) -> RecurrentModel:
  """Builds a recurrent model from ``config.model`` and ``config.sync``.

  Args:
    section: The section.
    context: Parts of the experiment on which a model depends, including
      ``config.sync``.

  Raises:
    ValueError: If a value is not allowed; the message has the allowed values.
  """
  _, fields = _build_stack_args("recurrent", section, context)
  return RecurrentModel(
    RecurrentConfig(**fields), context.tensor, context.stage
  )


def convolutional(
  section: schema.Convolutional, context: ModelContext
) -> ConvolutionalModel:
  """Builds a convolutional network.

  Args:
    section: The section.
    context: Parts of the experiment on which a model depends.

  Raises:
    ValueError: If a value is not allowed, or requires tensor parallelism.
  """
  context.check_single_rank("convolutional", "images", ImageData)
  return ConvolutionalModel(
    **vars(section),
    shape=tuple(context.data.shape),
    num_classes=context.data.num_classes,
    tensor=context.tensor,
  )


def squeezenet(section: schema.SqueezeNet, context: ModelContext) -> SqueezeNet:
  """Builds SqueezeNet.

  Args:
    section: The section.
    context: Parts of the experiment on which a model depends.

  Raises:
    ValueError: If images are too small, or tensor parallelism is required.
  """
  context.check_single_rank("squeezenet", "images", ImageData)
  return SqueezeNet(
    **vars(section),
    shape=tuple(context.data.shape),
    num_classes=context.data.num_classes,
    tensor=context.tensor,
  )


def graph(section: schema.Graph, context: ModelContext) -> Model:
  """Builds a graph network.

  Args:
    section: The section.
    context: Parts of the experiment on which a model depends.

  Raises:
    ValueError: If a value is not allowed, or requires tensor parallelism.
  """
  # Imported here, so that other runs do not load the packages of graphs.
  from caatnet.data.graphs.data import GraphData
  from caatnet.models.graph import LAYERS, GraphModel

  context.check_single_rank("graph", "graphs", GraphData)
  known("layer=", section.layer, tuple(LAYERS))
  return GraphModel(
    **vars(section),
    num_features=context.data.num_features,
    num_classes=context.data.num_classes,
    fanouts=tuple(context.data.fanouts),
    tensor=context.tensor,
  )


# A builder receives the section and a `caatnet.config.context.ModelContext`.
MODELS = {
  "transformer": transformer, "recurrent": recurrent,
  "convolutional": convolutional, "squeezenet": squeezenet, "graph": graph,
}
