"""Second pass of the planner: its estimates equal the built programs."""

import collections
import dataclasses
import functools

import jax
import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.models.lm.communication import tensor_reductions
from caatnet.studies.utilisation import predictor
from configs.planner import gpt_11b
from parallel.kernels.codec.reference import Codec
from parallel.ledger.memory import bytes_per_device
from parallel.plans.hardware import cluster_files
from parallel.plans.hardware.link_matrix import LinkMatrix
from parallel.plans.outer import cost
from parallel.plans.outer.cost import OuterLoopConfig, ParameterRows
from parallel.plans.planner import (
  device_state,
  lossy_options,
  outer,
  plan,
  space,
)
from parallel.plans.planner.lossy_options import Changes, sent_bytes_by_axis
from parallel.plans.planner.problem import Problem
from parallel.plans.planner.space import Choices, Configuration
from parallel.plans.workload import TrainingStep, Transformer
from parallel.plans.zero import cost as zero_cost

# Of gpt_11b.py:test_train; its width is no multiple of a codec's block.
MODEL = Transformer(256, 128, 4, 8, 8, 352, dtype="float32")
STEP = TrainingStep(MODEL, 16, 64)
CODED = {"weight_codec": "int8", "gradient_codec": "int4"}


def _links(rate=1e9, latency_s=0.0, size=8):
  device = cluster_files.cluster("a100:1").device
  return LinkMatrix(
    "even", device, (0,) * size, np.full((size, size), rate),
    np.full((size, size), latency_s), "a test", "drawn",
  )


PROBLEM = Problem(STEP, _links())


@functools.cache
def _built(c, more=""):
  return experiments.build(override(
    gpt_11b.get_config("test_train"),
    f"model.dtype=float32 {c.overrides()} {more}"
  ))


@pytest.mark.parametrize(("p", "remat"), [
  (0.5, "none"), (0.29, "full"), (0.25, "reduced"), (0.001, "none"),
])
def test_tensor_ranks_send_the_shared_part_p(p, remat):
  """Bytes per step; other tests compare the formula with lowered programs."""
  c = Configuration(1, 2, 4, 4, remat=remat, p=p)
  formula = tensor_reductions(
    _built(c).program.model.config, data_lanes=1, batch_size=2, seq_len=64,
    accumulation=4,
  )
  theirs = sum(
    4 * count * np.prod(x.shape) for x, count in formula.items()
    if x.phase != "update" and len(x.shape) == 4 and x.shape[0] == 1
  )
  assert sent_bytes_by_axis(c, STEP).tensor == theirs


@pytest.mark.parametrize("c", [
  Configuration(
    1, 4, 2, 1, scheme="zero1", outer=OuterLoopConfig("diloco", 2, 30)
  ),
  Configuration(2, 4, 1, 4, outer=OuterLoopConfig(
    "streaming", 4, 30, "e3m0", "all_to_all", 2, 1
  )),
  Configuration(1, 4, 2, 1, scheme="zero2", outer=OuterLoopConfig(
    "streaming", 2, 6, "e3m0", "all_gather", 1, 1
  )),
  Configuration(1, 4, 2, 1, outer=OuterLoopConfig(
    "streaming", 4, 6, "int8", "all_gather", 1, 3
  )),
  Configuration(1, 4, 2, 1, p=0.5, outer=OuterLoopConfig(
    "streaming", 4, 6, "fp8", "all_to_all", 0, 3
  )),
  Configuration(2, 2, 2, 4, "interleaved_1f1b", 2, outer=OuterLoopConfig(
    "streaming", 2, 30, "e3m0", "all_gather", 4, 0
  )),
], ids=str)
def test_workers_send_and_keep_the_bytes_of_the_loop(c):
  """Uses the loop's formula, which other tests compare with programs."""
  built = _built(c)
  loop, program = built.outer, built.program
  assert sum(loop.sent_bytes(program.local_shapes).values()) / loop.period == (
    pytest.approx(sent_bytes_by_axis(c, STEP).worker, rel=1e-12)
  )
  leaves = jax.tree.leaves(built.abstract_state().outer)
  kept = c.outer.state_bytes(device_state.fragments(c, MODEL))
  assert sum(map(bytes_per_device, leaves)) == kept
  alone = dataclasses.replace(c, outer=None, data=c.ranks)
  batch = STEP.batch_size // c.outer.workers
  one = dataclasses.replace(
    PROBLEM, step=dataclasses.replace(STEP, batch_size=batch)
  )
  assert PROBLEM.memory(c).total - one.memory(alone).total >= kept


@pytest.mark.parametrize("c", [
  Configuration(1, 4, 2, 2),
  Configuration(1, 4, 2, 2, scheme="zero1", **CODED),
  Configuration(1, 4, 2, 2, scheme="zero3"),
  Configuration(2, 2, 2, 4, scheme="zero3", **CODED),
  Configuration(
    1, 8, 1, 2, scheme="zero3", outer=OuterLoopConfig("diloco", 2, 30)
  ),
], ids=str)
def test_partitions_send_the_bytes_of_their_formula(c):
  """Uses the program's parameters; other tests check the formula."""
  program = _built(c).program
  theirs = zero_cost.level_collectives(
    program.layout.partition, program.cost_parameters,
    accumulation=c.microbatches,
  )
  ours = zero_cost.level_collectives(
    device_state.partition(c), device_state.parameters(c, MODEL),
    accumulation=c.microbatches,
  )
  assert _by_axis(ours) == _by_axis(theirs)
  assert sent_bytes_by_axis(c, STEP).data == sum(
    x.operand_bytes for x in theirs
  )


def _by_axis(found):
  """Returns operand bytes by axes, ranks and kind."""
  total = collections.Counter()
  for x in found:
    total[x.levels, x.ranks, x.kind, x.when, x.dtype] += x.operand_bytes
  return total


@pytest.mark.parametrize("name", cost.CODEC_BITS)
@pytest.mark.parametrize("elements", [1, 256, 1000])
def test_codes_have_the_bits_of_the_codec(name, elements):
  codec = Codec(name, cost.BLOCK_SIZE)
  _, codes, scales = OuterLoopConfig("diloco", 2, 2, name).collectives(
    [ParameterRows(3, elements)]
  )
  assert codes.operand_bytes == 3 * codec.payload_bytes(elements)
  assert scales.operand_bytes == 3 * 4 * codec.num_scales(elements)


def test_diloco_replaces_step_reductions_by_one_per_round():
  """All other terms are unchanged; the round ends with an all-reduce."""
  rate, latency_s, w, every = 1e9, 1e-5, 8, 10
  problem = dataclasses.replace(PROBLEM, links=_links(rate, latency_s))
  base = Configuration(1, w, 1, 1)
  c = dataclasses.replace(base, outer=OuterLoopConfig("diloco", w, every))
  found, before = problem.predict(c), problem.predict(base)
  size = 4 * MODEL.num_params
  exchange = (
    2 * (w - 1) / w * size / rate + 2 * (w - 1) * latency_s
    + (w - 1) * (4 / rate + latency_s)  # norms
  )
  assert found.outer * every == pytest.approx(exchange)
  assert (found.data, before.outer) == (0, 0)
  assert dataclasses.replace(found, outer=0.0, data=before.data) == before
  assert found.total < before.total


@pytest.mark.parametrize("rate", [1e6, 1e8, 1e12])
@pytest.mark.parametrize("loop", [
  OuterLoopConfig("diloco", 8, 12),
  OuterLoopConfig("streaming", 8, 12, "float32", "all_gather", 1),
  OuterLoopConfig("streaming", 8, 12, "float32", "all_gather", 1, 1),
], ids=str)
def test_round_time_is_consistent_with_the_utilisation_model(loop, rate):
  """At least the model's time, as less overlaps; DiLoCo: at most one step more.

  The utilisation model counts embedding and head as layers of equal size.
  """
  model = dataclasses.replace(MODEL, vocab_size=1, num_layers=4)
  problem = Problem(dataclasses.replace(STEP, model=model), _links(rate))
  c = Configuration(1, 8, 1, 1, outer=loop)
  found = problem.predict(c)
  step, layers = found.total - found.outer, model.num_layers
  fragments = layers if loop.fragment_layers else 1
  theirs = predictor.simulate(
    predictor.Model(
      model.num_params, layers, step * 3 * layers / (3 * layers - 1)
    ),
    predictor.SyncMethod(loop.sync_every, fragments, loop.overlap, 32),
    8 * rate, volume_factor=2 * 7 / 8,
  ).elapsed_s[0]
  ours = loop.sync_every * found.total
  assert theirs <= ours * (1 + 1e-3)  # gains are a separate fragment here
  if loop.algorithm == "diloco":
    assert ours <= theirs + step


def test_streaming_hides_transfers_up_to_the_compute_of_a_step():
  loop = OuterLoopConfig("streaming", 8, 12, "e3m0", "all_to_all", 1, 1)
  c = Configuration(1, 8, 1, 1, outer=loop)
  order = np.arange(8).reshape(c.grid)
  for rate in (1e7, 1e9, 1e12):
    problem = dataclasses.replace(PROBLEM, links=_links(rate))
    waits = outer.exchanges_s(c, MODEL, problem.links, order)
    assert len(waits) == MODEL.num_layers + 1
    found = problem.predict(c)
    over = sum(max(0, x - found.compute - found.again) for x in waits)
    assert found.outer == pytest.approx(over / 12)
  assert found.outer == 0
  bare = dataclasses.replace(c, outer=dataclasses.replace(loop, overlap=0))
  assert problem.predict(bare).outer == pytest.approx(sum(waits) / 12)


def _nodes(between):
  """Returns two nodes of four devices, with 1 TB/s within a node."""
  links = _links(1e12)
  rate = links.bandwidth.copy()
  rate[:4, 4:] = rate[4:, :4] = between
  return dataclasses.replace(
    PROBLEM, links=dataclasses.replace(links, bandwidth=rate)
  )


def test_ranks_of_a_worker_form_separate_rings():
  """On two nodes, gradients stay within a node, parameters cross nodes."""
  slow, fast = _nodes(1e6), _nodes(1e12)
  c = Configuration(1, 8, 1, 1, outer=OuterLoopConfig("diloco", 2, 30))
  found, even = slow.predict(c), fast.predict(c)
  assert found.data == even.data > 0
  assert found.outer == pytest.approx(1e6 * even.outer)
  whole = dataclasses.replace(c, outer=None)
  assert slow.predict(whole).data == pytest.approx(
    1e6 * fast.predict(whole).data
  )


CHOICES = Choices(
  ("1f1b", "zb_h1"), (1,), max_microbatches=4, offload=False
)


PLANNED = dataclasses.replace(PROBLEM, links=_links(1e9, 1e-6))


@functools.cache
def _planned():
  best = plan.plan(PLANNED, CHOICES, count=4, ordered=4).best
  return best, lossy_options.search(best, PLANNED, CHOICES, Changes(best=4))


def test_rows_are_faster_and_their_keys_build_a_run():
  """Keys of each kind build as a training run of those sizes."""
  best, found = _planned()
  assert {x.configuration.learned().split(",")[0] for x in found.rows} >= {
    "p = 0.5", "p = 0.25", "DiLoCo", "Streaming DiLoCo",
  }
  seconds = [x.latency.total for x in found.rows]
  assert seconds == sorted(seconds)
  kinds = {}
  for row in found.rows:
    c, base = row.configuration, best[row.base].configuration
    assert row.latency.total < best[row.base].latency.total
    assert c.grid == base.grid
    assert not base.learned()
    kinds[c.p < 1, c.outer and c.outer.algorithm, c.stages > 1] = c
  for c in kinds.values():
    layout = _built(c).program.layout
    assert layout.worker.size * layout.num_data_ranks == c.data
    assert layout.mesh.devices.size == 8
  assert any(c.stages > 1 for c in kinds.values())


def _whys(c, problem=PROBLEM, **changes):
  """Returns rows of one configuration, and each constraint's last reason."""
  base = plan.Candidate(
    c, problem.memory(c), problem.predict(c),
    np.arange(c.grid.size).reshape(c.grid), 0.0,
  )
  found = lossy_options.search([base], problem, CHOICES, Changes(**changes))
  return found.rows, {key: why for key, (_, why) in found.excluded.items()}


def test_changes_are_those_of_one_thing_at_a_time():
  """Each divisor of the data ranks is a number of workers."""
  changes = Changes(sync_every=4, zero_codecs=("int8/int4", "none/int8"))
  c = Configuration(2, 6, 1, 2)
  found = list(changes.of(c, num_layers=8))
  assert [what for what, _ in found] == [
    "p", "p", "outer", "outer", "codec", "codec"
  ]
  diloco, streaming = (
    [x.outer for x in some] for _, some in found[2:4]
  )
  assert diloco == [OuterLoopConfig("diloco", w, 4) for w in (2, 3, 6)]
  # Fragments of four layers, two of each stage; codes go through all-to-alls
  # with more than two workers.
  assert streaming == [
    OuterLoopConfig("streaming", w, 4, "e3m0", route, 4, 1)
    for w, route in ((2, "all_gather"), (3, "all_to_all"), (6, "all_to_all"))
  ]
  assert found[4][1] == [dataclasses.replace(
    c, scheme="zero1", weight_codec="int8", gradient_codec="int4"
  )]
  assert found[5][1] == [
    dataclasses.replace(c, scheme="zero1", gradient_codec="int8")
  ]
  sharded = dataclasses.replace(c, scheme="zero3", tensor=2)
  found = list(changes.of(sharded, num_layers=8))
  assert [some for _, some in found[:2]] == [
    [dataclasses.replace(sharded, p=p)] for p in (0.5, 0.25)
  ]
  assert [x.scheme for x in found[2][1]] == ["zero3", "zero3", "ddp"]
  assert found[4][1][0].scheme == "zero3"
  exact = Changes(outer=("streaming",), outer_codec="float32", overlap=3)
  (_, some), = [x for x in exact.of(c, 8) if x[0] == "outer"]
  assert {(x.outer.route, x.outer.overlap) for x in some} == {("all_gather", 3)}


def test_change_without_an_effect_has_a_reason():
  found = dict(Changes().of(Configuration(8, 1, 1, 2), 8))
  assert found == {
    "p": "tensor=1 rank shares no channels with others",
    "outer": "data=1 rank makes no two workers",
    "codec": "data=1 rank gathers and scatters nothing",
  }


def test_only_the_best_few_are_changed():
  best, _ = _planned()
  for count in (0, 1, 2):
    found = lossy_options.search(best, PLANNED, CHOICES, Changes(best=count))
    tried = len(found.rows) + sum(n for n, _ in found.excluded.values())
    assert tried >= 3 * count
    assert {x.base for x in found.rows} <= set(range(count))
    for row in found.rows:
      assert row.sent == sent_bytes_by_axis(row.configuration, STEP)
      assert row.base_sent == sent_bytes_by_axis(
        best[row.base].configuration, STEP
      )
      assert row.memory == PLANNED.memory(row.configuration)
      assert row.latency == PLANNED.predict(
        row.configuration, best[row.base].order
      )
  assert Changes().best == 3
  with pytest.raises(ValueError, match="best=-1 must be at least 0"):
    Changes(best=-1)


def test_axis_of_one_rank_sends_nothing():
  assert sent_bytes_by_axis(
    Configuration(8, 1, 1, 1), STEP
  ) == lossy_options.SentBytes(0, 0, 0)
  alone = sent_bytes_by_axis(Configuration(1, 8, 1, 1), STEP)
  assert alone == lossy_options.SentBytes(0, 4 * MODEL.num_params, 0)
  assert sent_bytes_by_axis(Configuration(1, 1, 2, 1), STEP).tensor > 0


@pytest.mark.parametrize("c", [
  Configuration(1, 4, 2, 1, outer=OuterLoopConfig("diloco", 4, 30)),
  Configuration(2, 4, 1, 1, outer=OuterLoopConfig("streaming", 4, 30, "int8",
                                       fragment_layers=2)),
  Configuration(2, 4, 1, 4, "interleaved_1f1b", 2, outer=OuterLoopConfig(
    "streaming", 4, 30, fragment_layers=4
  )),
  Configuration(1, 8, 1, 1, "1f1b", scheme="zero2", outer=OuterLoopConfig(
    "streaming", 2, 30, fragment_layers=1
  )),
], ids=str)
def test_fragments_hold_all_parameters_of_a_device(c):
  """The last fragment holds those outside all layers."""
  found = device_state.fragments(c, MODEL)
  layers = c.outer.fragment_layers
  assert len(found) == (MODEL.num_layers // layers + 1 if layers else 1)
  sizes = [sum(count * size for count, size in rows) for rows in found]
  gains = 2 * MODEL.num_layers * MODEL.width // c.stages
  matrices = MODEL.num_layers * sum(MODEL.matrices) // c.stages // c.tensor
  tables = 2 * MODEL.vocab_size * MODEL.width // c.stages // c.tensor
  shards = c.ranks if c.scheme != "ddp" else 1
  assert sum(sizes) == (gains + matrices + tables + MODEL.width) // shards
  if layers:
    assert sizes[-1] == (tables + MODEL.width) // shards
    assert len(set(sizes[:-1])) == 1


def test_excess_of_memory_and_time_are_stated():
  base = Configuration(1, 8, 1, 1)
  _, why = _whys(base, sync_every=1, overlap=0, outer=("diloco",))
  c = dataclasses.replace(base, outer=OuterLoopConfig("diloco", 8, 1))
  assert why["no gain"] == (
    f"{c} takes {PROBLEM.predict(c).total:.4g} s, "
    f"{PROBLEM.predict(base).total:.4g} s without DiLoCo, 8 workers, H = 1"
  )
  most = PROBLEM.memory(base).total
  device = dataclasses.replace(PROBLEM.links.device, memory_bytes=most)
  problem = dataclasses.replace(
    PROBLEM, links=dataclasses.replace(PROBLEM.links, device=device)
  )
  _, why = _whys(base, problem, outer=("diloco",), zero_codecs=(), p=())
  c = dataclasses.replace(base, outer=OuterLoopConfig("diloco", 8, 30))
  needs = problem.memory(c).total
  exact = dataclasses.replace(problem, links=dataclasses.replace(
    problem.links, device=dataclasses.replace(device, memory_bytes=needs)
  ))
  rows, _ = _whys(base, exact, outer=("diloco",), zero_codecs=(), p=())
  assert [x.configuration for x in rows] == [c]
  assert why["memory"] == (
    f"{c} does not fit: it needs {needs / 1e9:.1f} GB, "
    f"{(needs - most) / 1e9:.1f} GB more than a device has"
  )


def test_exchange_reuses_the_memory_of_activations():
  """Reuses it after all backwards; an overlapped exchange cannot."""
  c = Configuration(
    1, 8, 1, 1, outer=OuterLoopConfig("streaming", 8, 30, overlap=1)
  )
  found = device_state.fragments(c, MODEL)
  passing = c.outer.exchange_temp_bytes(found)
  # Operand and result; one norm sent, and all norms received.
  assert passing == 2 * 4 * MODEL.num_params + 4 + 8 * 4
  beside = PROBLEM.memory(c)
  assert beside.outer == c.outer.state_bytes(found) + passing
  after = dataclasses.replace(c, outer=OuterLoopConfig("diloco", 8, 30))
  room = beside.activations + beside.gathered + beside.logits + beside.kept
  for size in (0, passing / 2, 2 * passing):
    assert outer.memory_bytes(after, MODEL, size) == (
      after.outer.state_bytes(found) + max(0, passing - size)
    )
  assert room > 0.8 * passing
  assert PROBLEM.memory(after).outer == pytest.approx(
    after.outer.state_bytes(found) + max(0, passing - room)
  )


def test_workers_are_nodes_when_links_between_nodes_are_slow():
  """More workers would receive more bytes between nodes."""
  base = Configuration(1, 8, 1, 1)
  for between, workers in ((1e6, 2), (1e12, 8)):
    rows, _ = _whys(base, _nodes(between), p=(), zero_codecs=())
    found = {x.configuration.outer.algorithm: x for x in rows}
    assert found["diloco"].configuration.outer.workers == workers
    assert set(found) == {"diloco", "streaming"}


def test_constraints_are_named():
  assert set(_whys(Configuration(8, 1, 1, 4))[1]) == {"p", "outer", "codec"}
  kept = Configuration(2, 4, 1, 4, "zb_h1", keep="residuals")
  assert "need remat='none' and scheme='ddp'" in _whys(kept)[1]["keep"]
  # An exchange in each step costs more than the gradients' reduction.
  often = Configuration(1, 8, 1, 1)
  rows, why = _whys(often, sync_every=1, overlap=0, outer=("diloco",))
  assert "DiLoCo, 8 workers, H = 1 takes" in why["no gain"]
  assert all(row.configuration.outer is None for row in rows)
  small = dataclasses.replace(
    PROBLEM.links.device, memory_bytes=PROBLEM.memory(often).total + 1
  )
  problem = dataclasses.replace(
    PROBLEM, links=dataclasses.replace(PROBLEM.links, device=small)
  )
  assert "does not fit: it needs" in _whys(often, problem)[1]["memory"]


@pytest.mark.parametrize(("c", "message"), [
  (Configuration(
    2, 2, 2, 4, "zb_h1", keep="residuals", scheme="zero1", **CODED
  ), "needs config.zero.scheme='ddp'"),
  (Configuration(1, 4, 2, 1, **CODED), "weight_codec='int8' has no effect"),
  (Configuration(2, 2, 2, 4, outer=OuterLoopConfig(
    "streaming", 2, 30, "e3m0", "all_gather", 1, 1
  )), "a multiple of 2, the parts"),
  (Configuration(1, 2, 4, 1, outer=OuterLoopConfig(
    "streaming", 2, 4, "e3m0", "all_gather", 1, 1
  )), "less than the 5 fragments"),
], ids=str)
def test_runs_refuse_configurations_that_the_planner_excludes(c, message):
  with pytest.raises(ValueError, match=message):
    _built(c)
  if c.outer:
    parts = c.stages * c.chunks
    fewest = cost.min_fragment_layers(4, parts, c.outer.sync_every)
    assert fewest in (0, 2)
    layers = dataclasses.replace(c.outer, fragment_layers=fewest)
    _built(dataclasses.replace(c, outer=layers))


def test_stages_carry_no_reduction_into_the_next_stage():
  """Uses one_shot, which has kernels, as the keys of a plan state."""
  c = Configuration(2, 1, 2, 2, route="one_shot")
  assert space.violated_constraint(c, STEP, CHOICES) is None
  assert _built(c, "kernels=interpret").program.layout.stages is not None


@pytest.mark.parametrize(("changes", "message"), [
  ({"p": (1.0,)}, r"p=1 must lie in \[0, 1\)"),
  ({"p": (0.0, -0.1)}, r"p=-0.1 must lie in \[0, 1\)"),
  ({"outer": ("dilocco",)}, "did you mean diloco"),
  ({"outer_codec": "int3"}, "outer_codec='int3'"),
  ({"overlap": 30}, "overlap=30 must be less than sync_every=30"),
  ({"zero_codecs": ("int8",)}, "zero_codecs='int8' must be the codec of"),
  ({"zero_codecs": ("int8/e3m0",)}, "'e3m0' must be one of none"),
])
def test_invalid_changes_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    Changes(**changes)
