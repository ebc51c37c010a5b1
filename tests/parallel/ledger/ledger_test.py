"""Ledger of lowered programs whose collectives are known."""

import functools

import jax
from jax import lax
from jax.extend.mlir import ir
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.ledger import ledger, operations


def make_mesh(**sizes):
  return jax.make_mesh(
    tuple(sizes.values()),
    tuple(sizes),
    axis_types=(AxisType.Auto,) * len(sizes),
  )


def entries_of(f, mesh, *args, in_specs, out_specs):
  mapped = jax.shard_map(
    f, mesh=mesh, in_specs=in_specs, out_specs=out_specs
  )
  return ledger.collectives(jax.jit(mapped).lower(*args), mesh)


@pytest.mark.quick
def test_every_kind_axis_dtype_and_shape():
  mesh = make_mesh(a=2, b=4, one=1)
  x = jnp.ones((8, 16), jnp.bfloat16)

  def program(x):  # [4, 4] on a device
    y = lax.psum(x, "a")
    z = lax.psum(x.astype(jnp.float32), ("a", "b"))
    scattered = lax.psum_scatter(x, "b", scatter_dimension=0, tiled=True)
    gathered = lax.all_gather(x, "b", axis=0, tiled=True, to="invarying")
    swapped = lax.all_to_all(x, "b", 0, 1, tiled=True)
    moved = lax.ppermute(x, "a", [(0, 1)])
    largest = lax.pmax(x, "b")
    alone = lax.psum(x, "one")
    empty = lax.psum(x[:, :0], "b")
    parts = (y, z, scattered, gathered, swapped, moved, largest, alone, empty)
    return sum(p.astype(jnp.float32).sum() for p in parts)[None, None]

  found = entries_of(
    program, mesh, x, in_specs=P("a", "b"), out_specs=P("a", "b")
  )
  assert [
    (c.kind, c.axes, c.dtype, c.shape, c.reduction, c.bytes) for c in found
  ] == [
    ("all_reduce", ("a",), "bfloat16", (4, 4), "add", 32),
    ("all_reduce", ("a", "b"), "float32", (4, 4), "add", 64),
    ("reduce_scatter", ("b",), "bfloat16", (4, 4), "add", 32),
    ("all_gather", ("b",), "bfloat16", (4, 4), None, 32),
    ("all_to_all", ("b",), "bfloat16", (4, 4), None, 32),
    ("permute", ("a",), "bfloat16", (4, 4), None, 32),
    ("all_reduce", ("b",), "bfloat16", (4, 4), "max", 32),
    ("all_reduce", (), "bfloat16", (4, 4), "add", 0),
    ("all_reduce", ("b",), "bfloat16", (4, 0), "add", 0),
  ]
  assert {c.phase for c in found} == {"forward"}
  wire = {(c.kind, c.axes): c.wire_bytes_ring for c in found if c.bytes}
  assert wire["all_reduce", ("a",)] == 2 * 1 / 2 * 32
  assert wire["all_reduce", ("a", "b")] == 2 * 7 / 8 * 64
  assert wire["all_gather", ("b",)] == 3 * 32
  assert wire["reduce_scatter", ("b",)] == 3 / 4 * 32
  assert wire["permute", ("a",)] == 32


@pytest.mark.quick
def test_loops_multiply_and_unknown_trip_counts_stay_unknown():
  mesh = make_mesh(a=4)

  def program(x):
    def inner(x, _):
      return lax.pcast(lax.psum(x, "a"), "a", to="varying") * 0.1, None

    def outer(x, _):
      x, _ = lax.scan(inner, x, length=3)
      with jax.named_scope("outer"):
        return lax.ppermute(x, "a", [(i, i ^ 1) for i in range(4)]), None

    x, _ = lax.scan(outer, x, length=5)
    x = lax.fori_loop(2, 9, lambda _, x: lax.pcast(
      lax.pmax(x, "a"), "a", to="varying"), x)
    return lax.while_loop(
      lambda x: lax.psum(x.sum(), "a") < 1e6,
      lambda x: 2 * lax.pcast(lax.psum(x, "a"), "a", to="varying"),
      x,
    )

  found = entries_of(
    program, mesh, jnp.ones((8, 2)), in_specs=P("a"), out_specs=P("a")
  )
  known = [(c.kind, c.reduction, c.count) for c in found
           if c.count is not None]
  assert known == [
    ("all_reduce", "add", 15), ("permute", None, 5), ("all_reduce", "max", 7)
  ]
  assert [c.count for c in found].count(None) == 2
  assert found[1].where == "outer"
  with pytest.raises(ValueError, match="unknown number of times"):
    ledger.total(found)
  assert ledger.total(found, kind="permute") == 5 * 2 * 2 * 4


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("remat", [True, False])
def test_phases(inside, remat):
  mesh = make_mesh(a=4)

  def layer(x, w):
    with jax.named_scope("layer"):
      y = lax.pcast(lax.psum(jnp.sin(x * w), "a"), "a", to="varying")
      return jnp.sin(y) * w, None

  def loss(w, x):
    body = jax.checkpoint(layer) if remat else layer
    x = lax.pcast(x, "a", to="varying")
    return lax.psum(lax.scan(body, x, w)[0].sum(), "a")

  mapped = functools.partial(
    jax.shard_map, mesh=mesh, in_specs=(P(None, "a"), P())
  )
  if inside:
    f = mapped(jax.value_and_grad(loss), out_specs=(P(), P(None, "a")))
  else:
    f = jax.value_and_grad(mapped(loss, out_specs=P()))
  lowered = jax.jit(f).lower(jnp.ones((6, 4, 2)), jnp.ones((1, 2)))
  found = [
    c for c in ledger.collectives(lowered, mesh) if c.where == "layer"
  ]
  counts = {
    (phase, rematted): sum(
      c.count for c in ledger.select(found, phase=phase, rematted=rematted)
    )
    for phase in ("forward", "backward")
    for rematted in (False, True)
  }
  assert counts == {
    ("forward", False): 6, ("forward", True): 0,
    ("backward", False): 6, ("backward", True): 6 if remat else 0,
  }


def test_another_mesh_is_an_error():
  mesh = make_mesh(a=4)
  f = jax.shard_map(
    lambda x: lax.psum(x, "a"), mesh=mesh, in_specs=P("a"), out_specs=P()
  )
  lowered = jax.jit(f).lower(jnp.ones(4))
  with pytest.raises(ValueError, match="lowered for the meshes"):
    ledger.collectives(lowered, make_mesh(b=2, c=2))


def test_merging_adds_counts():
  mesh = make_mesh(a=4)
  found = entries_of(
    lambda x: lax.psum(x, "a") + lax.psum(2 * x, "a"),
    mesh, jnp.ones(4), in_specs=P("a"), out_specs=P(),
  )
  assert [c.count for c in found] == [1, 1]
  assert [c.count for c in ledger.merge(found)] == [2]


def varying_sum(x):
  return lax.pcast(lax.psum(x, "a"), "a", to="varying")


def count_while(first, test, step):
  """Loops over one collective, counted by ``first``, ``test``, ``step``."""

  def program(x):
    def body(state):
      return step(state[0]), varying_sum(state[1])

    return lax.while_loop(lambda s: test(s[0]), body, (first, x))[1]

  return program


def changing_bound(x):
  def body(state):
    first, last, x = state
    return first + 1, last - 1, varying_sum(x)

  return lax.while_loop(lambda s: s[0] < s[1], body, (0, 8, x))[2]


U8 = np.uint8


@pytest.mark.parametrize(
  ("program", "expected"),
  [
    (count_while(0, lambda i: i < 9, lambda i: i + 2), 5),
    (count_while(0, lambda i: i <= 8, lambda i: 2 + i), 5),
    (count_while(12, lambda i: i >= 2, lambda i: i - 3), 4),
    (count_while(7, lambda i: i < 5, lambda i: i + 1), 0),
    # The constant is the left operand of the comparison.
    (count_while(0, lambda i: lax.gt(np.int32(9), i), lambda i: i + 2), 5),
    (count_while(0, lambda i: lax.ge(np.int32(8), i), lambda i: i + 2), 5),
    (count_while(9, lambda i: lax.lt(np.int32(0), i), lambda i: i - 3), 3),
    (count_while(0, lambda i: lax.lt(np.int32(9), i), lambda i: i + 2), 0),
    (count_while(U8(0), lambda i: i < U8(200), lambda i: i + U8(2)), 100),
    (lambda x: lax.fori_loop(0, jnp.int32(7), lambda _, x: varying_sum(x), x),
     7),
    # The counter wraps around before 255, so the loop never ends.
    (count_while(U8(0), lambda i: i < U8(255), lambda i: i + U8(2)), None),
    (count_while(0, lambda i: i < 9, lambda i: i - 1), None),
    (count_while(1, lambda i: i < 9, lambda i: i * 2), None),
    (count_while(0, lambda i: i != 9, lambda i: i + 2), None),
    (count_while(0.0, lambda i: i < 9.0, lambda i: i + 1.0), None),
    (count_while(0, lambda i: (i < 9) & (i != 5), lambda i: i + 1), None),
    (changing_bound, None),
  ],
)
def test_trip_count_of_a_while_loop(program, expected):
  found = entries_of(
    program, make_mesh(a=4), jnp.ones(4), in_specs=P("a"), out_specs=P("a")
  )
  assert [c.count for c in found] == [expected]


def test_loop_condition_runs_once_more_than_the_body():
  def condition(state):
    lax.pmax(state[1], "a")
    return state[0] < 3

  def program(x):
    return lax.while_loop(
      condition, lambda s: (s[0] + 1, varying_sum(s[1])), (0, x)
    )[1]

  found = entries_of(
    program, make_mesh(a=4), jnp.ones(4), in_specs=P("a"), out_specs=P("a")
  )
  counts = {c.reduction: c.count for c in found}
  # jax 0.12 removes unused computations of a condition.
  assert counts == {"max": 4, "add": 3} or counts == {"add": 3}


@pytest.mark.parametrize(
  ("branches", "expected"),
  [
    ((varying_sum, lambda x: varying_sum(x + 1)), [1]),
    ((varying_sum, lambda x: x), [None]),
    ((varying_sum, lambda x: varying_sum(varying_sum(x))), [None] * 3),
  ],
)
def test_conditional_counts_only_what_all_branches_send(branches, expected):
  found = entries_of(
    lambda x: lax.cond(x.sum() > 0, *branches, x),
    make_mesh(a=4), jnp.ones(4), in_specs=P("a"), out_specs=P("a"),
  )
  assert [c.count for c in found] == expected


def test_groups_that_match_no_axes_are_listed_without_axes():
  mapped = jax.shard_map(
    lambda x: lax.psum(x, "a", axis_index_groups=[[0, 3], [1, 2]]),
    mesh=(mesh := make_mesh(a=4)),
    in_specs=P("a"), out_specs=P("a"),
    check_vma=False,  # the check refuses such groups
  )
  found = ledger.collectives(jax.jit(mapped).lower(jnp.ones(4)), mesh)
  assert [(c.axes, c.group_size, c.bytes) for c in found] == [((), 2, 4)]


def test_axes_do_not_depend_on_the_order_of_devices():
  devices = np.array(jax.devices()[:8])[::-1].reshape(2, 4)
  mesh = jax.sharding.Mesh(devices, ("a", "b"), (AxisType.Auto,) * 2)

  def program(x):
    x = lax.psum(x, "b")
    return lax.ppermute(x, "a", [(0, 1)])

  found = entries_of(
    program, mesh, jnp.ones((2, 4)), in_specs=P("a", "b"), out_specs=P("a")
  )
  assert [(c.axes, c.group_size) for c in found] == [(("b",), 4), (("a",), 2)]


def test_permute_that_moves_nothing_sends_nothing():
  found = entries_of(
    lambda x: lax.ppermute(x, "a", []) + lax.ppermute(x, "a", [(1, 1)]),
    make_mesh(a=4), jnp.ones(4), in_specs=P("a"), out_specs=P("a"),
  )
  assert [(c.kind, c.axes, c.bytes) for c in found] == [("permute", (), 0)] * 2


def test_phases_of_a_step_that_reduces_its_gradients():
  @jax.custom_vjp
  def reduce(x):
    return lax.psum(x, "a")

  def backward(_, g):  # a separate reduction, in float32
    g = lax.psum(lax.pcast(g, "a", to="varying").astype(jnp.float32), "a")
    return (lax.pcast(g, "a", to="varying").astype(jnp.bfloat16),)

  reduce.defvjp(lambda x: (reduce(x), None), backward)

  def step(w, x):
    def micro(total, x):
      def loss(w):
        return reduce(w * x).astype(jnp.float32)

      loss, grad = jax.value_and_grad(loss)(w)
      return total + grad, loss

    w = lax.pcast(w, "a", to="varying")
    grad, losses = lax.scan(micro, jnp.zeros_like(w), x[0])
    with jax.named_scope("gradients"):
      return lax.psum(grad, "a"), losses

  found = entries_of(
    step, make_mesh(a=4), jnp.ones((), jnp.bfloat16),
    jnp.ones((4, 5), jnp.bfloat16), in_specs=(P(), P("a")),
    out_specs=(P(), P()),
  )
  assert [(c.phase, c.dtype, c.count, c.where) for c in found] == [
    ("forward", "bfloat16", 5, ""),
    ("backward", "float32", 5, ""),
    ("update", "bfloat16", 1, "gradients"),
  ]


@pytest.mark.skipif(
  not hasattr(lax, "psum_scatter_start"), reason="requires jax 0.12"
)
def test_explicit_asynchronous_collective_equals_the_synchronous_one():
  mesh = make_mesh(a=2, b=4)

  def found(scatter):
    return entries_of(
      scatter, mesh, jnp.ones((8, 16), jnp.bfloat16), in_specs=P(None, "a"),
      out_specs=P("b", "a"),
    )

  plain = found(
    lambda x: lax.psum_scatter(
      lax.pcast(x, "b", to="varying"), "b", scatter_dimension=0, tiled=True
    )
  )
  halves = found(
    lambda x: lax.psum_scatter_start(
      lax.pcast(x, "b", to="varying"), "b", scatter_dimension=0, tiled=True
    ).done()
  )
  assert halves == plain
  assert [(c.kind, c.axes, c.shape, c.reduction) for c in halves] == [
    ("reduce_scatter", ("b",), (8, 8), "add")
  ]


def test_unreadable_collective_is_an_error():
  x = jax.ShapeDtypeStruct((16,), jnp.float32)
  call = jax.ffi.ffi_call("my_all_reduce", x)
  with pytest.raises(NotImplementedError, match="my_all_reduce"):
    ledger.collectives(jax.jit(call).lower(x), make_mesh(a=4))


def test_scopes_contain_only_names_of_the_model():
  def layer(x, w):
    with jax.named_scope("layer"):
      x, _ = lax.scan(lambda x, _: (projection(x * w), None), x, length=2)
      return x, None

  @jax.jit
  def projection(x):
    with jax.named_scope("projection"):
      return varying_sum(jnp.sin(x))

  mesh = make_mesh(a=4)
  mapped = jax.shard_map(
    lambda w, x: lax.psum(lax.scan(jax.checkpoint(layer), x, w)[0].sum(), "a"),
    mesh=mesh, in_specs=(P(), P("a")), out_specs=P(),
  )
  lowered = jax.jit(jax.value_and_grad(mapped)).lower(jnp.ones(3), jnp.ones(4))
  scopes = {c.where for c in ledger.collectives(lowered, mesh)}
  # jax 0.10 loses the scope around a scan in a checkpointed function.
  assert {"", "layer/projection"} <= scopes
  assert scopes <= {"", "layer/projection", "layer", "projection"}


def test_partially_manual_region_has_the_same_reduction():
  mesh = make_mesh(a=2, b=2)
  mapped = jax.shard_map(
    lambda x: lax.psum(x, "a"), mesh=mesh, in_specs=P("a"), out_specs=P(),
    axis_names={"a"},
  )
  found = ledger.collectives(jax.jit(mapped).lower(jnp.ones((4, 4))), mesh)
  assert [(c.axes, c.reduction) for c in found] == [(("a",), "add")]


def test_merging_keeps_known_counts():
  entries = [
    ledger.Collective("all_reduce", ("a",), 4, "float32", shape, count,
                      "forward", False, "add", "")
    for shape, count in (((2,), 1), ((2,), None), ((2,), 3), ((3,), 1),
                         ((3,), 4))
  ]
  assert [c.count for c in ledger.merge(entries)] == [4, None, 5]


@pytest.mark.parametrize(("runs", "length", "counts"), [
  ("runs_1_of_2", 4, [2, 2]), ("runs_1_of_2", 3, [None, None]),
  ("runs_2_of_3", 3, [2, None]), ("runs_1_of_1", 3, [3, None]),
])
def test_count_of_a_branch_is_a_whole_number_or_unknown(runs, length, counts):
  """The other branch has no scope unless two halves have it."""
  def sends(x):
    return varying_sum(varying_sum(x))

  def step(x, _):
    def scoped(x):
      with jax.named_scope(runs):
        return varying_sum(x)

    def other(x):
      with jax.named_scope(runs if counts[0] == counts[1] else "other"):
        return sends(x)

    return lax.cond(x.sum() > 0, scoped, other, x), None

  found = entries_of(
    lambda x: lax.scan(step, x, length=length)[0], make_mesh(a=4),
    jnp.ones(4), in_specs=P("a"), out_specs=P("a"),
  )
  # Branches are listed in the order of their index: False, then True.
  assert [c.count for c in found] == [counts[1], counts[1], counts[0]]
  assert all(c.count is None or type(c.count) is int for c in found)


@pytest.mark.parametrize(("reduce", "name"), [
  (lax.psum, "add"), (lax.pmax, "max"), (lax.pmin, "min"),
])
def test_reductions_have_short_names(reduce, name):
  (found,) = entries_of(
    lambda x: reduce(x, "a"), make_mesh(a=4), jnp.ones(4), in_specs=P("a"),
    out_specs=P(),
  )
  assert found.reduction == name


@pytest.mark.parametrize(("text", "name"), [
  ("i1", "bool"), ("i8", "int8"), ("ui8", "uint8"), ("i64", "int64"),
  ("f32", "float32"), ("bf16", "bfloat16"), ("f8E4M3FN", "float8_e4m3fn"),
  ("f4E2M1FN", "float4_e2m1fn"), ("complex<f32>", "complex64"),
  ("complex<f64>", "complex128"),
])
def test_element_types_have_numpy_names(text, name):
  with ir.Context():
    assert operations.dtype_name(ir.Type.parse(text)) == name
  assert jnp.dtype(name)


def test_kernel_declares_its_messages():
  text = (
    '{"name": "k", "sends_over": "a", "messages": "3", "elements": "50", '
    '"dtype": "bfloat16"}'
  )
  assert operations.kernel_sends(text) == ("a", (3, 50), "bfloat16")
  assert operations.kernel_sends(text.replace("sends_over", "x")) is None
  assert operations.kernel_sends("") is None


@pytest.mark.parametrize(("path", "expected"), [
  ("jit(f)/psum", ("update", False, "")),
  ("jit(f)/a/jvp(b)/c/psum", ("forward", False, "a/b/c")),
  ("jit(f)/transpose(jvp(b))/psum", ("backward", False, "b")),
  ("jvp(b)/rematted_computation/c/psum", ("backward", True, "b/c")),
  ("vmap(transpose(jvp(b)))/while/body/closed_call/x",
   ("backward", False, "b")),
  # Programs with a handwritten backward pass.
  ("phase_forward/b/psum", ("forward", False, "phase_forward/b")),
  ("phase_forward/jvp(b)/psum", ("forward", False, "phase_forward/b")),
  ("phase_backward/b/psum", ("backward", False, "phase_backward/b")),
  ("phase_backward/jvp(b)/psum", ("backward", True, "phase_backward/b")),
  ("phase_backward/transpose(jvp(b))/psum",
   ("backward", False, "phase_backward/b")),
])
def test_phase_follows_from_the_name_stack(path, expected):
  assert ledger.parse_name_stack(path) == expected
