"""Labelled images: the digits of scikit-learn, or an .npz file.

As for text, a hash of each image's content determines the split into training
and validation. So the split is independent of the seed and of the order, and
copies of an image are in the same split.
"""

from collections.abc import Mapping
import dataclasses
import hashlib
import math
import pathlib
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from caatnet.data import pipeline
from caatnet.data.baselines import label_frequency_measures
from caatnet.data.protocol import Dataset
from caatnet.data.sources import hash_to_unit_interval
from caatnet.schema.data import Images
from parallel.base.arrays import read_npz

Examples = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageData(Images):
  """Data of an image classifier: ``config.data`` with the name "images"."""

  unit: ClassVar[str] = "images"
  units_per_example: ClassVar[int] = 1
  labels: ClassVar[Mapping[str, str]] = {
    "loss": "cross-entropy, nats", "accuracy": "accuracy",
  }

  @property
  def example(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Image, float32 ``[H, W, C]`` in [0, 1], and int32 label."""
    return {
      "image": jax.ShapeDtypeStruct(tuple(self.shape), jnp.float32),
      "label": jax.ShapeDtypeStruct((), jnp.int32),
    }

  def load(self, seed: int) -> Dataset:
    name, images, labels = self._read("path", self.path)
    digest = hashlib.sha256(images.tobytes())
    digest.update(np.ascontiguousarray(labels, np.int64).tobytes())
    if self.validation_path:
      _, *own = self._read("validation_path", self.validation_path)
      for array in own:
        digest.update(np.ascontiguousarray(array).tobytes())
      # Images of the validation file are removed from the training images.
      known = {image.tobytes() for image in own[0]}
      held_out = np.array([image.tobytes() in known for image in images])
    else:
      own = None
      # An image is held out if the hash of its content is below the share.
      share = self.validation_percent / 100
      held_out = np.array(
        [hash_to_unit_interval(image.tobytes()) < share for image in images]
      )
    if held_out.all() or not (held_out.any() or own):
      key = "validation_path" if own else "validation_percent"
      raise ValueError(
        f"config.data.{key}={getattr(self, key)} leaves no "
        f"{'training' if held_out.all() else 'validation'} images of {name}"
      )
    train, validation = (
      {"image": images, "label": labels.astype(np.int32)}
      for images, labels in (
        (images[~held_out], labels[~held_out]),
        own or (images[held_out], labels[held_out]),
      )
    )
    if len(train["label"]) < self.batch_size:
      raise ValueError(
        f"config.data.path: {name} has {len(train['label'])} training images, "
        f"fewer than config.data.batch_size={self.batch_size}"
      )
    return Dataset(
      name=name,
      sha256=digest.hexdigest(),
      batches=pipeline.shuffled_batches(
        _ExampleSource(train), self.batch_size, seed
      ),
      validation=validation,
      measures=lambda means: {
        "loss": means["loss"], "accuracy": means["accuracy"]
      },
      baselines=lambda: _baselines(train, validation, self.num_classes),
      examples=pipeline.shuffled_examples(_ExampleSource(train), seed),
      train=train,
    )

  def _read(self, key: str, path: str) -> tuple[str, np.ndarray, np.ndarray]:
    """Returns name, images (float32) and labels of a key's file, checked."""
    name, images, labels = _read(key, path)
    if self.enlarge:
      images = enlarged(images, self.shape)
    self._check(f"config.data.{key}={path!r}", images, labels)
    return name, np.ascontiguousarray(images, np.float32), labels

  def _check(self, file: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Raises ValueError if a file's arrays do not match the config."""
    if tuple(images.shape[1:]) != tuple(self.shape):
      raise ValueError(
        f"config.data.shape={tuple(self.shape)}, but the images have "
        f"{tuple(images.shape[1:])} (height, width, channels)"
      )
    if not np.isfinite(images).all():
      raise ValueError(f"{file} has a pixel that is not finite")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= self.num_classes:
      raise ValueError(
        f"config.data.num_classes={self.num_classes}, but the labels are "
        f"{low} to {high}"
      )


def enlarged(
  images: np.ndarray, shape: tuple[int, int, int]
) -> np.ndarray:
  """Enlarges images by repeating pixels and copying a single channel.

  Args:
    images: ``[N, h, w, c]``.
    shape: Height and width, multiples of h and w, and the number of channels, c
      or any number if c is 1.

  Returns:
    ``[N, *shape]``; dims that do not divide `shape` are unchanged.

  Example:
    >>> enlarged(np.arange(2.0).reshape(1, 1, 2, 1), (2, 4, 1))[0, ..., 0]
    array([[0., 0., 1., 1.],
           [0., 0., 1., 1.]])
  """
  for axis, size in enumerate(shape, 1):
    old = images.shape[axis]
    if size % old == 0 and (axis < 3 or old == 1):
      images = np.repeat(images, size // old, axis)
  return images


class _ExampleSource:
  """Random-access source of single examples, for grain."""

  def __init__(self, examples: Examples) -> None:
    self._examples = examples

  def __len__(self) -> int:
    return len(self._examples["label"])

  def __getitem__(self, index: int) -> Examples:
    return {key: value[index] for key, value in self._examples.items()}


def _read(key: str, path: str) -> tuple[str, np.ndarray, np.ndarray]:
  """Reads images.

  Returns:
    Name, images ``[N, H, W, C]`` with values in [0, 1], and labels ``[N]``.

  Raises:
    ValueError: If the file is missing, damaged or of another format.
  """
  if not path:
    try:
      from sklearn import datasets
    except ImportError as error:
      raise ValueError(
        "config.data.path='' needs scikit-learn, whose digits it reads: pip "
        'install "caatnet[images]", or name an .npz file'
      ) from error
    digits = datasets.load_digits()
    # A pixel is the number of set bits of a 4 x 4 block, 0 to 16.
    return "scikit-learn-digits", digits.images[..., None] / 16, digits.target
  file = pathlib.Path(path).expanduser()
  try:
    arrays = read_npz(file)
    images, labels = arrays["images"], arrays["labels"]
  except (KeyError, ValueError) as error:
    raise ValueError(
      f"config.data.{key}={path!r} must be an .npz file with the arrays "
      f'"images" and "labels": {error}'
    ) from error
  if images.ndim == 3:
    images = images[..., None]  # one channel
  if images.ndim != 4 or labels.shape != images.shape[:1] or not labels.size:
    raise ValueError(
      f"config.data.{key}={path!r}: images {images.shape} and labels "
      f"{labels.shape} must be [N, H, W(, C)] and [N]"
    )
  if not np.issubdtype(labels.dtype, np.integer):
    raise ValueError(
      f"config.data.{key}={path!r}: labels are {labels.dtype}, not integers"
    )
  # uint8 images have values from 0 to 255, float images from 0 to 1.
  scale = 255 if images.dtype == np.uint8 else 1
  return file.name, images / scale, labels


def _baselines(
  train: Examples, validation: Examples, num_classes: int
) -> dict[str, dict[str, float]]:
  """Returns loss and accuracy of simple classifiers, by classifier name."""
  flat = {k: v["image"].reshape(len(v["image"]), -1)
          for k, v in (("train", train), ("validation", validation))}
  # A class without training images has infinite distance to every image.
  means = np.stack([
    flat["train"][train["label"] == c].mean(axis=0)
    if (train["label"] == c).any() else np.full(flat["train"].shape[1], np.inf)
    for c in range(num_classes)
  ])
  distances = np.stack([  # squared, [classes, N]
    np.square(flat["validation"] - mean).sum(axis=1) for mean in means
  ])
  truth = validation["label"]
  return {
    "label frequencies": label_frequency_measures(
      train["label"], truth, num_classes
    ),
    "nearest class mean": {
      "loss": math.nan,  # the rule has no probabilities
      "accuracy": float((distances.argmin(axis=0) == truth).mean()),
    },
  }
