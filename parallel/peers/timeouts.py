"""Timeout of a peer that waits for admission; errors that end a peer."""

from collections.abc import Callable
import time

from parallel.peers.membership.messages import Waiting
from parallel.peers.settings import PeerSettings


class PeerHalted(RuntimeError):
  """Error: the peer has ended and cannot continue by itself."""


class StoppedByCoordinator(PeerHalted):
  """Error: the coordinator has ended the peer."""


class RunFinished(RuntimeError):
  """Error: the peer connected after the last round of the run."""


class AdmissionTimeout:
  """Timeout after which a peer that waits for admission gives up."""

  def __init__(
    self, settings: PeerSettings, say: Callable[[str], None]
  ) -> None:
    """Starts without a deadline.

    Args:
      settings: Settings of the peer; `rounds` and `alone_s` are read.
      say: Callback that receives the coordinator's status when it changes.
    """
    self._settings, self._say, self._text = settings, say, ""
    self._lost_since: float | None = None

  def update(self, message: Waiting) -> Exception | None:
    """Processes a status; returns an error if the peer must end, else None."""
    rounds, now = self._settings.rounds, time.monotonic()
    # All rounds are committed: admission would never come.
    if 0 < rounds <= message.revision:
      return RunFinished(
        f"the swarm has completed all {rounds} rounds; this peer connected "
        "after the last one"
      )
    # Report each status once.
    if message.text != self._text:
      self._text = message.text
      self._say(f"the coordinator {message.text}")
    if not message.lost:
      self._lost_since = None
      return None
    # No connected peer holds the newest revision: the swarm cannot continue.
    self._lost_since = self._lost_since or now
    # A holder may still reconnect.
    if now - self._lost_since <= self._settings.alone_s:
      return None
    return PeerHalted(
      f"for {self._settings.alone_s:g} s no peer has connected that holds "
      f"revision {message.revision}; this peer's state is kept. A new journal "
      "starts a new run from the peers' checkpoints"
    )
