"""Where published tensors are in a model's parameters.

A published matrix is ``[outputs, inputs]``, one tensor per layer and
projection. Ours is stacked over layers and cut into ranks, and a rank's
queries, keys and values lie side by side, as do its gate and up. Both ways move
numbers and change none.

Shape legend: L = layers, R = ranks, H = width, D = head width.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import math

import numpy as np

from caatnet.models.transformer.config import TransformerConfig
from parallel.axes import divisors


@dataclasses.dataclass(frozen=True)
class Part:
  """One published tensor, of each layer or of the model.

  Attributes:
    name: Its published name, with ``{layer}`` where the layer's number goes.
    shape: Its published shape.
    dim: The published dim that is cut into ranks; None if every rank has all.
    cut: How much of that dim a rank has; at the end, some of it is padding.
    transposed: Whether the dims of our matrix are in the other order.
    repeats: How often each group of ``unit`` rows is there in ours.
    unit: The rows of a key/value head.
  """

  name: str
  shape: tuple[int, ...]
  dim: int | None = None
  cut: int = 0
  transposed: bool = False
  repeats: int = 1
  unit: int = 1

  def named(self, layer: int | None) -> str:
    """Returns the name of the tensor of a layer."""
    return self.name.format(layer=layer)


@dataclasses.dataclass(frozen=True)
class Slot:
  """A parameter of ours, and the tensors that lie side by side in it.

  Attributes:
    path: The keys of the parameter.
    parts: The tensors, in the order of its last dim.
    layers: The layers over which it is stacked; 0 if it is not.
    ranks: The ranks into which it is cut; 0 if it is not.
  """

  path: tuple[str, ...]
  parts: tuple[Part, ...]
  layers: int
  ranks: int

  def rows(self) -> Sequence[int | None]:
    """Returns the layers; one None if it is not stacked."""
    return range(self.layers) if self.layers else [None]

  @property
  def slice_shape(self) -> tuple[int, ...]:
    """The shape of one layer's slice of one rank."""
    *others, last = zip(*map(_cut_shape, self.parts), strict=True)
    return (*(dims[0] for dims in others), sum(last))

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the parameter of one worker."""
    lead = [n for n in (self.layers, self.ranks) if n]
    return (*lead, *self.slice_shape)


def num_repeats(num_heads: int, num_kv_heads: int, ranks: int) -> int:
  """Returns how often key/value heads are repeated so that every rank has one.

  A rank has the query heads that belong to its key/value heads. Repeated r
  times, next to each other, each key/value head has 1/r of its query heads, and
  they are the same heads in the same order, so attention computes the same.

  Args:
    num_heads: The query heads.
    num_kv_heads: The key/value heads, which divide them.
    ranks: The ranks.

  Raises:
    ValueError: However often they are repeated, a rank has none; the message
      says how many ranks there can be.
  """
  choices = divisors(num_heads // num_kv_heads)
  for repeats in choices:
    if _all_have_one(num_kv_heads * repeats, ranks):
      return repeats
  fitting = [
    number for number in range(1, num_heads + 1)
    if any(_all_have_one(num_kv_heads * r, number) for r in choices)
  ]
  raise ValueError(
    f"ranks={ranks} would leave one without any of the {num_heads} query "
    f"heads, which are cut with their {num_kv_heads} key/value heads; use one "
    f"of {', '.join(map(str, fitting))}"
  )


def _all_have_one(size: int, ranks: int) -> bool:
  """Says whether equal cuts of ``size`` leave no rank without any."""
  return math.ceil(size / ranks) * (ranks - 1) < size


def slots(
  config: TransformerConfig, ranks: int, repeats: int = 1
) -> list[Slot]:
  """Lists all parameters with what they are made of.

  Args:
    config: The model, whose key/value heads are repeated already.
    ranks: The tensor ranks.
    repeats: How often a published key/value head is there.
  """
  width, d = config.width, config.head_width
  kv_heads = math.ceil(config.num_kv_heads / ranks)
  heads = kv_heads * (config.num_heads // config.num_kv_heads)
  ffn = math.ceil(config.ffn_width / ranks)
  vocab = math.ceil(config.vocab_size / ranks)

  def projection(name, num_heads, cut, repeats=1, bias=False):
    rows = num_heads * d // repeats
    return Part(
      f"self_attn.{name}_proj.{'bias' if bias else 'weight'}",
      (rows,) if bias else (rows, width), 0, cut * d,
      transposed=not bias, repeats=repeats, unit=d,
    )

  def qkv(bias):
    kv = config.num_kv_heads, kv_heads, repeats, bias
    return (
      projection("q", config.num_heads, heads, bias=bias),
      projection("k", *kv),
      projection("v", *kv),
    )

  def matrix(name, size, cut, dim):
    shape = (size, width) if dim == 0 else (width, size)
    return Part(f"{name}.weight", shape, dim, cut, transposed=True)

  def gain(name, size):
    return (Part(f"{name}.weight", (size,)),)

  blocks = {
    "norm_1": gain("input_layernorm", width),
    "w_qkv": qkv(bias=False),
    "w_out": (matrix("self_attn.o_proj", config.num_heads * d, heads * d, 1),),
    "norm_2": gain("post_attention_layernorm", width),
    "w_gate_up": tuple(
      matrix(f"mlp.{name}_proj", config.ffn_width, ffn, 0)
      for name in ("gate", "up")
    ),
    "w_down": (matrix("mlp.down_proj", config.ffn_width, ffn, 1),),
  }
  if config.qkv_bias:
    blocks["b_qkv"] = qkv(bias=True)
  if config.qk_norm:
    blocks["query_norm"] = gain("self_attn.q_norm", d)
    blocks["key_norm"] = gain("self_attn.k_norm", d)
  table = Part(
    "model.embed_tokens.weight", (config.vocab_size, width), 0, vocab
  )
  others = {"embedding": (table,), "norm": gain("model.norm", width)}
  if not config.tied_embeddings:
    others["head"] = (matrix("lm_head", config.vocab_size, vocab, 0),)

  def slot(path, parts, layers):
    return Slot(path, parts, layers, ranks if parts[0].dim is not None else 0)

  found = [slot((key,), parts, 0) for key, parts in others.items()]
  for key, parts in blocks.items():
    parts = tuple(
      dataclasses.replace(part, name=f"model.layers.{{layer}}.{part.name}")
      for part in parts
    )
    found.append(slot(("blocks", key), parts, config.num_layers))
  return found


def published(found: Sequence[Slot]) -> Iterator[tuple[str, Part]]:
  """Yields the name of every published tensor of a model, and its part."""
  for slot in found:
    for layer in slot.rows():
      for part in slot.parts:
        yield part.named(layer), part


def join(slot: Slot, tensors: Sequence[np.ndarray]) -> np.ndarray:
  """Makes one layer of a parameter from its published tensors.

  Args:
    slot: The parameter.
    tensors: One array for each part, as published.

  Returns:
    ``[R, ...]``, or ``[...]`` of a parameter that is not cut.
  """
  cut = [_cut(part, slot.ranks, x)
         for part, x in zip(slot.parts, tensors, strict=True)]
  return cut[0] if len(cut) == 1 else np.concatenate(cut, axis=-1)


def take_apart(slot: Slot, values: np.ndarray) -> list[np.ndarray]:
  """Makes published tensors from one layer of a parameter; undoes `join`.

  Args:
    slot: The parameter.
    values: ``[R, ...]``, or ``[...]`` of a parameter that is not cut.

  Raises:
    ValueError: Heads that were repeated are no longer equal.
  """
  ends = np.cumsum([_cut_shape(part)[-1] for part in slot.parts])[:-1]
  pieces = np.split(values, ends, axis=-1)
  return [_uncut(part, x) for part, x in zip(slot.parts, pieces, strict=True)]


def _cut_shape(part: Part) -> tuple[int, ...]:
  """Returns the shape of one rank's share of a part, as ours is."""
  shape = list(part.shape)
  if part.dim is not None:
    shape[part.dim] = part.cut
  return tuple(reversed(shape) if part.transposed else shape)


def _cut(part: Part, ranks: int, x: np.ndarray) -> np.ndarray:
  """Cuts a published tensor into ``[R, ...]``, zeros at the end."""
  if part.dim is None:
    return x
  if part.repeats > 1:
    heads = x.reshape(-1, part.unit, *x.shape[1:])
    x = np.repeat(heads, part.repeats, axis=0).reshape(-1, *x.shape[1:])
  x = np.moveaxis(x, part.dim, 0)
  missing = ranks * part.cut - x.shape[0]
  if missing:
    x = np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)])
  x = x.reshape(ranks, part.cut, *x.shape[1:])  # [R, cut, other dim]
  # In ours, the cut dim of a projection's columns is the last one.
  return np.swapaxes(x, 1, 2) if part.transposed and part.dim == 0 else x


def _uncut(part: Part, x: np.ndarray) -> np.ndarray:
  """Undoes `_cut`."""
  if part.dim is None:
    return x
  if part.transposed and part.dim == 0:
    x = np.swapaxes(x, 1, 2)
  x = x.reshape(-1, *x.shape[2:])  # [R * cut, other dim]
  size = part.shape[part.dim] * part.repeats
  x = x[:size]
  if part.repeats > 1:
    heads = x.reshape(-1, part.repeats, part.unit, *x.shape[1:])
    bits = heads.view(f"u{x.dtype.itemsize}")
    if (bits != bits[:, :1]).any():
      raise ValueError(
        f"{part.name}: heads that were repeated {part.repeats} times are no "
        "longer equal"
      )
    x = heads[:, 0].reshape(-1, *x.shape[1:])
  return np.moveaxis(x, 0, part.dim)
