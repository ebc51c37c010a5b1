"""Builders of ``config.graph`` by selector."""

from caatnet.config.data import of_keys
from caatnet.data.graphs import builders, loaders

# Sources of a graph. They receive the section and the folder to write.
SOURCES = {
  name: of_keys(make)
  for name, make in {
    "rmat": builders.rmat, "communities": builders.communities,
    **loaders.LOADERS,
  }.items()
}
