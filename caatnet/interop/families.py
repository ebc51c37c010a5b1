"""Families of published models that are supported, and their config files.

A config file is interpreted as by the transformers library 5.23: a missing key
has the default of its family (`configuration_llama.py` and the corresponding
files). Rotary positions have two formats: ``rope_parameters`` since
transformers 5, ``rope_theta`` and ``rope_scaling`` before.
"""

from collections.abc import Mapping
import dataclasses
import sys
from typing import Any

from caatnet.models.transformer.config import TransformerConfig
from caatnet.models.transformer.positions import LinearScaling, Llama3Scaling


@dataclasses.dataclass(frozen=True)
class ModelFamily:
  """Family of published models, by the properties in which families differ.

  Attributes:
    architecture: Name of its class in transformers.
    qkv_bias: Whether queries, keys and values have biases.
    qk_norm: Whether queries and keys are normalised.
    head_width: Default number of channels of a head; 0 means width / heads.
    window: Use of a sliding window: "never", "always" (unless it is null), or
      "choose" (layers selected by config keys).
  """

  architecture: str
  qkv_bias: bool = False
  qk_norm: bool = False
  head_width: int = 0
  window: str = "never"


MODEL_FAMILIES = {
  "llama": ModelFamily("LlamaForCausalLM"),
  "mistral": ModelFamily("MistralForCausalLM", window="always"),
  "qwen2": ModelFamily("Qwen2ForCausalLM", qkv_bias=True, window="choose"),
  "qwen3": ModelFamily(
    "Qwen3ForCausalLM", qk_norm=True, head_width=128, window="choose"
  ),
}

# Keys with a single supported value; null is equivalent to it.
_SUPPORTED_VALUES = {
  "hidden_act": "silu",
  "attention_bias": False,
  "mlp_bias": False,
  "partial_rotary_factor": 1.0,
  "use_mrope": False,
  "quantization_config": None,
}


# Allowed values of `layer_types`, and the largest float that a key may have.
_LAYER_TYPES = ("full_attention", "sliding_attention")
_MAX_FLOAT = sys.float_info.max
# Largest dim, largest number of heads or layers, largest number of positions.
_MAX_SIZE, _MAX_HEADS, _MAX_POSITIONS = 2**24, 2**14, 2**31 - 1


def parse_published_config(fields: Mapping[str, Any]) -> tuple[
  dict[str, Any], list[str]
]:
  """Parses a published config.

  Args:
    fields: Content of the config file.

  Returns:
    The values of ``config.model`` that determine the model's function, empty if
    a size is missing or invalid; and a list of missing, invalid or unsupported
    keys.

  Example:
    >>> section, wrong = parse_published_config({
    ...   "model_type": "llama", "vocab_size": 256, "hidden_size": 64,
    ...   "intermediate_size": 128, "num_hidden_layers": 2,
    ...   "num_attention_heads": 4, "hidden_act": "gelu"})
    >>> section["num_kv_heads"], section["rope_base"]
    (4, 10000.0)
    >>> wrong
    ["hidden_act='gelu': 'silu' only"]
  """
  family = MODEL_FAMILIES.get(str(fields.get("model_type")))
  if family is None:
    return {}, [
      f"model_type={fields.get('model_type')!r} must be one of "
      f"{', '.join(MODEL_FAMILIES)}"
    ]
  reader = _Reader(fields)
  for key, value in _SUPPORTED_VALUES.items():
    found = fields.get(key)
    if found not in (None, value):
      allowed = "not supported" if value is None else f"{value!r} only"
      reader.wrong.append(f"{key}={_short(found)}: {allowed}")
  heads = reader.count("num_attention_heads", most=_MAX_HEADS)
  num_layers = reader.count("num_hidden_layers", most=_MAX_HEADS)
  section: dict[str, Any] = {
    "vocab_size": reader.count("vocab_size"),
    "width": (width := reader.count("hidden_size")),
    "num_layers": num_layers,
    "num_heads": heads,
    # Null or absent (early files of Llama): as many as query heads.
    "num_kv_heads": reader.count("num_key_value_heads", heads),
    "ffn_width": reader.count("intermediate_size"),
    "qkv_bias": family.qkv_bias,
    "qk_norm": family.qk_norm,
    "norm_eps": reader.number("rms_norm_eps", 1e-6),
    "tied_embeddings": reader.flag("tie_word_embeddings"),
  }
  head_width = reader.count("head_dim", family.head_width or width // heads)
  # 0 stands for width / heads in config.model.head_width.
  equal = head_width * heads == width
  section["head_width"] = 0 if equal else head_width
  section["sliding_window"] = _window(family, reader, num_layers)
  section |= _parse_rope(reader)
  section["max_positions"] = _most_positions(reader, section["rope_scaling"])
  return {} if reader.failed else section, reader.wrong


class _Reader:
  """Reader of config fields, which collects error messages.

  Attributes:
    fields: Fields to read.
    wrong: Messages about invalid fields.
    failed: Whether a field without a usable value was read.
  """

  def __init__(self, fields: Mapping[str, Any], where: str = "") -> None:
    self.fields, self.wrong, self.failed = fields, [], False
    self._where = where

  def count(
    self, key: str, default: int | None = None, most: int = _MAX_SIZE
  ) -> int:
    """Reads an integer in [1, most]; if invalid, returns the default or 1."""
    value = self.fields.get(key)
    if value is None and default is not None:
      return default
    # `type`, since True is an instance of int.
    if type(value) is not int or value < 1:
      self._fail(key, "a positive integer")
      return default or 1
    if value > most:
      self._fail(key, f"at most {most}")
      return default or 1
    return value

  def number(self, key: str, default: float | None = None) -> float:
    """Reads a positive number; handles an invalid one like `count`."""
    value = self.fields.get(key)
    if value is None and default is not None:
      return default
    if type(value) not in (int, float) or not 0 < value <= _MAX_FLOAT:
      self._fail(key, "a positive number")
      return default or 1.0
    return float(value)

  def flag(self, key: str) -> bool:
    """Reads a boolean; a missing one is False."""
    value = self.fields.get(key)
    if value is not None and type(value) is not bool:
      self._fail(key, "true or false")
    return value is True

  def _fail(self, key: str, what: str) -> None:
    """Records that the field `key` is invalid, since it must be `what`."""
    is_there = key in self.fields
    value = f"={_short(self.fields[key])}" if is_there else " is missing and"
    self.wrong.append(f"{self._where}{key}{value} must be {what}")
    self.failed = True


def _window(family: ModelFamily, reader: _Reader, num_layers: int) -> int:
  """Returns the number of positions that a query attends to; 0 for all."""
  fields = reader.fields
  if family.window == "never":
    return 0
  if "sliding_window" in fields and fields["sliding_window"] is None:
    return 0
  if family.window == "choose" and not fields.get("use_sliding_window", False):
    return 0
  window = reader.count("sliding_window", 4096, _MAX_POSITIONS)
  first = fields.get("max_window_layers", 28)
  kinds = fields.get("layer_types")
  if kinds is None and family.window == "choose":
    if type(first) is not int:
      reader.wrong.append(
        f"max_window_layers={_short(first)} must be an integer"
      )
      return window
    first = min(max(first, 0), num_layers)
    # In Qwen the first layers have full attention, the others a window.
    kinds = ["full_attention"] * first
    kinds += ["sliding_attention"] * (num_layers - first)
  if kinds is not None and (
    not isinstance(kinds, list) or any(
      kind not in _LAYER_TYPES for kind in kinds
    )
  ):
    reader.wrong.append(
      f"layer_types={_short(kinds)} must be a list of "
      f"{' and '.join(_LAYER_TYPES)}"
    )
    return window
  # One model has one attention pattern in all its layers.
  if kinds is not None and kinds != kinds[:1] * num_layers:
    reader.wrong.append(
      f"layers differ in layer_types or max_window_layers={_short(first)}: "
      "only one sliding_window for all layers, or none, is supported"
    )
  return 0 if kinds and kinds[0] == "full_attention" else window


def _parse_rope(reader: _Reader) -> dict[str, Any]:
  """Returns ``rope_base`` and ``rope_scaling`` of ``config.model``."""
  fields = reader.fields
  said = [k for k in ("rope_scaling", "rope_parameters") if fields.get(k)]
  key = said[0] if said else "rope_scaling"
  if len(said) > 1 and fields[said[0]] != fields[said[1]]:
    reader.wrong.append(
      f"rope_scaling={_short(fields[said[0]])} is not "
      f"rope_parameters={_short(fields[said[1]])}: only one is allowed"
    )
  rope = fields.get(key) or {}
  if not isinstance(rope, dict) or any(
    isinstance(value, dict) for value in rope.values()
  ):
    reader.wrong.append(
      f"{key}={_short(rope)}: only one form for all layers is supported"
    )
    rope = {}
  # The value inside `rope_parameters` has precedence.
  base = reader.number("rope_theta", 10_000.0)
  inner = _Reader(rope, f"{key}.")
  base = inner.number("rope_theta", base)
  partial = rope.get("partial_rotary_factor")
  if partial not in (None, 1.0):
    inner.wrong.append(f"{key}.partial_rotary_factor={partial}: 1.0 only")
  scaling: tuple[str | float, ...] = ()
  match kind := rope.get("rope_type", rope.get("type", "default")):
    case "default":
      pass
    case "linear":
      scaling = "linear", inner.number("factor")
    case "llama3":
      scaling = (
        "llama3",
        inner.number("factor"),
        inner.number("low_freq_factor"),
        inner.number("high_freq_factor"),
        inner.count(
          "original_max_position_embeddings", most=_MAX_POSITIONS
        ),
      )
    case _:
      inner.wrong.append(
        f"{key} of type {kind!r}: default, linear and llama3 only"
      )
  reader.wrong += inner.wrong
  return {"rope_base": base, "rope_scaling": () if inner.failed else scaling}


def _most_positions(reader: _Reader, scaling: tuple[str | float, ...]) -> int:
  """Returns the context's length, extended by linear `scaling`; 0 if absent."""
  if reader.fields.get("max_position_embeddings") is None:
    return 0
  most = reader.count("max_position_embeddings", most=_MAX_POSITIONS)
  # Linear scaling multiplies this length; other kinds already include it.
  factor = float(scaling[1]) if scaling[:1] == ("linear",) else 1.0
  if most * factor > _MAX_POSITIONS:
    reader.wrong.append(
      f"max_position_embeddings={most} with a factor of {factor:g} must be at "
      f"most {_MAX_POSITIONS}"
    )
    return most
  return int(most * factor)


def to_published_config(
  config: TransformerConfig, dtype: str, num_positions: int
) -> dict[str, Any]:
  """Returns a published model's config; inverse of `parse_published_config`.

  Args:
    config: Sizes of the model.
    dtype: Dtype of its tensors.
    num_positions: Length of its context, unless ``config.max_positions`` has
      it.

  Raises:
    ValueError: No family has the model's combination of biases and norms.
  """
  # The first family with exactly these features.
  has = config.qkv_bias, config.qk_norm
  name = next(
    (
      name for name, family in MODEL_FAMILIES.items()
      if (family.qkv_bias, family.qk_norm) == has
      and (not config.sliding_window or family.window != "never")
    ),
    None,
  )
  if name is None:
    raise ValueError(
      f"config.model.qkv_bias={config.qkv_bias} and config.model.qk_norm="
      f"{config.qk_norm}: none of {', '.join(MODEL_FAMILIES)} has both"
    )
  family = MODEL_FAMILIES[name]
  if config.max_positions:
    is_linear = isinstance(config.rope_scaling, LinearScaling)
    factor = config.rope_scaling.factor if is_linear else 1
    num_positions = int(config.max_positions / factor)
  fields: dict[str, Any] = {
    "architectures": [family.architecture],
    "model_type": name,
    "vocab_size": config.vocab_size,
    "hidden_size": config.width,
    "intermediate_size": config.ffn_width,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_width,  # explicit, also where it is the default
    "hidden_act": "silu",
    "rms_norm_eps": config.norm_eps,
    "rope_theta": config.rope_base,
    "rope_scaling": _scaling_fields(config),
    "max_position_embeddings": num_positions,
    "tie_word_embeddings": config.tied_embeddings,
    "torch_dtype": dtype,
    "bos_token_id": None,
    "eos_token_id": None,
  }
  if family.window != "never":
    fields["sliding_window"] = config.sliding_window or None
  if family.window == "choose":
    fields["use_sliding_window"] = bool(config.sliding_window)
    fields["max_window_layers"] = 0
  return fields


def _scaling_fields(config: TransformerConfig) -> dict[str, Any] | None:
  """Returns the value of ``rope_scaling`` in a published config."""
  match config.rope_scaling:
    case None:
      return None
    case LinearScaling(factor):
      return {"rope_type": "linear", "factor": factor}
    case Llama3Scaling(factor, low, high, context):
      return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low,
        "high_freq_factor": high, "original_max_position_embeddings": context,
      }


def _short(value: Any) -> str:
  """Returns the repr of a value, truncated to 60 characters."""
  text = repr(value)
  return text if len(text) <= 60 else f"{text[:57]}..."
