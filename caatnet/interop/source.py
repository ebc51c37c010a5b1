"""Published model: its config and file headers, completely checked."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import pathlib
import re
from typing import Any

from caatnet.data.tokenizers import FILES, Tokenizer, load
from caatnet.interop import families, layout, tensors
from caatnet.models.transformer.config import TransformerConfig
from caatnet.models.transformer.positions import parse_scaling
from parallel.base.checks import known
from parallel.base.naming import DTYPES
from parallel.tensor.partial_sync import PartialSync

HEAD_TENSOR, EMBEDDING_TENSOR = "lm_head.weight", "model.embed_tokens.weight"

# Early files of Llama contain the frequencies of rotary positions, which this
# library and transformers compute instead.
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")


@dataclasses.dataclass(frozen=True)
class PublishedModel:
  """Checked published model, with its mapping to a training run's model.

  Attributes:
    folder: The published folder.
    fields: Content of its config file.
    tensors: Its tensors by name.
    section: Values of ``config.model`` that describe the model.
    ranks: Number of tensor ranks.
    repeats: Number of copies of each published key/value head, over the ranks.
    slots: Parameters of the training run's model, each with its published
      tensors.
    tokenizer: Its tokenizer; None if the folder has no supported one.
  """

  folder: pathlib.Path
  fields: Mapping[str, Any]
  tensors: Mapping[str, tensors.TensorInfo]
  section: Mapping[str, Any]
  ranks: int
  repeats: int
  slots: Sequence[layout.MappedParameter]
  tokenizer: Tokenizer | None

  @property
  def num_positions(self) -> int:
    """Length of the model's context in tokens; 2**31 - 1 if not given."""
    return self.section["max_positions"] or 2**31 - 1

  @property
  def num_tensors(self) -> int:
    """Number of tensors to read."""
    return len(list(layout.published_tensors(self.slots)))


def open_published_model(
  folder: pathlib.Path, ranks: int, dtype: str = ""
) -> PublishedModel:
  """Reads and checks a published model's config and the headers of its files.

  Args:
    folder: The published folder.
    ranks: Number of tensor ranks of the training run.
    dtype: Dtype of the run's activations; "" for the published one.

  Raises:
    FileNotFoundError: There are no safetensors files.
    ValueError: A tensor is missing, unexpected, or has another shape or dtype;
      a key is not supported; a file is damaged; or the tokenizer belongs to
      another model. The message lists all problems.
  """
  known("dtype=", dtype, ("", *DTYPES))
  fields = tensors.read_json(folder / "config.json")
  if not isinstance(fields, dict):
    raise ValueError(
      f"{folder / 'config.json'} is damaged: it must contain a JSON object"
    )
  section, wrong = families.parse_published_config(fields)
  found, damaged = tensors.find(folder)
  wrong += damaged
  repeats, slots = 1, []
  # Guards against a config that would list an enormous number of tensors.
  if section and section["num_layers"] > len(found):
    wrong.append(
      f"num_hidden_layers={section['num_layers']}, but the files have "
      f"{len(found)} tensors in all"
    )
  elif section:
    try:
      published = make_config(section)
      repeats = layout.num_repeats(
        published.num_heads, published.num_kv_heads, ranks
      )
      section["num_kv_heads"] *= repeats
      slots = layout.map_parameters(make_config(section), ranks, repeats)
    except ValueError as error:
      wrong.append(str(error))
  if slots and not damaged:
    wrong += _find_mismatches(found, slots, section["tied_embeddings"])
  tokenizer = None
  # `load` raises an error for formats that are not supported.
  if any((folder / name).is_file() for name in (FILES[0], "tokenizer.model")):
    try:
      tokenizer = load(str(folder), "--from")
      _check_vocabulary(tokenizer, section.get("vocab_size"))
    except ValueError as error:
      wrong.append(str(error))
  if wrong:
    raise ValueError(f"{folder} cannot be converted: {'; '.join(wrong)}")
  # Newer files have the key "dtype" instead.
  said = fields.get("torch_dtype", fields.get("dtype"))
  section["dtype"] = dtype or (
    said if said in DTYPES else found[EMBEDDING_TENSOR].dtype
  )
  return PublishedModel(
    folder, fields, found, section, ranks, repeats, slots, tokenizer
  )


def make_config(section: Mapping[str, Any]) -> TransformerConfig:
  """Returns a model config in which tensor ranks sum all channels (p = 1)."""
  every = PartialSync(1.0)
  return TransformerConfig(
    **{**section, "rope_scaling": parse_scaling(section["rope_scaling"])},
    syncs=((every, every),) * section["num_layers"],
  )


def is_computed_tensor(name: str) -> bool:
  """Returns whether a tensor is computed from the config, not learned."""
  return _COMPUTED.search(name) is not None


def _find_mismatches(
  found: Mapping[str, tensors.TensorInfo],
  slots: Sequence[layout.MappedParameter],
  tied: bool,
) -> list[str]:
  """Returns messages on missing or unexpected tensors, shapes and dtypes.

  Args:
    found: The published model's tensors by name.
    slots: Parameters with their expected tensors.
    tied: Whether embedding and head are tied; the head may be stored too.
  """
  expected = {
    name: part.shape for name, part in layout.published_tensors(slots)
  }
  wrong = []
  if missing := expected.keys() - found.keys():
    wrong.append(f"missing: {_abbreviate_names(missing)}")
  surplus = {
    name for name in found.keys() - expected.keys()
    if not is_computed_tensor(name)
  }
  # Some publishers store tied embeddings twice; the copies must be equal.
  if tied and HEAD_TENSOR in surplus and EMBEDDING_TENSOR in found:
    surplus.remove(HEAD_TENSOR)
    if not _are_equal(found, HEAD_TENSOR, EMBEDDING_TENSOR):
      wrong.append(
        f"{HEAD_TENSOR} differs from {EMBEDDING_TENSOR}, but "
        "tie_word_embeddings=True"
      )
  if surplus:
    wrong.append(f"not known: {_abbreviate_names(surplus)}")
  common = sorted(expected.keys() & found.keys())
  wrong += [
    f"{name} has shape {list(found[name].shape)}, expected "
    f"{list(expected[name])}"
    for name in common if found[name].shape != expected[name]
  ]
  others = [name for name in common if found[name].dtype not in DTYPES]
  for dtype in sorted({found[name].dtype for name in others}):
    names = [name for name in others if found[name].dtype == dtype]
    wrong.append(
      f"{_abbreviate_names(names)} in {dtype}, which is not one of "
      f"{', '.join(DTYPES)}"
    )
  return wrong


def _check_vocabulary(tokenizer: Tokenizer, vocab_size: int | None) -> None:
  """Raises ValueError for a tokenizer with more tokens than the model."""
  if vocab_size is not None and tokenizer.vocab_size > vocab_size:
    raise ValueError(
      f"{FILES[0]} has {tokenizer.vocab_size} tokens, but "
      f"vocab_size={vocab_size}; use the tokenizer of this model"
    )


def _are_equal(
  found: Mapping[str, tensors.TensorInfo], one: str, other: str
) -> bool:
  """Returns whether the tensors named `one` and `other` are bitwise equal."""
  bits = (tensors.read(found[name], name) for name in (one, other))
  dtypes, shapes, values = zip(
    *((x.dtype, x.shape, x.tobytes()) for x in bits), strict=True
  )
  return len({*dtypes}) == len({*shapes}) == len({*values}) == 1


def _abbreviate_names(names: Iterable[str]) -> str:
  """Returns a list of names in which layers are abbreviated as ranges."""
  layers: dict[str, list[int]] = {}
  for name in names:
    match = re.search(r"\.layers\.(\d+)\.", name)
    form = name if match is None else re.sub(
      r"\.layers\.\d+\.", ".layers.{}.", name, count=1
    )
    layers.setdefault(form, []).extend([int(match[1])] if match else [])
  return ", ".join(
    form.replace("{}", _ranges(sorted(found))) if found else form
    for form, found in sorted(layers.items())
  )


def _ranges(numbers: Sequence[int]) -> str:
  """Formats sorted numbers as "3" or "{0-4,7}"."""
  runs: list[list[int]] = []
  for number in numbers:
    if runs and number == runs[-1][-1] + 1:
      runs[-1].append(number)
    else:
      runs.append([number])
  texts = [
    str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs
  ]
  return texts[0] if len(numbers) == 1 else "{" + ",".join(texts) + "}"
