"""Fragment plans: the utilisation model sends what the outer loop sends."""

import collections

import jax
import jax.numpy as jnp
import optax
import pytest

from caatnet.studies.utilisation import predictor
from parallel.axes import Axis
from parallel.outer.exchange import Exchange
from parallel.outer.fragment_plan import FragmentTimes
from parallel.outer.fragments import fragments
from parallel.outer.optimizers import Optax
from parallel.outer.streaming import Streaming
from parallel.wire import Wire

LAYERS, ELEMENTS = 12, 64


def streaming(sync_every, layers, overlap):
  worker = Axis("worker", 2, 2)
  block_dims = {"blocks": {"w": 0}, "rest": 0}
  return Streaming(
    worker, sync_every, Optax(optax.sgd(1.0)),
    Exchange(worker, Wire(), block_dims),
    fragments({"blocks": LAYERS}, layers, strided=True), (overlap,),
  )


def sent_by_step(loop, num_steps):
  """Returns step -> layers sent, in the steady state."""
  found = collections.defaultdict(frozenset)
  of_layer = jnp.arange(LAYERS)
  for step in range(2 * loop.sync_every, 2 * loop.sync_every + num_steps):
    plan = loop.plan(step)
    sends = [plan.variant.send] if plan.variant.send else []
    places = [plan.numbers.send.place] if sends else []
    after = step  # an overlapped send is at the start of the next step
    if max(loop.overlap) == 0:
      sends, after = list(plan.variant.receives), step + 1
      places = [n.place for n in plan.numbers.receives]
    for send, place in zip(sends, places, strict=True):
      if send.kind == "blocks":
        part = loop.fragments.take(
          {"blocks": of_layer}, "blocks", place, 0
        )["blocks"]
        found[after % loop.sync_every] |= frozenset(part.tolist())
  return found


@pytest.mark.quick
@pytest.mark.parametrize(
  ("sync_every", "layers", "overlap"),
  [(30, 3, 1), (30, 3, 0), (13, 1, 2), (20, 6, 5), (5, 3, 0)],
)
def test_utilisation_model_sends_the_fragments_of_the_loop(
  sync_every, layers, overlap
):
  """Compares layers per step, and the bytes of a round."""
  loop = streaming(sync_every, layers, overlap)
  method = predictor.Method(sync_every, LAYERS // layers, overlap, bits=32)
  runs = sent_by_step(loop, sync_every)
  for step in range(sync_every):
    assert runs[step] == method.layers_sent(step, LAYERS)
  shapes = {
    "blocks": {"w": jax.ShapeDtypeStruct((LAYERS, ELEMENTS), "f4")},
    "rest": jax.ShapeDtypeStruct((0,), "f4"),  # has no bytes in the model
  }
  sent = sum(loop.sent_bytes(shapes).values()) * sync_every / loop.period
  model = predictor.Model(LAYERS * ELEMENTS, LAYERS, 1.0)
  bits = predictor.simulate(model, method, 1e4).link_busy_s[0] * 1e4
  # The model omits norms; each exchange sends one.
  norms = 4 * (LAYERS // layers + 1)
  assert 8 * (sent - norms) == pytest.approx(bits)


@pytest.mark.parametrize(
  ("sync_every", "num"), [(6, 3), (7, 3), (5, 5), (100, 1)]
)
def test_each_fragment_is_sent_once_per_round(sync_every, num):
  times = FragmentTimes(sync_every, num)
  turns = [times.in_round(step) for step in range(sync_every)]
  assert [t for t in turns if t is not None] == list(range(num))
  for fragment in range(num):
    assert turns[fragment * (sync_every // num)] == fragment
  assert all(times.sent(step) is None for step in range(sync_every))
  assert [times.sent(sync_every + step) for step in range(sync_every)] == turns


def test_more_fragments_than_steps_are_refused():
  with pytest.raises(ValueError, match="every=4 is less than the 5 fragments"):
    FragmentTimes(4, 5)
