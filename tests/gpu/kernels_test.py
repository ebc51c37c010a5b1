"""GPU kernels compiled ahead of time by Triton: `make test-gpu`."""

import math

import jax
import pytest

pytest.importorskip(
  "jax_cuda12_plugin", reason="the cuda extra is not installed"
)

from caatnet.benchmarks.programs import kernels
from caatnet.config import experiments
from caatnet.config.override import override
from configs.benchmark import kernels as kernels_config
from configs.caatnet import tiny
from parallel.kernels.add_norm import cases as add_norm_cases
from parallel.kernels.gather_rows import cases as gather_cases
from parallel.kernels.reduce_add_norm import cases as reduce_cases
from parallel.ledger import targets
from tests.parallel.kernels.ahead_of_time import (
  codec_calls,
  lowered_add_norm,
  lowered_codec,
  lowered_gather_rows,
  lowered_reduce_add_norm,
  on_targets,
)

TARGETS = ("gpu:a100:1x1", "gpu:h200:1x1", "gpu:b200:1x1")


@pytest.mark.parametrize(
  ("target", "case"), on_targets(add_norm_cases, *TARGETS), ids=str
)
def test_add_norm_compiles_without_temporaries(target, case):
  program = lowered_add_norm(case, target, "gpu").compile()
  assert "add_norm_backward" in program.as_text()


@pytest.mark.parametrize(
  ("target", "op", "case"), list(codec_calls(*TARGETS)), ids=str
)
def test_codec_compiles_without_decoded_copies(target, op, case):
  program = lowered_codec(op, case, target, "gpu").compile()
  assert "codec_" in program.as_text()
  elements = math.prod(case.shape)
  if elements >= 1 << 20:  # no delta, no decoded vector
    assert program.memory_analysis().temp_size_in_bytes < elements / 10


@pytest.mark.parametrize(
  ("target", "case"), on_targets(reduce_cases, *TARGETS), ids=str
)
def test_reduce_add_norm_compiles_without_decoded_blocks(target, case):
  program = lowered_reduce_add_norm(case, target, "gpu").compile()
  assert "reduce_add_norm" in program.as_text()
  elements = case.rows * case.shared
  if elements >= 1 << 20:  # no sum and no decoded blocks
    temporaries = program.memory_analysis().temp_size_in_bytes
    assert temporaries < elements


@pytest.mark.parametrize(("target", "name"), [
  *((TARGETS[0], name) for name in gather_cases.CASES),
  *((target, name) for target in TARGETS for name in gather_cases.LARGE),
])
def test_gather_rows_is_one_kernel_without_copies(target, name):
  """Passes the table to the kernel without reshaping or copying it."""
  case = (gather_cases.CASES | gather_cases.LARGE)[name]
  program = lowered_gather_rows(case, target, "gpu").compile()
  assert program.as_text().count("__gpu$xla.gpu.triton") == 1
  assert program.memory_analysis().temp_size_in_bytes == 0


@pytest.mark.parametrize("p", [1.0, 0.5])
def test_models_use_the_kernels(p):
  config = override(
    tiny.get_config("demo"), f"parallel.tensor=4 sync.p={p}"
  )
  devices = list(targets.resolve("gpu:h200:1x4").devices)
  text = experiments.build(config, None, devices).lower_step().as_text()
  # Forward and backward of two norms per block and one in the head.
  assert text.count('name = "add_norm"') == 3
  assert text.count('name = "add_norm_backward"') == 3


@pytest.mark.parametrize("codec", ["int8", "e3m0"])
def test_outer_loops_call_the_codec_kernels_once_per_parameter(codec):
  """Counts kernels in the step that exchanges."""
  config = override(
    tiny.get_config("demo"),
    "parallel.worker=4 parallel.tensor=1 outer.algorithm=diloco "
    "outer.sync_every=3 "
    f"outer.error_feedback=True outer.codec={codec}"
  )
  devices = list(targets.resolve("gpu:h200:1x4").devices)
  experiment = experiments.build(config, None, devices)
  text = experiment.lower_step(experiment.outer.plan(2)).as_text()
  num_params = len(jax.tree.leaves(experiment.abstract_state().params))
  for name in ("codec_encode", "codec_nesterov"):
    assert text.count(f'name = "{name}"') == num_params


def test_kernels_access_minimal_bytes_and_xla_at_least_as_many():
  """Counts main memory traffic; 3% are the gain's partial cotangents."""
  config = kernels_config.get_config()
  config.benchmark.target = "gpu:h200:1x1"
  for row in kernels.run(config)["rows"]:
    assert row["implementation"] == "gpu", row
    assert row["kernel_bytes"] <= 1.03 * row["least_bytes"], row
    assert row["xla_bytes"] >= row["kernel_bytes"], row
