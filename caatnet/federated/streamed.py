"""Times of rounds in which clients send fragments while they compute.

A model is cut into fragments of about equal size, and the compute of a round
into as many parts ("pieces"). At the end of a piece a client sends its update
of one fragment and continues. When the server has a fragment of all clients, it
sends the merged one, for which a client waits before it computes the same piece
of the next round. Workers of Streaming DiLoCo (arXiv 2501.18512)
exchange fragments in this way.

`rehearsal.rehearse_streamed` trains in this order. `launch.federate` does not
stream.
"""

from collections.abc import Sequence
import heapq
import itertools

from caatnet.federated import predict
from caatnet.federated.predict import MessageSizes
from caatnet.federated.simulate import Transfer
from parallel.plans.hardware.client_links import Link


def compute_merge_times_s(
  links: Sequence[Link], sizes: MessageSizes, piece_s: Sequence[float],
  fragments: int, rounds: int, fixed_s: float = 0.0, aggregation_s: float = 0.0,
) -> list[float]:
  """Returns the times at which fragments have arrived from all clients.

  Args:
    links: Link of each client.
    sizes: Bytes of a merged fragment, of an update of one, and of the model
      that each client receives first; without frames.
    piece_s: Seconds that each client computes per piece.
    fragments: Number of fragments, and of pieces of a round.
    rounds: Number of rounds.
    fixed_s: Time of a message before its first byte is sent.
    aggregation_s: Time from a fragment's last update to the merged fragment.

  Returns:
    Times in seconds since the model was sent, of all fragments of the first
    round, then of the second, and so on.

  Example:
    >>> from caatnet.federated import predict
    >>> from parallel.plans.hardware import client_links
    >>> ends = compute_merge_times_s(
    ...   client_links.assign_links(("ethernet",), 2),
    ...   predict.MessageSizes(1000, 1000, 4000), [1.0, 2.0],
    ...   fragments=2, rounds=2,
    ... )
    >>> [round(end) for end in ends]  # the slower client's pieces
    [2, 4, 6, 8]
  """
  network = predict.LinkNetwork(links, fixed_s)
  num, last = len(links), rounds * fragments
  computed, idle = [0] * num, [True] * num  # pieces; whether a client waits
  allowed = [0] * num  # pieces that a client may begin: it has the fragments
  there = [0] * last  # number of received updates of each fragment
  left = last  # fragments that are not merged
  ends = [0.0] * last
  counter = itertools.count()  # equal times in the order of their creation
  # (time, number, client, merged fragment that arrives at the client, or None
  # for the end of its piece).
  events: list[tuple[float, int, int, int | None]] = []

  def send(time: float, client: int, up: bool, piece: int, size: int) -> None:
    network.start(time, Transfer(client, up, piece), predict.framed(size))

  def begin(time: float, client: int) -> None:
    """Starts a client's next piece of compute, unless it lacks a fragment."""
    idle[client] = computed[client] >= min(allowed[client], last)
    if not idle[client]:
      heapq.heappush(
        events, (time + piece_s[client], next(counter), client, None)
      )

  for client in range(num):
    send(0.0, client, False, -1, sizes.model or fragments * sizes.down)
  while left:
    event_s = events[0][0] if events else float("inf")
    if event_s <= network.next_s():
      time, _, client, merged = heapq.heappop(events)
      if merged is not None:
        send(time, client, False, merged, sizes.down)
        continue
      send(time, client, True, computed[client], sizes.up)
      computed[client] += 1
      begin(time, client)
      continue
    time = network.next_s()
    for client, up, piece in network.advance(time):
      if up:
        there[piece] += 1
        if there[piece] == num:
          ends[piece], left = time, left - 1
          for other in range(num):
            heapq.heappush(
              events, (time + aggregation_s, next(counter), other, piece)
            )
      else:
        # The model allows the first round.
        allowed[client] = max(allowed[client], piece + 1 + fragments)
        if idle[client]:
          begin(time, client)
  return ends
