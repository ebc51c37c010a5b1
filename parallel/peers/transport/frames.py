"""Frames on a socket, and the binary encoding of protocol messages.

A frame is a header of 40 bytes and a payload. The header carries its own
CRC-32, so a corrupted length is detected: TCP's checksum of 16 bits lets about
one corrupted segment in 65,536 pass. The payload's CRC-32 is optional
(measured: `zlib.crc32` takes 108 ms of one core for 256 MB; the addition of 256
MB of float32 takes 45 ms).

Received bytes are untrusted. Every length is compared with a limit before
memory is allocated, and all invalid input raises `FrameError`.

Example:
  >>> from parallel.peers.membership import messages as m
  >>> from parallel.peers.transport import frames
  >>> data = frames.encode(m.Ready(epoch=1, round=7))
  >>> len(data)  # a name and two integers of 8 bytes
  23
  >>> frames.decode(data, frames.PEER_MESSAGES)
  Ready(epoch=1, round=7)
"""

from collections.abc import Callable, Hashable, Sequence
import enum
import math
import re
import socket
import struct
import types
import typing
from typing import Any, NamedTuple
import zlib

from parallel.peers.membership import messages as m

MAGIC = b"ELF1"
# Magic, kind, flags, padding, tag, slot, offset, length, CRC of the payload.
_FIELDS = struct.Struct("!4sBBxxQIQII")
_CRC = struct.Struct("!I")  # CRC-32 of the fields
HEADER_BYTES = _FIELDS.size + _CRC.size
_CHECKED = 1  # flag: the header contains the payload's CRC-32
# Maximum number of members of an epoch and of items of a tuple in a message.
MAX_ITEMS = 1024
ID_PATTERN = re.compile(r"[0-9A-Za-z_.:-]{1,84}")
_DIGEST = re.compile(r"(?:[0-9a-f]{2}){0,64}")
_TEXT = re.compile(r"[ -~]{0,400}")  # printable: it is shown on terminals
_INT = struct.Struct("!Q")
_FLOAT = struct.Struct("!d")
_SHORT = struct.Struct("!H")
_LENGTH = struct.Struct("!I")  # length of a bytes value


def to_printable(text: str) -> str:
  """Replaces control and non-ASCII characters of an untrusted text by "?"."""
  return re.sub(r"[^ -~]", "?", text)


class FrameError(ValueError):
  """Received bytes are not a valid frame or message, or exceed a limit."""


class Kind(enum.IntEnum):
  """Kind of a frame's payload.

  MESSAGE: a message of `parallel.peers.membership.messages`. KEEP_ALIVE:
  empty. OPEN: digest of the `OperationSpec` of an operation that the sender
  starts. ABORT: reason for which the sender leaves an epoch. DATA: block of an
  operation. ASK: request for shared state. MANIFEST, CHUNK: data in response.
  GONE: response of a holder that does not have the requested revision.
  """

  MESSAGE = 1
  KEEP_ALIVE = 2
  OPEN = 3
  ABORT = 4
  DATA = 5
  ASK = 6
  MANIFEST = 7
  CHUNK = 8
  GONE = 9


# Maximum payload of each kind in bytes.
MAX_PAYLOAD_BYTES = {
  Kind.MESSAGE: 1 << 18,
  Kind.KEEP_ALIVE: 0,
  Kind.OPEN: 32,
  Kind.ABORT: 1024,
  Kind.DATA: 1 << 23,
  Kind.ASK: 256,
  Kind.MANIFEST: 1 << 26,
  Kind.CHUNK: 1 << 22,
  Kind.GONE: 0,
}


class Header(NamedTuple):
  """Header of a frame.

  Attributes:
    kind: Kind of the payload.
    length: Length of the payload in bytes.
    tag: Number of the operation that the payload belongs to.
    slot: Number of a buffer of the operation, e.g. the buffer of a chunk.
    offset: Offset within the slot in bytes.
    crc: CRC-32 of the payload; None if the sender computed none.
  """

  kind: Kind
  length: int = 0
  tag: int = 0
  slot: int = 0
  offset: int = 0
  crc: int | None = None

  def pack(self) -> bytes:
    """Returns the header as ``HEADER_BYTES`` bytes."""
    fields = _FIELDS.pack(
      MAGIC, self.kind, 0 if self.crc is None else _CHECKED, self.tag,
      self.slot, self.offset, self.length, self.crc or 0,
    )
    return fields + _CRC.pack(zlib.crc32(fields))


def unpack(data: Any) -> Header:
  """Returns the header that `Header.pack` has converted to bytes.

  Args:
    data: ``HEADER_BYTES`` bytes.

  Raises:
    FrameError: The bytes are not a header, or announce too long a payload.
  """
  if len(data) != HEADER_BYTES:
    raise FrameError(
      f"a header has {len(data)} bytes; it must have {HEADER_BYTES}"
    )
  view = memoryview(data)
  magic, kind, flags, tag, slot, offset, length, crc = _FIELDS.unpack_from(view)
  if magic != MAGIC:
    raise FrameError(
      f"a frame begins with {magic!r}; it must begin with {MAGIC!r}"
    )
  if _CRC.unpack_from(view, _FIELDS.size)[0] != zlib.crc32(
    view[: _FIELDS.size]
  ):
    raise FrameError("the checksum of a header is wrong")
  # The checksum is valid, so the sender has another version or is hostile.
  if kind not in MAX_PAYLOAD_BYTES or flags & ~_CHECKED:
    raise FrameError(
      f"a frame has the unknown kind {kind} or unknown flags {flags}"
    )
  if length > MAX_PAYLOAD_BYTES[kind]:
    raise FrameError(
      f"a frame of kind {Kind(kind).name} announces {length:,} bytes; the "
      f"limit is {MAX_PAYLOAD_BYTES[kind]:,}"
    )
  return Header(
    Kind(kind), length, tag, slot, offset, crc if flags & _CHECKED else None
  )


def check(header: Header, payload: Any) -> None:
  """Verifies a payload against its header's checksum, if there is one.

  Raises:
    FrameError: The checksum differs.
  """
  if header.crc is not None and header.crc != zlib.crc32(payload):
    raise FrameError(
      f"the checksum of the {header.kind.name} frame of {header.length:,} "
      "bytes is wrong"
    )


def send(
  sock: socket.socket, header: Header, payload: Any = b"", *,
  checked: bool = False,
) -> int:
  """Sends one frame without copying its payload; returns its size in bytes.

  Args:
    sock: Plain or TLS socket.
    header: Header of the frame; length and checksum are filled in.
    payload: Contiguous buffer.
    checked: Whether to compute the payload's checksum.

  Raises:
    OSError: The connection is broken.
  """
  view = memoryview(payload).cast("B")
  # This covers the payload only; the header has its own checksum.
  crc = zlib.crc32(view) if checked else None
  head = header._replace(length=len(view), crc=crc).pack()
  total = len(head) + len(view)
  if not hasattr(sock, "context"):  # TLS sockets have no sendmsg
    # One system call sends both in most cases, but it may send only a part.
    sent = sock.sendmsg([head, view])
    if sent == total:
      return total
    if sent >= len(head):  # the header is sent completely
      head, view = b"", view[sent - len(head):]
    else:
      head = head[sent:]
  if head:
    sock.sendall(head)
  if view:
    sock.sendall(view)
  return total


def read_into(sock: socket.socket, view: memoryview) -> None:
  """Receives until a buffer is full.

  Raises:
    ConnectionError: The other side has closed the connection.
  """
  # Without TLS and without a timeout, a single call fills the whole buffer.
  flags = 0 if hasattr(sock, "context") else socket.MSG_WAITALL
  while view:
    got = sock.recv_into(view, 0, flags)
    if not got:
      raise ConnectionResetError("the connection was closed")
    view = view[got:]


def read_header(sock: socket.socket) -> Header:
  """Receives the header of the next frame.

  Raises:
    FrameError: The received bytes are not a header.
    ConnectionError: The other side has closed the connection.
  """
  head = bytearray(HEADER_BYTES)
  read_into(sock, memoryview(head))
  return unpack(head)


def read(
  sock: socket.socket, kinds: Sequence[Kind]
) -> tuple[Header, bytearray]:
  """Receives a frame.

  Args:
    sock: Connected socket.
    kinds: Accepted kinds of frames.

  Returns:
    (header, payload).

  Raises:
    FrameError: The received bytes are not a frame of an accepted kind.
    ConnectionError: The other side has closed the connection.
  """
  header = read_header(sock)
  if header.kind not in kinds:
    raise FrameError(f"a frame of kind {header.kind.name} is not expected here")
  # Memory is allocated as data arrives, since the length is not trusted.
  payload = bytearray()
  while len(payload) < header.length:
    # 256 KiB at a time.
    piece = bytearray(min(header.length - len(payload), 1 << 18))
    read_into(sock, memoryview(piece))
    payload += piece
  check(header, payload)
  return header, payload


# Messages that a coordinator accepts from peers, and that peers accept from it.
PEER_MESSAGES = (
  m.Hello, m.Prepared, m.Unreachable, m.Ready, m.Vote, m.Leave, m.Report,
  m.Checked,
)
COORDINATOR_MESSAGES = (
  m.Welcome, m.Waiting, m.Stop, m.Check, m.Prepare, m.Go, m.Start
)


def encode(message: Any) -> bytes:
  """Returns a message as bytes.

  Args:
    message: Instance of a named tuple whose fields are annotated as
      non-negative integers, finite floats, ids, digests, texts, bytes, other
      such classes, or tuples of these; None where the annotation allows it.

  Raises:
    FrameError: A field does not match its annotation.
  """
  # A message starts with the name of its class.
  kind = type(message)
  out: list[bytes] = []
  _write_text(kind.__name__, out)
  _coder(kind)[0](message, out)
  data = b"".join(out)
  if len(data) > MAX_PAYLOAD_BYTES[Kind.MESSAGE]:
    raise FrameError(
      f"the message {kind.__name__} has {len(data):,} bytes; at most "
      f"{MAX_PAYLOAD_BYTES[Kind.MESSAGE]:,} are allowed"
    )
  return data


def decode(data: Any, kinds: Sequence[type]) -> Any:
  """Returns the message that `encode` has converted to bytes.

  Args:
    data: Encoded message, untrusted.
    kinds: Accepted classes.

  Raises:
    FrameError: The data is not a message of these classes.
  """
  if len(data) > MAX_PAYLOAD_BYTES[Kind.MESSAGE]:
    raise FrameError(
      f"a message has {len(data):,} bytes; at most "
      f"{MAX_PAYLOAD_BYTES[Kind.MESSAGE]:,} "
      "are allowed"
    )
  reader = _Reader(bytes(data))
  name = reader.text()
  kind = next((k for k in kinds if k.__name__ == name), None)
  if kind is None:
    raise FrameError(f"a message {name[:32]!r} is not expected here")
  message = _coder(kind)[1](reader)
  # Each message has exactly one encoding.
  if reader.place != len(data):
    raise FrameError(
      f"the message {name} has {len(data) - reader.place} bytes after its end"
    )
  return message


class _Reader:
  """Cursor over the bytes of a message."""

  def __init__(self, data: bytes) -> None:
    self._data, self.place = data, 0

  def take(self, count: int) -> bytes:
    """Returns the next ``count`` bytes."""
    end = self.place + count
    if end > len(self._data):
      raise FrameError("a message is truncated")
    found, self.place = self._data[self.place:end], end
    return found

  def number(self, form: struct.Struct) -> Any:
    """Returns the next number, whose encoding is ``form``."""
    return form.unpack(self.take(form.size))[0]

  def text(self) -> str:
    """Returns the next text, which must be ASCII."""
    raw = self.take(self.number(_SHORT))
    if not raw.isascii():
      raise FrameError("a text in a message must be ASCII")
    return raw.decode("ascii")


# (writer, reader) of the values of one type: a writer appends bytes to a list.
_Coder = tuple[Callable[[Any, list[bytes]], None], Callable[[_Reader], Any]]
_CODERS: dict[Any, _Coder] = {}


def _write_text(text: str, out: list[bytes]) -> None:
  raw = text.encode("ascii")
  out.append(_SHORT.pack(len(raw)) + raw)


def _write_bytes(data: bytes, out: list[bytes]) -> None:
  out += [_LENGTH.pack(len(data)), data]


def _coder(hint: Any) -> _Coder:
  """Returns (writer, reader) of the values of the type annotation ``hint``.

  The result is cached.
  """
  if hint not in _CODERS:
    _CODERS[hint] = _build_coder(hint)
  return _CODERS[hint]


def _build_coder(hint: Any) -> _Coder:
  """Builds (writer, reader) of the values of the type annotation ``hint``."""
  args = typing.get_args(hint)
  if hint is int:
    # `type(v) is int` excludes bools.
    return _number_coder(lambda v: type(v) is int and 0 <= v < 2**63, _INT)
  if hint is bool:
    return _number_coder(lambda v: v in (0, 1), struct.Struct("!?"))
  if hint is float:
    return _number_coder(
      lambda v: type(v) is float and math.isfinite(v), _FLOAT
    )
  if hint is Any:  # `messages.Id`
    return _text_coder(ID_PATTERN, "id")
  if hint is Hashable:  # `messages.Digest`
    return _text_coder(_DIGEST, "digest")
  if hint is str:
    return _text_coder(_TEXT, "text")
  if hint is bytes:
    return _write_bytes, lambda reader: reader.take(reader.number(_LENGTH))
  if typing.get_origin(hint) in (typing.Union, types.UnionType):
    # `X | None`: the only kind of union in messages.
    (inner,) = (a for a in args if a is not types.NoneType)
    return _optional_coder(_coder(inner))
  if typing.get_origin(hint) is tuple:
    assert args[1:] == (Ellipsis,), hint
    return _tuple_coder(_coder(args[0]))
  # A nested named tuple, such as Vote in Hello.
  return _named_tuple_coder(hint)


def _number_coder(valid: Callable[[Any], bool], form: struct.Struct) -> _Coder:
  """Builds (writer, reader) of a number in the encoding ``form``.

  Both check by ``valid`` that it is in range.
  """
  def checked(value: Any) -> Any:
    if not valid(value):
      raise FrameError(f"the number {value!r} is out of the range of its field")
    return value

  return (
    lambda value, out: out.append(form.pack(checked(value))),
    lambda reader: checked(reader.number(form)),
  )


def _text_coder(pattern: re.Pattern, what: str) -> _Coder:
  """Builds (writer, reader) of a text; both compare it with a pattern.

  ``what`` names it in error messages.
  """
  def checked(text: Any) -> str:
    if not isinstance(text, str) or not pattern.fullmatch(text):
      raise FrameError(
        f"{str(text)[:80]!r} is not a valid {what}; it must match "
        f"{pattern.pattern}"
      )
    return text

  return (
    lambda value, out: _write_text(checked(value), out),
    lambda reader: checked(reader.text()),
  )


def _optional_coder(inner: _Coder) -> _Coder:
  """Builds (writer, reader) of a value or None: byte 0 or 1, and the value."""
  def write(value: Any, out: list[bytes]) -> None:
    out.append(b"\0" if value is None else b"\1")
    if value is not None:
      inner[0](value, out)

  def read_(reader: _Reader) -> Any:
    there = reader.take(1)
    if there not in (b"\0", b"\1"):
      raise FrameError(
        f"the flag of an optional value is {there!r}; it must be 0 or 1"
      )
    return inner[1](reader) if there == b"\1" else None

  return write, read_


def _tuple_coder(inner: _Coder) -> _Coder:
  """Builds (writer, reader) of a tuple: number of items, then the items."""
  def write(values: Any, out: list[bytes]) -> None:
    if not isinstance(values, tuple) or len(values) > MAX_ITEMS:
      raise FrameError(
        f"the field must be a tuple of at most {MAX_ITEMS} items, got "
        f"{values!r:.80}"
      )
    out.append(_SHORT.pack(len(values)))
    for value in values:
      inner[0](value, out)

  def read_(reader: _Reader) -> Any:
    count = reader.number(_SHORT)
    if count > MAX_ITEMS:
      raise FrameError(
        f"a tuple has {count} items; at most {MAX_ITEMS} are allowed"
      )
    return tuple(inner[1](reader) for _ in range(count))

  return write, read_


def _named_tuple_coder(kind: type) -> _Coder:
  """Builds (writer, reader) of a named tuple: its fields in order."""
  fields = [
    (name, _coder(hint)) for name, hint in typing.get_type_hints(kind).items()
  ]

  def write(value: Any, out: list[bytes]) -> None:
    if type(value) is not kind:
      raise FrameError(
        f"the field must be of type {kind.__name__}, got {value!r:.80}"
      )
    for name, coder in fields:
      coder[0](getattr(value, name), out)

  return write, lambda reader: kind(*(c[1](reader) for _, c in fields))
