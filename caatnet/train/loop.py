"""Training loop: starts or resumes the run of a folder.

A run that was killed, stopped or finished is resumed by the same call. Its
metrics equal those of an uninterrupted run.
"""

import collections
from collections.abc import Callable
import contextlib
import dataclasses
import math
import os
import re
import signal
import time
from typing import Any

import jax
import numpy as np

from caatnet.train import fits, tokenizer, traffic
from caatnet.train.checkpoint import start
from caatnet.train.checkpoint.save import Checkpointer
from caatnet.train.elastic import membership
from caatnet.train.evaluate import Evaluation, make_evaluate
from caatnet.train.experiment import Experiment
from caatnet.train.metrics import MetricsQueue
from caatnet.train.norms import parameter_names
from caatnet.train.prefetch import PrefetchIterator
from caatnet.train.progress import TrainProgress
from caatnet.train.records import (
  MetricsWriter,
  check_data,
  environment,
  read_environment,
  write_config,
  write_json,
)
from caatnet.train.state import (
  TrainState,
  check_equal_start,
  make_count_non_finite,
)
from caatnet.train.stop import Stop, stop_signals
from caatnet.train.summary import summary
from caatnet.train.throughput import matmul_rate
from caatnet.train.workers import WorkerMetrics
from parallel.base import files

# Number of last steps whose median time gives the throughput.
_THROUGHPUT_WINDOW = 50


class NonFiniteError(ValueError):
  """Raised if training diverges; names step, parameters, good checkpoint."""


class LostProcessError(ValueError):
  """Raised if another process of this run has ended or is unreachable."""


@dataclasses.dataclass(frozen=True)
class TrainResult:
  """Result of a run.

  Attributes:
    step: The number of updates made.
    finished: Whether all steps were made; False after a signal.
    evaluation: The evaluation on the validation data at the end; None if the
      run is not finished.
    measures: Measures of the evaluation by key, such as loss and accuracy;
      empty if the run is not finished.
    units_per_second: Throughput in units of the data, such as tokens per
      second: the median over this process's last 50 steps, except its first
      two; None if it made at most two steps.
    communication: Communication per step by axis and phase, rows of
      `caatnet.train.traffic.communication_per_step`.
    exit_code: 128 + signal number if a signal has stopped the run; 143, as for
      SIGTERM, if another process has received the signal; else 0.
    profiled: Programs that ran during the profiler's trace, by `Plan.variant`.
  """

  step: int
  finished: bool
  evaluation: Evaluation | None
  measures: dict[str, float]
  units_per_second: float | None
  communication: list[dict[str, Any]]
  exit_code: int = 0
  profiled: dict[Any, jax.stages.Compiled] = dataclasses.field(
    default_factory=dict
  )


def train(
  experiment: Experiment,
  workdir: str | os.PathLike[str],
  *,
  label: str = "train",
  profile: tuple[int, int] | None = None,
  quiet: bool = False,
  make: "Callable[..., Run] | None" = None,
) -> TrainResult:
  """Trains until ``config.train.num_steps``, from the folder's last checkpoint.

  Args:
    experiment: The run.
    workdir: The run's folder, which is created if it is missing.
    label: Name of the run in the progress bar.
    profile: The first step of a profiler trace, and the step after its last.
    quiet: Whether nothing is printed.
    make: Constructor of the run, ``(experiment, workdir, label, profile, quiet)
      -> Run``; None for `Run`.

  Returns:
    The result of the run.

  Raises:
    NonFiniteError: If loss, gradients or parameters are not finite.
    LostProcessError: If another process of this run has ended.
    ValueError: If the folder holds another run, is in use, or cannot be
      written; or if there are too few data.
  """
  try:
    run = (make or Run)(experiment, workdir, label, profile, quiet)
    with contextlib.closing(run), stop_signals() as stop:
      try:
        return run.loop(stop)
      except (jax.errors.JaxRuntimeError, ValueError) as error:
        if _is_lost_process(error):
          # Closing the files would block on collectives with other processes.
          run.opened.pop_all()
        raise
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    if str(error).startswith("RESOURCE_EXHAUSTED"):
      raise ValueError(
        f"a step does not fit into memory ({str(error).splitlines()[0]}): use "
        "a smaller config.model or config.data.batch_size, config.model.remat, "
        "or more devices"
      ) from error
    if not _is_lost_process(error):
      raise
    raise LostProcessError(
      f"another process was lost ({str(error).splitlines()[0][:99]}); the same "
      "commands on all of them resume the run"
    ) from error
  except OSError as error:
    if error.errno is None:  # raised by this project, not by the system
      raise
    raise ValueError(f"--workdir={workdir}: {error}") from error


def _is_lost_process(error: Exception) -> bool:
  """Returns whether jax failed on a connection to another process."""
  states = "UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED"
  state = re.match(f"({states}|FAILED_PRECONDITION): ", str(error))
  return jax.process_count() > 1 and state is not None


class Run:
  """Owner of one run's open files, compiled programs and training state."""

  def __init__(
    self,
    experiment: Experiment,
    workdir: str | os.PathLike[str],
    label: str,
    profile: tuple[int, int] | None,
    quiet: bool,
  ) -> None:
    self.experiment, self.workdir = experiment, files.parse_folder(workdir)
    self.profile, self.tracing = profile, False
    self.profiled: dict[Any, jax.stages.Compiled] = {}
    if profile is not None and files.is_cloud(self.workdir):
      raise ValueError("--profile needs a --workdir on this machine")
    dataset = experiment.data.load(experiment.seed)
    check_data(self.workdir, dataset.sha256)
    tokenizer.check(self.workdir, dataset.tokenizer)
    start.check(experiment, self.workdir, dataset.tokenizer)
    fits.check(experiment)
    self.dataset = dataset
    self.update = experiment.update.open(
      experiment.program, experiment.learning_rate
    )
    # Created after all checks: a run that cannot start leaves no folder.
    self.workdir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as opened:
      opened.enter_context(files.lock(self.workdir, jax.process_index()))
      self._open(label, quiet or jax.process_index() > 0, opened)
      self.opened = opened.pop_all()

  def _open(
    self,
    label: str,
    quiet: bool,
    opened: contextlib.ExitStack,
  ) -> None:
    """Opens the run's files, restores its state and lowers its programs."""
    experiment, program = self.experiment, self.experiment.program
    tokenizer.copy_to_run(self.workdir, self.dataset.tokenizer)
    notice = write_config(self.workdir, experiment.config)
    self.checkpointer = Checkpointer(
      self.workdir, program, experiment.train.keep_checkpoints
    )
    opened.callback(self.checkpointer.close)
    self.joined = membership.check(experiment, self.checkpointer)
    self.started_from = read_environment(self.workdir).get("started_from")
    self.batches = PrefetchIterator(
      program.layout, self.dataset.batches, self.dataset.ahead
    )
    opened.callback(self.batches.close)
    self.state = self.update.load(self._restore_or_init())
    self.first_step = int(self.state.step)
    self.writer = MetricsWriter(self.workdir, self.first_step)
    opened.callback(self.writer.close)
    self.rate = matmul_rate(program.layout.mesh, program.model.dtype)
    self.progress = TrainProgress(
      label, self.first_step, experiment.train.num_steps, quiet
    )
    opened.callback(self.progress.close)
    self.evaluate = make_evaluate(program, experiment.data.batch_size)
    self.export = experiment.make_export_params()
    self.count_non_finite = make_count_non_finite(program)
    self.lowered = traffic.lower_steps(experiment)
    self.programs: dict[Any, jax.stages.Compiled] = {}
    self.communication = traffic.communication_per_step(
      experiment, self.lowered, strict=False
    )
    self._write_environment()
    if notice:
      self.progress.say(f"longer    {notice}")
    self.metrics = MetricsQueue()
    self.seconds = collections.deque[float](maxlen=_THROUGHPUT_WINDOW)
    self.leaves_out = bool(experiment.outer.metrics(self.state.outer))
    self.diverged: set[int] = set()  # workers that have been reported

  def _restore_or_init(self) -> TrainState:
    """Returns the state of the last checkpoint, or an initial one."""
    if self.checkpointer.latest_step() is None:
      if self.experiment.train.init_from:
        state, self.started_from = start.start_state(self.experiment)
        return state
      state = self.experiment.init_state()
      # A restored state needs no such check: all workers read one checkpoint.
      if self.experiment.program.layout.worker.size > 1:
        check_equal_start(self.experiment.program, state.params)
      return state
    state, position = self.checkpointer.restore(
      self.experiment.abstract_state()
    )
    self.batches.set_state(position)
    return membership.init_new_states(
      self.experiment, state, self.checkpointer.num_workers()
    )

  def _write_environment(self) -> None:
    """Writes environment.json, and prints the same facts."""
    program, dataset = self.experiment.program, self.dataset
    model, layout = program.model, program.layout
    facts = environment(layout.mesh) | {
      "data": {"name": dataset.name, "sha256": dataset.sha256},
      "parameters": model.num_params,
      "matmul_flops_per_second": self.rate,
      "communication_per_step": self.communication,
    }
    if unknown := traffic.uncounted_operations(self.experiment, self.lowered):
      facts["communication_unknown"] = unknown
    if self.started_from:
      facts["started_from"] = self.started_from
    if jax.process_index() == 0:
      write_json(self.workdir / "environment.json", facts)
    say = self.progress.say
    for line in summary(self.experiment, dataset, facts):
      say(line)
    saving = traffic.format_saving(program, self.communication)
    if saving:
      say(saving)
    if self.started_from:
      say(
        f"starts    from {self.started_from['folder']}, step "
        f"{self.started_from['step']}"
      )
    if self.first_step:
      say(f"resumed   from step {self.first_step}")
    if self.joined:
      say(f"workers   {self.joined}")

  def loop(self, stop: Stop) -> TrainResult:
    """Trains until all steps are made or a stop is requested by a signal."""
    options = self.experiment.train
    evaluation = None
    step = self.first_step
    if not step and options.init_from:
      self._evaluate(step)  # loss of the given parameters before training
    self.started = time.perf_counter()
    while step < options.num_steps and not stop.requested():
      self._profile(step)
      step, metrics = self._advance(step)
      # Steps are dispatched asynchronously. The metrics of the previous step
      # are read while this one runs: devices stay busy, and the host is at most
      # one step ahead of them.
      self._record()
      evaluates = step % options.eval_every == 0 or step == options.num_steps
      saves = step % options.checkpoint_every == 0
      logs = step % options.log_every == 0
      if metrics is not None:
        self.metrics.add(step, metrics, logs or evaluates or saves)
      if evaluates or saves:  # a diverged step is neither evaluated nor saved
        self._record()
      if evaluates:
        evaluation = self._evaluate(step)
      if saves or step == options.num_steps:
        self._save()
      if evaluates or saves:  # neither is part of a step's time
        self.started = time.perf_counter()
    self._record()
    self._profile(None)
    finished = step >= options.num_steps
    if not finished:
      self._save(last=True)
      self.checkpointer.wait()
      step = int(self.state.step)
      self.progress.say(
        f"stopped at step {step}; saved, the same command resumes"
      )
    elif evaluation is None:  # the run was finished before this process began
      evaluation = self._validation()
    return TrainResult(
      step=step,
      finished=finished,
      evaluation=evaluation if finished else None,
      measures=self.dataset.measures(evaluation.means) if finished else {},
      units_per_second=self._units_per_second(),
      communication=self.communication,
      exit_code=0 if finished else stop.exit_code or 128 + signal.SIGTERM,
      profiled=self.profiled,
    )

  def _advance(self, step: int) -> tuple[int, Any]:
    """Dispatches a step; returns the next step's number, and metrics."""
    batch = next(self.batches)
    plan = self.experiment.outer.plan(step)
    if plan.variant not in self.programs:
      # Popped, so that a lowered program is freed once it is compiled.
      lowered = self.lowered.pop(plan.variant, None)
      lowered = lowered or self.experiment.lower_step(plan)
      self.programs[plan.variant] = lowered.compile(
        self.experiment.program.layout.compiler_options()
      )
    if self.tracing:
      self.profiled[plan.variant] = self.programs[plan.variant]
    numbers = jax.tree.map(np.int32, plan.numbers)
    self.state, metrics = self.update.run(
      self.programs[plan.variant], self.state, batch, numbers
    )
    return step + 1, metrics

  def _record(self) -> None:
    """Shows, writes and checks all metrics that have reached the host."""
    found = self.metrics.take()
    if not found:
      return
    now = time.perf_counter()
    for step, _ in found:
      # The first two steps compile and fill the queue of dispatched steps.
      if step > self.first_step + 2:
        self.seconds.append((now - self.started) / len(found))
    self.started = now
    for step, metrics in found:  # each is [workers]
      self._record_step(step, WorkerMetrics(metrics))

  def _record_step(self, step: int, workers: WorkerMetrics) -> None:
    """Shows a step's metrics, and writes them every ``log_every`` steps.

    Raises:
      NonFiniteError: If a metric's mean over participating workers is not
        finite.
    """
    values, program = workers.means, self.experiment.program
    if not all(map(math.isfinite, values.values())):
      groups = [
        group
        for group in parameter_names(program.trained_shapes)
        if not math.isfinite(values[f"grad_norm/{group}"])
      ]
      # The parameters after step - 1 gave this step's non-finite metrics, so
      # the last good ones are those after step - 2.
      raise self._non_finite_error(
        f"step {step}: loss {values['loss']}, gradient norm "
        f"{values['grad_norm']}{workers.names()}; non-finite gradients in "
        f"{', '.join(groups) or 'no group'}", step - 2,
      )
    for notice in workers.notices(step, self.diverged):
      self.progress.say(notice)
    data = self.experiment.data
    speed = self._units_per_second()
    self.progress.update(step, values["loss"], speed, data.unit)
    if step % self.experiment.train.log_every == 0:
      rate = self.experiment.learning_rate(step - 1)  # of update number `step`
      flops = self.experiment.flops_per_step / self.experiment.units_per_step
      values["learning_rate"] = float(rate)
      if speed is not None:
        values[f"{data.unit}_per_second"] = speed
        values["model_flops_per_second"] = speed * flops
        values["fraction_of_matmul_rate"] = speed * flops / self.rate
      self.writer.write(step, values | workers.of_workers)

  def _non_finite_error(self, what: str, last_good: int) -> NonFiniteError:
    """Returns the error about ``what``, with good and diverged checkpoints.

    Checkpoints of steps after ``last_good`` count as diverged.
    """
    self.checkpointer.wait()
    steps = self.checkpointer.steps()
    good = max((s for s in steps if s <= last_good), default=None)
    bad = [self.checkpointer.path(s) for s in steps if s > last_good]
    return NonFiniteError(
      f"{what}; last good checkpoint: {self.checkpointer.path(good)}"
      + (f"; diverged, to be removed: {', '.join(bad)}" if bad else "")
    )

  def _evaluate(self, step: int) -> Evaluation:
    """Evaluates and records the measures; raises if the loss is not finite."""
    evaluation = self._validation()
    measures = self.dataset.measures(evaluation.means)
    if not math.isfinite(evaluation.loss):
      raise self._non_finite_error(
        f"step {step}: validation loss {evaluation.loss}", step - 1
      )
    self.writer.write(
      step, {f"validation_{key}": value for key, value in measures.items()}
    )
    return evaluation

  def _validation(self) -> Evaluation:
    params = self.export(self.state.params, self.state.outer)
    return self.evaluate(params, self.dataset.validation)

  def _save(self, last: bool = False) -> None:
    """Saves a checkpoint, unless parameters are not finite.

    Args:
      last: Whether the run was stopped by a signal; read by subclasses.
    """
    step = int(self.state.step)
    counts = self.count_non_finite(self.state.params)
    of_workers = sum(counts.values())
    # If the outer loop masks diverged workers, one finite worker is sufficient.
    if of_workers.all() if self.leaves_out else of_workers.any():
      bad = [name for name, count in counts.items() if count.any()]
      raise self._non_finite_error(
        f"step {step}: non-finite parameters in {', '.join(bad)}", step - 1
      )
    self.writer.flush()  # records of earlier steps precede the checkpoint
    self.checkpointer.save(
      self.update.whole(self.state), self.batches.get_state()
    )

  def _units_per_second(self) -> float | None:
    if not self.seconds:
      return None
    return self.experiment.units_per_step / float(np.median(self.seconds))

  def _profile(self, step: int | None) -> None:
    """Starts or stops the profiler's trace if this is due before ``step``.

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
    """Waits for a checkpoint that is being written, and closes all files."""
    self.opened.close()
