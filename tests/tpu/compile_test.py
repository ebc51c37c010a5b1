"""Training programs compiled ahead of time for TPUs: `make test-tpu`."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("libtpu", reason="the tpu extra is not installed")

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.inspection import study
from caatnet.models.lm.communication import tensor_reductions
from configs.caatnet import tiny
from parallel.ledger import targets

SMALL = "model.width=256 model.num_heads=8 model.ffn_width=512"


def analyse(target, overrides, mesh, options=None):
  target = targets.resolve(target)
  config = override(tiny.get_config("demo"), f"{SMALL} {overrides}")
  experiment = experiments.build(config, mesh, list(target.devices))
  result = study.analyse(experiment, target, options)
  assert result["unknown"] == []  # every instruction is understood
  return experiment, result


def total(result, side, phase, axis="tensor"):
  return sum(
    r["bytes"]
    for row in result["ledger"]
    if row["phase"] == phase and row["axes"] == [axis]
    for r in row[side]
  )


@pytest.mark.parametrize(
  ("target", "options"),
  [("tpu:v5e:2x4", None), ("tpu:v5p:2x2x2", {}), ("tpu:v6e:2x4", {})],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_bytes_and_dtypes_are_the_requested_ones(
  target, options, dtype
):
  """Collectives keep their bytes and dtypes, including widened reductions."""
  experiment, result = analyse(
    target, f"sync.p=0.5 model.dtype={dtype}", {"tensor": 8}, options
  )
  assert not any(row["differs"] for row in result["ledger"]), result["ledger"]
  config = experiment.program.model.config
  expected = tensor_reductions(
    config,
    data_lanes=1,
    batch_size=experiment.data.batch_size,
    seq_len=experiment.data.seq_len,
  )
  sizes = {"float32": 4, "bfloat16": 2}
  for phase in ("forward", "backward"):
    formula = 0
    for reduction, count in expected.items():
      if reduction.phase == phase:
        elements = 1
        for size in reduction.shape:
          elements *= size
        formula += count * elements * sizes[reduction.dtype]
    assert total(result, "compiled", phase) == formula


@pytest.mark.parametrize(
  ("seq_len", "attention"), [(32, "xla"), (384, "splash")]
)
def test_program_compiles_with_each_selected_attention(seq_len, attention):
  experiment, _ = analyse(
    "tpu:v5e:2x4", f"data.seq_len={seq_len}", {"tensor": 8}, {}
  )
  assert experiment.program.model.config.attention == attention


def test_memory_report_equals_the_compiler_analysis():
  experiment, result = analyse("tpu:v5e:2x4", "", {"tensor": 8})
  analysis = (
    experiment.lower_step()
    .compile(experiment.program.layout.compiler_options())
    .memory_analysis()
  )
  assert result["memory"]["total"] == (
    analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    - analysis.alias_size_in_bytes + analysis.temp_size_in_bytes
    + analysis.generated_code_size_in_bytes
  )
  assert result["memory"]["capacity"] == 16 * 10**9
  assert result["memory"]["padding by layout"] >= 0


@pytest.mark.parametrize("target", ["tpu:v5p:2x2x2", "tpu:v6e:2x4"])
def test_target_options_make_reductions_asynchronous(target):
  overrides = "sync.p=0.5 model.dtype=bfloat16"
  _, quiet = analyse(target, overrides, {"tensor": 8}, {})
  _, chosen = analyse(target, overrides, {"tensor": 8})
  fraction = [
    sum(row["asynchronous"] for row in r["overlap"])
    / sum(row["bytes"] for row in r["overlap"])
    for r in (quiet, chosen)
  ]
  assert fraction[0] == 0.0
  assert fraction[1] > 0.99
  assert sum(row["hidden"] for row in chosen["overlap"]) > 0


def test_compile_command_compares_two_programs(tmp_path):
  picture = tmp_path / "c.png"
  result = subprocess.run(
    [sys.executable, "-m", "launch.compile",
     "--config=configs/caatnet/tiny.py", "--target=tpu:v5e:2x4",
     "--mesh=tensor:8", "--compare=config.sync.p=0.5", "--json",
     f"--plot={picture}"],
    capture_output=True, text=True, timeout=300, check=False,
  )
  assert result.returncode == 0, result.stderr
  base, half = json.loads(result.stdout).values()
  inside = [
    sum(c["bytes"] * c["count"] for c in side["collectives"]
        if c["where"].startswith("blocks"))
    for side in (base, half)
  ]
  assert inside[0] == 2 * inside[1] > 0
  assert picture.stat().st_size > 10_000


def test_topology_unsupported_by_libtpu_is_refused():
  with pytest.raises(ValueError, match="v5p:3x3x3"):
    targets.resolve("tpu:v5p:3x3x3")
