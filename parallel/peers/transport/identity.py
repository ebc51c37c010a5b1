"""Key pair of a process, to which the ids of the process's peers are bound.

An id contains the fingerprint of a public key. In a handshake, both sides
compute the same secret from their own private key and the other's public key
(X25519, RFC 7748), and prove with it that they own the ids that they use. So a
peer with the group's token cannot use the id of another peer. A process creates
its key pair at first use and stores it nowhere.

Example:
  >>> from parallel.peers.transport.identity import Identity
  >>> a, b = Identity(), Identity()
  >>> a.shared(b.public) == b.shared(a.public)
  True
"""

import functools
import hashlib
import re

from cryptography.hazmat.primitives.asymmetric.x25519 import (
  X25519PrivateKey,
  X25519PublicKey,
)

PUBLIC_BYTES = 32
_FINGERPRINT_CHARS = 16  # 64 bits, so forging a fingerprint takes 2^64 tries
_OWNED_ID_PATTERN = re.compile(
  rf"[0-9a-f]{{12}}-[0-9a-f]{{4}}-([0-9a-f]{{{_FINGERPRINT_CHARS}}})-.*"
)


class Identity:
  """Key pair of a process.

  Attributes:
    public: Public key, 32 bytes.
    fingerprint: First 16 hex digits of the public key's SHA-256, as in ids.
  """

  def __init__(self) -> None:
    self._secret = X25519PrivateKey.generate()
    self.public = self._secret.public_key().public_bytes_raw()
    self.fingerprint = fingerprint(self.public)

  def shared(self, public: bytes) -> bytes:
    """Returns the 32-byte secret that only the owners of both keys can compute.

    Args:
      public: Public key of the other process; untrusted.

    Raises:
      ValueError: ``public`` is not a valid key.
    """
    try:  # the exchange refuses keys of small order
      return self._secret.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
      raise ValueError("the peer sent an invalid public key") from error


@functools.cache
def process_identity() -> Identity:
  """Returns the key pair of this process, which the first call creates."""
  return Identity()


def fingerprint(public: bytes) -> str:
  """Returns the first 16 hex digits of a public key's SHA-256."""
  return hashlib.sha256(public).hexdigest()[:_FINGERPRINT_CHARS]


def owner_fingerprint(name: str) -> str:
  """Returns the fingerprint in an id; "" if the id is bound to no key."""
  match = _OWNED_ID_PATTERN.fullmatch(name)
  return match[1] if match else ""
