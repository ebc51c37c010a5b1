"""Workers in processes of their own: a function is run in stages.

What an outer loop says over its worker axis goes over the collectives of that
axis. Where each worker is a process that jax knows nothing of, such as a peer
of `parallel.elastic`, no program can hold these. So a function that has some is
run in stages. Stage n is the whole function, given the results of its first n
collectives as arguments; it ends where the next one begins, and returns what
that is given. The host runs the collective, and then the next stage. XLA leaves
out of a stage what it does not need, so little is computed twice.

Thus the loops, codecs and sums are those of a mesh, in the same order of ranks.
Only gathers and sums of float32 are carried (`parallel.collectives.Carrier`).
Within a worker the mesh is jax's own: a collective is run for each of its
devices, or once for those that hold the same.
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
# Makes the function from the workers' axis and their weights, () if equal.
Make = Callable[[Axis, Weights], Callable[..., Any]]


class Exchange(Protocol):
  """What carries the collectives, as `parallel.elastic.exchange` does.

  Attributes:
    contributors: Who takes part, in the order of their ranks.
    rank: Which of them this process is.
    weights: What each weighs.
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


class Alone:
  """An exchange of one worker, which has nobody to speak to."""

  contributors, rank, weights = (0,), 0, (1.0,)

  def sum(self, x: np.ndarray, order: str = "direct") -> np.ndarray:
    del order
    return x

  def gather(self, data: Any) -> Sequence[Any]:
    return [data]


class _Stop(Exception):
  """A stage has come to a collective that has not been run yet."""

  def __init__(self, verb: str, x: jax.Array) -> None:
    super().__init__(verb)
    self.verb, self.x = verb, x


@dataclasses.dataclass
class _Carrier:
  """A `parallel.collectives.Carrier` that has some results, in their order."""

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
    program: Maps (rank, weights, results, arguments) to the value, or to what
      the next collective is given, ``[devices that differ, ...]``.
    verb: Which collective is next; "" after the last one.
    spec: How that collective's result lies on the devices.
  """

  program: Callable[..., Any]
  verb: str = ""
  spec: P | None = None


class Apart:
  """A function of one worker that says something to the others."""

  def __init__(
    self, make: Make, mesh: Mesh, worker: str, specs: Callable[[Any], Any],
    options: Mapping[str, Any] | None = None,
  ) -> None:
    """Compiles nothing yet.

    Args:
      make: Makes the function of a dict to a dict, which have the worker's
        arrays ``[1, ...]`` as they are inside ``jax.shard_map``.
      mesh: The devices of this worker; the worker axis has one.
      worker: The name of the worker axis.
      specs: Maps such a dict, or one of shapes, to how that lies on the mesh.
      options: XLA's, for the programs.
    """
    self._make, self._mesh, self._worker = make, mesh, worker
    self._specs, self._options = specs, dict(options or {})
    self._stages: dict[Any, _Stage] = {}
    self._lock = threading.Lock()

  @property
  def alone(self) -> Callable[[Any], Any]:
    """The function of a worker without others, to be part of another one."""
    return self._make(Axis(self._worker, 1), ())

  def __call__(self, exchange: Exchange, args: Any) -> Any:
    """Runs the function, and what it says by an exchange.

    Raises:
      ValueError: It sums something else than float32.
    """
    size, weights = len(exchange.contributors), exchange.weights
    if len(set(weights)) == 1:
      weights = ()
    weights = np.array(weights, np.float32)
    rank, results, specs = np.int32(exchange.rank), [], []
    while True:
      stage = self._stage(size, weights, results, specs, args)
      value = stage.program(rank, weights, results, args)
      if not stage.verb:
        return value
      found = _carried(exchange, stage.verb, whole(value))
      where = NamedSharding(self._mesh, stage.spec)
      results.append(jax.device_put(found, where))
      specs.append(stage.spec)

  def _stage(
    self, size: int, weights: np.ndarray, results: list[jax.Array],
    specs: list[P], args: Any,
  ) -> _Stage:
    key = size, weights.size, len(results), jax.tree.structure(args)
    with self._lock:
      if key not in self._stages:
        self._stages[key] = self._made(size, weights, results, specs, args)
      return self._stages[key]

  def _made(
    self, size: int, weights: np.ndarray, results: list[jax.Array],
    specs: list[P], args: Any,
  ) -> _Stage:
    def run(
      rank: jax.Array, weights: jax.Array, results: list[jax.Array], args: Any
    ) -> Any:
      # Each result has a dim of its devices in front, of which one is here.
      carrier = _Carrier(varying(rank, self._worker), [x[0] for x in results])
      axis = Axis(self._worker, size, size, carrier)
      return self._make(axis, tuple(weights))(args)

    names = self._mesh.axis_names
    found: list[Any] = []

    def look(*all_args):  # where it stops, or what it returns
      try:
        found.append(jax.tree.map(jax.typeof, run(*all_args)))
      except _Stop as stop:
        of = varying_axes(stop.x)
        found.append((stop.verb, tuple(n for n in names if n in of)))
      return varying(jnp.zeros(1), *names)

    def stopped(*all_args):
      try:
        run(*all_args)
      except _Stop as stop:
        return stop.x[None]
      raise AssertionError("a function must say the same each time")

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


class _Listener:
  """A `parallel.collectives.Carrier` that counts what it is given."""

  def __init__(self, size: int) -> None:
    self.rank, self.count, self._size = jnp.int32(0), 0, size

  def sum(self, x: jax.Array) -> jax.Array:
    _check_sum(x)
    self.count += 1
    return jnp.zeros(x.shape, x.dtype)

  def gather(self, x: jax.Array) -> jax.Array:
    self.count += 1
    return jnp.zeros((self._size * x.shape[0], *x.shape[1:]), x.dtype)


def listening(worker: str) -> tuple[Axis, Callable[[], int]]:
  """Returns an axis of two workers, to see in a trace who says something.

  Args:
    worker: The axis' name.

  Returns:
    The axis, and a function that counts the collectives over it so far. What
    cannot be carried raises a ValueError.
  """
  carrier = _Listener(2)
  return Axis(worker, 2, 2, carrier), lambda: carrier.count


def whole(x: jax.Array) -> np.ndarray:
  """Returns an array on the host, also if parts are on other processes."""
  if x.is_fully_addressable or x.is_fully_replicated:
    return np.asarray(x)
  return multihost_utils.process_allgather(x, tiled=True)


def _check_sum(x: Any) -> None:
  if x.dtype != np.float32:
    raise ValueError(
      f"a sum of {x.dtype} cannot be carried between processes: use float32, "
      "or a codec"
    )


def _carried(exchange: Exchange, verb: str, x: np.ndarray) -> np.ndarray:
  """Runs a collective for ``[devices, ...]``; returns its results, alike."""
  x = np.ascontiguousarray(x)
  if verb == "sum":
    _check_sum(x)
    return exchange.sum(x)
  # Every rank gives [devices, k, ...]; each device gets all [N * k, ...].
  found = exchange.gather(x.reshape(-1).view(np.uint8))
  return np.concatenate(
    [np.frombuffer(data, x.dtype).reshape(x.shape) for data in found], axis=1
  )
