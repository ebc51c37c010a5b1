"""Mapping between published tensors and a model's parameters.

A published matrix is ``[outputs, inputs]``, one tensor per layer and
projection. Our parameters are stacked over layers and sharded over ranks; a
rank's queries, keys and values are concatenated, as are its gate and up
projections. Both directions move numbers without changing them.

Shape legend: L = layers, R = ranks, H = width, D = head width.
"""

from collections.abc import Iterator, Sequence
import dataclasses

import numpy as np

from caatnet.models.lm.parameters import cut_size, has_little_padding
from caatnet.models.transformer.config import TransformerConfig
from parallel.base.checks import divisors


@dataclasses.dataclass(frozen=True)
class PublishedTensor:
  """Published tensor: one in each layer, or one in the whole model.

  Attributes:
    name: Published name, with ``{layer}`` for the number of the layer.
    shape: Published shape.
    dim: Published dim that is sharded over tensor ranks; None if every rank has
      the whole tensor.
    cut: Size of dim ``dim`` on one rank; the last ranks may have padding.
    transposed: Whether our parameter has the dims in the opposite order.
    repeats: Number of times that each group of ``unit`` rows is repeated.
    unit: Number of rows of a key/value head in the tensor.
  """

  name: str
  shape: tuple[int, ...]
  dim: int | None = None
  cut: int = 0
  transposed: bool = False
  repeats: int = 1
  unit: int = 1

  def named(self, layer: int | None) -> str:
    """Returns the published name of a layer's tensor."""
    return self.name.format(layer=layer)


@dataclasses.dataclass(frozen=True)
class MappedParameter:
  """Parameter of our model, and the published tensors concatenated in it.

  Attributes:
    path: Keys of the parameter.
    parts: Published tensors, in the order of the parameter's last dim.
    layers: Number of layers that it is stacked over; 0 if it is not stacked.
    ranks: Number of tensor ranks that it is sharded over; 0 for none.
  """

  path: tuple[str, ...]
  parts: tuple[PublishedTensor, ...]
  layers: int
  ranks: int

  def rows(self) -> Sequence[int | None]:
    """Returns the layer numbers; [None] if the parameter is not stacked."""
    return range(self.layers) if self.layers else [None]

  @property
  def slice_shape(self) -> tuple[int, ...]:
    """Shape of one layer's slice of one rank."""
    *others, last = zip(*map(_cut_shape, self.parts), strict=True)
    return (*(dims[0] for dims in others), sum(last))

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of one worker's parameter."""
    lead = [n for n in (self.layers, self.ranks) if n]
    return (*lead, *self.slice_shape)


def num_repeats(num_heads: int, num_kv_heads: int, ranks: int) -> int:
  """Returns the number of times that each key/value head is repeated.

  A rank has the query heads that belong to its key/value heads. If each
  key/value head is repeated r times, consecutively, each copy has 1/r of its
  query heads. The query heads and their order do not change, so attention
  computes the same result. Heads are padded to a multiple of ``ranks``.

  The number of repetitions is chosen to give a rank the fewest key/value heads;
  of several such numbers, the one that gives it the fewest query heads.

  Args:
    num_heads: Number of query heads.
    num_kv_heads: Number of key/value heads, which divides `num_heads`.
    ranks: Number of ranks.

  Raises:
    ValueError: With any number of repetitions, at least half of the heads would
      be padding; the message lists the possible numbers of ranks.

  Example:
    Two key/value heads on four ranks are repeated twice, three are padded:

    >>> num_repeats(num_heads=8, num_kv_heads=2, ranks=4)
    2
    >>> num_repeats(num_heads=6, num_kv_heads=3, ranks=4)
    1
  """
  group = num_heads // num_kv_heads
  choices = divisors(group)

  def of_rank(repeats):
    kv_heads = cut_size(num_kv_heads * repeats, ranks)
    return kv_heads, kv_heads * group // repeats

  fitting = [r for r in choices if has_little_padding(num_kv_heads * r, ranks)]
  if fitting:
    return min(fitting, key=of_rank)
  possible = [
    number for number in range(1, 2 * num_heads)
    if any(has_little_padding(num_kv_heads * r, number) for r in choices)
  ]
  raise ValueError(
    f"ranks={ranks} would leave half of the ranks without any of the "
    f"{num_heads} query heads, which are split with their {num_kv_heads} "
    f"key/value heads; use one of {', '.join(map(str, possible))}"
  )


def map_parameters(
  config: TransformerConfig, ranks: int, repeats: int = 1
) -> list[MappedParameter]:
  """Returns all parameters with the published tensors that they consist of.

  Args:
    config: Sizes of the model, with repeated key/value heads.
    ranks: Number of tensor ranks.
    repeats: Number of times that a published key/value head is repeated.
  """
  width, d = config.width, config.head_width
  kv_heads = cut_size(config.num_kv_heads, ranks)
  # Query heads follow their key/value heads, so that a group stays on a rank.
  heads = kv_heads * (config.num_heads // config.num_kv_heads)
  ffn = cut_size(config.ffn_width, ranks)
  vocab = cut_size(config.vocab_size, ranks)

  def projection(name, num_heads, cut, repeats, bias):
    rows = num_heads * d // repeats
    return PublishedTensor(
      f"self_attn.{name}_proj.{'bias' if bias else 'weight'}",
      (rows,) if bias else (rows, width), 0, cut * d,
      transposed=not bias, repeats=repeats, unit=d,
    )

  def qkv(bias):
    kv = config.num_kv_heads, kv_heads, repeats, bias
    return (
      projection("q", config.num_heads, heads, 1, bias),
      projection("k", *kv),
      projection("v", *kv),
    )

  def matrix(name, size, cut, dim):
    shape = (size, width) if dim == 0 else (width, size)
    return PublishedTensor(f"{name}.weight", shape, dim, cut, transposed=True)

  def gain(name, size):
    return (PublishedTensor(f"{name}.weight", (size,)),)

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
  table = PublishedTensor(
    "model.embed_tokens.weight", (config.vocab_size, width), 0, vocab
  )
  others = {"embedding": (table,), "norm": gain("model.norm", width)}
  if not config.tied_embeddings:
    others["head"] = (matrix("lm_head", config.vocab_size, vocab, 0),)

  def slot(path, parts, layers):
    # Either all parts of a parameter are sharded, or none.
    return MappedParameter(
      path, parts, layers, ranks if parts[0].dim is not None else 0
    )

  found = [slot((key,), parts, 0) for key, parts in others.items()]
  for key, parts in blocks.items():
    parts = tuple(
      dataclasses.replace(part, name=f"model.layers.{{layer}}.{part.name}")
      for part in parts
    )
    found.append(slot(("blocks", key), parts, config.num_layers))
  return found


def published_tensors(found: Sequence[MappedParameter]) -> Iterator[
  tuple[str, PublishedTensor]
]:
  """Yields name and description of each published tensor of parameters."""
  for slot in found:
    for layer in slot.rows():
      for part in slot.parts:
        yield part.named(layer), part


def join(slot: MappedParameter, tensors: Sequence[np.ndarray]) -> np.ndarray:
  """Returns one layer of a parameter from its published tensors.

  Args:
    slot: The parameter.
    tensors: One array for each of ``slot.parts``, as published.

  Returns:
    ``[R, ...]``, or ``[...]`` for a parameter that is not sharded.
  """
  # Each part is sharded first: a rank's parts are then concatenated.
  cut = [_cut(part, slot.ranks, x)
         for part, x in zip(slot.parts, tensors, strict=True)]
  return cut[0] if len(cut) == 1 else np.concatenate(cut, axis=-1)


def take_apart(slot: MappedParameter, values: np.ndarray) -> list[np.ndarray]:
  """Returns published tensors from one layer of a parameter; undoes `join`.

  Args:
    slot: The parameter.
    values: ``[R, ...]``, or ``[...]`` for a parameter that is not sharded.

  Raises:
    ValueError: Repeated heads are no longer equal.
  """
  ends = np.cumsum([_cut_shape(part)[-1] for part in slot.parts])[:-1]
  pieces = np.split(values, ends, axis=-1)
  return [_uncut(part, x) for part, x in zip(slot.parts, pieces, strict=True)]


def _cut_shape(part: PublishedTensor) -> tuple[int, ...]:
  """Returns the shape of one rank's shard of a tensor, in our dim order."""
  shape = list(part.shape)
  if part.dim is not None:
    shape[part.dim] = part.cut
  return tuple(reversed(shape) if part.transposed else shape)


def _cut(part: PublishedTensor, ranks: int, x: np.ndarray) -> np.ndarray:
  """Shards a published tensor's values `x` into ``[R, ...]``, zero-padded."""
  if part.dim is None:
    return x
  if part.repeats > 1:
    heads = x.reshape(-1, part.unit, *x.shape[1:])
    x = np.repeat(heads, part.repeats, axis=0).reshape(-1, *x.shape[1:])
  x = np.moveaxis(x, part.dim, 0)
  # Padding at the end: the last ranks may have less than a full shard.
  missing = ranks * part.cut - x.shape[0]
  if missing:
    x = np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)])
  x = x.reshape(ranks, part.cut, *x.shape[1:])  # [R, cut, other dim]
  # In a column-parallel projection our sharded dim is the last one.
  return np.swapaxes(x, 1, 2) if part.transposed and part.dim == 0 else x


def _uncut(part: PublishedTensor, x: np.ndarray) -> np.ndarray:
  """Inverts `_cut`: returns `x` without padding and repeated heads."""
  if part.dim is None:
    return x
  if part.transposed and part.dim == 0:
    x = np.swapaxes(x, 1, 2)
  x = x.reshape(-1, *x.shape[2:])  # [R * cut, other dim]
  size = part.shape[part.dim] * part.repeats
  x = x[:size]  # without padding
  if part.repeats > 1:
    heads = x.reshape(-1, part.repeats, part.unit, *x.shape[1:])
    # Compares bits, so that NaN equals NaN and -0 differs from 0.
    bits = heads.view(f"u{x.dtype.itemsize}")
    if (bits != bits[:, :1]).any():
      raise ValueError(
        f"{part.name} has key/value heads that are copies of each other, but "
        f"{part.repeats} copies are no longer equal"
      )
    x = heads[:, 0].reshape(-1, *x.shape[1:])
  return np.moveaxis(x, 0, part.dim)
