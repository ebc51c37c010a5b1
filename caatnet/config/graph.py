"""Builders of ``config.graph`` by selector."""

from caatnet.config.data import of_keys
from caatnet.data.graphs import builders, loaders

# Builders of a graph. They receive the section and the folder to write to.
SOURCES = {
  name: of_keys(make)
  for name, make in {
    "rmat": builders.rmat, "communities": builders.communities,
    **loaders.LOADERS,
  }.items()
}
