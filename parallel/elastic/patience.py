"""When a peer that waits for its admission gives up."""

from collections.abc import Callable
import time

from parallel.elastic.membership.messages import Waiting
from parallel.elastic.settings import Settings


class Halted(RuntimeError):
  """The peer has ended: as it is, it must not go on."""


class Finished(RuntimeError):
  """The peer has come after the last round, which others have made."""


class Patience:
  """Listens to what the coordinator waits for, as long as that may come."""

  def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
    """Waits for nothing yet.

    Args:
      settings: Of the peer: `rounds` and `alone_s` are of interest.
      say: Takes what is waited for, in words, when that is something else.
    """
    self._settings, self._say, self._text = settings, say, ""
    self._lost_since: float | None = None

  def hear(self, message: Waiting) -> Exception | None:
    """Takes a message; returns with which error the peer ends, if it does."""
    rounds, now = self._settings.rounds, time.monotonic()
    if 0 < rounds <= message.revision:
      return Finished(
        f"the swarm has made all {rounds} rounds; this peer has come too late "
        "for the last one"
      )
    if message.text != self._text:
      self._text = message.text
      self._say(f"the coordinator {message.text}")
    if not message.lost:
      self._lost_since = None
      return None
    self._lost_since = self._lost_since or now
    if now - self._lost_since <= self._settings.alone_s:
      return None
    return Halted(
      f"for {self._settings.alone_s:g} s nobody has come who has revision "
      f"{message.revision}; what this peer has is kept. With a new journal a "
      "new run begins from the peers' checkpoints"
    )
