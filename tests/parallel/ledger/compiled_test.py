"""Analysis of compiled programs: collectives, trips, FLOPs and memory."""

import collections
import math

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.ledger import compiled as compiled_ledger
from parallel.ledger import groups as groups_of
from parallel.ledger import hlo, ledger, memory, overlap, roofline
from parallel.plans.hardware.devices import DEVICES
from tests import users


def make_mesh(**sizes):
  return jax.make_mesh(
    tuple(sizes.values()),
    tuple(sizes),
    axis_types=(AxisType.Auto,) * len(sizes),
  )


def compile_mapped(f, mesh, *args):
  mapped = jax.shard_map(
    f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
  )
  lowered = jax.jit(mapped).lower(*args)
  return lowered, users.compiled(lowered)


def count_bytes(entries):
  total = collections.Counter()
  for entry in entries:
    if entry.bytes:
      total[entry.kind, entry.axes, entry.dtype] += entry.count * entry.bytes
  return total


COLLECTIVES = {
  "all_reduce": lambda x: lax.psum(x, "a"),
  "two axes": lambda x: lax.psum(x, ("a", "c")),
  "max": lambda x: lax.pmax(x, "b"),
  "all_gather": lambda x: lax.all_gather(x, "a"),
  "reduce_scatter": lambda x: lax.psum_scatter(x, "c", tiled=True),
  "all_to_all": lambda x: lax.all_to_all(x, "b", 0, 0, tiled=True),
  "permute": lambda x: lax.ppermute(x, "a", [(0, 1), (1, 0)]),
}


@pytest.mark.quick
@pytest.mark.parametrize("trips", [None, (3,), (2, 5)])
def test_compiled_equals_lowered_for_float32_on_cpu(trips):
  mesh = make_mesh(a=2, b=2, c=2)

  def once(x):
    return sum((jnp.sum(of(x)) for of in COLLECTIVES.values()), x)

  f = once
  for n in trips or ():

    def f(x, inner=f, n=n):
      return lax.scan(lambda c, _: (inner(c * 2), None), x, length=n)[0]

  lowered, compiled = compile_mapped(f, mesh, jnp.ones((4, 8)))
  asked = ledger.collectives(lowered, mesh)
  made = compiled_ledger.collectives(hlo.parse(compiled.as_text()), mesh)
  assert count_bytes(asked) == count_bytes(made)
  assert sorted(count_bytes(made).values()) == (
    [128 * math.prod(trips or ())] * len(COLLECTIVES)
  )
  assert {(c.kind, c.reduction) for c in asked} == {
    (c.kind, c.reduction) for c in made
  }
  assert not any(d.differs for d in compiled_ledger.compare(asked, made))


@pytest.mark.parametrize(
  ("branches", "counts"),
  [
    ((lambda x: lax.psum(x, "a"), lambda x: lax.psum(2 * x, "a")), [5]),
    ((lambda x: lax.psum(x, "a"), lambda x: x), [None]),
  ],
)
def test_conditional_counts_only_if_its_branches_send_the_same(
  branches, counts
):
  mesh = make_mesh(a=8)

  def f(x):
    def step(c, _):
      return lax.cond(c.sum() > 0, *branches, c), None

    return lax.psum(lax.scan(step, x, length=5)[0], "a")

  lowered, compiled = compile_mapped(f, mesh, jnp.ones(4))
  asked = ledger.collectives(lowered, mesh)
  made = compiled_ledger.collectives(hlo.parse(compiled.as_text()), mesh)
  for entries in (asked, made):
    assert {c.count for c in entries} == {*counts, 1}
  # Known collectives remain known next to the unknown one.
  (row,) = compiled_ledger.compare(asked, made)
  known = 1 + sum(counts) if None not in counts else 1
  unknown = 16 * counts.count(None)
  assert set(row.compiled.values()) == {(known, 16 * known, unknown)}
  assert not row.differs


def test_branch_counts_follow_its_scope():
  """Applies to bytes and FLOPs; the default branch has the remaining trips."""
  mesh, size = make_mesh(a=8), 16

  def f(x):
    def product(x, times):
      for _ in range(times):
        x = x @ x
      return x

    def once(x):
      with jax.named_scope("runs_2_of_5"):
        return lax.psum(product(x, 1), "a")

    def twice(x):
      with jax.named_scope("runs_1_of_5"):
        return product(x, 2)

    def tick(x, branch):
      return lax.switch(branch, [lambda x: product(x, 3), once, twice], x), None

    return lax.psum(lax.scan(tick, x, jnp.array([0, 1, 2, 1, 0]))[0], "a")

  lowered, compiled = compile_mapped(f, mesh, jnp.ones((size, size)))
  module = hlo.parse(compiled.as_text())
  made = compiled_ledger.collectives(module, mesh)
  assert sorted(c.count for c in made) == [1, 2]
  assert count_bytes(made) == count_bytes(ledger.collectives(lowered, mesh))
  program = overlap.ScheduledProgram(
    module, mesh, DEVICES["v5p"], lambda entry: 0.0
  )
  assert program.total().flops == (2 * 1 + 1 * 2 + 2 * 3) * 2 * size**3


def test_while_loop_of_unknown_length_stays_unknown():
  mesh = make_mesh(a=8)

  def f(x):
    return lax.while_loop(
      lambda c: jnp.sum(c) < 100, lambda c: c + lax.psum(c, "a"), x
    )

  _, compiled = compile_mapped(f, mesh, jnp.ones(4))
  made = compiled_ledger.collectives(hlo.parse(compiled.as_text()), mesh)
  assert [c.count for c in made if c.bytes] == [None]


def test_difference_in_dtype_is_flagged():
  mesh = make_mesh(a=8)
  lowered, compiled = compile_mapped(
    lambda x: lax.psum(x, "a"), mesh, jnp.ones(4, "bfloat16")
  )
  made = compiled_ledger.collectives(hlo.parse(compiled.as_text()), mesh)
  (row,) = compiled_ledger.compare(ledger.collectives(lowered, mesh), made)
  assert row.lowered == {("all_reduce", "bfloat16"): (1, 8, 0)}
  # XLA:CPU has no bfloat16 reduction.
  assert row.compiled == {("all_reduce", "float32"): (1, 16, 0)}
  assert row.differs


@pytest.mark.parametrize(
  ("text", "groups"),
  [
    ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
    ("{}", [[0, 1, 2, 3]]),
    ("[2,2]<=[4]", [[0, 1], [2, 3]]),
    ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
    ("mesh['x'=1,'y'=4] {'y'}", [[0, 1, 2, 3]]),
    ("mesh['x'=2,'y'=2] {'x'}", [[0, 2], [1, 3]]),
    ("mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'x'}", [[0, 1], [2, 3]]),
    ("mesh['x'=2,'y'=2], device_ids=(0,3,1,2) {'y'}", [[0, 3], [1, 2]]),
    ("mesh['x'=4] {'x':(1)2}", [[0, 2], [1, 3]]),
    ("mesh['x'=4] {'x':(2)2}", [[0, 1], [2, 3]]),
  ],
)
def test_replica_groups(text, groups):
  assert groups_of.replica_groups(text, 4) == groups
  assert hlo._value(f"{text}, dimensions={{0}}") == text


def test_devices_in_the_order_of_three_dims():
  """Dims of sizes 2, 3 and 4, of which the first becomes the last."""
  found = groups_of.replica_groups("[4,6]<=[2,3,4]T(1,2,0)", 24)
  order = [12 * k + 4 * i + j for i in range(3) for j in range(4)
           for k in range(2)]
  assert found == [order[start : start + 6] for start in range(0, 24, 6)]


def test_permute_is_over_all_axes_along_which_it_moves():
  axes = groups_of.MeshAxes({"a": 2, "b": 3})
  assert axes.of_pairs(np.array([[0, 4]])) == (("a", "b"), 6, None)
  assert axes.of_pairs(np.array([[0, 1], [4, 5]])) == (("b",), 3, None)
  assert axes.of_pairs(np.array([[0, 1], [1, 4]])) == (("a", "b"), 6, None)


@pytest.mark.parametrize(
  "text", ["", "axes[0]", "mesh['x'=4], device_ids=(?) {'x'}"]
)
def test_groups_of_an_unknown_form_are_an_error(text):
  with pytest.raises(ValueError, match="form that the ledger cannot read"):
    groups_of.replica_groups(text, 4)


@pytest.mark.parametrize("devices", [2, 8])
def test_devices_of_another_mesh_are_an_error(devices):
  axes = groups_of.MeshAxes({"a": devices})
  with pytest.raises(ValueError, match="not the program's mesh"):
    axes.of_groups([[0, 1], [2, 3]])
  with pytest.raises(ValueError, match="not the program's mesh"):
    axes.of_pairs(np.array([[0, devices]]))


def test_groups_of_all_devices_and_of_different_sizes():
  axes = groups_of.MeshAxes({"a": 2, "one": 1, "b": 3})
  assert axes.of_groups([]) == (("a", "b"), 6, None)
  assert axes.of_groups([range(6)]) == (("a", "b"), 6, None)
  # StableHLO pads shorter groups with -1.
  assert axes.of_groups([[0, 1, 2, 3], [4, 5, -1, -1]]) == ((), 4, 2)
  assert axes.of_groups([[i] for i in range(6)]) == ((), 1, None)
  alone = groups_of.MeshAxes({}, counted=False)
  assert alone.of_groups([]) == ((), None, None)


@pytest.mark.quick
def test_product_flops_and_trips():
  w = jnp.ones((6, 16, 16))

  def f(x):
    return lax.scan(lambda c, w: (c @ w, None), x, w)[0]

  compiled = users.compiled(jax.jit(f).lower(jnp.ones((32, 16))))
  module = hlo.parse(compiled.as_text())
  schedule = overlap.ScheduledProgram(
    module, make_mesh(a=1), DEVICES["v5p"], lambda _: 0.0
  )
  assert schedule.total().flops == 6 * 2 * 32 * 16 * 16


@pytest.mark.parametrize(
  ("size", "outputs", "window", "options", "pairs"),
  [
    (8, 6, 3, {}, 18),  # no padding: every pair counts
    (8, 8, 3, {"padding": 1}, 22),  # two pairs are outside
    (1, 6, 6, {"padding": 5}, 6),  # a batch dim written as a window
    (8, 3, 2, {"stride": 3}, 6),
    (4, 7, 1, {"base_dilation": 2}, 4),  # holes are not multiplied
    (8, 4, 3, {"window_dilation": 2}, 12),
  ],
)
def test_pairs_of_a_convolution(size, outputs, window, options, pairs):
  defaults = dict(stride=1, padding=0, base_dilation=1, window_dilation=1)
  count = roofline._valid_pairs(size, outputs, window, **(defaults | options))
  assert count == pairs


def test_memory_equals_the_xla_analysis_to_the_byte():
  mesh = make_mesh(a=8)
  sharded = jax.sharding.NamedSharding(mesh, P("a"))
  whole = jax.sharding.NamedSharding(mesh, P())
  x = jax.ShapeDtypeStruct((16, 4), "float32", sharding=sharded)
  y = jax.ShapeDtypeStruct((4,), "bfloat16", sharding=whole)
  compiled = users.compiled(jax.jit(
    lambda x, y: (x * 2, jnp.sort(x @ y.astype(x.dtype))), donate_argnums=0
  ).lower(x, y))
  parts = memory.memory(compiled, {"x": x, "y": y})
  assert parts.arguments == {"x": 2 * 4 * 4, "y": 4 * 2}
  # Bytes of no named argument are padding.
  assert memory.memory(compiled, {"x": x}).padding == parts.padding + 4 * 2
  analysis = compiled.memory_analysis()
  assert parts.total == (
    analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    - analysis.alias_size_in_bytes + analysis.temp_size_in_bytes
    + analysis.generated_code_size_in_bytes
  )


@pytest.mark.parametrize(("groups", "options"), [
  ({}, {}),
  ({}, {"window_strides": (2, 1), "padding": ((1, 2), (0, 0))}),
  ({}, {"rhs_dilation": (2, 2)}),
  ({}, {"lhs_dilation": (1, 3), "padding": ((0, 0), (2, 1))}),
  ({"feature_group_count": 3}, {}),
  ({"batch_group_count": 2}, {"padding": ((1, 1), (1, 1))}),
], ids=str)
def test_flops_of_a_convolution_equal_the_xla_analysis(groups, options):
  """Feature groups narrow the kernel, batch groups the pairs of examples."""
  features = 6 // groups.get("feature_group_count", 1)
  x = jnp.ones((4, 7, 8, 6))
  w = jnp.ones((3, 2, features, 12))
  compiled = users.compiled(jax.jit(lambda x, w: lax.conv_general_dilated(
    x, w, **({"window_strides": (1, 1), "padding": "VALID"} | options),
    dimension_numbers=("NHWC", "HWIO", "NHWC"), **groups,
  )).lower(x, w))
  module = hlo.parse(compiled.as_text())
  found = [
    roofline._product_flops(computation, instruction)
    for computation in module.computations.values()
    for instruction in computation.instructions
    if instruction.opcode == "convolution"
  ]
  assert found == [pytest.approx(compiled.cost_analysis()["flops"])]


def test_loop_of_unknown_length_counts_once():
  w = jnp.ones((16, 16))
  compiled = users.compiled(jax.jit(
    lambda x, n: lax.fori_loop(0, n, lambda _, x: x @ w, x)
  ).lower(jnp.ones((32, 16)), 3))
  schedule = overlap.ScheduledProgram(
    hlo.parse(compiled.as_text()), make_mesh(a=1), DEVICES["v5p"],
    lambda _: 0.0,
  )
  assert schedule.total().flops == 2 * 32 * 16 * 16


def test_batch_groups_of_a_convolution_are_counted_once():
  """Equals XLA's analysis before XLA:CPU rewrites the groups."""
  text = """HloModule m

ENTRY %main (a: f32[4,5,5,6], b: f32[3,3,6,8]) -> f32[2,3,3,8] {
  %a = f32[4,5,5,6]{3,2,1,0} parameter(0)
  %b = f32[3,3,6,8]{3,2,1,0} parameter(1)
  ROOT %c = f32[2,3,3,8]{3,2,1,0} convolution(%a, %b), window={size=3x3}, WHAT
}
""".replace("WHAT", "dim_labels=b01f_01io->b01f, batch_group_count=2")
  lowered = jax.jit(lambda a, b: lax.conv_general_dilated(
    a, b, (1, 1), "VALID", batch_group_count=2,
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
  )).lower(jnp.ones((4, 5, 5, 6)), jnp.ones((3, 3, 6, 8)))
  computation = hlo.parse(text).computations["main"]
  found = roofline._product_flops(computation, computation.root)
  assert found == lowered.cost_analysis()["flops"] == 2 * (2 * 3 * 3 * 8) * 54
