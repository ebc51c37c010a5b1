"""What ``config.graph`` may name as the source of a graph."""

from caatnet.data.graphs import builders, loaders

# Keyword arguments are the section's keys.
SOURCES = {
  "rmat": builders.rmat, "communities": builders.communities
} | dict(loaders.LOADERS)
