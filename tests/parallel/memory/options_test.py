"""Pairs of a placement's options, against bytes and times written out.

The reference of a policy places pages one at a time. That of the optimum is a
linear program of the bytes and times below.
"""

import dataclasses
import itertools
import re

import numpy as np
import pytest
from scipy import optimize

from parallel.plans import placement
from parallel.plans.hardware import tiers
from parallel.plans.hardware.devices import H100
from parallel.plans.hardware.tiers import HOSTS, OptimizerPass, Quantity
from parallel.plans.placement import problem
from parallel.plans.placement.problem import DEVICE, PHASES
from parallel.plans.workload import Transformer
from tests import pairwise

LAYERS, WIDTH, HEADS, KV_HEADS, FFN, VOCAB = 12, 1024, 8, 2, 2816, 8_000
BATCH, POSITIONS = 4, 4096
TOKENS = BATCH * POSITIONS
UTILISATION, FILL = 0.1, 0.8
ITEM = {"bfloat16": 2, "float32": 4}
FLOPS = {"bfloat16": 989.4e12, "float32": 66.9e12}  # per second, of an H100
# Elements of a layer's matrices and gains; of all parameters.
LAYER = 2 * WIDTH**2 + 2 * WIDTH * KV_HEADS * 128 + 3 * WIDTH * FFN + 2 * WIDTH
PARAMS = LAYERS * LAYER + 2 * VOCAB * WIDTH + WIDTH
STATE = ("master weights", "first moments", "second moments")
BY_CPU, BY_DEVICE = "updated by the cpu", "updated by the device"
ON = ", weights on the "
# Bytes per second that are read and written; the second node reads faster.
RATES = {
  "dram": ((50e9, 45e9), (60e9, 40e9)), "cxl": ((20e9, 22e9), (25e9, 16e9)),
  "file": ((5e9, 3e9),),
}
TO_DEVICE, FROM_DEVICE = 16e9, 14e9
SHARED = (22e9, 18e9)  # link of all tiers but the first
# Of the state's bytes on the host, by which tiers are larger or smaller.
ROOM = {"ample": (1.2, 1.2, 1.2, 1.2), "scarce": (0.35, 0.25, 0.4, 0.3),
        "short": (0.2, 0.1, 0.15, 0.1)}

TABLE = pairwise.rows(
  {
    "policy": tuple(placement.POLICIES),
    "kinds": ("dram dram cxl cxl", "dram cxl file", "cxl file", "dram"),
    "room": tuple(ROOM), "rates": ("passes", "duplex", "simplex"),
    "shared": (True, False), "roomy": (False, True),
    "optimizer": ("any", "device"), "layers": ("any", "saved"),
    "dtype": tuple(ITEM),
  },
  # These have no such node, or no link that is shared.
  lambda row: (row["policy"] == "dram_only" and "dram" not in row["kinds"])
  or (row["shared"] and row["kinds"] == "dram"),
)


@dataclasses.dataclass(frozen=True)
class Case:
  """Bytes and rates of a row, as numbers.

  Attributes:
    row: The row.
  """

  row: pairwise.Row

  @property
  def sizes(self) -> dict[str, float]:
    """Bytes of each tensor, if its way runs all of its part."""
    item = ITEM[self.row["dtype"]]
    # Two streams, two normalised ones, queries, keys, values, attention's
    # output, and gate, up and their product.
    saved = 4 * WIDTH + (2 * HEADS + 2 * KV_HEADS) * 128 + 3 * FFN
    return {
      "weights": item * PARAMS, "gradients": item * PARAMS,
      "staged weights": item * PARAMS, **dict.fromkeys(STATE, 4 * PARAMS),
      "activations": LAYERS * TOKENS * saved * item,
      "layer inputs": LAYERS * TOKENS * WIDTH * item,
    }

  @property
  def reserved(self) -> np.ndarray:
    """Bytes of the device that are not placed, at both instants."""
    layer = ITEM[self.row["dtype"]] * LAYER
    working = 2 * self.sizes["activations"] / LAYERS + 2 * layer
    return np.array([max(8 * TOKENS * VOCAB, working), working + layer])

  @property
  def need(self) -> float:
    """Bytes on the host if all but weights are there."""
    kept = "activations" if self.row["layers"] == "saved" else "layer inputs"
    return 12 * PARAMS + max(self.sizes["gradients"], self.sizes[kept])

  @property
  def seconds(self) -> tuple[float, float]:
    """Seconds of the forward, and of all layers' forward."""
    rate = UTILISATION * FLOPS[self.row["dtype"]]
    # Half of the scores: attention is causal.
    layers = LAYERS * TOKENS * (
      2 * (LAYER - 2 * WIDTH) + 2 * POSITIONS * HEADS * 128
    ) / rate
    return layers + 2 * TOKENS * WIDTH * VOCAB / rate, layers

  @property
  def kinds(self) -> list[str]:
    return self.row["kinds"].split()

  @property
  def names(self) -> list[str]:
    """Names of the device and of the tiers."""
    return [DEVICE, *(f"t{i}" for i in range(len(self.kinds)))]

  @property
  def rates(self) -> np.ndarray:
    """Bytes per second of the tiers, ``[2, tiers]``: read, written."""
    left = {kind: iter(rates) for kind, rates in RATES.items()}
    return np.array([next(left[kind]) for kind in self.kinds]).T

  @property
  def capacity(self) -> np.ndarray:
    """Bytes at both instants, ``[2, 1 + tiers]``."""
    weights = self.sizes["weights"]
    free = self.reserved.max() + (2.5 if self.row["roomy"] else 0.5) * weights
    shares = ROOM[self.row["room"]][:len(self.kinds)]
    host = np.tile([share * self.need for share in shares], (2, 1))
    return np.concatenate([(free - self.reserved)[:, None], host], 1)

  @property
  def passes(self) -> tuple[OptimizerPass, ...]:
    """Measured passes of the first tier, whose small sizes are faster."""
    if self.row["rates"] != "passes":
      return ()
    return tuple(
      OptimizerPass(size_bytes=x * self.need, read_s=y * self.need / 40e9,
           write_s=y * self.need / 30e9)
      for x, y in ((0.1, 0.05), (0.4, 0.3))
    )

  def problem(self) -> problem.Problem:
    """Returns the problem under test."""
    def rate(value):
      return Quantity(value=value, low=value, high=value, source="a test")

    duplex, base = self.row["rates"] == "duplex", HOSTS["two-cxl"]
    linked = "switch" if self.row["shared"] else None
    link = base.device_link.model_copy(update={
      "read": rate(TO_DEVICE), "write": rate(FROM_DEVICE),
      "duplex": not duplex,
    })
    switch = link.model_copy(update={
      "name": "switch", "read": rate(SHARED[0]), "write": rate(SHARED[1]),
      "duplex": duplex,
    })
    made = [
      base.tiers[0].model_copy(update={
        "name": f"t{i}", "kind": kind, "path": "x" if kind == "file" else None,
        "node": None if kind == "file" else i,
        "read": rate(self.rates[0, i]), "write": rate(self.rates[1, i]),
        "capacity_bytes": rate(self.capacity[0, 1 + i]), "duplex": duplex,
        "link": linked if i else None, "passes": () if i else self.passes,
      }) for i, kind in enumerate(self.kinds)
    ]
    host = tiers.check_host(base.model_copy(update={
      "tiers": tuple(made), "device_link": link,
      "links": (switch,) if linked else (),
    }))
    memory = (self.capacity[0, 0] + self.reserved[0]) / FILL
    step = problem.training_step(
      Transformer(VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, FFN,
                  dtype=self.row["dtype"]),
      batch_size=BATCH, seq_len=POSITIONS, host=host, fill=FILL,
      device=dataclasses.replace(H100, memory_bytes=memory),
      utilisation=UTILISATION,
    )
    kept = {"parameters": "updated by the " + (
      "device" if self.row["optimizer"] == "device" else ""
    ), "activations": "saved" if self.row["layers"] == "saved" else ""}
    return dataclasses.replace(step, parts=tuple(
      dataclasses.replace(part, ways=tuple(
        way for way in part.ways if way.name.startswith(kept[part.name])
      )) for part in step.parts
    ))

  def ways(self) -> list[list[str]]:
    """Returns the names of the ways of both parts."""
    by = [BY_DEVICE] if self.row["optimizer"] == "device" else [
      BY_CPU, BY_DEVICE
    ]
    return [
      [f"{x}{ON}{on}" for x in by for on in ("device", "host")],
      ["saved"] if self.row["layers"] == "saved" else ["saved", "recomputed"],
    ]

  def keys(self) -> list[tuple[str, str, str]]:
    """Returns way, tensor and tier of each fraction of a placement."""
    found = []
    for way in itertools.chain(*self.ways()):
      at = {}
      if way == "saved":
        at = {"activations": self.names}
      elif way == "recomputed":
        at = {"layer inputs": self.names}
      else:
        free = self.names[1:] if BY_CPU in way else self.names
        at = dict.fromkeys(("gradients", *STATE), free) | {
          "weights": self.names[1:] if way.endswith("host") else [DEVICE]
        }
        if way == f"{BY_CPU}{ON}device":
          at["staged weights"] = self.names[1:]
      found += [(way, x, tier) for x, names in at.items() for tier in names]
    return found

  def measure(self, fractions, passes=True):
    """Returns bytes by instant and tier, and seconds by phase and resource.

    Args:
      fractions: (way, tensor, tier) -> fraction of the tensor.
      passes: Whether the first tier has its measured seconds.
    """
    def at(way, tensor):
      """Returns the bytes of a tensor on each tier."""
      return self.sizes[tensor] * np.array([
        fractions.get((way, tensor, tier), 0.0) for tier in self.names
      ])

    # Phase, read or written, and tier: by the device, and by the CPU.
    dma, cpu = np.zeros((2, 3, 2, len(self.names)))
    held = np.zeros((2, len(self.names)))
    forward, backward, update, read, write = 0, 1, 2, 0, 1
    again = 0.0
    for way in itertools.chain(*self.ways()):
      if way in ("saved", "recomputed"):
        kept = at(way, "activations" if way == "saved" else "layer inputs")
        dma[forward, write] += kept
        dma[backward, read] += kept
        held[0] += kept
        if way == "recomputed":
          again += kept.sum() / self.sizes["layer inputs"] * self.seconds[1]
        continue
      weights, gradients = at(way, "weights"), at(way, "gradients")
      state = sum(at(way, x) for x in STATE)
      who = cpu if way.startswith(BY_CPU) else dma
      dma[:2, read] += weights
      dma[backward, write] += gradients
      who[update] += state
      who[update, read] += gradients
      if way == f"{BY_CPU}{ON}device":
        staged = at(way, "staged weights")
        cpu[update, write] += staged
        dma[update, read] += staged
        dma[update, write] += weights
      else:
        who[update, write] += weights
      held += weights + state
      held[1] += gradients
    return held, self.loads(dma, cpu, again, passes)

  def loads(self, dma, cpu, again, passes):
    """Returns seconds by phase and resource, from bytes and recomputation."""
    found = {}
    forward_s = self.seconds[0]
    duplex = self.row["rates"] == "duplex"

    def add(phase, name, apart, read_s, write_s):
      if apart:
        found[phase, f"{name}, read"] = read_s
        found[phase, f"{name}, write"] = write_s
      else:
        found[phase, name] = read_s + write_s

    computed = (forward_s, 2 * forward_s + again, 0.0)
    for i, phase in enumerate(PHASES):
      found[phase, "compute"] = computed[i]
      both = (dma + cpu)[i, :, 1:]
      for tier, name in enumerate(self.names[1:]):
        seconds = both[:, tier] / self.rates[:, tier]
        if passes and self.passes and (tier, phase) == (0, "update"):
          seconds = dma[i, :, 1] / self.rates[:, 0] + [
            self.pass_s(cpu[i, 0, 1], "read_s"),
            self.pass_s(cpu[i, 1, 1], "write_s"),
          ]
        add(phase, name, duplex, *seconds)
      if self.row["shared"]:
        add(phase, "switch", duplex, *(both[:, 1:].sum(1) / SHARED))
      add(phase, HOSTS["two-cxl"].device_link.name, not duplex,
          *(dma[i, :, 1:].sum(1) / (TO_DEVICE, FROM_DEVICE)))
    found["update", "device memory"] = dma[2, :, 0].sum() / 3350e9
    return found

  def pass_s(self, size, key):
    """Returns the seconds of a pass, constant below the smallest size."""
    (x0, y0), (x1, y1) = (
      (p.size_bytes, getattr(p, key)) for p in self.passes
    )
    if size <= x0:
      return y0 if size else 0.0
    return y1 * size / x1 if size > x1 else (
      y0 + (y1 - y0) * (size - x0) / (x1 - x0)
    )


def fractions_of(found):
  return {
    (way, tensor, tier): share
    for (_, way, tensor), shares in found.tiers.items()
    for tier, share in shares.items()
  }


def seconds_of(loads):
  """Returns the seconds of a step: of each phase, its slowest resource."""
  return sum(
    max(s for (p, _), s in loads.items() if p == phase) for phase in PHASES
  )


@pytest.mark.parametrize("row", TABLE, ids=pairwise.label)
def test_options_together_place_and_cost_what_is_written_out(row):
  case = Case(row)
  step = case.problem()
  best = fastest(case)
  if row["policy"] == "optimum" and best is None:
    with pytest.raises(ValueError, match="the state does not fit: ") as error:
      placement.place(step, "optimum")
    lacking = re.findall(r"lacks ([\d.]+) GB", str(error.value))
    assert sum(map(float, lacking)) == pytest.approx(shortage(case), abs=0.2)
    return
  chosen = placement.place(step, row["policy"])
  fractions = fractions_of(chosen)
  found = placement.cost(step, chosen)
  held, loads = case.measure(fractions)
  for instant, expected in zip(problem.INSTANTS, held, strict=True):
    assert found.occupied[instant] == pytest.approx(
      dict(zip(case.names, expected, strict=True)), rel=1e-9, abs=1
    )
  excess = (held - case.capacity).max(0)
  assert found.missing == pytest.approx({
    name: x for name, x in zip(case.names, excess, strict=True) if x > 100
  }, rel=1e-9)
  for (phase, name), seconds in loads.items():
    assert found.loads[phase].get(name, 0) == pytest.approx(
      seconds, rel=1e-9, abs=1e-12
    ), (phase, name)
  assert found.step_s == pytest.approx(seconds_of(loads))
  if row["policy"] == "optimum":
    at_rates = seconds_of(case.measure(fractions, passes=False)[1])
    assert at_rates == pytest.approx(best, rel=1e-5)
    assert found.fits
  else:
    expect_pages(case, fractions)
    if found.fits and not case.passes:
      assert best <= found.step_s * (1 + 1e-6)


def program(case):
  """Returns the linear program: variables, and rows of its constraints.

  Returns:
    Number of fractions; inequalities ``(matrix, bounds)`` of bytes and of
    seconds, whose last three columns are the seconds of the phases; and
    equalities.
  """
  keys = case.keys()
  zero = case.measure({}, passes=False)
  units = [case.measure({key: 1.0}, passes=False) for key in keys]
  held = np.array([(x - zero[0]).ravel() for x, _ in units]).T / 1e9
  names = list(zero[1])
  fixed = np.array([zero[1][name] for name in names])
  seconds = np.array([[x[name] for name in names] for _, x in units]).T
  of_phase = np.array([
    [phase == p for p in PHASES] for phase, _ in names
  ], float)
  rows = np.concatenate([
    np.concatenate([held, np.zeros((len(held), 3))], 1),
    np.concatenate([seconds - fixed[:, None], -of_phase], 1),
  ])
  bounds = np.concatenate([case.capacity.ravel() / 1e9, -fixed])
  # All tensors of a way have the fraction of the way; those of a part sum to 1.
  tensors = list(dict.fromkeys((way, tensor) for way, tensor, _ in keys))
  total = np.array([
    [(way, tensor) == x for way, tensor, _ in keys] for x in tensors
  ], float)
  equal, right = [], []
  for ways in case.ways():
    first = {way: next(x for x in tensors if x[0] == way) for way in ways}
    equal.append(sum(total[tensors.index(x)] for x in first.values()))
    right.append(1.0)
    for i, x in enumerate(tensors):
      if x[0] in ways:
        equal.append(total[i] - total[tensors.index(first[x[0]])])
        right.append(0.0)
  return len(keys), rows, bounds, np.array(equal), right


def fastest(case):
  """Returns the seconds of the fastest placement; None if nothing fits."""
  count, rows, bounds, equal, right = program(case)
  found = optimize.linprog(
    [0] * count + [1] * 3, rows, bounds,
    np.concatenate([equal, np.zeros((len(equal), 3))], 1), right,
  )
  return found.fun if found.success else None


def shortage(case):
  """Returns the least GB that the tiers lack."""
  count, rows, bounds, equal, right = program(case)
  num = len(case.names)
  more = np.tile(-np.eye(num), (2, 1))
  found = optimize.linprog(
    [0] * count + [1] * num,
    np.concatenate([rows[: 2 * num, :count], more], 1), bounds[: 2 * num],
    np.concatenate([equal, np.zeros((len(equal), num))], 1), right,
  )
  return found.fun


def layout(case):
  """Returns the ways of both parts, and the tensors that policies place."""
  fits = (case.capacity[:, 0] >= case.sizes["weights"]).all()
  way = f"{BY_CPU}{ON}{'device' if fits else 'host'}"
  tensors = ["gradients", *STATE]
  if case.row["optimizer"] == "device":
    way = f"{BY_DEVICE}{ON}device"
  elif fits:
    tensors.append("staged weights")
  else:
    tensors.insert(0, "weights")
  if case.row["layers"] == "saved":
    return (way, "saved"), [*tensors, "activations"]
  return (way, "recomputed"), [*tensors, "layer inputs"]


def chosen_tier(case, touched, room, counts):
  """Returns the tier of the next page of a tensor.

  Args:
    case: The case, with its policy.
    touched: Whether the CPU reads or writes the tensor.
    room: Whether each tier has room for the page.
    counts: Number of the tensor's pages on each tier so far.
  """
  fastest = sorted(
    range(1, len(case.names)), key=lambda i: -case.rates[0, i - 1]
  )
  of = {
    kind: [i for i in fastest if case.kinds[i - 1] == kind] for kind in RATES
  }
  nodes = [i for i in fastest if i not in of["file"]]
  cards = [i for i in fastest if i not in of["dram"]]
  policy = case.row["policy"]
  if policy == "interleave":
    order = sorted(nodes, key=lambda i: counts[i])
  elif policy == "latency_first":  # in proportion to the cards' rates
    cards.sort(key=lambda i: (counts[i] + 1) / case.rates[0, i - 1])
    order = [*(of["dram"] if touched else []), *cards, *of["dram"]]
  else:
    order = of["dram"] if policy == "dram_only" else fastest
  last = of["dram"] if policy == "dram_only" else nodes or fastest
  return next((i for i in order if room[i]), last[-1])


def expect_pages(case, fractions):
  """Compares with pages that are placed one after the other."""
  ways, tensors = layout(case)
  # Accesses of the CPU per byte.
  touched = dict.fromkeys(case.sizes, 0)
  if BY_CPU in ways[0]:
    touched |= dict.fromkeys(("weights", "gradients", "staged weights"), 1)
    touched |= dict.fromkeys(STATE, 2)
  if case.row["policy"] == "largest_first":
    tensors.sort(key=lambda tensor: -case.sizes[tensor])
  if case.row["policy"] == "latency_first":
    tensors.sort(key=lambda tensor: -touched[tensor])
  held = {
    "gradients": [1], "activations": [0], "layer inputs": [0],
    "staged weights": [],
  }
  free = case.capacity.copy()
  for tensor in tensors:
    instants = held.get(tensor, [0, 1])
    number = round(case.sizes[tensor] / case.need * 1500)
    page = case.sizes[tensor] / number
    counts = np.zeros(len(case.names))
    for _ in range(number):
      room = (free[instants] >= page).all(0)
      into = chosen_tier(case, touched[tensor], room, counts)
      counts[into] += 1
      # Others take no room for what has none before all are placed.
      if room[into] or case.row["policy"] == "dram_only":
        free[instants, into] -= page
    way = ways[tensor in ("activations", "layer inputs")]
    np.testing.assert_allclose(
      [fractions.get((way, tensor, tier), 0.0) for tier in case.names],
      counts / number, rtol=0, atol=10 / number, err_msg=tensor,
    )
