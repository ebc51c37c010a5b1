"""Sampling filters such as top-k, by their names in requests and flags.

A filter keeps the tokens whose logit / temperature reaches a floor; logits are
shifted so that the largest is 0. Filters apply in the order of `FILTERS`, as in
Hugging Face's ``generate``. Tokens with equal logits are kept or removed
together, whereas Hugging Face's top-p depends on the order of a sort.

To add a filter, write a function and an entry of `FILTERS`. Fields of requests,
of the server and of lm-evaluation-harness, flags of ``launch.generate``, the
arrays of a step and the properties in
``tests/caatnet/inference/sampling_test.py`` derive from the entry. This module
imports jax only when a filter runs, so that flags are parsed without it.

Shape legend: S = sequences, N V = vocabulary of all N ranks, V tokens each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple

from etils import epy

with epy.lazy_imports():
  import jax
  import jax.numpy as jnp

  from caatnet.inference import ordering


class GatheredLogits(NamedTuple):
  """Logits of the whole vocabulary, for filters that need them.

  Attributes:
    z: Logits / temperature, float32 ``[S, N V]``; the largest is 0.
    keys: ``z`` as uint32 in the same order (`ordering.float_to_ordered_bits`).
    floor: Smallest value that earlier filters keep, float32 ``[S]``; -inf where
      they keep all.
  """

  z: jax.Array
  keys: jax.Array
  floor: jax.Array


def top_k(values: jax.Array, gathered: GatheredLogits) -> jax.Array:
  """Returns the floor that keeps the k most probable tokens."""
  z, keys, floor = gathered
  size = z.shape[-1]
  num_kept = jnp.where(values > 0, jnp.minimum(values, size), size)
  return ordering.find_largest_float(
    lambda t: jnp.sum(keys >= t, -1) >= num_kept, floor
  )


def top_p(values: jax.Array, gathered: GatheredLogits) -> jax.Array:
  """Returns the floor that keeps the fewest tokens with total probability p.

  Source: Holtzman et al., arXiv 1904.09751.
  """
  z, keys, floor = gathered
  weights = jnp.where(z >= floor[:, None], jnp.exp(z), 0.0)
  enough = values * ordering.ordered_sum(weights)
  found = ordering.find_largest_float(
    lambda t: ordering.ordered_sum(jnp.where(keys >= t, weights, 0.0))
    >= enough,
    floor,
  )
  # With p = 1 all tokens are kept, even those too improbable to change the sum.
  return jnp.where(values < 1, jnp.maximum(found, floor), floor)


def min_p(values: jax.Array) -> jax.Array:
  """Returns the floor at p times the probability of the most probable token.

  Source: Nguyen et al., arXiv 2407.01082.
  """
  return jnp.log(values)


@dataclasses.dataclass(frozen=True)
class Filter:
  """A filter and the range of its value.

  Attributes:
    floor: Returns the smallest value that is kept, float32 ``[S]``, given the
      requests' values ``[S]`` and, if ``gathers``, a `GatheredLogits`.
    help: Description of the value, for ``--help``.
    least, most: Ends of the value's range, which includes ``most`` and, unless
      ``above``, ``least``. The values are integers if the range is given in
      integers.
    neutral: End of the range that keeps all tokens.
    greedy: Value that keeps the most probable token only.
    example: Value that keeps some tokens, for tests.
    above: Whether the value must be above ``least``.
    gathers: Whether the filter needs the logits of all ranks.

  Example:
    >>> row = FILTERS["top_p"]
    >>> row.must, row.fits(0.9), row.fits(0), row.used(1.0)
    ('lie in (0, 1]', True, False, False)
  """

  floor: Callable[..., Any]
  help: str
  least: float
  most: float
  neutral: float
  greedy: float
  example: float
  above: bool = False
  gathers: bool = False

  @property
  def kind(self) -> type[int] | type[float]:
    """Type of the value."""
    return int if isinstance(self.most, int) else float

  @property
  def dtype(self) -> str:
    """Dtype of an array of values."""
    return "int32" if self.kind is int else "float32"

  @property
  def must(self) -> str:
    """Completes "must" in error messages, as in "be at least 0"."""
    if self.kind is int:
      return f"be an integer from {self.least} to {self.most}"
    return f"lie in {'(' if self.above else '['}{self.least:g}, {self.most:g}]"

  def fits(self, value: float) -> bool:
    """Returns whether a value is in the range; False for NaN."""
    low = self.least < value if self.above else self.least <= value
    return bool(low and value <= self.most)

  def used(self, values: Any) -> Any:
    """Returns whether a value, or each entry of an array, may remove tokens."""
    if self.neutral == self.least:
      return values > self.neutral
    return values < self.neutral


FILTERS = {
  "top_k": Filter(
    top_k, "Draw from the k most probable tokens; 0: all.", 0, 2**31 - 1,
    neutral=0, greedy=1, example=5, gathers=True,
  ),
  "top_p": Filter(
    top_p, "Draw from the fewest tokens with this total probability.", 0.0, 1.0,
    neutral=1.0, greedy=1e-6, example=0.7, above=True, gathers=True,
  ),
  "min_p": Filter(
    min_p, "Draw from tokens with at least this fraction of the largest "
    "probability.", 0.0, 1.0,
    neutral=0.0, greedy=1.0, example=0.1,
  ),
}

# Sampling parameters of a request: a dataclass with a keyword argument for each
# filter.
Settings = dataclasses.make_dataclass(
  "Settings",
  [
    ("temperature", float, 0.0),
    *((name, row.kind, row.neutral) for name, row in FILTERS.items()),
    ("seed", int, 0),
  ],
  frozen=True, kw_only=True, namespace={"__module__": __name__},
)


def choose_sampling_params(
  given: Mapping[str, float | None], generation: Mapping[str, Any]
) -> dict[str, float]:
  """Returns sampling parameters: given ones, otherwise recommended ones.

  Without a recommendation of the model's publisher, these are temperature 0.8
  and top-p 0.95, since greedy decoding of small models repeats itself.

  Args:
    given: Temperature and filters; None for those that are not given.
    generation: Contents of the model's ``generation_config.json``.

  Raises:
    ValueError: A recommended value is not a number in its range.

  Example:
    >>> model = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}
    >>> choose_sampling_params({"temperature": None}, model)
    {'temperature': 0.6, 'top_p': 0.9}
    >>> choose_sampling_params({"temperature": 0.0}, model)  # greedy
    {'temperature': 0.0, 'top_p': 0.9}
    >>> choose_sampling_params({}, {})
    {'temperature': 0.8, 'top_p': 0.95}
  """
  found = {
    name: generation[name] for name in ("temperature", *FILTERS)
    if generation.get(name) is not None
  }
  for name, value in found.items():
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise ValueError(
        f"generation_config.json has {name}={value!r}, which must be a number"
      )
    if name in FILTERS and not FILTERS[name].fits(value):
      raise ValueError(
        f"generation_config.json has {name}={value}, which must "
        f"{FILTERS[name].must}"
      )
  if generation.get("do_sample") is False:
    found = {"temperature": 0.0}
  elif not found and "do_sample" not in generation:
    found = {"temperature": 0.8, "top_p": 0.95}
  ours = {name: value for name, value in given.items() if value is not None}
  return {"temperature": 1.0} | found | ours
