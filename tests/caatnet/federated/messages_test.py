"""Messages with vectors, over channels."""

import socket
import threading

import pytest

from caatnet.federated import messages
from parallel.peers.transport import frames
from parallel.peers.transport.channel import Channel

WORK = messages.Work(1, 2, None, (3, 2), 0.5, False)


def test_parts_are_joined_and_cut_into_vectors():
  assembler = messages.Assembler(10)
  found = [
    event for message in (
      messages.Resend(1), WORK, messages.Part(b"abc"),
      messages.Part(b"d"),
      messages.Abandon(2), messages.Part(b"e"),
      messages.Work(2, 2, 1, (), 0.5, True),
    )
    for event in assembler.take(message)
  ]
  assert [(type(x.message).__name__, x.vectors) for x in found] == [
    ("Resend", ()), ("Abandon", ()), ("Work", (b"abc", b"de")), ("Work", ()),
  ]


@pytest.mark.parametrize(
  ("sent", "error"),
  [
    ([messages.Part(b"a")], "before its message"),
    ([WORK, WORK], "before the last part"),
    ([WORK, messages.Part(b"abcdef")], "1 bytes too many"),
    ([messages.Work(1, 2, None, (8, 3), 0.5, False)], "at most 10 are"),
  ],
)
def test_invalid_sequence_is_an_error(sent, error):
  assembler = messages.Assembler(10)
  *valid, last = sent
  for message in valid:
    assert list(assembler.take(message)) == []
  with pytest.raises(frames.FrameError, match=error):
    list(assembler.take(last))


def test_only_a_model_that_has_left_is_overdue():
  assembler = messages.Assembler(10)
  assembler.expect_delivered(1)
  assert not assembler.is_unconfirmed(True, -1.0)
  for round in (0, 2):  # of other rounds
    assert assembler.is_unconfirmed(False, -1.0)
    list(assembler.take(messages.ModelReceived(round)))
  assert assembler.is_unconfirmed(True, -1.0)  # keep-alives are sent
  list(assembler.take(messages.ModelReceived(1)))
  assert not assembler.is_unconfirmed(False, -1.0)


def test_vectors_are_due_from_their_request_to_their_last_part():
  assembler = messages.Assembler(10)
  states = [assembler.is_stalled(-1.0)]
  assembler.expect()
  assert not assembler.is_stalled(60.0)
  for message in (
    messages.Abandon(1), WORK, messages.Part(b"abc"), messages.Resend(1),
    messages.Part(b"de"), messages.Abandon(1),
  ):
    states.append(assembler.is_stalled(-1.0))
    list(assembler.take(message))
  states.append(assembler.is_stalled(-1.0))
  assert states == [False, *[True] * 5, False, False]


def test_bytes_are_encoded():
  part = messages.Part(bytes(range(256)))
  data = frames.encode(part)
  assert frames.decode(data, messages.FROM_CLIENT) == part
  with pytest.raises(frames.FrameError, match="truncated"):
    frames.decode(data[:-1], messages.FROM_CLIENT)


def test_both_sides_send_more_than_sockets_buffer():
  """Neither side waits for the other one to receive."""
  data = bytes(8 << 20)
  done, channels = [threading.Event() for _ in "ab"], []
  ends = socket.socketpair()
  for end, event in zip(ends, done, strict=True):
    channel = Channel(
      end, messages.FROM_SERVER, 3.0,
      max_waiting=messages.max_queue_length(len(data)),
    )
    assembler = messages.Assembler(len(data))

    def take(message, assembler=assembler, event=event):
      for received in assembler.take(message):
        assert received.vectors == (data,)
        event.set()

    def run(channel=channel, take=take):
      with pytest.raises(OSError, match="closed"):
        channel.run(take)

    messages.send(
      channel, messages.Work(0, 0, None, (len(data),), 0.0, False), (data,)
    )
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    channels.append((channel, thread))
  assert all(event.wait(20.0) for event in done)
  for channel, _ in channels:
    channel.close("done")
  for (channel, thread), end in zip(channels, ends, strict=True):
    thread.join(5.0)
    end.close()
    # Headers of 40 bytes, and names and lengths of messages.
    assert 0 < channel.sent_bytes - len(data) < 128 * 60
    assert 0 < channel.received_bytes - len(data) < 128 * 60
