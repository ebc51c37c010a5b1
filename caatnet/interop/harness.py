"""Evaluation by EleutherAI's lm-evaluation-harness (the extra ``eval``)."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import difflib
import importlib.util
import logging
import os
import pathlib
import sys
from typing import Any, NamedTuple

from caatnet.interop.responses import Responder

# Bootstrap resamples for the standard error of metrics without a formula.
_RESAMPLES = 1000


class TaskMetric(NamedTuple):
  """Value of one metric on one task.

  Attributes:
    task: Task or group of tasks.
    version: Version of the task.
    num_shots: Number of examples before each document.
    num_documents: Number of evaluated documents.
    metric: Name of the metric.
    filter: Name of the harness's postprocessing of the responses.
    value: Value of the metric.
    stderr: Standard error; None if the harness reports none.
  """

  task: str
  version: str
  num_shots: int
  num_documents: int
  metric: str
  filter: str
  value: float
  stderr: float | None


def check(tasks: Sequence[str], limit: float | None) -> None:
  """Checks the arguments of `evaluate` before a model is read.

  Args:
    tasks: Tasks, as in `evaluate`.
    limit: Limit of documents, as in `evaluate`.

  Raises:
    FileNotFoundError: A .yaml file is missing.
    ValueError: The harness is not installed (the message contains the command
      to install it), a task has no name, or the limit leaves no document.
  """
  if "" in tasks:
    raise ValueError(f"--tasks={','.join(tasks)} has an empty name")
  for file in _files(tasks):
    if not os.path.isfile(file):
      raise FileNotFoundError(f"--tasks={file}: no such file")
  if limit is not None and not limit > 0:
    raise ValueError(f"--limit={limit} must be above 0")
  if importlib.util.find_spec("lm_eval") is None:
    raise ValueError(
      '--tasks needs lm-evaluation-harness: pip install "caatnet[eval]"'
    )


def evaluate(
  responder: Responder, tasks: Sequence[str], limit: float | None = None
) -> dict[str, Any]:
  """Evaluates a model on tasks of the harness.

  Args:
    responder: Computes the responses.
    tasks: Names of tasks or groups of the harness, or paths of .yaml files. If
      all are paths, these files cannot refer to tasks of the harness, since it
      would read 14,000 files to find them.
    limit: Number of documents per task, or a fraction of them below 1; None for
      all.

  Returns:
    Plain data: "context" and "num_cut" as in `Responder`; "metrics", the fields
    of each `TaskMetric`.

  Raises:
    FileNotFoundError: A .yaml file is missing.
    ValueError: The harness is not installed or does not have the task, a task
      or its data cannot be loaded, or the limit leaves no document.
  """
  check(tasks, limit)
  with contextlib.redirect_stdout(sys.stderr):  # the harness prints progress
    import lm_eval
    from lm_eval.api.model import LM

    class Answering(LM):
      """Adapter from `Responder` to the base class of the harness."""

      loglikelihood = staticmethod(responder.loglikelihood)
      loglikelihood_rolling = staticmethod(responder.loglikelihood_rolling)
      generate_until = staticmethod(responder.generate_until)

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager, loaded = _load(tasks)
    # The harness would fork processes for resampling, which deadlocks with
    # the threads of jax.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    results = lm_eval.simple_evaluate(
      Answering(), tasks=loaded, limit=limit, task_manager=manager,
      log_samples=False, bootstrap_iters=_RESAMPLES,
    )
  return {
    "context": responder.context,
    "num_cut": responder.num_cut,
    "metrics": [metric._asdict() for metric in _metrics(results)],
  }


def _load(tasks: Sequence[str]) -> tuple[Any, list[Any]]:
  """Loads tasks, groups of tasks, and their data.

  Returns:
    The harness's task manager, and the tasks and groups.
  """
  from lm_eval.tasks import TaskManager

  files = _files(tasks)
  # The harness interprets a path as a task (0.4.13). It finds a group only by
  # name, in the directories of `include_path`.
  groups = {file: name for file in files if (name := _read_group_name(file))}
  manager = TaskManager(
    include_path=sorted({os.path.dirname(file) for file in groups}),
    include_defaults=len(files) < len(tasks),
  )
  known = manager.all_tasks
  for task in tasks:
    if task not in (*files, *known):
      near = difflib.get_close_matches(task, known, 1)
      hint = f"; did you mean {near[0]}?" if near else ""
      raise ValueError(
        f"--tasks={task}: not a task of lm-evaluation-harness{hint}"
      )
  try:
    loaded = manager.load([groups.get(task, task) for task in tasks])
  except Exception as error:  # any error of a file or of the network
    raise ValueError(
      f"--tasks={','.join(tasks)}: {type(error).__name__}: {error}"
    ) from error
  found = loaded["groups"] | loaded["tasks"]
  # Tasks inside a loaded group are evaluated with the group.
  inside = {name for names in loaded["group_map"].values() for name in names}
  return manager, [x for name, x in found.items() if name not in inside]


def _files(tasks: Sequence[str]) -> list[str]:
  """Returns the tasks that are paths of files."""
  return [task for task in tasks if task.endswith(".yaml")]


def _read_group_name(file: str) -> str | None:
  """Returns the name of the group that a file defines; None for a task."""
  import yaml  # a dependency of the harness

  try:
    said = yaml.safe_load(pathlib.Path(file).read_text())
  except yaml.YAMLError:  # custom tags of the harness, such as !function
    return None
  return said.get("group") if isinstance(said, dict) else None


def _metrics(results: Mapping[str, Any]) -> Iterator[TaskMetric]:
  """Yields the metrics in the harness's result.

  The keys of metrics are "metric,filter" and "metric_stderr,filter"; other keys
  are ignored.
  """
  # Groups have aggregated metrics.
  found = results["results"] | results.get("groups", {})
  for task, values in found.items():
    for key, value in values.items():
      metric, comma, kind = key.partition(",")
      if not comma or metric.endswith("_stderr"):
        continue
      stderr = values.get(f"{metric}_stderr,{kind}")
      yield TaskMetric(
        task=task,
        version=str(results["versions"].get(task, "")),
        num_shots=results["n-shot"].get(task, 0),
        num_documents=results["n-samples"].get(task, {}).get("effective", 0),
        metric=metric,
        filter=kind,
        value=value,
        stderr=stderr if isinstance(stderr, float) else None,
      )
