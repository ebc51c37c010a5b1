"""Causes of a step's time in closed form, on links that are all alike."""

import dataclasses

import numpy as np
import pytest

from parallel.plans.hardware import cluster_files, link_matrix
from parallel.plans.hardware.link_matrix import LinkMatrix
from parallel.plans.hardware.tiers import HOSTS
from parallel.plans.planner import latency, space
from parallel.plans.planner.latency import Latency, TimingAssumptions
from parallel.plans.planner.message_costs import costs_by_term
from parallel.plans.planner.problem import Problem
from parallel.plans.planner.space import Configuration
from parallel.plans.workload import TrainingStep, Transformer
from tests import pairwise

MODEL = Transformer(512, 256, 8, 8, 4, 512)
STEP = TrainingStep(MODEL, 64, 128)
DEVICE = cluster_files.cluster("a100:1").device
RATE, LATENCY_S = 1e9, 1e-5
STREAM = 128 * 256 * 2  # bytes of one example
GAINS = (2 * 8 + 1) * 256
PCIE_4 = 16e9 * 16 / 8 * 128 / 130  # bytes per second and direction


def links(size, ahead=1.0, back=1.0):
  """Returns links whose times are multiples, to larger and smaller numbers."""
  times = np.where(np.triu(np.ones((size, size))) > 0, ahead, back)
  return LinkMatrix(
    "even", DEVICE, (0,) * size, RATE / times, LATENCY_S * times, "a test",
    "drawn",
  )


def predict(c, execution="events", **changes):
  timing = TimingAssumptions(execution=execution, **changes)
  return Problem(STEP, links(c.grid.size), timing).predict(c)


def ring_s(ranks, size):
  """Returns the seconds of an all-reduce of ``size`` bytes."""
  return 2 * (ranks - 1) * (LATENCY_S + size / ranks / RATE)


@pytest.mark.parametrize("execution", ["events", "lockstep"])
def test_a_stage_is_as_fast_as_its_slowest_device(execution):
  """Wherever the device is; the other stages wait for this one."""
  c = Configuration(2, 2, 1, 8)
  timing = TimingAssumptions(execution=execution)

  def predicted(slowdowns, order=range(4)):
    problem = Problem(
      STEP, link_matrix.slow_down_devices(links(4), slowdowns), timing
    )
    return problem.predict(c, np.reshape(order, c.grid))

  even, all_slow = predicted({}), predicted(dict.fromkeys(range(4), 3.0))
  stage_slow = predicted({0: 3.0, 1: 3.0})
  for device in range(4):
    found = predicted({device: 3.0})
    assert found.compute == pytest.approx(3 * even.compute)
    assert even.total < found.total < all_slow.total
    assert found.bubble >= 0
    # As if the whole stage were slow, at either end.
    assert predicted({device: 3.0}, np.roll(range(4), device)).compute == (
      found.compute
    )
  assert stage_slow.total == pytest.approx(predicted({0: 3.0}).total)
  # All stages compute the head together.
  assert stage_slow.vocabulary == pytest.approx(all_slow.vocabulary)
  one = Configuration(1, 4, 1, 8)
  whole, part = (
    Problem(
      STEP, link_matrix.slow_down_devices(links(4), x), timing
    ).predict(one)
    for x in (dict.fromkeys(range(4), 3.0), {2: 3.0})
  )
  assert part == whole


@pytest.mark.parametrize("remat", ["none", "reduced", "full"])
@pytest.mark.parametrize(("stages", "keep", "chunks"), [
  (1, "inputs", 1), (2, "inputs", 1), (2, "residuals", 1), (2, "inputs", 2),
])
def test_compute_is_that_of_the_layers_of_a_stage(stages, keep, chunks, remat):
  """A forward is repeated for each layer, for a whole part, or for both."""
  c = Configuration(
    stages, 1, 1, 4, "interleaved_1f1b" if chunks > 1 else "1f1b", chunks,
    remat=remat, keep=keep,
  )
  found = predict(c)
  layers_s = 8 // stages * STEP.layer_s(16, 1, DEVICE, 0.5)
  again = (remat != "none") + (stages > 1 and keep == "inputs")
  assert found.compute == pytest.approx(3 * 4 * layers_s)
  assert found.again == pytest.approx(again * 4 * layers_s)
  head = 3 * 2 * 64 * 128 * 256 * 512 / stages
  assert found.vocabulary == pytest.approx(
    head / (0.5 * DEVICE.peak("bfloat16"))
  )
  faster = predict(c, utilisation=0.25)
  assert faster.vocabulary == pytest.approx(2 * found.vocabulary)
  assert (found.data, found.tensor, found.offload, found.outer) == (0,) * 4


@pytest.mark.parametrize(("c", "forward", "backward", "whole"), [
  (Configuration(1, 1, 4, 2), 2 * 8, 2 * 8, 1),
  (Configuration(1, 1, 4, 2, remat="reduced"), 2 * 8, 2 * 8, 1),
  (Configuration(1, 1, 4, 2, remat="full"), 3 * 8, 2 * 8, 1),
  (Configuration(2, 1, 4, 2), 4 * 4, 2 * 4, 0),
  (Configuration(2, 1, 4, 2, remat="full"), 5 * 4, 2 * 4, 0),
  (Configuration(2, 1, 4, 2, keep="residuals"), 2 * 4, 2 * 4, 0),
  (Configuration(2, 1, 4, 2, remat="full", keep="residuals"), 3 * 4, 2 * 4, 0),
  (Configuration(2, 1, 4, 2, "interleaved_1f1b", 2), 4 * 4, 2 * 4, 0),
  (Configuration(1, 1, 4, 2, p=0.3), 2 * 8, 2 * 8, 1),
  (Configuration(1, 1, 4, 2, p=0.0), 2 * 8, 2 * 8, 1),
], ids=str)
@pytest.mark.parametrize("route", ["psum", "one_shot"])
def test_tensor_ranks_reduce_the_stream_of_each_layer(
  c, forward, backward, whole, route
):
  """Forwards send bfloat16, backwards float32; 76 of 256 channels for p = 0.3.
  """
  found = predict(dataclasses.replace(c, route=route))

  def one_s(size):
    if route == "one_shot":
      return LATENCY_S + 3 * size / RATE
    return ring_s(4, size)

  shared = int(c.p * 256) / 256
  size = 32 * STREAM  # of a microbatch
  expected = whole * (one_s(size) + one_s(2 * size))
  if shared:
    expected += forward * one_s(shared * size)
    expected += backward * one_s(shared * 2 * size)
  assert found.tensor == pytest.approx(2 * expected)


@pytest.mark.parametrize(("scheme", "microbatches", "sent", "rounds"), [
  # Bytes of all gathers and scatters, and their number.
  ("ddp", 4, 2 * 4 * MODEL.num_params, 2),
  ("zero1", 4, 6 * MODEL.num_params + 2 * GAINS, 3),
  ("zero2", 4, (2 + 4 * 4) * MODEL.num_params + 2 * GAINS, 2 + 4),
  ("zero3", 4, 4 * ((2 + 2 + 4) * MODEL.num_params + 4 * GAINS
                    - 2 * 512 * 256), 4 * 5),
])
def test_data_ranks_send_their_partition_around_a_ring(
  scheme, microbatches, sent, rounds
):
  c = Configuration(1, 8, 1, microbatches, scheme=scheme)
  assert predict(c).data == pytest.approx(
    7 / 8 * sent / RATE + rounds * 7 * LATENCY_S
  )


@pytest.mark.parametrize("scheme", ["ddp", "zero1"])
def test_offloaded_moments_cross_the_host_link_twice(scheme):
  c = Configuration(1, 2, 2, 4, scheme=scheme, offload=True)
  (_, moved), kept = latency.messages(c, STEP).exchanges, predict(
    dataclasses.replace(c, offload=False)
  )
  found = predict(c)
  params = (MODEL.num_params - GAINS) / 2 + GAINS
  ranks = 1 if scheme == "ddp" else 2
  assert found.offload == pytest.approx(2 * 8 * params / ranks / PCIE_4)
  assert moved > 0
  assert dataclasses.replace(found, offload=0.0) == kept
  # The link of another host is twice as fast.
  faster = predict(c, host=HOSTS["dgx-h100"])
  assert faster.offload == pytest.approx(found.offload / 2)
  # Half of the bytes move in each direction, at its own rate.
  host = HOSTS["dgx-h100"]
  rate = host.device_link.read
  slow = rate.model_copy(update={"value": rate.value / 5})
  for way in ("read", "write"):
    link = host.device_link.model_copy(update={way: slow})
    uneven = host.model_copy(update={"device_link": link})
    rates = {"read": uneven.to_device, "write": uneven.from_device}
    assert rates.pop(way) == pytest.approx(slow.value)
    assert list(rates.values()) == pytest.approx([rate.value])
    found = predict(c, host=uneven)
    assert found.offload == pytest.approx(faster.offload * (1 + 5) / 2)


TABLE = pairwise.rows(
  {
    "scheme": ("ddp", "zero1", "zero3"), "remat": space.REMATS,
    "stages": (2, 1), "tensor": (4, 1), "data": (2, 1),
    "keep": space.KEEPS, "p": (1.0, 0.3),
    "route": space.ROUTES, "offload": (True, False),
  },
  # These options have no effect without stages or tensor ranks.
  lambda row: (row["stages"] == 1 and row["keep"] == "residuals")
  or (row["tensor"] == 1 and (row["p"] < 1 or row["route"] != "psum"))
  or (row["data"] == 1 and row["scheme"] != "ddp"),
)


@pytest.mark.parametrize("row", TABLE, ids=pairwise.label)
def test_price_of_all_options_together(row):
  """Every cause of the step's time, written out for the whole step."""
  m, layers = 4, 8 // row["stages"]
  c = Configuration(microbatches=m, **row)
  found = predict(c)
  t, examples = c.tensor, 64 // (c.data * m)
  layer_s = STEP.layer_s(examples, t, DEVICE, 0.5)
  recomputed = c.stages > 1 and c.keep == "inputs"
  again = (c.remat != "none") + recomputed

  def sum_s(size):
    if t == 1:
      return 0
    one = LATENCY_S + (t - 1) * size / RATE
    return one if c.route == "one_shot" else ring_s(t, size)

  stream = examples * STREAM
  part = int(c.p * 256) / 256 * stream
  forwards = 2 + 2 * recomputed + (c.remat == "full")
  reduce_s = layers * (forwards * sum_s(part) + 2 * sum_s(2 * part))
  if c.stages == 1:  # embedding, and the entry's cotangents
    reduce_s += sum_s(stream) + sum_s(2 * stream)
  # A device's parameters: matrices, both tables, and gains.
  matrices = layers * 256 * (2 * 256 + 2 * 128 + 3 * 512) / t
  table = 512 * 256 / (c.stages * t)
  gains = (2 * layers + 1) * 256
  params = matrices + 2 * table + gains
  sent, rounds = {
    "ddp": (8 * params, 2),
    "zero1": (6 * params + 2 * gains, 3),
    "zero3": (m * (8 * params + 4 * gains - 2 * table), 5 * m),
  }[c.scheme]
  ranks = 1 if c.scheme == "ddp" else c.data
  seconds = {
    "compute": 3 * m * layers * layer_s,
    "again": again * m * layers * layer_s,
    "tensor": m * reduce_s,
    "vocabulary": m * 6 * examples * 128 * 256 * 512 / (c.stages * t) / (
      0.5 * DEVICE.peak("bfloat16")
    ),
    "data": (c.data - 1) * (sent / c.data / RATE + rounds * LATENCY_S),
    "offload": c.offload * 2 * 8 * params / ranks / PCIE_4,
    # 1F1B fills and drains with a microbatch for each other stage.
    "bubble": (c.stages - 1) * (
      (3 + again) * layers * layer_s + reduce_s
    ),
  }
  for name, expected in seconds.items():
    assert getattr(found, name) == pytest.approx(expected), name
  assert (found.hops > 0) == (c.stages > 1)
  assert found.total == pytest.approx(sum(seconds.values()) + found.hops)


def test_total_is_the_sum_of_all_causes():
  assert Latency(*(10.0**i for i in range(8))).total == 11_111_111
  assert Latency(*(10.0**i for i in range(9))).total == 111_111_111


@pytest.mark.parametrize("c", [
  Configuration(4, 1, 1, 8), Configuration(2, 1, 2, 3),
  Configuration(4, 1, 1, 6, "gpipe"), Configuration(2, 1, 1, 4, "zb_h1"),
  Configuration(2, 2, 1, 4, "interleaved_1f1b", 2),
], ids=str)
@pytest.mark.parametrize(("ahead", "back"), [(1, 1), (1, 3), (3, 1)])
def test_hops_in_lockstep_are_those_of_each_tick(c, ahead, back):
  """The slowest hop of a tick, and four sums of the stream over stages."""
  p, m = c.stages, c.microbatches
  problem = Problem(
    dataclasses.replace(STEP, batch_size=c.data * m),
    links(c.grid.size, ahead, back), TimingAssumptions(),
  )
  # Devices of a stage are adjacent, so hops ahead lead to larger numbers,
  # except those from the last to the first stage of chunked schedules.
  order = np.arange(c.grid.size).reshape(c.grid)
  found = problem.predict(c, order)
  assert problem.predict(c) == found
  hop = costs_by_term(problem.traffic(c), order)[1]
  head_s = 3 * m * problem.step.head_flops(1, p * c.tensor) / (
    0.5 * DEVICE.peak("bfloat16")
  )
  sums_s = m * 4 * ahead * ring_s(p, STREAM)
  assert found.vocabulary == pytest.approx(head_s + sums_s)
  if c.chunks == 1:
    assert hop == pytest.approx(found.hops + sums_s)
  else:
    assert hop > found.hops / 2 + sums_s


@pytest.mark.parametrize(("schedule", "microbatches", "chain", "hop"), [
  ("1f1b", 8, 2, 2), ("1f1b", 9, 3, 0), ("1f1b", 10, 3, 0), ("1f1b", 11, 3, 1),
  ("1f1b", 1, 1, 0), ("gpipe", 8, 1, 0), ("zb_h1", 8, 1, 0),
])
def test_number_of_exposed_hops(schedule, microbatches, chain, hop):
  """Both directions of a hop, in units of one message."""
  c = Configuration(4, 1, 1, microbatches, schedule)
  step = dataclasses.replace(STEP, batch_size=microbatches)
  costs = latency.traffic(c, step, links(4, 1, 2), "events")
  unit = 3 * (LATENCY_S + STREAM / RATE)
  assert costs.chain[0, 1] == pytest.approx(chain * unit)
  assert costs.hop[0, 1] == pytest.approx(hop * unit)
  assert not costs.ring.any()
  assert not costs.reduce.any()


@pytest.mark.parametrize("c", [
  Configuration(1, 1, 1, 4), Configuration(1, 1, 4, 4),
  Configuration(2, 1, 4, 4, remat="full"),
], ids=str)
def test_measurement_of_a_stage_adds_up_to_the_step(c):
  """A third of reductions and head, and no repeated forward, is forward."""
  cluster, timing = links(8), TimingAssumptions(execution="events")
  forward, both = latency.predict_measurement(c, STEP, cluster, timing)
  found = latency.predict(c, STEP, cluster, timing)
  shared = found.tensor + found.vocabulary
  assert 4 * both == pytest.approx(found.compute + found.again + shared)
  assert 4 * forward == pytest.approx((found.compute + shared) / 3)


def test_unknown_execution_is_refused():
  with pytest.raises(ValueError, match="execution='event' must be one of"):
    TimingAssumptions(execution="event")


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_faster_links_divide_the_time_of_messages(factor):
  c = Configuration(1, 4, 2, 4, scheme="zero1")
  problem = Problem(STEP, links(8), TimingAssumptions())
  order = np.arange(8).reshape(c.grid)
  found = problem.predict(c, order)
  sent_s = found.data + found.tensor
  assert problem.sensitivity(c, order, [factor]) == {
    factor: pytest.approx(found.total + sent_s / factor - sent_s)
  }
  assert set(problem.sensitivity(c, order)) == {0.5, 2.0}
