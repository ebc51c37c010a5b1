"""Execution of a function in stages, for workers in separate processes.

An outer loop communicates by collectives over its worker axis. If each worker
is a process outside jax's process group, such as a peer of `parallel.peers`,
an XLA program cannot contain these collectives. A function with collectives is
therefore run in stages. Stage n is the whole function with the results of its
first n collectives as arguments; it ends at the next collective and returns
that collective's operand. The host runs the collective and then the next stage.
XLA removes the unused part of a stage, so little is computed twice.

Loops, codecs and sums are thus the same as on a mesh, with ranks in the same
order. Only gathers and float32 sums are supported
(`parallel.collectives.CollectiveBackend`). A worker may have a jax mesh of
several devices: a collective over workers then exchanges one operand per
device, or a single one for devices with equal operands.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import threading
from typing import Any, Protocol

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from parallel.axes import Axis
from parallel.collectives import varying, varying_axes

Weights = tuple[Any, ...]  # float32 scalars
# Builds the function from the worker axis and the workers' weights in a mean;
# () for equal weights.
FunctionFactory = Callable[[Axis, Weights], Callable[..., Any]]


class PeerCollectives(Protocol):
  """Transport of the collectives, such as `parallel.peers.exchange`.

  Attributes:
    contributors: Participants, in the order of their ranks.
    rank: Rank of this process among them.
    weights: Weight of each participant.
  """

  contributors: Sequence[Any]
  rank: int
  weights: Weights

  def sum(self, x: np.ndarray) -> np.ndarray:
    """Returns the sum of all contributors' float32 arrays."""
    ...

  def gather(self, data: Any) -> Sequence[Any]:
    """Returns all contributors' buffers, in the order of their ranks."""
    ...


class LoopbackCollectives:
  """`PeerCollectives` of a single worker: collectives return their operand.

  Example:
    >>> LoopbackCollectives().gather(b"delta")
    [b'delta']
  """

  contributors, rank, weights = (0,), 0, (1.0,)

  def sum(self, x: np.ndarray, order: str = "direct") -> np.ndarray:
    del order
    return x

  def gather(self, data: Any) -> Sequence[Any]:
    return [data]


class _Stop(Exception):
  """Raised when a stage reaches the first collective whose result it lacks."""

  def __init__(self, verb: str, x: jax.Array) -> None:
    super().__init__(verb)
    self.verb, self.x = verb, x


@dataclasses.dataclass
class _ReplayBackend:
  """`parallel.collectives.CollectiveBackend` that replays given results.

  Attributes:
    rank: int32 ``[]``, rank of this process.
    results: Results of the next collectives; after them, a collective raises
      `_Stop`.
  """

  rank: jax.Array
  results: list[jax.Array]

  def sum(self, x: jax.Array) -> jax.Array:
    return self._next("sum", x)

  def gather(self, x: jax.Array) -> jax.Array:
    return self._next("gather", x)

  def _next(self, verb: str, x: jax.Array) -> jax.Array:
    if not self.results:
      raise _Stop(verb, x)
    return self.results.pop(0)


@dataclasses.dataclass(frozen=True)
class _Stage:
  """A compiled stage.

  Attributes:
    program: Maps (rank, weights, results, arguments) to the final value or the
      operand of the next collective, ``[devices with distinct operands, ...]``.
    verb: The next collective, "sum" or "gather"; "" after the last one.
    spec: Partition spec of that collective's result.
  """

  program: Callable[..., Any]
  verb: str = ""
  spec: P | None = None


class StagedFunction:
  """Function of one worker that communicates with other processes."""

  def __init__(
    self, make: FunctionFactory, mesh: Mesh, worker: str,
    specs: Callable[[Any], Any], options: Mapping[str, Any] | None = None,
  ) -> None:
    """Stores the function; stages are compiled at the first call.

    Args:
      make: Builds a function from dict to dict. The dicts have the worker's
        arrays ``[1, ...]``, as inside ``jax.shard_map``.
      mesh: Devices of this worker; the worker axis has one.
      worker: Name of the worker axis.
      specs: Maps such a dict of arrays or of shapes to their partition specs.
      options: XLA compiler options of the programs.
    """
    self._make, self._mesh, self._worker = make, mesh, worker
    self._specs, self._options = specs, dict(options or {})
    self._stages: dict[Any, _Stage] = {}
    self._lock = threading.Lock()

  @property
  def alone(self) -> Callable[[Any], Any]:
    """Function of a single worker, without stages, for use in any program."""
    return self._make(Axis(self._worker, 1), ())

  def __call__(self, exchange: PeerCollectives, args: Any) -> Any:
    """Runs the function, with its collectives over an exchange.

    Args:
      exchange: Transport of the collectives.
      args: Argument of the function: a dict of arrays on the worker's mesh.

    Returns:
      The function's result: a dict of arrays on the worker's mesh.

    Raises:
      ValueError: The function sums another dtype than float32.
    """
    size, weights = len(exchange.contributors), exchange.weights
    if len(set(weights)) == 1:  # equal weights: a plain mean
      weights = ()
    weights = np.array(weights, np.float32)  # [] for equal ones
    rank, results, specs = np.int32(exchange.rank), [], []
    # Each stage ends at the next collective, given all previous results.
    while True:
      stage = self._stage(size, weights, results, specs, args)
      value = stage.program(rank, weights, results, args)
      if not stage.verb:
        return value
      found = _run_collective(exchange, stage.verb, to_host_array(value))
      where = NamedSharding(self._mesh, stage.spec)
      results.append(jax.device_put(found, where))
      specs.append(stage.spec)

  def _stage(
    self, size: int, weights: np.ndarray, results: list[jax.Array],
    specs: list[P], args: Any,
  ) -> _Stage:
    # A stage is compiled once for each number of workers, equal or different
    # weights, number of known results, and structure of the arguments.
    key = size, weights.size, len(results), jax.tree.structure(args)
    with self._lock:
      if key not in self._stages:
        self._stages[key] = self._build_stage(
          size, weights, results, specs, args
        )
      return self._stages[key]

  def _build_stage(
    self, size: int, weights: np.ndarray, results: list[jax.Array],
    specs: list[P], args: Any,
  ) -> _Stage:
    def run(
      rank: jax.Array, weights: jax.Array, results: list[jax.Array], args: Any
    ) -> Any:
      # Each result has a leading device dim, of size 1 inside `jax.shard_map`.
      backend = _ReplayBackend(
        varying(rank, self._worker), [x[0] for x in results]
      )
      axis = Axis(self._worker, size, size, backend)
      return self._make(axis, tuple(weights))(args)

    names = self._mesh.axis_names
    found: list[Any] = []

    # An abstract run records the next collective or the types of the value.
    def look(*all_args):
      try:
        found.append(jax.tree.map(jax.typeof, run(*all_args)))
      except _Stop as stop:
        # Axes along which the operand differs between devices.
        of = varying_axes(stop.x)
        found.append((stop.verb, tuple(n for n in names if n in of)))
      return varying(jnp.zeros(1), *names)

    def stopped(*all_args):
      try:
        run(*all_args)
      except _Stop as stop:
        return stop.x[None]
      raise AssertionError("a function must run the same collectives each time")

    in_specs = (P(), P(), specs, self._specs(args))
    whole = jax.shard_map(
      look, mesh=self._mesh, in_specs=in_specs, out_specs=P(names)
    )
    jax.eval_shape(whole, np.int32(0), weights, results, args)
    value = found[-1]
    is_stop = isinstance(value, tuple) and value[0] in ("sum", "gather")
    if not is_stop:
      return _Stage(self._jit(run, in_specs, self._specs(value)))
    verb, of = value
    # All workers receive the same result, so it varies over the other mesh axes
    # only.
    others = tuple(name for name in of if name != self._worker)
    return _Stage(
      self._jit(stopped, in_specs, P(of) if of else P()), verb,
      P(others) if others else P(),
    )

  def _jit(self, f: Any, in_specs: Any, out_specs: Any) -> Any:
    mapped = jax.shard_map(
      f, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs
    )
    return jax.jit(mapped, compiler_options=self._options)


class _CountingBackend:
  """`parallel.collectives.CollectiveBackend` that counts collectives."""

  def __init__(self, size: int) -> None:
    self.rank, self.count, self._size = jnp.int32(0), 0, size

  def sum(self, x: jax.Array) -> jax.Array:
    _check_sum(x)
    self.count += 1
    return jnp.zeros(x.shape, x.dtype)

  def gather(self, x: jax.Array) -> jax.Array:
    self.count += 1
    return jnp.zeros((self._size * x.shape[0], *x.shape[1:]), x.dtype)


def counting_axis(worker: str) -> tuple[Axis, Callable[[], int]]:
  """Returns an axis of two workers that counts collectives in a trace.

  Args:
    worker: Name of the axis.

  Returns:
    The axis, and a function that returns the number of collectives over it so
    far. An unsupported collective raises a ValueError.

  Example:
    >>> from parallel.collectives import all_reduce
    >>> axis, count = counting_axis("worker")
    >>> def step(x):
    ...   return all_reduce(x, axis) / axis.size
    >>> _ = jax.eval_shape(step, jnp.ones((1, 8)))
    >>> count()
    1
  """
  backend = _CountingBackend(2)
  return Axis(worker, 2, 2, backend), lambda: backend.count


def to_host_array(x: jax.Array) -> np.ndarray:
  """Returns an array on the host, gathered from other processes if needed."""
  if x.is_fully_addressable or x.is_fully_replicated:
    return np.asarray(x)
  return multihost_utils.process_allgather(x, tiled=True)


def _check_sum(x: Any) -> None:
  if x.dtype != np.float32:
    raise ValueError(
      f"a sum of {x.dtype} is not supported between processes: use float32 "
      "or a codec"
    )


def _run_collective(
  exchange: PeerCollectives, verb: str, x: np.ndarray
) -> np.ndarray:
  """Runs a collective over workers on one operand per device of this worker.

  ``verb`` is "sum" or "gather". Operand x and result are ``[devices, ...]``.
  """
  x = np.ascontiguousarray(x)
  if verb == "sum":
    _check_sum(x)
    return exchange.sum(x)
  # Every rank contributes [devices, k, ...]; each device gets all [N * k, ...].
  found = exchange.gather(x.reshape(-1).view(np.uint8))
  return np.concatenate(
    [np.frombuffer(data, x.dtype).reshape(x.shape) for data in found], axis=1
  )
