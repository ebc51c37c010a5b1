"""Block codecs in one pass over HBM, for TPUs.

A grid step has whole blocks in VMEM, of 128 rows or a multiple: their scales
then fill rows of lanes. 128 rows and more stay as they are, several blocks
long: to fold them to one block each would be a copy in HBM, of 8 x 128 tiles.
The arithmetic is that of ``reference.py``, called here on tiles, and so are the
draws (``threefry.py``): kernels send the reference's bits. Decoded values exist
in VMEM only.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from parallel.kernels import calls
from parallel.kernels.codec import threefry
from parallel.kernels.codec.reference import (
  Codec,
  codes_of,
  difference,
  factors,
  largest_of,
  nesterov_step,
  numbers_of,
  scale_of,
  to_23_bits,
  weighted,
)

# Rows worked on at a time: as many as scales of a row of lanes, and as values
# fit the registers. A grid step has several such groups.
_GROUP = _LANES = 128
_MOST_GROUPS = 8


def refusal(codec: Codec, num_blocks: int, senders: int = 1) -> str | None:
  """Why the kernels do not take operands; None: they do."""
  if codec.name == "fp8":
    return "codec fp8: int8, int4 and e3m0 only"
  unit = _LANES * 8 // codec.bits
  if codec.block % unit:
    return f"block={codec.block}: a multiple of {unit} for {codec.bits} bits"
  if num_blocks < 1:
    return "no elements"
  if not _groups(codec, num_blocks, senders):
    return (
      f"{senders} x 128 blocks of {codec.block} do not fit "
      f"{calls.VMEM_BYTES >> 20} MB"
    )
  return None


def _groups(
  codec: Codec, num_rows: int, senders: int = 1, arrays: int = 6
) -> int:
  """How many groups a grid step takes, twice each; a power of two, or 0.

  Args:
    codec: The codec.
    num_rows: There are.
    senders: Whose codes a step has.
    arrays: Of float32, as long, beside them; by default the most.
  """
  element_bytes = 2 * (4 * arrays + senders * codec.bits / 8)
  group_bytes = int(_GROUP * codec.block * element_bytes)
  fitting = min(
    calls.VMEM_BYTES // group_bytes, -(-num_rows // _GROUP), _MOST_GROUPS
  )
  return 1 << (fitting.bit_length() - 1) if fitting else 0


class _Tiles:
  """How ``[rows, n]`` is cut into grid steps.

  Attributes:
    shape: ``(rows, n)`` as kernels have it.
    grid: Steps down the rows, and blocks across.
    scales: Shape of all scales; those past the last row are nobody's.
  """

  def __init__(
    self, codec: Codec, shape: tuple[int, ...], arrays: int, senders: int = 1
  ) -> None:
    rows, n = shape
    if rows < _LANES:
      rows, n = rows * n // codec.block, codec.block
    groups = _groups(codec, rows, senders, arrays)
    steps, across = -(-rows // (groups * _LANES)), n // codec.block
    self.shape, self.grid = (rows, n), (steps, across)
    self.scales = (across, steps, groups, _LANES)
    self._codec, self._senders, self._rows = codec, senders, groups * _LANES

  def specs(self) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Block specs of elements, payloads and scales."""
    block, rows = self._codec.block, self._rows
    return (
      pl.BlockSpec((rows, block), lambda i, j: (i, j)),
      pl.BlockSpec((rows, _bytes(block, self._codec)), lambda i, j: (i, j)),
      pl.BlockSpec((None, None, *self.scales[2:]), lambda i, j: (j, i, 0, 0)),
    )

  def specs_of_senders(self) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    """Block specs of payloads ``[M, ...]`` and scales ``[M, ...]``."""
    senders, num_bytes = self._senders, _bytes(self._codec.block, self._codec)
    return (
      pl.BlockSpec(
        (senders, self._rows, num_bytes), lambda i, j: (0, i, j)
      ),
      pl.BlockSpec(
        (senders, None, None, *self.scales[2:]),
        lambda i, j: (0, j, i, 0, 0),
      ),
    )


def _bytes(n: int, codec: Codec) -> int:
  return n * codec.bits // 8


def encode(
  operands: Sequence[jax.Array],
  feedback: bool,
  codec: Codec,
  key_data: jax.Array | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Encodes a sum of operands.

  Args:
    operands: ``[rows, n]`` each, whole blocks: ``[x]``, or ``[anchor, params]``
      for their difference; a residual after it.
    feedback: Whether there is a residual.
    codec: The codec.
    key_data: uint32 ``[2]``, of stochastic rounding.
    interpret: Run on any machine.

  Returns:
    uint8 payload of ``rows n bits / 8``, as many scales as there are blocks,
    and with a residual the new one; in the order of the elements, of any shape.
  """
  tiles = _Tiles(codec, operands[0].shape, len(operands) + feedback)
  elements, payload, scales = tiles.specs()
  shape = functools.partial(calls.shaped, like=operands[0])
  rows, n = tiles.shape
  keys = () if key_data is None else (key_data,)
  out = pl.pallas_call(
    functools.partial(
      _encode, codec=codec, draws=bool(keys), num=len(operands),
      feedback=feedback,
    ),
    grid=tiles.grid,
    in_specs=[
      *(pl.BlockSpec(memory_space=pltpu.SMEM) for _ in keys),
      *(elements for _ in operands),
    ],
    out_specs=[payload, scales, *([elements] if feedback else [])],
    out_shape=[
      shape((rows, _bytes(n, codec)), jnp.uint8),
      shape(tiles.scales, jnp.float32),
      *([shape(tiles.shape, jnp.float32)] if feedback else []),
    ],
    name="codec_encode",
    **calls.tpu_params(interpret, "parallel", "parallel"),
  )(*keys, *(x.reshape(tiles.shape) for x in operands))
  payload, scales, *residual = out
  scales = scales.reshape(tiles.grid[1], -1)[:, :rows].T
  return payload, scales, residual[0] if residual else None


def _each_group(
  groups: int, work: Callable[[int, pl.Slice], None]
) -> None:
  """Calls with the group's number and its rows."""

  def turn(group, _):
    work(group, pl.ds(pl.multiple_of(group * _GROUP, _GROUP), _GROUP))

  lax.fori_loop(0, groups, turn, None)


def _encode(*refs, codec, draws, num, feedback):
  if draws:
    key_ref, *refs = refs
  operands, results = refs[:num], refs[num:]
  payload_ref, scale_ref = results[:2]
  block = operands[0].shape[1]

  def work(group, rows):
    x = difference([ref[rows] for ref in operands], feedback)[None]
    scale = scale_of(largest_of(x), codec)
    scale_ref[pl.ds(group, 1)] = scale[..., 0]
    uniform = None
    if draws:
      row = pl.program_id(0) * operands[0].shape[0] + group * _GROUP
      row = row + lax.broadcasted_iota(jnp.int32, x.shape, 1)
      number = (row * pl.num_programs(1) + pl.program_id(1)) * block
      number = number + lax.broadcasted_iota(jnp.int32, x.shape, 2)
      uniform = threefry.uniform(
        key_ref[0], key_ref[1], number.astype(jnp.uint32)
      )
    codes = codes_of(x, scale, codec, uniform)
    packed = codes
    if codec.bits == 4:
      packed = codes[..., : block // 2] | (codes[..., block // 2 :] << 4)
    payload_ref[rows] = packed[0].astype(jnp.uint8)
    if feedback:
      results[2][rows] = (x - numbers_of(codes, codec) * scale)[0]

  _each_group(scale_ref.shape[0], work)


def mean(
  payload: jax.Array,
  scales: jax.Array,
  codec: Codec,
  weights: jax.Array | None = None,
  divide: bool = True,
  interpret: bool = False,
) -> jax.Array:
  """The mean of M encoded vectors; see ``reference.mean``.

  Args:
    payload: uint8 ``[M, rows, n bits / 8]``.
    scales: ``[M, rows, n / block]``.
    codec: The codec.
    weights: ``[M]``.
    divide: False: the sum.
    interpret: Run on any machine.

  Returns:
    float32, ``rows n`` elements in their order, of any shape.
  """
  (out,) = _over_senders(
    functools.partial(_mean, codec=codec), payload, scales, (), codec,
    weights, 1, "codec_mean", interpret, divide,
  )
  return out


def nesterov(
  payload: jax.Array,
  scales: jax.Array,
  params: jax.Array,
  momentum: jax.Array,
  codec: Codec,
  learning_rate: float,
  decay: float,
  weights: jax.Array | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """The outer update; see ``reference.nesterov``; arrays as for `mean`.

  Args:
    payload: uint8 ``[M, rows, n bits / 8]``.
    scales: ``[M, rows, n / block]``.
    params: ``[rows, n]``.
    momentum: ``[rows, n]``.
    codec: The codec.
    learning_rate: Of the outer optimizer.
    decay: Of the momentum.
    weights: ``[M]``.
    interpret: Run on any machine.

  Returns:
    The new parameters and momentum.
  """
  kernel = functools.partial(
    _nesterov, codec=codec, learning_rate=learning_rate, decay=decay
  )
  new, momentum = _over_senders(
    kernel, payload, scales, (params, momentum), codec, weights, 2,
    "codec_nesterov", interpret,
  )
  return new, momentum


def _over_senders(
  kernel: Any,
  payload: jax.Array,
  scales: jax.Array,
  others: tuple[jax.Array, ...],
  codec: Codec,
  weights: jax.Array | None,
  results: int,
  name: str,
  interpret: bool,
  divide: bool = True,
) -> list[jax.Array]:
  senders, rows, across = scales.shape
  arrays = len(others) + results
  tiles = _Tiles(codec, (rows, across * codec.block), arrays, senders)
  rows, n = tiles.shape
  elements = tiles.specs()[0]
  across, steps, groups, _ = tiles.scales
  padding = steps * groups * _LANES - rows
  scales = scales.reshape(senders, rows, across)
  scales = jnp.pad(scales, ((0, 0), (0, padding), (0, 0)))
  scales = jnp.moveaxis(scales, 2, 1).reshape(senders, *tiles.scales)
  payload = payload.reshape(senders, rows, _bytes(n, codec))
  numbers = factors(senders, weights, divide)
  operands = calls.same_axes(
    numbers, payload, scales, *(x.reshape(tiles.shape) for x in others)
  )
  return pl.pallas_call(
    functools.partial(kernel, use_weights=weights is not None),
    grid=tiles.grid,
    in_specs=[
      pl.BlockSpec(memory_space=pltpu.SMEM),
      *tiles.specs_of_senders(),
      *(elements for _ in others),
    ],
    out_specs=[elements] * results,
    out_shape=[calls.shaped(tiles.shape, jnp.float32, operands[0])] * results,
    name=name,
    **calls.tpu_params(interpret, "parallel", "parallel"),
  )(*operands)


def _mean(number_ref, payload_ref, scale_ref, out_ref, *, codec, use_weights):
  def work(here, part):
    out_ref[here] = part

  _each_mean(number_ref, payload_ref, scale_ref, codec, use_weights, work)


def _nesterov(
  number_ref, payload_ref, scale_ref, params_ref, momentum_ref, new_ref,
  new_momentum_ref, *, codec, use_weights, learning_rate, decay,
):
  def work(here, delta):
    new_ref[here], new_momentum_ref[here] = nesterov_step(
      delta, params_ref[here], momentum_ref[here], learning_rate, decay
    )

  _each_mean(number_ref, payload_ref, scale_ref, codec, use_weights, work)


def _each_mean(number_ref, payload_ref, scale_ref, codec, use_weights, work):
  """Calls with rows and channels, and their mean: two parts of 4 bits."""
  senders, _, num_bytes = payload_ref.shape

  def work_on_group(group, rows):
    def add(sender, totals):
      codes = payload_ref[sender, rows].astype(jnp.int32)[None]
      parts = (codes,) if codec.bits == 8 else (codes & 15, codes >> 4)
      scale = scale_ref[sender, pl.ds(group, 1)][..., None]
      new = []
      for total, part in zip(totals, parts, strict=True):
        values = numbers_of(part, codec) * scale
        if use_weights:
          values = to_23_bits(weighted(values, number_ref[sender]))
        new.append(total + values[0])
      return tuple(new)

    zeros = jnp.zeros((_GROUP, num_bytes), jnp.float32)
    totals = lax.fori_loop(0, senders, add, (zeros,) * (8 // codec.bits))
    for i, total in enumerate(totals):
      channels = pl.ds(i * num_bytes, num_bytes)
      work((rows, channels), total * number_ref[senders])

  _each_group(scale_ref.shape[1], work_on_group)
