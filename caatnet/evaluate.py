"""Validation loss of given parameters, on any mesh."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
import numpy as np

from caatnet.train.state import Program
from caatnet.train.step import make_eval_step


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Result of an evaluation.

  Attributes:
    loss: Mean nats per token.
    loss_per_position: float32 ``[T]``, mean nats at each position.
    num_tokens: Predicted tokens.
  """

  loss: float
  loss_per_position: np.ndarray
  num_tokens: int

  @property
  def bits_per_byte(self) -> float:
    """Tokens are bytes."""
    return self.loss / math.log(2)


def put_batch(program: Program, tokens: np.ndarray) -> jax.Array:
  """Lays a global batch out on the mesh; every process has all of it.

  Args:
    program: Gives mesh, workers and data ranks.
    tokens: int ``[batch, T + 1]``.

  Returns:
    int32 ``[workers, *levels, batch per rank, T + 1]``.
  """
  shaped = tokens.astype(np.int32).reshape(
    program.worker.size,
    *(axis.size for axis in program.data),
    -1,
    tokens.shape[-1],
  )
  return jax.make_array_from_callback(
    shaped.shape,
    program.shardings(program.batch_spec),
    lambda index: shaped[index],
  )


def make_evaluate(
  program: Program, batch_size: int
) -> Callable[[Any, np.ndarray], Evaluation]:
  """A function that evaluates parameters on windows.

  Args:
    program: Model and mesh.
    batch_size: Windows at a time; a multiple of workers x data ranks.

  Returns:
    ``(params, windows) -> Evaluation``, windows int ``[N, T + 1]``.
  """
  step = make_eval_step(program)

  def evaluate(params: Any, windows: np.ndarray) -> Evaluation:
    losses = []
    for start in range(0, len(windows), batch_size):
      batch = windows[start : start + batch_size]
      missing = batch_size - len(batch)
      padded = np.pad(batch, ((0, missing), (0, 0)))
      rows = np.asarray(step(params, put_batch(program, padded)))
      losses.append(rows.reshape(batch_size, -1)[: len(batch)])
    all_losses = np.concatenate(losses)
    return Evaluation(
      loss=float(all_losses.mean(dtype=np.float64)),
      loss_per_position=all_losses.mean(axis=0),
      num_tokens=all_losses.size,
    )

  return evaluate
