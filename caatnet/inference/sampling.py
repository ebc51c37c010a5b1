"""Draws the next token of each sequence, inside ``jax.shard_map``.

The vocabulary is cut over the tensor axis, and so are the logits. A token is
drawn by the Gumbel-max trick (Maddison et al., arXiv 1411.0030, section 2.1):
the one with the largest logit / temperature + noise, where the noise of token v
is -log(-log(u)), u uniform in (0, 1). u comes from Threefry with the key
(seed, position) and the counter v. So a token depends on the seed, the position
and the logits of its sequence alone: not on the batch, on the slot in it, or on
how many ranks, lanes and devices share the vocabulary. And each rank finds the
best of its own tokens, so that a few numbers per sequence cross the axis.

Filters keep the tokens whose logit / temperature reaches a floor. They apply in
the order of Hugging Face's ``generate``: temperature, top-k, top-p, min-p.
Tokens with equal logits are kept or left out together, where Hugging Face's
top-p lets a sort decide.

- top-k keeps the k largest.
- top-p (Holtzman et al., arXiv 1904.09751) keeps, of what top-k leaves, the
  fewest largest whose probabilities reach top_p.
- min-p (Nguyen et al., arXiv 2407.01082) keeps what is at least min_p times as
  probable as the most probable token. It needs the largest logit only.

For top-k and top-p the logits are gathered. Their floors are found bit by bit,
by counting or weighing what is above, which XLA:CPU does much faster than it
sorts.

Shape legend: R = lanes on this device, N = ranks, S = sequences, V = vocabulary
of one rank.
"""

import collections
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from caatnet.models.protocol import Reduction
from parallel.axes import Axis
from parallel.collectives import (
  all_gather,
  ranks_here,
  varying,
  varying_axes,
)
from parallel.kernels.calls import same_axes
from parallel.kernels.codec import threefry

# The sign bit of a float32, and the first bit that is tried.
_TOP_BIT = np.uint32(1 << 31)


class Sampling(NamedTuple):
  """How the next token of each sequence is drawn; arrays ``[S]``.

  Attributes:
    seed: uint32; equal seeds draw equal tokens.
    temperature: float32, at least 0; 0 takes the most probable token, of
      several the one with the lowest id.
    top_k: int32, at least 0; how many tokens are kept, 0 for all.
    top_p: float32 in (0, 1]; 1 keeps all.
    min_p: float32 in [0, 1]; 0 keeps all.
  """

  seed: jax.Array
  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  min_p: jax.Array


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
    logits: float32 ``[R, S, V]``, each rank's slice; -inf where the vocabulary
      is padded.
    token_ids: int32 ``[R, V]``, which token each logit stands for; ascending,
      also from rank to rank.
    positions: int32 ``[S]``, the position of the token that was read last.
    sampling: How to draw.
    axis: The tensor axis.
    filters: Whether top_k and top_p are looked at. If no sequence uses them,
      the result is the same bit for bit, without a gather of the logits.

  Returns:
    The tokens, int32 ``[S]``, and their log-probabilities, float32 ``[S]``, in
    nats: those of the model itself, at temperature 1 and with no filter. Both
    are the same on every device of the axis. Another number of ranks may round
    log-probabilities otherwise; nothing else changes a bit. NaN among a
    sequence's logits gives NaN, and some token.
  """
  with jax.named_scope("sample"):
    largest = lax.pmax(jnp.max(logits, axis=(0, 2)), axis.name)  # [S]
    # With the largest at 0, no temperature is too low to divide by.
    shifted = logits - largest[None, :, None]
    sampled = sampling.temperature > 0
    scaled = shifted / jnp.where(sampled, sampling.temperature, 1.0)[:, None]
    kept = scaled >= jnp.log(sampling.min_p)[:, None]
    if filters:
      everyone = all_gather(scaled, axis, dim=1)  # [S, N V]
      kept &= _of_ranks_here(_kept(everyone, sampling), axis)
    noisy = jnp.where(
      kept,
      scaled + _noise_if(sampled, sampling.seed, positions, token_ids),
      -jnp.inf,
    )
    best = jnp.argmax(noisy, axis=-1)  # [R, S]; the first, so the lowest id

    def at_best(x):
      return jnp.take_along_axis(x, best[..., None], axis=-1)[..., 0]

    # Of each rank, as int32 so that nothing rounds: [R, 4, S].
    mine = jnp.stack(
      [
        jax.vmap(jnp.take)(token_ids, best),
        *(
          lax.bitcast_convert_type(x, jnp.int32)
          for x in (
            at_best(noisy), at_best(shifted), _sum(jnp.exp(shifted))
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
    winner = jnp.argmax(noisy, axis=0)[None]  # [1, S]; the first rank of equals
    tokens = jnp.take_along_axis(ids, winner, axis=0)[0]
    chosen = jnp.take_along_axis(shifted, winner, axis=0)[0]
    return tokens, chosen - jnp.log(_sum(normalisers.T))


def sampling_reductions(
  axis: Axis, *, num_sequences: int, vocab_size: int, filters: bool
) -> collections.Counter[Reduction]:
  """Counts what `sample` sends over the tensor axis, in closed form.

  Args:
    axis: The tensor axis.
    num_sequences: S.
    vocab_size: Tokens of the vocabulary, padding not counted.
    filters: As in `sample`.

  Returns:
    How often each collective runs.
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


def _noise_if(
  sampled: jax.Array, seed: jax.Array, positions: jax.Array,
  token_ids: jax.Array,
) -> jax.Array:
  """Returns Gumbel noise ``[R, S, V]``, 0 where nothing is sampled."""
  # Within a conditional under vmap jax 0.10 casts an operand a second time.
  sampled, seed, positions, token_ids = same_axes(
    sampled, seed, positions, token_ids
  )

  def draw():
    noise = _gumbel(
      seed[:, None], positions[:, None].astype(jnp.uint32),
      token_ids[:, None].astype(jnp.uint32),
    )
    return jnp.where(sampled[:, None], noise, 0.0)

  # In a batch without sampling the noise would cost more than all the rest.
  lanes, num_tokens = token_ids.shape
  zeros = jnp.zeros((lanes, *positions.shape, num_tokens))
  none = _varying_as(zeros, sampled, seed, positions, token_ids)
  return lax.cond(jnp.any(sampled), draw, lambda: none)


def _gumbel(key_0: jax.Array, key_1: jax.Array, index: jax.Array) -> jax.Array:
  """Draws standard Gumbel noise, float32, from uint32 arrays.

  A large vocabulary needs rare values: u has 48 random bits, and they are those
  of 1 - u, whose small values make the large ones of the noise.
  """
  x, y = threefry.words(key_0, key_1, index)
  # Two integers of 24 bits, which float32 represents exactly.
  high = (x >> 8).astype(jnp.int32).astype(jnp.float32)
  low = ((x & 0xFF) << 16 | y >> 16).astype(jnp.int32).astype(jnp.float32)
  rest = high * 2.0**-24 + (low + 0.5) * 2.0**-48
  rest = jnp.minimum(rest, 1 - 2.0**-24)  # rounding may have made it 1
  return -jnp.log(-jnp.log1p(-rest))


def _kept(z: jax.Array, sampling: Sampling) -> jax.Array:
  """Returns which tokens top-k and then top-p keep, bool ``[S, N V]``.

  The floor is one of the logits, so these must not be computed once for the
  floor and again, rounded otherwise, for the comparison, as XLA:CPU does in a
  program of one sequence. What a conditional is given is computed once.

  Args:
    z: As `_floor` takes it.
    sampling: How to draw.
  """
  return lax.cond(
    jnp.any(sampling.top_k > 0) | jnp.any(sampling.top_p < 1),
    lambda: z >= _floor(z, sampling)[:, None],
    lambda: _varying_as(
      jnp.ones(z.shape, bool), z, sampling.top_k, sampling.top_p
    ),
  )


def _of_ranks_here(x: jax.Array, axis: Axis) -> jax.Array:
  """Cuts ``[S, N V]`` into what is of this device's ranks, ``[R, S, V]``."""
  apart = x.reshape(len(x), axis.size, -1)
  return jnp.moveaxis(apart[:, ranks_here(axis)], 1, 0)


def _floor(z: jax.Array, sampling: Sampling) -> jax.Array:
  """Returns the smallest value that top-k and then top-p keep, ``[S]``.

  Args:
    z: float32 ``[S, N V]``, all logits / temperature; the largest is 0.
    sampling: How to draw.
  """
  keys = _ordered(z)
  size = z.shape[-1]
  top_k, top_p = sampling.top_k, sampling.top_p
  num_kept = jnp.where(top_k > 0, jnp.minimum(top_k, size), size)
  nothing = _varying_as(jnp.full(z.shape[:1], -jnp.inf), z, top_k, top_p)

  def of_top_k():
    return _highest(lambda t: jnp.sum(keys >= t, -1) >= num_kept, nothing)

  floor = lax.cond(jnp.any(top_k > 0), of_top_k, lambda: nothing)

  def of_top_p():
    weights = jnp.where(z >= floor[:, None], jnp.exp(z), 0.0)
    enough = top_p * _sum(weights)
    found = _highest(
      lambda t: _sum(jnp.where(keys >= t, weights, 0.0)) >= enough, nothing
    )
    # Where all are kept, so is what is too small to change the sum.
    return jnp.where(top_p < 1, jnp.maximum(found, floor), floor)

  return lax.cond(jnp.any(top_p < 1), of_top_p, lambda: floor)


def _varying_as(x: jax.Array, *others: jax.Array) -> jax.Array:
  """Casts ``x`` to vary over every mesh axis that one of the others does."""
  return varying(x, *frozenset().union(*map(varying_axes, others)))


def _ordered(x: jax.Array) -> jax.Array:
  """Maps float32 to uint32 of the same order."""
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  return jnp.where(bits >= _TOP_BIT, ~bits, bits | _TOP_BIT)


def _highest(
  holds: Callable[[jax.Array], jax.Array], like: jax.Array
) -> jax.Array:
  """Returns for each sequence the largest float32 for which a condition holds.

  Args:
    holds: Says of each sequence, ``[S]``, whether the condition holds at a
      value ``[S, 1]``, given as `_ordered` maps it. Where it holds for a value,
      it holds for all that are smaller; it does for -inf.
    like: float32 ``[S]``; the result has its type.
  """

  def with_bit(i, keys):
    higher = keys | lax.shift_right_logical(_TOP_BIT, i.astype(jnp.uint32))
    return jnp.where(holds(higher[:, None]), higher, keys)

  zeros = _varying_as(jnp.zeros(like.shape, jnp.uint32), like)
  keys = lax.fori_loop(0, 32, with_bit, zeros)
  bits = jnp.where(keys >= _TOP_BIT, keys ^ _TOP_BIT, ~keys)
  return lax.bitcast_convert_type(bits, jnp.float32)


def _sum(x: jax.Array) -> jax.Array:
  """Sums ``[..., n]`` over n in an order that zeros at the end do not change.

  A compiler orders the sum of a reduction as it likes, and otherwise for
  another batch. And ranks pad the vocabulary differently.
  """
  size = x.shape[-1]
  width = 1 << (size - 1).bit_length()
  x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - size)])
  while width > 1:
    width //= 2
    x = x[..., :width] + x[..., width:]
  return x[..., 0]
