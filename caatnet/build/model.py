"""``config.model``: the architectures, by the names that configs use."""

from caatnet.build import convolutional, transformer

# A builder's positional argument is a `caatnet.build.context.Context`.
MODELS = {
  "transformer": transformer.build,
  "convolutional": convolutional.build,
}
