"""The lines that a run prints before its first step."""

import dataclasses
import types

from caatnet.train import summary
from tests.caatnet.train import linear_model as toy


def test_summary_has_units_of_its_sizes():
  experiment = toy.make()
  dataset = types.SimpleNamespace(
    name="toy", sha256="a" * 64, tokenizer=None, table=None
  )
  facts = {
    "devices": "1 x cpu", "matmul_flops_per_second": 2.5e10,
    "communication_per_step": [
      {"axis": "data", "phase": "update", "bytes": size, "dtype": "float32"}
      for size in (99_999.0, 1e5, 2_500_000.0)
    ],
    "communication_unknown": ["custom call of 'x'"],
  }
  lines = list(summary.summary(experiment, dataset, facts))
  assert lines[0] == f"data      toy  sha256 {'a' * 16}"
  assert lines[1].startswith("axes ")
  assert lines[1].endswith(";  1 x cpu devices")
  assert lines[2:] == [
    "model     0.00M parameters, float32;  matrix rate 25 GFLOP/s",
    *(f"sends     data axis, update: {text} per device and step (float32)"
      for text in ("99.999 kB", "0.100 MB", "2.500 MB")),
    "sends     unknown: custom call of 'x' may communicate and is not counted",
  ]
  dataset.tokenizer = types.SimpleNamespace(
    files={"tokenizer.json": ""}, name="bpe", identity="b" * 64
  )
  dataset.table = types.SimpleNamespace(
    summary=lambda devices: f"{len(devices)} tables"
  )
  lines = list(summary.summary(experiment, dataset, facts))
  assert lines[1:3] == [
    f"tokens    bpe (sha256 {'b' * 16})", "features  1 tables"
  ]
  experiment = dataclasses.replace(
    toy.make(data=2, scheme="zero1"), unexecuted="moments on cxl"
  )
  lines = list(summary.summary(experiment, dataset, facts))
  assert lines[4:6] == [
    f"zero      {experiment.program.layout.partition}",
    "placement not executed: moments on cxl",
  ]
