"""Overlap of transfers with compute in compiled programs, and link times."""

import dataclasses
import itertools
import math
import pathlib
import re

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np
import pytest

from parallel.ledger import compiled as compiled_ledger
from parallel.ledger import hlo, latency, ledger, overlap, roofline
from parallel.ledger.targets import Target
from parallel.plans.hardware import collective_times
from parallel.plans.hardware.clusters import CLUSTERS, Level
from parallel.plans.hardware.devices import DEVICES
from parallel.plans.hardware.links import NVLINK_4
from tests import users


def make_mesh(**sizes):
  return jax.make_mesh(
    tuple(sizes.values()),
    tuple(sizes),
    axis_types=(AxisType.Auto,) * len(sizes),
  )


# Hand-written schedule: a product of 2 x 512 x 256 x 128 FLOPs, in a loop of
# four trips, between the start and the done of a reduction.
SCHEDULED = (pathlib.Path(__file__).parent / "scheduled.hlo.txt").read_text()


@pytest.mark.quick
def test_compute_between_start_and_done_hides_the_transfer():
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
  assert first.overlapped.seconds == pytest.approx(product, rel=1e-3)
  assert first.hidden == pytest.approx(0.25, rel=1e-3)
  assert last.hidden == 0
  (row,) = overlap.sum_by_axes([first, last]).values()
  assert row["bytes"] == 8000
  assert row["asynchronous"] == 4000
  assert row["hidden"] == pytest.approx(1000, rel=1e-3)
  assert row["exposed_seconds"] == pytest.approx(7 * product, rel=1e-3)


@pytest.mark.parametrize("hides", [True, False])
def test_only_instructions_that_count_hide_a_transfer(hides):
  device = dataclasses.replace(DEVICES["h100"], memory_bandwidth=1e30)

  def counts(entry, instruction):
    assert entry.where == "block"
    return hides or instruction.opcode != "while"

  first, _ = overlap.ScheduledProgram(
    hlo.parse(SCHEDULED), make_mesh(a=8), device, lambda _: 1.0, hides=counts
  ).collectives()
  assert bool(first.hidden) == bool(first.overlapped.flops) == hides


def test_compute_during_two_transfers_hides_one_of_them():
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


def in_the_loop(size):
  """Adds a reduction of ``size`` elements around the product in the loop."""
  product = next(s for s in SCHEDULED.splitlines() if " dot(" in s)
  start = (
    f"  %s = f32[{size}]{{0}} all-reduce-start(%c), "
    "replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add"
  )
  return SCHEDULED.replace(product, "\n".join([
    f"  %c = f32[{size}]{{0}} constant({{...}})", start, product,
    f"  %t = f32[{size}]{{0}} all-reduce-done(%s)",
  ]))


@pytest.mark.parametrize("inner", [0.0, 0.25, 2.0])
def test_compute_in_a_loop_hides_inner_transfers_before_outer_ones(inner):
  """One product per trip; the inner transfer takes ``inner`` of its time."""
  device = dataclasses.replace(DEVICES["h100"], memory_bandwidth=1e30)
  product = 2 * 512 * 256 * 128 / device.peak("bfloat16")
  times = {2000: inner * product, 1000: 4 * product}
  schedule = overlap.ScheduledProgram(
    hlo.parse(in_the_loop(2000)), make_mesh(a=8), device,
    lambda entry: times[entry.shape[0]],
  )
  transfers = {t.entries[0].shape[0]: t for t in schedule.collectives()
               if t.asynchronous}
  around, within = transfers[1000], transfers[2000]
  assert (around.count, within.count) == (1, 4)
  assert within.hidden_seconds == pytest.approx(
    min(inner, 1) * product, rel=1e-3
  )
  # The hidden time equals the compute that can hide it.
  hidden = around.hidden_seconds + 4 * within.hidden_seconds
  assert hidden == pytest.approx(4 * product, rel=1e-3)


def test_transfers_of_unknown_count_are_reported_separately():
  known = overlap.ScheduledCollective(
    (reduction(("a",), 8),), 2, False, 1.0, roofline.Cost(), 0.0, ()
  )
  unknown = dataclasses.replace(known, count=None)
  (row,) = overlap.sum_by_axes([known, unknown]).values()
  (alone,) = overlap.sum_by_axes([unknown]).values()
  assert (row["bytes"], row["exposed_seconds"]) == (8000, 2)
  assert (alone["bytes"], alone["exposed_seconds"]) == (0, 0)
  for found in (row, alone):
    assert (found["unknown"], found["unknown_bytes"]) == (1, 4000)


def test_chain_of_fusions_sends_once():
  """XLA:TPU writes a gather in pieces with a copy of it in every piece."""

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


def test_unreadable_transfers_are_an_error():
  start = next(s for s in SCHEDULED.splitlines() if "all-reduce-start" in s)
  for line, error in (
    ("  %start = f32[1000]{0} send(%g), channel_id=1", NotImplementedError),
    (start.replace("{{0,1,2,3,4,5,6,7}}", "all"), ValueError),
  ):
    module = hlo.parse(SCHEDULED.replace(start, line))
    with pytest.raises(error):
      compiled_ledger.collectives(module, make_mesh(a=8))
  to_host = (
    "  %start = f32[1000]{0} send(%g), is_host_transfer=true, "
    'frontend_attributes={_xla_host_transfer_handler_name="pjrt_rendezvous"}'
  )
  module = hlo.parse(SCHEDULED.replace(start, to_host))
  assert len(compiled_ledger.collectives(module, make_mesh(a=8))) == 1


def test_unscheduled_program_has_no_overlap():
  module = hlo.parse(SCHEDULED.replace("is_scheduled=true", "x=1"))
  with pytest.raises(ValueError, match="not scheduled"):
    overlap.ScheduledProgram(
      module, make_mesh(a=8), DEVICES["h100"], lambda _: 0.0
    )


def test_slices_count_their_size_and_on_chip_operands_nothing():
  stack = jnp.ones((64, 128, 128))
  compiled = users.compiled(jax.jit(
    lambda s, i: lax.dynamic_index_in_dim(s, i, keepdims=False) * 2
  ).lower(stack, 3))
  schedule = overlap.ScheduledProgram(
    hlo.parse(compiled.as_text()), make_mesh(a=1), DEVICES["v5p"], lambda _: 0.0
  )
  moved = schedule.total().bytes
  assert 2 * 128 * 128 * 4 <= moved <= 2 * 128 * 128 * 4 + 64
  (shape, on_chip) = hlo._shapes("(f32[8]{0:T(8)}, bf16[4,2]{1,0:T(8)S(1)})")
  assert (shape.on_chip, on_chip.on_chip) == (False, True)
  assert on_chip.bytes == 16


def test_in_place_scatter_counts_rows_not_the_whole_array():
  """Both operand and result of the scatter are the whole array."""
  table = jnp.ones((4096, 128))
  compiled = users.compiled(jax.jit(
    lambda x, rows, new: x.at[rows].set(new, mode="drop"), donate_argnums=0
  ).lower(table, jnp.arange(4), jnp.ones((4, 128))))
  schedule = overlap.ScheduledProgram(
    hlo.parse(compiled.as_text()), make_mesh(a=1), DEVICES["v5p"], lambda _: 0.0
  )
  row = 4 * 128 * 4
  assert 2 * row <= schedule.total().bytes <= 4 * row + 256


def test_slice_in_a_nested_fusion_counts_its_size():
  """XLA:TPU writes a product with one layer of stacked weights like this."""
  module = hlo.parse("""HloModule m, is_scheduled=true

%slice (stack: f32[32,64,64], i: s32[]) -> f32[1,64,64] {
  %stack = f32[32,64,64]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = f32[1,64,64]{2,1,0} dynamic-slice(%stack, %i, %i, %i)
}

%all (x: f32[8,64]) -> f32[8,64] {
  %x = f32[8,64]{1,0} parameter(0)
  ROOT %b = f32[8,64]{1,0} bitcast(%x)
}

%product (x: f32[8,64], stack: f32[32,64,64], i: s32[]) -> f32[8,64] {
  %x = f32[8,64]{1,0} parameter(0)
  %left = f32[8,64]{1,0} fusion(%x), kind=kLoop, calls=%all
  %stack = f32[32,64,64]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %w = f32[1,64,64]{2,1,0} fusion(%stack, %i), kind=kLoop, calls=%slice
  ROOT %y = f32[8,64]{1,0} add(%left, %w)
}

ENTRY %main (x: f32[8,64], stack: f32[32,64,64], i: s32[]) -> f32[8,64] {
  %x = f32[8,64]{1,0} parameter(0)
  %stack = f32[32,64,64]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %out = f32[8,64] fusion(%x, %stack, %i), kind=kOutput, calls=%product
}
""")
  schedule = overlap.ScheduledProgram(
    module, make_mesh(a=1), DEVICES["v5p"], lambda _: 0.0
  )
  # One layer, its left factor, the result, and the layer's index.
  assert schedule.total().bytes == 4 * (64 * 64 + 2 * 8 * 64) + 4


def test_kernel_counts_its_declared_reads():
  """Text of a kernel that takes a cache twice, and writes it in place."""
  module = hlo.parse("""HloModule m, is_scheduled=true

ENTRY %main (q: f32[8,128], cache: f32[64,128], scale: f32[4]) -> f32[8,128] {
  %q = f32[8,128]{1,0} parameter(0)
  %cache = f32[64,128]{1,0} parameter(1)
  %scale = f32[4]{0} parameter(2)
  ROOT %o = (f32[8,128], f32[64,128]) custom-call(%q, %cache, %cache, %scale)
}
""")
  device = DEVICES["v5p"]
  small = 2 * 8 * 128 * 4 + 16
  for reads, expected in (
    ({}, small + 3 * 64 * 128 * 4), ({(64, 128): 1000.0}, small + 1000),
  ):
    schedule = overlap.ScheduledProgram(
      module, make_mesh(a=1), device, lambda _: 0.0, reads
    )
    assert schedule.total().bytes == expected


CONDITIONAL = """HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%one (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8] parameter(0)
  %start = f32[8,8] all-reduce-start(%x), replica_groups={}, to_apply=%add
  %p = f32[8,8] dot(%x, %x), lhs_contracting_dims={1}, NAME=a/action_up/dot
  %done = f32[8,8] all-reduce-done(%start)
  ROOT %r = f32[8,8] all-reduce(%done), replica_groups={}, to_apply=%add
}

%two (y: f32[8,8]) -> f32[8,8] {
  ROOT %y = f32[8,8] parameter(0), NAME=a/action_down/x
}

ENTRY %main (i: s32[], z: f32[8,8]) -> f32[8,8] {
  %i = s32[] parameter(0)
  %z = f32[8,8] parameter(1)
  ROOT %c = f32[8,8] conditional(%i, %z, %z), BRANCHES, NAME=OUTSIDE
}
""".replace("BRANCHES", "branch_computations={%one, %two}")


@pytest.mark.parametrize("nested", [False, True])
def test_action_takes_its_compute_and_its_exposed_transfers(nested):
  outside = "jit(f)/action_all/cond" if nested else "jit(f)/cond"
  device = dataclasses.replace(DEVICES["h100"], memory_bandwidth=1e30)
  product = 2 * 8**3 / device.peak("float32")
  text = re.sub(
    "NAME=(.*)", r'metadata={op_name="\1"}',
    CONDITIONAL.replace("OUTSIDE", outside),
  )
  schedule = overlap.ScheduledProgram(
    hlo.parse(text), make_mesh(a=8), device, lambda _: 4 * product
  )
  if nested:  # it belongs to the outer action
    assert not schedule.actions()
    return
  found = schedule.actions()
  assert set(found) == {"up", "down"}
  assert found["down"] == roofline.Cost()
  assert found["up"].flops == 2 * 8**3
  # The product, 3 of 4 products of the first transfer, and the second transfer.
  assert found["up"].seconds == pytest.approx((1 + 3 + 4) * product, rel=1e-3)
  # A conditional hides nothing and is not in the total of its computation.
  assert schedule.total().flops == 2 * 8**3


# Link rates -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Chip:
  """Attributes of a torus device that a mesh reads."""

  coords: tuple[int, ...]


def reduction(axes, group_size):
  return ledger.Collective(
    "all_reduce", axes, group_size, "float32", (1000,), 1, "forward", False,
    "add", "",
  )


class Grid:
  """Attributes of a mesh that the rates read."""

  def __init__(self, devices, names):
    self.devices, self.axis_names = devices, names


@pytest.mark.parametrize(
  ("axes", "links"),
  [(("z",), 2), (("y",), 1), (("y", "z"), 3), (("x", "y", "z"), 5)],
)
def test_torus_uses_every_dimension_that_a_group_spans(axes, links):
  # 4 x 2 x 4 chips of v5p: dimensions of 4 close to a ring, that of 2 does not.
  chips = np.empty((4, 2, 4), object)
  for place in np.ndindex(4, 2, 4):
    chips[place] = Chip(place)
  hardware = DEVICES["v5p"]
  target = Target("t", tuple(chips.ravel()), hardware, ())
  seconds = overlap.build_wire_time_model(target, Grid(chips, ("x", "y", "z")))
  n = math.prod(chips.shape["xyz".index(a)] for a in axes)
  entry = reduction(axes, n)
  expected = 2 * (n - 1) / n * 4000 / (links * hardware.link.bandwidth)
  assert seconds(entry) == pytest.approx(expected)


def test_cores_of_a_chip_use_at_least_one_link():
  """Equal coordinates, on a plane of 2 x 2 that is not closed."""
  cores = np.empty((2, 2, 2), object)
  for x, y, core in np.ndindex(2, 2, 2):
    cores[x, y, core] = Chip((x, y))
  hardware = DEVICES["v5e"]
  target = Target("t", tuple(cores.ravel()), hardware, ())
  seconds = overlap.build_wire_time_model(
    target, Grid(cores, ("x", "y", "core"))
  )
  for axes, n, links in ((("core",), 2, 1), (("x", "core"), 4, 1),
                         (("x", "y"), 4, 2), ((), 4, 2)):
    expected = 2 * (n - 1) / n * 4000 / (links * hardware.link.bandwidth)
    assert seconds(reduction(axes, n)) == pytest.approx(expected)


def test_slowest_link_between_nodes_determines_the_time():
  hardware = DEVICES["h200"]
  slow = dataclasses.replace(NVLINK_4, bandwidth=1e9)
  levels = (Level("node", 4, hardware.link), Level("cluster", 2, slow))
  target = Target("t", tuple(range(8)), hardware, levels)
  grid = Grid(np.arange(8).reshape(2, 4), ("data", "tensor"))
  seconds = overlap.build_wire_time_model(target, grid)
  inside, across = reduction(("tensor",), 4), reduction(("data",), 2)
  assert seconds(inside) == pytest.approx(1.5 * 4000 / 450e9)
  assert seconds(across) == pytest.approx(4000 / 1e9)


def test_loop_condition_sends_once_more_than_the_body():
  every = (
    "  %k = f32[10]{0} constant({...})\n  %every = f32[10]{0} all-reduce(%k), "
    "replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add\n  %four ="
  )
  module = hlo.parse(SCHEDULED.replace("  %four =", every))
  made = compiled_ledger.collectives(module, make_mesh(a=8))
  assert [c.count for c in made if c.shape == (10,)] == [4 + 1]


@pytest.mark.parametrize(
  ("last", "step", "trips"), [(4, 1, 4), (4, 2, 2), (5, 2, 3), (0, 1, 0)]
)
def test_trips_are_rounded_up(last, step, trips):
  text = SCHEDULED.replace("constant(4)", f"constant({last})")
  module = hlo.parse(text.replace("constant(1)", f"constant({step})"))
  (count,) = (n for c, n in module.runs() if c.name == "body")
  assert count == trips


def hidden_beside_the_loop(text):
  """Returns the hidden part of the first transfer, which takes 4 trips."""
  device = dataclasses.replace(DEVICES["h100"], memory_bandwidth=1e30)
  product = 4 * 2 * 512 * 256 * 128 / device.peak("bfloat16")
  schedule = overlap.ScheduledProgram(
    hlo.parse(text), make_mesh(a=8), device, lambda _: product
  )
  return schedule.collectives()[0].hidden


def test_loop_of_unknown_length_hides_one_trip():
  unknown = SCHEDULED.replace("direction=LT", "direction=NE")
  assert hidden_beside_the_loop(SCHEDULED) == pytest.approx(1, rel=1e-3)
  assert hidden_beside_the_loop(unknown) == pytest.approx(1 / 4, rel=1e-3)


def test_called_function_hides_its_compute_once():
  called = SCHEDULED.replace(
    "while(%state), condition=%condition, body=%body",
    "call(%state), to_apply=%body",
  )
  assert hidden_beside_the_loop(called) == pytest.approx(1 / 4, rel=1e-3)


@pytest.mark.parametrize("updates", [1, 2])
def test_updated_transfer_lasts_until_its_done(updates):
  """The program does not wait at an update before the loop."""
  start = next(s for s in SCHEDULED.splitlines() if "all-reduce-start" in s)
  names = ["start", *(f"update.{i}" for i in range(updates))]
  lines = [
    f"  %{name} = f32[1000]{{0}} async-update(%{before})"
    for before, name in itertools.pairwise(names)
  ]
  text = SCHEDULED.replace(start, "\n".join([start, *lines]))
  text = text.replace("-done(%start)", f"-done(%{names[-1]})")
  assert hidden_beside_the_loop(text) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(("size", "links"), [(4, 1), (8, 1), (16, 2)])
@pytest.mark.parametrize("generation", ["v5e", "v6e"])
def test_plane_closes_into_a_ring_at_16_chips(
  generation, size, links
):
  """Slices in three dimensions close at multiples of 4."""
  chips = np.empty((size, 2), object)
  for place in np.ndindex(size, 2):
    chips[place] = Chip(place)
  hardware = DEVICES[generation]
  target = Target("t", tuple(chips.ravel()), hardware, ())
  seconds = overlap.build_wire_time_model(target, Grid(chips, ("x", "y")))
  expected = 2 * (size - 1) / size * 4000 / (links * hardware.link.bandwidth)
  assert seconds(reduction(("x",), size)) == pytest.approx(expected)


def test_shared_links_and_arbitrary_groups_take_longer():
  """Two nodes of four; each pair of devices has one link between the nodes."""
  hardware = DEVICES["h200"]
  slow = dataclasses.replace(NVLINK_4, bandwidth=1e9)
  levels = (Level("node", 4, hardware.link), Level("cluster", 2, slow, 0.5))
  target = Target("t", tuple(range(8)), hardware, levels)
  grid = Grid(np.arange(8).reshape(2, 4), ("data", "tensor"))
  seconds = overlap.build_wire_time_model(target, grid)
  # Groups that no set of axes describes may cross nodes.
  for axes in (("data",), ()):
    assert seconds(reduction(axes, 2)) == pytest.approx(4000 / 0.5e9)


# Latency -------------------------------------------------------------------


def node(name, *sizes):
  """Returns a target of integers, and its grid with one axis per level."""
  cluster = CLUSTERS[name]
  levels = tuple(
    dataclasses.replace(level, size=size)
    for level, size in zip(cluster.levels, sizes, strict=False)
  )
  count = math.prod(sizes)
  target = Target("t", tuple(range(count)), cluster.device, levels)
  return target, Grid(np.arange(count).reshape(sizes[::-1]), ("data", "tensor"))


def test_latency_within_a_node_is_the_measured_one():
  span = latency.build_time_model(*node("h200", 8, 2))
  entry = reduction(("tensor",), 8)
  known = collective_times.times_between_gpus(NVLINK_4, 8)
  assert span(entry) == known.all_reduce(4000)
  nothing = dataclasses.replace(entry, shape=(0,))
  assert span(nothing) == (0, 0)
  assert overlap.build_wire_time_model(*node("h200", 8, 2))(nothing) == 0
  # An all-gather's result is eight times each rank's operand.
  gather = dataclasses.replace(entry, kind="all_gather")
  whole = known.all_reduce(8 * 4000)
  assert span(gather) == pytest.approx((whole.least / 2, whole.greatest))
  # A reduce-scatter's operand is the whole array.
  scatter = dataclasses.replace(entry, kind="reduce_scatter")
  whole = known.all_reduce(4000)
  assert span(scatter) == pytest.approx((whole.least / 2, whole.greatest))
  with pytest.raises(ValueError, match="InfiniBand NDR were not measured"):
    span(reduction(("data",), 2))


def test_latency_is_at_least_the_transfer_time():
  target, grid = node("a100-pcie", 8, 1)
  wire, span = (
    overlap.build_wire_time_model(target, grid),
    latency.build_time_model(target, grid),
  )
  for rows in (1, 1000, 10**6):
    entry = dataclasses.replace(reduction(("tensor",), 8), shape=(rows,))
    assert wire(entry) < span(entry).least <= span(entry).greatest


def test_latency_of_a_torus_follows_from_its_hops():
  chips = np.empty((2, 2, 4), object)
  for place in np.ndindex(2, 2, 4):
    chips[place] = Chip(place)
  target = Target("t", tuple(chips.ravel()), DEVICES["v5p"], ())
  grid = Grid(chips, ("x", "y", "z"))
  span = latency.build_time_model(target, grid)
  wire = overlap.build_wire_time_model(target, grid)
  # A ring of 4 is closed, so that its farthest chip is two hops away.
  for axes, hops, n in ((("z",), 2, 4), (("x", "y"), 2, 4),
                        (("x", "y", "z"), 4, 16)):
    entry = reduction(axes, n)
    assert span(entry) == pytest.approx(
      (wire(entry) + hops * 1e-6, wire(entry) + 2 * (n - 1) * 1e-6)
    )


# Copies between device and host --------------------------------------------

# A loop of four trips writes x to a buffer on the host under a product; then
# one slice returns without compute, and one array synchronously.
COPIES = """HloModule m, is_scheduled=true

%body (p: (s32[], bf16[512,128], bf16[4,512,128])) -> (s32[], bf16[512,128], bf16[4,512,128]) {
  %p = (s32[], bf16[512,128]{1,0}, bf16[4,512,128]{2,1,0:S(5)}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = bf16[512,128]{1,0} get-tuple-element(%p), index=1
  %b = bf16[4,512,128]{2,1,0:S(5)} get-tuple-element(%p), index=2
  %one = s32[] constant(1)
  %zero.1 = s32[] constant(0)
  %next = s32[] add(%i, %one)
  %u = bf16[1,512,128]{2,1,0} bitcast(%x)
  %start = ((bf16[4,512,128]{2,1,0:S(5)}, bf16[1,512,128]{2,1,0}, s32[], s32[], s32[]), bf16[4,512,128]{2,1,0:S(5)}, u32[]{:S(2)}) dynamic-update-slice-start(%b, %u, %i, %zero.1, %zero.1), metadata={op_name="jit(f)/jvp(block)/update"}
  %y = bf16[512,512]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %done = bf16[4,512,128]{2,1,0:S(5)} dynamic-update-slice-done(%start)
  ROOT %out = (s32[], bf16[512,128]{1,0}, bf16[4,512,128]{2,1,0:S(5)}) tuple(%next, %x, %done)
}

%condition (q: (s32[], bf16[512,128], bf16[4,512,128])) -> pred[] {
  %q = (s32[], bf16[512,128]{1,0}, bf16[4,512,128]{2,1,0:S(5)}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%j, %four), direction=LT
}

ENTRY %main (x: bf16[512,128], b: bf16[4,512,128], m: f32[100]) -> (bf16[1,512,128], f32[100]) {
  %x.1 = bf16[512,128]{1,0} parameter(0)
  %b.1 = bf16[4,512,128]{2,1,0:S(5)} parameter(1)
  %m = f32[100]{0:S(5)} parameter(2)
  %zero = s32[] constant(0)
  %state = (s32[], bf16[512,128]{1,0}, bf16[4,512,128]{2,1,0:S(5)}) tuple(%zero, %x.1, %b.1)
  %loop = (s32[], bf16[512,128]{1,0}, bf16[4,512,128]{2,1,0:S(5)}) while(%state), condition=%condition, body=%body
  %held = bf16[4,512,128]{2,1,0:S(5)} get-tuple-element(%loop), index=2
  %read = ((bf16[4,512,128]{2,1,0:S(5)}, s32[], s32[], s32[]), bf16[1,512,128]{2,1,0}, u32[]{:S(2)}) dynamic-slice-start(%held, %zero, %zero, %zero), dynamic_slice_sizes={1,512,128}
  %there = bf16[1,512,128]{2,1,0} dynamic-slice-done(%read)
  %moved = f32[100]{0} copy(%m)
  %same = bf16[1,512,128]{2,1,0} copy(%there)
  ROOT %result = (bf16[1,512,128]{2,1,0}, f32[100]{0}) tuple(%same, %moved)
}
"""  # noqa: E501


def test_host_copies_have_bytes_direction_and_overlapped_compute():
  device = dataclasses.replace(DEVICES["h100"], memory_bandwidth=1e30)
  schedule = overlap.ScheduledProgram(
    hlo.parse(COPIES), make_mesh(a=8), device, lambda _: 0.0
  )
  product = 2 * 512 * 512 * 128 / device.peak("bfloat16")
  size = 2 * 512 * 128
  # The copy within device memory is none of them.
  read, moved, written = sorted(
    schedule.host_copies(), key=lambda c: (c.count, c.bytes != size)
  )
  assert (written.to_host, written.bytes, written.count) == (True, size, 4)
  assert written.asynchronous
  assert written.where == "block"
  assert written.overlapped.seconds == pytest.approx(product, rel=1e-3)
  assert written.hiding_rate == pytest.approx(size / product, rel=1e-3)
  assert (read.to_host, read.bytes, read.count) == (False, size, 1)
  assert (read.asynchronous, read.hiding_rate) == (True, math.inf)
  assert (moved.to_host, moved.bytes, moved.asynchronous) == (False, 400, False)


def test_rows_of_axes_sum_the_executions_of_unequal_transfers():
  def transfer(elements, count, asynchronous, wire, hidden, axes=("a",)):
    entry = dataclasses.replace(reduction(axes, 8), shape=(elements,))
    return overlap.ScheduledCollective(
      (entry,), count, asynchronous, wire, roofline.Cost(), hidden, ()
    )

  rows = overlap.sum_by_axes([
    transfer(1000, 3, True, 4.0, 1.0), transfer(500, 2, False, 1.0, 1.0),
    transfer(250, None, True, 9.0, 1.0), transfer(125, None, False, 9.0, 0.0),
    transfer(100, 5, True, 0.0, 0.0, ("b",)), transfer(0, 1, True, 1.0, 0.0),
  ])
  assert rows == {
    ("a",): dict(
      bytes=16_000, asynchronous=12_000, hidden=3000, seconds=14,
      exposed_seconds=3 * 3 + 2, unknown=2, unknown_bytes=1500,
    ),
    ("b",): dict(
      bytes=2000, asynchronous=2000, hidden=2000, seconds=0, exposed_seconds=0,
      unknown=0, unknown_bytes=0,
    ),
  }


def test_run_of_a_computation_counts_the_trips_of_its_loops():
  schedule = overlap.ScheduledProgram(
    hlo.parse(SCHEDULED), make_mesh(a=8), DEVICES["h100"], lambda _: 0.0
  )
  assert schedule._run("main").flops == 4 * 2 * 512 * 256 * 128


def test_part_of_a_ring_is_a_line():
  """Eight chips in a ring, of which a group has four neighbours."""
  chips = np.empty((2, 4), object)
  for place in np.ndindex(2, 4):
    chips[place] = Chip((4 * place[0] + place[1], 0, 0))
  hardware = DEVICES["v5p"]
  target = Target("t", tuple(chips.ravel()), hardware, ())
  seconds = overlap.build_wire_time_model(target, Grid(chips, ("x", "y")))
  for axes, n, links in ((("y",), 4, 1), (("x", "y"), 8, 2)):
    assert seconds(reduction(axes, n)) == pytest.approx(
      2 * (n - 1) / n * 4000 / (links * hardware.link.bandwidth)
    )
