"""Logs of vLLM and profiles of its operations, in LLMServingSim's format.

casys-kaist/LLMServingSim defines the format. The folder of a log has
``requests.jsonl``, ``timeseries.csv``, ``config.json`` and, in newer logs,
``meta.json``; the folder of a profile has ``attention.csv``, ``dense.csv``,
``per_sequence.csv`` and, there or in its parent, ``meta.yaml``. Each may be
gzipped. ``logs/README.md`` describes the logs in this package. A log does not
contain the tokens of prompts.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import itertools
import math
import pathlib
from typing import Annotated

import numpy as np
import yaml

from caatnet.checks import one_of
from caatnet.serving.engine.times import AllReduces, Attention, Profile
from parallel import schema
from parallel.schema import (
  Count,
  Field,
  NotNegative,
  OpenSchema,
  Positive,
  Seconds,
  parse,
  parse_lines,
  parse_table,
)
from parallel.workload import Transformer

SOURCE = "casys-kaist/LLMServingSim (MIT licence)"
_FOLDER = pathlib.Path(__file__).parent / "logs"
INCLUDED = tuple(sorted(p.name for p in _FOLDER.iterdir() if p.is_dir()))
# Sizes of logged models, by their name in ``config.json``.
MODELS = {
  "meta-llama/Llama-3.1-8B": Transformer(128256, 4096, 32, 32, 8, 14336),
  "Qwen/Qwen3-32B": Transformer(
    151936, 5120, 64, 64, 8, 25600, head_width=128, qk_norm=True
  ),
}
# Operations of a layer, in their order; layernorm runs twice.
_PER_LAYER = (
  "layernorm", "qkv_proj", "rotary_emb", "o_proj", "layernorm", "gate_up_proj",
  "act_fn", "down_proj",
)
_OPTIONAL = ("qk_norm",)  # of a layer, in some models
_ONCE = ("embedding", "final_layernorm")
_PER_SEQUENCE = ("lm_head", "sampler")
# vLLM's defaults, for logs without ``meta.json``.
_SLOTS, _TOKENS = 256, 2048
# Largest number of tokens of a request.
_MOST_TOKENS = 2**24
_TokenCount = Annotated[int, Field(ge=0, le=_MOST_TOKENS)]


class _Memory(OpenSchema):
  mem_size: Positive  # GiB
  mem_util: Positive


class _Instance(OpenSchema):
  model_name: str
  tp_size: Count
  npu_mem: _Memory


class _Node(OpenSchema):
  instances: Annotated[list[_Instance], Field(min_length=1)]


class _Cluster(OpenSchema):
  link_bw: Positive  # GB/s
  link_latency: NotNegative  # ns
  nodes: Annotated[list[_Node], Field(min_length=1)]


class _Engine(OpenSchema):
  max_num_seqs: Count
  max_num_batched_tokens: Count


class _Meta(OpenSchema):
  engine_kwargs: _Engine


class _Request(OpenSchema):
  input_toks: Annotated[int, Field(ge=1, le=_MOST_TOKENS)]
  # The time per output token needs two.
  output_toks: Annotated[int, Field(ge=2, le=_MOST_TOKENS)]
  queued_ts: Seconds
  scheduled_ts: Seconds
  first_token_ts: Seconds
  last_token_ts: Seconds


class _Second(OpenSchema):  # of a log
  t: NotNegative
  running: NotNegative
  waiting: NotNegative
  kv_cache_pct: NotNegative


class _Prefix(OpenSchema):
  request: _TokenCount
  like: _TokenCount
  tokens: _TokenCount


class _Prompt(OpenSchema):
  input_tok_ids: list[Annotated[int, Field(ge=0, lt=2**31)]]


class _Dense(OpenSchema):
  layer: str
  count: NotNegative = Field(alias="tokens")
  time_us: Seconds


class _PerSequence(OpenSchema):
  layer: str
  count: NotNegative = Field(alias="sequences")
  time_us: Seconds


class _Point(OpenSchema):  # of attention
  prefill_chunk: _TokenCount
  kv_prefill: _TokenCount
  n_decode: _TokenCount
  kv_decode: _TokenCount
  time_us: Seconds


class _Skew(OpenSchema):
  alpha_default: NotNegative


class _SkewFit(OpenSchema):
  enabled: bool = False
  per_tp: dict[int, _Skew] = Field(default_factory=dict)


class _Profile(OpenSchema):  # meta.yaml
  skew_fit: _SkewFit | None = None


@dataclasses.dataclass(frozen=True)
class Log:
  """Run of a server.

  Attributes:
    name: Name of an included log, or the folder.
    folder: The folder.
    requests: Lengths and times in seconds of each request, by arrival; times
      are relative to the first arrival in the server's queue.
    series: The server's state at each second, by column name.
    model: Name of the model.
    ranks: Number of tensor ranks.
    slots: Largest number of running requests.
    tokens: Largest number of tokens of a step.
    memory_bytes: Memory for weights and cache of each rank.
    link_bandwidth: Bytes per second between ranks in each direction.
    link_latency_s: Latency between ranks.
  """

  name: str
  folder: pathlib.Path
  requests: Sequence[Mapping[str, float]]
  series: Mapping[str, np.ndarray]
  model: str
  ranks: int
  slots: int
  tokens: int
  memory_bytes: float
  link_bandwidth: float
  link_latency_s: float


def load(name: str) -> Log:
  """Reads a log.

  Args:
    name: One of `INCLUDED`, or a folder.

  Raises:
    ValueError: A file is missing or damaged; the message names it.

  Example:
    >>> log = load("rtxpro6000_qwen3_32b")
    >>> log.model, log.ranks, len(log.requests)
    ('Qwen/Qwen3-32B', 2, 300)
  """
  folder = _FOLDER / name if name in INCLUDED else pathlib.Path(name)
  if not name or not folder.is_dir():
    raise ValueError(
      f"config.log={name!r} is neither a folder nor one of "
      f"{', '.join(INCLUDED)}"
    )
  with _reading(folder, "requests.jsonl") as text:
    requests = _requests(text)
  with _reading(folder, "timeseries.csv") as text:
    rows = [row for _, row in parse_table(_Second, text)]
    if not rows:
      raise ValueError("no rows")
    series = {
      key: np.array([getattr(row, key) for row in rows])
      for key in _Second.model_fields
    }
  with _reading(folder, "config.json") as text:
    cluster = parse(_Cluster, text)
  instance = cluster.nodes[0].instances[0]
  memory = instance.npu_mem
  slots, tokens = _SLOTS, _TOKENS
  if _exists(folder, "meta.json"):
    with _reading(folder, "meta.json") as text:
      limits = parse(_Meta, text).engine_kwargs
    slots, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
  return Log(
    name, folder, requests, series, instance.model_name, instance.tp_size,
    slots, tokens, memory.mem_size * memory.mem_util * 2**30,
    cluster.link_bw * 1e9, cluster.link_latency * 1e-9,
  )


def profile(
  folder: pathlib.Path, model: Transformer, ranks: int = 1,
  all_reduces: AllReduces | None = None, skew: float | None = None,
  scale: float = 1.0,
) -> Profile:
  """Reads the measured times of a device's operations.

  Args:
    folder: The folder of the profile.
    model: Sizes of the model, of which one layer was measured.
    ranks: Number of tensor ranks; one of them was profiled.
    all_reduces: Reductions over the ranks, which a profile does not contain.
    skew: Effect of unequal contexts (`Profile.skew`); None for the fit in
      ``meta.yaml``, or 0 if there is none.
    scale: Factor on all times.

  Raises:
    ValueError: A file is missing or damaged; the message names it.
  """
  tables = {}
  for file, row in ("dense", _Dense), ("per_sequence", _PerSequence):
    with _reading(folder, f"{file}.csv") as text:
      tables[file] = _times(row, text)
  dense, heads = tables["dense"], tables["per_sequence"]
  layer = [*_PER_LAYER, *(name for name in _OPTIONAL if name in dense)]
  for file, found, names in (
    ("dense", dense, {*layer, *_ONCE}), ("per_sequence", heads, _PER_SEQUENCE)
  ):
    if {*found} != {*names}:
      different = ", ".join(sorted({*found} ^ {*names}))
      raise ValueError(
        f"{folder / file}.csv: has other operations than those of a dense "
        f"transformer; the difference: {different}"
      )
  with _reading(folder, "attention.csv") as text:
    attention = Attention({
      (row.prefill_chunk, row.kv_prefill, row.n_decode, row.kv_decode):
        row.time_us * 1e-6
      for _, row in parse_table(_Point, text)
    })
  return Profile(
    model.num_layers,
    [dense[name] for name in layer],
    [dense[name] for name in _ONCE],
    [heads[name] for name in _PER_SEQUENCE],
    attention,
    scale,
    _skew(folder, ranks) if skew is None else skew,
    all_reduces,
  )


def prompts(
  log: Log, prefixes: str, num_requests: int | None = None
) -> list[np.ndarray]:
  """Returns a prompt for each request, int32 ``[n]``.

  Args:
    log: The log.
    prefixes: Source of common prefixes: "published" for those of the published
      workload, in the log's ``prefixes.csv``; "none"; or the path of that
      workload's file, whose tokens are read.
    num_requests: Number of requests, from the first; None for all.

  Raises:
    ValueError: The file cannot be read, or belongs to other requests.
  """
  rows = log.requests[:num_requests]
  rng = np.random.default_rng(0)
  found = [
    rng.integers(2**31 - 1, size=int(row["input_tokens"]), dtype=np.int32)
    for row in rows
  ]
  if prefixes == "none":
    return found
  if prefixes == "published":
    with _reading(log.folder, "prefixes.csv") as text:
      for _, row in parse_table(_Prefix, text):
        i, like, count = row.request, row.like, row.tokens
        if like > i:
          raise ValueError(f"request {i} begins like a later one, {like}")
        if i < len(found):
          if min(len(found[i]), len(found[like])) < count:
            raise ValueError(
              f"requests {i} and {like} have fewer than {count} tokens"
            )
          # Random tokens, equal only where the published prompts are.
          found[i][:count] = found[like][:count]
    return found
  try:
    text = schema.read_bytes(pathlib.Path(prefixes)).decode()
    found = [
      np.array(row.input_tok_ids, np.int32) for _, row in
      itertools.islice(parse_lines(_Prompt, text), len(rows))
    ]
  except (OSError, ValueError) as error:
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


def model_of(log: Log, sizes: Mapping[str, int]) -> Transformer:
  """Returns the sizes of a log's model.

  Args:
    log: The log.
    sizes: Section ``config.model``; 0 for the value of a known model.

  Raises:
    ValueError: The model is not known, and a size is 0.
  """
  given = {key: value for key, value in sizes.items() if value}
  if log.model in MODELS:
    return dataclasses.replace(MODELS[log.model], **given)
  missing = [f"config.model.{key}" for key in sizes if key not in given]
  if missing:
    raise ValueError(
      f"config.log={log.name!r}: the sizes of {log.model} are not known; set "
      f"{', '.join(missing)}"
    )
  return Transformer(**given)


def num_pages(log: Log, model: Transformer, ranks: int, page_size: int) -> int:
  """Returns the number of pages that fit in memory together with the weights.

  LLMServingSim sets the memory of a log so that this is the number of vLLM.
  """
  weights = model.num_params * model.item_bytes / ranks
  heads = math.ceil(model.num_kv_heads / ranks)
  page_bytes = page_size * (
    2 * model.num_layers * heads * model.head_width * model.item_bytes
  )
  return int((log.memory_bytes - weights) / page_bytes)


@contextlib.contextmanager
def _reading(folder: pathlib.Path, name: str) -> Iterator[str]:
  """Reads a file, gzipped or not; errors of reading and parsing name it."""
  path = folder / name
  packed = folder / f"{name}.gz"
  if not path.is_file() and packed.is_file():
    path = packed
  try:
    yield schema.read_bytes(path).decode()
  except FileNotFoundError as error:
    raise ValueError(f"{path} does not exist") from error
  except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
    reason = " ".join(str(error).split())
    raise ValueError(f"{path}: {reason}") from error


def _exists(folder: pathlib.Path, name: str) -> bool:
  return any((folder / n).is_file() for n in (name, f"{name}.gz"))


def _requests(text: str) -> list[dict[str, float]]:
  """Parses the requests, sorted by arrival."""
  found = [row for _, row in parse_lines(_Request, text)]
  if not found:
    raise ValueError("no requests")
  found.sort(key=lambda row: row.queued_ts)
  first = found[0].queued_ts
  return [
    {
      "input_tokens": row.input_toks, "output_tokens": row.output_toks,
      "queued_s": row.queued_ts - first,
      "scheduled_s": row.scheduled_ts - first,
      "first_token_s": row.first_token_ts - first,
      "last_token_s": row.last_token_ts - first,
    }
    for row in found
  ]


def _times(
  row: type[_Dense | _PerSequence], text: str
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Parses seconds by number of tokens or sequences, for each operation."""
  found: dict[str, list[tuple[float, float]]] = {}
  for _, entry in parse_table(row, text):
    point = entry.count, entry.time_us * 1e-6
    found.setdefault(entry.layer, []).append(point)
  return {
    name: tuple(np.array(x) for x in zip(*sorted(points), strict=True))
    for name, points in found.items()
  }


def _skew(folder: pathlib.Path, ranks: int) -> float:
  """Returns the fit in ``meta.yaml``; 0 if there is none."""
  for place in (folder, folder.parent):
    if _exists(place, "meta.yaml"):
      with _reading(place, "meta.yaml") as text:
        fit = schema.check(_Profile, yaml.safe_load(text)).skew_fit
        if fit is None or not fit.enabled:
          return 0.0
        one_of("tensor ranks", str(ranks), [*map(str, fit.per_tp)])
        return fit.per_tp[ranks].alpha_default
  return 0.0
