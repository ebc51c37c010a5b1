"""Parts of models alone: losses, slices, positions, caches and sizes."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from caatnet.models import classes
from caatnet.models.convolutional import ConvolutionalModel
from caatnet.models.graph import GraphModel
from caatnet.models.lm import losses, parameters
from caatnet.models.lm.vocabulary import Vocabulary
from caatnet.models.paged import Batch, CacheShape, StateShape
from caatnet.models.protocol import Parameter, Parts, Reduction, continues_text
from caatnet.models.recurrent import RecurrentConfig
from caatnet.models.transformer.positions import (
  Linear,
  Llama3,
  parse_scaling,
  rotate,
)
from parallel.axes import Axis, make_mesh
from parallel.tensor.partial_sync import PartialSync

ONE, EVERYWHERE = Axis("tensor", 1), P()


def on_mesh(f, tensor, in_specs, *arguments, out_specs=EVERYWHERE):
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

  def both(cut, tokens):
    targets = losses.Targets(tokens, vocabulary.token_ids(), "tensor")
    return losses.cross_entropy(cut, targets), losses.target_scores(
      cut, targets
    )

  loss, scores = on_mesh(
    both, tensor, (P("tensor"), P()), jnp.asarray(cut), jnp.asarray(tokens)
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
      Vocabulary(size, tensor, "float32").token_ids, tensor, (),
      out_specs=P("tensor"),
    )
    assert found.tolist() == expected


def test_scores_of_a_classifier():
  logits = np.array([[1.0, 3.0, 2.0], [5.0, 5.0, 0.0], [0.0, 1.0, 2.0]], "f4")
  labels = np.array([1, 1, 0])
  found = on_mesh(
    lambda x, y: classes.scores(x, y, ONE), ONE, (P(), P()),
    jnp.asarray(logits, "bfloat16"), jnp.asarray(labels),
  )
  odds = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
  np.testing.assert_allclose(
    found["loss"], -np.log(odds[np.arange(3), labels]), rtol=1e-6
  )
  # Of two equal logits, the first one is the answer.
  assert found["accuracy"].tolist() == [1.0, 0.0, 0.0]
  assert {x.dtype.name for x in found.values()} == {"float32"}


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


def rotated(x, base=100.0, **options):
  return np.asarray(rotate(jnp.asarray(x), base, **options))


def test_rotation_depends_on_relative_positions():
  rng = np.random.default_rng(0)
  q, k = rng.normal(size=(2, 1, 6, 2, 8)).astype("f4")
  q[:], k[:] = q[:, :1], k[:, :1]  # equal at all positions
  a, b = rotated(q), rotated(k)
  products = np.einsum("bthd,bshd->hts", a, b)
  for shift in range(1, 5):
    diagonal = np.diagonal(products, -shift, axis1=1, axis2=2)
    np.testing.assert_allclose(
      diagonal, np.broadcast_to(diagonal[:, :1], diagonal.shape), rtol=1e-4,
      atol=1e-5,
    )
  np.testing.assert_allclose(a[:, 0], q[:, 0], rtol=1e-6)
  # Channels i and i + 4 are one pair, of frequency base^(-i / 4).
  angle = 3 * 100.0 ** (-np.arange(4) / 4)
  first, second = q[:, 3, :, :4], q[:, 3, :, 4:]
  np.testing.assert_allclose(a[:, 3], np.concatenate([
    first * np.cos(angle) - second * np.sin(angle),
    second * np.cos(angle) + first * np.sin(angle),
  ], axis=-1), rtol=1e-4, atol=1e-5)


def test_given_positions_replace_those_of_the_array():
  x = np.random.default_rng(0).normal(size=(2, 3, 1, 4)).astype("f4")
  whole = rotated(np.repeat(x[:, :1], 9, axis=1))
  at = np.array([[4, 0, 8], [1, 2, 7]])
  found = rotated(np.repeat(x[:, :1], 3, axis=1), positions=jnp.asarray(at))
  np.testing.assert_allclose(
    found, np.take_along_axis(whole, at[..., None, None], axis=1), rtol=1e-5,
    atol=1e-6,
  )
  # A factor of 2 reaches half of the angles.
  half = rotated(np.repeat(x[:, :1], 9, axis=1), scaling=Linear(2.0))
  np.testing.assert_allclose(half[:, 8], whole[:, 4], rtol=1e-5, atol=1e-6)


def test_long_wavelengths_are_stretched_only():
  scaling = Llama3(4.0, 1.0, 3.0, 64)
  periods = np.array([0.25, 1.0, 1.5, 2.0, 3.0, 9.0])
  frequencies = 2 * np.pi * periods / 64
  ratios = scaling(frequencies) / frequencies
  np.testing.assert_allclose(
    ratios, [0.25, 0.25, 0.4375, 0.625, 1.0, 1.0], rtol=1e-9
  )


@pytest.mark.parametrize("values", [
  ("linear", 1), ("linear", 2.5), ("llama3", 1.0, 1.0, 4.0, 1),
])
def test_smallest_scalings_are_valid(values):
  found = parse_scaling(values)
  assert dataclasses.astuple(found) == values[1:]
  assert parse_scaling(()) is None


@pytest.mark.parametrize(("values", "message"), [
  (("linear", 0.99), "'linear' needs a finite factor >= 1"),
  (("linear", float("inf")), "'linear' needs a finite factor >= 1"),
  (("llama3", 0.5, 1.0, 4.0, 8), "'llama3' needs finite numbers"),
  (("llama3", 2.0, 0.0, 4.0, 8), "0 < low < high"),
  (("llama3", 2.0, 4.0, 4.0, 8), "0 < low < high"),
  (("llama3", 2.0, 1.0, float("inf"), 8), "0 < low < high"),
  (("llama3", 2.0, 1.0, 4.0, 0), "context >= 1"),
  (("llama3", 2.0, 1.0, 4.0, float("inf")), "context >= 1"),
  (("linear",), r"must be \(\) or one of \('linear', factor\); \('llama3', "),
  (("yarn", 2.0), r"must be \(\) or one of"),
  (("linear", True), "must have numbers"),
])
def test_invalid_scaling_is_named(values, message):
  with pytest.raises(ValueError, match=rf"^rope_scaling=\(.*{message}"):
    parse_scaling(values)


def test_cache_counts_bytes_of_pages_and_states():
  states = (StateShape((3, 4)), StateShape((5,), "bfloat16"))
  shape = CacheShape(2, 16, 8, 4, 64, "bfloat16", "heads", states=states,
                     num_states=6)
  assert [tuple(c) for c in shape.components] == [
    (True, 16, 2 * 2 * 8 * 4 * 64 * 2), (False, 6, 2 * 12 * 4),
    (False, 6, 2 * 5 * 2),
  ]
  assert shape.size_bytes == sum(
    c.num_blocks * c.block_bytes for c in shape.components
  )
  assert [x.shape for x in shape.state_arrays()] == [(12, 3, 4), (12, 5)]
  assert (shape.paged, shape.shares_prefixes) == (True, False)
  pages = dataclasses.replace(shape, states=(), num_states=0)
  assert (pages.paged, pages.shares_prefixes) == (True, True)
  assert len(pages.components) == 1
  fixed = dataclasses.replace(shape, num_kv_heads=0)
  assert (fixed.paged, fixed.pages()) == (False, ())
  assert fixed.components == shape.components[1:]


@pytest.mark.parametrize(("decodes", "chunks", "length", "parts"), [
  (0, 2, 5, [(slice(0, 2), slice(0, 10), 5)]),
  (3, 0, 0, [(slice(0, 3), slice(0, 3), 1)]),
  (3, 2, 4, [(slice(0, 3), slice(0, 3), 1), (slice(3, 5), slice(3, 11), 4)]),
])
def test_step_has_decodes_and_then_chunks(decodes, chunks, length, parts):
  size, sequences = decodes + chunks * length, decodes + chunks
  tokens, rows = np.zeros(size, "i4"), np.zeros(sequences, "i4")
  batch = Batch(tokens, tokens, tokens, np.zeros((sequences, 2), "i4"), rows,
                rows, decodes)
  assert batch.parts == parts


def convolutional(**changes):
  return ConvolutionalModel(**{
    "shape": (8, 12, 3), "num_classes": 5, "widths": (4, 6), "blocks": 2,
    "groups": 2, "dtype": "float32", "tensor": ONE, **changes,
  })


def test_flops_of_convolutions_are_counted_by_hand():
  """Six per weight and position; the second stage has a quarter of them."""
  model = convolutional()
  example = {"image": jax.ShapeDtypeStruct((8, 12, 3), "float32")}
  places = 8 * 12
  products = places * (9 * 3 * 4 + 2 * 2 * 9 * 4 * 4)
  products += places // 4 * (4 * 4 * 6 + 2 * 2 * 9 * 6 * 6)
  assert model.flops(example) == 6 * (products + 6 * 5)
  weights = 9 * 3 * 4 + 2 * (2 * 9 * 16 + 4 * 4)
  weights += 4 * 4 * 6 + 2 * (2 * 9 * 36 + 4 * 6) + 2 * 6 + 6 * 5 + 5
  assert model.num_params == weights
  assert model.stacks == {"stage_0": 2, "stage_1": 2}
  stages = {
    part: {p.stage_dim for p in jax.tree.leaves(
      tree, is_leaf=lambda p: isinstance(p, Parameter)
    )} for part, tree in model.parameters.items()
  }
  assert stages == {"enter_0": {None}, "stage_0": {0}, "enter_1": {None},
                    "stage_1": {0}, "head": {None}}


@pytest.mark.parametrize(("changes", "message"), [
  ({"blocks": 0}, "blocks=0 and .* there must be a block"),
  ({"widths": ()}, r"widths=\(\): there must be a block"),
  ({"groups": 3}, r"groups=3 must divide all of widths=\(4, 6\)"),
  ({"groups": 0}, "groups=0 must divide"),
  ({"groups": 4}, "groups=4 must divide"),
  ({"shape": (9, 12, 3)}, r"which halve height and width 1 times: \(9, 12\)"),
  ({"shape": (8, 13, 3)}, r"\(8, 13\) cannot be halved"),
  ({"widths": (4, 4, 4, 4)}, r"4 stages, which halve height and width 3 tim"),
])
def test_sizes_of_convolutions_that_do_not_fit_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    convolutional(**changes)


def test_smallest_convolutional_networks_are_valid():
  convolutional(blocks=1, widths=(2,), shape=(1, 1, 1))
  convolutional(widths=(4, 4, 4), shape=(4, 8, 3))  # sides of multiples of 4
  with pytest.raises(ValueError, match="activations of one shape"):
    convolutional().parts()


@pytest.mark.parametrize(("layer", "matrices"), [("sage", 2), ("gcn", 1)])
def test_flops_of_graphs_are_six_per_weight_and_position(layer, matrices):
  model = GraphModel(layer, 10, 3, (4, 5), 8, "float32", ONE)
  # The root and its 4 neighbours, and then the root.
  assert model.flops(None) == 6 * matrices * (5 * 10 * 8 + 8 * 3)
  assert model._levels == (1, 4, 20)
  assert model.num_params == matrices * (10 * 8 + 8 * 3) + 8 + 3
  assert model.stacks == {}


def test_sizes_of_recurrences_are_counted_by_hand():
  sync = PartialSync()
  config = RecurrentConfig(
    vocab_size=10, width=6, num_layers=2, ffn_width=5, num_heads=4,
    rnn_width=8, conv_width=3, syncs=((sync, sync),) * 2,
  )
  # Three projections, taps, two gates with a block for each head, and the MLP.
  products = 3 * 6 * 8 + 3 * 8 + 2 * 4 * 2 * 2 + 3 * 6 * 5
  assert config.layer_products == products
  assert config.layer_params == products + 4 * 8 + 2 * 6
  assert config.num_params == 2 * config.layer_params + 2 * 10 * 6 + 6
  assert [tuple(s) for s in config.state_shapes(2)] == [
    ((2, 4), "float32"), ((4,), "float32")
  ]
  with pytest.raises(ValueError, match="num_heads=3 does not divide"):
    dataclasses.replace(config, num_heads=3)


def test_defaults_of_the_protocol_are_those_of_a_plain_matrix():
  plain = Parameter(P(), 0, "float32")
  assert (plain.decays, plain.uses, plain.regathered, plain.stage_dim,
          plain.cast) == (True, 1, 1, None, True)
  assert Reduction("forward", "float32", (1,)).kind == "all_reduce"
  assert not Parts("a", None, None, None).together
  assert not continues_text(convolutional())
