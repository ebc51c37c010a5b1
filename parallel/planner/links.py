"""Which setting of a low-communication method a slow link allows.

Uses `parallel.network.utilisation` (arXiv 2501.18512); the choice among the
settings is ours.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import math

from parallel.network.utilisation import Method, Model, simulate


@dataclasses.dataclass(frozen=True)
class Recommendation:
  """The setting, and the compute utilisation that it has."""

  method: Method
  utilisation: float


def recommend(
  model: Model,
  bandwidth: float,
  target: float,
  *,
  sync_every: Sequence[int] = (1, 10, 30, 50, 100, 200, 500),
  overlap_steps: Sequence[int] = (0, 1, 2, 5),
  bits: Sequence[float] = (16, 8, 4),
  volume_factor: float = 1.0,
  latency_s: float = 0.0,
) -> Recommendation | None:
  """The setting with the least staleness that keeps the device busy enough.

  Order of preference, what costs most first: the smallest H; then the
  smallest tau; then the most bits; then one fragment rather than fragments of
  three layers. In the paper H = 100 instead of 30 raises the loss at 500M from
  2.67 to 2.69, tau up to 10 by less than 0.2 %, and neither 4 bits nor
  fragments do. H = 1 is data parallelism and is tried only plain: tau = 0,
  one fragment, the most bits.

  Args:
    model: What is trained.
    bandwidth: bit/s of the replica's link.
    target: Compute utilisation in (0, 1) that is enough.
    sync_every: Candidates for H.
    overlap_steps: Candidates for tau; the paper advises up to 5.
    bits: Candidates for bits per parameter.
    volume_factor: As in `simulate`.
    latency_s: As in `simulate`.

  Returns:
    The first setting in that order that reaches the target; None if none of
    them does: see `fewest_steps`.

  Raises:
    ValueError: The target is not in (0, 1), or no candidates.
  """
  if not 0 < target < 1:
    raise ValueError(f"target={target:g} must lie in (0, 1), both excluded")
  for key, values in (("sync_every", sync_every), ("bits", bits),
                      ("overlap_steps", overlap_steps)):
    if not values:
      raise ValueError(f"{key}={tuple(values)} must have a value")
  factors = {"volume_factor": volume_factor, "latency_s": latency_s}
  for method in candidates(model.num_layers, sync_every, overlap_steps, bits):
    fewest = fewest_steps(model, bandwidth, target, method.bits, volume_factor)
    if method.sync_every < fewest:
      continue  # the link alone takes too long: no need to simulate
    timeline = simulate(model, method, bandwidth, **factors)
    if timeline.utilisation[0] >= target:
      return Recommendation(method, float(timeline.utilisation[0]))
  return None


def candidates(
  num_layers: int,
  sync_every: Sequence[int],
  overlap_steps: Sequence[int],
  bits: Sequence[float],
) -> Iterator[Method]:
  """Settings in `recommend`'s order of preference."""
  for steps in sorted(sync_every):
    for overlap in sorted(overlap_steps):
      for width in sorted(bits, reverse=True):
        for fragments in sorted({1, max(1, num_layers // 3)}):
          plain = (overlap, fragments, width) == (0, 1, max(bits))
          if plain or max(overlap, fragments) < steps:
            yield Method(steps, fragments, overlap, width)


def fewest_steps(
  model: Model,
  bandwidth: float,
  target: float,
  bits: float,
  volume_factor: float = 1.0,
) -> int:
  """The smallest H at which the link has time for all parameters.

  A bound: an exchange of f bits N / bandwidth seconds fits into H steps at
  this utilisation, hidden as well as may be.
  """
  exchange_s = volume_factor * bits * model.parameters / bandwidth
  steps = target * exchange_s / model.compute_seconds
  return max(1, math.ceil(steps * (1 - 1e-9)))  # not one more by rounding
