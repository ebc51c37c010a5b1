"""Comparison of the planner's memory estimate with compiled programs.

Programs are random, or answers of the planner to random problems.
"""

from collections.abc import Sequence
import dataclasses
import importlib
import pathlib
import re
import time
from typing import Any

import numpy as np

from caatnet.benchmarks.harness import processes, timing
from caatnet.config.override import override
from caatnet.show import results, tables
from parallel.hardware.devices import DEVICES, Device
from parallel.hardware.link_matrix import LinkMatrix
from parallel.planner import memory
from parallel.planner.latency import EXECUTIONS, Timing
from parallel.planner.plan import plan
from parallel.planner.problem import Problem
from parallel.planner.space import Choices, Configuration
from parallel.workload import TrainingStep, Transformer

_CHIPS = 8
# Half of the programs are this near to the capacity, by the formulas.
_NEAR = 0.15
# Programs of more than this multiple of a device's memory are neither fitted
# nor judged: no plan takes them, and their errors would widen the bound.
_MOST = 2.0
# Candidates for the sizes of a model, see `parallel.workload.Transformer`.
_SIZES = (
  "num_layers", "width", "num_heads", "num_kv_heads", "head_width", "ffn_width",
  "vocab_size",
)


def draw(
  rng: np.random.Generator, near: bool, capacity: float
) -> tuple[TrainingStep, Configuration]:
  """Draws a training step and a configuration.

  Args:
    rng: Random generator.
    near: Whether the formulas are within 15% of the capacity.
    capacity: Bytes of a device.
  """
  while True:
    stages = int(rng.choice([1, 1, 2, 4]))
    tensor = int(rng.choice([n for n in (1, 2, 4, 8) if n * stages <= _CHIPS]))
    data = _CHIPS // stages // tensor
    width = int(rng.choice([1024, 2048, 3072, 4096, 6144, 8192]))
    heads = width // 128  # heads of width 128
    model = Transformer(
      int(rng.choice([32000, 65536, 128256])), width,
      stages * int(rng.integers(2, 21)), heads, int(rng.choice([heads, 8])),
      256 * round(width * float(rng.choice([8 / 3, 3.5, 4])) / 256),
    )
    seq_len = int(rng.choice([1024, 2048, 4096, 8192]))
    microbatches = stages * int(rng.choice([1, 2, 4]))
    configuration = Configuration(
      stages, data, tensor, microbatches,
      scheme=str(rng.choice(["ddp", "zero1", "zero2", "zero3"]))
      if data > 1 else "ddp",
      remat=str(rng.choice(["none", "full", "reduced"])),
    )
    batch = data * microbatches * int(rng.choice([1, 2, 4, 8]))
    step = TrainingStep(model, batch, seq_len)
    found = memory.terms(configuration, step)
    share = memory.PLAIN.estimate(found) / capacity  # by the formulas
    if abs(share - 1) < _NEAR if near else 0.05 < share < 1.3:
      return step, configuration


def answer(
  rng: np.random.Generator, device: Device
) -> tuple[TrainingStep, Configuration]:
  """Draws one of the planner's best configurations for a random problem.

  Models are small, and devices have a memory in proportion. Links between
  groups of devices are slower than those inside, so that the planner answers
  with all degrees.

  Args:
    rng: Random generator.
    device: Device of the cluster, whose memory is replaced.
  """
  while True:
    width = int(rng.choice([1024, 2048, 4096]))
    heads = width // 128  # heads of width 128
    model = Transformer(
      int(rng.choice([32000, 65536, 128256])), width,
      int(rng.choice([8, 16, 32])), heads, int(rng.choice([heads, 8])),
      256 * round(width * float(rng.choice([8 / 3, 3.5, 4])) / 256),
    )
    step = TrainingStep(
      model, int(rng.choice([16, 32, 64, 128])),
      int(rng.choice([1024, 2048, 4096])),
    )
    rates = np.full((_CHIPS, _CHIPS), 10.0 ** rng.uniform(9, 11))
    group = np.arange(_CHIPS) // int(rng.choice([1, 2, 4]))
    rates[group[:, None] == group] = 10.0 ** rng.uniform(10, 11.5)
    # Memory between that of very small microbatches and of ample residuals.
    plain = memory.PLAIN.estimate(memory.terms(
      Configuration(1, _CHIPS, 1, 1, remat="full"), step
    ))
    share = float(np.exp(rng.uniform(np.log(0.5), np.log(8))))
    links = LinkMatrix(
      "drawn", dataclasses.replace(
        device, memory_bytes=int(memory.MARGIN_BYTES + share * plain)
      ), tuple(range(_CHIPS)), rates, np.full((_CHIPS, _CHIPS), 1e-5),
      "drawn by a benchmark", "drawn",
    )
    timing = Timing(execution=str(rng.choice(EXECUTIONS)))
    try:
      best = plan(
        Problem(step, links, timing), Choices(), count=4, ordered=4
      ).best
    except ValueError:  # nothing fits
      continue
    return step, best[int(rng.integers(len(best)))].configuration


def overrides(step: TrainingStep, configuration: Configuration) -> str:
  """Returns the overrides of `configs/caatnet/7b.py` for this program."""
  keys = {
    f"model.{key}": getattr(step.model, key)
    for key in _SIZES
  } | {"data.seq_len": step.seq_len, "data.batch_size": step.batch_size}
  text = " ".join(f"{key}={value}" for key, value in keys.items())
  return f"{text} {configuration.overrides()}"


def compiled(target: str, text: str) -> dict[str, Any]:
  """Compiles a program; returns its bytes, and whether it fits.

  Args:
    target: Machine, in the syntax of `parallel.xla.targets.resolve`.
    text: Overrides of `configs/caatnet/7b.py`.
  """
  import jax

  jax.config.update("jax_platforms", "cpu")
  from caatnet.config import experiments
  from parallel.xla import targets
  from parallel.xla.memory import bytes_per_device
  from parallel.xla.memory import memory as analysis

  machine = targets.resolve(target)
  config = importlib.import_module("configs.caatnet.7b").get_config()
  experiment = experiments.build(
    override(config, text), None, list(machine.devices)
  )
  state = experiment.abstract_state()
  stored = sum(map(bytes_per_device, jax.tree.leaves(state)))
  try:
    program = experiment.lower_step(experiment.outer.plan(0)).compile(
      experiment.program.layout.compiler_options()
    )
  except jax.errors.JaxRuntimeError as error:
    return {"total": refused(str(error), stored), "fits": False}
  found = analysis(program, {
    "parameters": state.params, "moments": (state.opt_state, state.step),
    "batch": experiment.abstract_batch(),
  })
  # XLA:GPU has no memory limit, so it accepts programs that fit on no device.
  fits = found.total <= DEVICES[target.split(":")[1]].memory_bytes
  return {"total": found.total, "fits": fits} | dataclasses.asdict(found)


def refused(error: str, stored: float) -> float:
  """Returns the bytes of a program that XLA rejects for lack of memory.

  Args:
    error: Message of XLA.
    stored: Bytes of the state, for messages that give temporaries only.

  Raises:
    ValueError: The message has another form.
  """
  used = re.search(r"Used ([\d.]+)([GM]) of", error)
  temporaries = re.search(r"temporaries \(([\d.]+)([GM])\)", error)
  said = used or temporaries
  if "RESOURCE_EXHAUSTED" not in error or said is None:
    raise ValueError(error[:500])
  size = float(said[1]) * {"G": 2**30, "M": 2**20}[said[2]]
  return size if used else size + stored


def run(config: Any) -> dict[str, Any]:
  """Compiles missing programs, prints errors and returns all rows.

  Args:
    config: Config like configs/benchmark/planner_memory.py.
  """
  options = config.benchmark
  device = DEVICES[options.target.split(":")[1]]
  path = pathlib.Path(options.results)
  rows = kept(path)
  begun = time.monotonic()
  for number in timing.progress(range(options.num_programs), "compiling"):
    if number in rows or time.monotonic() - begun > options.limit_s:
      continue
    rng = np.random.default_rng([options.seed, number])
    drawn = answer(rng, device) if options.answers else draw(
      rng, number % 4 > 1, device.memory_bytes  # half near capacity
    )
    rows[number] = {"number": number} | kept_keys(*drawn) | _alone(
      options.target, overrides(*drawn)
    )
    rows = kept(path) | rows  # another process may add to the file, too
    results.write(path, {"rows": [rows[n] for n in sorted(rows)]})
  found = [rows[n] for n in sorted(rows)]
  others = [*kept(pathlib.Path(options.also)).values()] if options.also else []
  judged = judge(
    [row for row in found if "total" in row], device.memory_bytes, others
  )
  if judged:
    _print(judged)
  return {"rows": found} | judged


def kept(path: pathlib.Path) -> dict[int, dict[str, Any]]:
  """Returns a file's programs by number, without failed ones (retried)."""
  rows = [row for row in results.rows(path) if "error" not in row]
  try:
    return {row["number"]: row for row in rows}
  except (KeyError, TypeError) as error:
    raise ValueError(f"{path} has a row without a number") from error


def _alone(target: str, text: str) -> dict[str, Any]:
  """Compiles in a separate process, which releases all memory at its end."""
  try:
    return processes.alone(compiled, target, text)
  except (RuntimeError, ValueError) as error:
    return {"error": str(error)[:300]}


def kept_keys(
  step: TrainingStep, configuration: Configuration
) -> dict[str, Any]:
  """Returns the part of a program that a row stores for `formulas`."""
  model = {
    key: getattr(step.model, key) for key in (*_SIZES, "dtype")
  } | {"seq_len": step.seq_len, "backward_bytes": step.backward_bytes}
  return {
    "model": model, "configuration": dataclasses.asdict(configuration),
    "batch": step.batch_size,
  }


def formulas(row: dict[str, Any]) -> dict[str, float]:
  """Returns the values of the formulas for a row."""
  sizes = dict(row["model"])
  example = {key: sizes.pop(key) for key in ("seq_len", "backward_bytes")}
  step = TrainingStep(Transformer(**sizes), row["batch"], **example)
  return memory.terms(Configuration(**row["configuration"]), step)


def fits(
  rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]] = ()
) -> memory.Fits:
  """Fits programs.

  Steps without stages are fitted together with pipelines that save only inputs,
  of which there are more.

  Args:
    rows: Programs.
    others: Programs whose pipelines join the fit of pipelines.
  """
  def of(programs, test):
    return memory.fitted([
      (formulas(row), row["total"]) for row in programs
      if test(row["configuration"])
    ])

  return memory.Fits(
    of(rows, lambda c: c.get("keep") != "residuals"),
    of([*rows, *others], lambda c: c["stages"] > 1),
  )


def judge(
  rows: list[dict[str, Any]], capacity: float,
  others: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
  """Fits one half of the programs, and returns the errors of both halves.

  Programs of more than twice the capacity are left out.

  Args:
    rows: Compiled programs.
    capacity: Bytes of a device.
    others: Programs whose pipelines join the fit of pipelines, without being
      judged.

  Returns:
    The fits, and errors; empty if there are too few programs.
  """
  rows, others = (
    [row for row in part if row["total"] <= _MOST * capacity]
    for part in (rows, others or [])
  )
  # Both halves contain equally many programs near the capacity.
  halves = [[row for row in rows if row["number"] % 2 == i] for i in (0, 1)]
  if min(map(len, halves)) < 2:
    return {}
  fitted = fits(halves[0], others)
  found = {"fit": dataclasses.asdict(fitted)}
  for name, half in zip(("fitted", "held out"), halves, strict=True):
    totals = np.array([r["total"] for r in half])
    estimates, bounds = np.array([
      (fit.estimate(terms), fit.bound(terms)) for fit, terms in (
        (fitted.of(Configuration(**r["configuration"])), formulas(r))
        for r in half
      )
    ]).T
    errors, taken = abs(estimates / totals - 1), bounds <= capacity
    fit = [r["fits"] for r in half]
    pairs = list(zip(taken.tolist(), fit, strict=True))
    found[name] = {
      "programs": len(half), "fit": sum(fit), "taken": int(taken.sum()),
      "median": float(np.median(errors)),
      "p95": float(np.percentile(errors, 95)), "worst": float(errors.max()),
      # wrong: accepted by the bound, but too large; lost: rejected, but fits.
      "wrong": pairs.count((True, False)), "lost": pairs.count((False, True)),
      # The upper bound as a multiple of the compiled size.
      "bound_median": float(np.median(bounds / totals)),
      "bound_most": float((bounds / totals).max()),
      "exceeded": int((bounds < totals).sum()),
    }
  return found


def _print(judged: dict[str, Any]) -> None:
  halves = {name: judged[name] for name in ("fitted", "held out")}
  tables.table(
    "the planner's memory and the compiler's: errors of estimates; of the "
    "programs whose upper bound fits, those that the compiler refuses, with "
    "the rate's upper limit at 95%; those that fit and are lost; and bounds as "
    "multiples of compiled sizes",
    ["programs", "median", "P95", "worst", "taken", "refused", "at most",
     "lost", "bound, median", "most", "exceeded"],
    [
      [f"{x['programs']} {name}",
       *(f"{x[key]:.1%}" for key in ("median", "p95", "worst")),
       str(x["taken"]), str(x["wrong"]),
       "-" if x["wrong"] else f"{3 / max(3, x['taken']):.0%}",
       f"{x['lost']} of {x['fit']}", f"{x['bound_median']:.2f}",
       f"{x['bound_most']:.2f}", str(x["exceeded"])]
      for name, x in halves.items()
    ],
  )
  for name, fit in judged["fit"].items():
    tables.table(
      f"factors of causes, {name}; the upper bound is {fit['upper']:.2f} times "
      "the estimate", ["cause", "factor"],
      [[cause, f"{x:.2f}"] for cause, x in fit["factors"].items()],
    )
