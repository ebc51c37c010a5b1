"""SqueezeNet 1.0: sizes of the published network."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from caatnet.models import squeezenet
from parallel.axes import Axis

TENSOR = Axis("tensor", 1)


@pytest.mark.parametrize(
  ("num_classes", "num_params"), [(10, 740_554), (1000, 1_248_424)]
)
def test_parameters_are_those_of_the_published_network(
  num_classes, num_params
):
  model = squeezenet.SqueezeNet((32, 32, 3), num_classes, "float32", TENSOR)
  assert model.num_params == num_params


def test_multiplications_are_those_of_the_published_network():
  """torchvision states 0.82 billion for an image of 224 x 224."""
  model = squeezenet.SqueezeNet((224, 224, 3), 1000, "float32", TENSOR)
  image = jax.ShapeDtypeStruct((224, 224, 3), jnp.float32)
  # The first convolution needs no gradient of its input: 4, not 6 FLOPs.
  first = 109 * 109 * 7 * 7 * 3 * 96
  total = (model.flops({"image": image}) + 2 * first) / 6
  assert total == pytest.approx(0.82e9, rel=0.005)


@pytest.mark.parametrize(
  ("size", "expected"), [(13, 6), (6, 3), (3, 1), (4, 2)]
)
def test_pooling_rounds_sizes_up(size, expected):
  x = jnp.arange(float(size)).reshape(1, size, 1, 1) - 100
  found = squeezenet._pool(jnp.repeat(x, 3, axis=2))[0, :, 0, 0]
  assert len(found) == expected
  ends = [min(2 * i + 2, size - 1) for i in range(expected)]
  np.testing.assert_array_equal(found, np.array(ends) - 100.0)


def test_small_image_is_refused():
  with pytest.raises(ValueError, match="at least 21 x 21"):
    squeezenet.SqueezeNet((8, 8, 1), 10, "float32", TENSOR)
