"""Fragment plans: the utilisation model sends what the outer loop sends."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from caatnet.studies.utilisation import predictor
from parallel.axes import Axis
from parallel.outer.exchange import Exchange
from parallel.outer.fragments import fragments
from parallel.outer.optimizers import Optax
from parallel.outer.streaming import Streaming
from parallel.plans.outer.fragment_plan import FragmentSchedule
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
  method = predictor.SyncMethod(sync_every, LAYERS // layers, overlap, bits=32)
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
  times = FragmentSchedule(sync_every, num)
  turns = [times.due_fragment(step) for step in range(sync_every)]
  assert [t for t in turns if t is not None] == list(range(num))
  for fragment in range(num):
    assert turns[fragment * (sync_every // num)] == fragment
  assert all(times.sent(step) is None for step in range(sync_every))
  assert [times.sent(sync_every + step) for step in range(sync_every)] == turns


def test_more_fragments_than_steps_are_refused():
  with pytest.raises(ValueError, match="every=4 is less than the 5 fragments"):
    FragmentSchedule(4, 5)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("dim", "num_lead"), [(0, 0), (1, 2)])
def test_fragments_are_a_partition_of_the_parameters(strided, dim, num_lead):
  """Two stacks; a fragment has consecutive or evenly spread layers."""
  cut = fragments({"a": 6, "b": 4}, 2, strided, num_lead)
  lead = (2, 3, 2)[: dim + num_lead]
  tree = {
    key: np.broadcast_to(np.arange(count)[:, None], (*lead, count, 5))
    for key, count in (("a", 6), ("b", 4))
  } | {"rest": np.zeros(3)}
  assert cut.num_layer_fragments == 5
  assert cut.stack_kinds == ("a", "b")
  places = [cut.place(number) for number in range(6)]
  assert places == [
    ("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), (cut.last_kind, 0)
  ]
  assert [cut.first_of(kind) + place for kind, place in places] == [*range(6)]

  @jax.jit
  def taken_and_put_back(tree):
    whole, parts = jax.tree.map(jnp.zeros_like, tree), []
    for place in places:
      parts.append(cut.take(tree, *place, dim))
      negative = jax.tree.map(jnp.negative, parts[-1])
      whole = cut.put(whole, negative, *place, dim)
    return parts, whole

  parts, whole = jax.device_get(taken_and_put_back(tree))
  for (kind, place), part in zip(places[:-1], parts, strict=False):
    many = {"a": 3, "b": 2}[kind]
    first = (place, place + many) if strided else (2 * place, 2 * place + 1)
    assert part.keys() == {kind}
    assert part[kind].shape == (*lead, 2, 5)
    layers = part[kind].reshape(-1, 2, 5)[..., 0].tolist()
    assert set(map(tuple, layers)) == {first}
  assert parts[-1].keys() == {"rest"}
  for key, x in tree.items():
    np.testing.assert_array_equal(whole[key], -x)


def test_fragment_of_all_parameters_is_the_tree():
  cut = fragments({"a": 6}, 0, strided=True)
  assert (cut.num_layer_fragments, cut.stack_kinds) == (0, ())
  assert cut.place(0) == (cut.last_kind, 0)
  assert cut.first_of(cut.last_kind) == 0
  tree = {"a": 1, "rest": 2}
  assert cut.take(tree, cut.last_kind, 0, 0) == tree
  assert cut.put(tree, {"a": 3, "rest": 4}, cut.last_kind, 0, 0) == {
    "a": 3, "rest": 4,
  }
