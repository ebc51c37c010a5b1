"""Conversion between Hugging Face's folders and a training run's folder.

A published folder contains ``config.json``, safetensors files, and the files of
its tokenizer. The folder of a run that was converted from one also contains the
file `ORIGIN_FILE` with the published config and dtypes, and all files of the
tokenizer. Tensors are converted one by one: at most the tensors of one
parameter of one layer are in memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import shutil
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from caatnet.data.tokenizers import FILES
from caatnet.interop import families, layout, tensors
from caatnet.interop.source import (
  EMBEDDING_TENSOR,
  HEAD_TENSOR,
  PublishedModel,
  is_computed_tensor,
  make_config,
)
from caatnet.models.transformer.model import TransformerModel
from caatnet.train import records, tokenizer
from caatnet.train.checkpoint import export, slices
from caatnet.train.checkpoint.save import Checkpointer
from caatnet.train.experiment import Experiment
from parallel.base import files
from parallel.base.checks import known
from parallel.base.naming import DTYPES

ORIGIN_FILE = "huggingface.json"

# Files of the tokenizer, which are copied unchanged.
_TOKENIZER_FILES = (
  *FILES, "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt",
)


@dataclasses.dataclass(frozen=True)
class ConversionSummary:
  """Summary of a conversion.

  Attributes:
    folder: The new folder.
    parameters: Number of elements of the published tensors.
    published_bytes: Bytes of the published tensors.
    ranks: Tensor ranks of the training run.
    kv_heads: Numbers of key/value heads in the published model and in the run.
    tokenizer: Name of the tokenizer; "" for none.
    cache_bytes: Bytes of a token's keys and values over all layers and ranks,
      in the dtype of activations: with the published heads, and with the run's
      heads including padding of the last rank.
  """

  folder: pathlib.Path
  parameters: int
  published_bytes: int
  ranks: int
  kv_heads: tuple[int, int]
  tokenizer: str
  cache_bytes: tuple[int, int]

  @property
  def rows(self) -> list[list[str]]:
    """Rows of a table: quantity, and its values published and in the run."""
    return [
      ["parameters", f"{self.parameters:,}", ""],
      ["bytes of tensors", f"{self.published_bytes:,}", ""],
      ["tokenizer", self.tokenizer, self.tokenizer or "bytes"],
      ["tensor ranks", "", str(self.ranks)],
      ["key/value heads", *map(str, self.kv_heads)],
      ["bytes of keys and values per token",
       *(f"{size:,}" for size in self.cache_bytes)],
    ]


def check_target(source: pathlib.Path, to: pathlib.Path) -> None:
  """Checks the name of a new folder before the source is read.

  Raises:
    FileExistsError: The name exists.
    ValueError: The target is inside the source folder, or is not writable.
  """
  # Symbolic links are resolved: the target must not be inside the source.
  if pathlib.Path(os.path.realpath(source)) in (
    pathlib.Path(os.path.realpath(to)).parents
  ):
    raise ValueError(f"--to={to} is inside --from={source}")
  files.check_new(to)


def is_run(folder: pathlib.Path) -> bool:
  """Returns whether a folder is a training run's, not a published model's.

  Raises:
    FileNotFoundError: The folder is neither.
  """
  if (folder / "checkpoints").is_dir():
    return True
  if (folder / "config.json").is_file():
    return False
  raise FileNotFoundError(
    f"{folder} is neither a run's folder (checkpoints) nor a published model's "
    "(config.json)"
  )


def write_run(
  source: PublishedModel,
  experiment: Experiment,
  folder: pathlib.Path,
  advance: Callable[[], None] = lambda: None,
) -> ConversionSummary:
  """Writes a training run's folder, with a checkpoint, from a published model.

  The checkpoint, of step 0, contains only parameters, in their published dtype.

  Args:
    source: The published model.
    experiment: The training run, whose config contains ``source.section``.
    folder: The run's folder, which must not exist.
    advance: Called after every tensor.

  Raises:
    FileExistsError: The folder exists.
    ValueError: A file cannot be read or written.
  """
  model = experiment.program.model
  params = _tree({
    slot.path: _make_lazy_param(source, slot, advance) for slot in source.slots
  })
  expected = jax.eval_shape(model.init, jax.random.key(0))
  # Without the leading dim of workers.
  shapes = jax.tree.map(lambda x: x.shape[1:], params)
  assert shapes == jax.tree.map(lambda x: x.shape, expected), shapes
  published = {
    name: x
    for name, x in source.tensors.items() if not is_computed_tensor(name)
  }
  origin = {
    "folder": str(source.folder.absolute()),
    "repeats": source.repeats,
    "config": source.fields,
    "tensors": {name: x.dtype for name, x in published.items()},
  }
  # Written to a temporary folder, which is renamed when it is complete.
  with files.atomic_folder(folder) as partial:
    (partial / "checkpoints").mkdir()
    slices.write_params(partial / "checkpoints", 0, params)
    tokenizer.copy_to_run(epath.Path(partial), source.tokenizer)
    _copy_tokenizer_files(source.folder, partial / tokenizer.FOLDER)
    records.write_json(partial / "config.json", experiment.config)
    records.write_json(partial / ORIGIN_FILE, origin)
  name = source.tokenizer.name if source.tokenizer else ""
  return _make_summary(folder, model, published, source.repeats, name)


def _make_lazy_param(
  source: PublishedModel, slot: layout.MappedParameter,
  advance: Callable[[], None]
) -> slices.SlicedArray:
  """Returns the parameter of `slot`.

  Its tensors are read from `source` when the checkpoint is written.
  """
  names = [part.named(row) for row in slot.rows() for part in slot.parts]
  # A parameter made of several tensors has the widest of their dtypes.
  dtype = functools.reduce(
    jnp.promote_types, (source.tensors[name].dtype for name in names)
  )

  # Read lazily, one layer at a time, while the checkpoint is written.
  def made() -> Iterator[tuple[slices.SliceIndex, np.ndarray]]:
    for row in slot.rows():
      arrays = []
      for part in slot.parts:
        name = part.named(row)
        array = tensors.read(source.tensors[name], name)
        arrays.append(array.astype(dtype))
        advance()
      # (worker, layer): one worker's parameters are stored.
      place = (0,) if row is None else (0, row)
      yield place, layout.join(slot, arrays)

  # Chunks of the checkpoint: one worker, layer and rank each.
  ones = (1,) * (1 + len(slot.shape) - len(slot.slice_shape))
  return slices.SlicedArray(
    (1, *slot.shape), jnp.dtype(dtype), (*ones, *slot.slice_shape), made
  )


def write_published_model(
  experiment: Experiment,
  workdir: pathlib.Path,
  folder: pathlib.Path,
  *,
  step: int | None = None,
  dtype: str = "",
  shard_bytes: int = tensors.SHARD_BYTES,
  advance: Callable[[], None] = lambda: None,
) -> ConversionSummary:
  """Writes a published folder from a checkpoint of a training run.

  Args:
    experiment: The training run.
    workdir: The run's folder.
    folder: The published folder, which must not exist.
    step: Step of the checkpoint; None for the newest one.
    dtype: Dtype of all tensors; "" for the dtypes of the source that the run
      was converted from, or float32 without a source.
    shard_bytes: Maximum size of a file in bytes.
    advance: Called after every tensor.

  Raises:
    FileExistsError: The folder exists.
    FileNotFoundError: The checkpoint does not exist.
    ValueError: The model has no published form, or a file is damaged.
  """
  model = experiment.program.model
  _check_publishable(model)
  known("dtype=", dtype, ("", *DTYPES))
  tokens = tokenizer.load(workdir)
  origin = _read_origin(experiment, workdir)
  repeats = origin.get("repeats", 1)
  slots = layout.map_parameters(model.config, model.tensor.size, repeats)
  shapes = {name: part.shape for name, part in layout.published_tensors(slots)}
  dtypes = origin.get("tensors") or dict.fromkeys(shapes, "float32")
  if HEAD_TENSOR in dtypes:  # tied embeddings that are published twice
    shapes.setdefault(HEAD_TENSOR, shapes[EMBEDDING_TENSOR])
  if dtypes.keys() != shapes.keys() or not {*dtypes.values()} <= {*DTYPES}:
    raise ValueError(
      f"{workdir / ORIGIN_FILE} is damaged: its tensors are not those of the "
      "model"
    )
  announced = {name: (dtype or dtypes[name], shapes[name]) for name in dtypes}
  fields = dict(origin.get("config") or families.to_published_config(
    model.config, dtype or "float32", experiment.data.seq_len
  ))
  # The config must agree with the dtype of the tensors.
  for key in {"dtype", "torch_dtype"} & set(fields) if dtype else ():
    fields[key] = dtype
  stored = _read_params(experiment, workdir, step)
  with files.atomic_folder(folder) as partial:
    with tensors.Writer(partial, announced, shard_bytes) as writer:
      for name, values in _take_apart(slots, stored):
        writer.write(name, _cast(values, announced[name][0], name))
        advance()
        tied = name == EMBEDDING_TENSOR and model.config.tied_embeddings
        if tied and HEAD_TENSOR in announced:
          writer.write(HEAD_TENSOR, values.astype(announced[HEAD_TENSOR][0]))
    records.write_json(partial / "config.json", fields)
    _copy_tokenizer_files(workdir / tokenizer.FOLDER, partial)
    tensors.write_checksums(partial, writer.checksums)
  written = {
    name: tensors.TensorInfo(folder, *tensor)
    for name, tensor in announced.items()
  }
  name = tokens.name if tokens.files else ""
  return _make_summary(folder, model, written, repeats, name)


def _cast(values: np.ndarray, dtype: str, name: str) -> np.ndarray:
  """Casts a tensor; raises ValueError if a finite number becomes infinite."""
  with np.errstate(over="ignore"):
    cast = values.astype(dtype)
  if np.isinf(cast).sum() > np.isinf(values).sum():
    largest = np.abs(values[np.isfinite(values)]).max()
    raise ValueError(
      f"dtype={dtype}: {name} has {largest:g}, which overflows this dtype"
    )
  return cast


def num_tensors(experiment: Experiment) -> int:
  """Returns how many tensors a training run's model has when published."""
  _check_publishable(model := experiment.program.model)
  slots = layout.map_parameters(model.config, model.tensor.size)
  return len(list(layout.published_tensors(slots)))


def _check_publishable(model: Any) -> None:
  """Raises ValueError for a model that has no published form."""
  if not isinstance(model, TransformerModel):
    raise ValueError(
      "only config.model.name='transformer' has a published form"
    )
  p = min(sync.p for syncs in model.config.syncs for sync in syncs)
  if model.tensor.size > 1 and p < 1:
    raise ValueError(
      f"config.sync.p={p:g} on {model.tensor.size} tensor ranks: each rank has "
      "private channels, which no published architecture has; only p = 1 can "
      "be written"
    )


def _read_origin(
  experiment: Experiment, workdir: pathlib.Path
) -> dict[str, Any]:
  """Reads and checks a run's file `ORIGIN_FILE`; {} if there is none."""
  path = workdir / ORIGIN_FILE
  if not path.exists():
    return {}
  origin = tensors.read_json(path)
  try:
    section, wrong = families.parse_published_config(origin["config"])
    # The run has repeated heads, the published config has not.
    section["num_kv_heads"] *= origin["repeats"]
    same = make_config(section)
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f"{path} is damaged: {error}") from error
  ours = experiment.program.model.config
  differ = [
    key for key in section
    if key != "max_positions" and getattr(same, key) != getattr(ours, key)
  ]
  if wrong or differ:
    raise ValueError(
      f"{path} describes another model than config.json in its folder "
      f"({'; '.join(wrong) or ', '.join(differ)})"
    )
  return origin


def _read_params(
  experiment: Experiment, workdir: pathlib.Path, step: int | None
) -> Any:
  """Opens the parameters of a training run, arrays ``[1 or workers, ...]``.

  With config.outer.algorithm="data_parallel", the leading dim is the number of
  workers, which all have the same parameters; slices are read when they are
  needed. With any other algorithm, such as DiLoCo, the leading dim is 1: the
  parameters used for evaluation are computed from the state of the outer loop,
  so that all of them are in memory.
  """
  if experiment.config["outer"]["algorithm"] != "data_parallel":
    params, _ = export.read_params(experiment, workdir, step)
    return jax.tree.map(
      lambda x: slices.InMemoryArray(np.asarray(x)[None]), params
    )
  with contextlib.closing(Checkpointer(workdir, experiment.program)) as reader:
    return reader.open_params(step)[0]


def _take_apart(
  slots: Sequence[layout.MappedParameter], stored: Any
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields name and values of each published tensor.

  `stored` is the tree of the run's parameters, as from `_read_params`.
  """
  for slot in slots:
    array = functools.reduce(lambda tree, key: tree[key], slot.path, stored)
    if array.shape[1:] != slot.shape:
      raise ValueError(
        f"{'/'.join(slot.path)} has shape {list(array.shape[1:])} in the "
        f"checkpoint, but {list(slot.shape)} according to config.json"
      )
    # Rows are read one layer at a time.
    found = array.rows((0,)) if slot.layers else [array.at((0,))]
    for row, values in zip(slot.rows(), found, strict=True):
      parts = layout.take_apart(slot, values)
      for part, tensor in zip(slot.parts, parts, strict=True):
        yield part.named(row), tensor


def _tree(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
  """Returns a nested dict of leaves, given by their paths."""
  tree: dict[str, Any] = {}
  for (*above, last), leaf in leaves.items():
    place = tree
    for key in above:
      place = place.setdefault(key, {})
    place[last] = leaf
  return tree


def _copy_tokenizer_files(source: pathlib.Path, to: pathlib.Path) -> None:
  """Copies the files of the tokenizer."""
  for name in _TOKENIZER_FILES:
    if (source / name).is_file():
      to.mkdir(exist_ok=True)
      shutil.copyfile(source / name, to / name)


def _make_summary(
  folder: pathlib.Path,
  model: TransformerModel,
  published: Mapping[str, tensors.TensorInfo],
  repeats: int,
  tokenizer: str,
) -> ConversionSummary:
  """Returns the summary of a conversion.

  `repeats` is the number of copies of each published key/value head.
  """
  config, ranks = model.config, model.tensor.size
  kv_heads = config.num_kv_heads // repeats, config.num_kv_heads
  of_ranks = ranks * -(-config.num_kv_heads // ranks)  # including padding
  # Keys and values of one head in all layers, in elements per token.
  width = 2 * config.num_layers * config.head_width
  itemsize = jnp.dtype(config.dtype).itemsize
  return ConversionSummary(
    folder,
    sum(math.prod(x.shape) for x in published.values()),
    sum(x.size_bytes for x in published.values()),
    ranks,
    kv_heads,
    tokenizer,
    (kv_heads[0] * width * itemsize, of_ranks * width * itemsize),
  )
