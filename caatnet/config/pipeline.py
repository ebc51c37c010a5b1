"""Builds ``config.pipeline``: what the stages of a model run, and when."""

import dataclasses

from caatnet.checks import one_of
from caatnet.stages import Stages
from parallel.axes import Axis
from parallel.pipeline import builders

VOCABULARY = ("sharded", "replicated")
KEPT = ("inputs", "residuals")


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
  """The section's keys, which ``configs/sections.py`` explains."""

  timetable: str
  chunks: int
  vocabulary: str
  keep: str

  def stages(self, axis: Axis, microbatches: int, num_layers: int) -> Stages:
    """Builds the stages.

    Args:
      axis: The stages.
      microbatches: Microbatches of a step.
      num_layers: The layers of the model.

    Raises:
      ValueError: The timetable is unknown or does not take these numbers, or
        there are too few layers.
    """
    one_of("vocabulary", self.vocabulary, VOCABULARY)
    one_of("keep", self.keep, KEPT)
    if self.timetable == "forward":
      raise ValueError('timetable="forward" trains nothing')
    timetable = builders.build(
      self.timetable, axis.size, microbatches, self.chunks
    )
    if timetable.num_parts > num_layers:
      raise ValueError(
        f"chunks={self.chunks} x config.parallel.stage={axis.size} are more "
        f"parts than the model has layers, {num_layers}"
      )
    return Stages(
      axis, timetable, builders.build("forward", axis.size, 1, self.chunks),
      self.keep == "residuals",
    )
