"""Executor of pipeline schedules, compared with a single program.

All values are small integers, so that sums are exact in any order and gradients
must be equal bit for bit. A layer divides the input by its first channel:
computing on an empty slot yields NaN, which reaches every dependent value.
"""

import collections
import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.axes import Axis, make_mesh
from parallel.collectives import varying
from parallel.ledger import hlo, ledger, overlap
from parallel.pipeline.run import ModelFunctions, Pipeline, PipelineParams
from parallel.plans.hardware.devices import DEVICES
from parallel.plans.pipeline import builders, simulate
from parallel.plans.pipeline.pipeline_schedule import ActionKind
from tests import users

LAYERS, RANKS, WIDTH, BATCH, TOKENS = 8, 2, 3, 2, 5

# Pipeline schedule, stages, microbatches, chunks, devices of stages and of
# ranks, and whether residuals are kept.
CASES = [
  ("gpipe", 4, 3, 1, 4, 1, False),
  ("1f1b", 4, 6, 1, 2, 2, False),
  ("1f1b", 8, 3, 1, 8, 1, False),
  ("1f1b", 1, 2, 1, 1, 2, False),
  ("1f1b", 2, 1, 1, 1, 1, False),
  ("eager_1f1b", 4, 7, 1, 4, 2, False),
  ("interleaved_1f1b", 4, 8, 2, 4, 1, False),
  ("interleaved_1f1b", 2, 4, 4, 1, 2, False),
  ("looped", 2, 3, 4, 2, 1, False),
  ("zb_h1", 4, 6, 1, 4, 2, False),
  ("zb_h2", 4, 9, 1, 2, 1, False),
  ("gpipe", 4, 3, 1, 4, 2, True),
  ("1f1b", 4, 6, 1, 2, 2, True),
  ("interleaved_1f1b", 2, 4, 4, 1, 2, True),
  ("zb_h1", 4, 6, 1, 4, 2, True),
  ("zb_h2", 4, 9, 1, 2, 1, True),
  ("zb_v", 4, 7, 2, 4, 1, False),
  ("zb_v", 2, 5, 2, 2, 2, True),
  ("zb_v", 4, 3, 2, 2, 1, False),
  ("dualpipe_v", 4, 9, 2, 4, 2, True),
  ("dualpipe_v", 2, 5, 2, 1, 1, False),
]


def weights():
  draw = np.random.default_rng(0)
  w = draw.integers(-1, 2, size=(LAYERS, RANKS, WIDTH, WIDTH))
  table = draw.integers(-1, 2, size=(TOKENS, WIDTH))
  table[:, 0] = 1
  w[..., 0] = 0  # the first channel stays 1
  return w.astype(np.float32), table.astype(np.float32)


def layer(x, w, total):
  """Applies ranks' matrices ``w [R, H, H]``; ``total`` sums over ranks."""
  y = jax.vmap(lambda w: jax.nn.relu(x @ w))(w).sum(axis=0)
  return x + total(y) * (x[:, :1] / x[:, :1])


def loss_of(table, x):
  """Returns a loss whose cotangents are integers, too."""
  return jnp.sum((x @ table.T) * jnp.arange(TOKENS, dtype=x.dtype)[None])


def in_one_piece(w, table, tokens):
  def loss(w, table):
    def of(tokens):
      x = table[tokens]
      for one in w:
        x = layer(x, one, lambda y: y)
      return loss_of(table, x)

    return sum(map(of, tokens))

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(w, table)


def functions_of(devices):
  """Returns the table, layers and loss for that many devices of stages."""

  def of(number, x):  # broadcasts the value of one stage to all stages
    here = lax.axis_index("stage") == number
    return lax.psum(jnp.where(here, x, 0), "stage")

  return ModelFunctions(
    lambda table, tokens: of(0, table[tokens]),
    lambda w, _, x: lax.scan(
      lambda x, w: (layer(x, w, lambda y: lax.psum(y, "tensor")), None), x, w
    )[0],
    lambda table, x, tokens: of(devices - 1, loss_of(table, x)),
  )


def cut_into(w, schedule):
  """Reshapes ``[L, ...]`` to ``[S, chunks, layers, ...]``."""
  parts = w.reshape(schedule.num_parts, -1, *w.shape[1:])
  return parts[schedule.parts].swapaxes(0, 1)


def drawn_tokens(microbatches):
  return np.random.default_rng(1).integers(
    TOKENS, size=(microbatches, BATCH)
  ).astype(np.int32)


@functools.cache
def lowered(case):
  """Returns the lowered program, its mesh, and its arguments."""
  name, stages, microbatches, chunks, devices, of_ranks, keeps = case
  schedule = builders.build(name, stages, microbatches, chunks)
  stage = Axis("stage", stages, devices)
  mesh = make_mesh({"stage": stage, "tensor": Axis("tensor", RANKS, of_ranks)})

  functions = functions_of(devices)

  def step(w, table, tokens):
    params = PipelineParams(varying(w, "tensor"), varying(table, "stage"))
    loss, grads = Pipeline(schedule, stage, True, keeps).gradients(
      functions, params, (), tokens
    )
    return loss, grads.parts, lax.psum(grads.around, "stage")

  w, table = weights()
  cut = cut_into(w, schedule)
  tokens = drawn_tokens(microbatches)
  spec = P("stage", None, None, "tensor")
  program = jax.jit(jax.shard_map(
    step, mesh=mesh, in_specs=(spec, P(), P()), out_specs=(P(), spec, P())
  ))
  return program.lower(cut, table, tokens), mesh, (cut, table, tokens)


@functools.cache
def compiled(case):
  return users.compiled(lowered(case)[0])


def check_stages_equal_a_single_program(case):
  """Compares loss and gradients of a case of `CASES`, bit for bit."""
  args = lowered(case)[2]
  loss, grads, of_table = compiled(case)(*args)
  w, table = weights()
  expected, (of_w, of_its_table) = in_one_piece(w, table, args[2])
  assert loss == expected
  schedule = builders.build(*case[:4])
  np.testing.assert_array_equal(grads, cut_into(np.asarray(of_w), schedule))
  np.testing.assert_array_equal(of_table, of_its_table)


@pytest.mark.rotated
@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_equal_a_single_program(case):
  check_stages_equal_a_single_program(case)


@pytest.mark.parametrize(("name", "stages", "microbatches", "devices"), [
  ("1f1b", 4, 6, 4), ("1f1b", 4, 3, 2), ("1f1b", 1, 2, 1), ("zb_v", 2, 3, 2),
])
def test_forward_only_scores_equal_a_single_program(
  name, stages, microbatches, devices
):
  """Runs a schedule without backward: scores in the order of microbatches."""
  stage = Axis("stage", stages, devices)
  chunks = builders.num_chunks_for(name, 1)
  schedule = builders.build_evaluation(
    builders.build(name, stages, 1, chunks), microbatches
  )

  def scores(w, table, tokens):
    params = PipelineParams(varying(w, "tensor"), varying(table, "stage"))
    return Pipeline(schedule, stage, True, False).scores(
      functions_of(devices), params, (), tokens
    )

  w, table = weights()
  tokens = drawn_tokens(microbatches)
  found = jax.jit(jax.shard_map(
    scores, mesh=make_mesh({"stage": stage, "tensor": Axis("tensor", RANKS)}),
    in_specs=(P("stage", None, None, "tensor"), P(), P()), out_specs=P(),
  ))(cut_into(w, schedule), table, tokens)
  expected = [in_one_piece(w, table, one[None])[0] for one in tokens]
  assert len(set(map(float, expected))) > 1
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("case", [
  case for case in CASES if case[4] == case[1] > 1
], ids=str)
def test_neighbours_exchange_one_activation_per_direction_and_tick(case):
  program, mesh, _ = lowered(case)
  entries = ledger.collectives(program, mesh)
  assert all(entry.count is not None for entry in entries)
  name, stages, microbatches, chunks, *_ = case
  ticks = builders.build(name, stages, microbatches, chunks).num_ticks
  for phase in ("forward", "backward"):
    sent = [
      (c.bytes, c.count)
      for c in ledger.select(entries, kind="permute", phase=phase)
    ]
    assert sent == [(4 * BATCH * WIDTH, ticks)]
  # A microbatch enters and leaves once: its input, its output and its loss,
  # then the cotangents of output and input.
  sums = collections.Counter()
  for c in ledger.select(entries, kind="all_reduce", axis=("stage",)):
    sums[c.phase, c.bytes] += c.count
  assert sums.pop(("update", 4 * TOKENS * WIDTH)) == 1  # gradients of the table
  assert sums == {
    ("forward", 4 * BATCH * WIDTH): 2 * microbatches,
    ("forward", 4): microbatches,
    ("backward", 4 * BATCH * WIDTH): 2 * microbatches,
  }
  if case[5] == RANKS:
    # The forward of a part is recomputed in its backward, in both halves of a
    # split backward, and not at all if residuals are kept. The embedding, the
    # head and its backward reduce once each.
    times = 1 if case[6] else 3 if name.startswith("zb") else 2
    per_rank = ledger.select(entries, axis=("tensor",), phase="forward")
    assert sum(c.count for c in per_rank) == (
      microbatches * LAYERS // stages
    )
    again = ledger.select(entries, axis=("tensor",), rematted=True)
    assert sum(c.count for c in again) == (
      (times - 1) * microbatches * LAYERS // stages
    )


def programs_in(equation):
  """Returns the programs that an equation runs."""

  def is_program(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")

  leaves = jax.tree.leaves(list(equation.params.values()), is_leaf=is_program)
  return [getattr(x, "jaxpr", x) for x in leaves if is_program(x)]


def unordered_collectives(jaxpr):
  """Returns pairs of successive collectives of a program without data flow."""

  def communicates(equation):
    return equation.primitive.name.startswith(("psum", "ppermute")) or any(
      communicates(e) for inner in programs_in(equation) for e in inner.eqns
    )

  before, last, found = {}, None, []  # variable -> collectives it depends on
  for number, equation in enumerate(jaxpr.eqns):
    needs = set().union(*(
      before.get(x, ()) for x in equation.invars if not hasattr(x, "val")
    ))
    if communicates(equation):
      if last is not None and last not in needs:
        found.append((last, number))
      last = number
      needs.add(number)
    before |= dict.fromkeys(equation.outvars, needs)
  return found


def scans_in(jaxpr):
  """Yields the bodies of all scans of a program."""
  for equation in jaxpr.eqns:
    for inner in programs_in(equation):
      if equation.primitive.name == "scan":
        yield inner
      else:
        yield from scans_in(inner)


@pytest.mark.parametrize(("name", "gradients"), [
  ("1f1b", True), ("forward", False),
])
def test_order_of_collectives_costs_nothing_unless_it_is_needed(
  name, gradients
):
  """Counts data dependencies; activations are two arrays.

  If the order is needed, all collectives of a tick are a chain.
  """
  stage = Axis("stage", 2, 2)
  functions = ModelFunctions(
    lambda a, x: (lax.psum(a * x, "stage"), x),
    lambda w, _, x: (w * x[0], x[1]),
    lambda a, x, _: lax.psum(jnp.sum(a * x[0] * x[1]), "stage"),
  )

  def step(w, x, options):
    run = Pipeline(builders.build(name, 2, 3), stage, *options)
    params = PipelineParams(w, varying(jnp.float32(1), "stage"))
    if gradients:
      return run.gradients(functions, params, (), x)[0]
    return run.scores(functions, params, (), x)

  def num_dependencies(*options):
    program = jax.make_jaxpr(jax.shard_map(
      functools.partial(step, options=options),
      mesh=make_mesh({"stage": stage}), in_specs=(P("stage"), P()),
      out_specs=P(),
    ))
    program = program(jnp.ones((2, 1)), jnp.ones((3, 4)))
    tick, = scans_in(program.jaxpr)
    assert bool(unordered_collectives(tick)) != bool(options)
    return str(program).count("bitcast")

  assert num_dependencies() == 0 < num_dependencies(True)
  schedule = builders.build(name, 2, 3)
  assert Pipeline(schedule, stage) == Pipeline(schedule, stage, False, False)


@pytest.mark.parametrize("keeps", [False, True])
def test_memory_grows_with_stages_in_flight_not_with_microbatches(keeps):
  def temporaries(name, microbatches):
    found = compiled((name, 2, microbatches, 1, 2, 1, keeps)).memory_analysis()
    return found.temp_size_in_bytes

  # One input; with residuals, in 4 layers of 2 ranks, at least one product as
  # a boolean array, which is what the backward of relu reads.
  one = BATCH * WIDTH * (4 + (4 * RANKS if keeps else 0))
  few, many = (temporaries("1f1b", m) for m in (8, 40))
  # The table of ticks is a constant, which some backends copy.
  assert many - few < 32 * one
  few, many = (temporaries("gpipe", m) for m in (8, 40))
  assert many - few >= 32 * one


@pytest.mark.parametrize("case", [
  ("1f1b", 4, 6, 1, 4, 2, True), ("zb_h1", 4, 6, 1, 4, 2, True),
  ("zb_h1", 4, 6, 1, 4, 2, False), ("dualpipe_v", 4, 9, 2, 4, 2, True),
], ids=str)
def test_compiled_products_match_the_pipeline_schedule(case):
  """Each action has its minimal FLOPs: F = B = W with kept residuals."""
  name, stages, microbatches, chunks, *_, keeps = case
  schedule = builders.build(name, stages, microbatches, chunks)
  module = hlo.parse(compiled(case).as_text())
  scheduled = overlap.ScheduledProgram(
    module, lowered(case)[1], DEVICES["v5p"], lambda entry: 0.0
  )
  # Of one rank's part.
  forward = 2 * BATCH * WIDTH**2 * (LAYERS // schedule.num_parts)
  assert {k: c.flops / forward for k, c in scheduled.actions().items()} == {
    ("1f1b", True): {"forward": 1, "backward": 2},
    ("zb_h1", True): {"forward": 1, "input": 1, "weight": 1},
    # The last layer's product is not needed again, but is part of the loop.
    ("zb_h1", False): {"forward": 1, "input": 2, "weight": 3},
    ("dualpipe_v", True): {
      "forward": 1, "backward": 2, "input": 1, "weight": 1
    },
  }[name, keeps]
  # The embedding has no product, the head three: forward and two cotangents.
  head = 3 * 2 * BATCH * WIDTH * TOKENS
  # Actions of the first stage, which splits most backwards.
  times = sum(
    (schedule.kinds[:, 0] == ActionKind[kind.upper()]).sum() * found.flops
    for kind, found in scheduled.actions().items()
  )
  assert scheduled.total().flops == times + microbatches * head
  # In lockstep, a device waits during ticks in which it has less work.
  waiting = simulate.lockstep_waiting_s(schedule, {
    k: c.flops for k, c in scheduled.actions().items()
  })
  if name == "zb_h1" and keeps:  # all actions take equal time: one tick each
    idle = schedule.num_ticks - 3 * microbatches
    assert waiting == idle * forward
