"""Bytes that outer loops send and keep: formulas compared with programs."""

import collections
import itertools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.axes import Axis, make_mesh
from parallel.ledger import ledger
from parallel.outer.base import OuterLoop
from parallel.outer.data_parallel import DataParallel
from parallel.outer.dc_s3gd import DCS3GD
from parallel.outer.diloco import DiLoCo
from parallel.outer.eager import Eager
from parallel.outer.fragments import fragments
from parallel.outer.noloco import NoLoCo
from parallel.outer.optimizers import Nesterov
from parallel.outer.sparseloco import SparseLoCo
from parallel.outer.streaming import Streaming
from parallel.plans.outer.cost import (
  BLOCK_SIZE,
  OuterLoopConfig,
  ParameterRows,
  min_fragment_layers,
)
from parallel.wire import Wire
from tests.parallel.outer.small_run import (
  BLOCK_DIMS,
  LAYERS,
  WORKER,
  M,
  draw,
  each,
  exchange,
)

OUTER = Nesterov(0.7, 0.6)
WIRES = [
  ("float32", "all_gather"),
  *itertools.product(("int8", "fp8", "int4", "e3m0"),
                     ("all_gather", "all_to_all")),
]
HEAD = ParameterRows(1, 7)


def layers(count):
  """Returns the rows of ``count`` layers; blocks do not cross layers."""
  return ParameterRows(count, 6)


def wire(codec, route):
  return Wire("none" if codec == "float32" else codec, BLOCK_SIZE, route=route)


@pytest.mark.parametrize(("codec", "route"), WIRES)
def test_diloco_sends_the_bytes_of_its_closed_form(codec, route):
  loop = DiLoCo(WORKER, 5, OUTER, exchange(wire(codec, route)))
  form = OuterLoopConfig("diloco", M, 5, codec, route)
  found = collections.Counter()
  for c in form.collectives([layers(LAYERS), HEAD]):
    found[c.dtype] += c.operand_bytes
  assert found == loop.sent_bytes(draw(0))


@pytest.mark.parametrize(
  ("sync_every", "per_fragment", "overlap"),
  [(8, 2, 3), (8, 2, 2), (9, 1, 5), (9, 3, 0), (8, 2, 7), (7, 0, 2)],
)
def test_state_has_the_bytes_of_its_closed_form(
  sync_every, per_fragment, overlap
):
  """Counts the common part and one worker's row of "workers"."""
  loop = Streaming(
    WORKER, sync_every, OUTER, exchange(),
    fragments({"blocks": LAYERS}, per_fragment, strided=True), (overlap,),
  )
  state = loop.init(draw(0))
  own = sum(x.nbytes // M for x in jax.tree.leaves(state.pop("workers")))
  common = sum(x.nbytes for x in jax.tree.leaves(state))
  form = OuterLoopConfig(
    "streaming", M, sync_every, fragment_layers=per_fragment, overlap=overlap
  )
  if per_fragment:
    many = LAYERS // per_fragment
    cut = [*([layers(per_fragment)],) * many, [HEAD]]
  else:
    cut = [[layers(LAYERS), HEAD]]
  assert form.state_bytes(cut) == common + own


def test_transient_bytes_are_operands_results_and_the_decoded_mean():
  form = OuterLoopConfig("diloco", 4, 5, "int8", "all_gather")
  # 3 rows of 300 elements are 6 blocks: the codes and scales sent, and the 4
  # results; 4 bytes per norm; the mean, 900 elements in float32.
  codes, scales, norms = 6 * BLOCK_SIZE, 6 * 4, 4
  wanted = (1 + 4) * (codes + scales + norms) + 4 * 900
  assert form.exchange_temp_bytes(
    [[ParameterRows(3, 300)], [ParameterRows(1, 1)]]
  ) == wanted
  form = OuterLoopConfig("diloco", 4, 5)
  assert form.exchange_temp_bytes(
    [[ParameterRows(3, 300)]]
  ) == 2 * 4 * 900 + (1 + 4) * norms


@pytest.mark.parametrize(("change", "message"), [
  ({"algorithm": "dilocoo"}, "algorithm='dilocoo' must be .* mean diloco"),
  ({"codec": "int2"}, "codec='int2' must be one of float32, int8, fp8, int4"),
  ({"route": "ring"}, "route='ring' must be one of all_gather, all_to_all"),
  ({"workers": 1}, "workers=1 must be at least 2"),
  ({"sync_every": 0}, "sync_every=0 must be at least 1"),
  ({"overlap": -1}, "overlap=-1 must be at least 0"),
  ({"overlap": 5}, "overlap=5 must be less than sync_every=5"),
])
def test_invalid_loops_are_refused(change, message):
  valid = {"algorithm": "streaming", "workers": 2, "sync_every": 5}
  assert OuterLoopConfig(**valid, overlap=4).overlap == 4
  with pytest.raises(ValueError, match=message):
    OuterLoopConfig(**valid | change)


@pytest.mark.parametrize(("loop", "text", "fragment_layers", "overlap"), [
  (OuterLoopConfig("diloco", 4, 100), "DiLoCo, 4 workers, H = 100", None, None),
  (OuterLoopConfig("diloco", 4, 100, "int4"),
   "DiLoCo, 4 workers, H = 100, int4 by all_gather", None, None),
  (OuterLoopConfig("streaming", 2, 30),
   "Streaming DiLoCo, 2 workers, H = 30, one fragment, overlap 0", 0, (0,)),
  (OuterLoopConfig("streaming", 2, 30, "fp8", "all_to_all", 1, 5),
   "Streaming DiLoCo, 2 workers, H = 30, fragments of 1 layer, overlap 5, "
   "fp8 by all_to_all", 1, (5,)),
  (OuterLoopConfig("streaming", 2, 30, fragment_layers=2),
   "Streaming DiLoCo, 2 workers, H = 30, fragments of 2 layers, overlap 0", 2,
   (0,)),
])
def test_loop_is_described_by_text_and_by_keys(
  loop, text, fragment_layers, overlap
):
  assert str(loop) == text
  keys = loop.keys()
  assert keys.pop("parallel.worker") == loop.workers
  assert keys.pop("outer.fragment_layers", None) == fragment_layers
  assert keys.pop("outer.overlap", None) == overlap
  assert keys == {
    f"outer.{key}": getattr(loop, key)
    for key in ("algorithm", "sync_every", "codec", "route")
  }


@pytest.mark.parametrize(("kind", "received", "steps", "result"), [
  ("all_reduce", 2 * 3 / 4 * 80, 6, 80),
  ("all_gather", 3 * 80, 3, 4 * 80),
  ("all_to_all", 3 / 4 * 80, 3, 80),
])
def test_ring_collective_has_its_textbook_bytes_and_steps(
  kind, received, steps, result
):
  found = OuterLoopConfig("diloco", 4, 5).collectives(
    [ParameterRows(1, 20)]
  )[1]._replace(kind=kind)
  assert found.operand_bytes == 80
  assert found.received_bytes(4) == pytest.approx(received)
  assert found.steps(4) == steps
  assert found.result_bytes(4) == result


@pytest.mark.parametrize(("arguments", "fewest"), [
  ((12, 1, 30), 1), ((12, 1, 13), 1), ((12, 1, 12), 2), ((12, 1, 4), 4),
  ((12, 3, 30), 3), ((12, 1, 1), 0), ((7, 2, 30), 0),
])
def test_fewest_layers_per_fragment(arguments, fewest):
  """Smallest divisor with fewer fragments than a round has steps."""
  assert min_fragment_layers(*arguments) == fewest


def lowered_bytes(loop, mesh):
  """Returns lowered operand bytes by dtype, summed over a steady round."""
  start = draw(0)
  state = loop.init(start)
  specs = {
    key: each(lambda _, key=key: P("worker") if key == "workers" else P(), part)
    for key, part in state.items()
  }
  params = each(lambda x: np.stack([x] * loop.worker.size), start)
  found = collections.Counter()
  for number in loop.steady_round:
    plan = loop.plan(number)
    plan = plan._replace(numbers=each(jnp.int32, plan.numbers))

    def step(state, params, plan=plan):
      state = loop.begin(params, state, plan)
      updates = loop.gradients(params, state)
      return loop.finish(params, updates, state, plan)

    f = jax.shard_map(
      step, mesh=mesh, in_specs=(specs, P("worker")),
      out_specs=(P("worker"), specs),
    )
    for c in ledger.collectives(jax.jit(f).lower(state, params), mesh):
      found[c.dtype] += c.bytes * c.count
  return +found


BUILD = {
  "ddp": lambda w: DataParallel(w),
  "diloco": lambda w: DiLoCo(w, 2, OUTER, exchange(Wire("int4", 2), w)),
  "all_to_all": lambda w: DiLoCo(
    w, 2, OUTER, exchange(Wire("int8", 2, route="all_to_all"), w)
  ),
  "sparseloco": lambda w: SparseLoCo(w, 2, 0.7, BLOCK_DIMS, 0.8, 6, 4),
  "short": lambda w: SparseLoCo(w, 3, 0.7, BLOCK_DIMS, 0.8, 5, 4),
  "dc_s3gd": lambda w: DCS3GD(w, exchange(worker=w), 0.3),
  "eager": lambda w: Eager(w, 2, OUTER, exchange(worker=w)),
  "streaming": lambda w: Streaming(
    w, 4, OUTER, exchange(worker=w),
    fragments({"blocks": LAYERS}, 2, strided=True), (1,),
  ),
}


@pytest.mark.parametrize("build", [
  *BUILD.values(), lambda w: NoLoCo(w, 2, 0.7, 0.5, 0.3), OuterLoop,
], ids=[*BUILD, "noloco", "nothing"])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_of_one_device_send_nothing(build, workers):
  assert not build(Axis("worker", workers, 1)).sent_bytes(draw(0))


def test_single_data_parallel_worker_needs_no_collective():
  def of_all(workers):
    worker = Axis("worker", workers, workers)
    return jax.shard_map(
      lambda grads: DataParallel(worker).gradients(grads, {}),
      mesh=make_mesh({"worker": worker}), in_specs=P("worker"),
      out_specs=P("worker"),
    )

  texts = [str(jax.make_jaxpr(of_all(n))(draw(0, n))) for n in (1, 2)]
  assert ["psum" in text for text in texts] == [False, True]
  grads = draw(0, 2)
  each(
    lambda x, y: np.testing.assert_allclose(x, [y.mean(0)] * 2, rtol=1e-6),
    jax.jit(of_all(2))(grads), grads,
  )


@pytest.mark.parametrize(("workers", "devices"), [(3, 3), (4, 2)])
@pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
def test_round_sends_the_bytes_that_the_loop_states(build, workers, devices):
  worker = Axis("worker", workers, devices)
  loop = build(worker)
  mesh = make_mesh({"worker": worker})
  assert lowered_bytes(loop, mesh) == loop.sent_bytes(draw(0))


@pytest.mark.parametrize("per_fragment", [4, 5, -1])
def test_fragments_are_whole_layers(per_fragment):
  with pytest.raises(ValueError, match=rf"fragment_layers={per_fragment} must"):
    fragments({"blocks": LAYERS}, per_fragment, strided=True)
