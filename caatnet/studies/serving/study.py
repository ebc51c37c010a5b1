"""Study of serving: simulations of the scheduler.

``config.subject`` selects the simulation: ``vllm_log`` replays the log of a
real server (`caatnet.studies.serving.vllm_log`), ``fastswitch`` compares
methods of preemption (`caatnet.studies.serving.fastswitch`), ``fairness``
compares scheduling policies (`caatnet.studies.serving.fairness`),
``composition`` switches between experts
(`caatnet.studies.serving.composition`), and ``nanobatches`` cuts steps into
nano-batches that overlap (`caatnet.studies.serving.nanobatches`).
"""

from collections.abc import Mapping
from typing import Any

from caatnet.studies.serving import (
  composition,
  fairness,
  fastswitch,
  nanobatches,
  vllm_log,
)
from parallel.base.checks import known

SUBJECTS = {
  "composition": composition.run,
  "fairness": fairness.run,
  "fastswitch": fastswitch.run,
  "nanobatches": nanobatches.run,
  "vllm_log": vllm_log.run,
}


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Computes the study.

  Args:
    config: Config like configs/serving/vllm_log.py, as nested dicts.

  Returns:
    Plain data, with the keys "study" and "subject".

  Raises:
    ValueError: The subject is unknown, or a value is invalid.
  """
  known("config.subject=", config.get("subject"), tuple(SUBJECTS))
  return {
    "study": "serving",
    "subject": config["subject"],
    **SUBJECTS[config["subject"]](config),
  }
