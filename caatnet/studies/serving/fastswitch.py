"""Cost of preempting requests, by preemption method ("arm").

An arm decides whether the pages of a preempted request are recomputed or copied
to the host, and how pages are allocated and copied. The first of two settings
is FastSwitch's evaluation (arXiv 2411.18424): conversations of several turns
with an 8B model on an A10, priorities of requests that change while these run,
and no prefix cache, as in vLLM 0.3.3. The second replays public traces on a
server with a prefix cache. Its arrival rates are fractions ("loads") of the
server's capacity, which is measured with the arm "recompute", constant
priorities and all requests at the start: 90% of the requests divided by the
time in which these finish. If priorities changed, longer queues would lower
the throughput.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
from typing import Any

from caatnet.serving import traces
from caatnet.serving.traces import Arrival, Sessions
from caatnet.studies.serving import cells, server, tails
from caatnet.studies.serving.cells import SimulationCell
from caatnet.studies.serving.server import Machine
from parallel.base.checks import known

_FOLDER = pathlib.Path(__file__).parent / "traces"
SAMPLES = {
  "azure_code": "azure_2023_code.csv.gz",
  "azure_conv": "azure_2023_conv.csv.gz",
  "mooncake": "mooncake_conversation.jsonl.gz",
}
BASELINE_ARM, SWAP_ARM, COST_ARM = "recompute", "reuse", "cost"
# The baseline with a prefix cache, as vLLM has now, in the first setting.
CACHED_BASELINE = "recompute, pages found"


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Simulates FastSwitch's setting, replays of traces, and two comparisons.

  Args:
    config: Config like configs/serving/fastswitch.py, as nested dicts.

  Returns:
    Plain data: "sessions", `cells.run_statistics` by preemption method ("arm")
    and kind of priorities; "traces", by arm, trace and load (arrival rate as a
    fraction of capacity); "seeds", for each seed of Poisson arrivals, the arm
    "cost" compared with recomputing and swapping; "shares", a row for each
    fraction p of channels that tensor ranks synchronise; "machine" and "loads"
    (traces and capacities), the assumptions.

  Raises:
    ValueError: A trace cannot be read, or the machine is invalid.
  """
  known("config.seeds_trace=", config["seeds_trace"], tuple(config["traces"]))
  for arm in config["order"]:
    known("config.order=", arm, tuple(config["arms"]))
  # The report compares these arms, or shows values of them.
  for arm in (BASELINE_ARM, SWAP_ARM, COST_ARM, "groups", "asynchronous"):
    if arm not in config["arms"]:
      raise ValueError(f"config.arms must have the arm {arm!r}")
  machine = server.machine(config["model"], config["hardware"])
  study = _CellBuilder(config, machine)
  sessions = cells.run(study.sessions(), config["keep"])
  loaded = {
    name: study.load(name, part["path"])
    for name, part in config["traces"].items()
  }
  full = cells.run(
    [study.full(name, kept) for name, (kept, _) in loaded.items()],
    config["keep"],
  )
  capacity = {row["trace"]: row["capacity"] for row in full}
  return {
    "machine": _assumptions(config, machine),
    "sessions": sessions,
    "loads": [
      {
        "trace": name, "requests": len(kept), "left_out": left_out,
        "capacity": capacity[name],
        "own_rate": len(kept) / kept[-1].time_s,
      }
      for name, (kept, left_out) in loaded.items()
    ],
    "traces": cells.run(
      [
        cell for name, (kept, _) in loaded.items()
        for cell in study.loads(name, kept, capacity[name])
      ],
      config["keep"],
    ),
    "seeds": _compare_cost_model(cells.run(
      study.seeds(loaded, capacity), config["keep"]
    )),
    "shares": cells.run(study.shares(loaded), config["keep"]),
    "above": list(tails.TAIL_FRACTIONS),
  }


class _CellBuilder:
  """Builder of the simulations (`SimulationCell`) of the study."""

  def __init__(self, config: Mapping[str, Any], machine: Machine) -> None:
    self._config, self._machine = config, machine

  def _cell(
    self, where: Mapping[str, Any], arm: str, arrivals: Sequence[Arrival],
    found: bool, kind: str = "random", seed: int = 0,
  ) -> SimulationCell:
    config = self._config
    return SimulationCell(
      {**where, "arm": arm}, self._machine,
      config["arms"][arm] | {"found": found}, arrivals, config["limits"],
      {**config["priorities"], "kind": kind, "seed": seed},
    )

  def sessions(self) -> list[SimulationCell]:
    """Returns the conversations' simulations, by arm and kind of priorities."""
    config = self._config
    arrivals = Sessions(**config["sessions"]).arrivals()
    made = []
    for kind in config["kinds"]:
      # The baseline again, with a prefix cache as in today's vLLM.
      today = self._cell({"kind": kind}, BASELINE_ARM, arrivals, True, kind)
      made.append(
        dataclasses.replace(today, where={"kind": kind, "arm": CACHED_BASELINE})
      )
      made += [
        self._cell({"kind": kind}, arm, arrivals, False, kind)
        for arm in config["order"]
      ]
    return made

  def load(self, name: str, path: str) -> tuple[list[Arrival], int]:
    """Reads a trace and excludes requests that exceed the cache.

    Returns:
      The requests, and the number of excluded ones.
    """
    if not path:
      known("config.traces: sample ", name, SAMPLES)
    arrivals = traces.load(
      path or _FOLDER / SAMPLES[name], self._config["num_requests"]
    )
    kept = [a for a in arrivals if a.prompt + a.output <= self._machine.tokens]
    return kept, len(arrivals) - len(kept)

  def full(self, name: str, arrivals: Sequence[Arrival]) -> SimulationCell:
    """Returns the simulation that measures capacity: all arrive at once."""
    at_once = [dataclasses.replace(a, time_s=0.0) for a in arrivals]
    return self._cell({"trace": name}, BASELINE_ARM, at_once, True, "none")

  def loads(
    self, name: str, arrivals: Sequence[Arrival], capacity: float
  ) -> list[SimulationCell]:
    """Returns simulations of a trace for each load and preemption method.

    Args:
      name: Name of the trace.
      arrivals: Its requests.
      capacity: Requests per second; a load is a fraction of it.
    """
    return [
      self._cell(
        {"trace": name, "load": load}, arm,
        traces.scaled(arrivals, load * capacity), True,
      )
      for load in self._config["loads"] for arm in self._config["order"]
    ]

  def seeds(
    self, loaded: Mapping[str, tuple[list[Arrival], int]],
    capacity: Mapping[str, float],
  ) -> list[SimulationCell]:
    """Returns simulations of recomputing, swapping, and the cheaper of both.

    Args:
      loaded: Trace -> its requests, and the number of excluded ones.
      capacity: Trace -> requests per second; a load is a fraction of it.
    """
    name = self._config["seeds_trace"]
    return [
      self._cell(
        {"trace": name, "load": load, "seed": seed}, arm,
        traces.poisson(loaded[name][0], load * capacity[name], seed), True,
        seed=seed,
      )
      for load in self._config["loads"] for seed in self._config["seeds"]
      for arm in (BASELINE_ARM, SWAP_ARM, COST_ARM)
    ]

  def shares(
    self, loaded: Mapping[str, tuple[list[Arrival], int]]
  ) -> list[SimulationCell]:
    """Returns a simulation for each fraction p of synchronised channels.

    Several tensor ranks serve the requests first come, first served. `loaded`
    is as for `seeds`.
    """
    config, name = self._config, self._config["seeds_trace"]
    arrivals = traces.poisson(loaded[name][0], config["shares_rate"], 0)
    hardware = config["hardware"] | {
      # 0 pages: as many as fit into memory.
      "device": config["ranks_device"], "pages": 0
    }
    return [
      SimulationCell(
        {"p": p},
        server.machine(
          config["model"], hardware, config["ranks"], p, "ranks_device"
        ),
        config["arms"][BASELINE_ARM] | {"found": True}, arrivals,
        config["limits"], {"kind": "none"}, "first_come",
      )
      for p in config["shares"]
    ]


def _assumptions(config: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
  return dict(config["hardware"]) | {
    "pages": machine.pages, "host_pages": machine.host_pages,
    "page_bytes": machine.copies.page_bytes,
    "ranges_per_run": machine.copies.ranges_per_run,
    "frequency": config["priorities"]["frequency"],
    "levels": config["priorities"]["levels"],
    "think_s": config["sessions"]["think_s"],
    "rate": config["sessions"]["rate"],
    "num_sessions": config["sessions"]["num_sessions"],
    "trace": config["seeds_trace"], "ranks": config["ranks"],
    "ranks_device": config["ranks_device"],
    "shares_rate": config["shares_rate"],
    "growth": config["arms"]["groups"]["growth"],
    "wait_s": config["arms"]["asynchronous"]["wait_s"],
  }


def _compare_cost_model(rows: Sequence[Mapping[str, Any]]) -> list[
  dict[str, Any]
]:
  """Compares P99 latencies of the arm "cost" with the better alternative.

  "cost" recomputes or swaps a preempted request, whichever is estimated to be
  cheaper; the alternatives always recompute or always swap.

  Args:
    rows: `cells.run_statistics` of these arms, by load and seed.

  Returns:
    A row for each load, seed and latency ("ttft", "tbt"): the P99 of each arm
    in seconds; "width", half the bootstrap interval of the P99 of "cost";
    "worse", its excess over the better alternative; "beyond", whether that
    exceeds "width"; and the numbers of preemptions that could be swapped, took
    the cheaper option, and were swapped.
  """
  # The alternatives are recomputation (BASELINE_ARM) and swapping (SWAP_ARM).
  by = {(r["load"], r["seed"], r["arm"]): r for r in rows}
  found = []
  for load, seed in dict.fromkeys((r["load"], r["seed"]) for r in rows):
    for measure in ("ttft", "tbt"):
      values = {
        arm: by[load, seed, arm][measure]["99"]
        for arm in (BASELINE_ARM, SWAP_ARM, COST_ARM)
      }
      if None in (value[0] for value in values.values()):
        continue  # all requests have one token
      better = min(values[BASELINE_ARM][0], values[SWAP_ARM][0])
      ours, low, high = values[COST_ARM]
      row = by[load, seed, COST_ARM]
      found.append({
        "load": load, "seed": seed, "measure": measure,
        **{arm: value[0] for arm, value in values.items()},
        "width": (high - low) / 2, "worse": ours - better,
        "beyond": ours - better > (high - low) / 2,
        "able": row["able"], "cheaper": row["cheaper"],
        "swapped": row["swapped"],
      })
  return found
