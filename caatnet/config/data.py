"""Builders of the data by ``config.data.name``."""

from collections.abc import Callable
from typing import Any

from caatnet.data.images import ImageData
from caatnet.data.text import TextData


def pass_keys_as_kwargs(make: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a builder that passes a section's keys as keyword arguments."""
  return lambda section, *args: make(*args, **vars(section))


def _graphs(*args: Any, **keys: Any) -> Any:
  """Builds `GraphData`; imports it here, so that other runs do not load it."""
  from caatnet.data.graphs.data import GraphData

  return GraphData(*args, **keys)


# Each class inherits its fields from its section in `caatnet.schema.data`.
DATA = {
  "text": pass_keys_as_kwargs(TextData),
  "images": pass_keys_as_kwargs(ImageData),
  "graphs": pass_keys_as_kwargs(_graphs),
}
