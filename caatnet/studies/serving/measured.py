"""Log of vLLM serving 300 requests on an RTX 4090, and that GPU's profile.

The files in ``rtx4090`` are from casys-kaist/LLMServingSim (MIT licence,
copyright 2024 CASYS Lab at KAIST), ``bench/examples/RTX4090`` and
``profiler/perf/RTX4090``: the requests of a run of vLLM 0.19.0 with
Llama-3.1-8B in bfloat16, its state at each second, and times of single
operations in us.
Times of requests are relative to the first arrival in the server's queue. The
log does not contain the tokens of prompts. ``prefixes.csv.gz`` lists the common
prefixes in the published workload,
``workloads/sharegpt-llama-3.1-8b-300-sps10.jsonl``: for each prompt, an earlier
one with most of its first tokens, and their number, if these fill a page. The
files are otherwise unchanged.
"""

from collections.abc import Mapping
import csv
import gzip
import json
import pathlib

import numpy as np

from caatnet.serving.engine.times import Attention, Profile

SOURCE = (
  "casys-kaist/LLMServingSim (MIT licence): bench/examples/RTX4090, "
  "profiler/perf/RTX4090"
)
_FOLDER = pathlib.Path(__file__).parent / "rtx4090"
# Operations of a layer, repeated as often as it runs them, and of a step.
_PER_LAYER = (
  "layernorm", "qkv_proj", "rotary_emb", "o_proj", "layernorm", "gate_up_proj",
  "act_fn", "down_proj",
)
_ONCE = ("embedding", "final_layernorm")
_PER_SEQUENCE = ("lm_head", "sampler")


def _rows(name: str) -> list[dict[str, str]]:
  with gzip.open(_FOLDER / f"{name}.csv.gz", "rt", newline="") as file:
    return list(csv.DictReader(file))


def requests() -> list[dict[str, float]]:
  """Returns lengths and times in seconds of each request, by arrival."""
  return [
    {k: float(v) for k, v in row.items()} for row in _rows("requests")
  ]


def series() -> dict[str, np.ndarray]:
  """Returns the server's state at each second, by column name."""
  rows = _rows("timeseries")
  return {k: np.array([float(row[k]) for row in rows]) for k in rows[0]}


def profile(scale: float = 1.0) -> Profile:
  """Returns the times of the GPU's operations.

  Args:
    scale: Factor on all times.
  """

  def tables(name: str, count: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in _rows(name):
      found.setdefault(row["layer"], []).append(
        (float(row[count]), float(row["time_us"]) * 1e-6)
      )
    return {
      k: tuple(np.array(x) for x in zip(*sorted(v), strict=True))
      for k, v in found.items()
    }

  dense = tables("dense", "tokens")
  heads = tables("per_sequence", "sequences")  # lm_head, sampler
  keys = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
  attention = Attention({
    tuple(int(row[k]) for k in keys): float(row["time_us"]) * 1e-6
    for row in _rows("attention")
  })
  return Profile(
    32,
    [dense[name] for name in _PER_LAYER],
    [dense[name] for name in _ONCE],
    [heads[name] for name in _PER_SEQUENCE],
    attention,
    scale,
  )


def prompts(
  rows: list[Mapping[str, float]], prefixes: str
) -> list[np.ndarray]:
  """Returns a prompt for each request, int32 ``[n]``.

  Args:
    rows: The requests.
    prefixes: Source of common prefixes: "published" for those of the published
      workload; "none"; or the path of that workload's file, whose tokens are
      read.

  Raises:
    ValueError: The file cannot be read, or belongs to other requests.
  """
  rng = np.random.default_rng(0)
  found = [
    rng.integers(2**31 - 1, size=int(row["input_tokens"]), dtype=np.int32)
    for row in rows
  ]
  if prefixes == "none":
    return found
  if prefixes == "published":
    for row in _rows("prefixes"):
      i, like, count = (int(row[k]) for k in ("request", "like", "tokens"))
      if i < len(found):
        # Random tokens, equal only where the published prompts are.
        found[i][:count] = found[like][:count]
    return found
  try:
    lines = pathlib.Path(prefixes).read_text().splitlines()
    found = [
      np.array([*json.loads(line)["input_tok_ids"]], np.int32)
      for line in lines[: len(rows)]
    ]
  except (
    OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError
  ) as error:
    raise ValueError(
      f"config.prefixes={prefixes!r} is neither published nor none nor the "
      f"published workload's file: {error}"
    ) from error
  lengths = [len(tokens) for tokens in found]
  if lengths != [int(row["input_tokens"]) for row in rows]:
    raise ValueError(
      f"config.prefixes={prefixes!r} has other prompts than the log: their "
      "lengths differ"
    )
  return found

