"""AdamW on the host: its rate compared with other optimizers and predictions.

`parallel.memory.host_optimizer` and optax on XLA:CPU take steps in this
process, rivals in another one. Triad is measured over three of our own arrays.
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
import os
import pathlib
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import optax

from caatnet.benchmarks.harness import processes, setup, timing
from caatnet.benchmarks.memory import measured_tiers
from caatnet.show import tables
from parallel.hardware import tiers
from parallel.hardware.devices import H100
from parallel.hardware.tiers import Host
from parallel.memory import placement, rates
from parallel.memory.host_optimizer import (
  ARRAYS,
  MOVED_BYTES,
  AdamW,
  HostOptimizer,
)
from parallel.memory.placement import Placement
from parallel.memory.problem import (
  INSTANTS,
  PHASES,
  Part,
  Problem,
  Tensor,
  Use,
  Way,
)

# Part and way of the only part of the state, named as greedy policies expect.
_WAY = "parameters", "updated by the cpu, weights on the device"


def run(config: Any) -> dict[str, Any]:
  """Measures, prints tables, and returns them as plain data.

  Args:
    config: Config like configs/benchmark/host_optimizer.py.

  Raises:
    ValueError: The rivals' Python cannot be run or lacks torch, numba is
      missing, or the tiers do not have one of DRAM and one file.
  """
  options = config.benchmark
  threads = options.threads or os.cpu_count() or 1
  if options.tiers:
    host = tiers.read(pathlib.Path(options.tiers))
    placed = [
      row for size in options.sizes
      for row in _placements(host, size, threads, options)
    ]
    _print_placements(placed)
    return {"environment": setup.one_device(), "placements": placed,
            "tiers": host.model_dump(), "load": timing.load()}
  compared = [_compare(size, threads, options) for size in options.sizes]
  _print(compared)
  return {"environment": setup.one_device(), "rows": compared,
          "load": timing.load()}


def _made(
  size: int, threads: int,
  placed: dict[str, dict[int | str, float]] | None = None,
) -> HostOptimizer:
  """Returns an optimizer whose state is not zero."""
  optimizer = HostOptimizer(size, AdamW(), placed, num_threads=threads)
  optimizer.weights.fill(1)
  optimizer.gradients.fill(1e-3)
  return optimizer


def _compare(size: int, threads: int, options: Any) -> dict[str, Any]:
  """Returns the seconds of all optimizers, and their share of triad."""
  ours = _made(size, threads)
  arrays = [ours.weights, ours.gradients, ours.first]
  measures: dict[str, Callable[[], float]] = {
    "triad": lambda: rates.measure(arrays, threads, ["triad"])["triad"],
    "ours": lambda: timing.seconds_after_one(lambda: measured_tiers.step(ours)),
    "optax": functools.partial(timing.seconds_after_one, _optax(size)),
  }
  versions: dict[str, str] = {}
  with contextlib.ExitStack() as stack:
    if options.rivals:
      versions, ask = stack.enter_context(
        _rivals(options.rivals, size, threads)
      )

      def rival(name: str) -> float:
        ask(name)  # as timing.seconds_after_one
        return ask(name)

      measures |= {name: functools.partial(rival, name) for name in versions}
    found = timing.in_turns(
      measures, options.rounds, label=f"{size:,} elements"
    )
  triad = found.pop("triad")
  return {
    "size": size, "threads": threads, "versions": versions, "triad": triad,
    "seconds": found,
    "of_triad": {
      name: [
        MOVED_BYTES * size / s / rate
        for s, rate in zip(seconds, triad, strict=True)
      ]
      for name, seconds in found.items()
    },
  }


def _optax(size: int) -> Callable[..., jax.Array]:
  """Returns a function that takes a jitted step with a donated state.

  It takes gradients, by default those of `_made`, and returns the weights, both
  float32 ``[size]``. It has our optimizer's hyperparameters.
  """
  ours = AdamW()
  optimizer = optax.adamw(
    measured_tiers.LEARNING_RATE, ours.beta_1, ours.beta_2, ours.eps,
    weight_decay=ours.weight_decay,
  )

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(weights, state, gradients):
    updates, state = optimizer.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state

  weights = jnp.ones(size)
  held = [weights, optimizer.init(weights)]
  gradients = jnp.full(size, 1e-3)

  def take(gradients: jax.Array = gradients) -> jax.Array:
    held[:] = step(*held, gradients)
    return jax.block_until_ready(held)[0]

  return take


@contextlib.contextmanager
def _rivals(
  python: str, size: int, threads: int
) -> Iterator[tuple[dict[str, str], Callable[[Any], Any]]]:
  """Starts the rivals' process.

  Yields:
    Versions of the libraries, and a function that returns the seconds of a step
    of one of them.
  """
  script = pathlib.Path(__file__).with_name("host_optimizer_rivals.py")
  # Where pip has put ninja, with which DeepSpeed builds its extension.
  path = f"{pathlib.Path(python).parent}{os.pathsep}{os.environ['PATH']}"
  # -P: the script's directory is not searched for modules to import.
  with processes.answering(
    "config.benchmark.rivals", [python, "-P", str(script)], "torch",
    environment={"PATH": path, "OMP_NUM_THREADS": str(threads)},
  ) as ask:
    yield ask({"size": size, "threads": threads}), ask


def problem(size: int, host: Host) -> Problem:
  """Returns the placement problem of an update on the CPU and nothing else.

  Args:
    size: Number of elements.
    host: Tiers.
  """
  state = tuple(
    Tensor(
      name, 4.0 * size, INSTANTS,
      (Use("update", "cpu", read=1, written=float(name != "gradients")),),
      "host",
    )
    for name in ARRAYS
  )
  return Problem(
    host=host, device=H100, device_bytes=0.0,
    reserved=dict.fromkeys(INSTANTS, 0.0), seconds=dict.fromkeys(PHASES, 0.0),
    parts=(Part(_WAY[0], (Way(_WAY[1], state),), units=1),),
  )


def plans(
  size: int, host: Host, dram_share: float
) -> dict[str, tuple[Placement, float]]:
  """Returns placements by name, with predicted seconds of a step.

  Args:
    size: Number of elements.
    host: One tier of DRAM and one file.
    dram_share: Share of the state that the optimum may place in DRAM.

  Raises:
    ValueError: The host has other tiers.
  """
  if [tier.kind for tier in host.tiers] != ["dram", "file"]:
    raise ValueError(
      f"host {host.name!r} must have one tier of kind dram and one of kind "
      "file, as launch.measure_memory --file writes it on one NUMA node"
    )
  dram, file = host.tiers

  def uniform(shares: dict[str, float]) -> Placement:
    return Placement({_WAY: 1.0}, {(*_WAY, name): shares for name in ARRAYS})

  room = dram_share * 16.0 * size
  capacity = dram.capacity_bytes.model_copy(
    update={"value": room, "low": room, "high": room}
  )
  limited = host.model_copy(update={
    "tiers": (dram.model_copy(update={"capacity_bytes": capacity}), file)
  })
  found = {
    "dram": uniform({dram.name: 1.0}),
    "planned": placement.place(problem(size, limited), "optimum"),
    "interleaved": uniform({dram.name: 0.5, file.name: 0.5}),
    "file": uniform({file.name: 1.0}),
  }
  return {
    name: (p, placement.cost(problem(size, host), p).seconds["update"])
    for name, p in found.items()
  }


def _placements(
  host: Host, size: int, threads: int, options: Any
) -> list[dict[str, Any]]:
  """Returns measured and predicted seconds of steps by placement."""
  planned = plans(size, host, options.dram_share)
  dram, file = host.tiers
  where = {
    dram.name: dram.node, file.name: str(pathlib.Path(file.path).parent)
  }
  shares = {
    name: {
      key[-1]: {where[tier]: x for tier, x in tensor.items() if x > 0}
      for key, tensor in p.tiers.items()
    }
    for name, (p, _) in planned.items()
  }
  found = {}
  for name, s in shares.items():
    # One at a time: the kernel slows down writers of files that exceed a share
    # of free memory, which the states of other placements would take.
    step_s = functools.partial(
      measured_tiers.step_s, _made(size, threads, s)
    )
    found |= timing.in_turns(
      {name: step_s}, options.rounds,
      label=f"{size:,} elements, {name}",
    )
    del step_s
  return [
    {
      "size": size, "placement": name, "predicted_s": predicted,
      "seconds": found[name], "median_s": statistics.median(found[name]),
      "file_share": {
        array: s.get(where[file.name], 0.0)
        for array, s in shares[name].items()
      },
    }
    for name, (_, predicted) in planned.items()
  ]


def _print(rows: list[dict[str, Any]]) -> None:
  tables.table(
    "AdamW on the host: median (range) of rounds; shares of triad's rate",
    ["elements", "by", "ms", "GB/s", "% of triad"],
    [
      [
        f"{row['size']:,}", name,
        timing.range_text([1e3 * s for s in seconds], ",.1f"),
        f"{MOVED_BYTES * row['size'] / statistics.median(seconds) / 1e9:.1f}",
        timing.range_text([100 * x for x in row["of_triad"][name]]),
      ]
      for row in rows for name, seconds in row["seconds"].items()
    ],
  )


def _print_placements(rows: list[dict[str, Any]]) -> None:
  tables.table(
    "steps by placement, files written to disk and dropped",
    ["elements", "placement", "in the file", "ms", "predicted", "ratio"],
    [
      [
        f"{row['size']:,}", row["placement"],
        f"{100 * statistics.mean(row['file_share'].values()):.0f}%",
        timing.range_text([1e3 * s for s in row["seconds"]], ",.1f"),
        f"{1e3 * row['predicted_s']:,.1f}",
        f"{row['median_s'] / row['predicted_s']:.2f}",
      ]
      for row in rows
    ],
  )
