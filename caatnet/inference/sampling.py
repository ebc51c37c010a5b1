"""Sampling of the next token of each sequence, inside ``jax.shard_map``.

The vocabulary and the logits are sharded over the tensor axis. A token is drawn
by the Gumbel-max trick (Maddison et al., arXiv 1411.0030, section 2.1): the
drawn token has the largest logit / temperature + noise, where the noise of
token v is -log(-log(u)), u uniform in (0, 1). u comes from Threefry with the
key (seed, position) and the counter v. A token therefore depends only on the
seed, the position and the logits of its sequence: not on the batch, on the slot
of the sequence, or on the number of ranks, lanes and devices that share the
vocabulary. Each rank finds the maximum over its own tokens, so that only a few
numbers per sequence are communicated.

Filters (`caatnet.inference.filters`) keep the tokens whose logit / temperature
reaches a floor. Some filters need only the largest logit. For others, such as
top-k, the logits are gathered, and the floor is found by bisection over the
bits of a float32: each step counts or sums the tokens above a candidate. On
XLA:CPU this is much faster than sorting.

Shape legend: R = lanes (tensor ranks on this device), N = tensor ranks,
S = sequences, V = vocabulary of one rank.
"""

import collections
import functools
import operator
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from caatnet.inference.filters import FILTERS, Filter, GatheredLogits
from caatnet.inference.ordering import (
  float_to_ordered_bits,
  ordered_sum,
  varying_as,
)
from caatnet.models.protocol import Reduction
from parallel.axes import Axis
from parallel.collectives import all_gather, ranks_here
from parallel.kernels.calls import unify_varying_axes
from parallel.kernels.codec import threefry

# Sampling parameters of each sequence, arrays ``[S]``:
#   seed: uint32; equal seeds draw equal tokens.
#   temperature: float32, at least 0; 0 selects the most probable token, and the
#     lowest id among equals.
#   NAME: Values of the filter of that name.
Sampling = NamedTuple(
  "Sampling",
  [(name, jax.Array) for name in ("seed", "temperature", *FILTERS)],
)
DTYPES = {"seed": "uint32", "temperature": "float32"} | {
  name: row.dtype for name, row in FILTERS.items()
}
# Names of the filters that need the logits of all ranks.
GATHERING_FILTERS = tuple(name for name, row in FILTERS.items() if row.gathers)
# Number of most probable tokens of `top_logprobs`: the limit of OpenAI's API.
NUM_TOP_TOKENS = 20


class TopTokens(NamedTuple):
  """Most probable tokens at each position, the most probable first.

  Attributes:
    ids: Token ids, int32 ``[..., k]``.
    logprobs: Log-probabilities in nats, float32 ``[..., k]``; -inf for padding
      of the vocabulary.
  """

  ids: jax.Array
  logprobs: jax.Array


def sample(
  logits: jax.Array,
  token_ids: jax.Array,
  positions: jax.Array,
  sampling: Sampling,
  axis: Axis,
  filters: bool,
) -> tuple[jax.Array, jax.Array]:
  """Draws one token for each sequence.

  Args:
    logits: Slice of each rank, float32 ``[R, S, V]``; -inf in the padding of
      the vocabulary.
    token_ids: Token of each logit, int32 ``[R, V]``; ascending, also from rank
      to rank.
    positions: Position of the last token read, int32 ``[S]``.
    sampling: Sampling parameters, arrays ``[S]``.
    axis: Tensor axis.
    filters: Whether filters that gather the logits apply. If no sequence uses
      one, the result without them is bitwise the same.

  Returns:
    The tokens, int32 ``[S]``, and their log-probabilities, float32 ``[S]``, in
    nats: those of the model at temperature 1 without filters. Both are equal on
    every device of the axis. With another number of ranks the rounding of
    log-probabilities may differ; everything else is bitwise the same. If a
    sequence has NaN logits, its log-probability is NaN and its token is
    arbitrary.
  """
  with jax.named_scope("sample"):
    largest = lax.pmax(jnp.max(logits, axis=(0, 2)), axis.name)  # [S]
    # The largest logit becomes 0, so that no division by a small temperature
    # overflows.
    shifted = logits - largest[None, :, None]
    sampled = sampling.temperature > 0
    temperature = jnp.where(sampled, sampling.temperature, 1.0)
    scaled = shifted / temperature[None, :, None]
    kept = functools.reduce(operator.and_, [
      scaled >= row.floor(values)[None, :, None]
      for row, values in _select_filters(sampling, gathers=False)
    ])
    if filters:
      everyone = all_gather(scaled, axis, dim=1)  # [S, N V]
      kept &= _of_ranks_here(_kept_token_mask(everyone, sampling), axis)
    noisy = jnp.where(
      kept,
      scaled + _noise_where_sampled(
        sampled, sampling.seed, positions, token_ids
      ),
      -jnp.inf,
    )
    best = jnp.argmax(noisy, axis=-1)  # [R, S]; the first, so the lowest id

    def at_best(x):
      return jnp.take_along_axis(x, best[..., None], axis=-1)[..., 0]

    # Best token of each rank, and three floats with their bits as int32, since
    # one all-gather has one dtype: [R, 4, S].
    mine = jnp.stack(
      [
        jax.vmap(jnp.take)(token_ids, best),
        *(
          lax.bitcast_convert_type(x, jnp.int32)
          for x in (
            at_best(noisy), at_best(shifted), ordered_sum(jnp.exp(shifted))
          )
        ),
      ],
      axis=1,
    )
    ranks = all_gather(mine[:, None], axis)  # [N, 4, S]
    ids = ranks[:, 0]
    noisy, shifted, normalisers = jnp.moveaxis(
      lax.bitcast_convert_type(ranks[:, 1:], jnp.float32), 1, 0
    )
    winner = jnp.argmax(noisy, axis=0)[None]  # [1, S]; if equal, first rank
    tokens = jnp.take_along_axis(ids, winner, axis=0)[0]
    chosen = jnp.take_along_axis(shifted, winner, axis=0)[0]
    return tokens, chosen - jnp.log(ordered_sum(normalisers.T))


def top_logprobs(
  logits: jax.Array, token_ids: jax.Array, axis: Axis,
  asked: jax.Array | None = None,
) -> TopTokens:
  """Returns the most probable tokens, at temperature 1 and without filters.

  Each rank selects its own, so that only k tokens per rank are communicated.

  Args:
    logits: Slice of each rank, float32 ``[R, S, V]``, as in `sample`.
    token_ids: Token of each logit, int32 ``[R, V]``, as in `sample`.
    axis: Tensor axis.
    asked: int32 ``[S]``; without any nonzero entry, the result is arbitrary and
      takes no time. None for all sequences.

  Returns:
    `NUM_TOP_TOKENS` tokens, or the whole vocabulary if it is smaller, ``[S,
    k]``; every device of the axis has the same. Of equal logits, the lowest
    token is first.
  """
  lanes, num, size = logits.shape
  k = min(NUM_TOP_TOKENS, size)

  def bits(x):
    return lax.bitcast_convert_type(x, jnp.int32)

  with jax.named_scope("top_logprobs"):
    largest = lax.pmax(jnp.max(logits, axis=(0, 2)), axis.name)  # [S]
    shifted = logits - largest[None, :, None]

    def find():
      values, places = lax.top_k(shifted, k)
      total = ordered_sum(jnp.exp(shifted))[..., None]
      ids = jax.vmap(jnp.take)(token_ids, places)
      return jnp.concatenate([ids, bits(values), bits(total)], axis=-1)

    if asked is None:
      mine = find()
    else:
      none = jnp.zeros((lanes, num, 2 * k + 1), jnp.int32)
      none = varying_as(none, shifted, token_ids, asked)
      mine = lax.cond(jnp.any(asked != 0), find, lambda: none)
    # From [N, S, 2 k + 1]: ids and values, [S, N k] each, and totals, [N, S].
    ranks = all_gather(mine[:, None], axis)
    ids, values = (
      jnp.moveaxis(ranks[..., first : first + k], 0, 1).reshape(num, -1)
      for first in (0, k)
    )
    values, totals = (
      lax.bitcast_convert_type(x, jnp.float32) for x in (values, ranks[..., -1])
    )
    # Ranks have ascending tokens, so the first of equals is the lowest.
    best, places = lax.top_k(values, min(NUM_TOP_TOKENS, values.shape[-1]))
    return TopTokens(
      jnp.take_along_axis(ids, places, axis=-1),
      best - jnp.log(ordered_sum(totals.T))[:, None],
    )


def sampling_reductions(
  axis: Axis, *, num_sequences: int, vocab_size: int, filters: bool
) -> collections.Counter[Reduction]:
  """Counts the collectives of `sample` over the tensor axis, in closed form.

  Args:
    axis: Tensor axis.
    num_sequences: S.
    vocab_size: Vocabulary size without padding.
    filters: Whether the logits are gathered; see `sample`.

  Returns:
    Number of calls of each collective.

  Example:
    Four ranks on four devices, 8 sequences: each rank sends 4 numbers per
    sequence.

    >>> counts = sampling_reductions(
    ...   Axis("tensor", 4, devices=4), num_sequences=8, vocab_size=256,
    ...   filters=False)
    >>> for reduction in counts:
    ...   print(reduction.kind, reduction.dtype, reduction.shape)
    all_reduce float32 (8,)
    all_gather int32 (1, 4, 8)
  """
  of_lanes = axis.lanes * -(-vocab_size // axis.size)  # padded to divide
  count = collections.Counter(
    {
      Reduction("forward", "float32", (num_sequences,)): 1,
      Reduction(
        "forward", "int32", (axis.lanes, 4, num_sequences), "all_gather"
      ): 1,
    }
  )
  if filters:
    count[
      Reduction("forward", "float32", (num_sequences, of_lanes), "all_gather")
    ] += 1
  return count


def _noise_where_sampled(
  sampled: jax.Array, seed: jax.Array, positions: jax.Array,
  token_ids: jax.Array,
) -> jax.Array:
  """Returns Gumbel noise ``[R, S, V]``, 0 for sequences at temperature 0.

  `sampled` tells which sequences have another temperature; the other arguments
  are as in `sample`.
  """
  # Cast before the conditional: inside it, jax 0.10 under vmap would cast one
  # operand twice.
  sampled, seed, positions, token_ids = unify_varying_axes(
    sampled, seed, positions, token_ids
  )

  def draw():
    noise = _gumbel(
      seed[None, :, None], positions[None, :, None].astype(jnp.uint32),
      token_ids[:, None].astype(jnp.uint32),
    )
    return jnp.where(sampled[None, :, None], noise, 0.0)

  # In a greedy batch the noise would cost more than the rest of `sample`.
  lanes, num_tokens = token_ids.shape
  zeros = jnp.zeros((lanes, *positions.shape, num_tokens))
  none = varying_as(zeros, sampled, seed, positions, token_ids)
  return lax.cond(jnp.any(sampled), draw, lambda: none)


def _gumbel(key_0: jax.Array, key_1: jax.Array, index: jax.Array) -> jax.Array:
  """Draws standard Gumbel noise, float32, from uint32 arrays.

  A large vocabulary needs rare values, so u has 48 random bits. They determine
  1 - u, whose small values give the large values of the noise.
  """
  x, y = threefry.words(key_0, key_1, index)
  # Two integers of 24 bits, which float32 represents exactly.
  high = (x >> 8).astype(jnp.int32).astype(jnp.float32)
  low = ((x & 0xFF) << 16 | y >> 16).astype(jnp.int32).astype(jnp.float32)
  rest = high * 2.0**-24 + (low + 0.5) * 2.0**-48
  rest = jnp.minimum(rest, 1 - 2.0**-24)  # rounding may give 1
  return -jnp.log(-jnp.log1p(-rest))


def _select_filters(
  sampling: Sampling, gathers: bool
) -> list[tuple[Filter, jax.Array]]:
  """Returns filters with this `Filter.gathers`, and their values ``[S]``."""
  return [
    (row, getattr(sampling, name)) for name, row in FILTERS.items()
    if row.gathers == gathers
  ]


def _kept_token_mask(z: jax.Array, sampling: Sampling) -> jax.Array:
  """Returns the tokens that filters of gathered logits keep, bool ``[S, N V]``.

  The floor equals one of the logits, so it must be compared with bitwise the
  same logits. In a program of one sequence, XLA:CPU would compute the logits
  twice with different rounding: for the floor, and for the comparison. It
  computes the operands of a conditional only once.

  Args:
    z: All logits / temperature, as in `_filter_floor`.
    sampling: Sampling parameters.
  """
  rows = _select_filters(sampling, gathers=True)
  return lax.cond(
    functools.reduce(
      operator.or_, [jnp.any(row.used(values)) for row, values in rows]
    ),
    lambda: z >= _filter_floor(z, rows)[:, None],
    lambda: varying_as(
      jnp.ones(z.shape, bool), z, *(values for _, values in rows)
    ),
  )


def _of_ranks_here(x: jax.Array, axis: Axis) -> jax.Array:
  """Selects this device's tensor ranks: ``[S, N V]`` to ``[R, S, V]``."""
  apart = x.reshape(len(x), axis.size, -1)
  return jnp.moveaxis(apart[:, ranks_here(axis)], 1, 0)


def _filter_floor(
  z: jax.Array, rows: list[tuple[Filter, jax.Array]]
) -> jax.Array:
  """Returns the smallest value that all filters in turn keep, ``[S]``.

  Args:
    z: All logits / temperature, float32 ``[S, N V]``; the largest is 0.
    rows: Filters with the values of the sequences' requests, ``[S]``.
  """
  floor = varying_as(
    jnp.full(z.shape[:1], -jnp.inf), z, *(values for _, values in rows)
  )
  keys = float_to_ordered_bits(z)
  for row, values in rows:
    floor = lax.cond(
      jnp.any(row.used(values)),
      functools.partial(row.floor, values, GatheredLogits(z, keys, floor)),
      lambda kept=floor: kept,
    )
  return floor
