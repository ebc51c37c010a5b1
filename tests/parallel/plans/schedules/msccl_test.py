"""MSCCL XML: round trips, files of other tools, and refusals."""

import collections
import random
import re
from xml.etree import ElementTree

import pytest

from parallel.plans.schedules import builders, check
from parallel.plans.schedules.msccl import exporter
from parallel.plans.schedules.msccl.exporter import MAX_PEERS, export_xml
from parallel.plans.schedules.msccl.importer import import_xml
from parallel.plans.schedules.schedule import Schedule, Transfer
from parallel.plans.topology import builders as topologies

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
  """Returns the transfers per round, sorted, since their order is arbitrary."""
  return [sorted(t[:4] for t in r) for r in schedule.rounds]


@each_schedule
def test_round_trip(net, name, collective):
  schedule = builders.build(name, net, collective)
  text = export_xml(schedule)
  back = import_xml(text, net)
  check.check(back, net)
  if all(a <= b for a, b in zip(schedule.owners, schedule.owners[1:],
                                strict=False)):  # slices are in place
    assert transfers(back) == transfers(schedule)
    assert back.owners == schedule.owners
  assert export_xml(back) == text
  for field in ("name", "collective", "num_ranks", "num_chunks"):
    assert getattr(back, field) == getattr(schedule, field)


@each_schedule
def test_dependencies_alone_determine_the_collective(net, name, collective):
  """Without round labels, rounds follow from threadblocks, depid and deps."""
  schedule = builders.build(name, net, collective)
  text = re.sub(r' round="\d+"', "", export_xml(schedule))
  back = import_xml(text, net)
  check.check(back, net)
  assert sum(map(len, back.rounds)) == schedule.num_transfers
  broken = re.sub(r'depid="\d+" deps="\d+"', 'depid="-1" deps="-1"', text)
  if broken != text:
    with pytest.raises(ValueError, match=r"neither waits|holds nothing"):
      import_xml(broken, net)


def test_inconsistent_round_labels_are_corrected():
  """Labels are arbitrary; the proof applies to the steps and dependencies."""
  schedule = builders.build("multitree", topologies.torus((3, 3)))
  text = re.sub(r' round="\d+"', ' round="0"', export_xml(schedule))
  back = import_xml(text)
  check.check(back)
  assert 1 < len(back.rounds) <= len(schedule.rounds)


@each_schedule
def test_threadblocks_follow_the_rules_of_the_format(net, name, collective):
  """Steps are numbered; waits refer to earlier, marked steps of others."""
  schedule = builders.build(name, net, collective)
  for gpu in ElementTree.fromstring(export_xml(schedule)).iter("gpu"):
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


# Two ranks with local copies, as written by msccl-tools: out of place, so that
# the output is empty at first.
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
      <step s="2" type="cpy" srcbuf="i" srcoff="0" dstbuf="o" dstoff="2"
            cnt="2" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
</algo>
"""


def fused(coll, first, second):
  """0 -> 1 -> 2 -> 1 -> 0; rank 1 receives and sends in a single step."""
  step = ('<step s="{s}" type="{t}" srcbuf="i" srcoff="0" dstbuf="i" '
          'dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="1"/>')
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


def test_files_of_other_tools_are_read():
  pair = import_xml(FOREIGN)
  check.check(pair)
  assert transfers(pair) == [[
    (0, 1, 0, "copy"), (0, 1, 1, "copy"), (1, 0, 2, "copy"), (1, 0, 3, "copy")
  ]]
  for first in ("rrs", "rrcs"):  # whether rank 1 keeps the partial sum
    chain = import_xml(fused("allreduce", first, "rcs"))
    check.check(chain)
    assert chain.name == "msccl"
    assert chain.rounds[1][0].path == (1, 2)
    assert transfers(chain) == [
      [(0, 1, 0, "reduce")], [(1, 2, 0, "reduce")], [(2, 1, 0, "copy")],
      [(1, 0, 0, "copy")],
    ]


def algo(coll, chunks, gpus):
  """Writes a file: gpus -> threadblocks (send, recv, steps), one channel each.

  A step is (type, source, destination), with places such as "i3", optionally
  followed by the threadblock and step that it waits for.
  """
  text = (f'<algo name="text" coll="{coll}" ngpus="{len(gpus)}" inplace="1" '
          f'nchunksperloop="{chunks}">')
  for rank, blocks in enumerate(gpus):
    text += f'<gpu id="{rank}">'
    for number, (send, recv, steps) in enumerate(blocks):
      text += f'<tb id="{number}" send="{send}" recv="{recv}" chan="0">'
      for place, (kind, source, destination, *wait) in enumerate(steps):
        block, after = wait or (-1, -1)
        text += (
          f'<step s="{place}" type="{kind}" srcbuf="{source[0]}" '
          f'srcoff="{source[1:]}" dstbuf="{destination[0]}" '
          f'dstoff="{destination[1:]}" cnt="1" depid="{block}" '
          f'deps="{after}" hasdep="1"/>'
        )
      text += "</tb>"
    text += "</gpu>"
  return text + "</algo>"


def ring_gather(n):
  """Textbook ring: send the local chunk, forward n - 2, receive the last."""
  def chunk(rank):
    return [f"o{rank % n}"] * 2

  return algo("allgather", n, [
    [(
      (r + 1) % n, (r - 1) % n,
      [("s", *chunk(r)), *(("rcs", *chunk(r - k)) for k in range(1, n - 1)),
       ("r", *chunk(r + 1))],
    )]
    for r in range(n)
  ])


def swap(last="re"):
  """Swaps a chunk, which waits in scratch until it is added or copied."""
  return algo("allreduce", 1, [
    [(1 - r, 1 - r, [("s", "i0", "s0"), ("r", "s0", "s5"), (last, "s5", "i0")])]
    for r in range(2)
  ])


@pytest.mark.parametrize("n", [2, 5])
def test_ring_in_one_threadblock_is_not_a_deadlock(n):
  schedule = import_xml(ring_gather(n))
  check.check(schedule)
  assert transfers(schedule) == [
    sorted((r, (r + 1) % n, (r - k) % n, "copy") for r in range(n))
    for k in range(n - 1)
  ]


def test_reply_orders_the_steps_of_two_threadblocks():
  schedule = import_xml(algo("allreduce", 1, [
    [(1, -1, [("s", "i0", "i0")]), (-1, 1, [("r", "i0", "i0")])],
    [(0, 0, [("rrc", "i0", "i0"), ("s", "i0", "i0")])],
  ]))
  check.check(schedule)
  assert len(schedule.rounds) == 2


def test_chunk_in_scratch_is_received_when_it_is_added():
  schedule = import_xml(swap())
  check.check(schedule)
  assert transfers(schedule) == [[(0, 1, 0, "reduce"), (1, 0, 0, "reduce")]]


def test_sums_of_one_round_arrive_in_any_order():
  """All ranks receive all summands before any of them is added."""
  chunk = "i0", "s0"
  schedule = import_xml(algo("allreduce", 1, [
    [*((peer, peer, [("s", *chunk), ("r", "s0", f"s{peer}")])
       for peer in range(3) if peer != rank),
     (-1, -1, [("nop", *chunk, 0, 1), *(
       ("re", f"s{peer}", "i0", 1, 1) for peer in range(3) if peer != rank
     )])]
    for rank in range(3)
  ]))
  check.check(schedule)
  assert transfers(schedule) == [[
    (a, b, 0, "reduce") for a in range(3) for b in range(3) if a != b
  ]]


def all_pairs(n, sums):
  """All-reduce in two steps, as `allreduce_a100_allpairs_v2` of msccl-tools.

  Rank r sums chunk r: the chunks of the others arrive in scratch, where they
  are added to one another and finally to its own.

  Args:
    n: Number of ranks.
    sums: Function of a rank's places (own first) that returns pairs (from, to)
      of places to add.
  """
  gpus = []
  for rank in range(n):
    peers = [peer for peer in range(n) if peer != rank]
    pairs = sums([f"i{rank}", *(f"s{k}" for k in range(n - 1))])
    local = [
      *(("nop", "i0", "i0", k, 1) for k in range(n - 1)),
      *(("re", *pair) for pair in pairs),
    ]
    gpus.append([
      *((peer, peer, [
        ("s", f"i{peer}", "s0"), ("r", f"s{k}", f"s{k}"),
        ("s", f"i{rank}", f"i{rank}", n - 1, len(local) - 1),
        ("r", f"i{peer}", f"i{peer}"),
      ]) for k, peer in enumerate(peers)),
      (-1, -1, local),
    ])
  return algo("allreduce", n, gpus)


def halves(places):
  """Adds the second half of the places to the first, until one is left."""
  while len(places) > 1:
    half = len(places) // 2
    yield from zip(places[half:], places[:half], strict=True)
    places = places[:half]


def drawn(seed):
  """Adds two places at a time, drawn at random, and keeps the first."""
  rng = random.Random(seed)

  def pairs(places):
    left = [*places]
    while len(left) > 1:
      to, source = sorted(rng.sample(range(len(left)), 2))
      yield left.pop(source), left[to]

  return pairs


@pytest.mark.parametrize("sums", [halves, *map(drawn, range(4))])
def test_sums_in_scratch_are_received_when_they_are_added(sums):
  """Sums commute: the schedule does not depend on the order of local sums."""
  schedule = import_xml(all_pairs(8, sums))
  check.check(schedule)
  pairs = [(a, b) for a in range(8) for b in range(8) if a != b]
  assert transfers(schedule) == [
    [(a, b, b, "reduce") for a, b in pairs],
    [(a, b, a, "copy") for a, b in pairs],
  ]


def test_own_chunk_may_be_added_to_a_sum_in_scratch():
  """The sum is the rank's newest value, also before it is copied back."""
  text = all_pairs(3, lambda places: [("s1", "s0"), (places[0], "s0")])
  with pytest.raises(ValueError, match="output must end with the final value"):
    import_xml(text)
  # The last sum is stored in scratch and then copied to the chunk's place.
  text = re.sub(
    r'<step s="(\d)" (type="re" srcbuf="i" srcoff="(\d)".*?)'
    r'depid="-1" deps="-1" hasdep="1"/>',
    r'\g<0><step s="4" type="cpy" srcbuf="s" srcoff="0" dstbuf="i" '
    r'dstoff="\3" cnt="1" depid="-1" deps="-1" hasdep="1"/>', text,
  ).replace('deps="3"', 'deps="4"')
  schedule = import_xml(text)
  check.check(schedule)
  assert len(schedule.rounds) == 2


@pytest.mark.parametrize(("sums", "message"), [
  ([("s1", "s0"), ("s1", "s0"), ("s0", "i")], "would count twice"),
  ([("s1", "s0"), ("s0", "s0")], "would lose the summands of"),
  ([("s0", "i")], "would lose the summands of"),
])
def test_wrong_sums_in_scratch_are_refused(sums, message):
  def pairs(places):
    return [
      (a, places[0] if b == "i" else b) for a, b in sums
    ]

  with pytest.raises(ValueError, match=message):
    check.check(import_xml(all_pairs(3, pairs)))


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("<algo", "the text is not XML"),
    ('{"name": "allreduce"}', "not a JSON plan of MSCCL"),
    ("<gpu/>", "must be <algo>"),
    ('<system version="1"/>', "topologies of NCCL are not read"),
    (fused("alltoall", "rrs", "rcs"), "coll one of all_reduce, allreduce"),
    (fused("allreduce", "rs", "rcs"), "type 'rs' are not supported"),
    (fused("allreduce", "rrs", "r"), "rank 0 receives from rank 1"),
    (fused("allreduce", "rrs", "rcs").replace('srcbuf="i"', 'srcbuf="t"'),
     "buffer 't' is not supported"),
    (fused("allreduce", "rrs", "rcs").replace('hasdep="1"', 'hasdep="0"'),
     "does not signal its"),
    (FOREIGN.replace('dstoff="2" cnt="2"\n            depid', 'dstoff="1" '
                     'cnt="2" depid', 1), "both use place 1 of buffer 'o'"),
    (FOREIGN.replace('ngpus="2"', 'ngpus="two"'), "ngpus='two'"),
    (FOREIGN.replace('ngpus="2"', 'ngpus="999999999"'), "the program has 2"),
    (FOREIGN.replace('<algo', '<algo x="' + "y" * 9 + '"').replace(
      'nchunksperloop="4"', 'nchunksperloop="999999998"'), "from 1 to 32767"),
    (FOREIGN.replace("cpy", "nop", 1), "output must end with the final value"),
    (algo("allreduce", 2, [[], []]), "after 0 rounds chunk 0 at rank 0 lacks"),
    (algo("allgather", 2, [[], []]), "gpu 0: offset 1 of the output"),
    (algo("allgather", 2, [
      [(1, 1, [("r", "o1", "o1"), ("s", "o0", "o0")])],
      [(0, 0, [("r", "o0", "o0"), ("s", "o1", "o1")])],
    ]), "in a cycle: gpu"),
    (swap("cpy"), "would lose the summands of ranks"),
    (swap("s"), "sends 2 times"),
    (algo("reducescatter", 2, [[(1, -1, [("s", "o1", "o1")])], [
      (-1, 0, [("rrc", "i1", "i1")])
    ]]), "place 1 of buffer 'o', which does not exist"),
    (algo("allgather", 2, [
      [(1, 1, [("s", "o0", "o0"), ("r", "o0", "o0")])],
      [(0, 0, [("s", "o1", "o1"), ("r", "o0", "o0")])],
    ]), "chunk 1 in the place of chunk 0"),
    (ring_gather(2).replace('step s="0"', 'step s="1"', 1),
     "the steps of threadblock 0 must be numbered from 0"),
    (FOREIGN.replace('tb id="1"', 'tb id="0"'),
     "the ids of threadblocks must differ, and the steps"),
    (algo("allgather", 2, [
      [(1, 1, [("s", "o0", "o0", 5, 0), ("r", "o1", "o1")])],
      [(0, 0, [("s", "o1", "o1"), ("r", "o0", "o0")])],
    ]), "gpu 0, threadblock 0, step 0 waits for step 0 of threadblock 5, which "
     "does not exist"),
    (FOREIGN.replace('cnt="2"', 'cnt="1"', 1),
     "gpu 1, threadblock 0, step 1 receives 2 chunks, but gpu 0, "
     "threadblock 0, step 0 sends 1"),
    (algo("allreduce", 1, [
      [(1, -1, [("s", "i0", "i0")])],
      [(2, 0, [("r", "s0", "s0"), ("s", "s0", "i0")])],
      [(-1, 1, [("r", "i0", "i0")])],
    ]), "gpu 1, threadblock 0, step 1 forwards from scratch a chunk that was"),
    (algo("allreduce", 1, [
      [(1, -1, [("s", "i0", "i0")] * 2)],
      [(2, 0, [("r", "s0", "s0"), ("r", "s1", "s1"), ("re", "s1", "s0"),
               ("s", "s0", "i0")])],
      [(-1, 1, [("r", "i0", "i0")])],
    ]), "gpu 1, threadblock 0, step 3 forwards from scratch a chunk that was"),
    (algo("allreduce", 2, [
      [(1, -1, [("s", "i0", "s0"), ("s", "i1", "s1")])],
      [(-1, 0, [("r", "s0", "s0"), ("r", "s1", "s1"), ("re", "s1", "s0")])],
    ]), "gpu 1, threadblock 0, step 2 adds chunk 1 to chunk 0"),
    (algo("allreduce", 1, [[(-1, -1, [("re", "i0", "i0")])], []]),
     "step 0 adds two values of its own gpu"),
    (algo("allreduce", 1, [
      [(-1, 1, [("cpy", "i0", "s1"), ("rrc", "i0", "i0"), ("r", "s0", "s0"),
                ("re", "s0", "s1")])],
      [(0, -1, [("s", "i0", "i0")] * 2)],
    ]), "step 3 adds chunk 0 to a value that is not the newest of that chunk"),
    (algo("allreduce", 1, [
      [(1 - r, 1 - r, [("s", "i0", "s0"), ("r", "s0", "s5"),
                       ("re", "s5", "i1")])] for r in range(2)
    ]), "place 1 of buffer 'i', which does not exist"),
    (algo("allreduce", 1, [[(-1, -1, [("cpy", "i0", "i-1")])], []]),
     "place -1 of buffer 'i', which does not exist"),
    (algo("allreduce", 1, [[(-1, -1, [("cpy", "i0", "i1")])], []]),
     "place 1 of buffer 'i', which does not exist"),
    (algo("allreduce", 0, [[]]), "nchunksperloop=0 must be from 1 to 32767"),
    (algo("allgather", 3, [[], []]), "a multiple of ngpus=2 unless coll is"),
    ('<algo coll="allreduce" ngpus="0" nchunksperloop="1"/>', "program has 0"),
    (FOREIGN.replace('gpu id="1"', 'gpu id="2"'), "for each id from 0"),
    # The send and the receive of one place are concurrent.
    (algo("allreduce", 1, [
      [(1, -1, [("s", "i0", "i0")]), (-1, 1, [("rrc", "i0", "i0")])],
      [(0, -1, [("s", "i0", "i0")]), (-1, 0, [("rrc", "i0", "i0")])],
    ]), "both use place 0 of buffer 'i', and neither waits"),
    # The forwarded chunk arrives late, but no step has waited for it.
    (algo("allreduce", 1, [
      [(1, -1, [("s", "i0", "i0")]), (-1, 1, [("r", "i0", "i0", 0, 0)])],
      [(-1, 0, [("rrc", "i0", "i0")]),
       (0, -1, [*[("nop", "i0", "i0")] * 3, ("s", "i0", "i0")])],
    ]), "both use place 0 of buffer 'i', and neither waits"),
    # Rank 1 waits, before it receives a value of rank 0, for messages that rank
    # 0 sends after it has replaced this value.
    (algo("allreduce", 1, [
      [(1, -1, [("s", "i0", "i0")]),
       (2, 2, [("rrc", "i0", "i0", 0, 0), ("s", "i0", "i0")])],
      [(-1, 2, [("r", "i0", "i0")]), (-1, 0, [("rrc", "i0", "i0", 0, 0)])],
      [(0, 0, [("s", "i0", "i0"), ("r", "i0", "i0")]),
       (1, -1, [("s", "i0", "i0", 0, 1)])],
    ]), "no sequence of rounds gives the result of these steps"),
  ],
)
def test_invalid_files_are_refused(text, message):
  with pytest.raises(ValueError, match=message) as error:
    check.check(import_xml(text))
  assert "\n" not in str(error.value)


def star(ranks, chunks=1):
  """Sums all chunks at rank 0, and copies them back."""
  return Schedule("star", "all_reduce", ranks, chunks, tuple(
    tuple(
      Transfer(*ends[::way], chunk, operation, ends[::way])
      for ends in ((rank, 0) for rank in range(1, ranks))
      for chunk in range(chunks)
    )
    for way, operation in ((1, "reduce"), (-1, "copy"))
  ))


@pytest.mark.parametrize(("runtime", "steps", "blocks"), [
  ("nccl", 64, 1024), ("rccl", 64, 64), ("msccl", 256, 216),
])
def test_limits_are_those_of_the_loaders(runtime, steps, blocks):
  def refused(schedule, message):
    with pytest.raises(ValueError) as error:
      export_xml(schedule, runtime=runtime)
    assert str(error.value) == f"star: {message} that the runtime " + (
      f"{runtime!r} takes"
    )

  assert export_xml(star(2, steps), runtime=runtime)
  refused(star(2, steps + 1), (
    f"rank 0's {steps + 1} steps with rank 1 are more than the {steps}"
  ))
  if blocks < 256:
    assert export_xml(star(1 + blocks // 2), runtime=runtime)
  else:  # the last of 128 blocks that receive has number 127
    assert export_xml(star(129), runtime=runtime)
    refused(star(130), (
      "129 threadblocks of rank 0, of which one waits for the last, are more "
      "than the 127"
    ))
  refused(star(2 + blocks // 2), (
    f"rank 0's {blocks + 2} threadblocks are more than the {blocks}"
  ))
  if runtime == "msccl":
    assert export_xml(star(9, 254), runtime=runtime)
    refused(star(9, 255), "rank 0's 4106 elements are more than the 4095")


def test_channels_respect_the_peer_limit_of_the_runtime():
  schedule = builders.build("direct", topologies.switch(40), "all_gather")
  text = export_xml(schedule)
  root = ElementTree.fromstring(text)
  assert root.get("nchannels") == "2"
  for gpu in root.iter("gpu"):
    for side in ("send", "recv"):
      peers = collections.Counter(
        b.get("chan") for b in gpu.iter("tb") if b.get(side) != "-1"
      )
      assert sum(peers.values()) == 39
      assert max(peers.values()) <= MAX_PEERS == 32
  assert transfers(import_xml(text)) == transfers(schedule)


def test_file_states_its_message_sizes():
  """The loaders of two runtimes refuse files without them."""
  schedule = builders.build("ring", topologies.ring(3), "reduce_scatter")
  for runtime, name in (("nccl", "reducescatter"), ("msccl", "reduce_scatter")):
    text = export_xml(schedule, runtime=runtime, min_bytes=8, max_bytes=2**20)
    root = ElementTree.fromstring(text)
    assert (root.get("minBytes"), root.get("maxBytes")) == ("8", "1048576")
    assert root.get("coll") == name
    assert import_xml(text).collective == "reduce_scatter"
  assert int(ElementTree.fromstring(export_xml(schedule)).get("maxBytes")) > (
    2**40
  )


@pytest.mark.parametrize(("options", "message"), [
  ({"min_bytes": 9, "max_bytes": 8}, "min_bytes=9 and max_bytes=8 must be in"),
  ({"min_bytes": -1}, "min_bytes=-1 and"),
  ({"max_bytes": 2**63}, f"from 0 to {2**63 - 1}$"),
  ({"runtime": "nvls"}, "runtime='nvls' must be one of nccl, rccl, msccl"),
  ({"protocol": "ll"}, "protocol='ll' must be one of Simple, LL, LL128"),
])
def test_invalid_options_are_refused(options, message):
  schedule = builders.build("ring", topologies.ring(2))
  assert export_xml(schedule, min_bytes=0, max_bytes=0)
  with pytest.raises(ValueError, match=message):
    export_xml(schedule, **options)


def test_unproven_schedule_is_not_written():
  with pytest.raises(ValueError, match="lacks the summands"):
    export_xml(Schedule("empty", "all_reduce", 2, 1, ()))


def test_write_waits_for_earlier_reads():
  """Rank 0 sends its summand before the sum overwrites it."""
  rounds = (
    (Transfer(0, 1, 0, "reduce", (0, 1)),),
    (Transfer(1, 0, 0, "copy", (1, 0)),),
  )
  schedule = Schedule("pair", "all_reduce", 2, 1, rounds)
  gpu = next(ElementTree.fromstring(export_xml(schedule)).iter("gpu"))
  blocks = {b.get("id"): b for b in gpu.iter("tb")}
  (receives,) = (b for b in blocks.values() if b.get("recv") == "1")
  (step,) = receives.iter("step")
  assert step.get("depid") in blocks
  awaited = blocks[step.get("depid")]
  assert (awaited.get("send"), step.get("deps")) == ("1", "0")


def test_all_elements_that_a_loader_reads_are_counted(monkeypatch):
  """Counts all GPUs, and the threadblocks and steps of the loader's GPU."""
  schedule = builders.build("ring", topologies.ring(4))
  text = export_xml(schedule)
  own = max(len(list(g.iter())) - 1 for g in ElementTree.fromstring(text))
  count = 1 + 4 + own
  monkeypatch.setattr(exporter, "MAX_ELEMENTS", count + 1)
  assert export_xml(schedule) == text
  monkeypatch.setattr(exporter, "MAX_ELEMENTS", count)
  with pytest.raises(ValueError, match=f" {count} elements are more"):
    export_xml(schedule)


def test_awaited_threadblocks_have_small_numbers(monkeypatch):
  schedule = builders.build("ring", topologies.ring(4))
  text = export_xml(schedule)
  last = max(map(int, re.findall(r'depid="(\d+)"', text)))
  monkeypatch.setattr(exporter, "MAX_AWAITED", last)
  assert export_xml(schedule) == text
  monkeypatch.setattr(exporter, "MAX_AWAITED", last - 1)
  with pytest.raises(ValueError, match=f"{last + 1} threadblocks of rank 0"):
    export_xml(schedule)


def test_rounds_are_the_earliest_unless_all_steps_have_labels():
  late = Schedule("late", "all_gather", 2, 2, (
    (Transfer(0, 1, 0, "copy", (0, 1)),), (Transfer(1, 0, 1, "copy", (1, 0)),),
  ), (0, 1))
  text = export_xml(late)
  assert len(import_xml(text).rounds) == 2
  assert len(import_xml(text.replace(' round="0"', "")).rounds) == 1
