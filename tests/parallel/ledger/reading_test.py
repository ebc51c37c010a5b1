"""Any form of a program gives the same ledger, with requested dtypes."""

import pathlib
import re
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.ledger import hlo, reading
from parallel.ledger.groups import MeshAxes, groups_along_dims, inferred_axes
from parallel.ledger.reading import read
from tests import users
from tests.parallel.ledger.overlap_test import COPIES

LAYERS, BATCH, WIDTH, HIDDEN = 3, 32, 64, 256
SIZES = {"data": 2, "fsdp": 2, "tensor": 2}


def line_of(mark):
  """Returns FILE:LINE of the line of this file that ends with a comment."""
  lines = pathlib.Path(__file__).read_text().splitlines()
  (number,) = (n for n, x in enumerate(lines, 1) if x.endswith(f"# {mark}"))
  return f"{__file__}:{number}"


def step(dtype=jnp.bfloat16):
  """Returns a training step with automatic partitioning, and arguments."""
  mesh = jax.make_mesh(
    tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 3
  )

  def layer(x, w):
    hidden = jax.nn.relu(x @ w["up"])  # up
    return x + hidden @ w["down"], None  # down

  def loss(params, x):
    return jnp.mean(lax.scan(layer, x, params)[0].astype(jnp.float32) ** 2)

  def array(shape, *spec):
    return jax.ShapeDtypeStruct(
      shape, dtype, sharding=NamedSharding(mesh, P(*spec))
    )

  params = {
    "up": array((LAYERS, WIDTH, HIDDEN), None, "fsdp", "tensor"),
    "down": array((LAYERS, HIDDEN, WIDTH), None, "tensor", "fsdp"),
  }
  return jax.jit(jax.grad(loss)), (params, array((BATCH, WIDTH), "data"))


@pytest.fixture(scope="module")
def lowered():
  f, args = step()
  return f.lower(*args)


@pytest.fixture(scope="module")
def from_lowered(lowered):
  return read(lowered)


def sums(found, names=None):
  """Returns axes -> (kind, phase) -> (executions, bytes) of a reading."""
  table = {}
  for e in found.entries:
    axes = tuple((names or {}).get(a, a) for a in e.axes)
    row = table.setdefault(axes, {})
    count, size = row.get((e.kind, e.phase), (0, 0))
    row[e.kind, e.phase] = count + e.count, size + e.count * e.bytes
  return table


def test_bytes_equal_the_closed_form(from_lowered):
  # Partial products are summed over the axis of the contracted dim, and
  # gradients over the axis of the batch; XLA:CPU sums them in float32.
  rows = BATCH // 2
  hidden, stream = rows * HIDDEN // 2 * 4, rows * WIDTH // 2 * 4
  weights = WIDTH // 2 * HIDDEN // 2 * 4
  assert dict(from_lowered.axes) == SIZES
  assert sums(from_lowered) == {
    ("fsdp",): {
      ("all_reduce", "forward"): (LAYERS, LAYERS * hidden),
      ("all_reduce", "backward"): (LAYERS, LAYERS * hidden),
    },
    ("tensor",): {
      ("all_reduce", "forward"): (LAYERS, LAYERS * stream),
      ("all_reduce", "backward"): (LAYERS, LAYERS * stream),
    },
    ("data",): {
      ("all_reduce", "backward"): (2 * LAYERS, 2 * LAYERS * weights),
    },
  }


def test_requested_dtype_and_line_of_each_sum(from_lowered):
  assert {e.requested for e in from_lowered.executed} == {"bfloat16"}
  assert {e.entry.dtype for e in from_lowered.executed} == {"float32"}
  assert all(e.promoted and e.dtype_differs for e in from_lowered.executed)
  lines = {
    (e.entry.axes, e.entry.phase, e.source) for e in from_lowered.executed
  }
  up, down = line_of("up"), line_of("down")
  assert lines == {
    (("fsdp",), "forward", up), (("fsdp",), "backward", down),
    (("tensor",), "forward", down), (("tensor",), "backward", up),
    (("data",), "backward", up), (("data",), "backward", down),
  }
  assert any("other dtypes" in note for note in from_lowered.notes)
  f, args = step(jnp.float32)
  assert not any(e.dtype_differs for e in read(f, *args).executed)


def test_all_forms_agree(lowered, from_lowered, tmp_path):
  compiled = users.compiled(lowered)
  text = compiled.as_text()
  file = tmp_path / "step.txt"
  file.write_text(text)
  f, args = step()
  for form in (f.trace(*args), compiled):
    assert sums(read(form)) == sums(from_lowered)
  assert sums(read(f, *args)) == sums(from_lowered)
  # A text names no axes: SIZE@STRIDE.
  names = {"2@4": "data", "2@2": "fsdp", "2@1": "tensor"}
  for form in (text, file, str(file)):
    found = read(form)
    assert list(found.axes) == list(names)
    assert sums(found, names) == sums(from_lowered)
    assert {e.requested for e in found.executed} == {None}
    assert any("SIZE@STRIDE" in note for note in found.notes)
  assert read(compiled).memory["arguments"] == sum(
    x.sharding.shard_shape(x.shape)[0] * np.prod(
      x.sharding.shard_shape(x.shape)[1:]
    ) * 2 for x in jax.tree.leaves(args)
  )


def test_dump_pairs_programs_before_and_after(tmp_path, from_lowered):
  code = (
    "import jax; jax.config.update('jax_num_cpu_devices', 8); "
    "from tests.parallel.ledger import reading_test as t; f, a = t.step(); "
    "f.lower(*a).compile()"
  )
  flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
  subprocess.run(
    [sys.executable, "-c", code], check=True, cwd=pathlib.Path.cwd(),
    env={"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
  )
  (name, found), = reading.read_all(tmp_path).items()
  assert re.fullmatch(r"module_\d+\.jit_loss", name)
  assert sums(found) == sums(from_lowered)
  assert {e.requested for e in found.executed} == {"bfloat16"}
  # Without the program before optimizations, dtypes are unknown, never wrong.
  (before,) = tmp_path.glob("*before_optimizations.txt")
  before.unlink()
  assert {e.requested for e in read(tmp_path).executed} == {None}


def write_dump(folder, name, platform, text):
  (folder / f"{name}.{platform}after_optimizations.txt").write_text(text)
  (folder / f"{name}.before_optimizations.txt").write_text(text)


def test_dump_of_several_programs(tmp_path):
  text = (
    "HloModule m\n\nENTRY %main (x: f32[4]) -> f32[4] {\n"
    "  ROOT %x = f32[4] parameter(0)\n}\n"
  )
  names = ["module_9999.jit_f", "module_10000.jit_f.g", "module_10001.jit_f"]
  platforms = ["cpu_", "sm_9.0_gpu_", ""]
  for name, platform in zip(names, platforms, strict=True):
    write_dump(tmp_path, name, platform, text)
  found = reading.read_all(tmp_path)
  assert list(found) == names  # in the order of compilation
  assert all("not known" not in n for r in found.values() for n in r.notes)
  with pytest.raises(ValueError, match="has 3: "):
    read(tmp_path)
  (tmp_path / f"{names[0]}.gpu_after_optimizations.txt").write_text(text)
  with pytest.raises(ValueError, match="two programs named module_9999"):
    reading.read_all(tmp_path)


def test_lines_of_older_texts_and_dtypes_that_are_not_unique():
  place = 'metadata={op_name="f/psum" source_file="a.py" source_line=7}'
  text = (
    "HloModule m, num_partitions=2\n\n%add (a: f32[], b: f32[]) -> f32[] {\n"
    "  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
    "  ROOT %c = f32[] add(%a, %b)\n}\n\n"
    "ENTRY %main (x: f32[4]) -> f32[4] {\n  %x = f32[4] parameter(0)\n"
    "  ROOT %r = f32[4] all-reduce(%x), replica_groups={{0,1}}, "
    f"to_apply=%add, {place}\n}}\n"
  )
  module, mesh = hlo.parse(text), AbstractMesh((2,), ("a",))

  def requested(lines):
    before = "".join(f"  %y{i} = {x}, {place}\n" for i, x in enumerate(lines))
    (found,) = reading._of_module(module, text, before, mesh).executed
    assert found.source == "a.py:7"
    return found.requested

  assert requested(["bf16[4] add(%x, %x)"]) == "bfloat16"
  assert requested(["bf16[4] add(%x, %x)", "f32[4] add(%x, %x)"]) is None


def test_collective_without_a_line_has_that_of_its_first_use():
  place = 'metadata={op_name="f/mul" source_file="a.py" source_line=7}'
  text = (
    "HloModule m, num_partitions=2\n\n"
    "ENTRY %main (x: f32[4]) -> f32[8] {\n  %x = f32[4] parameter(0)\n"
    "  %g = f32[8] all-gather(%x), replica_groups={{0,1}}, dimensions={0}, "
    'metadata={op_name="x"}\n'
    f"  %n = f32[4] negate(%x), {place.replace('7', '6')}\n"
    "  %c = f32[8] copy(%g)\n"
    f"  ROOT %r = f32[8] multiply(%c, %c), {place}\n}}\n"
  )
  (found,) = read(text).executed
  assert found.source == "a.py:7"
  (found,) = read(text.replace(place, 'metadata={op_name="f/mul"}')).executed
  assert found.source == ""


def test_largest_mesh_that_a_text_names_is_used():
  meshes = '<["b"=2]>, <["data"=4, "model"=2]>, <["a"=4]>'
  head = f"HloModule m, attributes={{{meshes}}}"
  text = (
    f"{head}\n\nENTRY %main (x: f32[4]) -> f32[4] {{\n"
    "  ROOT %x = f32[4] parameter(0)\n}\n"
  )
  assert dict(read(text).axes) == {"data": 4, "model": 2}


def test_donated_results_take_no_further_memory():
  f = jax.jit(lambda x: x + 1, donate_argnums=0)
  x = jax.ShapeDtypeStruct((1024,), "float32")
  assert read(f, x).memory["results"] == 0
  assert read(jax.jit(lambda x: x + 1), x).memory["results"] == 4096


def test_operand_that_is_moved_has_the_dtype_before_a_cast():
  # A gather moves an operand of the product, not its result.
  mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
  w = jax.ShapeDtypeStruct(
    (64, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("x"))
  )
  x = jax.ShapeDtypeStruct(
    (8, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P())
  )

  def product(x, w):
    return lax.dot(x, w, preferred_element_type=jnp.float32)

  replicated = NamedSharding(mesh, P())
  gathered = jax.jit(
    lambda x, w: product(x, lax.with_sharding_constraint(w, replicated))
  )
  (found,) = read(gathered, x, w).executed
  assert (found.entry.kind, found.requested) == ("all_gather", "bfloat16")


def test_explicit_sum_has_its_line():
  mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

  def f(x):
    x = lax.psum(x, "b")
    return lax.psum(x.astype(jnp.float32), "a")  # wide

  shaped = jax.shard_map(f, mesh=mesh, in_specs=P("a", "b"), out_specs=P())
  found = read(jax.jit(shaped), jax.ShapeDtypeStruct((8, 16), jnp.bfloat16))
  wide = [e for e in found.executed if e.source == line_of("wide")]
  assert [(e.entry.axes, e.requested, e.entry.bytes) for e in wide] == [
    (("a",), "float32", 2 * 8 * 4)
  ]
  assert {e.requested for e in found.executed} == {"float32", "bfloat16"}


def test_ragged_exchange_counts_its_operand():
  mesh = AbstractMesh((4,), ("a",))
  zeros = (jnp.zeros(4, jnp.int32),) * 4
  f = jax.jit(jax.shard_map(
    lambda x: lax.ragged_all_to_all(x, x, *zeros, axis_name="a"), mesh=mesh,
    in_specs=P("a"), out_specs=P("a"), check_vma=False,
  ))
  x = jax.ShapeDtypeStruct((64, 8), jnp.bfloat16)
  text = f.trace(x).lower(lowering_platforms=("tpu",)).as_text(debug_info=True)
  (found,) = read(text).executed  # StableHLO
  assert (found.entry.kind, found.entry.axes) == ("ragged_all_to_all", ("a",))
  assert found.entry.at_most
  assert found.entry.bytes == found.entry.wire_bytes_ring == 64 // 4 * 8 * 2
  sizes = ", ".join(f"%s.{i}" for i in range(4))
  compiled = (
    "HloModule m, is_scheduled=true, num_partitions=4\n\n"
    "ENTRY %main (x: bf16[16,8]) -> bf16[16,8] {\n"
    "  %x = bf16[16,8] parameter(0)\n  %y = bf16[16,8] parameter(1)\n"
    + "".join(f"  %s.{i} = s32[4] parameter({2 + i})\n" for i in range(4))
    + f"  ROOT %r = bf16[16,8] ragged-all-to-all(%x, %y, {sizes}), "
    "replica_groups={{0,1,2,3}}\n}\n"
  )
  (found,) = read(compiled).executed
  assert found.entry.kind == "ragged_all_to_all"
  assert found.entry.bytes == 16 * 8 * 2
  # XLA:CPU does not compile it.
  on_cpu = jax.make_mesh(
    (4,), ("a",), (AxisType.Auto,), devices=jax.devices()[:4]
  )
  f = jax.jit(jax.shard_map(
    lambda x: lax.ragged_all_to_all(x, x, *zeros, axis_name="a"), mesh=on_cpu,
    in_specs=P("a"), out_specs=P("a"), check_vma=False,
  ))
  lowered = read(f, x)
  assert [e.kind for e in lowered.entries] == ["ragged_all_to_all"]
  assert lowered.unknown == ()
  assert "XLA cannot compile it here: UNIMPLEMENTED" in lowered.notes[-1]


def entry(*lines, head="HloModule m", root="ROOT %z = f32[4] negate(%x)"):
  """Returns the text of a program with these instructions."""
  return "\n".join([
    head, "", "%add (a: f32[], b: f32[]) -> f32[] {",
    "  %a = f32[] parameter(0)", "  %b = f32[] parameter(1)",
    "  ROOT %c = f32[] add(%a, %b)", "}", "",
    "ENTRY %main (x: f32[4]) -> f32[4] {", "  %x = f32[4] parameter(0)",
    "  %t = token[] after-all()", *lines, f"  {root}", "}", "",
  ])


@pytest.mark.parametrize("quote", ['"', ""])
def test_sends_between_devices_are_permutes(quote):
  """A receive and the ends of a pair send nothing."""
  pairs = f"{quote}{{{{0,1}},{{1,2}}}}{quote}"
  attributes = f"{{_xla_send_recv_source_target_pairs={pairs}}}"
  more = f"channel_id=1, frontend_attributes={attributes}"
  found = read(entry(
    f"  %r = (f32[4], u32[], token[]) recv(%t), {more}",
    f"  %s = (f32[4], u32[], token[]) send(%x, %t), {more}",
    "  %n = f32[4] negate(%x)",
    "  %sd = token[] send-done(%s), channel_id=1",
    "  %rd = (f32[4], token[]) recv-done(%r), channel_id=1",
  ))
  (sent,) = found.executed
  assert (sent.entry.kind, sent.entry.over, sent.entry.bytes) == (
    "permute", "3@1", 16
  )
  assert (sent.done, sent.between, found.unknown) == ("sd", ("n",), ())


@pytest.mark.parametrize(("kind", "target", "expected"), [
  ("ALL_REDUCE", '"{1,2}x{0:3}"', ("all_reduce", 2, 16.0)),
  ("ALL_GATHER", "{{1,2,3},{4,5,6}}", ("all_gather", 3, 32.0)),
  ("REDUCE_SCATTER", '"{1,2,3,4}x{0:3}"', ("reduce_scatter", 4, 12.0)),
  ("ONE_TO_ONE", "{{100->200},{200->100}}", ("permute", None, 16.0)),
  ("ALL_TO_ALL", "{{1,2},{3,4,5}}", ("all_to_all", None, None)),
])
def test_traffic_between_slices_is_counted(kind, target, expected):
  """Each slice has a program, which sends by the host's runtime."""
  more = (
    "is_host_transfer=true, frontend_attributes={"
    '_xla_host_transfer_handler_name="xla_megascale_runtime",'
    f'_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}'
  )
  found = read(entry(
    f"  %s = (f32[4], u32[], token[]) send(%x, %t), {more}",
    f"  %r = (f32[4], u32[], token[]) recv(%t), {more}",
    f"  %sd = token[] send-done(%s), {more}",
    head="HloModule m, num_partitions=4",
  ))
  (sent,) = found.entries
  assert (sent.kind, sent.group_size, sent.wire_bytes_ring) == expected
  assert (sent.over, sent.bytes, found.unknown) == ("slices", 16, ())


def test_axes_of_a_slice_have_their_sizes_in_it():
  class Device:
    def __init__(self, number):
      self.slice_index = number

  def mesh(slices):
    devices = np.vectorize(Device, otypes=[object])(np.array(slices))
    names = tuple("abc"[: devices.ndim])
    return type("Mesh", (), {
      "devices": devices, "axis_names": names,
      "shape": dict(zip(names, devices.shape, strict=True)),
    })

  whole = [[[0, 0], [1, 1]], [[0, 0], [1, 1]]]
  assert reading._slice_axis_sizes(mesh(whole), 4) == {"a": 2, "b": 1, "c": 2}
  assert reading._slice_axis_sizes(mesh(whole), 8) == {"a": 2, "b": 2, "c": 2}
  assert reading._slice_axis_sizes(mesh([0, 0, 1, 1]), 2) == {"a": 2}
  # The devices of a slice are no part of the axes.
  assert reading._slice_axis_sizes(mesh([[0, 0], [0, 1]]), 3) == {
    "a": 2, "b": 2
  }
  # A dump names the mesh of all slices.
  text = entry(head="HloModule m, num_partitions=4")
  for names, axes in (('"a"=2, "b"=4', {"4@1": 4}), ('"b"=4', {"b": 4})):
    module = hlo.parse(text)
    assert reading._of_module(module, text, f"<[{names}]>", None).axes == axes


@pytest.mark.parametrize(("head", "groups", "over", "wire"), [
  ("", "{}", "all devices, number unknown", None),
  ("", "", "all devices, number unknown", None),
  (", num_partitions=4", "{}", "4@1", 24.0),
  (", replica_count=2", "{}", "2@1", 16.0),
  ("", "{{0,1},{2,3}}", "2@1", 16.0),
  ("", "{{0,1,2,3},{4,5}}", "2 to 4 devices", 24.0),
  ("", "{{0,1},{2}}", "1 to 2 devices", 16.0),
])
def test_groups_of_an_unknown_number_and_of_different_sizes(
  head, groups, over, wire
):
  groups = f"replica_groups={groups}, " * bool(groups)
  found = read(entry(
    f"  %r = f32[4] all-reduce(%x), {groups}to_apply=%add",
    head=f"HloModule m{head}",
  ))
  (sent,) = found.entries
  assert (sent.over, sent.bytes, sent.wire_bytes_ring) == (over, 16, wire)
  assert sent.at_most == (" to " in over)
  if wire is None:
    with pytest.raises(ValueError, match="needs the number of devices"):
      found.check_timed("--trace")
  else:
    found.check_timed("--trace")


PMAP = """module @f attributes {mhlo.num_partitions = PARTS : i32,
                                 mhlo.num_replicas = REPLICAS : i32} {
  func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {
    %0 = "stablehlo.all_reduce"(%arg0) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %1 = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %1 : tensor<f32>
    }) {replica_groups = dense<GROUPS>} : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""


@pytest.mark.parametrize(("replicas", "groups", "over"), [
  (8, "[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64", "8@1"),
  (8, "[[0, 2], [1, 3], [4, 6], [5, 7]]> : tensor<4x2xi64", "2@2"),
  (8, "> : tensor<0x0xi64", "8@1"),
  (8, "[[0, 1, 2, 3, 4, 5], [6, 7, -1, -1, -1, -1]]> : tensor<2x6xi64",
   "2 to 6 devices"),
  (None, "> : tensor<0x0xi64", "all devices, number unknown"),
])
def test_stablehlo_without_a_mesh(replicas, groups, over):
  text = PMAP.replace("GROUPS", groups).replace("PARTS", "1")
  text = text.replace("REPLICAS", str(replicas))
  if replicas is None:
    text = re.sub(r"attributes \{.*?\} ", "", text, count=1, flags=re.DOTALL)
  found = read(text)
  assert [(e.over, e.bytes) for e in found.entries] == [(over, 16)]
  assert found.unknown == ()
  with pytest.raises(ValueError, match="2 replicas and 4 partitions, which is"):
    read(PMAP.replace("REPLICAS", "2").replace("PARTS", "4").replace(
      "GROUPS", groups
    ))


def test_short_form_is_read():
  """No signatures, some shapes or marks, and instructions on several lines."""
  found = read("""HloModule test
  add {
    a = f32[] parameter(0)
    b = f32[] parameter(1)
    ROOT c = f32[] add(a, b)
  }

  ENTRY main {
    // a comment
    p = f32[4]{0} parameter(0)
    r = f32[4]{0} all-reduce(p), replica_groups={{0,1}}, to_apply=add,
      frontend_attributes={
        sync_collective="true"
      }
    q = f32[2, 2] reshape(p)
    g = f32[8, 2] all-gather(
      q), dimensions={0},
      replica_groups={{0,1}}
    ROOT t = tuple(r, g)
  }
""")
  assert [(e.kind, e.over, e.bytes) for e in found.entries] == [
    ("all_reduce", "2@1", 16), ("all_gather", "2@1", 16),
  ]
  assert found.unknown == ()


def test_instructions_between_start_and_done():
  text = (pathlib.Path(__file__).parent / "scheduled.hlo.txt").read_text()
  found = read(text)
  module = hlo.parse(text)
  order = [
    i.name for c in module.computations.values() for i in c.instructions
  ]
  overlapped = [e for e in found.executed if e.asynchronous]
  assert overlapped
  for e in overlapped:
    start = order.index(e.instruction)
    inside = [order.index(name) for name in e.between]
    assert inside == sorted(inside)
    assert not inside or start < inside[0]
  assert any(e.between for e in overlapped)


def test_copies_between_device_and_host_are_listed():
  found = read(COPIES).host
  size = 2 * 512 * 128
  facts = [(c.to_host, c.bytes, c.count, c.asynchronous) for c in found]
  assert sorted(facts) == [
    (False, 400, 1, False), (False, size, 1, True), (True, size, 4, True),
  ]
  assert {c.instruction for c in found} == {"start", "read", "moved"}


def test_names_may_have_no_mark(lowered):
  text = users.compiled(lowered).as_text()
  assert "%" in text
  marked, plain = read(text), read(text.replace("%", ""))
  assert marked.entries
  assert plain.executed == marked.executed
  of = [
    [i.operands for c in found.module.computations.values()
     for i in c.instructions] for found in (marked, plain)
  ]
  assert of[0] == of[1]
  assert hlo._operands("get-tuple-element", "(f32[4], s32[]) t") == ("t",)
  assert hlo._operands("add", "f32[2,3]{1,0} x, /*index=5*/y.1") == ("x", "y.1")


def test_partitioners_agree(from_lowered):
  """Shardy, the default, and GSPMD, whose programs do not name their mesh."""
  key = "jax_use_shardy_partitioner"
  if not hasattr(jax.config, key):
    pytest.skip("this jax has one partitioner")
  before = getattr(jax.config, key)
  assert before
  jax.config.update(key, False)
  try:
    f, args = step()
    lowered = f.lower(*args)
    assert "sdy." not in lowered.as_text()
    found = read(lowered)
  finally:
    jax.config.update(key, before)
  assert dict(found.axes) == SIZES
  assert sums(found) == sums(from_lowered)
  for each in (found, from_lowered):
    assert {(e.requested, e.source) for e in each.executed} == {
      ("bfloat16", line_of("up")), ("bfloat16", line_of("down")),
    }


@st.composite
def meshes(draw):
  sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
  chosen = st.sets(st.integers(0, len(sizes) - 1))
  return sizes, draw(st.lists(chosen, max_size=4))


@given(meshes())
@settings(max_examples=100)
def test_inferred_axes_describe_all_groups(mesh):
  sizes, collectives = mesh
  count = int(np.prod(sizes))
  devices = np.arange(count)
  groups = [
    groups_along_dims(devices, sizes, sorted(dims)) for dims in collectives
  ]
  axes = inferred_axes(groups, count)
  assert np.prod(list(axes.values())) == count
  lookup = MeshAxes(axes)
  for each, dims in zip(groups, collectives, strict=True):
    found, size, _ = lookup.of_groups(each)
    assert size == np.prod([sizes[d] for d in dims], dtype=int)
    assert np.prod([axes[a] for a in found], dtype=int) == size


def test_groups_that_no_mesh_has_are_one_axis():
  assert inferred_axes([[[0, 1, 3], [2, 4, 5]]], 6) == {"6@1": 6}


@pytest.mark.parametrize(("program", "message"), [
  ("HloModule m\n\nENTRY %main (x: f32[4]) -> f32[4] {\n  %x = f32[4] param",
   "the text"),
  ("HloModule m\n\nENTRY %main (x: f32[4]) -> f32[4] {\n", "ends within"),
  ("no program\nat all", "so it is not a compiled program"),
  ("module @jit_f {\n  nothing\n}\n", "not StableHLO"),
  ("missing.txt", "missing.txt"),
  ("HloModule m, num_partitions=1000000\n\nENTRY %main (x: f32[4]) -> f32[4] {"
   "\n  ROOT %x = f32[4] parameter(0)\n}\n", "at most 131,072 devices"),
  (3, "of type int; it must be a jitted function"),
  ("", "so it is not a compiled program"),
  ("x" * 5000, "File name too long"),
  ("HloModule m, replica_count=2, num_partitions=4\n\n"
   "ENTRY %main (x: f32[4]) -> f32[4] {\n  ROOT %x = f32[4] parameter(0)\n}\n",
   "partitions and replicas, which is not supported"),
])
def test_other_input_is_one_line(program, message):
  with pytest.raises(ValueError, match=message) as error:
    read(program)
  assert "\n" not in str(error.value)


def test_truncated_text_is_refused(lowered):
  text = users.compiled(lowered).as_text()
  for size in range(0, len(text) - 2, len(text) // 37):
    with pytest.raises(ValueError):
      read(text[:size] + "\n")


def test_another_mesh_is_refused(lowered):
  with pytest.raises(ValueError, match="it is not the program's mesh"):
    read(lowered, mesh=AbstractMesh((4,), ("a",)))


def test_lines_are_not_those_of_an_equal_program_in_the_cache():
  """The lines differ in another checkout, or if a function has moved."""
  functions = [
    lambda x: lax.psum(x, "a"),  # first
    lambda x: lax.psum(x, "a"),  # second
  ]
  mesh = jax.make_mesh(
    (2,), ("a",), (AxisType.Auto,), devices=jax.devices()[:2]
  )
  for f, mark in zip(functions, ("first", "second"), strict=True):
    made = jax.jit(
      jax.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P())
    )
    (found,) = read(made, jax.ShapeDtypeStruct((4,), jnp.bfloat16)).executed
    assert found.requested == "bfloat16"
    assert found.source == line_of(mark)
  # Other programs do not depend on their lines.
  assert not jax.config.jax_compilation_cache_include_metadata_in_key
