"""Measured step times, compared with predictions by calibrated rates.

The prediction is that of `launch.compile`: the roofline of each instruction of
the compiled step, and its collectives on the links, with the rates of
`parallel.ledger.calibration`. `parallel.ledger.conformal` gives the prediction
intervals, and the family of programs for which they hold. The measured time is
the mean over the steps of a round of the outer loop.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import json
import math
import pathlib
import tempfile
import time
from typing import Any

import jax
import numpy as np

from caatnet.benchmarks.harness import setup, timing
from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.inspection import programs, study
from caatnet.inspection.programs import CompiledProgram
from caatnet.show import tables
from caatnet.train.evaluate import put_batch
from caatnet.train.experiment import Experiment
from parallel.base import available, files
from parallel.base.kept import ResultCache
from parallel.ledger import calibration, conformal, profiles, reading, targets
from parallel.ledger.calibration import ProgramProfile
from parallel.ledger.targets import Target
from parallel.plans import axis_kinds
from parallel.plans.hardware import cluster_files

_AXES = tuple(kind.name for kind in axis_kinds.AXES)
# Rounds in a profiler trace.
_PROFILED_ROUNDS = 4
# Maximum number of draws until a configuration is valid.
_DRAWS = 200


def run(config: Any) -> dict[str, Any]:
  """Measures configurations that the results file lacks, and prints tables.

  Returns the rows of all configurations.

  Args:
    config: Config like configs/benchmark/calibration.py.

  Raises:
    ValueError: There are too few devices, or config.benchmark.results is
      not a file of results.
  """
  options = config.benchmark
  if len(jax.devices()) < options.devices:
    raise ValueError(
      f"config.benchmark.devices={options.devices} needs as many CPU devices: "
      f"pass --cpu_devices={options.devices}"
    )
  target = targets.resolve(f"cpu:{options.devices}")
  kept, text = ResultCache(
    options.results, "config.benchmark.results"
  ), _relevant_config_json(config)
  fitted = kept.get([text], lambda: _calibrate_rates(config, target))
  links = cluster_files.from_json(fitted["cluster"])
  measured = targets.with_measured_links(target, links)
  count = options.held_out + options.tested
  rows = [
    kept.get(
      [text, index], lambda i=index: _measure_configuration(config, measured, i)
    )
    for index in timing.progress(range(count), "configurations")
  ]
  result = evaluate_predictions(rows, options.held_out, features(config, rows))
  links = dataclasses.replace(links, residuals=tuple(result["residuals"]), **{
    key: result[key] for key in ("family", "widening")
  })
  if options.cluster:
    files.replace(pathlib.Path(options.cluster), cluster_files.to_json(links))
  _show_fit(fitted["fit"])
  show(result)
  return {
    "benchmark": "calibration", "environment": setup.describe_environment(),
    "fit": fitted["fit"], "cluster": fitted["cluster"], **result,
  }


def features(
  config: Any, rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, str | float]]:
  """Returns each row's features, as `study.calibration_features`."""
  base = setup.without_benchmark(config)
  return [
    study.calibration_features(
      json.loads(override(base, row["configuration"]).to_json()), "cpu",
      config.benchmark.devices,
    ) for row in rows
  ]


def evaluate_predictions(
  rows: Sequence[Mapping[str, Any]], held_out: int,
  values: Sequence[Mapping[str, str | float]],
) -> dict[str, Any]:
  """Compares predictions with measurements.

  Args:
    rows: Rows with ``predicted_s`` and ``blocks_s``, mean seconds of a step in
      each block. Configurations are independent draws, so that the first ones
      and the others are exchangeable if the machine does not change.
    held_out: Number of first rows, whose residuals give the intervals.
    values: `features` of the rows.

  Returns:
    ``residuals`` and ``family`` of the first ``held_out`` rows. Of the tested
    ``rows``, each with its ``interval`` before widening: ``widening``,
    ``coverage`` by feature, and ``summary``: the fraction of intervals that
    contain the measured time, and median and 95th percentile of the error
    |median / measured - 1| and of the spread |block / measured - 1|.
  """
  measured = [float(np.median(row["blocks_s"])) for row in rows]
  errors_of = [
    math.log(seconds / row["predicted_s"])
    for seconds, row in zip(measured, rows, strict=True)
  ]
  residuals = errors_of[:held_out]
  found, errors, spreads, contained = [], [], [], []
  for row, seconds in list(zip(rows, measured, strict=True))[held_out:]:
    interval = conformal.interval(row["predicted_s"], residuals)
    contained.append(seconds in interval)
    errors.append(abs(interval.median / seconds - 1))
    spreads += [abs(x / seconds - 1) for x in row["blocks_s"]]
    found.append({
      **row, "measured_s": seconds, "interval": list(interval),
      "contained": contained[-1],
    })
  return {
    "residuals": residuals,
    "family": conformal.values_by_key(values[:held_out]),
    "widening": conformal.widening(values[held_out:], errors_of[held_out:]),
    "rows": found, "coverage": coverage(found, values[held_out:]),
    "summary": {
      "contained": float(np.mean(contained)), "tested": len(found),
      **{
        f"{name}_{key}": float(np.quantile(values, quantile))
        for name, values in (("error", errors), ("spread", spreads))
        for key, quantile in (("median", 0.5), ("p95", 0.95))
      },
    },
  }


def draw_configurations(
  config: Any, index: int
) -> Iterator[tuple[str, dict[str, int]]]:
  """Yields random configurations until one is valid.

  Args:
    config: The benchmark's config.
    index: Number of the configuration, which seeds the generator, so that a
      resumed benchmark draws the same ones.

  Yields:
    Overrides, and the number of devices of each axis.
  """
  options = config.benchmark
  rng = np.random.default_rng((options.seed, index))

  def choice(values: Sequence[Any]) -> Any:
    return values[rng.integers(len(values))]

  meshes = [
    dict(zip(_AXES, sizes, strict=True))
    for sizes in itertools.product(
      range(1, options.devices + 1), repeat=len(_AXES)
    )
    if math.prod(sizes) == options.devices
  ]
  for _ in range(_DRAWS):
    mesh = choice(meshes)
    sizes = mesh | {"tensor": mesh["tensor"] * choice(options.lanes)}
    parts = [f"parallel.{axis}={size}" for axis, size in sizes.items()]
    parts += [
      f"data.batch_size={choice(options.batch_sizes)}",
      f"sync.p={choice(options.p)}", f"zero.scheme={choice(options.schemes)}",
    ]
    if mesh["stage"] > 1:
      parts += [
        f"pipeline.schedule={choice(options.schedules)}",
        f"train.accumulation={2 * mesh['stage']}",
      ]
    if mesh["worker"] > 1:
      parts += [f"outer.algorithm={choice(options.loops)}",
                "outer.sync_every=2"]
    # A mesh must not name the stage axis if there is only one stage.
    yield " ".join(parts), {a: size for a, size in mesh.items() if size > 1}


class _Steps:
  """Run whose rounds are timed: its compiled steps, batch and state."""

  def __init__(
    self, config: Any, overrides: str, mesh: Mapping[str, int], target: Target
  ) -> None:
    """Builds a run and compiles its programs.

    Raises:
      ValueError: The configuration is not valid.
    """
    base = override(setup.without_benchmark(config), overrides)
    self.experiment: Experiment = experiments.build(
      base, dict(mesh), list(target.devices)
    )
    outer, layout = self.experiment.outer, self.experiment.program.layout
    self.plans = [outer.plan(step) for step in outer.steady_round]
    self.made: dict[Any, CompiledProgram] = {}
    for plan in self.plans:
      if plan.variant not in self.made:
        self.made[plan.variant] = programs.compile_for(
          target, layout.mesh,
          lambda plan=plan: self.experiment.lower_step(plan),
          layout.compiler_options(),
        )
    self.batch = put_batch(layout, setup.token_batch(base))
    self.state = self.experiment.init_state()

  def round(self) -> None:
    """Runs a round of the outer loop's steps, and waits for it."""
    for plan in self.plans:
      self.state, metrics = self.experiment.update.run(
        self.made[plan.variant].compiled, self.state, self.batch,
        jax.tree.map(np.int32, plan.numbers),
      )
    jax.block_until_ready(metrics)

  def predicted_s(self) -> float:
    """Returns the mean seconds per step that `launch.compile` predicts."""
    seconds = {
      variant: study.analyse_schedule(self.experiment, made)["roofline"][
        "step_as_scheduled"
      ] for variant, made in self.made.items()
    }
    return float(np.mean([seconds[plan.variant] for plan in self.plans]))

  def blocks_s(self, blocks: int, block_s: float) -> list[float]:
    """Returns mean seconds per step in each block, after two untimed rounds."""
    self.round()
    self.round()
    return [
      _block_s(self.round, block_s) / len(self.plans) for _ in range(blocks)
    ]


def _block_s(function: Callable[[], None], min_s: float) -> float:
  """Returns mean seconds per call, of calls that take ``min_s`` in total."""
  start, calls = time.perf_counter(), 0
  while (taken := time.perf_counter() - start) < min_s or not calls:
    function()
    calls += 1
  return taken / calls


def _measure_configuration(
  config: Any, target: Target, index: int
) -> dict[str, Any]:
  """Predicts and measures a random configuration."""
  options, start, why = config.benchmark, time.perf_counter(), None
  for overrides, mesh in draw_configurations(config, index):
    try:
      steps = _Steps(config, overrides, mesh, target)
    except ValueError as error:  # for example, heads that ranks do not divide
      why = error
      continue
    predicted = steps.predicted_s()
    compiled = time.perf_counter()
    found = {
      "configuration": overrides, "mesh": mesh, "predicted_s": predicted,
      "blocks_s": steps.blocks_s(options.blocks, options.block_s),
      "compile_s": compiled - start, "load": timing.load_average(),
    }
    jax.clear_caches()
    return found
  raise ValueError(
    f"none of {_DRAWS} draws of config.benchmark is a valid configuration; the "
    f"last error: {why}"
  )


def _calibrate_rates(config: Any, target: Target) -> dict[str, Any]:
  """Fits rates to profiles; returns the cluster and its fit as plain data."""
  options = config.benchmark
  observed = []
  for overrides, text in options.profiled:
    steps = _Steps(config, overrides, _mesh(text), target)
    seconds = float(np.median(steps.blocks_s(options.blocks, options.block_s)))
    observed.append(_profile_run(steps, seconds))
  found = calibration.calibrate(
    observed, f"cpu:{options.devices}", available.limit_bytes()
  )
  return {
    "cluster": json.loads(cluster_files.to_json(found.links)),
    "fit": found.rows,
  }


def _mesh(text: str) -> dict[str, int]:
  """Parses ``"data:2,tensor:2"``."""
  pairs = [part.partition(":") for part in text.split(",")]
  if not all(size.isdecimal() for _, _, size in pairs):
    raise ValueError(
      f"config.benchmark.profiled: {text!r} is not AXIS:DEVICES, as in "
      "data:2,tensor:2"
    )
  return {axis: int(size) for axis, _, size in pairs}


def _profile_run(steps: _Steps, seconds: float) -> ProgramProfile:
  """Profiles a run of one program; a step takes ``seconds`` if not profiled."""
  if len(steps.made) != 1:
    raise ValueError(
      "config.benchmark.profiled needs an outer loop with one program, but "
      "this one has several"
    )
  (made,) = steps.made.values()
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      for _ in range(_PROFILED_ROUNDS):
        steps.round()
    events = profiles.read_events(pathlib.Path(folder))
  program = reading.read(made.compiled, mesh=made.mesh)
  found = profiles.select_program_events(
    program, events.get(program.module.name, ())
  )
  # The profiler makes steps longer.
  return dataclasses.replace(
    calibration.join_profile(program, found or {}), step_s=seconds
  )


def _relevant_config_json(config: Any) -> str:
  """Returns the config as JSON, without keys that do not change results."""
  sections = config.to_dict()
  for key in ("results", "cluster", "tested"):
    del sections["benchmark"][key]
  return json.dumps(sections, sort_keys=True)


def _show_fit(fit: Sequence[Mapping[str, Any]]) -> None:
  tables.print_table(
    "rates fitted to profiles, before the rest of a step is spread",
    "what | samples | rate/1e9:.3f=rate, 10^9/s | "
    "latency_s/1e-6:.1f=latency, us | share:.1%=of the steps | "
    "residual:.1%=median error", fit,
  )


def coverage(
  rows: Sequence[Mapping[str, Any]], values: Sequence[Mapping[str, Any]]
) -> list[dict[str, str]]:
  """Counts intervals that contain the measured time, by value of a feature."""
  found = []
  for key, seen in conformal.values_by_key(values).items():
    parts = []
    for value in seen:
      inside = [row["contained"] for row, own in zip(rows, values, strict=True)
                if own[key] == value]
      parts.append(f"{value}: {sum(inside)} of {len(inside)}")
    if len(seen) > 1:
      found.append({"key": key, "intervals": "; ".join(parts)})
  return found


def show(result: Mapping[str, Any]) -> None:
  """Prints the rows of `evaluate_predictions`, coverage and summary."""
  tables.print_table(
    "configurations that no rate was fitted to, ms",
    "configuration | interval/1e-3:.1f=predicted: 5%, 50%, 95% | "
    "measured_s/1e-3:.1f=measured | contained=inside", result["rows"],
  )
  tables.print_table(
    "coverage", "key | intervals=intervals that contain the time",
    result["coverage"],
  )
  s = result["summary"]
  print(
    f"{s['tested']} configurations: error of the median {s['error_median']:.1%}"
    f", P95 {s['error_p95']:.1%}; intervals contain {s['contained']:.0%}; "
    f"spread of repeated measurements {s['spread_median']:.1%}, P95 "
    f"{s['spread_p95']:.1%}"
  )
