"""Image data: readers, splits and baselines."""

import math
import os

import numpy as np
import pytest

from caatnet.data.images import ImageData, _baselines


def write(path, count=40, dtype="uint8", **changes):
  rng = np.random.default_rng(0)
  arrays = {
    "images": rng.integers(0, 256, (count, 2, 3)).astype(dtype),
    "labels": rng.integers(0, 4, count),
  }
  np.savez(path, **(arrays | changes))
  return arrays["images"], arrays["labels"]


def data(path, **changes):
  values = dict(path=str(path), shape=(2, 3, 1), num_classes=4, batch_size=4,
                validation_percent=30.0, validation_path="")
  return ImageData(**(values | changes))


@pytest.mark.parametrize(("dtype", "scale"), [("uint8", 255), ("float32", 1)])
def test_pixels_lie_between_0_and_1_and_keep_their_labels(
  dtype, scale, tmp_path
):
  """Scales uint8 images; float images are unchanged."""
  images, labels = write(tmp_path / "x.npz", dtype=dtype)
  found = data(tmp_path / "x.npz").load(0)
  batches = [next(found.batches) for _ in range(20)]
  label_of = {
    (x / scale).astype("f4").tobytes(): y
    for x, y in zip(images, labels, strict=True)
  }
  held_out = found.validation
  for part in (*batches, held_out):
    assert part["image"].dtype == np.float32
    assert part["image"].shape[1:] == (2, 3, 1)
    for x, y in zip(part["image"], part["label"], strict=True):
      assert label_of.get(x.tobytes()) == y
  training = {x.tobytes() for b in batches for x in b["image"]}
  validation = {x.tobytes() for x in held_out["image"]}
  assert training | validation == set(label_of)
  assert not training & validation


def test_copies_of_an_image_are_on_one_side_of_the_split(tmp_path):
  images = np.repeat(np.arange(20, dtype="uint8"), 6).reshape(20, 2, 3)
  images = np.concatenate([images, images])
  write(tmp_path / "x.npz", images=images, labels=np.arange(40) % 4)
  found = data(tmp_path / "x.npz").load(0)
  values, counts = np.unique(found.validation["image"], return_counts=True)
  assert (counts == 12).all()
  assert 0 < len(values) < 20


def test_custom_validation_images_are_not_trained_on(tmp_path):
  """Validates on all images of the file."""
  images, labels = write(tmp_path / "x.npz")
  own = np.concatenate([images[:5], 255 - images[:3]])
  write(tmp_path / "y.npz", images=own, labels=labels[:8])
  path = str(tmp_path / "y.npz")
  found = data(tmp_path / "x.npz", validation_path=path).load(0)
  np.testing.assert_array_equal(
    found.validation["image"], (own / 255).astype("f4")[..., None]
  )
  np.testing.assert_array_equal(found.validation["label"], labels[:8])
  seen = {x.tobytes() for _ in range(20) for x in next(found.batches)["image"]}
  expected = (images[5:] / 255).astype("f4")
  assert seen == {x.tobytes() for x in expected}
  assert found.sha256 != data(tmp_path / "x.npz").load(0).sha256
  os.mkfifo(tmp_path / "z.npz")
  with pytest.raises(ValueError, match=r"validation_path=.*not a regular file"):
    data(tmp_path / "x.npz", validation_path=str(tmp_path / "z.npz")).load(0)


@pytest.mark.parametrize(("part", "key"), [
  ("all", "validation_path=.*y.npz leaves no training images of x.npz"),
  ("none", "validation_percent=0.0 leaves no validation images of x.npz"),
  ("percent", "validation_percent=100.0 leaves no training images of x.npz"),
])
def test_empty_side_of_the_split_is_named(part, key, tmp_path):
  images, labels = write(tmp_path / "x.npz")
  write(tmp_path / "y.npz", images=images, labels=labels)
  changes = {
    "all": {"validation_path": str(tmp_path / "y.npz")},
    "none": {"validation_percent": 0.0},
    "percent": {"validation_percent": 100.0},
  }[part]
  found = data(tmp_path / "x.npz", **changes)
  with pytest.raises(ValueError, match=rf"config.data.{key}"):
    found.load(0)


def test_example_is_one_image_in_the_order_of_training(tmp_path):
  write(tmp_path / "x.npz")
  subject = data(tmp_path / "x.npz")
  assert (subject.unit, subject.units_per_example) == ("images", 1)
  found = subject.load(3)
  for number in range(3):
    batch = next(found.batches)
    for i in range(4):
      one = found.examples[4 * number + i]
      for key, expected in subject.example.items():
        assert one[key].shape == expected.shape
        assert one[key].dtype == expected.dtype
        np.testing.assert_array_equal(one[key], batch[key][i])
  assert found.measures({"loss": 1.0, "accuracy": 0.5, "other": 2.0}) == {
    "loss": 1.0, "accuracy": 0.5
  }


def test_digest_depends_on_all_images_and_labels(tmp_path):
  images, labels = write(tmp_path / "x.npz")
  digests = []
  for number, change in enumerate((
    {}, {"images": images[::-1]}, {"labels": labels[::-1]},
    {"own": {}}, {"own": {"images": 255 - images[::-1]}},
    {"own": {"labels": labels[::-1]}},
  )):
    own = change.pop("own", None)
    write(tmp_path / "x.npz", **change)
    path = ""
    if own is not None:
      path = str(tmp_path / f"{number}.npz")
      write(path, **{"images": 255 - images, "labels": labels} | own)
    found = data(tmp_path / "x.npz", validation_path=path).load(0)
    digests.append(found.sha256)
  assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_have_the_channels_of_the_file(channels, tmp_path):
  images = np.zeros((40, 2, 3, channels), "uint8")
  images[:, 0, 0, 0] = np.arange(40)
  write(tmp_path / "x.npz", images=images)
  found = data(
    tmp_path / "x.npz", shape=(2, 3, channels), validation_percent=50.0
  ).load(0)
  assert found.validation["image"].shape[1:] == (2, 3, channels)


def test_batch_may_have_all_training_images(tmp_path):
  write(tmp_path / "x.npz")
  held_out = len(data(tmp_path / "x.npz").load(0).validation["label"])
  found = data(tmp_path / "x.npz", batch_size=40 - held_out).load(0)
  assert len(next(found.batches)["label"]) == 40 - held_out
  with pytest.raises(ValueError) as error:
    data(tmp_path / "x.npz", batch_size=41 - held_out).load(0)
  assert str(error.value) == (
    f"config.data.path: x.npz has {40 - held_out} training images, fewer than "
    f"config.data.batch_size={41 - held_out}"
  )


def test_baselines_equal_the_values_by_hand():
  """Two classes of training images around (0, 0) and (1, 1); a third absent."""
  def examples(pixels, labels):
    return {"image": np.array(pixels, "f4").reshape(-1, 1, 2, 1),
            "label": np.array(labels)}

  train = examples([(0, 0.5), (0, -0.5), (1, 1)], [0, 0, 1])
  validation = examples([(0.9, 0.8), (0, 0.4), (0.1, 0), (1, 1)], [1, 0, 1, 2])
  found = _baselines(train, validation, 3)
  # Counts plus one: 3, 2 and 1 of 6.
  loss = -(2 * math.log(2 / 6) + math.log(3 / 6) + math.log(1 / 6)) / 4
  assert found["label frequencies"] == pytest.approx(
    {"loss": loss, "accuracy": 0.25}
  )
  assert found["nearest class mean"]["accuracy"] == 0.5


@pytest.mark.parametrize(
  ("changes", "options", "message"),
  [
    ({}, {"shape": (3, 2, 1)}, r"config.data.shape=\(3, 2, 1\)"),
    ({}, {"num_classes": 3}, "config.data.num_classes=3"),
    ({}, {"batch_size": 40}, "fewer than config.data.batch_size=40"),
    ({}, {"validation_percent": 1e-9}, "leaves no validation images"),
    ({"labels": np.ones(40)}, {}, "labels are float64, not integers"),
    ({"labels": np.ones(3, int)}, {}, "must be .N, H, W"),
    ({"labels": np.zeros(0, int), "images": np.zeros((0, 2, 3))}, {},
     "must be .N, H, W"),
    ({"images": np.ones((40, 6))}, {}, r"images \(40, 6\) and labels \(40,\)"),
    ({"labels": np.full(40, -1)}, {}, "=4, but the labels are -1 to -1"),
    ({"labels": np.arange(40) % 5}, {}, "=4, but the labels are 0 to 4"),
    ({"images": np.full((40, 2, 3), np.nan)}, {},
     r"config.data.path=.*x.npz' has a pixel that is not finite"),
  ],
)
def test_invalid_images_or_options_are_named(
  changes, options, message, tmp_path
):
  write(tmp_path / "x.npz", **changes)
  with pytest.raises(ValueError, match=message):
    data(tmp_path / "x.npz", **options).load(0)


@pytest.mark.parametrize("content", [None, b"no archive"])
def test_file_that_cannot_be_read_is_named(content, tmp_path):
  write(tmp_path / "x.npz")
  path = tmp_path / "y.npz"
  if content:
    path.write_bytes(content)
  with pytest.raises(ValueError, match=r"^config.data.path=.*must be an .npz"):
    data(path).load(0)
  with pytest.raises(ValueError, match=r"^config.data.validation_path=.*y.npz"):
    data(tmp_path / "x.npz", validation_path=str(path)).load(0)


def test_pixel_that_is_not_finite_names_its_file(tmp_path):
  write(tmp_path / "x.npz")
  write(tmp_path / "y.npz", images=np.full((40, 2, 3), np.inf))
  path = str(tmp_path / "y.npz")
  with pytest.raises(ValueError, match=r"data.validation_path=.*y.npz' has a"):
    data(tmp_path / "x.npz", validation_path=path).load(0)


def test_digits_are_the_default_without_a_file():
  pytest.importorskip("sklearn")
  found = data("", shape=(8, 8, 1), num_classes=10).load(0)
  image = next(found.batches)["image"]
  assert (image.min(), image.max()) == (0.0, 1.0)
  assert 200 < len(found.validation["label"]) < 800
