"""Compiled inference steps: bytes by formula, and a cache kept in place."""

import collections
import dataclasses
import json
import re

import jax
import pytest

from caatnet.config import inference
from caatnet.config.override import override
from caatnet.inspection import decoding, report
from caatnet.inspection.programs import CompiledProgram
from caatnet.show import render
from configs.caatnet import tiny
from parallel.ledger import hlo, ledger, targets
from parallel.ledger.ledger import Collective
from parallel.ledger.targets import Target
from parallel.plans.hardware.clusters import CLUSTERS
from tests import users

SMALL = (
  "model.width=64 model.num_layers=2 model.num_heads=8 model.num_kv_heads=8 "
  "model.ffn_width=96 inference.batch=3 inference.context=64 "
  "inference.chunk=24 "
)


# A compiled program without instructions.
EMPTY = hlo.parse("HloModule empty\n\nENTRY %main () -> f32[] {\n}\n")


def step(phase, overrides, mesh):
  config = override(tiny.get_config(), SMALL + overrides)
  built = inference.build(config, mesh)
  return decoding.step_of(phase, built)


# (phase, overrides, mesh)
CASES = {
  "p=1": ("prefill", "", {"tensor": 8}),
  "not a whole number": ("decode", "sync.p=0.29", {"tensor": 8}),
  "per layer": (
    "prefill", "sync.p_attention=0.5,0.0 sync.p_mlp=1.0,0.25", {"tensor": 8}
  ),
  "grouped, one shot": (
    "decode",
    "model.num_kv_heads=2 parallel.tensor=2 sync.p=0.25 sync.route=one_shot",
    {"tensor": 2},
  ),
  "nano-batches": (
    "decode", "sync.p=0.29 inference.nanobatches=3", {"tensor": 8}
  ),
  "nano-batches of a chunk": (
    "prefill", "sync.p_attention=0.5,0.0 sync.p_mlp=1.0,0.25 "
    "inference.nanobatches=2", {"tensor": 8}
  ),
  "lanes, projections in 16 bits": (
    "prefill", "sync.p=0.5 sync.forward_dtype=bfloat16", {"tensor": 2}
  ),
  "replicas, two on a device": (
    "decode", "parallel.data=4 parallel.tensor=4 sync.p=0.75",
    {"data": 2, "tensor": 4},
  ),
}


@pytest.mark.parametrize("case", CASES)
def test_lowered_step_sends_the_bytes_of_the_formula(case):
  phase, overrides, mesh = CASES[case]
  found = step(phase, overrides, mesh)
  sums = collections.Counter()
  for entry in ledger.collectives(found.lower(), found.program.layout.mesh):
    if entry.bytes:
      sums[entry.kind, entry.dtype] += entry.count * entry.bytes
  assert sums == found.formula()
  assert sums["all_gather", "int32"]  # from sampling


@pytest.mark.parametrize("count", [2, 3])
def test_nano_batches_reduce_as_many_bytes_by_more_collectives(count):
  """Each of two layers has two reductions, and there is the embedding's."""
  whole, cut = (
    step("decode", f"sync.p=0.5 inference.nanobatches={n}", {"tensor": 8})
    for n in (1, count)
  )
  assert cut.formula() == whole.formula()
  one, more = (
    sum(e.count for e in ledger.collectives(x.lower(), x.program.layout.mesh)
        if e.where != "sample" and e.bytes)
    for x in (whole, cut)
  )
  assert (one, more) == (5, 5 * count)


def test_reductions_are_in_the_scopes_of_their_nano_batches():
  """Three pieces of four decodes: 2, 1 and 1."""
  cut = step(
    "decode", "inference.batch=4 inference.nanobatches=3", {"tensor": 8}
  )
  found = collections.Counter()
  for e in ledger.collectives(cut.lower(), cut.program.layout.mesh):
    for piece in re.findall(r"nanobatch_(\d)", e.where):
      found[piece] += e.bytes * e.count
  # The embedding and two reductions of each of two layers, float32.
  token = 5 * cut.program.model.config.width * 4
  assert found == {"0": 2 * token, "1": token, "2": token}


# An all-reduce during a product, in scopes of pieces.
OVERLAPPED = """HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[64,64], g: f32[1000]) -> f32[1000] {
  %x = f32[64,64]{1,0} parameter(0)
  %g = f32[1000]{0} parameter(1)
  %start = f32[1000]{0} all-reduce-start(%g), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add, metadata={op_name="jit(f)/nanobatch_0/psum"}
  %y = f32[64,64]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/SCOPE/dot"}
  ROOT %done = f32[1000]{0} all-reduce-done(%start)
}
"""  # noqa: E501


@pytest.mark.parametrize(("where", "share"), [
  ("nanobatch_1/mlp", 1), ("nanobatch_0/mlp", 0), ("head", 0),
])
def test_only_products_of_another_nano_batch_hide_bytes(where, share):
  row = hidden(OVERLAPPED.replace("SCOPE", where))
  assert row["bytes"] == row["asynchronous"] == 4000
  assert row["overlapped"] == share * 4000
  assert (row["hidden"] > 0) == bool(share)


def test_kernels_of_another_nano_batch_overlap_bytes():
  text = OVERLAPPED.replace("SCOPE", "nanobatch_1").replace(
    "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    'custom-call(%x), custom_call_target="attention"',
  )
  assert hidden(text)["overlapped"] == 4000
  copied = text.replace(
    'custom-call(%x), custom_call_target="attention"', "copy(%x)"
  )
  assert hidden(copied)["overlapped"] == 0


def test_bytes_of_reductions_in_a_loop_count_for_each_iteration():
  head, main = OVERLAPPED.replace("SCOPE", "nanobatch_1").split("ENTRY %main")
  lines = main.splitlines()[3:-2]  # start and product
  text = "\n".join([
    head + "%body (p: (f32[64,64], f32[1000])) -> (f32[64,64], f32[1000]) {",
    "  %p = (f32[64,64]{1,0}, f32[1000]{0}) parameter(0)",
    "  %x = f32[64,64]{1,0} get-tuple-element(%p), index=0",
    "  %g = f32[1000]{0} get-tuple-element(%p), index=1",
    *lines,
    "  %done = f32[1000]{0} all-reduce-done(%start)",
    "  ROOT %out = (f32[64,64]{1,0}, f32[1000]{0}) tuple(%y, %done)",
    "}", "",
    "%more (q: (f32[64,64], f32[1000])) -> pred[] {",
    "  %q = (f32[64,64]{1,0}, f32[1000]{0}) parameter(0)",
    "  ROOT %yes = pred[] constant(true)",
    "}", "",
    "ENTRY %main (a: (f32[64,64], f32[1000])) -> (f32[64,64], f32[1000]) {",
    "  %a = (f32[64,64]{1,0}, f32[1000]{0}) parameter(0)",
    "  ROOT %loop = (f32[64,64]{1,0}, f32[1000]{0}) while(%a), "
    'condition=%more, body=%body, backend_config={"known_trip_count":'
    '{"n":"3"}}',
    "}", "",
  ])
  row = hidden(text)
  assert row["count"] == 3
  assert row["bytes"] == row["asynchronous"] == row["overlapped"] == 12_000


def hidden(text):
  """Returns the row of the collectives of a program on eight GPUs."""
  cluster = CLUSTERS["h200"]
  mesh = jax.make_mesh((8,), ("tensor",))
  target = Target(
    "node", tuple(mesh.devices.flat), cluster.device, cluster.levels[:1]
  )
  made = CompiledProgram(target, mesh, hlo.parse(text), [], [], {}, None)
  (row,) = decoding.nanobatch_overlap(made, {})
  return row


@pytest.mark.parametrize(("phase", "overrides", "wanted"), [
  ("decode", "inference.nanobatches=1", 1),
  ("decode", "inference.batch=8 inference.nanobatches=2", 1 / 2),
  ("decode", "inference.nanobatches=2", 1 / 2),  # 2 and 1 of 3 sequences
  # Of 64 positions, the last 24 are the chunk: to 52 and 64, or 48, 56 and 64.
  ("prefill", "inference.nanobatches=2", (52 + 64) / 128),
  ("prefill", "inference.nanobatches=3", (48 + 56 + 64) / 192),
])
def test_nano_batches_read_their_own_contexts(phase, overrides, wanted):
  cut = step(phase, overrides, {"tensor": 8})
  array = hlo.Shape("float32", (1000, 64), 32)
  (own,), (all_of_them,) = (
    decoding._kernel_reads(each, EMPTY, [array]).values()
    for each in (cut, dataclasses.replace(cut, nanobatches=None))
  )
  assert own / all_of_them == pytest.approx(wanted)


def test_share_of_p_in_sent_bytes_is_exact():
  """At p = 0, a step sends at most the embedding, apart from sampling."""
  whole, part, none = (
    step("decode", f"sync.p={p}", {"tensor": 8}).formula()
    for p in (1, 0.25, 0)
  )
  key = "all_reduce", "float32"
  assert part[key] - none[key] == 0.25 * (whole[key] - none[key]) > 0
  assert {k: v for k, v in part.items() if k != key} == {
    k: v for k, v in whole.items() if k != key
  }


def analyse(step):
  """Compiles a step for this machine with the options that users get."""
  return decoding.analyse(step, targets.resolve("cpu:8"), users.OPTIONS)


def test_compiled_step_reports_memory_and_bytes(capsys):
  found = step("decode", "sync.p=0.5", {"tensor": 8})
  result = analyse(found)
  assert json.loads(json.dumps(result)) == result
  memory = result["memory"]
  # 3 sequences of 64 positions, keys and values of 2 layers, 8 channels.
  assert memory["cache"] == found.cache_shape.size_bytes == (
    3 * 64 * 2 * 2 * 8 * 4
  )
  assert memory["padding by layout"] == 0
  assert memory["temporaries"] < memory["cache"]
  for row in result["inference"]["formula"]:
    assert row["formula"] == row["lowered"] == row["compiled"] > 0
  # XLA:CPU has no kernel for attention over pages.
  assert result["inference"]["gathers_pages"]
  assert "roofline" not in result
  render.show(report.report({"base": result}))
  printed = capsys.readouterr().out
  assert "decode of base: 3 x 1 tokens" in printed
  assert "cache" in printed


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_widened_cache_is_reported_with_the_key_that_avoids_it(dtype, capsys):
  """XLA:CPU widens the whole 16-bit cache to write a row."""
  found = step("decode", f"model.dtype={dtype}", {"tensor": 8})
  result = analyse(found)
  widens = dtype == "bfloat16"
  assert bool(result["inference"]["widened"]) == widens
  render.show(report.report({"base": result}))
  printed = " ".join(capsys.readouterr().out.split())
  assert ("config.model.dtype=float32" in printed) == widens


# A single lane, replica of a device, head or row of scales is a dim of size 1,
# for which XLA:CPU may copy the whole array.
@pytest.mark.parametrize(("phase", "overrides", "mesh"), [
  ("decode", "parallel.data=4 parallel.tensor=2", {"tensor": 2}),
  ("prefill", "parallel.data=4 parallel.tensor=8", {"tensor": 8}),
  ("decode", "parallel.tensor=8", {"tensor": 2}),
  ("decode", "parallel.tensor=8 inference.cache=int8", {"tensor": 8}),
  ("decode", "inference.nanobatches=3", {"tensor": 8}),
  ("prefill", "inference.nanobatches=2 inference.cache=int8", {"tensor": 2}),
  ("decode", "parallel.data=4 parallel.tensor=4 inference.cache=int8",
   {"data": 2, "tensor": 4}),
])
def test_cache_is_kept_in_place(phase, overrides, mesh):
  found = step(phase, f"model.dtype=float32 {overrides}", mesh)
  assert not analyse(found)["inference"]["widened"]


class Copying(decoding.InferenceStep):
  """Step that multiplies the cache, and so writes all of it."""

  def lower(self):
    def copies(params, state, batch, sampling):
      cache, latest = state
      return jax.tree.map(lambda x: 2 * x, cache), latest

    return jax.jit(copies, donate_argnums=1).lower(
      self.params, self.state, *self.inputs
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_copied_cache_is_an_error_that_names_the_instruction(dtype):
  found = step("decode", f"model.dtype={dtype}", {"tensor": 8})
  copying = Copying(**vars(found))
  with pytest.raises(ValueError, match=(
    r"--phase=decode for cpu:8 does not keep the cache in place: a copy "
    r"\(\w+( in a fusion)?\): \w+"
  )):
    analyse(copying)


@pytest.mark.parametrize("factor", [2, 1, 1 / 2])
def test_kernel_reads_one_layer_and_only_positions_of_the_contexts(factor):
  """The cache has `factor` times the positions of all contexts."""
  found = step("decode", "", {"tensor": 8})
  shape = found.cache_shape
  pages = int(shape.num_pages * factor)
  found = dataclasses.replace(
    found, cache_shape=dataclasses.replace(shape, num_pages=pages)
  )
  array = hlo.Shape("float32", (shape.num_layers * pages, 64), 32)
  reads = decoding._kernel_reads(found, EMPTY, [array])
  whole = array.bytes / shape.num_layers
  assert reads == {array.dims: pytest.approx(whole / max(factor, 1))}


def test_only_all_reduces_have_a_known_latency():
  cluster = CLUSTERS["h200"]
  mesh = jax.make_mesh((2, 4), ("data", "tensor"))
  target = Target(
    "node", tuple(mesh.devices.flat), cluster.device, cluster.levels[:1]
  )
  reduced, gathered = (
    Collective(
      kind, (axis,), mesh.shape[axis], "float32", (8,), 1, "forward", False,
      None, "",
    )
    for kind, axis in (("all_reduce", "tensor"), ("all_gather", "data"))
  )
  empty = dataclasses.replace(reduced, axes=("data",), group_size=2, shape=(0,))
  made = CompiledProgram(
    target, mesh, EMPTY, [], [reduced, gathered, empty], {}, None
  )
  (name,) = decoding._latencies(made)
  assert name == "smallest all-reduce over tensor"
