"""Second pass of a plan: faster configurations that change the trained model.

The first pass selects among configurations that train the same model. The
second pass makes one change at a time to each of the best few:

    p        tensor ranks synchronise a fraction p of the stream's channels
             (CAAT-Net, arXiv 2506.19645; `parallel.tensor.projections`)
    outer    groups of data-parallel ranks become workers of an outer loop,
             DiLoCo (arXiv 2311.08105) or Streaming DiLoCo (arXiv 2501.18512),
             with the number of workers for which a step is fastest
    codec    a partition's gathers and scatters are encoded (qwZ and qgZ of
             ZeRO++, arXiv 2306.10209)

Codecs are part of this pass since they round weights and gradients. "ddp"
gathers and scatters nothing, and its all-reduce is not encoded, so a codec
changes "ddp" to the partition "zero1". If each worker has only one
data-parallel rank, there is nothing to shard, and its partition becomes "ddp".

The loss is not predicted. Devices keep the order of the first pass, in which
the ranks of a worker are adjacent. Time and memory are predicted as in the
first pass; the savings of several changes add up if they have different causes.
"""

from collections.abc import Iterator, Sequence
import dataclasses

from parallel.base import checks
from parallel.plans.outer import cost as outer_cost
from parallel.plans.outer.cost import OuterLoopConfig
from parallel.plans.planner import outer, space
from parallel.plans.planner.device_state import parameters, partition
from parallel.plans.planner.latency import Latency, messages
from parallel.plans.planner.memory import PeakMemory
from parallel.plans.planner.plan import Candidate
from parallel.plans.planner.problem import Problem
from parallel.plans.planner.space import Choices, Configuration
from parallel.plans.workload import TrainingStep
from parallel.plans.zero import cost as zero_cost
from parallel.plans.zero.partition import CODECS


@dataclasses.dataclass(frozen=True)
class Changes:
  """Changes that the second pass tries on the first pass's best configurations.

  Attributes:
    best: Number of the first pass's best configurations that are changed; 0 for
      no second pass.
    p: Fractions, below 1, of channels that tensor ranks synchronise.
    outer: Outer loops, from `parallel.plans.outer.cost.ALGORITHMS`.
    sync_every: Steps per round of an outer loop.
    overlap: Steps from the send to the receipt of a Streaming DiLoCo fragment.
    outer_codec: Codec of Streaming DiLoCo, one of
      `parallel.plans.outer.cost.CODECS`; DiLoCo sends float32.
    zero_codecs: Codecs of weights and of gradients, as in "int8/int4", from
      `parallel.plans.zero.partition.CODECS`.

  Raises:
    ValueError: A value is unknown or out of range.
  """

  best: int = 3
  p: tuple[float, ...] = (0.5, 0.25)
  outer: tuple[str, ...] = outer_cost.ALGORITHMS
  sync_every: int = 30
  overlap: int = 1
  outer_codec: str = "e3m0"
  zero_codecs: tuple[str, ...] = ("int8/int4",)

  def __post_init__(self) -> None:
    checks.at_least("best", self.best, 0)
    for p in self.p:
      if not 0 <= p < 1:
        raise ValueError(f"p={p:g} must lie in [0, 1), 1 excluded")
    checks.known("outer_codec=", self.outer_codec, outer_cost.CODECS)
    for name in self.outer:
      checks.known("outer=", name, outer_cost.ALGORITHMS)
      self._outer_loop(name, 2)
    for text in self.zero_codecs:
      for name in _parse_codec_pair(text):
        checks.known(f"zero_codecs={text!r}: ", name, CODECS)

  def _outer_loop(
    self, algorithm: str, workers: int, layers: int = 0
  ) -> OuterLoopConfig:
    if algorithm == "diloco":
      return OuterLoopConfig(algorithm, workers, self.sync_every)
    # With more than two workers, each receives fewer bytes by "all_to_all" than
    # by "all_gather", at the cost of a second rounding.
    coded = self.outer_codec != "float32" and workers > 2
    return OuterLoopConfig(
      algorithm, workers, self.sync_every, self.outer_codec,
      "all_to_all" if coded else "all_gather", layers, self.overlap,
    )

  def of(
    self, c: Configuration, num_layers: int
  ) -> Iterator[tuple[str, list[Configuration] | str]]:
    """Yields each change of a configuration, with the results to choose from.

    Args:
      c: Configuration of the first pass.
      num_layers: Number of layers of the model.

    Yields:
      The kind of change ("p", "outer" or "codec"), and either the changed
      configurations, of which the fastest is used, or why there are none.
    """
    for p in self.p:
      yield "p", (
        [dataclasses.replace(c, p=p)] if c.tensor > 1
        else "tensor=1 rank shares no channels with others"
      )
    for name in self.outer:
      found = []
      # Tried numbers of workers: all divisors of the data-parallel ranks.
      for workers in range(2, c.data + 1):
        if c.data % workers:
          continue
        # A fragment has an equal number of layers of each part.
        parts = c.chunks * c.stages if c.stages > 1 else 1
        layers = outer_cost.min_fragment_layers(
          num_layers, parts, self.sync_every
        )
        found.append(dataclasses.replace(
          c, outer=self._outer_loop(name, workers, layers),
          # With one rank per worker there is nothing to shard.
          scheme=c.scheme if workers < c.data else "ddp",
        ))
      yield "outer", found or "data=1 rank makes no two workers"
    for text in self.zero_codecs:
      weights, gradients = _parse_codec_pair(text)
      coded = dataclasses.replace(
        c, weight_codec=weights, gradient_codec=gradients,
        # ddp has no gathers and scatters to encode.
        scheme="zero1" if c.scheme == "ddp" else c.scheme,
      )
      yield "codec", (
        [coded] if c.data > 1 else "data=1 rank gathers and scatters nothing"
      )


@dataclasses.dataclass(frozen=True)
class SentBytes:
  """Operand bytes that a device sends in a step, by axis.

  Attributes:
    tensor: All-reduces over tensor ranks in forwards and backwards.
    data: Gathers and scatters of a partition, or the gradients' all-reduce.
    worker: Exchanges between workers, averaged over a round.
  """

  tensor: float
  data: float
  worker: float


@dataclasses.dataclass(frozen=True, eq=False)
class LossyOption:
  """A changed configuration with its predictions.

  Attributes:
    base: Index of the unchanged configuration among the first pass's best.
    configuration: The changed configuration.
    memory: Bytes of a device, by cause.
    latency: Seconds of a step, by cause.
    sent: Bytes that a device sends in a step.
    base_sent: Bytes that a device sends without the change.
  """

  base: int
  configuration: Configuration
  memory: PeakMemory
  latency: Latency
  sent: SentBytes
  base_sent: SentBytes


@dataclasses.dataclass(frozen=True)
class LossyOptions:
  """Result of the second pass: faster configurations that change training.

  Attributes:
    rows: Changed configurations that are faster than before, fastest first.
    excluded: Constraint -> (number of excluded configurations, last reason).
  """

  rows: tuple[LossyOption, ...]
  excluded: dict[str, tuple[int, str]]


def search(
  best: Sequence[Candidate], problem: Problem, choices: Choices,
  changes: Changes,
) -> LossyOptions:
  """Finds faster configurations that train another model.

  Args:
    best: The first pass's best candidates, fastest first.
    problem: The training step on the cluster.
    choices: Choices of the first pass.
    changes: Changes to try.
  """
  rows: list[LossyOption] = []
  excluded: dict[str, tuple[int, str]] = {}
  for number, base in enumerate(best[: changes.best]):
    c = base.configuration
    for what, found in changes.of(c, problem.step.model.num_layers):
      # `found` is the reason for no configurations, or a list of them to price.
      reasons, priced = [(what, found)], []
      if not isinstance(found, str):
        both = [
          _evaluate_option(x, number, base, problem, choices) for x in found
        ]
        priced = [x for x in both if isinstance(x, LossyOption)]
        reasons = [x for x in both if not isinstance(x, LossyOption)]
      # Of equally fast configurations `min` returns the first, which has the
      # fewest workers and thus changes training least.
      row = min(priced, key=lambda x: x.latency.total, default=None)
      if row and row.latency.total >= base.latency.total:
        reasons.append(("no gain", _explain_no_gain(row, base)))
      elif row:
        rows.append(row)
      for name, reason in reasons:
        count = excluded.get(name, (0, ""))[0]
        excluded[name] = count + 1, reason
  rows.sort(key=lambda x: x.latency.total)
  return LossyOptions(tuple(rows), excluded)


def sent_bytes_by_axis(c: Configuration, step: TrainingStep) -> SentBytes:
  """Returns the operand bytes that a device sends in a step, by axis."""
  data = zero_cost.level_collectives(
    partition(c), parameters(c, step.model), accumulation=c.microbatches
  )
  # Pairs (bytes, number per microbatch).
  reductions = messages(c, step).reductions if c.tensor > 1 else ()
  return SentBytes(
    c.microbatches * sum(size * times for size, times in reductions),
    sum(x.operand_bytes for x in data),
    outer.sent_bytes(c, step.model),
  )


def _evaluate_option(
  c: Configuration, number: int, base: Candidate, problem: Problem,
  choices: Choices,
) -> LossyOption | tuple[str, str]:
  """Returns ``c`` with predictions, or (constraint, reason) if it is excluded.

  ``number`` is the index of the unchanged candidate ``base``.
  """
  refused = space.violated_constraint(c, problem.step, choices)
  if refused is not None:
    return refused[0], f"{c.learned()}: {refused[1]}"
  # As in the first pass, with the device order of the unchanged configuration.
  needs = problem.memory(c)
  over = needs.total - problem.memory_bytes
  if over > 0:
    return "memory", (
      f"{c} does not fit: it needs {needs.total / 1e9:.1f} GB, "
      f"{over / 1e9:.1f} GB more than a device has"
    )
  return LossyOption(
    number, c, needs, problem.predict(c, base.order),
    sent_bytes_by_axis(c, problem.step),
    sent_bytes_by_axis(base.configuration, problem.step),
  )


def _explain_no_gain(row: LossyOption, base: Candidate) -> str:
  return (
    f"{row.configuration} takes {row.latency.total:.4g} s, "
    f"{base.latency.total:.4g} s without {row.configuration.learned()}"
  )


def _parse_codec_pair(text: str) -> tuple[str, str]:
  """Parses "WEIGHTS/GRADIENTS" to the codecs of weights and of gradients."""
  weights, slash, gradients = text.partition("/")
  if not slash:
    raise ValueError(
      f"zero_codecs={text!r} must be the codec of weights and the codec of "
      "gradients, as in int8/int4"
    )
  return weights, gradients
