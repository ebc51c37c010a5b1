"""MSCCL XML: out and in again, files of others, and what is refused."""

import collections
import re
from xml.etree import ElementTree

import pytest

from parallel.schedules import builders, check, msccl
from parallel.schedules.schedule import Schedule, Transfer
from parallel.topology import builders as topologies

CASES = [
  (topologies.ring(5), "ring"),
  (topologies.torus((3, 3)), "multitree"),
  (topologies.torus((2, 4)), "bucket"),
  (topologies.switch(8), "halving_doubling"),
  (topologies.switch(6), "double_tree"),
  (topologies.bigraph(2, 4), "hdrm"),
]
each_schedule = pytest.mark.parametrize(
  ("net", "name", "collective"),
  [(*case, c) for case in CASES for c in builders.COLLECTIVES],
)


def transfers(schedule):
  """Of each round; their order in it means nothing."""
  return [sorted(t[:4] for t in r) for r in schedule.rounds]


@each_schedule
def test_round_trip(net, name, collective):
  schedule = builders.build(name, net, collective)
  text = msccl.export_xml(schedule)
  back = msccl.import_xml(text, net)
  check.check(back, net)
  if all(a <= b for a, b in zip(schedule.owners, schedule.owners[1:],
                                strict=False)):  # slices are in place
    assert transfers(back) == transfers(schedule)
    assert back.owners == schedule.owners
  assert msccl.export_xml(back) == text
  for field in ("name", "collective", "num_ranks", "num_chunks"):
    assert getattr(back, field) == getattr(schedule, field)


@each_schedule
def test_dependencies_alone_give_the_collective(net, name, collective):
  """Without our labels rounds follow from threadblocks and depid, deps."""
  schedule = builders.build(name, net, collective)
  text = re.sub(r' round="\d+"', "", msccl.export_xml(schedule))
  back = msccl.import_xml(text, net)
  check.check(back, net)
  assert sum(map(len, back.rounds)) == schedule.num_transfers
  broken = re.sub(r'depid="\d+" deps="\d+"', 'depid="-1" deps="-1"', text)
  if name == "multitree" and collective != "all_gather":
    with pytest.raises(ValueError, match="multitree"):
      check.check(msccl.import_xml(broken, net))


@each_schedule
def test_the_rules_of_a_threadblock(net, name, collective):
  """Steps are numbered; waits are for earlier, marked steps of others."""
  schedule = builders.build(name, net, collective)
  for gpu in ElementTree.fromstring(msccl.export_xml(schedule)).iter("gpu"):
    blocks = {b.get("id"): list(b) for b in gpu.iter("tb")}
    peers = collections.Counter(
      (b.get("send"), b.get("recv")) for b in gpu.iter("tb")
    )
    assert set(peers.values()) == {1}
    for number, steps in blocks.items():
      assert [int(s.get("s")) for s in steps] == list(range(len(steps)))
      for step in steps:
        if step.get("depid") == "-1":
          assert step.get("type") != "nop"
          continue
        assert step.get("depid") != number
        other = blocks[step.get("depid")][int(step.get("deps"))]
        assert other.get("hasdep") == "1"
        assert other.get("type") != "nop"


# Two ranks, fused steps and a local copy, as msccl-tools writes them.
FOREIGN = """
<algo name="pair" proto="LL" nchannels="1" nchunksperloop="4" ngpus="2"
      coll="allgather" inplace="0">
  <gpu id="0" i_chunks="2" o_chunks="4" s_chunks="0">
    <tb id="0" send="1" recv="-1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="2"
            depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="cpy" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0"
            cnt="2" depid="-1" deps="-1" hasdep="0"/>
    </tb>
    <tb id="1" send="-1" recv="1" chan="0">
      <step s="0" type="r" srcbuf="i" srcoff="0" dstbuf="o" dstoff="2" cnt="2"
            depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="2" o_chunks="4" s_chunks="0">
    <tb id="0" send="0" recv="0" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="o" dstoff="2" cnt="2"
            depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="r" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="2"
            depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
</algo>
"""


def fused(coll, first, second):
  """0 -> 1 -> 2 -> 1 -> 0, rank 1 receives and sends in one step."""
  step = ('<step s="{s}" type="{t}" srcbuf="i" srcoff="0" dstbuf="i" '
          'dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>')
  blocks = {
    0: [(1, -1, "s"), (-1, 1, "r")],
    1: [(2, 0, first), (0, 2, second)],
    2: [(-1, 1, "rrc"), (1, -1, "s")],
  }
  text = f'<algo nchunksperloop="1" ngpus="3" coll="{coll}">'
  for rank, rows in blocks.items():
    text += f'<gpu id="{rank}">'
    for number, (send, recv, kind) in enumerate(rows):
      line = step.format(s=0, t=kind)
      if (rank, number) == (2, 1):
        line = line.replace('depid="-1" deps="-1"', 'depid="0" deps="0"')
      text += (f'<tb id="{number}" send="{send}" recv="{recv}" chan="0">'
               f"{line}</tb>")
    text += "</gpu>"
  return text + "</algo>"


def test_files_of_others():
  pair = msccl.import_xml(FOREIGN)
  check.check(pair)
  assert transfers(pair) == [[
    (0, 1, 0, "copy"), (0, 1, 1, "copy"), (1, 0, 2, "copy"), (1, 0, 3, "copy")
  ]]
  chain = msccl.import_xml(fused("allreduce", "rrs", "rcs"))
  check.check(chain)
  assert transfers(chain) == [
    [(0, 1, 0, "reduce")], [(1, 2, 0, "reduce")], [(2, 1, 0, "copy")],
    [(1, 0, 0, "copy")],
  ]


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("<algo", "no XML"),
    ("<gpu/>", "must be <algo>"),
    (fused("alltoall", "rrs", "rcs"), "coll one of allreduce"),
    (fused("allreduce", "re", "rcs"), "type 're' is not read"),
    (fused("allreduce", "rrs", "r"), "rank 0 receives from rank 1"),
    (fused("allreduce", "rrs", "rcs").replace('srcbuf="i"', 'srcbuf="s"'),
     "buffer 's' is not read"),
    (FOREIGN.replace('dstoff="2" cnt="2"\n            depid', 'dstoff="1" '
                     'cnt="2" depid', 1), "stores them as"),
    (FOREIGN.replace('ngpus="2"', 'ngpus="two"'), "ngpus='two'"),
    (FOREIGN.replace('depid="-1" deps="-1"', 'depid="1" deps="0"', 1).replace(
      'dstoff="2" cnt="2"\n            depid="-1" deps="-1"',
      'dstoff="2" cnt="2"\n            depid="0" deps="1"', 1),
     "in a circle|^$"),
  ],
)
def test_wrong_files_are_named(text, message):
  with pytest.raises(ValueError, match=message):
    check.check(msccl.import_xml(text))


def test_more_steps_than_a_threadblock_takes():
  schedule = builders.build("ring", topologies.ring(150))
  with pytest.raises(ValueError, match="more than 256 steps with rank"):
    msccl.export_xml(schedule)


def test_a_write_waits_for_those_who_read():
  """Rank 0 sends its summand away before it is told the sum."""
  rounds = (
    (Transfer(0, 1, 0, "reduce", (0, 1)),),
    (Transfer(1, 0, 0, "copy", (1, 0)),),
  )
  schedule = Schedule("pair", "all_reduce", 2, 1, rounds)
  gpu = next(ElementTree.fromstring(msccl.export_xml(schedule)).iter("gpu"))
  blocks = {b.get("id"): b for b in gpu.iter("tb")}
  (receives,) = (b for b in blocks.values() if b.get("recv") == "1")
  (step,) = receives.iter("step")
  assert step.get("depid") in blocks
  awaited = blocks[step.get("depid")]
  assert (awaited.get("send"), step.get("deps")) == ("1", "0")
