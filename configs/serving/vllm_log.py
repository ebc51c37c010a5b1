r"""Simulation of a vLLM run of 300 requests, compared with its log.

  python -m launch.simulate --config=configs/serving/vllm_log.py
  python -m launch.simulate --config=configs/serving/vllm_log.py \
    --plot=vllm_log.png --config.change=0.0
  python -m launch.simulate --config=configs/serving/vllm_log.py \
    --config.prefixes=sharegpt-llama-3.1-8b-300-sps10.jsonl
  python -m launch.simulate --config=configs/serving/vllm_log.py \
    --config.prefixes=none

The default is the log of an RTX 4090 with Llama-3.1-8B in bfloat16. Two others
are included, of RTX PRO 6000. A folder in a copy of casys-kaist/LLMServingSim
needs no other flag, since profile, workload and sizes of the model are found
there; elsewhere config.profile and config.model.path give them:

  python -m launch.simulate --config=configs/serving/vllm_log.py \
    --config.log=rtxpro6000_llama31_8b
  python -m launch.simulate --config=configs/serving/vllm_log.py \
    --config.log=rtxpro6000_qwen3_32b
  python -m launch.simulate --config=configs/serving/vllm_log.py \
    --config.log=LLMServingSim/bench/examples/RTX4090/Llama-3.1-8B

One engine is simulated. Logs of several engines, and logs with fields that are
not modelled and change what a server does, are rejected; the error names them.

Times come from operations that were measured on the same GPU; nothing is fitted
to the log. A log has no prompts; the published workload tells which prompts (32
of 300) have common prefixes and share pages. With the workload's own file
(config.prefixes), results are the same.
"""

import ml_collections

from caatnet.schema.tree import defaults
from caatnet.studies.serving.vllm_log_keys import VLLMLog


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the study: `all`, or `test` for the first requests."""
  if size not in ("all", "test"):
    raise ValueError(f"vllm_log.py:{size}: the sizes are all and test")
  config = defaults(VLLMLog)
  if size == "test":
    config.num_requests, config.change = 40, 0.0
  return config
