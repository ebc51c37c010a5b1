"""Builders of ``config.model``, by the names that configs use."""

from caatnet.config import convolutional, graph, recurrent, transformer

# A builder takes a `caatnet.config.context.Context`, and the section's keys as
# keyword arguments.
MODELS = {
  "transformer": transformer.build,
  "convolutional": convolutional.build,
  "graph": graph.build,
  "recurrent": recurrent.build,
}
