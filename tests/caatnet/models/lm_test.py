"""Vocabularies, losses and parameters of language models over ranks."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from caatnet.models.access import DEFAULT_ACCESS
from caatnet.models.lm import losses, parameters, stack
from caatnet.models.lm.vocabulary import Vocabulary
from parallel.axes import Axis, make_mesh
from parallel.tensor.partial_sync import PartialSync
from parallel.tensor.stream import Stream


def on_mesh(f, tensor, in_specs, out_specs, *arguments):
  mesh = make_mesh({"tensor": tensor})
  return jax.jit(jax.shard_map(
    f, mesh=mesh, in_specs=in_specs, out_specs=out_specs
  ))(*arguments)


@pytest.mark.parametrize("devices", [1, 2])
def test_losses_equal_those_of_all_logits(devices):
  """Vocabulary of 7 over 4 ranks; the last logit is padding."""
  tensor = Axis("tensor", 4, devices)
  rng = np.random.default_rng(0)
  logits = np.round(rng.normal(size=(3, 50, 8)), 1).astype("f4")  # with ties
  logits[..., 7] = -np.inf
  tokens = rng.integers(7, size=(3, 50))
  # [R, B, T, V]; the maximum of some positions must not overflow.
  logits[1] += 300.0
  cut = np.moveaxis(logits.reshape(3, 50, 4, 2), 2, 0)
  vocabulary = Vocabulary(7, tensor, "float32")

  weights = rng.normal(size=(3, 50)).astype("f4")

  def judged(cut, tokens):
    targets = losses.Targets(tokens, vocabulary.token_ids(), "tensor")
    gradient = jax.grad(
      lambda cut: (weights * losses.cross_entropy(cut, targets)).sum()
    )(cut)
    loss = losses.cross_entropy(cut, targets)
    return loss, losses.target_scores(cut, targets), gradient

  loss, scores, gradient = on_mesh(
    judged, tensor, (P("tensor"), P()), (P(), P(), P("tensor")),
    jnp.asarray(cut), jnp.asarray(tokens),
  )
  expected = np.asarray(jax.nn.softmax(logits)) - np.eye(8)[tokens]
  np.testing.assert_allclose(
    np.moveaxis(gradient, 0, 2).reshape(3, 50, 8),
    weights[..., None] * expected, rtol=1e-4, atol=1e-5,
  )
  expected = np.take_along_axis(
    np.asarray(jax.nn.log_softmax(logits)), tokens[..., None], axis=2
  )[..., 0]
  np.testing.assert_allclose(loss, -expected, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(
    scores["log_probability"], expected, rtol=1e-4, atol=1e-4
  )
  greedy = np.argmax(logits, axis=2) == tokens  # the first of equal ones
  np.testing.assert_array_equal(scores["greedy"], greedy)
  assert 10 < greedy.sum() < 140


@pytest.mark.parametrize(("size", "expected"), [
  (8, [[0, 1], [2, 3], [4, 5], [6, 7]]), (7, [[0, 1], [2, 3], [4, 5], [6, 7]]),
  (4, [[0], [1], [2], [3]]),
])
def test_ranks_own_consecutive_tokens(size, expected):
  for devices in (1, 2):
    tensor = Axis("tensor", 4, devices)
    found = on_mesh(
      Vocabulary(size, tensor, "float32").token_ids, tensor, (), P("tensor")
    )
    assert found.tolist() == expected


def test_rows_and_columns_are_cut_and_padded():
  dense = jnp.arange(1, 11, dtype=jnp.float32).reshape(2, 5)
  cut = parameters.cut_size(5, 3)
  assert (cut, parameters.cut_size(6, 3), parameters.cut_size(7, 3)) == (
    2, 2, 3
  )
  columns = parameters.cut_columns(dense, 3, cut)
  assert columns.tolist() == [
    [[1, 2], [6, 7]], [[3, 4], [8, 9]], [[5, 0], [10, 0]]
  ]
  rows = parameters.cut_rows(dense.T, 3, cut)
  np.testing.assert_array_equal(rows, jnp.swapaxes(columns, 1, 2))


def test_private_channels_are_scaled_by_the_root_of_the_ranks():
  none, init = (PartialSync(0.25, scale) for scale in ("none", "init"))
  scales = parameters.row_scales(((none, init), (init, none)), 8,
                                 Axis("tensor", 9))
  plain, scaled = [1.0] * 8, [1.0] * 2 + [3.0] * 6
  assert scales.tolist() == [[plain, scaled], [scaled, plain]]
  assert scales.dtype == np.float32


def test_padding_to_twice_the_size_is_refused_with_what_fits():
  for ranks in range(1, 8):
    parameters.check_padding(4, "ffn_width", ranks)
  with pytest.raises(ValueError, match=(
    r"config\.model\.ffn_width=4 would be padded to 8 on "
    r"config\.parallel\.tensor=8, with at least half of it zeros; use a tensor "
    r"size in \[1, 2, 3, 4, 5, 6, 7\], or config\.model\.ffn_width a multiple "
    r"of 8"
  )):
    parameters.check_padding(4, "ffn_width", 8)
  with pytest.raises(ValueError, match=r"in \[1, [\d, ]+\], or") as error:
    parameters.check_padding(1000, "vocab_size", 2000)
  assert str(error.value).count(",") == 1 + 15 + 1  # sixteen tensor sizes


def _stack(fractions):
  """Returns the lowered run of layers that multiply, and its result."""

  def layer(factor, carried, syncs):
    x, count = carried
    return Stream(factor * x.shared, factor * x.private), count + 1

  def run(factors, shared):
    private = jnp.zeros((4, *shared.shape[:-1], 0))
    syncs = [(PartialSync(p), PartialSync(1.0)) for p in fractions]
    return stack.run(
      layer, factors, Stream(shared, private), 0, syncs=syncs,
      width=shared.shape[-1], access=DEFAULT_ACCESS,
    )

  operands = jnp.array([2.0, 3.0, 5.0]), jnp.ones((1, 2, 8))
  return str(jax.make_jaxpr(run)(*operands)), run(*operands)


def test_layers_of_one_policy_are_scanned_without_slices():
  text, (x, count) = _stack([1.0] * 3)
  assert text.count("scan[") == 1
  assert "length=3" in text
  assert "slice[" not in text
  assert (x.shared.shape, x.private.shape) == ((1, 2, 8), (4, 1, 2, 0))
  assert (float(x.shared[0, 0, 0]), int(count)) == (30.0, 3)


def test_layers_of_each_policy_are_scanned_after_the_stream_is_narrowed():
  text, (x, count) = _stack([0.75, 0.75, 0.25])
  lengths = [part.split("length=")[1][0] for part in text.split("scan[")[1:]]
  assert lengths == ["2", "1"]
  assert (x.shared.shape, x.private.shape) == ((1, 2, 2), (4, 1, 2, 6))
  assert (float(x.private[3, 0, 1, 5]), int(count)) == (30.0, 3)
