"""Log-probabilities of given tokens, on any mesh and with few programs.

No cache is involved: every row of tokens is one forward pass, as in training.
Rows are padded at their end, which does not affect a causal model.

Shape legend: B = rows (token sequences), T = positions, V = vocabulary of one
rank.
"""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P
import numpy as np

from caatnet.inference.sampling import TopTokens, top_logprobs
from caatnet.inference.weights import Weights
from caatnet.models.lm.losses import Targets, target_scores
from caatnet.program import Program


class TargetScores(NamedTuple):
  """Scores of the T tokens after the first one of a row of tokens.

  Attributes:
    log_probabilities: Log-probabilities in nats, float32 ``[T]``.
    greedy: Whether each token has the largest logit, bool ``[T]``; of equal
      logits, the lowest token is the greedy one.
    top: Most probable tokens at each position, arrays ``[T, k]``; None if they
      were not requested.
  """

  log_probabilities: np.ndarray
  greedy: np.ndarray
  top: TopTokens | None = None


class Scorer:
  """Scorer of rows of tokens by a model, with one program per padded length.

  Attributes:
    context: Maximum number of tokens that the model reads; rows of tokens may
      have one more.
    vocab_size: Vocabulary size.
    num_compilations: Number of compiled programs.
  """

  def __init__(
    self, program: Program, weights: Weights, context: int, batch: int
  ) -> None:
    """Prepares a scorer; programs are compiled at their first call.

    Args:
      program: The model on a mesh. Data-parallel ranks are replicas, which
        divide the rows of tokens.
      weights: Parameters in the format of inference; only their shapes if each
        call of `score` passes parameters.
      context: Maximum number of tokens that the model reads.
      batch: Rows of tokens per replica and call.
    """
    layout, model = program.layout, program.model
    self.context, self.vocab_size = context, model.vocab_size
    self._params, self._options = weights.params, layout.compiler_options()
    self._num_rows = batch * math.prod(layout.batch_dims)
    self._lengths = _padded_lengths(
      context, layout.mesh.devices.flat[0].platform
    )
    self._compiled: dict[tuple[Callable[..., Any], int], Any] = {}
    # All replicas have the same parameters, so the lanes of a device process
    # its rows together, without a leading lane dim.
    over_rows = P(tuple(layout.batch_spec))
    self._rows = layout.shardings(over_rows)

    def make(score: Callable[..., Any], *lead: str) -> Callable[..., Any]:
      mapped = jax.shard_map(
        functools.partial(score, access=weights.access),
        mesh=layout.mesh,
        in_specs=(weights.specs, over_rows),
        out_specs=P(*lead, *over_rows),
      )
      # Replicated, so that every process can read all results.
      return jax.jit(mapped, out_shardings=layout.shardings(P()))

    def with_top(params: Any, batch: jax.Array, access: Any) -> dict[str, Any]:
      logits = model.logits(params, batch[:, :-1], access)  # [R, B, T, V]
      ids, tensor = model.token_ids(), layout.tensor
      lanes, *lead, size = logits.shape
      top = top_logprobs(logits.reshape(lanes, -1, size), ids, tensor)
      targets = Targets(batch[:, 1:], ids, tensor.name)
      return target_scores(logits, targets) | {
        "top": jax.tree.map(lambda x: x.reshape(*lead, -1), top)
      }

    self._judge = make(model.target_scores)
    self._judge_with_top = make(with_top)
    self._logits = make(model.logits, layout.tensor.name)

  @property
  def num_compilations(self) -> int:
    """Number of compiled programs."""
    return len(self._compiled)

  def score(
    self,
    rows: Sequence[Sequence[int]],
    done: Callable[[int], None] = lambda count: None,
    top: bool = False,
    params: Any = None,
  ) -> list[TargetScores]:
    """Scores all tokens of each row except the first.

    The longest rows are scored first, so that an out-of-memory error occurs at
    once.

    Args:
      rows: Rows of 1 to ``context + 1`` tokens.
      done: Called after each batch with the number of rows that it scored.
      top: Whether to return the most probable tokens too.
      params: Parameters with the shapes and shardings of the scorer's; None for
        the scorer's.

    Returns:
      Scores of ``[len(row) - 1]`` tokens for each row, in the order of the
      rows.

    Raises:
      ValueError: A row is empty or too long, or has a token that is not in the
        vocabulary; or the model's logits are NaN.
    """
    rows = [np.asarray(row, np.int32) for row in rows]
    self._check(rows, self.context + 1)
    scores: dict[int, TargetScores] = {}
    longest_first = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    for start in range(0, len(rows), self._num_rows):
      chosen = longest_first[start : start + self._num_rows]
      judge = self._judge_with_top if top else self._judge
      found = self._run(judge, [rows[i] for i in chosen], 1, params)
      for place, index in enumerate(chosen):
        size = len(rows[index]) - 1
        own = jax.tree.map(lambda x, p=place, n=size: x[p, :n], found)
        scores[index] = TargetScores(
          own["log_probability"], own["greedy"], own.get("top")
        )
        # A metric such as accuracy would turn NaN into a number.
        if np.isnan(scores[index].log_probabilities).any():
          raise ValueError(
            f"row {index + 1}: the logits of the model are NaN: it has "
            "diverged, or overflows in its dtype"
          )
      done(len(chosen))
    return [scores[index] for index in range(len(rows))]

  def logits(self, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits of the token after each position, for small models.

    Args:
      tokens: int ``[B, T]``.

    Returns:
      float32 ``[B, T, vocab_size]``.

    Raises:
      ValueError: The rows are empty or too long, or have a token that is not in
        the vocabulary.
    """
    tokens = np.asarray(tokens, np.int32)
    self._check(tokens, self.context)
    found = []
    for start in range(0, len(tokens), self._num_rows):
      rows = tokens[start : start + self._num_rows]
      slices = self._run(self._logits, rows, 0)  # [ranks, B, T, V]
      joined = np.moveaxis(slices, 0, 2)  # [B, T, ranks, V]
      joined = joined.reshape(*joined.shape[:2], -1)
      found.append(joined[: len(rows), : tokens.shape[1], : self.vocab_size])
    return np.concatenate(found)

  def _run(
    self, step: Callable[..., Any], rows: Sequence[np.ndarray], targets: int,
    params: Any = None,
  ) -> Any:
    """Returns a step's result, on the host, for rows padded to a full batch.

    Args:
      step: `_judge`, `_judge_with_top` or `_logits`.
      rows: Token ids ``[T]`` of each row.
      targets: Number of tokens at the end of a row that are targets only: 1 or
        0.
      params: Parameters; None for those of the scorer.
    """
    length = self._padded(max(map(len, rows)), targets)
    batch = np.zeros((self._num_rows, length), np.int32)
    for place, row in enumerate(rows):
      batch[place, : len(row)] = row
    placed = jax.make_array_from_callback(
      batch.shape, self._rows, lambda index: batch[index]
    )
    params = self._params if params is None else params
    return jax.device_get(self._program(step, length)(params, placed))

  def compile(self, length: int) -> None:
    """Compiles the program of `score` with ``top`` for a row's length.

    Another thread may score meanwhile.
    """
    self._program(self._judge_with_top, self._padded(length, 1))

  def _padded(self, length: int, targets: int) -> int:
    """Returns the padded length of a row of ``length`` tokens; see `_run`."""
    return targets + next(n for n in self._lengths if n >= length - targets)

  def _program(self, step: Callable[..., Any], length: int) -> Any:
    """Returns the compiled program for rows that are padded to ``length``."""
    key = (step, length)
    if key not in self._compiled:
      rows = jax.ShapeDtypeStruct(
        (self._num_rows, length), np.int32, sharding=self._rows
      )
      self._compiled[key] = step.lower(self._params, rows).compile(
        self._options
      )
    return self._compiled[key]

  def _check(self, rows: Sequence[np.ndarray], limit: int) -> None:
    """Raises ValueError for rows of tokens that the model cannot read.

    `limit` is the maximum length of a row.
    """
    for row in rows:
      if not 0 < len(row) <= limit:
        raise ValueError(
          f"a row has {len(row)} tokens; it must have 1 to {limit}, since the "
          f"model's context is {self.context}"
        )
      if row.min() < 0 or row.max() >= self.vocab_size:
        raise ValueError(
          f"the token {(row.min() if row.min() < 0 else row.max())} must lie "
          f"in [0, config.model.vocab_size={self.vocab_size})"
        )


def _padded_lengths(context: int, platform: str) -> list[int]:
  """Returns the lengths to which rows are padded, ascending.

  Args:
    context: Length of the longest row before padding.
    platform: Kind of devices: "cpu", "gpu" or "tpu".
  """
  # Flash attention on TPUs takes multiples of 128.
  shortest, multiple = (128, 128) if platform == "tpu" else (64, 1)
  lengths = [shortest]
  while lengths[-1] < context:
    lengths.append(2 * lengths[-1])
  return [*lengths[:-1], -(-context // multiple) * multiple]
