"""Benchmark of placement policies on random models and tiers.

A policy is compared with two optima. One has the policy's layout (which tensors
are on the host, and which processor updates) and chooses only their tiers; the
other chooses the layout, too. `infer_auto_device_map` of accelerate receives
the layers in the policies' layout, and the tiers in `accelerator_order`.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools
import pathlib
import statistics
from typing import Any

import numpy as np

from caatnet.benchmarks.harness import processes, timing
from caatnet.show import tables
from caatnet.studies.planner.study import training_step
from parallel.hardware import tiers
from parallel.hardware.devices import DEVICES
from parallel.hardware.tiers import Host, Quantity, SharedLink, Tier
from parallel.memory import placement, problem
from parallel.memory.placement import greedy, optimum
from parallel.memory.placement.costs import Placement
from parallel.memory.problem import DEVICE, Problem
from parallel.workload import Transformer

_RIVALS = pathlib.Path(__file__).with_name("placements_rivals.py")
_DEVICES = ("a100", "h100", "h200", "v5p", "v6e")
# A policy is near the optimum up to this ratio of their steps.
_NEAR = 1.01
_REPEATS = 5


def run(config: Any) -> dict[str, Any]:
  """Places random problems with all policies, and prints tables.

  Args:
    config: Config like configs/benchmark/placements.py.
  """
  options = config.benchmark
  found = list(_problems(options.problems))
  ratios: dict[str, list[float]] = {name: [] for name in POLICIES}
  joint: list[float] = []
  for _, step, best_s in timing.progress(found, "placements"):
    for name in ratios:
      ratios[name].append(_seconds(step, placement.place(step, name)) / best_s)
    joint.append(_seconds(step, optimum.place(step)) / best_s)
  answer = None
  if options.python:
    answer = processes.ask_script(
      [options.python, str(_RIVALS)],
      _question(config, [step for _, step, _ in found]),
    )
    ratios["accelerate"] = [
      _seconds(step, by_layers(step, layers)) / best_s if layers else np.inf
      for (_, step, best_s), layers in
      zip(found, answer["layers"], strict=True)
    ]
  else:
    print("accelerate and DeepSpeed are left out: benchmark.python names no "
          "Python with both")
  seeds = [seed for seed, _, _ in found]
  result = {
    "benchmark": "placements", "problems": len(found),
    "seeds": [seeds[0], seeds[-1]],
    "policies": [
      _row(name, seeds, values, joint) for name, values in ratios.items()
    ],
    "layouts": {
      "median": statistics.median(joint), "least": min(joint),
    },
    "optimum_s": _optimum_s(config),
    "memory": _memory(config, answer),
    "versions": answer and answer["versions"],
  }
  _print(result)
  return result


# Greedy policies, which share one layout.
POLICIES = tuple(name for name in placement.POLICIES if name != "optimum")


def drawn(seed: int) -> Problem:
  """Returns a random model's step on random tiers, which may not fit.

  The state has 1.02 to 2.5 times its bytes on the host, of which DRAM has 10 to
  100%; one to three cards, and in a third of the problems a file, have the
  rest. Rates are log-uniform. In a half of them the cards share a link.
  """
  rng = np.random.default_rng(seed)
  heads = int(rng.integers(8, 65))
  model = Transformer(
    vocab_size=int(rng.choice([32_000, 131_072, 256_000])), width=128 * heads,
    num_layers=int(rng.integers(8, 97)), num_heads=heads, num_kv_heads=heads,
    ffn_width=128 * int(rng.integers(2 * heads, 4 * heads + 1)),
  )
  batch_size, seq_len = int(rng.integers(1, 5)), int(2 ** rng.integers(10, 17))
  inputs = model.num_layers * model.stream_bytes(batch_size * seq_len)
  needed = 16 * model.num_params + inputs
  return problem.training_step(
    model, batch_size=batch_size, seq_len=seq_len,
    device=DEVICES[str(rng.choice(_DEVICES))],
    host=_host(rng, rng.uniform(1.02, 2.5) * needed),
  )


def _host(rng: np.random.Generator, total: float) -> Host:
  """Returns random tiers with a number of bytes in total."""
  kinds = ["dram"] + int(rng.integers(1, 4)) * ["cxl"]
  kinds += ["file"] * bool(rng.integers(3) == 0)
  first = rng.uniform(0.1, 1)
  shares = [first, *((1 - first) * rng.dirichlet(np.ones(len(kinds) - 1)))]
  shared = bool(rng.integers(2))
  rates = {"dram": (50e9, 600e9), "cxl": (8e9, 64e9), "file": (1e9, 14e9)}
  return tiers.checked(Host(
    name="drawn", source="drawn by a benchmark",
    device_link=_link(rng, "device_link", 12e9, 128e9),
    links=(_link(rng, "switch", 16e9, 128e9),) if shared else (),
    tiers=tuple(
      Tier(
        name=f"{kind}{i}", kind=kind, duplex=kind == "cxl",
        capacity_bytes=_quantity(share * total),
        read=_rate(rng, *rates[kind]), write=_rate(rng, *rates[kind]),
        latency_s=_quantity(1e-7),
        link="switch" if shared and kind == "cxl" else None,
        path="tier" if kind == "file" else None,
      ) for i, (kind, share) in enumerate(zip(kinds, shares, strict=True))
    ),
  ))


def _link(
  rng: np.random.Generator, name: str, low: float, high: float
) -> SharedLink:
  rate = _rate(rng, low, high)
  return SharedLink(
    name=name, read=rate, write=rate, duplex=bool(rng.integers(2))
  )


def _rate(rng: np.random.Generator, low: float, high: float) -> Quantity:
  return _quantity(float(np.exp(rng.uniform(np.log(low), np.log(high)))))


def _quantity(value: float) -> Quantity:
  return Quantity(value=value, low=value, high=value, source="drawn")


def same_layout(step: Problem) -> Problem:
  """Returns the problem with the layout of greedy policies only."""
  ways = greedy.layout(step)[2]
  return dataclasses.replace(step, parts=tuple(
    dataclasses.replace(part, ways=tuple(
      way for way in part.ways if (part.name, way.name) in ways
    )) for part in step.parts
  ))


def _problems(count: int) -> Iterator[tuple[int, Problem, float]]:
  """Yields seeds, problems, and seconds of the optimum in greedy's layout.

  Problems whose state does not fit on all tiers together are left out.
  """
  for seed in itertools.count():
    step = drawn(seed)
    try:
      best = optimum.place(same_layout(step))
    except ValueError:
      continue
    yield seed, step, _seconds(step, best)
    count -= 1
    if not count:
      return


def _seconds(step: Problem, placed: Placement) -> float:
  """Returns the seconds of a step; infinity if the placement does not fit."""
  found = placement.cost(step, placed)
  return found.step_s if found.fits else np.inf


def accelerator_order(step: Problem) -> list[str]:
  """Returns tiers in the order that accelerate fills: nodes, then files.

  Both are sorted by the rate of reads, which accelerate does not consider; its
  own last level is a disk, too.
  """
  return [*greedy.tiers(step, "dram", "cxl"), *greedy.tiers(step, "file")]


def by_layers(step: Problem, layers: Sequence[int]) -> Placement:
  """Returns the placement of whole layers.

  Args:
    step: The problem.
    layers: Number of layers on each tier, in `accelerator_order`.
  """
  room, host, ways = greedy.layout(step)
  for key, tensor in host:
    for tier, count in zip(accelerator_order(step), layers, strict=True):
      share = count / step.parts[0].units
      room.put(key, tensor, tier, share * tensor.size_bytes)
  return Placement(ways, room.tiers)


def _question(config: Any, steps: Sequence[Problem]) -> dict[str, Any]:
  """Returns the request to `placements_rivals`."""
  model = training_step(config).model
  return {
    "problems": [
      {
        "sizes": [
          int(tensor.size_bytes / step.parts[0].units)
          for _, tensor in greedy.layout(step)[1] if tensor.held
        ],
        "layers": step.parts[0].units,
        "tiers": [
          int(step.host.tier(t).capacity_bytes.value)
          for t in accelerator_order(step)
        ],
      } for step in steps
    ],
    "parameters": [
      model.num_params,
      max(model.layer_params, model.vocab_size * model.width),
    ],
  }


def _row(
  name: str, seeds: Sequence[int], ratios: Sequence[float],
  joint: Sequence[float],
) -> dict[str, Any]:
  """Returns counts and the worst case of a policy."""
  fitting = {
    seed: ratio for seed, ratio in zip(seeds, ratios, strict=True)
    if ratio < np.inf
  }
  worst = max(fitting, key=lambda seed: fitting[seed], default=None)
  return {
    "policy": name, "fits": len(fitting),
    "near": sum(ratio <= _NEAR for ratio in ratios),
    "near_all": sum(
      ratio <= _NEAR * best for ratio, best in zip(ratios, joint, strict=True)
    ),
    "median": statistics.median(fitting.values()) if fitting else None,
    "worst": fitting.get(worst), "worst_seed": worst,
  }


def _of_config(config: Any) -> Problem:
  """Returns the step of the config's model on two CXL cards."""
  step = training_step(config)
  return problem.training_step(
    step.model, batch_size=step.batch_size, seq_len=step.seq_len,
    device=DEVICES["h200"], host=tiers.HOSTS["two-cxl"],
  )


def _optimum_s(config: Any) -> float:
  """Returns the median seconds of the search for a fractional optimum."""
  step = _of_config(config)
  return statistics.median(
    timing.seconds(lambda: optimum.place(step)) for _ in range(_REPEATS)
  )


def _memory(
  config: Any, answer: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
  """Returns bytes of weights, gradients and optimizer state by kind of offload.

  Ours are those of the ways of an update on the CPU; activations, and buffers
  of two layers of weights on the device, are not included.
  """
  parts = _of_config(config).parts
  rows = [
    {
      "of": f"ours, {way.name}",
      "host": sum(t.size_bytes for t in way.tensors
                  if t.on == "host" and t.held),
      "device": sum(t.size_bytes for t in way.tensors if t.on == DEVICE),
    } for way in parts[0].ways if way.name.startswith("updated by the cpu")
  ]
  for row in answer["estimates"] if answer else ():
    moved = [name for name in ("optimizer", "weights") if row[name]]
    rows.append({
      "of": f"DeepSpeed ZeRO-3, offloads {' and '.join(moved) or 'nothing'}, "
            f"buffer factor {row['buffers']:g}",
      "host": row["host"], "device": row["device"],
    })
  return rows


def _print(result: Mapping[str, Any]) -> None:
  count = result["problems"]
  tables.table(
    f"{count} random problems; ratio: seconds of a step over those of the "
    "optimum in the same layout",
    ["policy", "fits", "within 1%", "within 1%, all layouts", "median ratio",
     "worst ratio", "its seed"],
    [[_text(value) for value in row.values()] for row in result["policies"]],
  )
  layouts = result["layouts"]
  print(f"optimum of all layouts over that of greedy's: median "
        f"{layouts['median']:.3f}, least {layouts['least']:.3f}")
  tables.table(
    "bytes of the config's model in GB, without activations",
    ["", "host", "device"],
    [[row["of"], f"{row['host'] / 1e9:.1f}", f"{row['device'] / 1e9:.1f}"]
     for row in result["memory"]],
  )
  print(f"search for the fractional optimum of the config's model: "
        f"{result['optimum_s']:.3f} s")


def _text(value: float | str | None) -> str:
  return f"{value:.3f}" if isinstance(value, float) else str(value)
