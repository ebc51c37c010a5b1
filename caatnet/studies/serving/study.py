"""The study of serving: what the scheduler does, simulated.

``config.subject`` says what is simulated: ``vllm_log`` replays the log of a
real server (`caatnet.studies.serving.vllm_log`), ``fastswitch`` compares ways
to take a request's pages (`caatnet.studies.serving.fastswitch`), ``fairness``
policies (`caatnet.studies.serving.fairness`).
"""

from collections.abc import Mapping
from typing import Any

from caatnet.checks import one_of
from caatnet.studies.serving import fairness, fastswitch, vllm_log

SUBJECTS = {
  "fairness": fairness.run,
  "fastswitch": fastswitch.run,
  "vllm_log": vllm_log.run,
}


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Computes the study.

  Args:
    config: A config like configs/serving/vllm_log.py, as nested dicts.

  Returns:
    Plain data, with the keys "study" and "subject".

  Raises:
    ValueError: The subject is unknown, or a value does not fit.
  """
  one_of("config.subject", config.get("subject"), tuple(SUBJECTS))
  return {
    "study": "serving",
    "subject": config["subject"],
    **SUBJECTS[config["subject"]](config),
  }
