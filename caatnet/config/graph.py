"""Builds ``config.model`` with the name "graph"."""

from caatnet.checks import DTYPES, one_of
from caatnet.config.context import Context
from caatnet.data.graphs.data import GraphData
from caatnet.models.graph import LAYERS, GraphModel


def build(
  context: Context, *, layer: str, width: int, dtype: str
) -> GraphModel:
  """Checks the section and builds the model.

  Keyword arguments are the section's keys, which
  ``configs/graph_sections.py`` explains.

  Args:
    context: The parts of the experiment on which a model depends.

  Raises:
    ValueError: A value does not fit, or is for models with tensor ranks.
  """
  context.check_unshared("graph", "graphs", GraphData)
  one_of("layer", layer, tuple(LAYERS))
  one_of("dtype", dtype, DTYPES)
  return GraphModel(
    layer=layer,
    num_features=context.data.num_features,
    num_classes=context.data.num_classes,
    fanouts=tuple(context.data.fanouts),
    width=width,
    dtype=dtype,
    tensor=context.tensor,
  )
