"""Residual convolutional network for small images.

It has pre-activation blocks (He et al., arXiv 1603.05027) with GroupNorm (Wu
and He, arXiv 1803.08494) instead of batch norm. GroupNorm computes statistics
of one example, so the network has no state besides its parameters, and outer
loops may average them. A stage is a stack of equal blocks, which are scanned.
Each stage after the first begins with a 2 x 2 convolution of stride 2, which
halves height and width.

The network is not cut over tensor ranks: the tensor axis must have one rank.

Shape legend: L = blocks of a stage, B = batch, H, W = height and width, C =
channels.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from caatnet.models import classes
from caatnet.models.access import DEFAULT_ACCESS, Access
from caatnet.models.modules import SequentialModel
from caatnet.models.protocol import PipelineParts
from parallel.axes import Axis

_STAGE_PREFIX = "stage_"
_HE_NORMAL = nnx.initializers.he_normal()


class Block(nnx.Module):
  """Residual block: ``x + conv(relu(norm(conv(relu(norm(x))))))``."""

  def __init__(
    self, width: int, groups: int, dtype: str, rngs: nnx.Rngs
  ) -> None:
    norm = functools.partial(
      nnx.GroupNorm, width, num_groups=groups, dtype=dtype, rngs=rngs
    )
    conv = functools.partial(
      _conv, width, width, (3, 3), dtype=dtype, rngs=rngs
    )
    self.norm_1, self.norm_2 = norm(), norm()
    self.conv_1 = conv()
    # With zeros the block is the identity at initialisation, so that a deep
    # network initially trains like a shallow one.
    self.conv_2 = conv(kernel_init=nnx.initializers.zeros)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the block's output ``[B, H, W, C]``, which has the shape of x."""
    y = self.conv_1(jax.nn.relu(self.norm_1(x)))
    return x + self.conv_2(jax.nn.relu(self.norm_2(y)))


class Head(nnx.Module):
  """GroupNorm, ReLU, the mean over height and width, and a linear layer."""

  def __init__(
    self, width: int, num_classes: int, groups: int, dtype: str, rngs: nnx.Rngs
  ) -> None:
    self.norm = nnx.GroupNorm(width, num_groups=groups, dtype=dtype, rngs=rngs)
    self.linear = nnx.Linear(width, num_classes, dtype=dtype, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns logits, float32 ``[B, classes]``, for x ``[B, H, W, C]``."""
    y = jax.nn.relu(self.norm(x)).mean(axis=(1, 2))
    return self.linear(y).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class ConvolutionalModel(SequentialModel):
  """Convolutional network as a `caatnet.models.protocol.Model`.

  An example is ``{"image": float [H, W, C], "label": int}``.

  Attributes:
    shape: The height, width and channels of an image.
    num_classes: The number of classes; labels are 0 to num_classes - 1.
    widths: The channels of each stage.
    blocks: L, the number of blocks of each stage.
    groups: The number of channel groups of GroupNorm; divides all widths.
    dtype: The dtype of activations; parameters are float32.
    tensor: The tensor axis, which has one rank.

  Raises:
    ValueError: If there is no block, ``groups`` does not divide a width, or
      height or width of the image cannot be halved at each stage.
  """

  shape: tuple[int, int, int]
  num_classes: int
  widths: tuple[int, ...]
  blocks: int
  groups: int
  dtype: str
  tensor: Axis

  def __post_init__(self) -> None:
    if self.blocks < 1 or not self.widths:
      raise ValueError(
        f"blocks={self.blocks} must be at least 1, and widths={self.widths} "
        "must not be empty"
      )
    for width in self.widths:
      if self.groups < 1 or width % self.groups:
        raise ValueError(
          f"groups={self.groups} must divide all of widths={self.widths}"
        )
    halvings = 2 ** (len(self.widths) - 1)
    if any(side % halvings for side in self.shape[:2]):
      raise ValueError(
        f"widths={self.widths} has {len(self.widths)} stages, which halve "
        f"height and width {len(self.widths) - 1} times, so both of "
        f"{self.shape[:2]} must be multiples of 2^{len(self.widths) - 1}"
      )

  @property
  def stacks(self) -> Mapping[str, int]:
    return {f"{_STAGE_PREFIX}{i}": self.blocks for i in range(len(self.widths))}

  def _makers(self) -> dict[str, Any]:
    widths, dtype = self.widths, self.dtype
    makers: dict[str, Any] = {}
    for stage, width in enumerate(widths):
      before = widths[stage - 1] if stage else self.shape[2]
      size, stride = ((2, 2), 2) if stage else ((3, 3), 1)
      makers[f"enter_{stage}"] = functools.partial(
        _conv, before, width, size, stride, dtype
      )
      block = functools.partial(Block, width, self.groups, dtype)
      # Parameters of a stage are stacked over its blocks: [L, ...].
      makers[f"{_STAGE_PREFIX}{stage}"] = lambda rngs, block=block: nnx.vmap(
        lambda rngs: block(rngs=rngs), in_axes=0
      )(rngs.split(self.blocks))
    makers["head"] = functools.partial(
      Head, widths[-1], self.num_classes, self.groups, dtype
    )
    return {
      name: make
      if name in self.stacks
      else (lambda rngs, make=make: make(rngs=rngs))
      for name, make in makers.items()
    }

  def scores(
    self, params: Any, batch: Any, access: Access = DEFAULT_ACCESS
  ) -> dict[str, jax.Array]:
    """Returns "loss" in nats and "accuracy", 0 or 1, float32 ``[B]`` each."""
    x = access.apply(
      lambda _, image: image.astype(self.dtype), None, batch["image"]
    )
    for stage in range(len(self.widths)):
      enter, stack = f"enter_{stage}", f"{_STAGE_PREFIX}{stage}"
      x = access.apply(self._part_function(enter), params[enter], x)
      x = access.scan(self._part_function(stack), params[stack], x, 1, None)
    logits = access.apply(self._part_function("head"), params["head"], x)
    return access.apply(self._compute_scores, None, logits, batch["label"])

  def parts(self) -> PipelineParts:
    if len(self.widths) > 1:
      raise ValueError(
        f"widths={self.widths} must have one entry, since pipeline stages "
        "exchange activations of one shape"
      )
    stack = f"{_STAGE_PREFIX}0"
    return PipelineParts(
      stack,
      lambda params, batch, access: access.apply(
        self._part_function("enter_0"), params["enter_0"],
        access.apply(
          lambda _, image: image.astype(self.dtype), None, batch["image"]
        ),
      ),
      lambda params, x, access: access.scan(
        self._part_function(stack), params, x, 1, None
      ),
      lambda params, x, batch, access: access.apply(
        self._compute_scores, None,
        access.apply(self._part_function("head"), params["head"], x),
        batch["label"],
      ),
    )

  def _part_function(self, part: str) -> Any:
    """Returns a module, given its name, as a function of (params, input)."""
    graph = self._graphdefs[part]
    return lambda params, x: nnx.merge(graph, params)(x)

  def _compute_scores(
    self, _: None, logits: jax.Array, labels: jax.Array
  ) -> dict[str, jax.Array]:
    """Computes scores of logits ``[B, classes]`` given labels ``[B]``."""
    return classes.scores(logits, labels, self.tensor)

  def flops(self, example: Any) -> float:
    """Returns the FLOPs of training on one example.

    A weight has 2 FLOPs per position in the forward and 4 in the backward.
    """
    height, width, channels = example["image"].shape
    forward, places = 0.0, height * width
    for stage, channels_out in enumerate(self.widths):
      taps = 4 if stage else 9  # of the convolution that begins the stage
      places //= 4 if stage else 1
      # Two FLOPs per weight and position; a block has two 3 x 3 convolutions.
      forward += 2 * places * taps * channels * channels_out
      forward += self.blocks * 2 * 2 * places * 9 * channels_out**2
      channels = channels_out
    # The backward has twice as many FLOPs as the forward.
    return 3 * (forward + 2 * channels * self.num_classes)


def _conv(
  inputs: int,
  outputs: int,
  size: tuple[int, int],
  stride: int = 1,
  dtype: str = "float32",
  *,
  rngs: nnx.Rngs,
  kernel_init: Any = _HE_NORMAL,
) -> nnx.Conv:
  """Returns a convolution without bias."""
  return nnx.Conv(
    inputs, outputs, size, strides=stride, padding="SAME", use_bias=False,
    dtype=dtype, kernel_init=kernel_init, rngs=rngs,
  )
