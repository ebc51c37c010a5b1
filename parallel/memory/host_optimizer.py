"""AdamW on the host, over one buffer whose pages are placed on memory tiers.

The buffer holds four arrays float32 ``[N]``: master weights, gradients, first
and second moments. A step updates ranges of them in any order, each as soon as
its gradient has arrived. Loops are compiled by numba (extra ``memory``).

For any number of threads, order of ranges and placement, the result is bitwise
that of `optax.adamw` after `optax.clip_by_global_norm`, on one array on a CPU
and outside of `jax.jit`, so that operations are executed one by one. This
includes two properties of XLA:CPU: a quotient by a scalar is a product with its
rounded reciprocal, and subnormal operands and results are replaced by zeros (on
x86-64; other processors keep subnormal numbers here). Jitted optax has other
bits, since XLA fuses products with sums.

If a part of the buffer is in files, each step computes checksums of the weights
and moments that it reads, and of those that it writes. It is an error if values
change between two steps. The checksum is the sum of the bits of element i times
``2 i + 1``, modulo 2^64. It detects every change of one element, and changes of
the signs of two elements.

Source: Decoupled Weight Decay Regularization (arXiv 1711.05101). ZeRO-Offload
(arXiv 2101.06840) has a CPU optimizer that begins before the backward ends.

Example:
  >>> import numpy as np
  >>> from parallel.memory import host_memory
  >>> from parallel.memory.host_optimizer import AdamW, HostOptimizer
  >>> node = host_memory.nodes()[0]
  >>> optimizer = HostOptimizer(
  ...   1000, AdamW(clip_norm=1.0), {"gradients": {node: 0.5, "/tmp": 0.5}}
  ... )
  >>> optimizer.weights[:] = 1
  >>> optimizer.begin(learning_rate=0.5, norm=2.0)
  >>> optimizer.update(600, np.ones(400, np.float32))
  >>> optimizer.update(0, np.ones(600, np.float32))
  >>> optimizer.end()
  >>> [round(float(x), 3) for x in optimizer.weights[[0, 999]]]
  [0.45, 0.45]
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import os
import platform
from types import SimpleNamespace

import numpy as np

from parallel.base import checks
from parallel.memory import host_memory, placed_buffer
from parallel.memory.placed_buffer import Tier
from parallel.plans.placement import rates

ARRAYS = ("weights", "gradients", "first", "second")
_CHECKSUMMED_ARRAYS = ("weights", "first", "second")  # arrays with checksums
_FLOAT = 4  # bytes
# Bytes, over all arrays, that the update of an element reads and writes.
ELEMENT_READ_BYTES, ELEMENT_WRITTEN_BYTES = _FLOAT * 4, _FLOAT * 3
ELEMENT_MOVED_BYTES = ELEMENT_READ_BYTES + ELEMENT_WRITTEN_BYTES
# Elements that a thread updates at a time.
_BLOCK_ELEMENTS = 2**15
# Smallest number of elements per thread: fewer take less time than its start.
_MIN_THREAD_ELEMENTS = 2**19
# Flags of MXCSR that replace subnormal results, and operands, by zeros.
_FLUSH = 0x8000 | 0x0040


@dataclasses.dataclass(frozen=True)
class AdamW:
  """Hyperparameters, as in `optax.adamw` and `optax.clip_by_global_norm`.

  Attributes:
    beta_1, beta_2: Decay of the first and of the second moment.
    eps: Epsilon in the denominator.
    weight_decay: Decoupled weight decay.
    clip_norm: Norm of all gradients above which they are clipped; 0 disables
      clipping.
  """

  beta_1: float = 0.9
  beta_2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.1
  clip_norm: float = 0.0


class HostOptimizer:
  """AdamW on the host, with its state.

  Attributes:
    weights, gradients, first, second: Views float32 ``[N]`` of the buffer.
      Callers may write gradients to ``gradients``, unless ``arrays`` omits it;
      `update` also accepts other arrays.
    count: Number of completed steps.
    buffer: The buffer with all arrays.
  """

  weights: np.ndarray
  gradients: np.ndarray
  first: np.ndarray
  second: np.ndarray

  def __init__(
    self,
    size: int,
    settings: AdamW,
    placement: Mapping[str, Mapping[Tier, float]] | None = None,
    *,
    arrays: Sequence[str] = ARRAYS,
    decayed: Sequence[tuple[int, int]] | None = None,
    num_threads: int | None = None,
    stripe_bytes: int = placed_buffer.STRIPE_BYTES,
    ahead: int = 2**24,
  ) -> None:
    """Allocates the state; all arrays are zeros.

    Args:
      size: Number of elements.
      settings: Hyperparameters.
      placement: Name of an array (`ARRAYS`) -> tier -> fraction of its bytes.
        Arrays that it does not name are on the first node.
      arrays: Arrays of the buffer, ``ARRAYS`` with or without "gradients".
      decayed: Ranges of elements with weight decay, in ascending order and
        disjoint; None for all.
      num_threads: Largest number of threads; None for all cores. Short ranges
        use fewer.
      stripe_bytes: Mean size of the stripes that alternate between tiers.
      ahead: Number of elements that are read from files while the same number
        is updated. Threads synchronise after each such block, which takes
        milliseconds on a busy machine.

    Raises:
      ValueError: A size, a range or a fraction is invalid, a tier does not
        exist or lacks space, or numba is not installed.
      OSError: A system call fails.
    """
    checks.at_least("size", size)
    checks.at_least("num_threads", num_threads or 1)
    checks.at_least("ahead", ahead)
    self._loops = _loops()
    self._settings = settings
    self._decayed = _check_decayed_ranges(decayed, size)
    self._threads = num_threads or os.cpu_count() or 1
    self._stripe_bytes = stripe_bytes
    self._arrays = arrays
    self._ahead = ahead
    self.count = 0
    self.buffer = placed_buffer.Buffer(self._pieces(size, placement or {}))
    self.buffer.check()
    array_bytes = placed_buffer.round_up_to_pages(_FLOAT * size)
    for i, name in enumerate(arrays):
      start = i * array_bytes
      part = self.buffer.array[start : start + _FLOAT * size]
      setattr(self, name, part.view(np.float32))
    self._scalars: tuple[np.float32 | bool, ...] | None = None
    self._left: list[tuple[int, int]] = []
    # Checksums of `_CHECKSUMMED_ARRAYS` after the last step, uint64 [3], and of
    # the values that this step has read (row 0) and written (row 1) so far,
    # uint64 [2, 3].
    self._sums: np.ndarray | None = None
    self._seen = np.zeros((2, len(_CHECKSUMMED_ARRAYS)), np.uint64)

  def _pieces(
    self, size: int, placement: Mapping[str, Mapping[Tier, float]]
  ) -> list[placed_buffer.Piece]:
    for name in placement:
      checks.known("placement of ", name, self._arrays)
    found: list[placed_buffer.Piece] = []
    for name in self._arrays:
      found += placed_buffer.stripes(
        _FLOAT * size, placement.get(name, {host_memory.nodes()[0]: 1.0}),
        found[-1].stop if found else 0, self._stripe_bytes,
      )
    return found

  def move(self, placement: Mapping[str, Mapping[Tier, float]]) -> None:
    """Changes the placement; the state keeps its bits.

    Args:
      placement: Fractions on tiers for each array, as in the constructor.

    Raises:
      ValueError: A fraction is invalid, or a tier does not exist or lacks
        space.
      OSError: A system call fails.
    """
    self.buffer.move(self._pieces(len(self.weights), placement))
    self.buffer.check()

  def written(self) -> None:
    """Discards checksums; call it after writing to weights or moments."""
    self._sums = None

  def verify(self) -> None:
    """Verifies checksums of weights and moments, if a part is in files.

    `end` also verifies them, in each step.

    Raises:
      ValueError: Values have changed since the last step.
    """
    if self._sums is not None:
      self._check_checksums(self._compute_checksums())

  def _bits(self) -> list[np.ndarray]:
    """Returns views uint32 ``[N]`` of `_CHECKSUMMED_ARRAYS`."""
    return [getattr(self, name).view(np.uint32) for name in _CHECKSUMMED_ARRAYS]

  def _compute_checksums(self) -> np.ndarray:
    return np.array([self._loops.fold(x, 0) for x in self._bits()], np.uint64)

  def _check_checksums(self, found: np.ndarray) -> None:
    """Raises ValueError unless checksums ``found`` are those of the last step.

    There is one of each array in `_CHECKSUMMED_ARRAYS`.
    """
    for name, mine, last in zip(
      _CHECKSUMMED_ARRAYS, found, self._sums, strict=True
    ):
      if mine != last:
        raise ValueError(
          f"{name} of the optimizer were changed in memory or in a file after "
          f"step {self.count}; resume from the last checkpoint"
        )

  def begin(self, learning_rate: float, norm: float | None = None) -> None:
    """Begins a step, whose updates follow.

    Args:
      learning_rate: Learning rate of the step.
      norm: Norm of all gradients of the step, which clipping needs.

    Raises:
      ValueError: The previous step has not ended, or the norm is missing.
    """
    if self._left:
      raise ValueError(
        f"step {self.count} has not ended: {self._describe_missing()}"
      )
    s, f = self._settings, np.float32
    if s.clip_norm and norm is None:
      raise ValueError(
        f"clip_norm={s.clip_norm:g} needs the norm of the gradients; pass norm"
      )
    clips = bool(s.clip_norm) and not f(norm) < f(s.clip_norm)
    count = f(self.count + 1)
    with np.errstate(under="ignore"):  # powers may underflow
      self._scalars = (
        clips, f(1) / f(norm) if clips else f(1), f(s.clip_norm),
        f(s.beta_1), f(1 - s.beta_1), f(s.beta_2), f(1 - s.beta_2),
        f(1) / (f(1) - f(s.beta_1) ** count),
        f(1) / (f(1) - f(s.beta_2) ** count),
        f(s.eps), f(s.weight_decay), -f(learning_rate),
      )
    self._left = [(0, len(self.weights))]
    if not self.buffer.has_files:
      self._sums = None
    elif self._sums is None:
      self._sums = self._compute_checksums()
    self._seen[:] = 0

  def update(self, start: int, gradient: np.ndarray) -> None:
    """Updates the elements from ``start`` on with their gradient.

    Args:
      start: First element.
      gradient: float32 ``[count]``.

    Raises:
      ValueError: No step has begun, the gradient is not float32 ``[count]``, or
        an element was already updated in this step.
    """
    if gradient.dtype != np.float32 or gradient.ndim != 1:
      raise ValueError(
        f"a gradient has dtype {gradient.dtype} and shape {gradient.shape}; it "
        "must be float32 with one dim"
      )
    stop = start + len(gradient)
    self._mark_updated(start, stop)
    if not len(gradient):
      return
    numba = self._loops.numba
    before = numba.get_num_threads()
    numba.set_num_threads(min(
      self._threads, numba.config.NUMBA_NUM_THREADS,
      max(1, len(gradient) // _MIN_THREAD_ELEMENTS),
    ))
    ahead = self._ahead if self.buffer.has_files else len(gradient)
    try:
      self._prefetch(start, min(stop, start + ahead))
      for first in range(start, stop, ahead):
        last = min(stop, first + ahead)
        self._prefetch(last, min(stop, last + ahead))
        blocks = _blocks(first, last, self._decayed)
        # Without files there are no checksums.
        sums = np.zeros(
          (0 if self._sums is None else len(blocks), *self._seen.shape),
          np.uint64,
        )
        self._loops.update(
          blocks, self.weights[first:last],
          gradient[first - start : last - start], self.first[first:last],
          self.second[first:last], self._scalars, first,
          tuple(x[first:last] for x in self._bits()), sums,
        )
        self._seen += sums.sum(axis=0)
    finally:
      numba.set_num_threads(before)

  def _prefetch(self, start: int, stop: int) -> None:
    """Requests elements [start, stop) of all arrays from files.

    It does not wait for them.
    """
    size = len(self.buffer.array) // len(self._arrays)
    for i in range(len(self._arrays)):
      self.buffer.prefetch(
        i * size + _FLOAT * start, i * size + _FLOAT * stop
      )

  def end(self) -> None:
    """Ends a step, after all elements were updated.

    Raises:
      ValueError: Elements were not updated, no step has begun, or weights or
        moments in files have changed since the last step.
    """
    if self._scalars is None:
      raise ValueError("no step has begun; call begin before end")
    if self._left:
      raise ValueError(
        f"step {self.count} cannot end: {self._describe_missing()}"
      )
    self._scalars = None
    if self._sums is not None:
      self._check_checksums(self._seen[0])
      self._sums = self._seen[1].copy()
    self.count += 1

  def _describe_missing(self) -> str:
    texts = [f"[{start}, {stop})" for start, stop in self._left]
    return f"elements {', '.join(texts)} are not updated"

  def _mark_updated(self, start: int, stop: int) -> None:
    """Removes a range from the ranges that this step has not updated yet."""
    for i, (first, last) in enumerate(self._left):
      if first <= start <= stop <= last:
        parts = (first, start), (stop, last)
        self._left[i : i + 1] = [part for part in parts if part[0] < part[1]]
        return
    raise ValueError(
      f"elements [{start}, {stop}) cannot be updated: "
      + (
        self._describe_missing()
        if self._left
        else "all are updated, or no step began"
      )
    )


def _check_decayed_ranges(
  decayed: Sequence[tuple[int, int]] | None, size: int
) -> np.ndarray:
  """Returns R ranges of elements with weight decay as int64 ``[R, 2]``.

  ``decayed`` None is the range of all ``size`` elements.

  Raises:
    ValueError: They are not ascending and disjoint within ``[0, size)``.
  """
  ranges = np.array(
    [(0, size)] if decayed is None else list(decayed), np.int64
  ).reshape(-1, 2)
  bounds = [0, *ranges.ravel().tolist(), size]
  if bounds != sorted(bounds):
    raise ValueError(
      f"decayed={decayed} must be ascending and disjoint ranges within [0, "
      f"{size})"
    )
  return ranges


def _blocks(start: int, stop: int, decayed: np.ndarray) -> np.ndarray:
  """Cuts a range of elements into blocks for threads.

  Args:
    start, stop: The range.
    decayed: Ranges of elements with weight decay ``[ranges, 2]``.

  Returns:
    int64 ``[blocks, 3]``: start and stop of each block relative to ``start``,
    and 1 if weight decay applies to it.

  Example:
    >>> _blocks(10, 20, np.array([[0, 12], [18, 30]])).tolist()
    [[0, 2, 1], [2, 8, 0], [8, 10, 1]]
  """
  bounds = np.unique(np.concatenate([
    np.arange(start, stop, _BLOCK_ELEMENTS), [stop],
    decayed.ravel().clip(start, stop)
  ]))
  # An element has weight decay if, up to it, more ranges begin than end.
  began = np.searchsorted(decayed[:, 0], bounds[:-1], "right")
  ended = np.searchsorted(decayed[:, 1], bounds[:-1], "right")
  return np.stack(
    [bounds[:-1] - start, bounds[1:] - start, began - ended], axis=1
  )


@functools.cache
def _loops() -> SimpleNamespace:
  """Returns the loops of a step, compiled by numba.

  Raises:
    ValueError: numba is not installed.
  """
  numba = rates.imported_numba("the host optimizer")
  get_flags, set_flags = _mxcsr_functions()

  @numba.njit(error_model="numpy")
  def block(w, g, m, v, decays, scalars):
    (
      clips, inverse, clip, b1, c1, b2, c2, first, second, eps, decay, rate,
    ) = scalars
    for i in range(len(w)):
      gradient = g[i]
      if clips:
        gradient = (gradient * inverse) * clip
      moment = c1 * gradient + b1 * m[i]
      square = c2 * (gradient * gradient) + b2 * v[i]
      step = (moment * first) / (np.sqrt(square * second) + eps)
      if decays:
        step = step + decay * w[i]
      m[i] = moment
      v[i] = square
      w[i] = w[i] + rate * step

  @numba.njit
  def fold(bits, start):
    total = np.uint64(0)
    for i in range(len(bits)):
      total += np.uint64(bits[i]) * np.uint64(2 * (start + i) + 1)
    return total

  @numba.njit
  def fold_all(bits, first, start, stop, sums):
    for j in range(len(bits)):
      sums[j] = fold(bits[j][start:stop], first + start)

  @numba.njit(parallel=True)
  def update(blocks, w, g, m, v, scalars, first, bits, sums):
    for i in numba.prange(len(blocks)):
      start, stop, decays = blocks[i]
      if len(sums):  # while the block is in a cache
        fold_all(bits, first, start, stop, sums[i, 0])
      flags = get_flags()
      set_flags(flags | _FLUSH)  # flags belong to a thread
      block(
        w[start:stop], g[start:stop], m[start:stop], v[start:stop],
        decays == 1, scalars,
      )
      set_flags(flags)
      if len(sums):
        fold_all(bits, first, start, stop, sums[i, 1])

  return SimpleNamespace(update=update, fold=fold, numba=numba)


def _mxcsr_functions() -> tuple:
  """Returns functions that read and write MXCSR, the flags of x86-64 floats."""
  from llvmlite import ir
  import numba
  from numba.core import cgutils, types
  from numba.extending import intrinsic

  if platform.machine() != "x86_64":

    @numba.njit
    def get_none():
      return np.uint32(0)

    @numba.njit
    def set_none(flags):
      pass

    return get_none, set_none

  def call(context, builder, name: str, place) -> None:
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    builder.call(function, [builder.bitcast(place, kind.args[0])])

  @intrinsic
  def get_flags(typing_context):
    def generate(context, builder, signature, arguments):
      place = cgutils.alloca_once(builder, ir.IntType(32))
      call(context, builder, "llvm.x86.sse.stmxcsr", place)
      return builder.load(place)

    return types.uint32(), generate

  @intrinsic
  def set_flags(typing_context, flags):
    def generate(context, builder, signature, arguments):
      number = context.cast(
        builder, arguments[0], signature.args[0], types.uint32
      )
      place = cgutils.alloca_once_value(builder, number)
      call(context, builder, "llvm.x86.sse.ldmxcsr", place)
      return context.get_dummy_value()

    return types.void(flags), generate

  return get_flags, set_flags
