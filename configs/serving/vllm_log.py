r"""Simulates vLLM's run of 300 requests on an RTX 4090, beside its log.

  python -m launch.simulate --config=configs/serving/vllm_log.py
  python -m launch.simulate --config=configs/serving/vllm_log.py \
    --plot=vllm_log.png --config.change=0.0
  python -m launch.simulate --config=configs/serving/vllm_log.py \
    --config.prefixes=sharegpt-llama-3.1-8b-300-sps10.jsonl
  python -m launch.simulate --config=configs/serving/vllm_log.py \
    --config.prefixes=none

Llama-3.1-8B in bfloat16. Times come from single operations that were measured
on that GPU; nothing is fitted to the log, which has no prompts. Which of them
begin alike, and so share pages, is known from the published workload: 32 of
300. Its file, of casys-kaist/LLMServingSim, gives the same figures.
"""

import ml_collections


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the study: `all`, or `test` for its first requests."""
  if size not in ("all", "test"):
    raise ValueError(f"vllm_log.py:{size}: the sizes are all and test")
  config = ml_collections.ConfigDict()
  config.name = "vllm_log"
  config.study = "serving"
  config.subject = "vllm_log"
  # The first so many requests of the log; 0 for all.
  config.num_requests = 0 if size == "all" else 40
  # Which prompts begin alike: "published", as in the published workload, or
  # "none", or that workload's file.
  config.prefixes = "published"
  # vLLM's options in that run.
  config.server = ml_collections.ConfigDict()
  config.server.policy = "first_come"
  config.server.slots = 256
  config.server.tokens = 2048
  config.server.page_size = 16
  config.server.pages = 2588
  # Whether pages are found by their tokens.
  config.server.reuse = True
  # Whether a request joins only if pages for its whole prompt are left.
  config.server.whole_prompt = True
  # Steps that are under way at a time.
  config.server.steps_ahead = 2
  config.percentiles = (50, 90, 95, 99)
  # An error beyond which a rule is suspected.
  config.tolerance = 0.02
  # By how much pages and times are changed to see what follows; 0 for not.
  config.change = 0.01 if size == "all" else 0.0
  return config
