"""Split of stacks of layers and of other dims over pipeline stages."""

import itertools

import numpy as np
import pytest

from caatnet.stages import Stages
from parallel.axes import Axis
from parallel.plans.pipeline import builders


def make(stages, chunks=1, name="looped"):
  schedule = builders.build(name, stages, stages, chunks)
  return Stages(
    Axis("stage", stages), schedule, builders.build_evaluation(schedule)
  )


@pytest.mark.parametrize(("chunks", "name"), [
  (1, "looped"), (2, "looped"), (3, "looped"), (2, "zb_v"),
])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_layers_are_split_in_order_with_more_in_the_middle(
  stages, chunks, name
):
  made, parts = make(stages, chunks, name), stages * chunks
  for num_layers in range(parts, 3 * parts + 1):
    found = made.layers(num_layers)
    # [stages, chunks, layers] -> parts in the order of the layers.
    of_parts = found.reshape(stages, chunks, -1).swapaxes(0, 1)
    if name == "zb_v":  # the second chunks return from the last stage
      of_parts = np.stack([of_parts[0], of_parts[1, ::-1]])
    of_parts = of_parts.reshape(parts, -1)
    assert of_parts[of_parts >= 0].tolist() == list(range(num_layers))
    counts = (of_parts >= 0).sum(axis=1)
    least, more = divmod(num_layers, parts)
    assert of_parts.shape[1] == counts.max() == least + (more > 0)
    # Each part is padded at its end.
    assert (of_parts[np.arange(of_parts.shape[1]) >= counts[:, None]] < 0).all()
    # The parts with one more layer are those furthest from both ends.
    from_ends = [min(i, parts - 1 - i) for i in range(parts)]
    longer = [d for d, n in zip(from_ends, counts, strict=True) if n > least]
    shorter = [d for d, n in zip(from_ends, counts, strict=True) if n == least]
    assert len(longer) == more
    assert min(longer, default=parts) >= max(shorter)


def test_first_of_equally_far_parts_is_longer():
  assert make(4).layers(5).tolist() == [[0, -1], [1, 2], [3, -1], [4, -1]]
  assert not make(4).keeps
  assert make(2, 2).layers(6).tolist() == [[0, -1, 3, 4], [1, 2, 5, -1]]
  assert make(2, 2, "zb_v").layers(6).tolist() == (
    [[0, -1, 5, -1], [1, 2, 3, 4]]
  )


@pytest.mark.parametrize("name", ["looped", "zb_v"])
@pytest.mark.parametrize(
  ("dim", "lead", "size"),
  [(0, 0, 4), (2, 0, 1), *itertools.product(range(3), range(2), [5])],
)
def test_stages_hold_slices_that_join_to_the_array(dim, lead, size, name):
  """Layers are split as `layers` says, other dims into contiguous slices."""
  made, shape = make(2, 2, name), [3, 2, 4]
  shape[dim] = size
  shape = [7] * lead + shape
  x = np.arange(1, 1 + np.prod(shape)).reshape(shape)
  stored = made.store(x, dim, lead)
  places = np.pad(np.arange(size), (0, size % 2), constant_values=-1)
  places = made.layers(size) if dim == 0 else places.reshape(2, -1)
  zeros = np.zeros_like(x).take([0], axis=dim + lead)
  padded = np.concatenate([x, zeros], axis=dim + lead)  # index -1: zeros
  np.testing.assert_array_equal(
    stored, np.stack([padded.take(p, dim + lead) for p in places], axis=lead)
  )
  np.testing.assert_array_equal(made.restore(stored, dim, size, lead), x)
