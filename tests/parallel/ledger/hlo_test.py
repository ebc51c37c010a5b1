"""Parsed HLO text: trips, shares, attributes; bytes of single operations."""

import dataclasses
from fractions import Fraction
import pathlib

import jax
from jax.sharding import AxisType
import pytest

from parallel.ledger import compiled, hlo, in_place, overlap, roofline
from parallel.plans.hardware.devices import DEVICES

SCHEDULED = (pathlib.Path(__file__).parent / "scheduled.hlo.txt").read_text()


def make_mesh():
  return jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))


# Changes of the text of a loop that counts from 0 to 4 in steps of 1.
ZERO, ONE = "%zero = s32[] constant(0)", "%one = s32[] constant(1)"
FOUR, NEXT = "%four = s32[] constant(4)", "%next = s32[] add(%i, %one)"
LESS = "compare(%j, %four), direction=LT"


@pytest.mark.parametrize(("old", "new", "trips"), [
  ("", "", 4),
  (ZERO, "%zero = s32[] constant(1)", 3),
  (ZERO, "%zero = s32[] constant(4)", 0),
  (ZERO, "%zero = s32[] constant(-2)", 6),
  (ZERO, "%zero = s32[] constant(9)", 0),
  (FOUR, "%four = s32[] constant(-1)", 0),
  (FOUR, "%four = s32[] constant(2.5)", None),
  (ONE, "%one = s32[] constant(3)", 2),
  (ONE, "%one = s32[] constant(0)", None),
  (ONE, "%one = s32[] constant(-1)", None),
  (NEXT, "%next = s32[] add(%one, %i)", 4),
  (NEXT, "%next = s32[] add(%i, %i)", None),
  (NEXT, "%next = s32[] add(%one, %one)", None),
  (NEXT, "%next = s32[] subtract(%i, %one)", None),
  (NEXT, "%next = s32[] negate(%one)", None),
  # Another element of the state than the counter is incremented.
  ("%i = s32[] get-tuple-element(%p), index=0",
   "%i = s32[] get-tuple-element(%p), index=1", None),
  (LESS, "compare(%j, %four), direction=LE", None),
  (LESS, "compare(%four, %j), direction=LT", None),
  (LESS, "compare(%four, %j), direction=GT", 4),
  (LESS, "compare(%j, %four), direction=GT", None),
  (LESS, "compare(%j, %j), direction=LT", None),
  (LESS, "and(%j, %four)", None),
  # Copies of the bound, the start, the step and the counter.
  (FOUR, f"{FOUR.replace('four', 'k')}\n  %four = s32[] copy(%k)", 4),
  (ZERO, f"{ZERO.replace('zero', 'k')}\n  %zero = s32[] copy(%k)", 4),
  (ONE, f"{ONE.replace('one', 'k')}\n  %m = s32[] copy(%k)\n"
   "  %one = s32[] copy(%m)", 4),
  (NEXT, "%ii = s32[] copy(%i)\n  %n = s32[] add(%ii, %one)\n"
   "  %next = s32[] copy(%n)", 4),
  ("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"9"}}',
   9),
  (" tuple(%zero, %x.1, %w.1)", " custom-call(%zero, %x.1, %w.1)", None),
  (" tuple(%next, %x, %w)", " custom-call(%next, %x, %w)", None),
])
def test_trips_follow_from_constants(old, new, trips):
  assert old in SCHEDULED
  module = hlo.parse(SCHEDULED.replace(old, new) if old else SCHEDULED)
  counts = {c.name: count for c, count in module.runs()}
  more = None if trips is None else trips + 1
  assert counts == {"main": 1, "condition": more, "body": trips}
  assert [c.name for c, _ in module.runs("body")] == ["body"]


def instruction(opcode, op_name="", attributes="", **fields):
  values = dict(name="x", shapes=(), operands=(), literal="", root=False)
  return hlo.Instruction(
    opcode=opcode, op_name=op_name, attributes=attributes, **values | fields
  )


@pytest.mark.parametrize(("outside", "branches", "shares"), [
  ("", [["runs_2_of_5"], ["runs_1_of_5", ""], [""]], [2, 1, 2]),
  ("", [[""], ["runs_5_of_5"]], [0, 5]),  # the other branch never runs
  ("", [["runs_1_of_5"], []], [1, 4]),
  # Not exactly one branch without a scope.
  ("", [[""], ["f"]], None), ("", [["runs_1_of_5"], ["runs_4_of_5"]], None),
  ("", [["runs_1_of_5"], [""], [""]], None),
  # Shares of more than all runs, and two shares of one branch.
  ("", [["runs_3_of_5"], ["runs_3_of_5"], [""]], None),
  ("", [["runs_1_of_5", "runs_2_of_5"], [""]], None),
  # Inside of another conditional: the next scope counts.
  ("runs_1_of_2", [["runs_1_of_2/runs_2_of_5"], ["runs_1_of_2"]], [2, 3]),
])
def test_shares_of_branches_follow_from_their_scopes(outside, branches, shares):
  names = [f"b{i}" for i in range(len(branches))]
  conditional = instruction(
    "conditional", outside, f"branch_computations={{%{', %'.join(names)}}}"
  )
  start = hlo.Computation("main", (conditional,))
  module = hlo.Module({"main": start} | {
    name: hlo.Computation(name, tuple(instruction("add", s) for s in scopes))
    for name, scopes in zip(names, branches, strict=True)
  }, "main", True)
  expected = shares and [Fraction(n, 5) for n in shares]
  assert module.branch_shares(conditional) == expected
  # Fractions of one run: only whole numbers are known.
  counts = {c.name: count for c, count in module.runs()}
  assert counts == {"main": 1} | {
    name: share if share in (0, 1) else None
    for name, share in zip(names, expected or [None] * len(names), strict=True)
  }
  # If the branches are alike, the first one represents all of them.
  represented = [c.name for c, _ in module.runs(alike=lambda branches: True)]
  assert represented == ["main", *(names if shares else names[:1])]


@pytest.mark.parametrize("trips", [3, None])
def test_count_in_a_branch_without_a_share_is_unknown(trips):
  """Also in a loop inside it, and if the conditional is inside a loop."""
  loop = (
    f'body=%b, condition=%c, backend_config={{"known_trip_count":{{"n":'
    f'"{trips}"}}}}' if trips else "body=%b, condition=%c"
  )
  names = ["main", "b", "c", "x", "y"]
  bodies = {
    "main": [instruction("while", attributes=loop, operands=("s",))],
    "b": [instruction(
      "conditional", attributes="branch_computations={%x, %y}"
    )],
    "c": [instruction("custom-call", root=True)],
    "x": [instruction("call", attributes="to_apply=%z")],
    "y": [instruction("add")], "z": [instruction("add")],
  }
  module = hlo.Module({
    name: hlo.Computation(name, tuple(body)) for name, body in bodies.items()
  }, "main", True)
  assert module.branch_shares(bodies["b"][0]) is None
  more = trips and trips + 1
  assert dict((c.name, n) for c, n in module.runs()) == dict(
    zip([*names, "z"], [1, trips, more, None, None, None], strict=True)
  )


def test_call_sites_are_counted_separately():
  calls = tuple(
    instruction("call", attributes="to_apply=%f", name=n) for n in "xy"
  )
  module = hlo.Module({
    "main": hlo.Computation("main", calls),
    "f": hlo.Computation("f", (instruction("add"),)),
  }, "main", True)
  assert [(c.name, n) for c, n in module.runs()] == [
    ("main", 1), ("f", 1), ("f", 1)
  ]


def test_attributes_are_words_or_brackets():
  found = instruction("while", attributes=(
    'index=12, dims={{0,1},{2}}, groups=[2,2]<=[4]T(1,0), condition=%c.1, '
    "body=b-2, empty={}, last=x"
  ))
  assert found.attribute("index") == "12"
  assert found.attribute("dims") == "{{0,1},{2}}"
  assert found.attribute("groups") == "[2,2]<=[4]T(1,0)"
  assert found.attribute("empty") == "{}"
  assert found.attribute("last") == "x"
  assert found.attribute("dex") == found.attribute("absent") == ""
  assert found.calls() == ["c.1", "b-2"]
  assert found.calls("body") == ["b-2"]
  assert found.calls("calls") == []


@pytest.mark.parametrize(("text", "dtype", "dims", "size"), [
  ("f32[]", "float32", (), 4), ("bf16[3,5]{1,0}", "bfloat16", (3, 5), 30),
  ("s4[3]", "int4", (3,), 2), ("pred[7]", "bool", (7,), 7),
  ("u8[<=8,2]", "uint8", (8, 2), 16), ("c64[0]", "complex64", (0,), 0),
  ("token[]", "token", (), 0),
])
def test_shapes_are_parsed_with_their_bytes(text, dtype, dims, size):
  (shape,) = hlo._shapes(text)
  assert shape == hlo.Shape(dtype, dims, shape.bits)  # in main memory
  assert (shape.bytes, shape.on_chip) == (size, False)


def test_donated_parameters_are_aliased():
  head = "HloModule m, input_output_alias={ {0}: (3, {}, may-alias), " \
    "{1}: (14, {}) }, is_scheduled=true, x={ {0}: (5, {}) }\n"
  module = hlo.parse(SCHEDULED.replace("HloModule m, is_scheduled=true", head))
  assert module.aliased == {3, 14}
  assert module.scheduled
  assert not hlo.parse(SCHEDULED).aliased
  with pytest.raises(ValueError, match="no ENTRY computation"):
    hlo.parse(SCHEDULED.replace("ENTRY ", ""))


# Operation on f32[64,32] a, f32[2,32] b and s32[2] i -> its bytes, and those of
# a fusion of it, which also reads the indices.
ALL, PART, INDEX = 64 * 32 * 4, 2 * 32 * 4, 2 * 4
OPERATIONS = {
  "f32[2,32] dynamic-slice(%a, %i, %i)": (2 * PART, 2 * PART + INDEX),
  "f32[2,32] slice(%a), slice={[0:2], [0:32]}": (2 * PART, 2 * PART),
  "f32[2,32] gather(%a, %i), offset_dims={1}": (2 * PART, 2 * PART + INDEX),
  "f32[64,32] dynamic-update-slice(%a, %b, %i, %i)": (
    2 * PART, 2 * PART + INDEX
  ),
  "f32[64,32] scatter(%a, %i, %b), to_apply=%add": (
    2 * PART, 2 * PART + INDEX
  ),
  "f32[64,32] negate(%a)": (2 * ALL, 2 * ALL),
  "f32[64,32]{1,0:S(1)} negate(%a)": (ALL, ALL),  # into a TPU's vector memory
  "f32[2,32] add(%b, %b)": (3 * PART, 2 * PART),  # a fusion reads b once
  "f32[64,32] bitcast(%a)": (0, 2 * ALL),
  "f32[64,32] copy-done(%a)": (0, 2 * ALL),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_bytes_of_an_operation(operation, fused):
  parameters = """  %a = f32[64,32]{1,0} parameter(0)
  %b = f32[2,32]{1,0} parameter(1)
  %i = s32[2]{0} parameter(2)
"""
  text = f"""HloModule m, is_scheduled=true

%f (a: f32[64,32], b: f32[2,32], i: s32[2]) -> f32[64,32] {{
{parameters}  ROOT %r = {operation}
}}

ENTRY %main (a: f32[64,32], b: f32[2,32], i: s32[2]) -> f32[64,32] {{
{parameters}  ROOT %o = OPERATION
}}
"""
  shape = operation.partition(" ")[0]
  module = hlo.parse(text.replace("OPERATION", (
    f"{shape} fusion(%a, %b, %i), kind=kLoop, calls=%f" if fused else operation
  )))
  main = module.computations["main"]
  found = roofline.cost(module, main, main.root, DEVICES["v5p"])
  assert found.bytes == OPERATIONS[operation][fused]
  assert found.flops == 0
  assert found.seconds == found.bytes / DEVICES["v5p"].memory_bandwidth


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("bandwidth", [1e9, 1e15])
@pytest.mark.parametrize("fused", [False, True])
def test_product_takes_the_longer_of_compute_and_memory(
  dtype, bandwidth, fused
):
  """The peak is that of the operands' dtype, also within a fusion."""
  product = f"{dtype}[8,16] dot(%a, %b), lhs_contracting_dims={{1}}"
  parameters = f"""  %a = {dtype}[8,32] parameter(0)
  %b = {dtype}[32,16] parameter(1)
"""
  text = f"""HloModule m, is_scheduled=true

%f (a: {dtype}[8,32], b: {dtype}[32,16]) -> {dtype}[8,16] {{
{parameters}  %p = {product}
  ROOT %r = {dtype}[8,16] negate(%p)
}}

ENTRY %main (a: {dtype}[8,32], b: {dtype}[32,16]) -> {dtype}[8,16] {{
{parameters}  ROOT %o = OPERATION
}}
"""
  module = hlo.parse(text.replace("OPERATION", (
    f"{dtype}[8,16] fusion(%a, %b), calls=%f" if fused else product
  )))
  device = dataclasses.replace(DEVICES["h100"], memory_bandwidth=bandwidth)
  main = module.computations["main"]
  found = roofline.cost(module, main, main.root, device)
  size = {"bf16": 2, "f32": 4}[dtype]
  assert found.flops == 2 * 8 * 16 * 32
  assert found.bytes == size * (8 * 32 + 32 * 16 + 8 * 16)
  peak = device.peak({"bf16": "bfloat16", "f32": "float32"}[dtype])
  assert found.seconds == max(found.flops / peak, found.bytes / bandwidth)


def wrapped(inner_name, outer_name):
  """Wraps the first reduction of the program into an asynchronous call."""
  start = next(s for s in SCHEDULED.splitlines() if "all-reduce-start" in s)
  done = next(s for s in SCHEDULED.splitlines() if "all-reduce-done" in s)
  reduction = start.replace("-start", "").replace("jit(f)/jvp(block)", "NAME")
  body = reduction.replace("%start", "ROOT %r").replace("NAME/psum", inner_name)
  return SCHEDULED.replace(
    start, "  %start = f32[1000]{0} async-start(%g), calls=%wrap, "
    f'metadata={{op_name="{outer_name}"}}'
  ).replace(done, done.replace("all-reduce-done", "async-done")).replace(
    "%body (p", "%wrap (g: f32[1000]) -> f32[1000] {\n"
    f"  %g = f32[1000]{{0}} parameter(0)\n{body}\n}}\n\n%body (p"
  )


@pytest.mark.parametrize(("inner", "outer", "where"), [
  ("jit(f)/jvp(block)/psum", "jit(f)/jvp(other)/x", "block"),
  ("", "jit(f)/jvp(other)/psum", "other"),
])
def test_wrapped_collective_has_its_own_name_or_its_wrapper_s(
  inner, outer, where
):
  module = hlo.parse(wrapped(inner, outer))
  first, last = compiled.collectives(module, make_mesh())
  assert (first.kind, first.where, first.phase) == (
    "all_reduce", where, "forward"
  )
  assert (first.axes, first.group_size, first.shape) == (("a",), 8, (1000,))
  assert (last.where, last.phase) == ("", "update")
  first, _ = overlap.ScheduledProgram(
    module, make_mesh(), DEVICES["h100"], lambda _: 1.0
  ).collectives()
  assert first.asynchronous
  # The only instruction between start and done that takes time.
  assert first.between == ("loop",)


def test_longest_instructions_in_flight_are_named():
  """Names the three longest of four, the longest first."""
  lines = [
    f"  %n{size} = f32[{size}]{{0}} negate(%c{size})" for size in (2, 8, 6, 4)
  ]
  constants = [
    f"  %c{size} = f32[{size}]{{0}} constant({{...}})" for size in (2, 8, 6, 4)
  ]
  start = next(s for s in SCHEDULED.splitlines() if "all-reduce-start" in s)
  loop = next(s for s in SCHEDULED.splitlines() if " while(" in s)
  text = SCHEDULED.replace(start, "\n".join([*constants, start, *lines]))
  text = text.replace(loop, loop.replace("while(", "bitcast("))
  schedule = overlap.ScheduledProgram(
    hlo.parse(text), make_mesh(), DEVICES["h100"], lambda _: 1.0
  )
  first, last = schedule.collectives()
  assert first.between == ("n8", "n6", "n4", "n2")
  assert last.between == ()
  assert first.overlapped.bytes == 2 * 4 * (2 + 8 + 6 + 4)
  assert (first.bytes, first.hidden) == (4000, first.hidden_seconds)


CACHE = hlo.Shape("float32", (6, 4, 8), 32)


@pytest.mark.parametrize(("operation", "parts", "fault"), [
  # A third of the array is a part of it; smaller slices are a step's reads.
  ("f32[2,4,8] slice(%cache), slice={[0:2]}", 3, "a slice: x"),
  ("f32[2,4,8] slice(%cache), slice={[0:2]}", 2, ""),
  ("f32[3,4,8] slice(%cache), slice={[0:3]}", 3, "a slice: x"),
  ("f32[2,4,8] slice(%other), slice={[0:2]}", 3, ""),
  ("f32[6,4,8] copy(%cache)", 3, "a copy (copy): x"),
  ("f32[6,4,8]{2,1,0:S(1)} copy(%cache)", 3, ""),  # into on-chip memory
  ("f32[6,4,8] bitcast(%cache)", 3, ""),
  ("f32[6,32] reshape(%cache)", 3, "a copy (reshape): x"),
  ("f32[6,4,8] dynamic-update-slice(%cache, %row, %i, %i, %i)", 3, ""),
  ("f32[6,4,8] scatter(%cache, %i, %row), to_apply=%add", 3, ""),
  ("f32[7,4,8] negate(%other)", 3, ""),
])
def test_faults_are_copies_and_slices_of_a_part(operation, parts, fault):
  text = f"""HloModule m, input_output_alias={{ {{0}}: (0, {{}}) }}

ENTRY %main (cache: f32[6,4,8]) -> f32[6,4,8] {{
  %cache = f32[6,4,8] parameter(0)
  %row = f32[1,4,8] parameter(1)
  %i = s32[] parameter(2)
  %other = f32[7,4,8] parameter(3)
  ROOT %x = {operation}
}}
"""
  found = in_place.uses(hlo.parse(text), [CACHE], parts)
  assert found == in_place.Uses((fault,) if fault else (), (), ())


def test_every_array_needs_a_donated_parameter_of_its_own():
  text = """HloModule m, input_output_alias={ {0}: (1, {}), {1}: (2, {}) }

ENTRY %main (a: f32[6,4,8]) -> f32[6,4,8] {
  %a = f32[6,4,8] parameter(0)
  %b = f32[6,4,8] parameter(1)
  ROOT %c = bf16[6,4,8] parameter(2)
}
"""
  half = dataclasses.replace(CACHE, dtype="bfloat16", bits=16)
  module = hlo.parse(text)
  assert not in_place.uses(module, [CACHE, half]).faults
  for arrays in ([CACHE] * 2, [half] * 2):
    assert in_place.uses(module, arrays).faults == (
      f"no result reuses the memory of a parameter {arrays[0].dtype}[6, 4, 8]",
    )


@pytest.mark.parametrize(("operation", "gathers"), [
  ("f32[2,4,8] gather(%cache, %i), offset_dims={1}", True),
  ("f32[1] gather(%cache, %i), offset_dims={}", True),
  ("f32[0,4,8] gather(%cache, %i), offset_dims={1}", False),
  ("f32[2,4,8] gather(%other, %i), offset_dims={1}", False),
])
@pytest.mark.parametrize("fused", [False, True])
def test_gathers_of_rows_are_listed(operation, gathers, fused):
  parameters = """  %cache = f32[6,4,8] parameter(0)
  %other = f32[7,4,8] parameter(1)
  %i = s32[2] parameter(2)
"""
  fusion = "f32[2] fusion(%cache, %other, %i), kind=kLoop, calls=%f"
  module = hlo.parse(f"""HloModule m, input_output_alias={{ {{0}}: (0, {{}}) }}

%f (cache: f32[6,4,8]) -> f32[2] {{
{parameters}  ROOT %r = {operation}
}}

ENTRY %main (cache: f32[6,4,8]) -> f32[2] {{
{parameters}  ROOT %x = {fusion if fused else operation}
}}
""")
  found = in_place.uses(module, [CACHE], 3)
  assert found == in_place.Uses((), ("x",) * gathers, ())


def test_fault_in_a_function_with_two_callers_is_listed_once():
  module = hlo.parse("""HloModule m, input_output_alias={ {0}: (0, {}) }

%f (a: f32[6,4,8]) -> f32[6,4,8] {
  %a = f32[6,4,8] parameter(0)
  ROOT %copied = f32[6,4,8] copy(%a), metadata={op_name="jit(f)/cache"}
}

ENTRY %main (cache: f32[6,4,8]) -> f32[6,4,8] {
  %cache = f32[6,4,8] parameter(0)
  %x = f32[6,4,8] call(%cache), to_apply=%f
  ROOT %y = f32[6,4,8] call(%x), to_apply=%f
}
""")
  assert in_place.uses(module, [CACHE]).faults == (
    "a copy (copy): copied (jit(f)/cache)",
  )
