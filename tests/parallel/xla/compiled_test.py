"""A compiled program, read: collectives, trips, FLOPs, memory, schedule."""

import collections
import dataclasses
import math
import pathlib

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.hardware.clusters import Level
from parallel.hardware.devices import DEVICES
from parallel.hardware.links import NVLINK_4
from parallel.xla import compiled as compiled_ledger
from parallel.xla import hlo, ledger, memory, overlap, roofline
from parallel.xla.targets import Target


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
  return lowered, lowered.compile()


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
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("trips", [None, (3,), (2, 5)])
def test_compiled_equals_lowered_for_float32_on_cpu(name, trips):
  mesh = make_mesh(a=2, b=2, c=2)

  def once(x):
    y = COLLECTIVES[name](x)
    return x + jnp.sum(y)

  f = once
  for n in trips or ():

    def f(x, inner=f, n=n):
      return lax.scan(lambda c, _: (inner(c * 2), None), x, length=n)[0]

  lowered, compiled = compile_mapped(f, mesh, jnp.ones((4, 8)))
  asked = ledger.collectives(lowered, mesh)
  made = compiled_ledger.collectives(hlo.parse(compiled.as_text()), mesh)
  assert count_bytes(asked) == count_bytes(made)
  assert sum(count_bytes(made).values()) == (
    128 * math.prod(trips or ())
  )
  assert {c.reduction for c in asked} == {c.reduction for c in made}
  assert not any(d.differs for d in compiled_ledger.compare(asked, made))


def test_a_while_loop_of_unknown_length_stays_unknown():
  mesh = make_mesh(a=8)

  def f(x):
    return lax.while_loop(
      lambda c: jnp.sum(c) < 100, lambda c: c + lax.psum(c, "a"), x
    )

  _, compiled = compile_mapped(f, mesh, jnp.ones(4))
  made = compiled_ledger.collectives(hlo.parse(compiled.as_text()), mesh)
  assert [c.count for c in made if c.bytes] == [None]


def test_a_difference_in_dtype_is_flagged():
  mesh = make_mesh(a=8)
  lowered, compiled = compile_mapped(
    lambda x: lax.psum(x, "a"), mesh, jnp.ones(4, "bfloat16")
  )
  made = compiled_ledger.collectives(hlo.parse(compiled.as_text()), mesh)
  (row,) = compiled_ledger.compare(ledger.collectives(lowered, mesh), made)
  assert row.lowered == {("all_reduce", "bfloat16"): (1, 8)}
  # XLA:CPU has no bfloat16 reduction.
  assert row.compiled == {("all_reduce", "float32"): (1, 16)}
  assert row.differs


@pytest.mark.parametrize(
  ("text", "groups"),
  [
    ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
    ("{}", [[0, 1, 2, 3]]),
    ("[2,2]<=[4]", [[0, 1], [2, 3]]),
    ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
  ],
)
def test_replica_groups(text, groups):
  assert compiled_ledger.replica_groups(text, 4) == groups


@pytest.mark.quick
def test_product_flops_and_trips():
  w = jnp.ones((6, 16, 16))

  def f(x):
    return lax.scan(lambda c, w: (c @ w, None), x, w)[0]

  compiled = jax.jit(f).lower(jnp.ones((32, 16))).compile()
  module = hlo.parse(compiled.as_text())
  schedule = overlap.ScheduledProgram(
    module, make_mesh(a=1), DEVICES["v5p"], lambda _: 0.0
  )
  assert schedule.total().flops == 6 * 2 * 32 * 16 * 16


@pytest.mark.parametrize(
  ("size", "outputs", "window", "options", "pairs"),
  [
    (8, 6, 3, {}, 18),  # no padding: every pair counts
    (8, 8, 3, {"padding": 1}, 22),  # two fall outside
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


def test_memory_is_xlas_to_the_byte():
  mesh = make_mesh(a=8)
  sharded = jax.sharding.NamedSharding(mesh, P("a"))
  whole = jax.sharding.NamedSharding(mesh, P())
  x = jax.ShapeDtypeStruct((16, 4), "float32", sharding=sharded)
  y = jax.ShapeDtypeStruct((4,), "bfloat16", sharding=whole)
  compiled = jax.jit(
    lambda x, y: (x * 2, jnp.sort(x @ y)), donate_argnums=0
  ).lower(x, y).compile()
  parts = memory.memory(compiled, {"x": x, "y": y})
  assert parts.arguments == {"x": 2 * 4 * 4, "y": 4 * 2}
  analysis = compiled.memory_analysis()
  assert parts.total == (
    analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    - analysis.alias_size_in_bytes + analysis.temp_size_in_bytes
    + analysis.generated_code_size_in_bytes
  )


# A schedule written by hand: a product of 2 x 512 x 256 x 128 FLOPs, in a loop
# of four, between the start and the done of a reduction.
SCHEDULED = (pathlib.Path(__file__).parent / "scheduled.hlo.txt").read_text()


@pytest.mark.quick
def test_what_stands_between_start_and_done_hides_the_transfer():
  mesh = make_mesh(a=8)
  device = dataclasses.replace(DEVICES["h100"], memory_bandwidth=1e30)
  product = 4 * 2 * 512 * 256 * 128 / device.peak("bfloat16")
  schedule = overlap.ScheduledProgram(
    hlo.parse(SCHEDULED), mesh, device, lambda _: 4 * product
  )
  first, last = schedule.collectives()
  assert first.asynchronous
  assert not last.asynchronous
  assert first.entries[0].where == "block"
  assert first.beside.seconds == pytest.approx(product, rel=1e-3)
  assert first.hidden == pytest.approx(0.25, rel=1e-3)
  assert last.hidden == 0
  (row,) = overlap.by_axis([first, last]).values()
  assert row["bytes"] == 8000
  assert row["asynchronous"] == 4000
  assert row["hidden"] == pytest.approx(1000, rel=1e-3)
  assert row["exposed_seconds"] == pytest.approx(7 * product, rel=1e-3)


def test_compute_beside_two_transfers_hides_one_of_them():
  start = next(s for s in SCHEDULED.splitlines() if "all-reduce-start" in s)
  done = next(s for s in SCHEDULED.splitlines() if "all-reduce-done" in s)
  second = start.replace("%start", "%again").replace("(%g)", "(%done)")
  text = SCHEDULED.replace(start, f"{start}\n{second.replace('%done', '%g')}")
  text = text.replace(
    done, f"{done}\n{done.replace('%start', '%again').replace('%done', '%d')}"
  )
  device = dataclasses.replace(DEVICES["h100"], memory_bandwidth=1e30)
  product = 4 * 2 * 512 * 256 * 128 / device.peak("bfloat16")
  schedule = overlap.ScheduledProgram(
    hlo.parse(text), make_mesh(a=8), device, lambda _: 0.75 * product
  )
  hidden = [t.hidden for t in schedule.collectives()]
  assert hidden == pytest.approx([1, 1 / 3, 0], rel=1e-3)


def test_a_chain_of_fusions_sends_once():
  """As XLA:TPU writes a gather in pieces: a copy of it in every piece."""

  def piece(name, role):
    return "\n".join([
      f"%{name} (q.1: f32[1000]) -> f32[8000] {{",
      "  %q.1 = f32[1000]{0} parameter(0)",
      "  %all = f32[8000]{0} all-gather(%q.1), dimensions={0}, "
      "replica_groups={{0,1,2,3,4,5,6,7}}, "
      'frontend_attributes={chain_id="0"}',
      "  ROOT %r = f32[8000]{0} custom-call(%all), "
      f'custom_call_target="AsyncCollective{role}"',
      "}\n\n",
    ])

  lines = SCHEDULED.splitlines()
  start = next(s for s in lines if "all-reduce-start" in s)
  done = next(s for s in lines if "all-reduce-done" in s)
  fusion = "  %{} = f32[8000]{{0}} fusion({}), kind=kCustom, calls=%{}"
  text = SCHEDULED.replace(start, fusion.format("start", "%g", "first"))
  text = text.replace(done, fusion.format("done", "%start", "last"))
  text = text.replace(
    "%body (p", piece("first", "Start") + piece("last", "Done") + "%body (p"
  )
  module, mesh = hlo.parse(text), make_mesh(a=8)
  sent = [e for e in compiled_ledger.collectives(module, mesh)
          if e.kind == "all_gather"]
  assert [(e.shape, e.count) for e in sent] == [((1000,), 1)]
  device = dataclasses.replace(DEVICES["h100"], memory_bandwidth=1e30)
  product = 4 * 2 * 512 * 256 * 128 / device.peak("bfloat16")
  schedule = overlap.ScheduledProgram(
    module, mesh, device, lambda _: 4 * product
  )
  gather = schedule.collectives()[0]
  assert gather.asynchronous
  assert gather.hidden == pytest.approx(0.25, rel=1e-3)


def test_an_unscheduled_program_has_no_overlap_to_report():
  module = hlo.parse(SCHEDULED.replace("is_scheduled=true", "x=1"))
  with pytest.raises(ValueError, match="not scheduled"):
    overlap.ScheduledProgram(
      module, make_mesh(a=8), DEVICES["h100"], lambda _: 0.0
    )


def test_slices_count_what_is_sliced_and_on_chip_operands_nothing():
  stack = jnp.ones((64, 128, 128))
  compiled = jax.jit(
    lambda s, i: lax.dynamic_index_in_dim(s, i, keepdims=False) * 2
  ).lower(stack, 3).compile()
  schedule = overlap.ScheduledProgram(
    hlo.parse(compiled.as_text()), make_mesh(a=1), DEVICES["v5p"], lambda _: 0.0
  )
  moved = schedule.total().bytes
  assert 2 * 128 * 128 * 4 <= moved <= 2 * 128 * 128 * 4 + 64
  (shape, on_chip) = hlo._shapes("(f32[8]{0:T(8)}, bf16[4,2]{1,0:T(8)S(1)})")
  assert (shape.on_chip, on_chip.on_chip) == (False, True)
  assert on_chip.bytes == 16


# Rates of links -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Chip:
  """What a mesh needs of a torus's device."""

  coords: tuple[int, ...]


def reduction(axes, group_size):
  return ledger.Collective(
    "all_reduce", axes, group_size, "float32", (1000,), 1, "forward", False,
    "add", "",
  )


class Grid:
  """The part of a mesh that rates read."""

  def __init__(self, devices, names):
    self.devices, self.axis_names = devices, names


@pytest.mark.parametrize(
  ("axes", "links"),
  [(("z",), 2), (("y",), 1), (("y", "z"), 3), (("x", "y", "z"), 5)],
)
def test_a_torus_uses_every_dimension_that_a_group_spans(axes, links):
  # 4 x 2 x 4 chips of v5p: dimensions of 4 close to a ring, that of 2 does not.
  chips = np.empty((4, 2, 4), object)
  for place in np.ndindex(4, 2, 4):
    chips[place] = Chip(place)
  hardware = DEVICES["v5p"]
  target = Target("t", tuple(chips.ravel()), hardware, (), {})
  seconds = overlap.wire_seconds(target, Grid(chips, ("x", "y", "z")))
  n = math.prod(chips.shape["xyz".index(a)] for a in axes)
  entry = reduction(axes, n)
  expected = 2 * (n - 1) / n * 4000 / (links * hardware.link.bandwidth)
  assert seconds(entry) == pytest.approx(expected)


def test_between_nodes_the_slower_link_decides():
  hardware = DEVICES["h200"]
  slow = dataclasses.replace(NVLINK_4, bandwidth=1e9)
  levels = (Level("node", 4, hardware.link), Level("cluster", 2, slow))
  target = Target("t", tuple(range(8)), hardware, levels, {})
  grid = Grid(np.arange(8).reshape(2, 4), ("data", "tensor"))
  seconds = overlap.wire_seconds(target, grid)
  inside, across = reduction(("tensor",), 4), reduction(("data",), 2)
  assert seconds(inside) == pytest.approx(1.5 * 4000 / 450e9)
  assert seconds(across) == pytest.approx(4000 / 1e9)


@pytest.mark.parametrize(
  ("last", "step", "trips"), [(4, 1, 4), (4, 2, 2), (5, 2, 3), (0, 1, 0)]
)
def test_trips_are_rounded_up(last, step, trips):
  text = SCHEDULED.replace("constant(4)", f"constant({last})")
  module = hlo.parse(text.replace("constant(1)", f"constant({step})"))
  (count,) = (n for c, n in module.runs() if c.name == "body")
  assert count == trips
