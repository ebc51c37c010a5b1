"""Choice of the settings of a low-communication method for a slow link.

The utilisation of a setting is predicted by
`caatnet.studies.utilisation.predictor` (after arXiv 2501.18512); the order of
preference among settings is not from the paper.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import math

from caatnet.studies.utilisation.predictor import Model, SyncMethod, simulate


@dataclasses.dataclass(frozen=True)
class Recommendation:
  """Setting and its predicted compute utilisation.

  Attributes:
    method: The setting.
    utilisation: Fraction of the time in which the device computes.
  """

  method: SyncMethod
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
  """Returns the least stale setting that reaches a compute utilisation.

  The order of preference is: the smallest H, the smallest tau, the most bits,
  and one fragment rather than fragments of three layers. It follows the cost
  in loss: in the paper, H = 100 instead of 30 raises the loss at 500M
  parameters from 2.67 to 2.69, tau up to 10 raises it by less than 0.2 %, and
  4 bits and fragments do not raise it. H = 1 is data parallelism and is tried
  in one form only: tau = 0, one fragment, the most bits.

  Args:
    model: Model that is trained.
    bandwidth: Bandwidth of the replica's link in bit/s.
    target: Compute utilisation that the setting must reach, in (0, 1).
    sync_every: Candidates for H, the steps between reductions of a parameter.
    overlap_steps: Candidates for tau, the steps that a reduction may overlap;
      the paper advises up to 5.
    bits: Candidates for the bits per parameter on the link.
    volume_factor: Bits that a replica sends for each bit of its parameters.
    latency_s: Seconds from the end of a reduction on the link to its arrival.

  Returns:
    The first setting in that order that reaches the target. None if no setting
    does; `fewest_steps` then returns the smallest H that the link permits.

  Raises:
    ValueError: The target is not in (0, 1), or a list of candidates is empty.
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
      continue  # the reductions alone take too long: no need to simulate
    timeline = simulate(model, method, bandwidth, **factors)
    if timeline.utilisation[0] >= target:
      return Recommendation(method, float(timeline.utilisation[0]))
  return None


def candidates(
  num_layers: int,
  sync_every: Sequence[int],
  overlap_steps: Sequence[int],
  bits: Sequence[float],
) -> Iterator[SyncMethod]:
  """Yields settings in the order of preference that `recommend` describes.

  Args:
    num_layers: Number of layers of the model.
    sync_every: Candidates for H.
    overlap_steps: Candidates for tau.
    bits: Candidates for the bits per parameter on the link.
  """
  for steps in sorted(sync_every):
    for overlap in sorted(overlap_steps):
      for width in sorted(bits, reverse=True):
        for fragments in sorted({1, max(1, num_layers // 3)}):
          # `SyncMethod` requires tau and several fragments to be less than H,
          # so with H = 1 only the plain setting is tried.
          plain = (overlap, fragments, width) == (0, 1, max(bits))
          if plain or max(overlap, fragments) < steps:
            yield SyncMethod(steps, fragments, overlap, width)


def fewest_steps(
  model: Model,
  bandwidth: float,
  target: float,
  bits: float,
  volume_factor: float = 1.0,
) -> int:
  """Returns the smallest H at which the link has time for all N parameters.

  This lower bound assumes that the exchange overlaps fully with compute: its
  f x bits x N / bandwidth seconds must not exceed the duration of H steps at
  the utilisation ``target``.

  Args:
    model: Model that is trained.
    bandwidth: Bandwidth of the replica's link in bit/s.
    target: Compute utilisation that must be reached, in (0, 1).
    bits: Bits per parameter on the link.
    volume_factor: f, bits that a replica sends for each bit of its parameters.
  """
  exchange_s = volume_factor * bits * model.parameters / bandwidth  # f b N / B
  steps = target * exchange_s / model.compute_seconds
  # Float rounding of an integer product must not add a step.
  return max(1, math.ceil(steps * (1 - 1e-9)))
