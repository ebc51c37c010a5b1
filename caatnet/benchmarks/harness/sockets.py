"""Plain TCP connections between all peers of a benchmark."""

from collections.abc import Mapping
import socket

from parallel.peers.transport.frames import read_into

LIMIT_S = 300.0  # of a peer that does not answer
_NAME_BYTES = 16


def connect_all(
  me: str, server: socket.socket, addresses: Mapping[str, tuple[str, int]],
  send_buffer: int = 0,
) -> tuple[dict[str, socket.socket], dict[str, socket.socket]]:
  """Connects to all other peers, which call this at the same time.

  Args:
    me: Name of this peer, at most 16 bytes.
    server: Socket that listens at its address.
    addresses: Address of each peer by its name.
    send_buffer: Bytes of the kernel's send buffers; 0 lets the kernel choose.

  Returns:
    Connections for sending and connections for receiving, by the others' names.
  """
  others = [name for name in addresses if name != me]
  outward, inward = {}, {}
  for name in others:
    outward[name] = socket.create_connection(addresses[name], LIMIT_S)
    # Connections are accepted in any order, so each starts with a name.
    outward[name].sendall(me.encode().ljust(_NAME_BYTES))
  for _ in others:
    sock, _ = server.accept()
    name = bytearray(_NAME_BYTES)
    read_into(sock, memoryview(name))
    inward[name.decode().strip()] = sock
  for sock in (*outward.values(), *inward.values()):
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages
    if send_buffer:
      sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
  return outward, inward
