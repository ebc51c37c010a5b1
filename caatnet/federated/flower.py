"""Adapter for clients of Flower: `NumPyClient` objects, without Flower or jax.

A Flower app has a function ``client_fn(context)`` that returns a client with
the methods of ``flwr.client.NumPyClient`` (signatures of flwr 1.42). Such a
client becomes a `client.Trainer` here: its list of arrays is one float32
vector, which is what the server averages.

The vector represents float32, float16 and integers of at most 24 bits exactly;
float64 is rounded to float32. Updates are float32 differences, which are
rounded. Means of integers are rounded to the nearest integer, means of booleans
are true from 0.5.

In Flower a client reports its number of examples with its update, but a server
that samples without bias needs all numbers before the first round. It uses
``get_properties({})["num_examples"]``; without this key, `NumPyTrainer` calls
``fit`` once on the initial parameters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import math
import operator
import pathlib
import runpy
import sys
import time
import tomllib
from typing import Any, NamedTuple, Protocol

import numpy as np

from caatnet.federated.client import Client, Codecs, TrainingResult, digest
from parallel.peers.transport.handshake import Security, parse_address

Arrays = list[np.ndarray]
_CONFIG_KEY = "config.federated.numpy_client"


class NumPyClient(Protocol):
  """Methods of ``flwr.client.NumPyClient`` that `NumPyTrainer` calls.

  ``get_properties`` is optional. In ``config``, ``server_round`` counts from 1
  in `fit`; in `evaluate` it is the number of rounds that made the model.
  """

  def get_parameters(self, config: dict[str, Any]) -> Arrays:
    """Returns the initial parameters."""
    ...

  def fit(
    self, parameters: Arrays, config: dict[str, Any]
  ) -> tuple[Arrays, int, dict[str, Any]]:
    """Returns trained parameters, the number of examples, and metrics."""
    ...

  def evaluate(
    self, parameters: Arrays, config: dict[str, Any]
  ) -> tuple[float, int, dict[str, Any]]:
    """Returns the mean loss, the number of examples, and metrics."""
    ...


class Context(NamedTuple):
  """Argument of ``client_fn``, with the fields of ``flwr.common.Context``.

  Attributes:
    node_config: "partition-id", the client's id, and "num-partitions", the
      number of clients.
    run_config: Values of ``[tool.flwr.app.config]`` of the app's
      ``pyproject.toml``; inner tables have names with dots.
  """

  node_config: Mapping[str, int]
  run_config: Mapping[str, Any]


class ArrayFlattener:
  """Converts lists of arrays of fixed shapes to float32 vectors, and back.

  Attributes:
    num: n, the number of elements of all arrays.
    digest: Hex digest of shapes and dtypes.

  Example:
    >>> vectors = ArrayFlattener([np.float16([[1, 2]]), np.int64(7)])
    >>> vectors.vector([np.float16([[3, 4]]), np.int64(8)])
    array([3., 4., 8.], dtype=float32)
    >>> vectors.arrays(np.float32([0.5, 1, 7.75]))
    [array([[0.5, 1. ]], dtype=float16), array(8)]
  """

  def __init__(self, arrays: Sequence[Any]) -> None:
    """Takes shapes and dtypes from a list of arrays.

    Raises:
      ValueError: There are no arrays, or one does not contain numbers.
    """
    self._arrays = [np.array(x) for x in arrays]
    if not sum(x.size for x in self._arrays):
      raise ValueError("the client must return at least one parameter")
    self.num = sum(x.size for x in self._arrays)
    self.digest = digest(
      (str(i), x.shape, str(x.dtype)) for i, x in enumerate(self._arrays)
    )
    self.initial()  # checks the dtypes

  def initial(self) -> np.ndarray:
    """Returns the arrays of the constructor as a vector, ``[n]``."""
    return self.vector(self._arrays)

  def vector(self, arrays: Sequence[Any]) -> np.ndarray:
    """Returns a list of arrays as a vector, ``[n]``.

    Raises:
      ValueError: The number of arrays or a shape differs, or values cannot be
        represented; the message has the array's index.
    """
    found = [np.asarray(x) for x in arrays]
    shapes = [x.shape for x in self._arrays]
    if len(found) != len(shapes):
      raise ValueError(
        f"the client returned {len(found)} arrays; it must return {len(shapes)}"
      )
    for i, (x, shape) in enumerate(zip(found, shapes, strict=True)):
      if x.shape != shape:
        raise ValueError(
          f"array {i} has shape {x.shape}; it must have shape {shape}"
        )
    return np.concatenate([_float32(i, x) for i, x in enumerate(found)])

  def arrays(self, vector: np.ndarray) -> Arrays:
    """Returns a vector ``[n]`` as new arrays."""
    ends = np.cumsum([x.size for x in self._arrays])[:-1]
    return [
      _cast_array(part, like.dtype).reshape(like.shape)
      for part, like in zip(np.split(vector, ends), self._arrays, strict=True)
    ]


def _float32(index: int, x: np.ndarray) -> np.ndarray:
  """Returns an array as a float32 vector; errors name it by its index."""
  if x.dtype.kind not in "fiub":
    raise ValueError(
      f"array {index} has dtype {x.dtype}; it must be of real numbers"
    )
  if x.dtype.kind in "iu" and (np.abs(x.astype(np.float64)) > 2**24).any():
    raise ValueError(
      f"array {index} of dtype {x.dtype} must not have values above 2**24, "
      "which float32 does not represent"
    )
  with np.errstate(over="ignore"):  # infinite, and refused by the server
    return x.reshape(-1).astype(np.float32)


def _cast_array(part: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """Returns float32 values in another dtype, as a new array."""
  if dtype.kind == "b":
    return part >= 0.5
  if dtype.kind in "iu":
    limits = np.iinfo(dtype)
    rounded = np.rint(part.astype(np.float64))
    return np.clip(rounded, limits.min, limits.max).astype(dtype)
  return part.astype(dtype)


def make_flattener(client: NumPyClient, number: int) -> ArrayFlattener:
  """Returns the flattener of a client's arrays, with their initial values.

  Raises:
    ValueError: ``get_parameters`` fails, or returns no arrays of numbers.
  """
  with _one_line_errors(f"get_parameters of client {number}"):
    return ArrayFlattener(client.get_parameters({}))


class NumPyTrainer:
  """Local training with a `NumPyClient`; see `client.Trainer`.

  Attributes:
    examples: Number of training examples.
    num_params: n, the number of parameters.
    digest: Hex digest of shapes and dtypes.
    vectors: Converter between the client's arrays and one vector.
  """

  def __init__(
    self, client: NumPyClient, number: int,
    config: Mapping[str, Any] | None = None, validate: bool = True,
  ) -> None:
    """Creates a trainer, with the shapes of the client's parameters.

    Args:
      client: The client.
      number: Id of the client.
      config: Entries of the ``config`` of ``fit`` in addition to
        ``server_round``.
      validate: Whether received parameters are evaluated.

    Raises:
      ValueError: A method fails, or returns values that Flower does not allow.
    """
    self._client = client
    self._number, self._config = number, dict(config or {})
    self._validate = validate
    self.vectors = make_flattener(client, number)
    self.num_params, self.digest = self.vectors.num, self.vectors.digest
    self.examples = self._count_examples()

  def _count_examples(self) -> int:
    """Returns the number of training examples."""
    with _one_line_errors(f"get_properties of client {self._number}"):
      read = getattr(self._client, "get_properties", lambda config: {})
      found = read({}).get("num_examples")
      if found is not None:
        return operator.index(found)
    return self._fit(self.vectors.initial(), 0)[1]

  def train(
    self, params: np.ndarray, round: int, stops: Callable[[], bool]
  ) -> TrainingResult | None:
    """Trains for one round; see `client.Trainer`.

    Raises:
      ValueError: A method fails, or returns values that Flower does not allow.
    """
    start = time.monotonic()
    loss, validated = self._loss(params, round)
    validated_s = time.monotonic()
    if stops():  # `fit` cannot be interrupted
      return None
    trained, examples = self._fit(params, round)
    if examples != self.examples:
      raise ValueError(
        f"fit of client {self._number} in round {round} returned {examples} "
        f"examples; it must return {self.examples}, as at the start"
      )
    if not np.isfinite(trained).all():
      print(
        f"fit of client {self._number} in round {round} returned values that "
        "are not finite; the server refuses them"
      )
    return TrainingResult(
      trained, loss, validated, None, time.monotonic() - validated_s, 0.0,
      validated_s - start,
    )

  def _fit(self, params: np.ndarray, round: int) -> tuple[np.ndarray, int]:
    """Returns the trained parameters, ``[n]``, and the number of examples."""
    with _one_line_errors(f"fit of client {self._number} in round {round}"):
      arrays, examples, _ = self._client.fit(
        self.vectors.arrays(params), {"server_round": round + 1, **self._config}
      )
      return self.vectors.vector(arrays), operator.index(examples)

  def _loss(self, params: np.ndarray, round: int) -> tuple[float | None, int]:
    """Returns the validation loss and the number of examples."""
    if not self._validate:
      return None, 0
    with _one_line_errors(
      f"evaluate of client {self._number} in round {round}"
    ):
      loss, examples, _ = self._client.evaluate(
        self.vectors.arrays(params), {"server_round": round}
      )
      loss, examples = float(loss), operator.index(examples)
    return (loss, examples) if math.isfinite(loss) and examples else (None, 0)


@contextlib.contextmanager
def _one_line_errors(where: str) -> Iterator[None]:
  """Context manager that turns any error into a ValueError of one line."""
  try:
    yield
  except Exception as error:
    text = " ".join(str(error).split())
    raise ValueError(f"{where}: {type(error).__name__}: {text}") from error


def load(name: str, client: int, num: int) -> NumPyClient:
  """Returns the client that a function of a file makes from a `Context`.

  The function may return a ``flwr.client.Client``, the result of
  ``NumPyClient.to_client``.

  Args:
    name: PATH.py:FUNCTION. Modules in the folder of the file can be imported,
      and those in the folder of the app's ``pyproject.toml``.
    client: Id of the client.
    num: Number of clients.

  Raises:
    ValueError: There is no such function, or it fails.
  """
  path, _, function = name.rpartition(":")
  if not pathlib.Path(path).is_file():
    raise ValueError(
      f"{_CONFIG_KEY}={name!r} must be PATH.py:FUNCTION; there is no file "
      f"{path!r}"
    )
  place = pathlib.Path(path).resolve()
  with _one_line_errors(f"{_CONFIG_KEY}={name!r}, client {client}"):
    app, run_config = _find_app(place)
    folders = map(str, dict.fromkeys([place.parent, app]))
    sys.path += [x for x in folders if x not in sys.path]
    make = runpy.run_path(path)[function]
    found = make(Context(
      {"partition-id": client, "num-partitions": num}, run_config
    ))
    return getattr(found, "numpy_client", found)


def _find_app(path: pathlib.Path) -> tuple[pathlib.Path, dict[str, Any]]:
  """Returns the folder of a file's Flower app, and the app's run config."""
  for folder in path.parents:
    project = folder / "pyproject.toml"
    if project.is_file():
      found = tomllib.loads(project.read_text()).get("tool", {}).get("flwr")
      if found is not None:
        return folder, _flat(found.get("app", {}).get("config", {}))
  return path.parent, {}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Flattens nested tables; dots join the keys of inner tables."""
  found: dict[str, Any] = {}
  for key, value in table.items():
    name = f"{prefix}{key}"
    inner = isinstance(value, Mapping)
    found |= _flat(value, f"{name}.") if inner else {name: value}
  return found


def start_client(
  server: str, client: NumPyClient, number: int, security: Security,
  config: Mapping[str, Any] | None = None, *, validate: bool = True,
  alone_s: float = 300.0,
) -> str:
  """Runs a client without jax until the run ends; returns the reason.

  The run must have ``uplink="none"`` and ``downlink="none"``.

  Args:
    server: HOST:PORT of the server.
    client: The client.
    number: Id of the client.
    security: Token and TLS settings, the result of
      `parallel.peers.transport.handshake.read_security`.
    config: See `NumPyTrainer`.
    validate: See `NumPyTrainer`.
    alone_s: Time without a server after which the client ends.

  Raises:
    ValueError: A method of the client fails, the server refuses the client, or
      there was no server for `alone_s`.
  """
  return Client(
    number, NumPyTrainer(client, number, config, validate),
    Codecs(
      lambda delta, round: delta.astype("<f4").tobytes(), _reject_difference
    ),
    parse_address("server=", server, 1), security, alone_s=alone_s,
  ).run()


def _reject_difference(data: bytes, n: int) -> np.ndarray:
  raise ValueError(
    'the server sends coded differences: this client needs config.federated.'
    'downlink="none"'
  )
