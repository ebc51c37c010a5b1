"""Fields that a vLLM log may have, and the values that can be simulated.

`caatnet.studies.serving.vllm_logs` reads some fields. For the others, this
module lists the names of those without effect on the schedule, and the names
and accepted values of those with an effect. Names are those of LLMServingSim's
cluster and profile, and of vLLM's arguments and resolved config. A name has the
same meaning at any depth.
"""

from collections.abc import Collection, Iterator, Mapping
import json
import re
from typing import Any

_DTYPES_16_BIT = (
  "auto", "bfloat16", "float16", "half", "torch.bfloat16", "torch.float16"
)
REPLICAS_REASON = (
  "one engine is simulated, and a log does not tell which engine served a "
  "request; give a log of one engine"
)
# Reason for an error -> field -> accepted values; null is always accepted.
_SIMULATED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
  REPLICAS_REASON: {
    "num_nodes": (1,), "num_instances": (1,), "data_parallel_size": (1,),
    "data_parallel_rank": (0,), "engine_index": (0,), "engine_idx": (0,),
    "nnodes": (1,), "dp_size": (1,), "data_parallel_size_local": (1,),
    "data_parallel_rank_local": (0,), "data_parallel_hybrid_lb": (False,),
    "data_parallel_external_lb": (False,), "data_parallel_index": (0,),
  },
  "experts are not simulated; give a log of a dense model": {
    "ep_size": (1,), "enable_expert_parallel": (False,),
    "is_moe_model": (False,),
  },
  "of an engine's ranks only tensor ranks are simulated": {
    "pp_size": (1,), "pipeline_parallel_size": (1,),
    "decode_context_parallel_size": (1,), "prefill_context_parallel_size": (1,),
  },
  "vLLM's default scheduler is simulated, for one model and whole requests": {
    "pd_type": (), "kv_transfer_config": (), "speculative_config": (),
    "enable_lora": (False,), "lora_config": (), "enable_dbo": (False,),
    "policy": ("fcfs",), "scheduling_policy": ("fcfs",),
    "async_scheduling": (True,), "enable_chunked_prefill": (True,),
    "reserve_full_isl": (True,), "scheduler_reserve_full_isl": (True,),
    "long_prefill_token_threshold": (0,), "max_num_scheduled_tokens": (),
    "prefill_schedule_interval": (1,),
  },
  "weights and cache are simulated with 16 bits": {
    "dtype": _DTYPES_16_BIT, "kv_cache_dtype": _DTYPES_16_BIT,
    "cache_dtype": _DTYPES_16_BIT,
    "quantization": (), "variant": ("bf16", "fp16"),
  },
  "weights and all positions of a running request are on the device": {
    "sliding_window": (0,), "placement": (), "kv_offloading_size": (0,),
    "cpu_offload_gb": (0,), "enable_local_offloading": (False,),
    "enable_attn_offloading": (False,),
    "enable_sub_batch_interleaving": (False,),
  },
  "other versions give fields another meaning": {"schema_version": (1,)},
}
_ACCEPTED_BY_FIELD = {
  name: (values, reason)
  for reason, names in _SIMULATED.items() for name, values in names.items()
}
# Objects without effect, unless one of the fields above enables their use.
_UNUSED = ("compilation_config", "cpu_mem", "cudagraph", "cxl_mem", "power")
# Objects with hundreds of fields, of which only those above are checked.
_SNAPSHOTS = ("hardware", "kv_cache", "resolved_config")
_RESOLVED_CONFIG_PATH = re.compile(r"resolved_config(\.\w+)?")
# Further fields that affect neither the steps nor their measured times.
_NO_EFFECT = {
  *_UNUSED, "dataset_hash", "disable_custom_all_reduce", "disable_log_stats",
  "dp_group", "enable_block_copy", "enforce_eager", "engine_kwargs",
  "finished_at", "gpu_memory_utilization", "instances", "kv_cache_memory_bytes",
  "load_format", "max_model_len", "mem_bw", "mem_latency", "nodes", "npu_mem",
  "num_requests", "seed", "skip_tokenizer_init", "started_at", "tick_seconds",
  "tokenizer", "trust_remote_code", "vllm_version",
}


def check(value: Any, read: Collection[str] | None = None) -> None:
  """Raises ValueError for a field of a file that the simulation does not model.

  Args:
    value: Content of the file.
    read: Names of the fields that are read. Unknown fields are refused, except
      for the values null, false, 0 and empty ones, which switch a feature off.
      None accepts all unknown fields.

  Example:
    >>> check({"engine_kwargs": {"seed": 1, "quantization": "fp8"}})
    Traceback (most recent call last):
    ValueError: engine_kwargs.quantization="fp8" is not simulated, only null: \
weights and cache are simulated with 16 bits
  """
  for place, key, found in _fields(value):
    if key in ("nodes", "instances") and (
      not isinstance(found, list) or len(found) != 1
    ):
      raise ValueError(f"{place} must be a list of one: {REPLICAS_REASON}")
    values, reason = _ACCEPTED_BY_FIELD.get(key, ((), ""))
    known = reason or key in _NO_EFFECT or place.split(".")[0] in _SNAPSHOTS
    if reason and found is not None and found not in values:
      only = " or ".join(map(json.dumps, values)) or "null"
      wrong = f"is not simulated, only {only}: {reason}"
    elif _RESOLVED_CONFIG_PATH.fullmatch(place) and key not in _UNUSED and (
      isinstance(found, str) and re.search("[=({<]", found)
    ):
      wrong = "is an object as text, whose fields cannot be checked"
    elif read is not None and found and not known and key not in read:
      wrong = (
        "is not known to the simulation; remove the field if it changes "
        "neither steps nor their times"
      )
    else:
      continue
    raise ValueError(f"{place}={json.dumps(found, default=str)[:60]} {wrong}")


def first_values(value: Any, names: Collection[str]) -> dict[str, Any]:
  """Returns the fields `names` of a file, each with its first value.

  Values that are objects or null do not count.
  """
  found: dict[str, Any] = {}
  for _, key, item in _fields(value):
    if key in names and item is not None and not isinstance(item, dict):
      found.setdefault(key, item)
  return found


def _fields(value: Any, place: str = "") -> Iterator[tuple[str, str, Any]]:
  """Yields path (after `place`), name and value of each field at any depth."""
  if isinstance(value, list):
    for index, item in enumerate(value):
      yield from _fields(item, f"{place}[{index}]")
  elif isinstance(value, dict):
    for key, item in value.items():
      path = f"{place}.{key}" if place else str(key)
      yield path, key, item
      if key not in _UNUSED:
        yield from _fields(item, path)
