"""Executor of collective schedules, on devices and on lanes."""

import collections
import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from configs.caatnet import tiny
from parallel import collectives
from parallel.axes import Axis, make_mesh
from parallel.ledger import ledger
from parallel.plans.schedules.builders import BUILDERS, build
from parallel.plans.schedules.colouring import partial_permutations
from parallel.plans.schedules.schedule import COLLECTIVES, Schedule, Transfer
from parallel.plans.topology import builders as topologies
from parallel.schedules import run
from tests.parallel.plans.schedules.builders_test import ACCEPTED


def subjects(n, all_links=False):
  """Returns (builder, topology) for n ranks, one topology per builder.

  With ``all_links``, topology-aware builders appear on all topologies;
  `builders_test.py` proves all combinations.
  """
  rows = []
  for name, accepted in ACCEPTED.items():
    fits = [x for x in accepted if x.num_ranks == n]
    looks = all_links and name in ("multitree", "optimal")
    rows += [(name, x) for x in (fits if looks else fits[:1])]
  return rows


def definition(collective, x):
  """Returns the final value of every rank: ``[N, ...] -> [N, ...]``."""
  n = len(x)
  if collective == "all_gather":
    return np.stack([np.concatenate(list(x))] * n)
  if collective == "reduce_scatter":
    return np.stack(np.split(x.sum(0), n))
  return np.stack([x.sum(0)] * n)


def lifted(function, axis):
  return jax.jit(
    jax.shard_map(
      function,
      mesh=make_mesh({"a": axis}),
      in_specs=P("a"),
      out_specs=P("a"),
    )
  )


def one_by_one(functions):
  """Runs functions of the same array sequentially in one program."""

  def program(x):
    results, start = [], x
    for function in functions:
      results.append(function(start))
      late = collectives.order_after(x.astype("f4"), results[-1].astype("f4"))
      start = late.astype(x.dtype)
    return results

  return program


# Ranks, devices, and builders whose programs are compiled for them. All have a
# topology of 5 ranks, or of 8 if theirs must be a power of two or a grid.
OF_FIVE = [name for name, _ in subjects(5)]
COMPILED = [
  (2, 2, [name for name, _ in subjects(2)]), (5, 5, OF_FIVE),
  (8, 8, [name for name, _ in subjects(8) if name not in OF_FIVE]),
  (8, 2, ["multitree", "swing"]),  # four lanes on a device
]


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(
  ("n", "devices", "names"), COMPILED
)
def test_schedule_equals_its_collective(n, devices, names, collective):
  """Bit-equal on integers, for sizes that are no multiple of the chunks."""
  axis = Axis("a", n, devices)
  x = np.random.default_rng(n).integers(-9, 9, (n, n * 5, 3)).astype("i4")
  for name, topology in subjects(n):
    if name in names:
      schedule = build(name, topology, collective)
      y = lifted(lambda x, s=schedule: run.run_on_lanes(s, x, axis), axis)(x)
      np.testing.assert_array_equal(
        y, definition(collective, x), err_msg=f"{name}, {topology.name}"
      )


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_schedule_in_pieces_equals_its_collective(collective):
  """Each piece of a chunk descends its tree in separate rounds."""
  n = 3
  x = np.random.default_rng(0).integers(-9, 9, (n, n * 5, 3)).astype("i4")
  axis = Axis("a", n, 1)
  for name, options in (
    ("double_tree", {"pieces": 2}),
    ("optimal", {"trees": "grown", "weight": 2, "pieces": 2}),
  ):
    schedule = build(name, topologies.ring(n), collective, **options)
    y = lifted(lambda x, s=schedule: run.run_on_lanes(s, x, axis), axis)(x)
    np.testing.assert_array_equal(
      y, definition(collective, x), err_msg=f"{name}, {options}"
    )


@pytest.mark.quick
@pytest.mark.parametrize(("size", "devices"), [(8, 4), (3, 3)])
def test_collectives_accept_schedules(size, devices):
  """Reduces over lanes, then by the schedule; the gradient is exact, too."""
  axis = Axis("a", size, devices)
  ring = topologies.ring(devices)
  via = {c: run.executor(build("multitree", ring, c)) for c in COLLECTIVES}
  verbs = [
    lambda x: collectives.all_reduce(x, axis, via=via["all_reduce"])[None],
    lambda x: collectives.reduce_scatter(
      x, axis, dim=1, via=via["reduce_scatter"]
    ),
    lambda x: collectives.all_gather(
      x, axis, dim=1, via=via["all_gather"]
    )[None],
  ]
  rng = np.random.default_rng(1)
  x = rng.integers(-9, 9, (size, 3, size * 2, 2)).astype("f4")
  total = x.sum(0)
  expected = [
    np.stack([total] * devices),
    np.stack(np.split(total, size, axis=1)),
    np.stack([np.concatenate(list(x), axis=1)] * devices),
  ]
  weights = [rng.integers(-9, 9, y.shape).astype("f4") for y in expected]
  f = lifted(one_by_one(verbs), axis)

  def weighed(x):
    results = f(x)
    return sum(
      (w * y).sum() for w, y in zip(weights, results, strict=True)
    ), results

  (_, results), gradient = jax.jit(
    jax.value_and_grad(weighed, has_aux=True)
  )(x)
  for y, wanted in zip(results, expected, strict=True):
    np.testing.assert_array_equal(y, wanted)
  assert (np.asarray(gradient) * x).sum() == sum(
    (w * y).sum() for w, y in zip(weights, expected, strict=True)
  )


def test_gradient_inside_shard_map_and_under_vmap():
  """Each device weighs the sum differently."""
  n = 4
  axis = Axis("a", n, n)
  reduce = run.executor(build("optimal", topologies.torus((2, 2))))

  def local(x):
    weights = jax.lax.axis_index("a").astype("f4") + jnp.arange(1.0, 4.0)

    def loss(x):
      sums = jax.vmap(lambda v: reduce(v, "a"))(x[0])
      return (sums * weights[None]).sum()

    return jax.grad(loss)(x)

  x = np.zeros((n, 2, 3), "f4")
  # The loss of each device depends on all x, so the cotangents add up.
  total = sum(rank + np.arange(1.0, 4.0) for rank in range(n))
  np.testing.assert_array_equal(
    lifted(local, axis)(x), np.broadcast_to(total, x.shape)
  )


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("name", BUILDERS)
def test_program_sends_the_messages_of_the_schedule(name, collective):
  """The permutes have exactly the schedule's pairs and bytes."""
  topology = dict(subjects(8, all_links=True))[name]
  schedule = build(name, topology, collective)
  axis = Axis("a", 8, 8)
  elements = 3
  ranks = {"all_reduce": 1, "reduce_scatter": 1, "all_gather": 8}[collective]
  x = jnp.zeros((8, schedule.num_chunks * elements // ranks))
  lowered = lifted(
    lambda x: run.run_on_lanes(schedule, x, axis), axis
  ).lower(x)
  sent = collections.Counter()
  for pairs, size in re.findall(
    r"collective_permute\"?.*?source_target_pairs = dense<(.*?)>.*?"
    r"-> tensor<([0-9x]*)x?f32>",
    lowered.as_text(),
  ):
    chunks = np.prod([int(d) for d in size.strip("x").split("x")]) // elements
    for source, there in re.findall(r"\[(\d+), (\d+)\]", pairs):
      sent[int(source), int(there)] += int(chunks)
  assert sent == collections.Counter(
    (t.source, t.destination)
    for transfers in schedule.rounds for t in transfers
  )


@pytest.mark.mixed_dtypes
@pytest.mark.parametrize(("name", "pieces"), [("multitree", 1), ("ring", 4)])
def test_projections_of_a_model_reduce_by_a_schedule(name, pieces):
  """Has the schedule's permutes per projection, forward and backward."""
  config = override(
    tiny.get_config("test"), "parallel.tensor=8 model.num_layers=1",
  )
  config.sync.route = f"schedule:{name}" + f",pieces={pieces}" * (pieces > 1)
  experiment = experiments.build(config, {"tensor": 4})
  entries = ledger.collectives(
    experiment.lower_step(), experiment.program.layout.mesh
  )
  projections = [c for c in entries if c.where.startswith("blocks")]
  schedule = build(name, topologies.torus((2, 2)), pieces=pieces)
  permutes = sum(
    len(partial_permutations([(t.source, t.destination) for t in transfers]))
    for transfers in schedule.rounds
  )
  assert {c.kind for c in projections} == {"permute"}
  assert sum(c.count for c in projections) == 2 * 2 * permutes


@pytest.mark.parametrize(
  ("route", "message"),
  [
    ("multitree", "'multitree' must be one of psum, .*schedule:multitree"),
    ("schedule:tree", "config.sync.route='schedule:tree'.* one of ring, "),
    ("schedule:hdrm", "hdrm: torus 2x2 is not a BiGraph"),
    ("schedule:ring,pieces=2.5", "pieces=2.5 is not allowed; allowed are int"),
  ],
)
def test_invalid_route_in_a_config_is_refused(route, message):
  config = override(
    tiny.get_config(), f"sync.route={route} parallel.tensor=4 parallel.data=1"
  )
  with pytest.raises(ValueError, match=message):
    experiments.build(config, {"tensor": 4})


def test_sizes_that_do_not_fit_are_refused():
  ring = topologies.ring(4)
  scatter = run.executor(build("ring", ring, "reduce_scatter"))
  x = np.zeros((8, 6), "f4")
  with pytest.raises(ValueError, match="4 ranks, but the axis 'a' has 8"):
    lifted(lambda x: scatter(x[0], "a"), Axis("a", 8, 8))(x)
  with pytest.raises(ValueError, match="a multiple of 4 ranks"):
    lifted(lambda x: scatter(x[0], "a"), Axis("a", 4, 4))(x)
  axis, numbers = Axis("a", 4, 4), np.zeros(4, "f4")
  for collective, message in (
    ("reduce_scatter", r"ring: a reduce-scatter of an array with shape \(\)"),
    ("all_gather", "ring: an all-gather needs an array with at least one dim"),
  ):
    schedule = build("ring", ring, collective)
    with pytest.raises(ValueError, match=message):
      lifted(lambda x, s=schedule: run.run_on_lanes(s, x, axis), axis)(numbers)


def test_round_reads_the_state_before_it():
  """Each of three ranks sends its summand twice, and receives two."""
  everyone = tuple(
    Transfer(a, b, 0, "reduce", (a, b))
    for a in range(3) for b in range(3) if a != b
  )
  schedule = Schedule("all at once", "all_reduce", 3, 1, (everyone,))
  axis = Axis("a", 3, 3)
  x = np.array([[1.0], [10.0], [100.0]], "f4")
  y = lifted(lambda x: run.run_on_lanes(schedule, x, axis), axis)(x)
  np.testing.assert_array_equal(y, [[111.0]] * 3)
