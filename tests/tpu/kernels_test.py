"""TPU kernels compiled ahead of time by Mosaic: `make test-tpu`."""

import collections
import math

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

pytest.importorskip("libtpu", reason="the tpu extra is not installed")

from caatnet.benchmarks.programs import kernels
from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.inspection.study import analyse
from configs.benchmark import kernels as kernels_config
from configs.caatnet import tiny
from parallel import quantize
from parallel.axes import Axis, make_mesh
from parallel.kernels import evidence
from parallel.kernels.add_norm import cases as add_norm_cases
from parallel.kernels.codec.reference import OuterOptions
from parallel.kernels.gather_rows import cases as gather_cases
from parallel.kernels.gather_rows import order as gather_order
from parallel.kernels.reduce_add_norm import cases as reduce_cases
from parallel.kernels.ring_all_reduce import api as ring
from parallel.kernels.ring_all_reduce import cases as ring_cases
from parallel.kernels.schedule_all_reduce import api as schedule
from parallel.kernels.schedule_all_reduce import cases as schedule_cases
from parallel.ledger import ledger, targets
from parallel.wire import NesterovStep, Wire
from tests.parallel.kernels.ahead_of_time import (
  codec_calls,
  lowered,
  lowered_add_norm,
  lowered_codec,
  lowered_gather_rows,
  lowered_reduce_add_norm,
  on_targets,
  shapes,
)

TARGETS = ("tpu:v5e:2x2", "tpu:v5p:2x2x1", "tpu:v6e:2x2")


@pytest.mark.parametrize(
  ("target", "case"), on_targets(add_norm_cases, *TARGETS), ids=str
)
def test_add_norm_compiles_without_temporaries(target, case):
  program = lowered_add_norm(case, target, "tpu").compile()
  text = program.as_text()
  assert "add_norm" in text
  assert "add_norm_backward" in text
  elements = case.rows * (case.shared + case.private)
  if elements >= 1 << 20:
    # Cotangents of the gain per block; no temporary of the stream's size.
    stream_bytes = elements * np.dtype("f2").itemsize
    assert program.memory_analysis().temp_size_in_bytes < stream_bytes / 2


@pytest.mark.parametrize("p", [1.0, 0.5])
@pytest.mark.parametrize("kernels", ["auto", "pallas"])
@pytest.mark.parametrize("target", ["tpu:v5p:2x2x1", "cpu:4"])
def test_models_use_the_kernels_of_the_compilation_target(target, kernels, p):
  """Selects kernels by the target's devices, not the host's."""
  config = override(
    tiny.get_config("demo"), f"parallel.tensor=4 sync.p={p} kernels={kernels}"
  )
  devices = list(targets.resolve(target).devices)
  uses = target != "cpu:4" and (
    kernels == "pallas"
    or evidence.is_step_faster(devices[0].device_kind, "add_norm", p)
  )
  text = experiments.build(config, None, devices).lower_step().as_text()
  # Forward and backward of two norms per block and one in the head.
  assert text.count('kernel_name = "add_norm"') == (3 if uses else 0)
  assert text.count('kernel_name = "add_norm_backward"') == (3 if uses else 0)


@pytest.mark.parametrize("codec", ["int8", "e3m0"])
def test_outer_loops_call_the_codec_kernels_once_per_parameter(codec):
  """Counts kernels in the step that exchanges."""
  config = override(
    tiny.get_config("demo"),
    "parallel.worker=4 parallel.tensor=1 outer.algorithm=diloco "
    "outer.sync_every=3 "
    f"outer.error_feedback=True outer.codec={codec}"
  )
  devices = list(targets.resolve("tpu:v5p:2x2x1").devices)
  experiment = experiments.build(config, None, devices)
  text = experiment.lower_step(experiment.outer.plan(2)).as_text()
  num_params = len(jax.tree.leaves(experiment.abstract_state().params))
  for name in ("codec_encode", "codec_nesterov"):
    assert text.count(f'kernel_name = "{name}"') == num_params


@pytest.mark.parametrize("data", [1, 2])
def test_models_reduce_by_the_kernel_of_a_schedule(data):
  """Two row-parallel projections per scanned block, forward and backward."""
  config = override(
    tiny.get_config("demo"),
    "parallel.tensor=4 sync.p=0.5 sync.route=schedule:bidirectional_ring "
    f"parallel.data={data}",
  )
  target = targets.resolve("tpu:v5p:2x2x1")
  experiment = experiments.build(config, {"tensor": 4}, list(target.devices))
  text = experiment.lower_step().as_text()
  assert text.count('kernel_name = "schedule_all_reduce"') == 4
  rows = analyse(experiment, target, {})["ledger"]
  assert not any(row["differs"] for row in rows), rows
  sent = [
    r["bytes"] for row in rows for r in row["compiled"]
    if r["kind"] == "permute"
  ]
  # Each projection sends 2 (n - 1) / n of the shared 2,048 x 128 float32.
  num_projections = config.model.num_layers * 2
  assert sent == [num_projections * 1.5 * 2048 * 64 * 4] * 2


# Operand of a row-parallel projection: the shared half, 2,048 x 128 float32.
SHARED = 2048 * 64 * 4


@pytest.mark.parametrize(
  ("route", "kernel", "forward", "backward"),
  [
    # Attention's projection and the MLP's; a kernel sends 2 (n - 1) / n.
    ("one_shot", "reduce_add_norm", {"all_gather": 2}, {"all_gather": 2}),
    ("ring_kernel", "ring_partial_all_reduce",
     {"permute": 1.5, "all_reduce": 1}, {"all_reduce": 2}),
  ],
)
def test_models_reduce_and_normalise_in_one_kernel(
  route, kernel, forward, backward
):
  """Fuses attention's row-parallel projection in the forward of a block."""
  config = override(
    tiny.get_config("demo"),
    f"parallel.tensor=4 sync.p=0.5 model.num_layers=1 sync.route={route} "
    "sync.carry=off",
  )
  target = targets.resolve("tpu:v5e:2x2")
  experiment = experiments.build(config, {"tensor": 4}, list(target.devices))
  lowered = experiment.lower_step()
  assert lowered.as_text().count(f'kernel_name = "{kernel}"') == 1
  rows = analyse(experiment, target)["ledger"]
  assert not any(r["differs"] for r in rows if r["phase"] != "update"), rows
  for phase, wanted in (("forward", forward), ("backward", backward)):
    sent = collections.Counter()
    for c in ledger.collectives(lowered, experiment.program.layout.mesh):
      if c.phase == phase and c.where.startswith("blocks"):
        sent[c.kind] += c.bytes * c.count
    assert sent == {kind: n * SHARED for kind, n in wanted.items()}


@pytest.mark.parametrize(
  ("target", "op", "case"), list(codec_calls(*TARGETS)), ids=str
)
def test_codec_compiles_without_decoded_copies(target, op, case):
  program = lowered_codec(op, case, target, "tpu").compile()
  assert "codec_" in program.as_text()
  elements = math.prod(case.shape)
  if elements >= 1 << 20 and len(case.shape) > 1:
    # No delta, decoded vector or copy. (XLA may copy vectors into rows.)
    assert program.memory_analysis().temp_size_in_bytes < elements / 10


@pytest.mark.parametrize("target", ["tpu:v5p:2x2x1", "tpu:v5e:2x2"])
def test_exchanges_copy_no_weights(target):
  """Allocates only scales in addition to the gathered payloads."""
  layers, rows, columns = shape = 2, 2048, 5632
  worker = Axis("worker", 4, 4)
  mesh = make_mesh({"worker": worker}, list(targets.resolve(target).devices))
  wire = Wire("int4", implementation=("tpu",))

  def f(params, momentum, workers):
    step = NesterovStep(params, momentum, OuterOptions(0.7, 0.9))
    return quantize.coded_mean(
      workers, worker, wire, anchor=params, block_dims=1, epilogue=step
    )[0]

  specs = P(), P(), P("worker")
  operands = [
    jax.ShapeDtypeStruct(s, "float32", sharding=NamedSharding(mesh, spec))
    for s, spec in zip((shape, shape, (4, *shape)), specs, strict=True)
  ]
  program = jax.jit(jax.shard_map(
    f, mesh=mesh, in_specs=specs, out_specs=P()
  )).lower(*operands).compile()
  elements = layers * rows * columns
  # Payloads of four workers; XLA does not count bytes accessed by kernels.
  payloads = 4 * elements / 2
  assert program.memory_analysis().temp_size_in_bytes < 1.1 * payloads
  assert program.cost_analysis()["bytes accessed"] < 3 * payloads


@pytest.mark.parametrize(
  ("target", "case"), on_targets(reduce_cases, *TARGETS), ids=str
)
def test_reduce_add_norm_compiles_without_decoded_blocks(target, case):
  program = lowered_reduce_add_norm(case, target, "tpu").compile()
  assert "reduce_add_norm" in program.as_text()
  elements = case.rows * case.shared
  if elements >= 1 << 20:
    # No sum and no decoded blocks; scales may be padded to rows of lanes.
    temporaries = program.memory_analysis().temp_size_in_bytes
    assert temporaries < (case.ranks if case.block else 1) * elements


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ring_cases.LARGE.values(), ids=str)
def test_ring_partial_all_reduce_allocates_only_its_results(target, case):
  n, k, p = case.rows, case.shared, case.private
  shared, private, gain = shapes(
    ((n, k), case.dtype), ((n, p), case.dtype), ((k + p,), "float32")
  )

  def f(*operands):
    return ring.ring_partial_all_reduce(
      *operands, axis_name="tensor", private_scale=case.private_scale,
      implementation="tpu",
    )

  program = lowered(
    f, target, shared, private, shared, private, gain, devices=case.devices
  ).compile()
  text = program.as_text()
  assert "ring_partial_all_reduce" in text
  assert "all-reduce(" not in text
  # XLA copies the results at the end of this program; no other temporary.
  results = 2 * 2 * n * (k + p)
  assert program.memory_analysis().temp_size_in_bytes < 1.01 * results


@pytest.mark.parametrize("target", TARGETS)
def test_schedule_all_reduce_compiles(target):
  table = schedule_cases.ring(4)
  (x,) = shapes(((4096, 2048), "bfloat16"))

  def f(x):
    return schedule.schedule_all_reduce(
      x, table, axis_name="tensor", implementation="tpu"
    )

  program = lowered(f, target, x, devices=4).compile()
  assert "schedule_all_reduce" in program.as_text()


@pytest.mark.parametrize(("target", "name"), [
  *(("tpu:v5p:2x2x1", name) for name in gather_cases.CASES),
  *((target, name) for target in TARGETS for name in gather_cases.LARGE),
])
def test_gather_rows_reads_the_table_from_host_memory(target, name):
  """Keeps the table in host memory and transfers only blocks of rows."""
  case = (gather_cases.CASES | gather_cases.LARGE)[name]
  program = lowered_gather_rows(case, target, "tpu").compile()
  assert "gather_rows" in program.as_text()
  memory = program.memory_analysis()
  blocks = -(-case.rows * gather_order.padded_width(case.width) // 2048)
  assert memory.host_argument_size_in_bytes == 8192 * blocks
  assert memory.argument_size_in_bytes <= max(512, 4 * case.ids)
  if case.ids > 1 << 10:
    # The fetched blocks, at most twice: XLA slices the rows out of them.
    fetched = 8192 * case.ids * max(1, -(-case.width // 2048))
    assert memory.temp_size_in_bytes < 2.01 * fetched


def test_kernels_access_minimal_bytes_and_xla_at_least_as_many():
  """Counts main memory traffic, without vectors that XLA copies into rows."""
  config = kernels_config.get_config()
  config.benchmark.target = "tpu:v5p:2x2x1"
  config.benchmark.ops = ("add_norm", "reduce_add_norm", "encode", "mean")
  for row in kernels.run(config)["rows"]:
    assert row["implementation"] == "tpu", row
    if "vector" not in row["case"]:
      assert row["kernel_bytes"] <= 1.02 * row["least_bytes"], row
    assert row["xla_bytes"] >= row["kernel_bytes"], row
