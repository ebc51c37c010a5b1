"""Training programs compiled ahead of time for GPUs: `make test-gpu`."""

import pytest

pytest.importorskip(
  "jax_cuda12_plugin", reason="the cuda extra is not installed"
)

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.inspection import study
from configs.caatnet import tiny
from parallel.ledger import targets

# Large enough that compute can hide a reduction.
SIZES = (
  "model.width=1024 model.ffn_width=2816 sync.p=0.5 model.dtype=bfloat16 "
  "data.batch_size=64"
)


def analyse(target, overrides="", mesh=None, options=None):
  target = targets.resolve(target)
  config = override(tiny.get_config("demo"), f"{SIZES} {overrides}")
  experiment = experiments.build(config, mesh, list(target.devices))
  result = study.analyse(experiment, target, options)
  assert result["unknown"] == []  # every instruction is understood
  return experiment, result


def hidden(result):
  (row,) = result["overlap"]
  return row["hidden"] / row["bytes"]


@pytest.mark.parametrize("gpu", ["a100", "a100-pcie", "h100", "h200", "b200"])
def test_compiled_bytes_and_dtypes_are_the_requested_ones(gpu):
  experiment, result = analyse(f"gpu:{gpu}:1x8")
  assert experiment.program.model.config.attention == "cudnn"
  assert not any(row["differs"] for row in result["ledger"]), result["ledger"]
  (row,) = result["overlap"]
  assert row["asynchronous"] > 0.99 * row["bytes"]


def test_computing_shared_columns_first_hides_more_communication():
  first = analyse("gpu:h200:1x8", "sync.overlap=on")[1]
  together = analyse("gpu:h200:1x8", "sync.overlap=off")[1]
  assert hidden(first) > hidden(together)


def test_reduction_between_nodes_is_timed_by_the_network_link():
  mesh = {"data": 2, "tensor": 8}
  _, result = analyse("gpu:h200:2x8", "parallel.data=2", mesh)
  per_byte = {
    tuple(row["axes"]): row["seconds"] / row["bytes"]
    for row in result["overlap"]
  }
  # Ring of 2 over 50 GB/s compared with ring of 8 over 450 GB/s.
  assert per_byte["data",] == pytest.approx(1 / 50e9)
  assert per_byte["tensor",] == pytest.approx(1.75 / 450e9)
