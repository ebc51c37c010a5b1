"""Summary of a run that is printed before its first step."""

from collections.abc import Iterator, Mapping
from typing import Any

from caatnet.data.protocol import Dataset
from caatnet.train import tokenizer
from caatnet.train.experiment import Experiment
from parallel.base.naming import prefix_error_keys


def summary(
  experiment: Experiment, dataset: Dataset, facts: Mapping[str, Any]
) -> Iterator[str]:
  """Yields lines about data, axes, model, and communication per step.

  Args:
    experiment: The run.
    dataset: The loaded data of the run.
    facts: Content of the run's ``environment.json``.
  """
  model, layout = experiment.program.model, experiment.program.layout
  yield f"data      {dataset.name}  sha256 {dataset.sha256[:16]}"
  if dataset.tokenizer is not None and dataset.tokenizer.files:
    yield f"tokens    {tokenizer.summary(dataset.tokenizer)}"
  if dataset.table is not None:
    devices = layout.mesh.devices.flatten()
    with prefix_error_keys("config.data", ("access",)):
      features = dataset.table.summary(devices)
    yield f"features  {features}"
  yield (
    f"axes      {';  '.join(map(str, layout.axes))};  "
    f"{facts['devices']} devices"
  )
  if layout.partition.optimizer:
    yield f"zero      {layout.partition}"
  if experiment.unexecuted:
    yield f"placement not executed: {experiment.unexecuted}"
  yield (
    f"model     {model.num_params / 1e6:.2f}M parameters, {model.dtype};  "
    f"matrix rate {facts['matmul_flops_per_second'] / 1e9:.0f} GFLOP/s"
  )
  for row in facts["communication_per_step"]:
    unit, scale = ("MB", 1e6) if row["bytes"] >= 1e5 else ("kB", 1e3)
    yield (
      f"sends     {row['axis']} axis, {row['phase']}: "
      f"{row['bytes'] / scale:.3f} {unit} per device and step "
      f"({row['dtype']})"
    )
  for what in facts.get("communication_unknown", ()):
    yield f"sends     unknown: {what} may communicate and is not counted"
