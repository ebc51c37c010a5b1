"""Properties of the transformer: it equals the oracle on any devices."""

import collections
import dataclasses
import functools
import itertools

import chex
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from caatnet.models.lm.communication import tensor_reductions
from caatnet.models.protocol import Reduction
from caatnet.models.transformer.attention import _flash, attention, resolve
from caatnet.models.transformer.config import TransformerConfig
from caatnet.models.transformer.model import TransformerModel
from caatnet.program import Layout, Program
from caatnet.train.state import init_state
from caatnet.train.step import make_train_step
from parallel.axes import Axis, make_mesh
from parallel.base.checks import divisors
from parallel.ledger import ledger
from parallel.outer.data_parallel import DataParallel
from parallel.plans.zero.partition import Level, Partition
from parallel.tensor.partial_sync import PartialSync
from tests.caatnet.models import oracle

TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


def make_config(p=0.5, layers=2, **changes):
  sync = PartialSync(
    p, changes.pop("private_scale", "forward"),
    route=changes.pop("route", "psum"),
  )
  values = {
    "vocab_size": 64, "width": 32, "num_layers": layers, "num_heads": 8,
    "num_kv_heads": 8, "ffn_width": 48, "syncs": ((sync, sync),) * layers,
    "init_std": 0.2,
  }
  return TransformerConfig(**(values | changes))


def make_program(config, ranks=8, devices=1, data=1, data_devices=1):
  axes = {
    "worker": Axis("worker", 1),
    "data": Axis("data", data, data_devices),
    "tensor": Axis("tensor", ranks, devices),
  }
  layout = Layout(
    tuple(axes.values()), make_mesh(axes),
    Partition((Level("data", data),)),
  )
  return Program(TransformerModel(config, axes["tensor"]), layout)


def draw_tokens(batch=2, length=9, vocab=64):
  return jax.random.randint(jax.random.key(1), (batch, length), 0, vocab)


@functools.cache
def _init(config, ranks, seed):
  program = make_program(config, ranks)
  return jax.device_get(jax.jit(program.init_params)(jax.random.key(seed)))


def init_params(program, seed=0):
  config = dataclasses.replace(program.model.config, remat="none")
  return _init(config, program.layout.tensor.size, seed)


def draw_params(program):
  """Draws gains other than 1 and biases other than 0, so that they matter."""
  numbers = itertools.count()

  def draw(x, spec):
    if "tensor" in spec and np.any(x):
      return x
    number = next(numbers)  # a different number for each leaf
    waves = np.sin(number + np.arange(x.size, dtype="f4"))
    return x + 0.2 * waves.reshape(x.shape)

  return jax.tree.map(draw, init_params(program), program.specs)


def loss_and_grads(program, params, tokens, inside=False):
  """Computes through shard_map; the gradient inside or outside of it."""

  def loss(params, tokens):
    losses = program.model.scores(params, tokens)["loss"]
    return jax.lax.pmean(losses.mean(), "data")

  mapped = functools.partial(
    jax.shard_map,
    mesh=program.layout.mesh,
    in_specs=(program.specs, P("data")),
  )
  if inside:
    f = mapped(jax.value_and_grad(loss), out_specs=(P(), program.specs))
  else:
    f = jax.value_and_grad(mapped(loss, out_specs=P()))
  return jax.jit(f)(params, tokens)


@functools.cache
def expected_loss_and_grads(reference, config, ranks):
  program = make_program(config, ranks)
  f = functools.partial(reference, config=config, ranks=ranks)
  tokens = draw_tokens(vocab=config.vocab_size)
  return jax.jit(jax.value_and_grad(f))(draw_params(program), tokens)


def expect_oracle(config, reference, ranks=8, devices=1, inside=False):
  program = make_program(config, ranks, devices)
  params = draw_params(program)
  tokens = draw_tokens(vocab=config.vocab_size)
  expected = expected_loss_and_grads(reference, config, ranks)
  actual = loss_and_grads(program, params, tokens, inside)
  chex.assert_trees_all_close(actual, expected, **TOLERANCE)


@pytest.mark.rotated
@pytest.mark.quick
@pytest.mark.parametrize(
  ("ranks", "changes"),
  [
    (8, {}),
    (1, {}),
    (4, {"num_kv_heads": 4, "tied_embeddings": True}),
    # None of these is divisible by 4: padded.
    (4, {"num_heads": 14, "num_kv_heads": 7, "width": 56, "ffn_width": 41,
         "vocab_size": 61}),
    # The last rank has only padding.
    (4, {"num_heads": 6, "num_kv_heads": 3, "width": 36, "ffn_width": 5,
         "vocab_size": 9}),
  ],
)
def test_fully_synchronised_equals_the_dense_model(ranks, changes):
  expect_oracle(make_config(1.0, **changes), oracle.dense_loss, ranks)


@pytest.mark.rotated
@pytest.mark.quick
@pytest.mark.parametrize(
  ("devices", "inside", "p"),
  # Two fractions per number of devices; `projections_test.py` covers all
  # pairs.
  [(1, True, 0.0), (1, True, 0.5), (2, False, 0.29), (2, False, 0.5),
   (4, True, 0.29), (4, True, 0.5), (8, False, 0.0), (8, False, 0.29)],
)
def test_any_p_equals_the_rank_oracle_on_any_devices(devices, inside, p):
  expect_oracle(make_config(p), oracle.rank_loss, 8, devices, inside)


@pytest.mark.rotated
@pytest.mark.parametrize(("ranks", "devices"), [(4, 2), (8, 1), (8, 8)])
def test_p_may_differ_per_layer_and_projection(ranks, devices):
  syncs = tuple(
    (PartialSync(a, scale), PartialSync(b, scale))
    for a, b, scale in ((1.0, 0.5, "forward"), (0.25, 0.75, "none"),
                        (0.25, 0.75, "none"), (1.0, 0.0, "forward"))
  )
  config = make_config(layers=4, syncs=syncs)
  expect_oracle(config, oracle.rank_loss, ranks, devices, inside=True)


@pytest.mark.rotated(2)
@pytest.mark.parametrize(
  ("kernel", "remat"), [("reference", "reduced"), ("tpu_interpret", "none")]
)
def test_one_shot_route_equals_the_rank_oracle(kernel, remat):
  config = make_config(
    0.5, route="one_shot", kernels=(kernel, "reference"), remat=remat
  )
  expect_oracle(config, oracle.rank_loss, 4, 4, inside=True)


def test_carried_update_equals_the_rank_oracle():
  """Carries across the scan, and across a border between two policies."""
  syncs = tuple(
    (PartialSync(a, route="one_shot"), PartialSync(b, route="one_shot"))
    for a, b in ((0.75, 0.5), (0.25, 0.5), (0.25, 0.5), (0.25, 0.5))
  )
  config = make_config(
    layers=4, syncs=syncs, kernels=("tpu_interpret", "reference"), carry=True
  )
  expect_oracle(config, oracle.rank_loss, 4, 4, inside=True)


def test_one_rank_does_not_depend_on_p():
  results = []
  for p in (0.0, 0.4, 1.0):
    program = make_program(make_config(p), ranks=1)
    results.append(
      loss_and_grads(program, draw_params(program), draw_tokens())
    )
  for other in results[1:]:
    chex.assert_trees_all_close(results[0], other, **TOLERANCE)


def test_init_scales_private_columns():
  plain, scaled = (
    init_params(make_program(make_config(0.5, private_scale=scale), 4))[
      "blocks"
    ]
    for scale in ("none", "init")
  )
  for key in ("w_out", "w_down"):
    expected = np.array(plain[key])
    expected[..., 16:] *= 2.0  # sqrt(4 ranks)
    np.testing.assert_allclose(scaled[key], expected, rtol=1e-6)
  chex.assert_trees_all_equal(plain["w_qkv"], scaled["w_qkv"])


def test_init_scales_each_projection_by_its_own_fraction():
  """Attention shares 16 of 32 channels, the MLP 8."""
  plain, scaled = (
    init_params(make_program(dataclasses.replace(make_config(), syncs=(
      (PartialSync(0.5, scale), PartialSync(0.25, scale)),
    ) * 2), 4))["blocks"]
    for scale in ("none", "init")
  )
  for key, shared in (("w_out", 16), ("w_down", 8)):
    expected = np.array(plain[key])
    expected[..., shared:] *= 2.0  # sqrt(4 ranks)
    np.testing.assert_allclose(scaled[key], expected, rtol=1e-6)


def test_dense_parameters_do_not_depend_on_the_ranks():
  tokens = draw_tokens()
  losses = []
  for ranks in (1, 2, 8):
    program = make_program(make_config(1.0), ranks)
    params = init_params(program, 3)
    losses.append(loss_and_grads(program, params, tokens)[0])
  np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


@pytest.mark.rotated(2)
@pytest.mark.parametrize("devices", [1, 8])
def test_rematerialisation_changes_no_gradient(devices):
  results = {}
  for remat in ("none", "full", "reduced", "named"):
    program = make_program(make_config(0.5, remat=remat), 8, devices)
    results[remat] = loss_and_grads(
      program, draw_params(program), draw_tokens(), inside=True
    )
  for remat in ("full", "reduced", "named"):
    chex.assert_trees_all_close(results["none"], results[remat], **TOLERANCE)


def test_loss_does_not_depend_on_later_tokens():
  program = make_program(make_config(0.5))
  params = draw_params(program)

  def losses(tokens):
    return jax.jit(
      jax.shard_map(
        lambda params, tokens: program.model.scores(params, tokens)["loss"],
        mesh=program.layout.mesh,
        in_specs=(program.specs, P("data")),
        out_specs=P("data"),
      )
    )(params, tokens)

  tokens = draw_tokens()
  changed = tokens.at[:, 5].set((tokens[:, 5] + 1) % 64)
  before, after = losses(tokens), losses(changed)
  np.testing.assert_array_equal(before[:, :4], after[:, :4])
  assert (np.abs(before[:, 5:] - after[:, 5:]) > 0).any()


@pytest.mark.parametrize("length", [300, 1200])  # without and with remat
def test_blocks_of_queries_equal_one_attention(length):
  q, k, v = (
    jax.random.normal(jax.random.key(i), (1, length, heads, 8))
    for i, heads in enumerate((4, 2, 2))
  )

  def in_one(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)

  ours, expected = (
    jax.jit(lambda *x, f=f: (f(*x), jax.vjp(f, *x)[1](jnp.sin(q))))(q, k, v)
    for f in (functools.partial(attention, implementation="xla"), in_one)
  )
  chex.assert_trees_all_close(ours, expected, rtol=1e-4, atol=1e-5)
  widest = max(
    (eqn.outvars[0].aval.size for eqn in jax.make_jaxpr(
      lambda *x: attention(*x, "xla"))(q, k, v).eqns), default=0)
  assert widest < 4 * length * length  # the score matrix is never materialised


def test_flash_kernel_has_its_own_gradient():
  """Runs under `check_vma`, with a kernel that runs on any platform."""
  mesh = jax.make_mesh((2,), ("t",), axis_types=(jax.sharding.AxisType.Auto,))
  kernel = functools.partial(jax.nn.dot_product_attention, is_causal=True)
  q, k, v = (
    jax.random.normal(jax.random.key(i), (2, 5, heads, 4))
    for i, heads in enumerate((4, 2, 2))
  )
  results = []
  for f in (functools.partial(_flash, kernel), kernel):
    def both(*x, f=f):
      return f(*x), jax.vjp(f, *x)[1](jnp.sin(x[0]))

    results.append(
      jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P("t"),
                            out_specs=P("t")))(q, k, v)
    )
  chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize(
  ("platform", "dtype", "seq_len", "head_width", "expected"),
  [
    ("cpu", "bfloat16", 256, 64, "xla"),
    ("gpu", "bfloat16", 100, 64, "cudnn"),
    ("gpu", "float32", 256, 64, "xla"),
    ("gpu", "float16", 256, 4, "xla"),
    ("gpu", "float16", 256, 264, "xla"),
    ("tpu", "float32", 384, 4, "splash"),
    ("tpu", "bfloat16", 192, 128, "xla"),
  ],
)
def test_auto_attention_is_the_fastest_that_fits(
  platform, dtype, seq_len, head_width, expected
):
  where = platform, dtype, seq_len, head_width
  assert resolve("auto", *where) == resolve(expected, *where) == expected
  for other in {"cudnn", "splash"} - {expected}:
    with pytest.raises(ValueError, match=f"attention='{other}' needs "):
      resolve(other, *where)


def test_splash_attention_lowers_for_tpu_under_the_type_check():
  mesh = jax.make_mesh((2,), ("t",), axis_types=(jax.sharding.AxisType.Auto,))
  q = jax.ShapeDtypeStruct((2, 2, 1024, 4, 128), "bfloat16")
  k = jax.ShapeDtypeStruct((2, 2, 1024, 2, 128), "bfloat16")

  def loss(q, k, v):
    y = jax.vmap(functools.partial(attention, implementation="splash"))(
      q, k, v
    )
    return jax.lax.psum(y.astype("float32").sum(), "t")

  f = jax.shard_map(
    jax.grad(loss, (0, 1, 2)), mesh=mesh, in_specs=P("t"), out_specs=P("t")
  )
  lowered = jax.jit(f).trace(q, k, k).lower(lowering_platforms=("tpu",))
  kernels = lowered.as_text().count("@tpu_custom_call")
  assert kernels == 3  # the forward (once: its sum is unused), dq, dk and dv


# Sent bytes ------------------------------------------------------------------


def lower_step(program, batch, length, accumulation=1, platform="cpu"):
  optimizer = optax.adamw(1e-3)
  outer = DataParallel(program.layout.worker)
  step = make_train_step(program, optimizer, outer, 1.0, accumulation)
  state = jax.eval_shape(lambda: init_state(program, optimizer, outer, 0))
  ranks = program.layout.num_data_ranks
  tokens = jax.ShapeDtypeStruct(
    (1, ranks, batch * accumulation, length + 1), "int32"
  )
  traced = step.trace(state, tokens, ())
  lowered = traced.lower(lowering_platforms=(platform,))
  return ledger.collectives(lowered, program.layout.mesh)


def tensor_counter(entries):
  counter = collections.Counter()
  for entry in ledger.select(entries, axis="tensor"):
    assert entry.axes == ("tensor",)
    reduction = Reduction(entry.phase, entry.dtype, entry.shape, entry.kind)
    counter[reduction] += entry.count
  return counter


@pytest.mark.quick
@pytest.mark.parametrize(
  ("remat", "accumulation", "data", "p"),
  # Each fraction in two of four kinds of steps; drawn steps cover the rest.
  [("none", 1, 1, 1.0), ("none", 1, 1, 0.25), ("full", 1, 1, 0.5),
   ("full", 1, 1, 0.0), ("reduced", 3, 2, 0.25), ("reduced", 3, 2, 0.0),
   ("full", 2, 1, 0.5), ("full", 2, 1, 1.0)],
)
def test_lowered_collectives_equal_the_formula(remat, accumulation, data, p):
  config = make_config(p, layers=3, remat=remat, width=64)
  program = make_program(config, 8, 4, data=data)
  entries = lower_step(program, 2, 8, accumulation)
  expected = tensor_reductions(
    config, data_lanes=data, batch_size=2, seq_len=8,
    accumulation=accumulation,
  )
  assert tensor_counter(entries) == expected


@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("remat", ["none", "full", "reduced", "named"])
def test_collectives_of_the_row_parallel_kernel_equal_the_formula(remat, carry):
  """Outputs that the remat policy keeps are not reduced again."""
  config = make_config(
    layers=3, route="one_shot", remat=remat, kernels=("tpu", "reference"),
    carry=carry,
  )
  entries = lower_step(make_program(config, 4, 4), 2, 8, platform="tpu")
  expected = tensor_reductions(
    config, data_lanes=1, batch_size=2, seq_len=8
  )
  assert tensor_counter(entries) == expected


@st.composite
def drawn_steps(draw):
  """Step of any shape: sizes, p per projection, ranks, lanes, shards, remat."""
  ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
  devices = draw(st.sampled_from([d for d in range(1, 9) if ranks % d == 0]))
  data = draw(st.integers(1, 4))
  fitting = [d for d in divisors(data) if d * devices <= 8]
  data_devices = draw(st.sampled_from(fitting))
  layers = draw(st.integers(1, 3))
  dtypes = st.sampled_from([None, "float32", "bfloat16"])
  sync = st.builds(
    PartialSync,
    st.sampled_from([0.0, 0.1, 0.25, 0.29, 0.5, 0.75, 1.0]),
    st.sampled_from(["none", "init", "forward"]),
    dtypes,
    dtypes,
    st.booleans(),
    st.sampled_from(["psum", "one_shot"]),
  )
  # Few layers of few kinds: each kind is a separate scan.
  kinds = draw(st.lists(st.tuples(sync, sync), min_size=1, max_size=2))
  syncs = tuple(draw(st.sampled_from(kinds)) for _ in range(layers))
  head_width = draw(st.sampled_from([2, 4]))
  kv_heads = draw(st.sampled_from([ranks, ranks - (ranks > 2)]))
  heads = draw(st.sampled_from([kv_heads, 2 * kv_heads]))
  config = make_config(
    layers=layers,
    syncs=syncs,
    width=heads * head_width,
    num_heads=heads,
    num_kv_heads=kv_heads,
    ffn_width=draw(st.sampled_from([ranks, 3 * ranks])),
    vocab_size=draw(st.sampled_from([8 * ranks, 8 * ranks - 1])),
    dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    remat=draw(st.sampled_from(["none", "full", "reduced", "named"])),
    tied_embeddings=draw(st.booleans()),
  )
  program = make_program(config, ranks, devices, data, data_devices)
  sizes = {
    "batch": draw(st.integers(1, 3)),
    "length": draw(st.sampled_from([1, 4, 8])),
    "accumulation": draw(st.integers(1, 3)),
  }
  return program, sizes


# Not shrunk: shrinking would take minutes, and the cases are small.
@settings(
  max_examples=12,
  derandomize=True,
  phases=[Phase.generate],
)
@given(drawn_steps())
def test_collectives_of_drawn_steps_equal_the_formula(drawn):
  program, sizes = drawn
  entries = lower_step(program, **sizes)
  if program.layout.tensor.devices == 1:
    assert ledger.total(entries, axis="tensor") == 0
    return
  expected = tensor_reductions(
    program.model.config,
    data_lanes=program.layout.data[0].lanes,
    batch_size=sizes["batch"],
    seq_len=sizes["length"],
    accumulation=sizes["accumulation"],
  )
  assert tensor_counter(entries) == expected


@pytest.mark.parametrize("data_devices", [1, 2])
def test_data_axis_reduces_each_gradient_once(data_devices):
  program = make_program(make_config(0.5), 8, 2, 4, data_devices)
  entries = lower_step(program, 1, 8, accumulation=2)
  sent = ledger.select(entries, axis="data")
  if data_devices == 1:
    assert not sent
    return
  params = jax.eval_shape(program.init_params, jax.random.key(0))
  local = jax.tree.map(
    lambda x, spec: x.size // (2 if "tensor" in spec else 1),
    params,
    program.specs,
  )
  assert {c.phase for c in sent} == {"update"}
  elements = sum(c.elements * c.count for c in sent)
  assert elements == sum(jax.tree.leaves(local)) + 1  # plus the loss


def test_halving_p_halves_the_bytes_inside_the_blocks():
  sent = []
  for p in (1.0, 0.5, 0.25):
    program = make_program(make_config(p), 8, 8)
    entries = lower_step(program, 2, 8)
    inside = [c for c in entries if c.where.startswith("blocks")]
    assert {c.shape[-1] for c in inside} == {int(32 * p)}
    sent.append(ledger.total(inside))
  assert sent[0] == 2 * sent[1] == 4 * sent[2] > 0


def test_bfloat16_reduces_forward_narrow_and_backward_wide():
  sync = PartialSync(0.5)
  program = make_program(
    make_config(syncs=((sync, sync),) * 2, dtype="bfloat16"), 8, 8
  )
  entries = lower_step(program, 2, 8)
  inside = [c for c in entries if c.where.startswith("blocks")]
  assert {c.dtype for c in inside if c.phase == "forward"} == {"bfloat16"}
  assert {c.dtype for c in inside if c.phase == "backward"} == {"float32"}
  gains = [c for c in entries if c.shape in ((2, 32), (32,))]
  assert {c.dtype for c in gains} == {"float32"}


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_kv_heads": 3}, "num_kv_heads=3 does not divide"),
    ({"width": 36}, "num_heads=8 does not divide"),
    ({"width": 24}, "must be even"),
    ({"remat": "some"}, "remat='some' must be one of"),
    ({"syncs": ()}, "p is given for 0 layers"),
  ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    make_config(**changes)


@pytest.mark.parametrize(
  ("changes", "ranks"),
  [({"num_kv_heads": 4}, 8), ({"ffn_width": 4}, 8), ({"vocab_size": 4}, 8)],
)
def test_half_of_the_ranks_without_work_are_an_error(changes, ranks):
  (key,) = changes
  with pytest.raises(ValueError, match=f"config.model.{key}"):
    make_program(make_config(**changes), ranks)


def test_gains_stay_bitwise_equal_on_all_ranks():
  program = make_program(make_config(0.5), 8, 8)
  optimizer = optax.adamw(1e-2)
  outer = DataParallel(program.layout.worker)
  state = init_state(program, optimizer, outer, 0)
  before = np.array(state.params["norm"])
  step = make_train_step(program, optimizer, outer, 1.0)
  state, _ = step(state, draw_tokens()[None, None], ())
  for gain in (state.params["norm"], state.params["blocks"]["norm_1"]):
    shards = [np.array(s.data) for s in gain.addressable_shards]
    assert len(shards) == 8
    for shard in shards[1:]:
      np.testing.assert_array_equal(shards[0], shard)
  assert (before != np.array(state.params["norm"])).any()


def test_num_params_counts_parameters():
  config = make_config(width=48, num_heads=12, num_kv_heads=6)
  program = make_program(config, ranks=1)
  params = jax.eval_shape(program.init_params, jax.random.key(0))
  assert config.num_params == sum(x.size for x in jax.tree.leaves(params))
  tied = dataclasses.replace(config, tied_embeddings=True)
  assert config.num_params - tied.num_params == 64 * 48


def test_matrices_are_initialised_as_in_gpt_2():
  """Output projections are smaller by sqrt(2 layers)."""
  config = make_config(layers=8, width=64, ffn_width=96, init_std=0.5)
  blocks = init_params(make_program(config, 1))["blocks"]
  for key, std in (("w_qkv", 0.5), ("w_gate_up", 0.5), ("w_out", 0.125),
                   ("w_down", 0.125)):
    assert blocks[key].std() == pytest.approx(std, rel=0.02), key


@pytest.mark.parametrize(
  ("tied", "uses", "regathered"), [(False, 1, 0), (True, 2, 1)]
)
def test_embedding_table_declares_its_uses_to_partitions(
  tied, uses, regathered
):
  """A lookup reads it once, without regathering; a tied one is the head too."""
  model = make_program(make_config(tied_embeddings=tied), 2).model
  table = model.parameters["embedding"]
  assert (table.uses, table.regathered) == (uses, regathered)
  block = model.parameters["blocks"]["w_out"]
  assert (block.uses, block.regathered, block.num_lead) == (1, 1, 2)


@pytest.mark.parametrize("tied", [False, True])
def test_flops_are_six_per_weight_of_a_product(tied):
  """Lookups multiply nothing; attention counts half of its matrix."""
  config = make_config(tied_embeddings=tied)
  block = 4 * 32 * 32 + 3 * 32 * 48 + 2 * 32  # with its two gains
  products = 2 * block + 32 + 32 * 64
  attention = 2 * 12 * 32 * 5 / 2
  assert config.flops_per_token(5) == 6 * products + attention
