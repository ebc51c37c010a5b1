"""Builders of graphs by ``config.graph.source``."""

from caatnet.config.data import pass_keys_as_kwargs
from caatnet.data.graphs import builders, loaders

# Builders of a graph. They receive the section and the folder to write to.
SOURCES = {
  name: pass_keys_as_kwargs(make)
  for name, make in {
    "rmat": builders.rmat, "communities": builders.communities,
    **loaders.LOADERS,
  }.items()
}
