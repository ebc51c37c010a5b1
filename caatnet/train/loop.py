"""The training loop: runs an experiment from wherever its folder stands.

A run that was killed, stopped or finished is resumed by running it again. Its
metrics are then those of an uninterrupted run.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import json
import math
import pathlib
import signal
import time
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from caatnet.data.protocol import Dataset
from caatnet.train import membership, traffic
from caatnet.train.checkpoint import Checkpointer
from caatnet.train.evaluate import Evaluation, make_evaluate, put_batch
from caatnet.train.experiment import Experiment
from caatnet.train.progress import TrainProgress
from caatnet.train.records import (
  MetricsWriter,
  check_data,
  environment,
  write_config,
)
from caatnet.train.state import TrainState, check_equal_start
from caatnet.train.step import parameter_groups
from caatnet.train.throughput import matmul_rate
from caatnet.train.workers import WorkerMetrics


class NonFiniteError(ValueError):
  """Training diverged; the message names step, parameters and checkpoint."""


@dataclasses.dataclass(frozen=True)
class TrainResult:
  """How a run ended.

  Attributes:
    step: The number of updates made.
    finished: Whether all steps were made; False after a signal.
    evaluation: The evaluation on the validation data at the end; None if the
      run is not finished.
    measures: What the evaluation says about the data, by key, such as loss and
      accuracy; empty if the run is not finished.
    units_per_second: How many of the data's units, such as tokens, are read in
      a second: the median over this process's steps from the third on; 0 if it
      made fewer.
    communication: What one step sends, by axis and phase, as
      `caatnet.train.traffic` has it.
  """

  step: int
  finished: bool
  evaluation: Evaluation | None
  measures: dict[str, float]
  units_per_second: float
  communication: list[dict[str, Any]]


def train(
  experiment: Experiment,
  workdir: pathlib.Path,
  *,
  label: str = "train",
  profile: tuple[int, int] | None = None,
  quiet: bool = False,
) -> TrainResult:
  """Trains until ``config.train.num_steps``, resuming what is in the folder.

  Args:
    experiment: The run.
    workdir: The run's folder, which is made if it is missing.
    label: What the progress bar calls the run.
    profile: The first step of a profiler trace, and the step after its last.
    quiet: Whether nothing is printed.

  Returns:
    How the run ended.

  Raises:
    NonFiniteError: Loss or gradients are not finite.
    ValueError: The folder holds another run, or there are too few data.
  """
  run = _Run(experiment, workdir, label, profile, quiet)
  try:
    with _stop_signals() as stop:
      return run.loop(stop)
  finally:
    run.close()


class _Run:
  """The opened files, programs and state of one run."""

  def __init__(
    self,
    experiment: Experiment,
    workdir: pathlib.Path,
    label: str,
    profile: tuple[int, int] | None,
    quiet: bool,
  ) -> None:
    self.experiment, self.workdir = experiment, workdir
    self.profile, self.tracing = profile, False
    program = experiment.program
    dataset = experiment.data.load(experiment.seed)
    check_data(workdir, dataset.sha256)
    self.batches, self.validation = dataset.batches, dataset.validation
    # Written only now, since a run that cannot start must not claim the folder.
    workdir.mkdir(parents=True, exist_ok=True)
    self.checkpointer = Checkpointer(
      workdir, program, experiment.train.keep_checkpoints
    )
    self.joined = membership.check(experiment, self.checkpointer)
    write_config(workdir, experiment.config)
    self.state = self._restore_or_init()
    self.first_step = int(self.state.step)
    self.writer = MetricsWriter(workdir, self.first_step)
    self.rate = matmul_rate(program.layout.mesh, program.model.dtype)
    quiet = quiet or jax.process_index() > 0
    self.progress = TrainProgress(
      label, self.first_step, experiment.train.num_steps, quiet
    )
    self.evaluate = make_evaluate(program, experiment.data.batch_size)
    self.evaluated = experiment.make_evaluated()
    self.lowered = traffic.lower_steps(experiment)
    self.programs: dict[Any, jax.stages.Compiled] = {}
    self.communication = traffic.communication_per_step(
      experiment, self.lowered
    )
    self._write_environment(dataset)
    self.seconds: list[float] = []
    self.diverged: set[int] = set()  # workers that users know of

  def _restore_or_init(self) -> TrainState:
    if self.checkpointer.latest_step() is None:
      state = self.experiment.init_state()
      # A restored state is read from one checkpoint and needs no such check.
      if self.experiment.program.layout.worker.size > 1:
        check_equal_start(self.experiment.program, state.params)
      return state
    state, position = self.checkpointer.restore(
      self.experiment.abstract_state()
    )
    self.batches.set_state(position)
    return membership.state_of_all(
      self.experiment, state, self.checkpointer.num_workers()
    )

  def _write_environment(self, dataset: Dataset) -> None:
    """Writes environment.json, and prints the same facts."""
    program = self.experiment.program
    model, layout = program.model, program.layout
    facts = environment(layout.mesh) | {
      "data": {"name": dataset.name, "sha256": dataset.sha256},
      "parameters": model.num_params,
      "matmul_flops_per_second": self.rate,
      "communication_per_step": self.communication,
    }
    if jax.process_index() == 0:
      path = self.workdir / "environment.json"
      path.write_text(json.dumps(facts, indent=2) + "\n")
    say = self.progress.say
    say(f"data      {dataset.name}  sha256 {dataset.sha256[:16]}")
    say(
      f"axes      {';  '.join(map(str, layout.axes))};  "
      f"{facts['devices']} devices"
    )
    if layout.partition.optimizer:
      say(f"zero      {layout.partition}")
    say(
      f"model     {model.num_params / 1e6:.2f}M parameters, "
      f"{model.dtype};  matrix rate {self.rate / 1e9:.0f} GFLOP/s"
    )
    for row in self.communication:
      unit, scale = ("MB", 1e6) if row["bytes"] >= 1e5 else ("kB", 1e3)
      say(
        f"sends     {row['axis']} axis, {row['phase']}: "
        f"{row['bytes'] / scale:.3f} {unit} per device and step "
        f"({row['dtype']})"
      )
    saving = traffic.saving(program, self.communication)
    if saving:
      say(saving)
    if self.first_step:
      say(f"resumed   from step {self.first_step}")
    if self.joined:
      say(f"workers   {self.joined}")

  def loop(self, stop: "_Stop") -> TrainResult:
    """Trains until all steps are made or a signal asks to stop."""
    options = self.experiment.train
    evaluation = None
    pending: tuple[int, Any] | None = None
    started = time.perf_counter()
    step = self.first_step
    while step < options.num_steps and not stop.requested():
      self._profile(step)
      batch = put_batch(self.experiment.program.layout, next(self.batches))
      self.state, metrics = self._step(step, batch)
      step += 1
      # Steps are dispatched without waiting for them. The metrics of the step
      # before are read while this one runs: devices stay busy, and the host is
      # at most one step ahead of them.
      self._record(pending)
      pending = (step, metrics)
      evaluates = step % options.eval_every == 0 or step == options.num_steps
      saves = step % options.checkpoint_every == 0
      if evaluates or saves:  # a diverged step is neither evaluated nor saved
        self._record(pending)
        pending = None
      self.seconds.append(time.perf_counter() - started)
      if evaluates:
        evaluation = self._evaluate(step)
      if saves or step == options.num_steps:
        self._save()
      # Evaluations and checkpoints are not part of a step's time.
      started = time.perf_counter()
    self._record(pending)
    self._profile(None)
    finished = step >= options.num_steps
    if not finished:
      self._save()
      self.checkpointer.wait()
      self.progress.say(
        f"stopped at step {step}; saved, the same command resumes"
      )
    elif evaluation is None:  # the run was finished before this process began
      evaluation = self._validation()
    measures = self.experiment.data.measures
    return TrainResult(
      step=step,
      finished=finished,
      evaluation=evaluation if finished else None,
      measures=measures(evaluation.means) if finished else {},
      units_per_second=self._units_per_second(),
      communication=self.communication,
    )

  def _step(self, step: int, batch: Any) -> tuple[TrainState, Any]:
    """Runs the program that the outer loop's plan for the step asks for."""
    plan = self.experiment.outer.plan(step)
    if plan.variant not in self.programs:
      # Popped, so that a lowered program is freed once it is compiled.
      lowered = self.lowered.pop(plan.variant, None)
      lowered = lowered or self.experiment.lower_step(plan)
      self.programs[plan.variant] = lowered.compile()
    numbers = jax.tree.map(np.int32, plan.numbers)
    return self.programs[plan.variant](self.state, batch, numbers)

  def _record(self, pending: tuple[int, Any] | None) -> None:
    """Reads and shows the metrics of a step, and writes them when it is due."""
    if pending is None:
      return
    step, metrics = pending
    # Each metric is [workers]; workers do not meet for it on the devices.
    workers = WorkerMetrics(_on_host(metrics))
    values = workers.means
    if not all(map(math.isfinite, values.values())):
      self._stop_non_finite(step, values, workers.names())
    for notice in workers.notices(step, self.diverged):
      self.progress.say(notice)
    data = self.experiment.data
    speed = self._units_per_second()
    self.progress.update(step, values["loss"], speed, data.unit)
    if step % self.experiment.train.log_every == 0:
      rate = self.experiment.learning_rate(step - 1)  # of update number `step`
      flops = self.experiment.flops_per_step / self.experiment.units_per_step
      values["learning_rate"] = float(rate)
      values[f"{data.unit}_per_second"] = speed
      values["model_flops_per_second"] = speed * flops
      values["fraction_of_matmul_rate"] = speed * flops / self.rate
      self.writer.write(step, values | workers.of_workers)

  def _stop_non_finite(
    self, step: int, values: dict[str, float], names: str
  ) -> None:
    """Raises `NonFiniteError`."""
    groups = [
      group
      for group in parameter_groups(self.state.params)
      if not math.isfinite(values[f"grad_norm/{group}"])
    ]
    self.checkpointer.wait()
    last = self.checkpointer.path(self.checkpointer.latest_step())
    raise NonFiniteError(
      f"step {step}: loss {values['loss']}, gradient norm "
      f"{values['grad_norm']}{names}; non-finite gradients in "
      f"{', '.join(groups) or 'no group'}; last good checkpoint: {last}"
    )

  def _evaluate(self, step: int) -> Evaluation:
    evaluation = self._validation()
    measures = self.experiment.data.measures(evaluation.means)
    self.writer.write(
      step, {f"validation_{key}": value for key, value in measures.items()}
    )
    return evaluation

  def _validation(self) -> Evaluation:
    params = self.evaluated(self.state.params, self.state.outer)
    return self.evaluate(params, self.validation)

  def _save(self) -> None:
    self.checkpointer.save(self.state, self.batches.get_state())

  def _units_per_second(self) -> float:
    # The first ones compile, and fill the queue of dispatched steps.
    steady = self.seconds[2:]
    if not steady:
      return 0.0
    return self.experiment.units_per_step / float(np.median(steady))

  def _profile(self, step: int | None) -> None:
    """Starts and stops the profiler's trace when it is due.

    Args:
      step: The step that is about to run; None at the end of the loop.
    """
    if self.profile is None:
      return
    first, last = self.profile
    if step is not None and step == max(first, self.first_step):
      jax.profiler.start_trace(
        str(self.workdir / "profile"), create_perfetto_trace=True
      )
      self.tracing = True
    elif self.tracing and (step is None or step >= last):
      jax.block_until_ready(self.state.step)
      jax.profiler.stop_trace()
      self.tracing = False
      self.progress.say(f"trace     {self.workdir / 'profile'}")

  def close(self) -> None:
    """Closes the files; waits for a checkpoint that is being written."""
    self.progress.close()
    self.checkpointer.close()
    self.writer.close()


def _on_host(metrics: Any) -> dict[str, np.ndarray]:
  """Reads metrics ``[workers]``, whichever processes the workers are on."""
  if all(x.is_fully_addressable for x in metrics.values()):
    return jax.device_get(metrics)
  return multihost_utils.process_allgather(metrics, tiled=True)


class _Stop:
  """Knows whether a signal asked any process to stop."""

  def __init__(self) -> None:
    self.signalled = False

  def requested(self) -> bool:
    """Returns whether to stop, the same on all processes.

    Processes that stopped at different steps would wait for each other in a
    collective.
    """
    if jax.process_count() == 1:
      return self.signalled
    flags = multihost_utils.process_allgather(np.asarray(self.signalled))
    return bool(np.any(flags))


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Stop]:
  """Lets SIGTERM and Ctrl-C finish the step and save; a second one kills."""
  stop = _Stop()

  def on_signal(number, frame):
    # The default handler from now on: a second signal kills.
    stop.signalled = True
    signal.signal(number, signal.SIG_DFL)

  try:
    previous = {
      number: signal.signal(number, on_signal)
      for number in (signal.SIGTERM, signal.SIGINT)
    }
  except ValueError:  # not the main thread, e.g. in a notebook's kernel
    previous = {}
  try:
    yield stop
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)
