"""SqueezeNet 1.0: sizes of the published network."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from caatnet.models import squeezenet
from parallel.axes import Axis, make_mesh

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


def convolve(x, layer, stride=1):
  kernel, bias = layer["kernel"], layer["bias"]
  size = kernel.shape[0]
  padding = (size == 3) * 1
  x = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
  windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), (1, 2))
  return np.einsum(
    "nhwcij,ijco->nhwo", windows[:, ::stride, ::stride], kernel
  ) + bias


def test_network_equals_its_oracle(monkeypatch):
  """Has two fires, and max pooling after the first convolution and fire_3."""
  for name, value in (
    ("_FIRST", 4), ("_FIRES", ((2, 3, 4), (3, 2, 5))), ("_POOLED", (1, 3)),
  ):
    monkeypatch.setattr(squeezenet, name, value)
  model = squeezenet.SqueezeNet((21, 27, 2), 5, "float32", TENSOR)
  draw = np.random.default_rng(1)
  params = jax.tree.map(
    lambda x: draw.normal(size=x.shape) / 3,
    jax.eval_shape(model.init, jax.random.key(0)),
  )
  batch = {"image": draw.random((3, 21, 27, 2)), "label": np.array([4, 0, 2])}
  found = jax.jit(jax.shard_map(
    model.scores, mesh=make_mesh({"tensor": TENSOR}), in_specs=P(),
    out_specs=P(),
  ))(jax.tree.map(jnp.float32, params), {
    "image": jnp.float32(batch["image"]), "label": jnp.asarray(batch["label"])
  })
  x = batch["image"]
  for name in ("first", "fire_2", "fire_3", "last"):
    layer = params[name]
    if name.startswith("fire"):
      x = np.maximum(convolve(x, layer["squeeze"]), 0)
      x = np.concatenate([convolve(x, layer[k]) for k in ("narrow", "wide")], 3)
    else:
      x = convolve(x, layer, 2 if name == "first" else 1)
    x = np.maximum(x, 0)
    if name in ("first", "fire_3"):
      x = np.stack([np.stack([
        x[:, i : i + 3, j : j + 3].max(axis=(1, 2))
        for j in range(0, x.shape[2] - 1, 2)], 1)
        for i in range(0, x.shape[1] - 1, 2)], 1)
  logits = x.mean(axis=(1, 2))
  logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
  np.testing.assert_allclose(
    found["loss"], -logits[np.arange(3), batch["label"]], rtol=1e-4
  )
  np.testing.assert_array_equal(
    found["accuracy"], logits.argmax(axis=1) == batch["label"]
  )
