"""Builders of ``config.data`` by selector."""

from collections.abc import Callable
from typing import Any

from caatnet.data.images import ImageData
from caatnet.data.text import TextData


def of_keys(make: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a builder that passes a section's keys as keyword arguments."""
  return lambda section, *args: make(*args, **vars(section))


def _graphs(*args: Any, **keys: Any) -> Any:
  """Builds `GraphData`; imported here so that other runs do not load it."""
  from caatnet.data.graphs.data import GraphData

  return GraphData(*args, **keys)


# Each class inherits its fields from its section in `caatnet.schema.data`.
DATA = {
  "text": of_keys(TextData), "images": of_keys(ImageData),
  "graphs": of_keys(_graphs),
}
