"""Reader of vLLM logs and of profiles of operations in LLMServingSim's format.

casys-kaist/LLMServingSim defines the format. The folder of a log, or its
subfolder ``vllm``, has ``requests.jsonl``, ``timeseries.csv`` and at least one
of ``config.json`` (of the simulator, or of the model) and ``meta.json`` (of
vLLM, which is preferred). The folder of a profile has ``attention.csv``,
``dense.csv``, ``per_sequence.csv`` and, there or in its parent, ``meta.yaml``.
Each may be gzipped. A log does not contain the tokens of prompts. In a copy of
the LLMServingSim repository, profile, workload and sizes of the model are found
from the folder of the log. ``logs/README.md`` describes the logs in this
package; `caatnet.studies.serving.vllm_fields` refuses fields that are not
modelled.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import csv
import dataclasses
import itertools
import json
import math
import pathlib
from typing import Annotated, Any

import numpy as np
import yaml

from caatnet.serving.engine.times import AllReduces, AttentionTimes, Profile
from caatnet.studies.serving import vllm_fields
from parallel.base import schema
from parallel.base.checks import known
from parallel.base.schema import (
  Count,
  Field,
  NotNegative,
  OpenSchema,
  Positive,
  Seconds,
  parse_lines,
  parse_table,
)
from parallel.plans.workload import Transformer

SOURCE = "casys-kaist/LLMServingSim (MIT licence)"
_FOLDER = pathlib.Path(__file__).parent / "logs"
INCLUDED_LOGS = tuple(sorted(p.name for p in _FOLDER.iterdir() if p.is_dir()))
# Sizes of logged models, by their name in ``config.json``.
MODELS = {
  "meta-llama/Llama-3.1-8B": Transformer(128256, 4096, 32, 32, 8, 14336),
  "Qwen/Qwen3-32B": Transformer(
    151936, 5120, 64, 64, 8, 25600, head_width=128, qk_norm=True
  ),
}
# Operations of a layer, in their order; layernorm runs twice.
_LAYER_OPERATIONS = (
  "layernorm", "qkv_proj", "rotary_emb", "o_proj", "layernorm", "gate_up_proj",
  "act_fn", "down_proj",
)
_OPTIONAL_OPERATIONS = (
  "qk_norm",
)  # operation of a layer that some models lack
_SINGLE_OPERATIONS = ("embedding", "final_layernorm")
_SEQUENCE_OPERATIONS = ("lm_head", "sampler")
# Largest number of tokens of a request.
_MAX_TOKENS = 2**24
_TokenCount = Annotated[int, Field(ge=0, le=_MAX_TOKENS)]


class ServerSettings(OpenSchema):
  """Settings of a server, as named in ``config.json`` and ``meta.json``."""

  model_name: str = ""  # in config.json
  model: str = ""  # in meta.json
  hardware: str = ""
  num_npus: Count | None = None
  tp_size: Count | None = None  # in config.json
  tensor_parallel_size: Count | None = None  # in meta.json
  world_size_across_dp: Count | None = None
  mem_size: NotNegative = 0.0  # GiB; 0 if unknown
  mem_util: Positive = 0.9
  link_bw: NotNegative = 0.0  # GB/s; 0 if unknown
  link_latency: NotNegative | None = None  # ns
  # vLLM's defaults, for logs without them.
  max_num_seqs: Count = 256
  max_num_batched_tokens: Count = 2048
  block_size: Count = 16
  num_gpu_blocks: _TokenCount = 0  # 0 if unknown
  enable_prefix_caching: bool = True
  dataset_path: str = ""


class _Request(OpenSchema):
  request_id: str | None = None
  input_toks: Annotated[int, Field(ge=1, le=_MAX_TOKENS)]
  # At least 2, since the time per output token excludes the first token.
  output_toks: Annotated[int, Field(ge=2, le=_MAX_TOKENS)]
  queued_ts: Seconds
  scheduled_ts: Seconds
  first_token_ts: Seconds
  last_token_ts: Seconds


class _TimeSeriesRow(OpenSchema):  # row of timeseries.csv
  t: NotNegative
  running: NotNegative
  waiting: NotNegative
  kv_cache_pct: NotNegative


# Known fields of requests.jsonl and timeseries.csv, also those without effect.
_REQUEST_FIELDS = {*_Request.model_fields, "arrival_time"}
_SERIES_FIELDS = {
  *_TimeSeriesRow.model_fields, "prompt_throughput",
  "prompt_compute_throughput",
  "prompt_cached_throughput", "gen_throughput", "preempted",
}


class _Prefix(OpenSchema):
  request: _TokenCount
  like: _TokenCount
  tokens: _TokenCount


class _Prompt(OpenSchema):
  input_tok_ids: list[Annotated[int, Field(ge=0, lt=2**31)]]


class _DenseRow(OpenSchema):
  layer: str
  count: NotNegative = Field(alias="tokens")
  time_us: Seconds


class _PerSequenceRow(OpenSchema):
  layer: str
  count: NotNegative = Field(alias="sequences")
  time_us: Seconds


class _AttentionRow(OpenSchema):  # row of attention.csv
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
  model: str = ""
  tp_degrees: list[Count] | None = None
  skew_fit: _SkewFit | None = None


@dataclasses.dataclass(frozen=True)
class Log:
  """Log of a server's run.

  Attributes:
    name: Name of an included log, or the folder.
    folder: The folder.
    requests: Lengths and times in seconds of each request, by arrival; times
      are relative to the first arrival in the server's queue.
    series: The server's state at each second, by column name.
    model: Name of the model.
    ranks: Number of tensor ranks.
    server: Further settings.
  """

  name: str
  folder: pathlib.Path
  requests: Sequence[Mapping[str, float]]
  series: Mapping[str, np.ndarray]
  model: str
  ranks: int
  server: ServerSettings


def load(name: str) -> Log:
  """Reads a log.

  Args:
    name: One of `INCLUDED_LOGS`, or a folder.

  Raises:
    ValueError: A file is missing or damaged, or has a field of a server that is
      not simulated; the message names file and field.

  Example:
    >>> log = load("rtxpro6000_qwen3_32b")
    >>> log.model, log.ranks, len(log.requests)
    ('Qwen/Qwen3-32B', 2, 300)
  """
  folder = _FOLDER / name if name in INCLUDED_LOGS else pathlib.Path(name)
  if not name or not folder.is_dir():
    raise ValueError(
      f"config.log={name!r} must be a folder or one of "
      f"{', '.join(INCLUDED_LOGS)}"
    )
  with _reading(folder, "requests.jsonl") as text:
    requests = _requests(text)
  with _reading(folder, "timeseries.csv") as text:
    rows = [row for _, row in parse_table(_TimeSeriesRow, text)]
    if not rows:
      raise ValueError("the file must have at least one row")
    vllm_fields.check([*csv.DictReader(text.splitlines())], _SERIES_FIELDS)
    if len({row.t for row in rows}) < len(rows):
      raise ValueError(
        f"a time t is listed twice: {vllm_fields.REPLICAS_REASON}"
      )
    series = {
      key: np.array([getattr(row, key) for row in rows])
      for key in _TimeSeriesRow.model_fields
    }
  server = _server(folder)
  return Log(
    name, folder, requests, series, server.model_name or server.model,
    next(iter(_ranks(server).values()), 1), server,
  )


def _ranks(server: ServerSettings) -> dict[str, int]:
  """Returns field -> number of tensor ranks, for the fields that a log has."""
  names = (
    "tp_size", "tensor_parallel_size", "num_npus", "world_size_across_dp"
  )
  return {name: n for name in names if (n := getattr(server, name))}


def _server(folder: pathlib.Path) -> ServerSettings:
  """Reads the settings of a server; values in ``meta.json`` are preferred."""
  found: dict[str, Any] = {}
  for file in ("config.json", "meta.json"):
    if _find(folder, file) or (file == "meta.json" and not found):
      with _reading(folder, file) as text:
        schema.parse(OpenSchema, text)
        fields = json.loads(text)
        if file == "config.json" and "model_type" in fields:
          continue  # the config of the model, not of the simulator
        vllm_fields.check(fields, ServerSettings.model_fields)
        found |= vllm_fields.first_values(fields, ServerSettings.model_fields)
        server = schema.check(ServerSettings, found)
        ranks = _ranks(server)
        if len({*ranks.values()}) > 1:
          raise ValueError(
            f"{', '.join(f'{k}={n}' for k, n in ranks.items())} in config.json "
            "and meta.json must be equal: both files must be of one log, and "
            "all ranks of its engine must be tensor ranks"
          )
        if not server.model_name and not server.model:
          raise ValueError("the file must name the model (model_name or model)")
  return server


def profile_folder(log: Log, given: str, ranks: int) -> pathlib.Path:
  """Returns the folder of a device's measured times.

  The folder is ``given`` (``config.profile``) or, by default, ``profile`` in
  the log's folder or else the folder in LLMServingSim's repository. If it has a
  subfolder ``tpN`` for N ranks, the subfolder is returned instead.
  """
  folder = pathlib.Path(given or log.folder / "profile")
  if not given and not folder.is_dir():
    perf = f"profiler/perf/{log.server.hardware}/{log.model}/bf16"
    folder = _find_in_parents(log.folder, perf) or folder
  if not folder.is_dir():
    raise ValueError(
      f"config.profile={str(folder)!r} is not a folder; set it to the measured "
      "times of the device, as profiler/perf/DEVICE/MODEL/bf16 of LLMServingSim"
    )
  of_ranks = folder / f"tp{ranks}"
  return of_ranks if of_ranks.is_dir() else folder


def read_profile(
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
    ValueError: A file is missing or damaged, or the profile is of another model
      or number of ranks; the message names the file.
  """
  skew = _skew(folder, model, ranks, skew)
  tables = {}
  for file, row in ("dense", _DenseRow), ("per_sequence", _PerSequenceRow):
    with _reading(folder, f"{file}.csv") as text:
      tables[file] = _parse_operation_times(row, text)
  dense, heads = tables["dense"], tables["per_sequence"]
  layer = [
    *_LAYER_OPERATIONS,
    *(name for name in _OPTIONAL_OPERATIONS if name in dense)
  ]
  for file, found, names in (
    ("dense", dense, {*layer, *_SINGLE_OPERATIONS}),
    ("per_sequence", heads, _SEQUENCE_OPERATIONS)
  ):
    if {*found} != {*names}:
      different = ", ".join(sorted({*found} ^ {*names}))
      raise ValueError(
        f"{folder / file}.csv: has other operations than those of a dense "
        f"transformer; the difference: {different}"
      )
  with _reading(folder, "attention.csv") as text:
    attention = AttentionTimes({
      (row.prefill_chunk, row.kv_prefill, row.n_decode, row.kv_decode):
        row.time_us * 1e-6
      for _, row in parse_table(_AttentionRow, text)
    })
  return Profile(
    model.num_layers,
    [dense[name] for name in layer],
    [dense[name] for name in _SINGLE_OPERATIONS],
    [heads[name] for name in _SEQUENCE_OPERATIONS],
    attention,
    scale,
    skew,
    all_reduces,
  )


def resolve_prefixes(log: Log, prefixes: str) -> str:
  """Returns ``prefixes``, or the source that "auto" selects.

  "auto" selects "published" if the log has ``prefixes.csv``, else the path of
  the workload's file if the log is in a copy of its repository, else "none".
  """
  if prefixes != "auto":
    return prefixes
  if _find(log.folder, "prefixes.csv"):
    return "published"
  path = log.server.dataset_path
  return str((path and _find_in_parents(log.folder, path)) or "none")


def prompts(
  log: Log, prefixes: str, num_requests: int | None = None
) -> list[np.ndarray]:
  """Returns a prompt for each request, int32 ``[n]``.

  Args:
    log: The log.
    prefixes: Source of common prefixes (`resolve_prefixes`): "published" for
      those in the log's ``prefixes.csv``; "none"; or the path of the workload's
      file, whose tokens are read.
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
          raise ValueError(
            f"request {i} must begin like an earlier request, but {like} is "
            "later"
          )
        if i < len(found):
          if min(len(found[i]), len(found[like])) < count:
            raise ValueError(
              f"requests {i} and {like} must each have at least {count} tokens"
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
      f"config.prefixes={prefixes!r} is neither auto, published, none nor the "
      f"path of the workload's file: {error}"
    ) from error
  lengths = [len(tokens) for tokens in found]
  if lengths != [int(row["input_tokens"]) for row in rows]:
    raise ValueError(
      f"config.prefixes={prefixes!r} must have the prompts of the log, but "
      "their lengths differ"
    )
  return found


def model_of(log: Log, sizes: Mapping[str, Any]) -> Transformer:
  """Returns the sizes of a log's model.

  Args:
    log: The log.
    sizes: Section ``config.model``; 0 for the value of the model's published
      ``config.json``, or of a known model.

  Raises:
    ValueError: The model is not known, and a size is 0; or its ``config.json``
      is damaged or not supported.
  """
  given = {key: value for key, value in sizes.items() if value}
  path = given.pop("path", "")
  if not path and log.model in MODELS:
    return dataclasses.replace(MODELS[log.model], **given)
  missing = [f"config.model.{k}" for k in sizes if not sizes[k] and k != "path"]
  if not missing:
    return Transformer(**given)
  file = _model_file(log, path)
  if file is None:
    raise ValueError(
      f"config.log={log.name!r}: the sizes of {log.model} are not known; set "
      "config.model.path to the model's published config.json, or "
      f"{', '.join(missing)}"
    )
  return dataclasses.replace(_read_published_sizes(file), **given)


def _model_file(log: Log, path: str) -> pathlib.Path | None:
  """Returns a model's published ``config.json``; None if there is none."""
  given = pathlib.Path(path or log.model)  # the model may be a local folder
  if path or given.is_dir():
    return given / "config.json" if given.is_dir() else given
  own = _find(log.folder, "config.json")
  if own is not None and not log.server.model_name:
    return own  # no config of the simulator
  return _find_in_parents(log.folder, f"configs/model/{log.model}.json")


def _read_published_sizes(path: pathlib.Path) -> Transformer:
  """Reads the sizes of a published model."""
  from caatnet.interop import families  # imported here, since it imports jax

  with _reading(path.parent, path.name) as text:
    schema.parse(OpenSchema, text)
    section, wrong = families.parse_published_config(json.loads(text))
    if wrong:
      raise ValueError(
        f"{'; '.join(wrong)}; set all sizes in config.model if it is dense"
      )
    vllm_fields.check(section)
  sizes = {field.name for field in dataclasses.fields(Transformer)}
  return Transformer(**{k: v for k, v in section.items() if k in sizes})


def num_pages(log: Log, model: Transformer, ranks: int, page_size: int) -> int:
  """Returns the number of pages that fit in memory together with the weights.

  Newer logs contain vLLM's number of blocks, which is used. In older logs,
  LLMServingSim chose ``mem_size`` such that this formula gives the number.
  """
  server = log.server
  if server.num_gpu_blocks and ranks == log.ranks:
    return server.num_gpu_blocks * server.block_size // page_size
  weights = model.num_params * model.item_bytes / ranks
  heads = math.ceil(model.num_kv_heads / ranks)
  page_bytes = page_size * (
    2 * model.num_layers * heads * model.head_width * model.item_bytes
  )
  memory_bytes = server.mem_size * server.mem_util * 2**30
  return int((memory_bytes - weights) / page_bytes)


@contextlib.contextmanager
def _reading(folder: pathlib.Path, name: str) -> Iterator[str]:
  """Yields the text of a file, gzipped or not; errors raised name the file."""
  path = _find(folder, name) or folder / name
  try:
    yield schema.read_bytes(path).decode()
  except FileNotFoundError as error:
    raise ValueError(f"{path} does not exist") from error
  except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
    reason = " ".join(str(error).split())
    raise ValueError(f"{path}: {reason}") from error


def _find(folder: pathlib.Path, name: str) -> pathlib.Path | None:
  """Returns the path of a file of a log, gzipped or not; None without it."""
  paths = (folder / name, folder / f"{name}.gz")
  paths += (folder / "vllm" / name, folder / "vllm" / f"{name}.gz")
  return next((path for path in paths if path.is_file()), None)


def _find_in_parents(folder: pathlib.Path, path: str) -> pathlib.Path | None:
  """Returns ``path`` below a folder or one of its parents; None without it."""
  folder = folder.resolve()
  places = (place / path for place in (folder, *folder.parents))
  return next((place for place in places if place.exists()), None)


def _requests(text: str) -> list[dict[str, float]]:
  """Parses the requests, sorted by arrival."""
  found = [row for _, row in parse_lines(_Request, text)]
  if not found:
    raise ValueError("the file must have at least one request")
  vllm_fields.check(
    [json.loads(line) for line in text.splitlines()], _REQUEST_FIELDS
  )
  ids = [row.request_id for row in found if row.request_id is not None]
  if len({*ids}) < len(ids):
    raise ValueError(
      f"a request_id is listed twice: {vllm_fields.REPLICAS_REASON}"
    )
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


def _parse_operation_times(
  row: type[_DenseRow | _PerSequenceRow], text: str
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Returns operation -> numbers of tokens or sequences, and their seconds.

  `text` is a CSV table with rows of the schema `row`.
  """
  found: dict[str, list[tuple[float, float]]] = {}
  for _, entry in parse_table(row, text):
    point = entry.count, entry.time_us * 1e-6
    found.setdefault(entry.layer, []).append(point)
  return {
    name: tuple(np.array(x) for x in zip(*sorted(points), strict=True))
    for name, points in found.items()
  }


def _skew(
  folder: pathlib.Path, model: Transformer, ranks: int, skew: float | None
) -> float:
  """Checks ``meta.yaml``; returns ``skew`` or, for None, its fit or 0."""
  for place in (folder, folder.parent):
    if _find(place, "meta.yaml"):
      with _reading(place, "meta.yaml") as text:
        content = yaml.safe_load(text)
        meta = schema.check(_Profile, content)
        fit = meta.skew_fit
        vllm_fields.check(content)
        if ranks not in (meta.tp_degrees or [ranks]):
          raise ValueError(
            f"tp_degrees={meta.tp_degrees} does not contain {ranks}, the "
            "number of simulated ranks; set config.profile to a profile of "
            f"{ranks} ranks"
          )
        profiled = MODELS.get(meta.model, model)
        if profiled.matrices != model.matrices:
          raise ValueError(
            f"model={meta.model!r} has other sizes than the log's; set "
            "config.profile to a profile of the log's model"
          )
        if skew is not None or fit is None or not fit.enabled:
          return skew or 0.0
        known("tensor ranks=", str(ranks), [*map(str, fit.per_tp)])
        return fit.per_tp[ranks].alpha_default
  return skew or 0.0
