"""Sums and gathers over sockets: order, bytes and failures."""

import itertools
import multiprocessing
import os
import random
import signal
import threading
import time

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.axes import Axis, make_mesh
from parallel.peers.ring import link_collectives
from parallel.peers.transport.frames import HEADER_BYTES
from parallel.peers.transport.links import LinkOptions
from parallel.peers.transport.transfers import LinksLost
from parallel.plans.schedules.builders import build
from parallel.plans.topology import builders as topologies
from parallel.schedules import run
from tests.parallel.peers import worlds
from tests.parallel.peers.worlds import (
  ORDERS,
  PATIENCE_S,
  arrays,
  connected,
  inside_sites,
  listeners,
  together,
  world,
)

BLOCK = 4096  # bytes; small arrays have many blocks
SITES = [(1,), (3,), (1, 1), (2, 2), (3, 1), (2, 4), (1, 1, 1), (2, 1, 3)]


def all_reduce(links, tag, xs, order, **options):
  operations = [
    link_collectives.all_reduce(
      x_links, tag, x, order=order, block_bytes=BLOCK, **options
    )
    for x_links, x in zip(links, xs, strict=True)
  ]
  return [operation.result(PATIENCE_S) for operation in operations]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_sums_follow_their_stated_order_bit_for_bit(count):
  with world(count, LinkOptions(num_connections=2, checked=True)) as links:
    for size in (0, 1, count - 1, 17, 4099, 30011):
      for tag, (order, stated) in enumerate(ORDERS.items()):
        xs = arrays(count, size)
        wanted = stated(xs).tobytes()
        for found in all_reduce(links, tag, xs, order):
          assert found.tobytes() == wanted, (size, order)


def test_tag_can_be_reused_at_once():
  """A peer that starts the next use does not disturb the current one."""
  def use(x):
    for number in range(100):
      sent = b"" if number % 2 else b"x" * number
      gathered = link_collectives.gather(x, 7, sent)
      gathered.result(PATIENCE_S)
    return len(gathered.result())

  with world(3) as links:
    assert together([lambda x=x: use(x) for x in links]) == [3, 3, 3]


def test_ring_adds_in_the_order_of_the_mesh_executor():
  count, size = 5, 1003
  xs = arrays(count, size)
  schedule = build("ring", topologies.ring(count))
  add = run.executor(schedule)
  mesh = make_mesh({"a": Axis("a", count, count)})
  on_mesh = jax.jit(jax.shard_map(
    lambda x: add(x[0], "a")[None], mesh=mesh, in_specs=P("a"),
    out_specs=P("a"),
  ))(np.stack(xs))
  with world(count) as links:
    found = all_reduce(links, 0, xs, "ring")
  assert found[0].tobytes() == np.asarray(on_mesh)[0].tobytes()
  # The order changes the sum; otherwise the comparison would show nothing.
  assert found[0].tobytes() != ORDERS["direct"](xs).tobytes()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [2, 5])
def test_sent_bytes_equal_the_formula_and_the_socket_counters(order, count):
  size = 20011
  with world(count) as links:
    all_reduce(links, 0, arrays(count, size), order)
    stated = [
      link_collectives.sum_sent_bytes(order, size, count, rank, BLOCK)
      for rank in range(count)
    ]
    for x, (payload, framing) in zip(links, stated, strict=True):
      sent, received = x.traffic.sent, x.traffic.received
      assert (sent.payload, sent.framing) == (payload, framing)
      assert x.received_bytes() == received.payload + received.framing
    # 2 (M - 1) / M of the array per peer, summed over all peers.
    assert sum(p for p, _ in stated) == 2 * (count - 1) * 4 * size


@pytest.mark.parametrize("sites", SITES, ids=str)
def test_sums_by_sites_follow_their_stated_order_bit_for_bit(sites):
  count = sum(sites)
  with world(count, LinkOptions(num_connections=2, checked=True)) as links:
    for tag, size in enumerate((0, 1, count - 1, 17, 4099, 30011)):
      xs = arrays(count, size)
      kept = [x.copy() for x in xs]
      wanted = inside_sites(xs, sites)
      for found in all_reduce(links, tag, xs, "sites", sites=sites):
        assert found.tobytes() == wanted.tobytes(), size
      assert np.array_equal(xs, kept)
      whole = [np.round(100 * x) for x in xs]  # integers: any order is exact
      for found in all_reduce(links, tag, whole, "sites", sites=sites):
        assert np.array_equal(found, ORDERS["direct"](whole))


@pytest.mark.parametrize("sites", SITES, ids=str)
def test_each_site_sends_its_sum_once_to_each_other_one(sites):
  size, count = 20011, sum(sites)
  ends = np.cumsum(sites).tolist()
  with world(count) as links:
    all_reduce(links, 0, arrays(count, size), "sites", sites=sites)
    for rank, x in enumerate(links):
      sent = x.traffic.sent
      assert (sent.payload, sent.framing) == link_collectives.sum_sent_bytes(
        "sites", size, count, rank, BLOCK, sites
      )
    names = [
      {f"p{i}" for i in range(end - n, end)}
      for n, end in zip(sites, ends, strict=True)
    ]
    chunk = -(-size // min(sites))
    blocks = sum(
      -(-4 * min(chunk, size - c * chunk) // BLOCK) for c in range(min(sites))
    )
    for a, b in itertools.permutations(names, 2):
      crossed = sum(x.received_bytes(a) for x in links if x.me in b)
      assert crossed == 4 * size + HEADER_BYTES * blocks


@pytest.mark.parametrize("sites", [(), (2,), (4, -1), (3, 0), (2, 2)], ids=str)
def test_sites_that_do_not_divide_the_ranks_are_refused(sites):
  with world(3) as links, pytest.raises(ValueError, match="whose sum is 3"):
    link_collectives.all_reduce(
      links[0], 0, np.zeros(4, np.float32), order="sites", sites=sites
    )


def test_peers_with_different_sites_are_reported():
  with world(3) as links:
    operations = [
      link_collectives.all_reduce(
        x, 0, np.zeros(40, np.float32), order="sites", sites=sites
      )
      for x, sites in zip(links, [(2, 1), (2, 1), (1, 2)], strict=True)
    ]
    for operation in operations:
      with pytest.raises(LinksLost, match="another operation"):
        operation.result(PATIENCE_S)


def test_contributors_may_be_a_subset_of_the_members():
  xs = arrays(4, 999)
  with world(4) as links:
    some = [links[i] for i in (3, 0, 2)]
    ranks = tuple(x.me for x in some)
    found = all_reduce(some, 0, [xs[3], xs[0], xs[2]], "direct", ranks=ranks)
  assert found[1].tobytes() == ORDERS["direct"](
    [xs[3], xs[0], xs[2]]
  ).tobytes()


def test_gather_returns_unequal_sizes_in_rank_order():
  pieces = [os.urandom(n) for n in (0, 1, 9000, 4096)]
  with world(4, LinkOptions(num_connections=2)) as links:
    operations = [
      link_collectives.gather(x, 0, piece, block_bytes=BLOCK)
      for x, piece in zip(links, pieces, strict=True)
    ]
    for operation in operations:
      assert [bytes(b) for b in operation.result(PATIENCE_S)] == pieces
    sent = [x.traffic.sent.payload for x in links]
  assert sent == [3 * len(piece) for piece in pieces]


def test_operations_complete_in_any_order_of_tags():
  count, tags = 4, 6
  xs = {tag: arrays(count, 5000 + tag) for tag in range(tags)}

  def peer(x, rank):
    order = random.Random(rank).sample(range(tags), tags)
    begun = {}
    for tag in order:
      # Each peer has another order; early operations end before late ones.
      begun[tag] = link_collectives.all_reduce(
        x, tag, xs[tag][rank], order=("ring", "direct")[tag % 2],
        block_bytes=BLOCK,
      )
      time.sleep(0.01)
    return {tag: begun[tag].result(PATIENCE_S) for tag in reversed(order)}

  with world(count) as links:
    found = together([
      lambda x=x, r=r: peer(x, r) for r, x in enumerate(links)
    ])
  for tag in range(tags):
    stated = ORDERS[("ring", "direct")[tag % 2]](xs[tag])
    assert all(f[tag].tobytes() == stated.tobytes() for f in found)


def test_operation_that_a_peer_has_not_begun_blocks_no_other():
  xs = arrays(2, 100000)
  with world(2) as links:
    first = link_collectives.all_reduce(links[0], 1, xs[0])
    found = all_reduce(links, 2, xs, "direct")
    assert not first.done()
    second = link_collectives.all_reduce(links[1], 1, xs[1])
    assert second.result(PATIENCE_S).tobytes() == first.result().tobytes()
    assert found[0].tobytes() == first.result().tobytes()


def test_mismatched_operations_are_reported():
  with world(2) as links:
    operations = [
      link_collectives.all_reduce(x, 0, np.zeros(10 + i, np.float32))
      for i, x in enumerate(links[:1])
    ]
    zeros = np.zeros(11, np.float32)
    with pytest.raises(LinksLost, match=r"differs from|operation 0"):
      link_collectives.all_reduce(links[1], 0, zeros).result(PATIENCE_S)
    with pytest.raises(LinksLost, match="operation 0"):
      operations[0].result(PATIENCE_S)


@pytest.mark.parametrize(
  ("order", "accident"),
  [("direct", signal.SIGKILL), ("ring", signal.SIGKILL),
   ("sites", signal.SIGKILL), ("ring", signal.SIGSTOP)],
)
def test_peer_failure_during_an_operation_reaches_all_members(order, accident):
  """A killed process breaks its connections; a stopped one is silent."""
  context = multiprocessing.get_context("forkserver")
  context.set_forkserver_preload(["tests.parallel.peers.worlds"])
  pipes, processes = [], []
  for i in range(3):
    here, there = context.Pipe()
    processes.append(context.Process(
      target=worlds.live, args=(f"p{i}", there, 300_000, order),
      daemon=True,
    ))
    processes[-1].start()
    pipes.append(here)
  try:
    members = {f"p{i}": pipe.recv() for i, pipe in enumerate(pipes)}
    for pipe in pipes:
      pipe.send(members)
    for pipe in pipes:
      assert pipe.recv() == "first"
    time.sleep(random.Random(accident).random() / 10)
    os.kill(processes[1].pid, accident)
    for pipe in (pipes[0], pipes[2]):
      assert pipe.poll(PATIENCE_S)
      assert pipe.recv() == ("p1", 0, True)
  finally:
    for process in processes:
      process.kill()
      process.join()


def test_leaving_peer_ends_all_operations_and_keeps_the_inputs():
  xs = arrays(3, 400_000)
  kept = [x.copy() for x in xs]
  with world(3) as links:
    operations = [
      link_collectives.all_reduce(x_links, tag, xs[i], order=order)
      for i, x_links in enumerate(links[:2])
      for tag, order in enumerate(ORDERS)
    ]
    wake = threading.Timer(0.1, links[2].close)
    wake.start()
    for operation in operations:
      with pytest.raises(
        LinksLost, match=f"operation {operation.tag}: peer p2"
      ):
        operation.result(PATIENCE_S)
    wake.join()
    with pytest.raises(LinksLost):
      link_collectives.all_reduce(links[0], 9, xs[0])
  assert all((a == b).all() for a, b in zip(xs, kept, strict=True))


def test_bytes_of_an_aborted_operation_are_counted_separately():
  xs = arrays(3, 50_000)
  with world(3) as links:
    all_reduce(links, 0, xs, "direct")
    done = links[0].traffic.sent.payload
    # Two of three begin: the bytes they exchange are sent in vain.
    operations = [
      link_collectives.all_reduce(x, 1, xs[0], block_bytes=BLOCK)
      for x in links[:2]
    ]
    with pytest.raises(LinksLost, match="peer p2: operation 1 has not ended"):
      operations[0].result(1)
    with pytest.raises(LinksLost):
      operations[1].result(PATIENCE_S)
    assert links[0].traffic.sent.payload == done
    aborted = links[0].traffic.aborted_sent.payload
    assert aborted == 4 * 16_667  # p1's chunk; p2's is never sent
    # The caller continues in a new epoch with fewer members.
    with listeners(2) as there:
      again = connected(there, epoch=2)
      assert all_reduce(again, 1, xs[:2], "ring")[0].size == 50_000
      for x in again:
        x.close()
