"""Order of a step's collectives on CPUs, in compiled programs.

XLA:CPU runs independent instructions in any order. Two collectives of different
groups of devices, neither of which depends on the other, can deadlock, rarely
and mostly on a busy machine, until XLA aborts the process after 40 s.
"""

import re

import jax
import pytest

from caatnet.train.evaluate import make_eval_step
from parallel.ledger import hlo
from tests import users
from tests.caatnet.models import models_test
from tests.caatnet.studies import decoding_test
from tests.caatnet.train import stages_test, zero_test

COLLECTIVES = (
  "all-reduce", "all-gather", "reduce-scatter", "all-to-all",
  "collective-permute",
)


def groups_of(module, instruction):
  """Returns the groups of an instruction's collectives, loops included."""
  found = set()
  if instruction.opcode == "collective-permute":
    found.add("all devices")
  elif instruction.opcode in COLLECTIVES:
    groups = instruction.attribute("replica_groups")
    # A group of one device waits for no other.
    if not re.fullmatch(r"\{(\{\d+\},?)+\}", groups):
      found.add(groups)
  for name in instruction.calls():
    computation = module.computations.get(name)
    for inner in computation.instructions if computation else ():
      found |= groups_of(module, inner)
  return found


def exclusive(module, one, other):
  """Whether both are actions of pipeline stages, which have one per tick."""

  def is_action(instruction):
    return instruction.opcode == "conditional" and any(
      "/action_" in inner.op_name for name in instruction.calls()
      for inner in module.computations[name].instructions
    )

  return is_action(one) and is_action(other)


def unordered(text, of_one_group=False):
  """Returns pairs of collectives of different groups without dependency.

  Args:
    text: The compiled program.
    of_one_group: Whether pairs of the same groups of devices are included.
  """
  module = hlo.parse(text)
  found = []
  for computation in module.computations.values():
    before, seen = {}, []  # name -> names that it depends on
    for x in computation.instructions:
      waits = x.attribute("control-predecessors")
      sources = [*x.operands, *re.findall(r"[\w.-]+", waits)]
      before[x.name] = set().union(*(before.get(s, set()) for s in sources))
      groups = groups_of(module, x)
      if not groups:
        continue
      found += [
        (y.op_name, x.op_name) for y, others in seen
        if y.name not in before[x.name]
        and (of_one_group or len(groups | others) > 1)
        and not exclusive(module, x, y)
      ]
      seen.append((x, groups))
      before[x.name].add(x.name)
  return found


OUTER = (
  "parallel.worker=2 parallel.data=4 parallel.tensor=2 train.accumulation=1 "
  "zero.levels=node:2,gpu:2 outer.algorithm="
)
WORKERS = {"worker": 2, "node": 2, "tensor": 2}
PARTS = "parallel.stage=2 parallel.tensor=2 sync.p=0.5 "
STAGES = {"stage": 2, "tensor": 2}


@pytest.mark.rotated
@pytest.mark.parametrize(("scheme", "overrides", "mesh"), [
  *((scheme, "", zero_test.MESH) for scheme in zero_test.SCHEMES),
  ("zero3", "zero.prefetch=True", zero_test.MESH),
  ("zero3", f"{OUTER}diloco outer.sync_every=1 outer.codec=int4 outer.block=8 "
   "outer.error_feedback=True", {"worker": 2, "node": 2, "gpu": 2}),
  ("zero1", f"{OUTER}dc_s3gd", WORKERS),
  ("zero1", f"{OUTER}noloco outer.sync_every=1", WORKERS),
  ("zero3", f"{OUTER}sparseloco outer.sync_every=1 outer.chunk=8 outer.top_k=4",
   WORKERS),
])
def test_step_orders_collectives_of_different_devices(scheme, overrides, mesh):
  experiment = zero_test.make(scheme, overrides, mesh)
  assert unordered(users.compiled(experiment.lower_step()).as_text()) == []


@pytest.mark.rotated
@pytest.mark.parametrize(("overrides", "mesh"), [
  ("", STAGES),
  ("pipeline.schedule=zb_h1 pipeline.keep=residuals", STAGES),
  ("parallel.worker=2 outer.algorithm=diloco outer.sync_every=1",
   STAGES | {"worker": 2}),
  *((f"parallel.data=2 zero.scheme={scheme} zero.levels=data:2",
     STAGES | {"data": 2}) for scheme in ("zero1", "zero3")),
])
def test_pipeline_orders_collectives_of_different_devices(overrides, mesh):
  experiment = stages_test.make(PARTS + overrides, mesh)
  assert unordered(users.compiled(experiment.lower_step()).as_text()) == []


RANKS = "parallel.worker=2 parallel.data=2 "


@pytest.mark.parametrize(("name", "overrides", "mesh"), [
  ("graph", RANKS, {"worker": 2, "data": 2}),
  ("transformer", f"{RANKS} parallel.tensor=2",
   {"worker": 2, "data": 2, "tensor": 2}),
])
def test_evaluation_orders_collectives_of_different_devices(
  name, overrides, mesh
):
  experiment = models_test.make(name, overrides, mesh)
  program = experiment.program
  params = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    program.stored_shapes, program.layout.shardings(program.specs),
  )
  lowered = make_eval_step(program).lower(params, experiment.abstract_batch())
  assert unordered(users.compiled(lowered).as_text()) == []


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_inference_orders_collectives_of_different_devices(phase):
  step = decoding_test.step(
    phase, "parallel.data=2 parallel.tensor=4 sync.p=0.5",
    {"data": 2, "tensor": 4},
  )
  assert unordered(users.compiled(step.lower()).as_text()) == []


def test_reductions_of_nano_batches_follow_one_another():
  step = decoding_test.step(
    "decode", "parallel.data=2 parallel.tensor=4 sync.p=0.5 "
    "inference.nanobatches=3", {"data": 2, "tensor": 4},
  )
  text = users.compiled(step.lower()).as_text()
  assert text.count(" all-reduce(") >= 3 * 5
  assert unordered(text, of_one_group=True) == []


def all_reduce(name, operand, groups):
  return (
    f"  %{name} = f32[4] all-reduce(%{operand}), replica_groups={groups}, "
    f'to_apply=%add, metadata={{op_name="{name}"}}\n'
  )


@pytest.mark.parametrize(("operand", "groups", "expected"), [
  ("x", "{{0,2},{1,3}}", [("first", "second")]),
  ("first", "{{0,2},{1,3}}", []),  # depends on the first one
  ("x", "{{0,1},{2,3}}", []),  # the same groups
  ("x", "{{0},{1},{2},{3}}", []),  # no other device
])
def test_unordered_collectives_are_found(operand, groups, expected):
  text = (
    "HloModule m\n\nENTRY %main (x: f32[4]) -> f32[4] {\n"
    "  %x = f32[4] parameter(0)\n"
    + all_reduce("first", "x", "{{0,1},{2,3}}")
    + all_reduce("second", operand, groups)
    + "  ROOT %sum = f32[4] add(%first, %second)\n}\n"
  )
  assert unordered(text) == expected
