"""Key pair of a process, to which the ids of its peers are bound.

An id contains the fingerprint of a public key. In a handshake, both sides
compute the same secret from their own private key and the other's public key
(Diffie and Hellman, group 14 of RFC 3526), and prove with it that they own the
ids that they name. So a peer with the group's token cannot use the id of
another peer. A process creates its key pair at first use and stores it nowhere.

Example:
  >>> from parallel.elastic.transport.identity import Identity
  >>> a, b = Identity(), Identity()
  >>> a.shared(b.public) == b.shared(a.public)
  True
"""

import functools
import hashlib
import re
import secrets

# Safe prime 2^2048 - 2^1984 - 1 + 2^64 (floor(2^1918 pi) + 124476).
_PRIME = int(
  "ffffffffffffffffc90fdaa22168c234c4c6628b80dc1cd129024e088a67cc74"
  "020bbea63b139b22514a08798e3404ddef9519b3cd3a431b302b0a6df25f1437"
  "4fe1356d6d51c245e485b576625e7ec6f44c42e9a637ed6b0bff5cb6f406b7ed"
  "ee386bfb5a899fa5ae9f24117c4b1fe649286651ece45b3dc2007cb8a163bf05"
  "98da48361c55d39a69163fa8fd24cf5f83655d23dca3ad961c62f356208552bb"
  "9ed529077096966d670c354e4abc9804f1746c08ca18217c32905e462e36ce3b"
  "e39e772c180e86039b2783a2ec07a28fb5c55df06f4c52c9de2bcbf695581718"
  "3995497cea956ae515d2261898fa051015728e5a8aacaa68ffffffffffffffff",
  16,
)
_GENERATOR = 2
_SECRET_BITS = 256
PUBLIC_BYTES = 256
_FINGERPRINT_CHARS = 16  # 64 bits: another key with them costs 2^64 powers
_OWNED = re.compile(
  rf"[0-9a-f]{{12}}-[0-9a-f]{{4}}-([0-9a-f]{{{_FINGERPRINT_CHARS}}})-.*"
)


class Identity:
  """Private key, which other processes do not know, and its public key.

  Attributes:
    public: Public key.
    fingerprint: Hash of the public key, as in ids.
  """

  def __init__(self) -> None:
    self._secret = secrets.randbits(_SECRET_BITS)
    public = pow(_GENERATOR, self._secret, _PRIME)
    self.public = public.to_bytes(PUBLIC_BYTES, "big")
    self.fingerprint = fingerprint(self.public)

  def shared(self, public: bytes) -> bytes:
    """Returns the secret that only the owners of both keys can compute.

    Args:
      public: Public key of the other process; untrusted.

    Raises:
      ValueError: It is not a public key.
    """
    return _shared(self._secret, public)


@functools.cache
def own() -> Identity:
  """Returns the key pair of this process, which the first call creates."""
  return Identity()


@functools.lru_cache(1024)  # a power takes 3 ms
def _shared(secret: int, public: bytes) -> bytes:
  base = int.from_bytes(public, "big")
  if not 1 < base < _PRIME - 1:
    raise ValueError("an invalid public key")
  power = pow(base, secret, _PRIME).to_bytes(PUBLIC_BYTES, "big")
  return hashlib.sha256(power).digest()


def fingerprint(public: bytes) -> str:
  """Returns the fingerprint of a public key."""
  return hashlib.sha256(public).hexdigest()[:_FINGERPRINT_CHARS]


def owner(name: str) -> str:
  """Returns the fingerprint in an id; "" if the id is bound to no key."""
  match = _OWNED.fullmatch(name)
  return match[1] if match else ""
