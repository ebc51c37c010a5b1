"""SqueezeNet 1.0, a convolutional network with few parameters.

A *fire* module squeezes its input to few channels with 1 x 1 convolutions, and
expands these by 1 x 1 and 3 x 3 convolutions, whose outputs are concatenated.
Eight fire modules lie between two convolutions. The last convolution has a
channel for each class; its mean over positions gives the logits.

Sizes are those of the published network (and of torchvision): with three input
channels and 10 classes it has 740,554 parameters. Poolings of 3 x 3 with stride
2 round sizes up; there are three, so images must be at least 21 x 21. The
published network applies dropout of 50% before the last convolution; a `Model`
has no random state between steps, so this one has no dropout.

The network is not cut over tensor ranks: the tensor axis must have one rank.

Source: Iandola et al., "SqueezeNet: AlexNet-level accuracy with 50x fewer
parameters", arXiv 1602.07360.

Shape legend: B = batch, H, W = height and width, C = channels.
"""

import dataclasses
import functools
import math
from typing import Any

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp

from caatnet.models import classes
from caatnet.models.access import DEFAULT_ACCESS, Access
from caatnet.models.modules import SequentialModel
from caatnet.models.protocol import PipelineParts
from parallel.axes import Axis

_FIRST = 96  # channels of the first convolution, 7 x 7 with stride 2
# (squeezed, expanded by 1 x 1, expanded by 3 x 3) channels of each fire module.
_FIRES = (
  (16, 64, 64), (16, 64, 64), (32, 128, 128), (32, 128, 128),
  (48, 192, 192), (48, 192, 192), (64, 256, 256), (64, 256, 256),
)
# Parts that a pooling follows; 1 is the first convolution, 2 to 9 are the fire
# modules.
_POOLED = (1, 4, 8)
_MIN_SIDE = 21


class Fire(nnx.Module):
  """Fire module: squeeze, expand, concatenate; each followed by a ReLU."""

  def __init__(
    self, channels: int, sizes: tuple[int, int, int], dtype: str,
    rngs: nnx.Rngs,
  ) -> None:
    squeezed, narrow, wide = sizes
    conv = functools.partial(_conv, dtype=dtype, rngs=rngs)
    self.squeeze = conv(channels, squeezed, 1)
    self.narrow = conv(squeezed, narrow, 1)
    self.wide = conv(squeezed, wide, 3, padding="SAME")

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns ``[B, H, W, narrow + wide]``."""
    y = jax.nn.relu(self.squeeze(x))
    return jax.nn.relu(jnp.concatenate([self.narrow(y), self.wide(y)], -1))


@dataclasses.dataclass(frozen=True)
class SqueezeNet(SequentialModel):
  """SqueezeNet 1.0 as a `caatnet.models.protocol.Model`.

  An example is ``{"image": float [H, W, C], "label": int}``.

  Attributes:
    shape: The height, width and channels of an image.
    num_classes: The number of classes; labels are 0 to num_classes - 1.
    dtype: The dtype of activations; parameters are float32.
    tensor: The tensor axis, which has one rank.

  Raises:
    ValueError: If the image is too small for the poolings.
  """

  shape: tuple[int, int, int]
  num_classes: int
  dtype: str
  tensor: Axis

  def __post_init__(self) -> None:
    if min(self.shape[:2]) < _MIN_SIDE:
      raise ValueError(
        f"shape={self.shape}: SqueezeNet needs images of at least "
        f"{_MIN_SIDE} x {_MIN_SIDE}; config.data.enlarge repeats pixels"
      )

  def _makers(self) -> dict[str, Any]:
    channels, makers = _FIRST, {}
    makers["first"] = lambda rngs: _conv(
      self.shape[2], _FIRST, 7, 2, dtype=self.dtype, rngs=rngs
    )
    for number, sizes in enumerate(_FIRES, 2):
      makers[f"fire_{number}"] = functools.partial(
        Fire, channels, sizes, self.dtype
      )
      channels = sizes[1] + sizes[2]
    makers["last"] = lambda rngs: _conv(
      channels, self.num_classes, 1, dtype=self.dtype, rngs=rngs
    )
    return makers

  def scores(
    self, params: Any, batch: Any, access: Access = DEFAULT_ACCESS
  ) -> dict[str, jax.Array]:
    """Returns "loss" in nats and "accuracy", 0 or 1, float32 ``[B]`` each."""
    x = access.apply(
      lambda _, image: image.astype(self.dtype), None, batch["image"]
    )
    for number, name in enumerate(self._graphdefs, 1):
      x = access.apply(
        functools.partial(self._run, name, number in _POOLED), params[name], x
      )
    return access.apply(self._compute_scores, None, x, batch["label"])

  def _run(
    self, name: str, pooled: bool, params: Any, x: jax.Array
  ) -> jax.Array:
    """Returns a module's output after a ReLU and, if ``pooled``, a pooling."""
    y = jax.nn.relu(nnx.merge(self._graphdefs[name], params)(x))
    return _pool(y) if pooled else y

  def _compute_scores(
    self, _: None, x: jax.Array, labels: jax.Array
  ) -> dict[str, jax.Array]:
    """Computes scores from the last feature maps ``[B, H, W, classes]``."""
    logits = x.mean(axis=(1, 2)).astype(jnp.float32)
    return classes.scores(logits, labels, self.tensor)

  def parts(self) -> PipelineParts:
    raise ValueError(
      "model.name='squeezenet' does not support pipeline stages, since it has "
      "no stack of equal layers"
    )

  def flops(self, example: Any) -> float:
    """Returns the FLOPs of training on one example.

    A weight has 2 FLOPs per position in the forward and 4 in the backward. In
    the first convolution it has 2 in the backward: images need no gradient.
    """
    height, width, channels = example["image"].shape
    sides = [(height - 7) // 2 + 1, (width - 7) // 2 + 1]
    first = math.prod(sides) * 49 * channels * _FIRST
    total, channels = 4.0 * first, _FIRST
    for number, (squeezed, narrow, wide) in enumerate(_FIRES, 2):
      if number - 1 in _POOLED:
        sides = [math.ceil((side - 3) / 2) + 1 for side in sides]
      weights = squeezed * (channels + narrow + 9 * wide)
      total += 6 * math.prod(sides) * weights
      channels = narrow + wide
    last = math.prod(sides) * channels * self.num_classes
    return total + 6 * last


def _conv(
  inputs: int, outputs: int, side: int, stride: int = 1, *,
  padding: str = "VALID", dtype: str, rngs: nnx.Rngs,
) -> nnx.Conv:
  """Returns a convolution of ``side`` x ``side`` positions, with a bias."""
  return nnx.Conv(
    inputs, outputs, (side, side), strides=stride, padding=padding,
    dtype=dtype, kernel_init=nnx.initializers.he_uniform(), rngs=rngs,
  )


def _pool(x: jax.Array) -> jax.Array:
  """Returns the maxima of 3 x 3 windows with stride 2.

  A last window that exceeds the input is cut, so that sizes are rounded up.
  """
  pads = [(0, -(-(side - 3) // 2) * 2 + 3 - side) for side in x.shape[1:3]]
  return lax.reduce_window(
    x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1),
    ((0, 0), *pads, (0, 0)),
  )
