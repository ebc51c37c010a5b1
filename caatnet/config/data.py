"""Builders of ``config.data`` and ``config.graph`` by selector."""

from collections.abc import Callable
from typing import Any

from caatnet.data.graphs import builders, loaders
from caatnet.data.graphs.data import GraphData
from caatnet.data.images import ImageData
from caatnet.data.text import TextData


def _of_keys(make: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a builder that passes the keys of its section as arguments."""
  return lambda section, *args: make(*args, **vars(section))


# The classes inherit the keys of their sections.
DATA = {
  "text": _of_keys(TextData), "images": _of_keys(ImageData),
  "graphs": _of_keys(GraphData),
}

# Sources of a graph. They receive the section and the folder to write.
SOURCES = {
  name: _of_keys(make)
  for name, make in {
    "rmat": builders.rmat, "communities": builders.communities,
    **loaders.LOADERS,
  }.items()
}
