"""Ahead-of-time compilation and analysis of a training step for a target.

`analyse` returns plain data, which ``--json`` prints and report.py turns into
tables and a figure. `caatnet.inspection.decoding` compiles inference
steps.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax

from caatnet.inspection import partition, programs
from caatnet.inspection.programs import CompiledProgram
from caatnet.train.experiment import Experiment
from parallel.ledger import conformal, overlap
from parallel.ledger import fingerprint as fingerprints
from parallel.ledger.targets import Target
from parallel.outer.base import OuterLoop
from parallel.plans.axis_kinds import AXES
from parallel.plans.hardware.link_matrix import LinkMatrix
from parallel.plans.pipeline import simulate
from parallel.plans.pipeline.pipeline_schedule import PipelineSchedule

# Keys of the config that define the family of a calibration
# (`parallel.ledger.conformal`): model, sizes, and how the step is split.
_FAMILY_KEYS = (
  "model.name", "model.width", "model.ffn_width", "model.num_layers",
  "model.num_heads", "model.vocab_size", "model.dtype", "model.remat",
  "data.seq_len", "data.batch_size", *(f"parallel.{x.name}" for x in AXES),
  "sync.p", "sync.route", "zero.scheme",
  "pipeline.schedule", "outer.algorithm", "optimizer.name",
)


def analyse(
  experiment: Experiment,
  target: Target,
  compiler_options: Mapping[str, bool | str] | None = None,
  step: int = 0,
) -> dict[str, Any]:
  """Compiles a step that `launch.train` would run, and analyses the program.

  Args:
    experiment: Run, built on the target's devices.
    target: Machine to compile for.
    compiler_options: XLA options; None for those with which the step is run.
    step: Number of the step, since an outer loop has several programs.

  Returns:
    Plain data: fingerprint of the lowered program, memory, collectives,
    partition, overlap, roofline. All bytes and FLOPs are per device and step.
  """
  program, plan = experiment.program, experiment.outer.plan(step)
  if compiler_options is None:
    compiler_options = program.layout.compiler_options()
  made = programs.compile_for(
    target, program.layout.mesh, lambda: experiment.lower_step(plan),
    compiler_options,
  )
  state = experiment.update.on_device(experiment.abstract_state())
  result = made.facts | {
    "memory": made.memory({
      "parameters": state.params,
      "optimizer state": (state.opt_state, state.step),
      **({"outer loop's state": state.outer} if state.outer else {}),
      "batch": experiment.abstract_batch(),
    })
  }
  if program.layout.shards is not None:
    result["partition"] = partition.analyse(
      program, experiment.train.accumulation, made.asked, made.made
    )
  if target.hardware is not None:
    result |= analyse_schedule(experiment, made)
  return result


def lower(experiment: Experiment, step: int = 0) -> jax.stages.Lowered:
  """Lowers the program of a step, for instance to take its fingerprint."""
  plan = experiment.outer.plan(step)
  return fingerprints.lowered_without_locations(
    lambda: experiment.lower_step(plan)
  )


def programs_of_run(
  label: str, experiment: Experiment, step: int | None = None
) -> dict[str, Callable[..., dict[str, Any]]]:
  """Returns the programs of a run by name: functions of target and options.

  Args:
    label: Name of the run.
    experiment: The run.
    step: Step whose program is returned; None for one step of each program.
  """
  steps = [step]
  if step is None:
    steps = steps_of_programs(experiment.outer)
  return {
    label if len(steps) == 1 else f"{label}, step {s}": functools.partial(
      analyse, experiment, step=s
    )
    for s in steps
  }


def steps_of_programs(outer: OuterLoop) -> list[int]:
  """Returns the first step of each program of a period in the steady state."""
  first: dict[Any, int] = {}
  for step in outer.steady_round:
    # Steps with the same `variant` share a compiled program.
    first.setdefault(outer.plan(step).variant, step)
  return sorted(first.values())


def analyse_schedule(
  experiment: Experiment, made: CompiledProgram
) -> dict[str, Any]:
  """Returns the schedule, compute concurrent with collectives, and bounds.

  If prediction errors of other steps are known for the target's links, the
  result also has an interval of the step's time.

  Args:
    experiment: The run.
    made: A step, compiled for a target with rates.
  """
  program, target = experiment.program, made.target
  hardware, scheduled = target.hardware, made.schedule()
  cost, times = scheduled.total(), programs.timeline(scheduled.collectives())
  model_flops = experiment.flops_per_step / program.layout.mesh.size
  peak = hardware.peak(program.model.dtype)
  # XLA's text does not show the FLOPs of custom calls, such as flash attention.
  # So compute takes at least the model's own FLOPs at the peak rate.
  compute = max(cost.seconds, model_flops / peak)
  stages, waiting = program.layout.stages, {}
  if stages is not None and not target.shares_processors:
    waiting = {"waiting_seconds": _stage_waiting_s(
      stages.schedule, stages.axis.lanes, scheduled
    )}
  copies = programs.host_copies(scheduled)
  bounds = programs.step_time_bounds(
    compute + sum(waiting.values()), times["overlap"]
  )
  return (
    times
    | ({"host_copies": copies} if copies else {})
    | {
      "roofline": {
        "model_flops": model_flops, "product_flops": cost.flops,
        "memory_bytes": cost.bytes, "model_flops_seconds": model_flops / peak,
        "memory_seconds": cost.bytes / hardware.memory_bandwidth, **waiting,
        **bounds,
      },
      **(
        step_time_interval(
          bounds["step_as_scheduled"],
          target.links,
          calibration_features(
            experiment.config, target.name, program.layout.mesh.size
          ),
        )
        if target.links is not None and target.links.residuals
        else {}
      ),
      "constants": made.constants(program.model.dtype),
    }
  )


def calibration_features(
  config: Mapping[str, Any], target: str, devices: int
) -> dict[str, str | float]:
  """Returns the values of a run that `conformal.find_extrapolations` compares.

  Args:
    config: The run's config as plain data.
    target: Name of the target, as in "cpu:4".
    devices: Number of devices of the mesh.
  """
  found = {"target": target.partition(":")[0], "devices": devices}
  for key in _FAMILY_KEYS:
    section, _, name = key.partition(".")
    found[key] = config.get(section, {}).get(name, "none")
  if found["parallel.stage"] == 1:  # the schedule is not used
    found["pipeline.schedule"] = "none"
  return found


def step_time_interval(
  step_s: float, links: LinkMatrix, values: Mapping[str, str | float]
) -> dict[str, Any]:
  """Returns a step time's interval, and "outside", the values that widen it."""
  outside = conformal.find_extrapolations(links.family, values)
  wider = links.widening * len(outside) if outside else 0.0
  return {"outside": outside, "interval": conformal.interval(
    step_s, links.residuals, wider=wider
  )._asdict()}


def _stage_waiting_s(
  schedule: PipelineSchedule, lanes: int, program: overlap.ScheduledProgram
) -> float:
  """Returns the seconds for which a device waits for other stages' actions.

  The data that stages send in a tick are complete when the last stage has
  finished its action. So a tick takes as long as the longest action.

  Args:
    schedule: Pipeline schedule that the stages run.
    lanes: Number of stages per device.
    program: Compiled program, whose branches are the stages' actions.
  """
  seconds = {kind: cost.seconds for kind, cost in program.actions().items()}
  return simulate.lockstep_waiting_s(schedule, seconds, lanes)
