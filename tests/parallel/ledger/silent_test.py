"""Zero is printed only for programs in which every instruction is understood.

A property over the programs of these tests, and over programs in which one
instruction has been replaced by one that no table knows.
"""

import functools
import pathlib
import random
import re

import jax
from jax.experimental import io_callback
import jax.numpy as jnp
import pytest

from parallel.ledger import hlo, silent
from parallel.ledger.expectations import assert_sends
from parallel.ledger.reading import read
from parallel.ledger.sends import report
from tests import users
from tests.parallel.ledger import overlap_test, reading_test

FOLDER = pathlib.Path(__file__).parent
COLLECTIVES = (
  r"\b(all[-_]reduce|all[-_]gather|reduce[-_]scatter|(ragged[-_])?"
  r"all[-_]to[-_]all|collective[-_](permute|broadcast))(-start)?\"?\("
)


def compiled(f, *shapes):
  args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
  return users.compiled(jax.jit(f).lower(*args)).as_text()


@functools.cache
def silently():
  """Loops, branches, sorts and a library's custom call, without collectives."""
  def f(x):
    def body(_, x):
      return jax.lax.cond(x.sum() > 0, jnp.sort, jnp.cos, x @ x)

    x = jnp.linalg.qr(jax.lax.fori_loop(0, 3, body, x))[0]
    return jax.lax.top_k(x, 2), jnp.fft.fft(x).real

  return compiled(f, (8, 8))


@functools.cache
def training():
  f, args = reading_test.step()
  return users.compiled(f.lower(*args)).as_text()


PROGRAMS = {
  "no collectives": silently, "training": training,
  "scheduled": (FOLDER / "scheduled.hlo.txt").read_text,
  "overlap": lambda: overlap_test.SCHEDULED,
  "host copies": lambda: overlap_test.COPIES,
  **{
    path.name: path.read_text
    for path in sorted((FOLDER / "versions").glob("*-shardy.*.txt"))
  },
}


def shown(found):
  """Returns a program's report as text, and its totals."""
  (row,) = report.readings_as_data({"it": found}).values()
  parts = report.report({"it": found}).parts
  texts = [p if isinstance(p, str) else f"{p.title} {p.cells()}" for p in parts]
  return "\n".join(texts), row["totals"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_the_tests_are_understood(name):
  text = PROGRAMS[name]()
  found = read(text)
  what = {u.what for u in found.unknown}
  # A StableHLO text may have operations that the partitioner replaces.
  assert what <= {"automatic partitioning by XLA"}
  assert not what or "stablehlo" in name
  assert bool(found.executed) == bool(re.search(COLLECTIVES, text))
  printed, totals = shown(found)
  assert ("sends nothing." in printed) == (
    not found.executed and not found.unknown
  )
  unknown = totals["unknown"]["number"] - len(found.unknown)
  assert unknown == sum(e.count is None for e in found.entries)


def replaced(line, instruction, kind):
  """Returns an instruction's line with another operation and attributes."""
  opcode, _, attributes = kind.partition("()")
  before = f" {instruction.opcode}({instruction.literal})"
  assert before in line
  head = line[: line.index(before)]
  return f"{head} {opcode}({instruction.literal}){attributes}"


# Operations that are replaced; their results have one array.
REPLACED = ("add", "copy", "multiply", "fusion", "compare", "bitcast", "slice")
UNKNOWN = [
  "  a line of another syntax", "frobnicate()", "all-exchange-start()",
  'custom-call(), custom_call_target="pfft3d"',
  'custom-call(), custom_call_target="te_gemm_v2_ffi", '
  "backend_config={collective_op = 1 : i64}",
  'custom-call(), custom_call_target="lapack_sgesdd_ffi", '
  "custom_call_has_side_effect=true",
  'custom-call(), custom_call_target="tpu_custom_call", '
  'backend_config={"custom_call_config":{"has_communication":true}}',
  'custom-call-start(), custom_call_target="my_all_reduce"',
  "send(), channel_id=1", "recv(), channel_id=1, is_host_transfer=true",
]


@pytest.mark.parametrize("kind", UNKNOWN)
@pytest.mark.parametrize("name", ["no collectives", "host copies"])
def test_unknown_instruction_is_never_zero(name, kind):
  """In 20 texts, one instruction of any computation is replaced."""
  lines = list(hlo.text_lines(PROGRAMS[name]()))
  parsed = {
    index: hlo._instruction(match) for index, line in enumerate(lines)
    if (match := hlo._INSTRUCTION.match(line))
  }
  index = random.Random(f"{name} {kind}").choice([
    index for index, x in parsed.items() if x.opcode in REPLACED
  ])
  if kind in UNKNOWN[:1]:
    lines.insert(index, kind)
  else:
    lines[index] = replaced(lines[index], parsed[index], kind)
  found = read("\n".join(lines))
  (unknown,) = found.unknown
  assert unknown.name == ("" if kind in UNKNOWN[:1] else parsed[index].name)
  printed, totals = shown(found)
  assert "sends nothing" not in printed
  assert "may communicate, not counted" in printed
  assert totals["unknown"] == {
    "number": 1, "bytes": None, "wire_bytes": None, "seconds": None,
  }
  with pytest.raises(AssertionError, match="may communicate and is not"):
    assert_sends("\n".join(lines), expect={})
  if unknown.target:
    assert_sends("\n".join(lines), expect={}, silent=[unknown.target])


_LOST = "all-reduce in a computation that is not followed"


@pytest.mark.parametrize(("inner", "outer", "what"), [
  *((f"  ROOT %r = f32[4] {inner}", outer, _LOST) for inner, outer in (
    ("call(%p), to_apply=%sent", "async-start(%x), calls=%one"),
    ("call(%p), to_apply=%sent", "fusion-start(%x), calls=%one"),
    ("fusion(%p), kind=kCustom, calls=%sent", "while-start(%x), body=%one"),
    ("negate(%p)", 'custom-call(%x), custom_call_target="TopK", '
     "called_computations={%sent}"),
    ("negate(%p)", "map(%x), dimensions={0}, to_apply=%sent"),
    ("negate(%p)", "fusion(%x), calls=%link"),
  )),
  ("  ROOT %r = f32[4] negate(%p)", "send-start(%x), channel_id=1",
   "send to an unknown place"),
  ("  %q = q7[4] parameter(1)\n  ROOT %r = q7[4] all-gather(%q)",
   "fusion(%x), calls=%one", "all-gather of operands of an unknown type"),
])
def test_collective_that_is_not_counted_is_unknown(inner, outer, what):
  found = read(f"""HloModule m, num_partitions=2

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

%sent (s: f32[4]) -> f32[4] {{
  %s = f32[4] parameter(0)
  ROOT %ar = f32[4] all-reduce(%s), replica_groups={{}}, to_apply=%add
}}

%link (l: f32[4]) -> f32[4] {{
  %l = f32[4] parameter(0)
  ROOT %al = f32[4] all-reduce(%l), replica_groups={{}}, to_apply=%add,
    frontend_attributes={{chain_id="3"}}
}}

%one (p: f32[4]) -> f32[4] {{
  %p = f32[4] parameter(0)
{inner}
}}

ENTRY %main (x: f32[4]) -> f32[4] {{
  %x = f32[4] parameter(0)
  ROOT %y = f32[4] {outer}
}}
""")
  assert not found.executed
  assert [u.what for u in found.unknown] == [what]


@pytest.mark.parametrize("operation", [
  "stablehlo.custom_call @pfft3d(%arg0) : (tensor<4xf32>) -> tensor<4xf32>",
  "stablehlo.custom_call @lapack_f_ffi(%arg0) {has_side_effect = true} : "
  "(tensor<4xf32>) -> tensor<4xf32>",
  'stablehlo.custom_call @tpu_custom_call(%arg0) {backend_config = '
  '"{\\22custom_call_config\\22: {\\22has_communication\\22: true}}"} : '
  "(tensor<4xf32>) -> tensor<4xf32>",
  '"stablehlo.send"(%arg0, %t) {channel_handle = #stablehlo.channel_handle<'
  "handle = 1, type = 1>} : (tensor<4xf32>, !stablehlo.token) -> "
  "!stablehlo.token",
])
def test_unknown_operation_of_stablehlo_is_never_zero(operation):
  found = read(f"""module @m {{
  func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {{
    %t = stablehlo.create_token : !stablehlo.token
    %0 = {operation}
    return %arg0 : tensor<4xf32>
  }}
}}
""")
  assert len(found.unknown) == 1
  assert "sends nothing" not in shown(found)[0]


def test_automatic_partitioning_is_unknown():
  """Unless all operations are in regions that are manual over all axes."""
  f, args = reading_test.step()
  (unknown,) = read(f.lower(*args).as_text()).unknown
  assert unknown.what == "automatic partitioning by XLA"
  mesh = jax.make_mesh((2, 4), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2)
  mapped, other = (
    jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
    for spec in map(jax.sharding.PartitionSpec, "ab", "ba")
  )

  def lowered(f, spec, **options):
    shardings = [
      jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
      for axes in (spec, options.get("out_shardings", ""))
    ]
    if options:
      options["out_shardings"] = shardings[1]
    x = jax.ShapeDtypeStruct(
      (8, 8), "float32", sharding=shardings[0] if spec else None
    )
    return jax.jit(f, **options).lower(x)

  for f, spec, options in (
    (mapped, "ab", {}), (mapped, "", {}),
    (mapped, "ab", {"out_shardings": "ab"}),
    (lambda x: mapped(jax.jit(mapped)(x)), "ab", {}),
  ):
    text = lowered(f, spec, **options).as_text()
    assert "sends nothing." in shown(read(text))[0]
  for f, spec, options in (
    (mapped, "ba", {}), (lambda x: mapped(x.T), "ab", {}),
    (lambda x: jnp.cos(mapped(x)), "ab", {}),
    (mapped, "ab", {"out_shardings": ""}),
    (lambda x: jax.jit(other)(jax.jit(mapped)(x)), "ab", {}),
    (lambda x: jax.jit(other)(x), "ab", {}),
    (lambda x: (mapped(x), other(x)), "", {}),
  ):
    program = lowered(f, spec, **options)
    # Before the partitioner, in both forms.
    for text in (program.as_text(), program.as_text("hlo")):
      (unknown,) = read(text).unknown
      assert unknown.what == "automatic partitioning by XLA"


@pytest.mark.parametrize(("attributes", "header"), [
  ("channel_id=1, replica_groups={{0}}", ""),
  ("channel_id=1, replica_groups={{0}}", ", num_partitions=2"),
  ("replica_groups={{0},{1, 2}}", ""),
])
def test_groups_of_replicas_are_not_of_one_device(attributes, header):
  """Each has all partitions, whose number may be unknown."""
  text = f"""HloModule m{header}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

ENTRY %main (x: f32[4]) -> f32[4] {{
  %x = f32[4] parameter(0)
  ROOT %y = f32[4] all-reduce(%x), {attributes}, to_apply=%add
}}
"""
  (entry,) = read(text).entries
  assert entry.bytes == 16
  with pytest.raises(ValueError, match="the text has several programs"):
    read(text + text)


@pytest.mark.parametrize("size", [1, 4, 16])
def test_mesh_of_another_size_is_refused(size):
  mesh = jax.sharding.AbstractMesh((size,), ("x",))
  f, args = reading_test.step()
  lowered = f.lower(*args)
  for text in (lowered.as_text(), users.compiled(lowered).as_text()):
    with pytest.raises(ValueError, match=r"not the program's mesh|was lowered"):
      read(text, mesh=mesh)
  text = """module @m attributes {mhlo.num_partitions = 8 : i32} {
  func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {
    return %a : tensor<4xf32>
  }
}
"""
  with pytest.raises(ValueError, match="not the program's mesh"):
    read(text, mesh=mesh)


def test_targets_of_libraries_are_silent():
  lapack = pytest.importorskip("jaxlib.cpu._lapack")
  for target in lapack.registrations():
    assert silent.is_silent_call(target, False, ""), target
    assert not silent.is_silent_call(target, True, ""), target
  # Kernels of this project; to import them compiles them.
  kernels = [
    name for path in pathlib.Path("parallel/kernels").rglob("*.py")
    for name in re.findall(r'calls\.register_kernel\("(\w+)"', path.read_text())
  ]
  assert len(kernels) == 3
  for target in kernels:
    assert silent.is_silent_call(target, False, ""), target
  for target in ("", "cusolvermp_potrf_ffi", "__nccl$x", "mosaic_gpu_v2"):
    assert not silent.is_silent_call(target, False, "")


def test_callback_to_the_host_is_silent():
  def f(x):
    io_callback(print, None, x, ordered=True)
    return jax.pure_callback(lambda x: x, x, x)

  x = jax.ShapeDtypeStruct((4,), "float32")
  assert read(jax.jit(f), x).unknown == ()
  assert read(jax.jit(f).lower(x).as_text()).unknown == ()
