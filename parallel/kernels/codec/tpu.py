"""Block codecs in one pass over HBM, for TPUs.

A grid step processes one block of each of 128 rows, or of a multiple of 128.
The scales of 128 rows fill the 128 lanes of a vector register, so that they are
read and written without padding.

Arrays of 128 rows and more keep their shape, and the grid iterates over groups
of rows and over the blocks of a row. Reshaping them to one block per row would
copy them in HBM, where arrays are stored in tiles of 8 x 128. Arrays of fewer
rows are reshaped nevertheless, to fill the 128 rows.

Arithmetic and random numbers are the functions of ``reference.py`` and
``threefry.py``, called on tiles, so that kernels produce the reference's bits.
Decoded values exist in VMEM and registers only.

Shape legend: rows = product of all dims but the last; n = elements of a row,
whole blocks; M = encoded arrays (senders).
"""

from collections.abc import Callable, Sequence
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from parallel.kernels import calls
from parallel.kernels.codec import threefry
from parallel.kernels.codec.reference import (
  Codec,
  Encoded,
  OuterOptions,
  codes_of,
  delta_with_residual,
  max_magnitude,
  nesterov_step,
  numbers_of,
  round_to_23_bits,
  scale_of,
  sender_factors,
  weighted,
)

# A group is the set of rows that are processed together: 128, so that their
# scales fill the lanes of a register, and few enough for values to stay in
# registers (128 rows of 256 float32 are 32 vector registers of 8 x 128). A grid
# step processes several groups, to amortize the overhead of a step.
_GROUP_ROWS = _LANES = 128
_MAX_GROUPS = 8


def refusal(codec: Codec, num_blocks: int, senders: int = 1) -> str | None:
  """Returns why operands are not supported, or None: `api.Kernels.refusal`."""
  if codec.name == "fp8":
    return "codec fp8: int8, int4 and e3m0 only"
  # The payload of a block must also be a multiple of 128 bytes (lanes).
  unit = _LANES * 8 // codec.bits
  if codec.block % unit:
    return f"block={codec.block}: a multiple of {unit} for {codec.bits} bits"
  if num_blocks < 1:
    return "no elements"
  if not _groups_per_step(codec, num_blocks, senders):
    return (
      f"{senders} x 128 blocks of {codec.block} do not fit "
      f"{calls.MAX_BLOCK_VMEM_BYTES >> 20} MB"
    )
  return None


def _groups_per_step(
  codec: Codec, num_rows: int, senders: int = 1, arrays: int = 4
) -> int:
  """Returns the number of groups of 128 rows per step: a power of two, or 0.

  ``num_rows`` is the number of rows of an array, ``senders`` that of encoded
  arrays, and ``arrays`` that of float32 arrays of a step. Its default is the
  maximum over all calls, for `refusal`, which is independent of the call: three
  operands and a residual, or parameters and momentum before and after.
  """
  # Double buffering: the next block is loaded while one is processed.
  element_bytes = 2 * (4 * arrays + senders * codec.bits / 8)
  group_bytes = int(_GROUP_ROWS * codec.block * element_bytes)
  fitting = min(
    calls.MAX_BLOCK_VMEM_BYTES // group_bytes, -(-num_rows // _GROUP_ROWS),
    _MAX_GROUPS
  )
  return 1 << (fitting.bit_length() - 1) if fitting else 0


class _Tiles:
  """Partition of an array ``[rows, n]`` into grid steps.

  Attributes:
    shape: ``(rows, n)`` of the kernel's operands, reshaped if there are fewer
      than 128 rows.
    grid: Number of steps over the rows, and number of blocks of a row.
    scales: Shape of all scales, ``[blocks of a row, steps, groups, 128]``. The
      last step may extend past the last row; the scales of the excess are not
      used.
  """

  def __init__(
    self, codec: Codec, shape: tuple[int, ...], arrays: int, senders: int = 1
  ) -> None:
    rows, n = shape
    if rows < _LANES:  # one block per row
      rows, n = rows * n // codec.block, codec.block
    groups = _groups_per_step(codec, rows, senders, arrays)
    steps, across = -(-rows // (groups * _LANES)), n // codec.block
    self.shape, self.grid = (rows, n), (steps, across)
    self.scales = (across, steps, groups, _LANES)
    self._codec, self._senders, self._rows = codec, senders, groups * _LANES

  def specs(self) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Returns the block specs of elements, payloads and scales.

    The scales of one step have shape ``[groups, 128]``.
    """
    block, rows = self._codec.block, self._rows
    return (
      pl.BlockSpec((rows, block), lambda i, j: (i, j)),
      pl.BlockSpec((rows, _bytes(block, self._codec)), lambda i, j: (i, j)),
      pl.BlockSpec((None, None, *self.scales[2:]), lambda i, j: (j, i, 0, 0)),
    )

  def specs_of_senders(self) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    """Returns the block specs of payloads ``[M, ...]`` and scales ``[M, ...]``.

    A step reads the same rows of all senders.
    """
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
  """Returns the payload bytes of ``n`` elements."""
  return n * codec.bits // 8


def encode(
  operands: Sequence[jax.Array],
  feedback: bool,
  codec: Codec,
  key_data: jax.Array | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Encodes a difference plus a residual: `api.Kernels.encode`."""
  tiles = _Tiles(codec, operands[0].shape, len(operands) + feedback)
  elements, payload, scales = tiles.specs()
  shape = functools.partial(calls.output_type, like=operands[0])
  rows, n = tiles.shape
  keys = () if key_data is None else (key_data,)
  out = calls.tpu_call(
    functools.partial(
      _encode, codec=codec, draws=bool(keys), num=len(operands),
      feedback=feedback,
    ),
    "parallel", "parallel",
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
    interpret=interpret,
  )(*keys, *(x.reshape(tiles.shape) for x in operands))
  payload, scales, *residual = out
  # [blocks of a row, steps, groups, 128] -> [rows, blocks of a row].
  scales = scales.reshape(tiles.grid[1], -1)[:, :rows].T
  return payload, scales, residual[0] if residual else None


def _each_group(
  groups: int, work: Callable[[int, pl.Slice], None]
) -> None:
  """Calls ``work(number, rows)`` for each group of 128 rows of a grid step.

  ``groups`` is the number of groups, and ``rows`` the slice of a group's rows.
  """

  def turn(group, _):
    # multiple_of asserts to Mosaic that a group starts at a tile boundary.
    work(
      group,
      pl.ds(pl.multiple_of(group * _GROUP_ROWS, _GROUP_ROWS), _GROUP_ROWS)
    )

  lax.fori_loop(0, groups, turn, None)


def _encode(*refs, codec, draws, num, feedback):
  if draws:
    key_ref, *refs = refs
  operands, results = refs[:num], refs[num:]
  payload_ref, scale_ref = results[:2]
  block = operands[0].shape[1]

  def work(group, rows):
    # [1, 128, block]: with the leading dim, the scales of the group are
    # [1, 128], one row of lanes.
    x = delta_with_residual([ref[rows] for ref in operands], feedback)[None]
    scale = scale_of(max_magnitude(x), codec)  # [1, 128, 1]
    scale_ref[pl.ds(group, 1)] = scale[..., 0]
    uniform = None
    if draws:
      # Position in the flattened array, as in the reference:
      # (row * blocks of a row + this block) * block + element of the block.
      row = pl.program_id(0) * operands[0].shape[0] + group * _GROUP_ROWS
      row = row + lax.broadcasted_iota(jnp.int32, x.shape, 1)
      number = (row * pl.num_programs(1) + pl.program_id(1)) * block
      number = number + lax.broadcasted_iota(jnp.int32, x.shape, 2)
      uniform = threefry.uniform(
        key_ref[0], key_ref[1], number.astype(jnp.uint32)
      )
    codes = codes_of(x, scale, codec, uniform)
    packed = codes
    if codec.bits == 4:  # the halves of the block share bytes
      packed = codes[..., : block // 2] | (codes[..., block // 2 :] << 4)
    payload_ref[rows] = packed[0].astype(jnp.uint8)
    if feedback:
      results[2][rows] = (x - numbers_of(codes, codec) * scale)[0]

  _each_group(scale_ref.shape[0], work)


def over_senders(
  encoded: Encoded,
  others: Sequence[jax.Array],
  codec: Codec,
  outer: OuterOptions | None,
  weights: jax.Array | None,
  divide: bool,
  interpret: bool,
) -> list[jax.Array]:
  """Averages or sums, or applies an outer step: `api.Kernels.over_senders`."""
  payload, scales = encoded
  (senders, rows, across), results = scales.shape, max(1, len(others))
  arrays = len(others) + results
  tiles = _Tiles(codec, (rows, across * codec.block), arrays, senders)
  rows, n = tiles.shape
  elements = tiles.specs()[0]
  # [M, rows, blocks of a row] -> [M, blocks of a row, steps, groups, 128].
  across, steps, groups, _ = tiles.scales
  padding = steps * groups * _LANES - rows
  scales = scales.reshape(senders, rows, across)
  scales = jnp.pad(scales, ((0, 0), (0, padding), (0, 0)))
  scales = jnp.moveaxis(scales, 2, 1).reshape(senders, *tiles.scales)
  payload = payload.reshape(senders, rows, _bytes(n, codec))
  numbers = sender_factors(senders, weights, divide)
  operands = calls.unify_varying_axes(
    numbers, payload, scales, *(x.reshape(tiles.shape) for x in others)
  )
  name, kernel = "codec_mean", _mean
  if outer is not None:
    name, kernel = "codec_nesterov", functools.partial(_nesterov, outer=outer)
  return calls.tpu_call(
    functools.partial(kernel, codec=codec, use_weights=weights is not None),
    "parallel", "parallel",
    grid=tiles.grid,
    in_specs=[
      pl.BlockSpec(memory_space=pltpu.SMEM),
      *tiles.specs_of_senders(),
      *(elements for _ in others),
    ],
    out_specs=[elements] * results,
    out_shape=[
      calls.output_type(tiles.shape, jnp.float32, operands[0])
    ] * results,
    name=name,
    interpret=interpret,
  )(*operands)


def _mean(number_ref, payload_ref, scale_ref, out_ref, *, codec, use_weights):
  def work(here, part):
    out_ref[here] = part

  _each_mean(number_ref, payload_ref, scale_ref, codec, use_weights, work)


def _nesterov(
  number_ref, payload_ref, scale_ref, params_ref, momentum_ref, new_ref,
  new_momentum_ref, *, codec, use_weights, outer,
):
  def work(here, delta):
    new_ref[here], new_momentum_ref[here] = nesterov_step(
      delta, params_ref[here], momentum_ref[here], outer
    )

  _each_mean(number_ref, payload_ref, scale_ref, codec, use_weights, work)


def _each_mean(number_ref, payload_ref, scale_ref, codec, use_weights, work):
  """Calls ``work`` with the mean of each part of a tile.

  The mean is over the senders of the encoded arrays in ``payload_ref``. The
  arguments of ``work(here, mean)`` are the part's index in the tile and its
  float32 values. A part consists of the blocks of a group's rows or, for a
  4-bit codec, of their halves: the first half is in the low and the second half
  in the high bits of the bytes.
  """
  senders, _, num_bytes = payload_ref.shape

  def work_on_group(group, rows):
    def add(sender, totals):
      codes = payload_ref[sender, rows].astype(jnp.int32)[None]
      parts = (codes,) if codec.bits == 8 else (codes & 15, codes >> 4)
      scale = scale_ref[sender, pl.ds(group, 1)][..., None]  # [1, 128, 1]
      new = []
      for total, part in zip(totals, parts, strict=True):
        values = numbers_of(part, codec) * scale
        if use_weights:
          # Rounding to 23 bits prevents a fused multiply-add; see
          # ``reference.sum_of``.
          values = round_to_23_bits(weighted(values, number_ref[sender]))
        new.append(total + values[0])
      return tuple(new)

    zeros = jnp.zeros((_GROUP_ROWS, num_bytes), jnp.float32)
    totals = lax.fori_loop(0, senders, add, (zeros,) * (8 // codec.bits))
    for i, total in enumerate(totals):  # number_ref[senders]: factor of the sum
      channels = pl.ds(i * num_bytes, num_bytes)
      work((rows, channels), total * number_ref[senders])

  _each_group(scale_ref.shape[1], work_on_group)
